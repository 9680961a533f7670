use construct_proto::{
    mesh::v1::{ChatMessage, ModelTarget},
    v1::{
        self, CodeInterpreterCall, CodeInterpreterResult, MessageSource, ModelProviderType,
        block::Block,
    },
};
use construct_tests::vendor::{VendorServer, openai as recorded};
use futures::TryStreamExt as _;

use super::*;
use crate::{
    answer::{Answer, CompletedAnswer},
    call::tests::{SharedVendor, command},
    tests::open,
};

const TEST_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);

/// The text and the script arguments of text that arrives in `pieces`.
fn read<'a>(pieces: impl IntoIterator<Item = &'a str>) -> (String, Option<String>) {
    let mut reader = FenceReader::new("code_interpreter", "code");
    let mut chunks = VecDeque::new();
    for piece in pieces {
        reader.push(piece, &mut chunks);
    }
    reader.finish(&mut chunks);
    let (mut text, mut script) = (String::new(), None);
    for chunk in chunks {
        match chunk {
            Chunk::Text(more) => text.push_str(&more),
            Chunk::Call { .. } => script = Some(String::new()),
            Chunk::Arguments { json, .. } => script.as_mut().expect("a call began").push_str(&json),
            other => panic!("not expected: {other:?}"),
        }
    }
    let script = script.map(|json| {
        let json: serde_json::Value = serde_json::from_str(&json).expect("whole arguments");
        json["code"].as_str().expect("a script").to_owned()
    });
    (text, script)
}

#[test]
fn script_is_found_the_same_at_every_split() {
    for (answer, text, script) in [
        ("Let me look.\n\n```construct\nprint(1)\n```", "Let me look.\n\n", Some("print(1)\n")),
        ("```construct\nprint('ä\"😀')\n```\n\nIt printed 3.", "", Some("print('ä\"😀')\n")),
        ("  ```` construct \nf(`\n```\n`)\n````\n", "", Some("f(`\n```\n`)\n")),
        (
            "```js\n```construct\n1\n```\nNo script.",
            "```js\n```construct\n1\n```\nNo script.",
            None,
        ),
        ("Use `x` and ``construct``.\n`", "Use `x` and ``construct``.\n`", None),
        ("```construct it\n1\n```\nx", "```construct it\n1\n```\nx", None),
        ("```construct\n1", "", Some("1")),
        ("```construct", "", Some("")),
        ("", "", None),
        ("```construct\n1\n```\n```construct\n2\n```", "", Some("1\n")),
    ] {
        let expected = (text.to_owned(), script.map(str::to_owned));
        for at in (0..=answer.len()).filter(|at| answer.is_char_boundary(*at)) {
            let (left, right) = answer.split_at(at);
            assert_eq!(read([left, right]), expected, "{answer:?} split at {at}");
        }
        let single: Vec<String> = answer.chars().map(String::from).collect();
        assert_eq!(read(single.iter().map(String::as_str)), expected, "{answer:?}");
    }
}

#[test]
fn text_is_emitted_before_its_line_ends() {
    let mut reader = FenceReader::new("code_interpreter", "code");
    let mut chunks = VecDeque::new();
    reader.push("Let me", &mut chunks);
    assert_eq!(chunks, [Chunk::Text("Let me".into())]);
    reader.push(" ```construct", &mut chunks);
    assert_eq!(chunks.len(), 2, "within a line nothing opens");
    let long = "`".repeat(MAX_FENCE_LINE_LEN + 1);
    reader.push("\n", &mut chunks);
    reader.push(&long, &mut chunks);
    assert_eq!(chunks.back(), Some(&Chunk::Text(long)));
}

async fn ask(server: &VendorServer, stop: &str, text: &str) -> CompletedAnswer {
    server.reply(recorded::Answer::text(text).stopping(stop).reply());
    let mut command = command("go");
    command.model =
        Some(ModelTarget { tool_calling: Some(false), ..command.model.unwrap_or_default() });
    let message = |source: MessageSource, block: Block| ChatMessage {
        source: source.into(),
        blocks: vec![v1::Block { block: Some(block) }],
    };
    let call = CodeInterpreterCall { id: "a".into(), code: "print(7)".into() };
    let result = CodeInterpreterResult {
        id: "a".into(),
        output: "7".into(),
        ..CodeInterpreterResult::default()
    };
    command.messages.push(message(MessageSource::Assistant, Block::CodeInterpreterCall(call)));
    command.messages.push(message(MessageSource::System, Block::CodeInterpreterResult(result)));
    let request = Request::from_command(&command).expect("whole");
    let vendor = wrap(
        Box::new(SharedVendor(open(ModelProviderType::Openai, &server.url(), TEST_TIMEOUT))),
        &request,
    );
    let mut answer = Answer::new(&request);
    let chunks: Vec<Chunk> =
        vendor.invoke(Arc::new(request)).try_collect().await.expect("an answer");
    for chunk in chunks {
        answer.push(chunk).expect("in bounds");
    }
    answer.complete()
}

#[tokio::test]
async fn model_without_tools_uses_fenced_blocks() {
    let server = VendorServer::start().await;
    let completed =
        ask(&server, "stop", "I look.\n```construct\nprint(8)\n```\n<result>9</result>").await;
    assert_eq!(completed.stop_reason, StopReason::ToolUse);
    let [text, call] = &completed.blocks[..] else { panic!("not two blocks: {completed:?}") };
    assert!(matches!(&text.block, Some(Block::Text(text)) if text.text == "I look.\n"), "{text:?}");
    assert!(
        matches!(&call.block, Some(Block::CodeInterpreterCall(call)) if call.code == "print(8)\n"),
        "{call:?}"
    );

    let body = server.requests().remove(0).body;
    assert_eq!(body.get("tools"), None);
    let system = body["messages"][0]["content"].as_str().expect("a system prompt");
    assert!(
        system.starts_with("You work through scripts.") && system.contains("```construct"),
        "{system}"
    );
    assert_eq!(body["messages"][2]["content"], "```construct\nprint(7)\n```");
    assert_eq!(body["messages"][3]["content"], "<result>\n7\n</result>");
}

#[tokio::test]
async fn native_tool_calls_pass_through() {
    let mut command = command("go");
    command.model =
        Some(ModelTarget { tool_calling: Some(false), ..command.model.unwrap_or_default() });
    let request = Request::from_command(&command).expect("whole");
    let script = r#"[{"text": "I look.", "code": "1"}]"#;
    let scripted =
        crate::scripted::Scripted::parse(script, "p".into(), Arc::default()).expect("a script");
    let vendor = wrap(Box::new(scripted), &request);
    let chunks: Vec<Chunk> =
        vendor.invoke(Arc::new(request)).try_collect().await.expect("an answer");
    assert!(chunks.contains(&Chunk::Text("I look.".into())), "{chunks:?}");
    assert!(chunks.iter().any(|chunk| matches!(chunk, Chunk::Call { .. })), "{chunks:?}");
}

#[tokio::test]
async fn truncated_script_does_not_run() {
    let server = VendorServer::start().await;
    let completed = ask(&server, "length", "```construct\ndelete_everything(").await;
    assert_eq!(completed.stop_reason, StopReason::MaxTokens);
    assert_eq!(completed.blocks, []);
}

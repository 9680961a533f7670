use construct_proto::{
    mesh::v1::ChatMessage,
    v1::{
        self, CodeInterpreterCall, CodeInterpreterResult, MessageSource, ModelParameters,
        ModelProviderType, Text,
    },
};
use construct_tests::vendor::{VendorServer, anthropic as recorded};
use futures::TryStreamExt as _;
use v1::block::Block as Piece;

use super::*;
use crate::{
    answer::Answer,
    call::tests::{NO_DELAY_POLICY, command, run},
    cancels::CancelSignal,
    delta::tests::RecordingProgress,
    tests::{completed, open, read_at_every_split},
};

const TEST_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);

fn read<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<Vec<Chunk>, Failure> {
    crate::tests::read::<Wire>(pieces)
}

fn message(source: MessageSource, blocks: Vec<Piece>) -> ChatMessage {
    let blocks = blocks.into_iter().map(|block| v1::Block { block: Some(block) }).collect();
    ChatMessage { source: source.into(), blocks }
}

fn text(text: &str) -> Piece {
    Piece::Text(Text { text: text.into() })
}

/// A user's message, a script, its result, and so on, `rounds` times.
fn conversation(rounds: usize) -> Request {
    let mut request =
        Request::from_command(&command("count the lines")).expect("the command is whole");
    for round in 0..rounds {
        let call =
            CodeInterpreterCall { id: format!("toolu_{round}"), code: format!("f({round})") };
        let result = CodeInterpreterResult {
            id: format!("toolu_{round}"),
            output: "7".into(),
            ..Default::default()
        };
        request.messages.push(message(
            MessageSource::Assistant,
            vec![text("Looking."), Piece::CodeInterpreterCall(call)],
        ));
        request
            .messages
            .push(message(MessageSource::System, vec![Piece::CodeInterpreterResult(result)]));
    }
    request
}

#[test]
fn recorded_tool_use_parses_the_same_at_every_split() {
    let bytes = recorded::RECORDED_TOOL_USE.as_bytes();
    let whole = read_at_every_split::<Wire>(bytes);
    let named = Chunk::Named {
        id: "msg_014p7gG3wDgGV9EUtLvnow3U".into(),
        model: "claude-opus-4-1-20250805".into(),
    };
    let first = Chunk::Usage(Usage { input_tokens: 472, output_tokens: 2, ..Usage::default() });
    assert_eq!(whole[..2], [named, first]);
    assert_eq!(whole.last(), Some(&Chunk::Stop(StopReason::ToolUse)));
    let arguments: String = whole
        .iter()
        .filter_map(|chunk| {
            if let Chunk::Arguments { json, .. } = chunk { Some(json.as_str()) } else { None }
        })
        .collect();
    assert_eq!(arguments, r#"{"location": "San Francisco, CA"}"#);
}

#[test]
fn thinking_is_kept_and_unknown_blocks_are_skipped() {
    let chunks = read_at_every_split::<Wire>(recorded::RECORDED_THINKING.as_bytes());
    let usage = Usage {
        input_tokens: 21,
        output_tokens: 132,
        cache_read_tokens: 5_000,
        cache_write_tokens: 1_200,
        ..Usage::default()
    };
    let first = Usage { output_tokens: 3, ..usage };
    assert_eq!(
        chunks,
        [
            Chunk::Named {
                id: "msg_01WCzyzMY1Jm2wRBKnXBnmT6".into(),
                model: "claude-sonnet-4-5".into()
            },
            Chunk::Usage(first),
            Chunk::Thinking("I have to find the greatest common divisor.".into()),
            Chunk::ThinkingData(
                json!({"signature": "EqQBCgIYAhIM1gbcDa9GJwZA2b3hGgxBdjrkzLoky3dl1pkiMOYds"})
                    .to_string()
            ),
            Chunk::Text("It is **21**.".into()),
            Chunk::Usage(usage),
            Chunk::Stop(StopReason::EndTurn)
        ]
    );
}

#[test]
fn stream_without_end_is_a_transient_failure() {
    let wire = recorded::Answer::text("abc").wire();
    let whole = wire.find("event: message_delta").expect("the end");
    for at in [0, 10, whole / 2, whole] {
        assert_eq!(
            read([&wire.as_bytes()[..at]]).map_err(|failure| failure.class),
            Err(FailureClass::Transient),
            "{at}"
        );
    }
    let stop = wire.find("event: message_stop").expect("the last event");
    assert!(read([&wire.as_bytes()[..stop]]).is_ok(), "with the stop reason the answer is whole");
}

#[test]
fn error_within_the_stream_is_classified() {
    for (kind, class) in [
        ("overloaded_error", FailureClass::Overloaded),
        ("api_error", FailureClass::Transient),
        ("rate_limit_error", FailureClass::RateLimited),
        ("something_new", FailureClass::Transient),
    ] {
        let wire = recorded::Answer::text("abc").wire();
        let at = wire.find("event: content_block_stop").expect("a block");
        let wire = format!("{}{}", &wire[..at], recorded::error_event(kind, "Overloaded"));
        assert_eq!(read([wire.as_bytes()]).map_err(|failure| failure.class), Err(class), "{kind}");
    }
}

#[test]
fn every_stop_reason_is_mapped() {
    for (reason, expected) in [
        ("end_turn", StopReason::EndTurn),
        ("tool_use", StopReason::ToolUse),
        ("max_tokens", StopReason::MaxTokens),
        ("stop_sequence", StopReason::StopSequence),
        ("refusal", StopReason::Refused),
        ("pause_turn", StopReason::EndTurn),
        ("model_context_window_exceeded", StopReason::MaxTokens),
    ] {
        let chunks =
            read([recorded::Answer::text("x").stopping(reason).wire().as_bytes()]).expect("whole");
        assert_eq!(chunks.last(), Some(&Chunk::Stop(expected)), "{reason}");
    }
}

#[tokio::test]
async fn request_has_the_vendor_format() {
    let server = VendorServer::start().await;
    server.reply(recorded::Answer::text("x").reply());
    let vendor = open(ModelProviderType::Anthropic, &server.url(), TEST_TIMEOUT);
    let mut request = conversation(1);
    request.parameters = ModelParameters {
        temperature: Some(1.5),
        top_p: Some(0.5),
        top_k: Some(40),
        stop_sequences: vec!["END".into()],
        ..ModelParameters::default()
    };
    vendor.invoke(Arc::new(request)).try_collect::<Vec<_>>().await.expect("an answer");

    let sent = server.requests().remove(0);
    assert_eq!(sent.path, "/v1/messages");
    assert_eq!(sent.header("x-api-key"), "sk-test-12345");
    assert_eq!(sent.header("anthropic-version"), "2023-06-01");
    assert_eq!(sent.header("content-type"), "application/json");
    let ephemeral = json!({"type": "ephemeral"});
    assert_eq!(
        sent.body,
        json!({
            "model": "test-model", "max_tokens": 4096, "stream": true,
            "system": [{"type": "text", "text": "You work through scripts.", "cache_control": ephemeral}],
            "tools": [{"name": "code_interpreter", "description": "Runs JavaScript.",
                "input_schema": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
                "cache_control": ephemeral}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "count the lines", "cache_control": ephemeral}]},
                {"role": "assistant", "content": [
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "toolu_0", "name": "code_interpreter", "input": {"code": "f(0)"}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_0", "content": "7", "cache_control": ephemeral}]},
            ],
            "temperature": 1.0, "top_p": 0.5, "top_k": 40, "stop_sequences": ["END"],
        })
    );
}

#[test]
fn at_most_four_cache_breakpoints_are_set_at_the_end() {
    for rounds in [0, 1, 2, 7] {
        let request = conversation(rounds);
        let body = serde_json::to_value(Body::new(&request)).expect("JSON").to_string();
        assert_eq!(
            body.matches("cache_control").count(),
            2 + (rounds + 1).min(2),
            "{rounds} rounds"
        );
        assert!(body[body.len() - 120..].contains("cache_control"), "the last turn is marked");
    }
}

#[test]
fn error_result_is_marked() {
    let part = Part::Result {
        id: "a".into(),
        name: "code_interpreter".into(),
        output: "Error: no".into(),
        failed: true,
    };
    assert_eq!(
        block(&part),
        json!({"type": "tool_result", "tool_use_id": "a", "content": "Error: no", "is_error": true})
    );
}

#[tokio::test]
async fn text_and_scripts_become_blocks_with_usage() {
    let server = VendorServer::start().await;
    let code = "const n = read_file(\"a\\tb\").length;\nprint(`${n} ä😀`)";
    server.reply(
        recorded::Answer::text("Let me see.")
            .and_code("toolu_1", code)
            .using(25, 5_000, 1_200, 90)
            .reply(),
    );
    let vendor = open(ModelProviderType::Anthropic, &server.url(), TEST_TIMEOUT);
    let kept = RecordingProgress::default();
    let (outcome, usage) = run(&vendor, NO_DELAY_POLICY, &CancelSignal::default(), &kept).await;
    let completed = completed(outcome);
    assert_eq!(completed.stop_reason, StopReason::ToolUse);
    let blocks: Vec<Option<Piece>> =
        completed.blocks.into_iter().map(|block| block.block).collect();
    let call = CodeInterpreterCall { id: "toolu_1".into(), code: code.into() };
    assert_eq!(blocks, [Some(text("Let me see.")), Some(Piece::CodeInterpreterCall(call))]);
    assert_eq!(kept.text(), format!("Let me see.{code}"));
    assert_eq!(
        usage,
        Usage {
            input_tokens: 25,
            output_tokens: 90,
            cache_read_tokens: 5_000,
            cache_write_tokens: 1_200,
            ..Usage::default()
        }
    );
}

#[test]
fn complete_tool_input_in_block_start_is_read() {
    let wire = recorded::Answer::empty().and_code("toolu_1", "1").wire();
    let wire = wire.replace(
        r#""name":"code_interpreter","input":{}"#,
        r#""name":"code_interpreter","input":{"code":"2"}"#,
    );
    let deltas = wire.find("event: content_block_delta").expect("deltas");
    let stop = wire.find("event: content_block_stop").expect("their end");
    let chunks = read([&wire.as_bytes()[..deltas], &wire.as_bytes()[stop..]]).expect("whole");
    let mut answer = Answer::new(&conversation(0));
    for chunk in chunks {
        answer.push(chunk).expect("in bounds");
    }
    assert!(
        matches!(&answer.complete().blocks[0].block, Some(Piece::CodeInterpreterCall(call)) if call.code == "2")
    );
}

#[test]
fn unexpected_content_type_is_explained() {
    let failure = Wire::default().response_failure(200, b"{\"type\":\"message\"}");
    assert!(failure.message.contains("without a stream"), "{}", failure.message);
    let empty = Wire::default()
        .response_failure(500, br#"{"type":"error","error":{"type":"api_error","message":""}}"#);
    assert_eq!((empty.class, empty.message.as_str()), (FailureClass::Transient, "api_error"));
}

#[test]
fn redacted_thinking_is_replayed_unchanged() {
    let wire = recorded::Answer::empty()
        .and_redacted("EmwKAhgBEgy3va3pzix")
        .and_code("toolu_1", "1")
        .wire();
    let chunks = read_at_every_split::<Wire>(wire.as_bytes());
    let data = json!({"redacted": "EmwKAhgBEgy3va3pzix"}).to_string();
    assert!(chunks.contains(&Chunk::ThinkingData(data.clone())), "{chunks:?}");
    let part = Part::Thinking { text: String::new(), data };
    let redacted = json!({"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"});
    assert_eq!(block(&part), redacted);
    let turn = Turn { role: Role::Assistant, parts: vec![Part::Text("x".into()), part] };
    assert_eq!(
        message_of(&turn)["content"],
        json!([{"type": "text", "text": "x"}]),
        "thinking never ends a turn"
    );
}

fn message_of(turn: &Turn) -> Value {
    super::message(turn)
}

#[test]
fn each_model_generation_gets_its_own_thinking_request() {
    let asked = |effort, model: &str, max_tokens| {
        let thinking = Thinking::for_model(effort, model, max_tokens, &[]);
        (json!(thinking), thinking.excludes_sampling)
    };
    let budget = |tokens: u32| json!({"thinking": {"type": "enabled", "budget_tokens": tokens}});
    assert_eq!(
        asked(Some(Effort::Low), "claude-sonnet-4-5-20250929", 8_192),
        (budget(2_048), true)
    );
    assert_eq!(
        asked(Some(Effort::High), "eu.anthropic.claude-3-7-sonnet-20250219-v1:0", 8_192),
        (budget(4_096), true)
    );
    assert_eq!(asked(Some(Effort::High), "kimi-k2-thinking", 64_000), (budget(24_576), true));
    assert_eq!(
        asked(Some(Effort::High), "claude-haiku-4-5", 2_000),
        (json!({}), false),
        "there is no room for it"
    );
    assert_eq!(asked(Some(Effort::Off), "claude-opus-4-1", 8_192), (json!({}), false));
    let adaptive = json!({"thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}});
    assert_eq!(asked(Some(Effort::Medium), "claude-opus-4-6", 8_192), (adaptive, true));
    let current = json!({"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "high"}});
    assert_eq!(asked(Some(Effort::High), "claude-opus-5", 8_192), (current, true));
    assert_eq!(
        asked(Some(Effort::Off), "claude-opus-5", 8_192),
        (json!({"output_config": {"effort": "low"}}), true)
    );
    assert_eq!(
        asked(None, "claude-opus-5", 8_192),
        (json!({}), true),
        "it cannot be told how to sample"
    );
    assert_eq!(asked(None, "claude-sonnet-4-5", 8_192), (json!({}), false));
}

#[test]
fn temperature_is_never_sent_with_top_p() {
    let told = |model: &str, temperature: Option<f64>| {
        let mut request = conversation(0);
        request.model = model.to_owned();
        request.parameters =
            ModelParameters { temperature, top_p: Some(0.5), ..ModelParameters::default() };
        let body = serde_json::to_value(Body::new(&request)).expect("JSON");
        ["temperature", "top_p"].map(|name| body.get(name).is_some())
    };
    assert_eq!(told("claude-sonnet-4-5", Some(0.3)), [true, false], "the vendor refuses both");
    assert_eq!(told("claude-sonnet-4-5", None), [false, true]);
    assert_eq!(told("kimi-k2", Some(0.3)), [true, true], "compatible servers take both");
}

#[test]
fn no_thinking_is_requested_after_a_call_without_thinking() {
    let mut request = conversation(1);
    request.model = "claude-sonnet-4-5".into();
    request.parameters.set_thinking(v1::ThinkingEffort::Low);
    let thinks = |request: &Request| {
        serde_json::to_value(Body::new(request)).expect("JSON").get("thinking").is_some()
    };
    assert!(!thinks(&request));
    let thinking = v1::Thinking { text: "Hm.".into(), ..v1::Thinking::default() };
    let thinking = v1::Thinking { provider_id: request.origin.provider_id.clone(), ..thinking };
    request.messages[1].blocks.insert(0, v1::Block { block: Some(Piece::Thinking(thinking)) });
    assert!(thinks(&request));
    request.messages[1].blocks.remove(0);
    request.messages.push(message(MessageSource::Assistant, vec![text("Done.")]));
    request.messages.push(message(MessageSource::User, vec![text("And now?")]));
    assert!(thinks(&request), "a new turn may begin with thinking");
}

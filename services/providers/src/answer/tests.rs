use construct_proto::v1::block::Block;

use super::*;

/// A request with the code tool and one user message.
pub(crate) fn request() -> Request {
    let command = crate::call::tests::command("hello");
    Request::from_command(&command).expect("the command is whole")
}

fn answer(chunks: Vec<Chunk>) -> (Vec<VisibleText>, Answer) {
    let mut answer = Answer::new(&request());
    let visible = chunks
        .into_iter()
        .filter_map(|chunk| answer.push(chunk).expect("within the bounds"))
        .collect();
    (visible, answer)
}

fn call(name: &str, arguments: &str, stop: StopReason) -> CompletedAnswer {
    answer(vec![
        Chunk::Call { slot: 3, id: "toolu_1".into(), name: name.into() },
        Chunk::Arguments { slot: 3, json: arguments.into() },
        Chunk::Stop(stop),
    ])
    .1
    .complete()
}

fn code(completed: &CompletedAnswer) -> &str {
    match &completed.blocks[..] {
        [v1::Block { block: Some(Block::CodeInterpreterCall(call)) }] => &call.code,
        other => panic!("not one call: {other:?}"),
    }
}

#[test]
fn text_and_code_become_visible_incrementally() {
    let (visible, answer) = answer(vec![
        Chunk::Text("Look".into()),
        Chunk::Text("ing.".into()),
        Chunk::Call { slot: 1, id: "a".into(), name: "code_interpreter".into() },
        Chunk::Arguments { slot: 1, json: r#"{"code":"li"#.into() },
        Chunk::Arguments { slot: 1, json: r#"st()\n"}"#.into() },
        Chunk::Text("Done.".into()),
    ]);
    let shown: Vec<(u32, BlockKind, &str)> =
        visible.iter().map(|v| (v.block, v.kind, v.text.as_str())).collect();
    assert_eq!(
        shown,
        [
            (0, BlockKind::Text, "Look"),
            (0, BlockKind::Text, "ing."),
            (1, BlockKind::Code, "li"),
            (1, BlockKind::Code, "st()\n"),
            (2, BlockKind::Text, "Done."),
        ]
    );
    let completed = answer.complete();
    assert_eq!(completed.blocks.len(), 3);
    assert_eq!(completed.stop_reason, StopReason::ToolUse);
}

#[test]
fn truncated_script_never_runs() {
    let completed = call("code_interpreter", r#"{"code":"delete_ever"#, StopReason::MaxTokens);
    assert_eq!(
        completed,
        CompletedAnswer { blocks: vec![], stop_reason: StopReason::MaxTokens, input_tokens: 0 }
    );
}

#[test]
fn unreadable_arguments_become_an_error_script() {
    for arguments in [r#"{"code":"#, "[]", r#"{"script":"1"}"#] {
        let completed = call("code_interpreter", arguments, StopReason::ToolUse);
        assert!(
            code(&completed).starts_with("throw new Error("),
            "{arguments}: {}",
            code(&completed)
        );
    }
}

#[test]
fn unknown_tool_call_becomes_a_function_call_in_a_script() {
    let completed = call("read_file", r#"{"path":"a\u2028b"}"#, StopReason::ToolUse);
    assert_eq!(code(&completed), r#"read_file({"path":"a\u2028b"})"#);
    let completed = call("functions.read-file", "{}", StopReason::ToolUse);
    assert!(code(&completed).contains("There is no tool named"));
}

#[test]
fn call_without_id_gets_a_unique_id() {
    let (_, answer) = answer(vec![
        Chunk::Call { slot: 0, id: String::new(), name: "code_interpreter".into() },
        Chunk::Arguments { slot: 0, json: r#"{"code":"1"}"#.into() },
    ]);
    let step_id = request().step_id;
    let completed = answer.complete();
    assert!(
        matches!(&completed.blocks[0].block, Some(Block::CodeInterpreterCall(call)) if call.id == format!("call_{step_id}_0"))
    );
}

#[test]
fn endless_answer_is_rejected() {
    let piece = "x".repeat(1024 * 1024);
    // Opaque thinking data counts as well, all of it together.
    for chunk in
        [Chunk::Text(piece.clone()), Chunk::Thinking(piece.clone()), Chunk::ThinkingData(piece)]
    {
        let mut answer = Answer::new(&request());
        let fits = (0..16).all(|_| answer.push(chunk.clone()).is_ok());
        assert!(fits, "{:?}", std::mem::discriminant(&chunk));
        let failed = answer.push(chunk).err();
        assert_eq!(failed.map(|failure| failure.class), Some(FailureClass::InvalidRequest));
    }
}

use construct_proto::v1::{
    self, CodeInterpreterCall, CodeInterpreterResult, MessageDelta, MessageRestarted, MessageSpec,
    MessageStatus, TaskError, Text, ToolCalled, ToolResult, ToolUse, message_delta::Delta,
};

use super::*;
use crate::console::{Color, tests::buffered_console};

const LIVE: Options = Options { live: true, user_messages: false, entities: false };

fn event(kind: &str, step: u64, payload: Payload) -> Event {
    Event { r#type: kind.to_owned(), step, payload: Some(payload), ..Event::default() }
}

fn text(step: u64, block: u32, text: &str) -> Event {
    let delta = MessageDelta { index: 0, block, delta: Some(Delta::Text(text.to_owned())) };
    event("message.delta", step, Payload::MessageDelta(delta))
}

fn code(step: u64, block: u32, code: &str) -> Event {
    let delta = MessageDelta { index: 0, block, delta: Some(Delta::Code(code.to_owned())) };
    event("message.delta", step, Payload::MessageDelta(delta))
}

fn message(step: u64, source: MessageSource, blocks: Vec<Block>) -> Event {
    let usage = Usage {
        input_tokens: 1200,
        output_tokens: 34,
        cache_read_tokens: 800,
        cost_pico_usd: 12_300_000_000,
        ..Usage::default()
    };
    let message = Message {
        spec: Some(MessageSpec {
            task: String::new(),
            blocks: blocks.into_iter().map(|block| v1::Block { block: Some(block) }).collect(),
            ..MessageSpec::default()
        }),
        status: Some(MessageStatus {
            source: source.into(),
            usage: Some(usage),
            ..MessageStatus::default()
        }),
        ..Message::default()
    };
    event("message.created", step, Payload::Message(message))
}

fn thought(step: u64, block: u32, text: &str) -> Event {
    let delta = MessageDelta { index: 0, block, delta: Some(Delta::Thinking(text.to_owned())) };
    event("message.delta", step, Payload::MessageDelta(delta))
}

fn text_block(text: &str) -> Block {
    Block::Text(Text { text: text.to_owned() })
}

fn code_block(code: &str) -> Block {
    Block::CodeInterpreterCall(CodeInterpreterCall { id: "call".to_owned(), code: code.to_owned() })
}

fn result_block(output: &str, error: &str, tools: &[&str]) -> Block {
    let tool_uses = tools
        .iter()
        .zip(1..)
        .map(|(name, number)| ToolUse {
            number,
            name: (*name).to_owned(),
            succeeded: true,
            duration_micros: 900,
            ..ToolUse::default()
        })
        .collect();
    Block::CodeInterpreterResult(CodeInterpreterResult {
        id: "call".to_owned(),
        output: output.to_owned(),
        error: error.to_owned(),
        tool_uses,
    })
}

/// Everything that a terminal shows.
fn rendered(options: Options, events: &[Event]) -> String {
    let buffer = crate::console::tests::SharedBuffer::default();
    let mut console = crate::console::Console::new(
        (Box::new(buffer.clone()), true),
        (Box::new(buffer.clone()), true),
        Color::Never,
    );
    let mut renderer = Renderer::new(options);
    for event in events {
        renderer.event(event, &mut console).unwrap();
    }
    buffer.text()
}

fn turn() -> Vec<Event> {
    let phase = PhaseChanged {
        previous: TaskPhase::InvokeModel.into(),
        phase: TaskPhase::ExecuteTools.into(),
        reason: "the model wants to run a script".to_owned(),
    };
    vec![
        text(1, 0, "Let me "),
        text(1, 0, "look."),
        code(1, 1, "const hits = grep("),
        code(1, 1, "\"TODO\", \"src\");\nprint(hits"),
        code(1, 1, ".length)"),
        message(
            1,
            MessageSource::Assistant,
            vec![
                text_block("Let me look."),
                code_block("const hits = grep(\"TODO\", \"src\");\nprint(hits.length)"),
            ],
        ),
        event("task.phase_changed", 1, Payload::PhaseChanged(phase)),
        event(
            "tool.called",
            2,
            Payload::ToolCalled(ToolCalled {
                step_id: "step_1".to_owned(),
                number: 1,
                name: "grep".to_owned(),
                arguments: r#"["TODO","src"]"#.to_owned(),
                ..ToolCalled::default()
            }),
        ),
        event(
            "tool.result",
            2,
            Payload::ToolResult(ToolResult {
                step_id: "step_1".to_owned(),
                number: 1,
                name: "grep".to_owned(),
                succeeded: true,
                result: r#"{"matches":[1,2,3]}"#.to_owned(),
                duration_micros: 12_400,
                ..ToolResult::default()
            }),
        ),
        message(2, MessageSource::System, vec![result_block("3\n", "", &["grep"])]),
        text(3, 0, "There are "),
        message(3, MessageSource::Assistant, vec![text_block("There are three.")]),
        event(
            "turn.completed",
            3,
            Payload::TurnCompleted(TurnCompleted {
                message_id: "message_1".to_owned(),
                outcome: TurnOutcome::Completed.into(),
                turns: 2,
                error: None,
            }),
        ),
    ]
}

const RENDERED_TURN: &str = "\
Let me look.
  │ const hits = grep(\"TODO\", \"src\");
  │ print(hits.length)
· execute tools: the model wants to run a script
  ✓ grep(\"TODO\", \"src\") 12 ms · 3 matches
    ⎿ 3
There are three.
✓ completed · 2 model calls · 1 tool call · 4,000 in (1,600 cached) + 68 out tokens · $0.0246
";

#[test]
fn turn_is_rendered_as_conversation() {
    assert_eq!(rendered(LIVE, &turn()), RENDERED_TURN);
}

#[test]
fn turn_from_records_is_rendered_without_arguments() {
    let records: Vec<Event> = turn()
        .into_iter()
        .filter(|event| event.r#type != "message.delta" && !event.r#type.starts_with("tool."))
        .collect();
    let expected =
        RENDERED_TURN.replace("grep(\"TODO\", \"src\") 12 ms · 3 matches", "grep() 900 µs");
    assert_eq!(rendered(LIVE, &records), expected);
}

#[test]
fn missed_calls_are_shown_from_recorded_arguments() {
    let used = |number, name: &str, succeeded, arguments: &str, result: &str| ToolUse {
        number,
        name: name.to_owned(),
        succeeded,
        duration_micros: 900,
        arguments: arguments.to_owned(),
        result: result.to_owned(),
    };
    let tool_uses = vec![
        used(1, "grep", true, r#"{"query":"TODO"}"#, r#"{"matches":[1,2,3]}"#),
        used(
            2,
            "read_file",
            false,
            r#"{"path":"a"}"#,
            r#"{"name":"NotFound","message":"no such file"}"#,
        ),
        // Truncated, so not valid JSON.
        used(3, "read_file", true, r#"{"path":"b"}"#, "\"xxx…"),
    ];
    let result = CodeInterpreterResult {
        id: "call".to_owned(),
        tool_uses,
        ..CodeInterpreterResult::default()
    };
    let events = [message(2, MessageSource::System, vec![Block::CodeInterpreterResult(result)])];
    let expected = "  ✓ grep(query: \"TODO\") 900 µs · 3 matches\n  ✗ read_file(path: \"a\") 900 µs · no such file\n  \
                    ✓ read_file(path: \"b\") 900 µs\n";
    assert_eq!(rendered(LIVE, &events), expected);
}

#[test]
fn answer_without_terminal_is_printed_once_when_complete() {
    let (mut console, answer, status) = buffered_console(false, Color::Auto);
    let mut renderer = Renderer::new(Options { live: false, ..LIVE });
    for event in turn() {
        renderer.event(&event, &mut console).unwrap();
    }
    assert_eq!(answer.text(), "Let me look.\nThere are three.\n");
    let lines: Vec<&str> =
        RENDERED_TURN.lines().filter(|line| !answer.text().contains(line)).collect();
    assert_eq!(status.text().lines().collect::<Vec<_>>(), lines);
}

#[test]
fn restarted_answer_is_marked() {
    let events = [
        text(1, 0, "Wrong sta"),
        event(
            "message.restarted",
            1,
            Payload::MessageRestarted(MessageRestarted { reason: "the vendor hung up".to_owned() }),
        ),
        text(1, 0, "Right"),
        message(1, MessageSource::Assistant, vec![text_block("Right.")]),
    ];
    assert_eq!(
        rendered(LIVE, &events),
        "Wrong sta\n↻ the answer restarts: the vendor hung up\nRight.\n"
    );
}

#[test]
fn thinking_is_shown_live_only() {
    let thinking = Block::Thinking(v1::Thinking {
        text: "First I\nlook around.".to_owned(),
        ..v1::Thinking::default()
    });
    let events = [
        thought(1, 0, "First I\nlook"),
        thought(1, 0, " around."),
        text(1, 1, "Done."),
        message(1, MessageSource::Assistant, vec![thinking, text_block("Done.")]),
    ];
    assert_eq!(rendered(LIVE, &events), "  ┊ First I\n  ┊ look around.\nDone.\n");
    assert_eq!(rendered(Options { live: false, ..LIVE }, &events), "Done.\n");
}

#[test]
fn late_subscriber_sees_nothing_twice() {
    let events = [
        text(1, 0, "the end."),
        message(1, MessageSource::Assistant, vec![text_block("Only the end.")]),
    ];
    assert_eq!(rendered(LIVE, &events), "the end.\n");
}

#[test]
fn answer_that_differs_from_deltas_is_shown_completely() {
    let events = [
        text(1, 0, "Lost pie"),
        message(1, MessageSource::Assistant, vec![text_block("Lost a piece.")]),
    ];
    assert_eq!(rendered(LIVE, &events), "Lost pie\n↻ the complete answer:\nLost a piece.\n");
}

#[test]
fn tool_and_script_errors_are_shown() {
    let events = [
        event(
            "tool.result",
            2,
            Payload::ToolResult(ToolResult {
                name: "read_file".to_owned(),
                result: r#"{"message":"no such file:\n a.txt"}"#.to_owned(),
                duration_micros: 80,
                ..ToolResult::default()
            }),
        ),
        message(
            2,
            MessageSource::System,
            vec![result_block("1\n2\n3\n4\n5\n6\n7\n8", "Error: no\n  at x", &[])],
        ),
        event(
            "error",
            2,
            Payload::Error(TaskError {
                code: "RATE_LIMITED".to_owned(),
                message: "slow down".to_owned(),
                time: None,
            }),
        ),
    ];
    let expected = "  ✗ read_file() 80 µs · no such file: a.txt
    ⎿ 1\n    ⎿ 2\n    ⎿ 3\n    ⎿ 4\n    ⎿ 5\n    ⎿ 6\n    ⎿ … 2 more lines
    ⎿ Error: no\n    ⎿   at x
✗ RATE_LIMITED: slow down
";
    assert_eq!(rendered(LIVE, &events), expected);
}

#[test]
fn user_messages_are_shown_on_request() {
    let user_message = message(0, MessageSource::User, vec![text_block("one\ntwo")]);
    assert_eq!(rendered(LIVE, std::slice::from_ref(&user_message)), "");
    assert_eq!(
        rendered(Options { user_messages: true, ..LIVE }, &[user_message]),
        "❯ one\n  two\n"
    );
}

#[test]
fn pending_approval_is_shown_with_all_arguments_and_commands() {
    let approval = |state: ApprovalState, comment: &str| {
        let approval = Approval {
            metadata: Some(v1::Metadata { id: "approval_1".to_owned(), ..v1::Metadata::default() }),
            spec: Some(v1::ApprovalSpec {
                tool: "create_file".to_owned(),
                arguments: r#"{"content":"\u001b[2Jx","path":"secrets/key"}"#.to_owned(),
                arguments_size: 43,
                reason: "it is secret".to_owned(),
                ..v1::ApprovalSpec::default()
            }),
            status: Some(v1::ApprovalStatus {
                state: state.into(),
                decided_by: "ada".to_owned(),
                comment: comment.to_owned(),
                ..v1::ApprovalStatus::default()
            }),
        };
        event("approval.requested", 0, Payload::Approval(approval))
    };
    let pending = rendered(LIVE, &[approval(ApprovalState::Pending, "")]);
    assert_eq!(
        pending,
        "? create_file needs approval: it is secret\n    {\n      \"content\": \"\\u001b[2Jx\",\n      \"path\": \"secrets/key\"\n    \
         }\n  approve: construct approval approve approval_1\n  reject:  construct approval reject approval_1 --comment COMMENT\n"
    );
    let decided = rendered(
        LIVE,
        &[
            approval(ApprovalState::Rejected, "use the vault"),
            approval(ApprovalState::Approved, ""),
        ],
    );
    assert_eq!(
        decided,
        "✗ create_file rejected by ada: use the vault\n✓ create_file approved by ada\n"
    );
}

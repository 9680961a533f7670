use construct_proto::v1::{
    self, Event, MessageDelta, MessageSpec, MessageStatus, Metadata, PhaseChanged, Text,
    TurnCompleted, Usage, block, event::Payload, message_delta::Delta,
};

use super::*;
use crate::{
    console::tests::{SharedBuffer, buffered_console},
    fake::{Break, Fake, MESSAGE, State, TASK},
};

fn event(kind: &str, step: u64, payload: Payload) -> Event {
    Event { r#type: kind.to_owned(), step, payload: Some(payload), ..Event::default() }
}

fn created(step: u64, id: &str, source: MessageSource, text: &str) -> Event {
    let blocks = vec![Block { block: Some(block::Block::Text(Text { text: text.to_owned() })) }];
    let usage =
        Usage { input_tokens: 10, output_tokens: 5, cost_pico_usd: 2_000_000, ..Usage::default() };
    let message = Message {
        metadata: Some(Metadata { id: id.to_owned(), ..Metadata::default() }),
        spec: Some(MessageSpec { task: TASK.to_owned(), blocks, ..MessageSpec::default() }),
        status: Some(MessageStatus {
            source: source.into(),
            usage: Some(usage),
            ..MessageStatus::default()
        }),
    };
    event("message.created", step, Payload::Message(message))
}

fn delta(text: &str) -> Event {
    let delta = MessageDelta { index: 0, block: 0, delta: Some(Delta::Text(text.to_owned())) };
    event("message.delta", 1, Payload::MessageDelta(delta))
}

fn completed(message: &str, outcome: TurnOutcome) -> Event {
    let error = (outcome == TurnOutcome::Failed).then(|| TaskError {
        code: "AUTHENTICATION".to_owned(),
        message: "the key is wrong".to_owned(),
        time: None,
    });
    let turn =
        TurnCompleted { message_id: message.to_owned(), outcome: outcome.into(), turns: 1, error };
    event("turn.completed", 1, Payload::TurnCompleted(turn))
}

/// A turn that answers "Hello there, world." in three pieces.
fn turn() -> Vec<Event> {
    vec![
        created(0, MESSAGE, MessageSource::User, "hi"),
        delta("Hello "),
        delta("there, "),
        delta("world."),
        created(1, "message_2", MessageSource::Assistant, "Hello there, world."),
        completed(MESSAGE, TurnOutcome::Completed),
    ]
}

fn playing(events: Vec<Event>) -> State {
    State { events, ..State::default() }
}

fn args(output: Output) -> ExecArgs {
    ExecArgs {
        attach: AttachArgs::default(),
        agent: None,
        workspace: None,
        task: None,
        title: None,
        max_turns: 0,
        compute: String::new(),
        budget: None,
        output,
        reconnect: Duration::from_secs(20),
        timeout: None,
        prompt: None,
    }
}

/// Runs the command on a terminal or without one.
async fn run_with(
    args: &ExecArgs,
    fake: &Fake,
    terminal: bool,
    interrupts: mpsc::Receiver<()>,
) -> (Result<Exit, Failure>, SharedBuffer, SharedBuffer) {
    let (mut console, answer, status) = buffered_console(terminal, Color::Never);
    let run =
        run(args, "say hi to\nthe world".to_owned(), fake.gateway(), &mut console, interrupts);
    let exit = tokio::time::timeout(Duration::from_secs(30), run).await.expect("the turn ends");
    (exit, answer, status)
}

async fn run_to_end(
    args: &ExecArgs,
    fake: &Fake,
    terminal: bool,
) -> (Result<Exit, Failure>, SharedBuffer, SharedBuffer) {
    run_with(args, fake, terminal, mpsc::channel(1).1).await
}

#[tokio::test]
async fn text_output_separates_answer_from_status() {
    let fake = Fake::start(playing(turn()));
    let (exit, answer, status) = run_to_end(&args(Output::Text), &fake, true).await;
    assert_eq!(exit, Ok(Exit::Completed));
    assert_eq!(answer.text(), "Hello there, world.\n");
    assert_eq!(
        status.text(),
        "· task task_1\n✓ completed · 1 model call · 10 in + 5 out tokens · $0.000002\n· continue with: construct resume task_1\n"
    );
    let calls = fake.state().calls.clone();
    assert_eq!(
        calls[..2],
        ["create_task coder say hi to the world", "subscribe 0"],
        "subscribes before it sends"
    );
    assert!(calls[2].starts_with("create_message"));
}

#[tokio::test]
async fn broken_stream_continues_without_duplicates() {
    for how in [Break::End, Break::Unavailable] {
        for terminal in [true, false] {
            let breaks = vec![(2, how), (3, how), (3, how)];
            let fake = Fake::start(State { events: turn(), breaks, ..State::default() });
            let (exit, answer, status) = run_to_end(&args(Output::Text), &fake, terminal).await;
            assert_eq!(exit, Ok(Exit::Completed));
            assert_eq!(answer.text().replace('\n', ""), "Hello there, world.", "{how:?}");
            assert!(status.text().contains("reconnecting\n· reconnected\n"), "{}", status.text());
            let calls: Vec<String> =
                fake.state().calls.iter().filter(|call| call.starts_with("sub")).cloned().collect();
            assert_eq!(calls, ["subscribe 0", "subscribe 2", "subscribe 3", "subscribe 3"]);
        }
    }
}

#[tokio::test]
async fn gateway_restart_during_the_answer_loses_nothing() {
    let (first, rest) = (turn()[..3].to_vec(), turn()[3..].to_vec());
    let mut fake = Fake::start(playing(first));
    let (mut console, answer, _) = buffered_console(true, Color::Never);
    let args = args(Output::Text);
    let job = run(&args, "hi".to_owned(), fake.gateway(), &mut console, mpsc::channel(1).1);
    let restart = async {
        let half = async {
            while !answer.text().contains("there, ") {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), half)
            .await
            .expect("the first half is printed");
        fake.stop();
        fake.restart();
        fake.state().events.extend(rest);
    };
    let both = Box::pin(async { tokio::join!(job, restart) });
    let (exit, ()) = tokio::time::timeout(Duration::from_secs(30), both).await.unwrap();
    assert_eq!(exit, Ok(Exit::Completed));
    assert_eq!(answer.text().replace('\n', ""), "Hello there, world.");
}

#[tokio::test]
async fn rejected_message_is_sent_again_with_the_same_key() {
    let fake = Fake::start(State { events: turn(), refusals: 2, ..State::default() });
    let (exit, ..) = run_to_end(&args(Output::Text), &fake, false).await;
    assert_eq!(exit, Ok(Exit::Completed));
    let calls = fake.state().calls.clone();
    let keys: Vec<&str> = calls
        .iter()
        .filter_map(|call| call.strip_prefix("refused ").or(call.strip_prefix("create_message ")))
        .collect();
    assert!(keys.len() == 3 && keys.iter().all(|key| *key == keys[0]), "{calls:?}");
}

#[tokio::test]
async fn outcomes_map_to_exit_codes() {
    for (outcome, exit) in [
        (TurnOutcome::Completed, Exit::Completed),
        (TurnOutcome::Failed, Exit::Failed),
        (TurnOutcome::Cancelled, Exit::Cancelled),
        (TurnOutcome::MaxTurns, Exit::MaxTurns),
    ] {
        let fake = Fake::start(playing(vec![
            created(0, MESSAGE, MessageSource::User, "hi"),
            completed(MESSAGE, outcome),
        ]));
        assert_eq!(run_to_end(&args(Output::Text), &fake, false).await.0, Ok(exit));
    }
    let suspended = PhaseChanged { phase: TaskPhase::Suspended.into(), ..PhaseChanged::default() };
    let fake = Fake::start(playing(vec![
        created(0, MESSAGE, MessageSource::User, "hi"),
        event("task.phase_changed", 0, Payload::PhaseChanged(suspended)),
    ]));
    assert_eq!(run_to_end(&args(Output::Text), &fake, false).await.0, Ok(Exit::Suspended));
}

#[tokio::test]
async fn suspended_task_is_sent_no_message() {
    let fake = Fake::start(State { phase: Some(TaskPhase::Suspended), ..State::default() });
    let args = ExecArgs { task: Some(TASK.to_owned()), ..args(Output::Text) };
    let failure = run_to_end(&args, &fake, false).await.0.unwrap_err();
    assert_eq!(failure.exit(), Exit::Suspended);
    assert!(fake.state().calls.is_empty());
}

#[tokio::test]
async fn interrupt_cancels_the_turn() {
    let fake = Fake::start(State {
        events: vec![created(0, MESSAGE, MessageSource::User, "hi")],
        on_cancel: vec![completed(MESSAGE, TurnOutcome::Cancelled)],
        ..State::default()
    });
    let (interrupt, interrupts) = mpsc::channel(1);
    let after_send = async {
        while !fake.state().calls.iter().any(|call| call.starts_with("create_message")) {
            tokio::task::yield_now().await;
        }
        interrupt.send(()).await.unwrap();
    };
    let args = args(Output::Text);
    let ((exit, ..), ()) = tokio::join!(run_with(&args, &fake, false, interrupts), after_send);
    assert_eq!(exit, Ok(Exit::Interrupted));
    assert!(fake.state().calls.contains(&"cancel_task interrupted by the user".to_owned()));
}

#[tokio::test]
async fn interrupt_before_sending_sends_nothing() {
    let fake = Fake::start(playing(turn()));
    let (interrupt, interrupts) = mpsc::channel(1);
    interrupt.send(()).await.unwrap();
    let (exit, ..) = run_with(&args(Output::Text), &fake, false, interrupts).await;
    assert_eq!(exit.unwrap_err().exit(), Exit::Interrupted);
    assert!(!fake.state().calls.iter().any(|call| call.starts_with("create_message")));
}

#[tokio::test]
async fn timeout_cancels_the_turn() {
    let fake = Fake::start(State {
        events: vec![created(0, MESSAGE, MessageSource::User, "hi")],
        on_cancel: vec![completed(MESSAGE, TurnOutcome::Cancelled)],
        ..State::default()
    });
    let args = ExecArgs { timeout: Some(Duration::from_millis(20)), ..args(Output::Json) };
    assert_eq!(run_to_end(&args, &fake, false).await.0, Ok(Exit::Cancelled));
}

#[tokio::test]
async fn json_output_is_one_object() {
    let mut events = turn();
    events.pop();
    events.push(completed(MESSAGE, TurnOutcome::Failed));
    let fake = Fake::start(playing(events));
    let (exit, answer, status) = run_to_end(&args(Output::Json), &fake, true).await;
    assert_eq!((exit, status.text().as_str()), (Ok(Exit::Failed), ""));
    let report: Value = serde_json::from_str(&answer.text()).unwrap();
    let expected = json!({
        "task": TASK,
        "message": MESSAGE,
        "outcome": "failed",
        "text": "Hello there, world.",
        "usage": { "inputTokens": "10", "outputTokens": "5", "costPicoUsd": "2000000" },
        "task_usage": {},
        "tool_uses": {},
        "error": { "code": "AUTHENTICATION", "message": "the key is wrong" },
    });
    assert_eq!(report, expected);
}

#[tokio::test]
async fn ndjson_output_is_the_events_of_the_turn() {
    let mut events = vec![delta("of another turn")];
    events.extend(turn());
    let fake = Fake::start(playing(events));
    let (_, answer, _) = run_to_end(&args(Output::Ndjson), &fake, false).await;
    let types: Vec<String> = answer
        .text()
        .lines()
        .map(|line| {
            serde_json::from_str::<Value>(line).unwrap()["type"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(types, turn().iter().map(|event| event.r#type.clone()).collect::<Vec<_>>());
}

#[test]
fn turns_of_earlier_messages_are_ignored() {
    let mut watch = TurnWatch::new(MESSAGE.to_owned(), vec!["message_0".to_owned()]);
    assert_eq!(watch.observe(&created(0, MESSAGE, MessageSource::User, "hi")), TurnEvent::Other);
    assert_eq!(
        watch.observe(&created(1, "x", MessageSource::Assistant, "other")),
        TurnEvent::Other
    );
    assert!(!watch.is_active());
    assert_eq!(watch.observe(&completed("message_0", TurnOutcome::Completed)), TurnEvent::Other);
    assert!(watch.is_active() && watch.totals().text.is_empty());
    watch.observe(&created(2, "y", MessageSource::Assistant, "ours"));
    assert_eq!(watch.totals().text, "ours");
    assert_eq!(
        watch.observe(&completed("z", TurnOutcome::Cancelled)),
        TurnEvent::Other,
        "dropped messages have their own events"
    );
}

#[test]
fn dropped_or_deleted_message_gets_no_turn() {
    let changed = |id: &str, dropped: bool| {
        let processed_at = dropped.then(prost_types::Timestamp::default);
        let message = Message {
            metadata: Some(Metadata { id: id.to_owned(), ..Metadata::default() }),
            status: Some(MessageStatus { processed_at, ..MessageStatus::default() }),
            ..Message::default()
        };
        event("message.updated", 0, Payload::Message(message))
    };
    let mut watch = TurnWatch::new(MESSAGE.to_owned(), vec!["a".to_owned(), "b".to_owned()]);
    watch.observe(&created(0, MESSAGE, MessageSource::User, "hi"));
    assert_eq!(watch.observe(&changed("a", true)), TurnEvent::Other);
    let deleted = v1::Deleted { id: "b".to_owned() };
    assert_eq!(
        watch.observe(&event("message.deleted", 0, Payload::Deleted(deleted))),
        TurnEvent::Other
    );
    assert!(watch.is_active(), "earlier messages were removed");
    assert_eq!(watch.observe(&changed(MESSAGE, false)), TurnEvent::Other, "it was edited");
    assert_eq!(watch.observe(&changed(MESSAGE, true)), TurnEvent::MessageDropped);
}

#[test]
fn title_is_the_beginning_of_the_prompt() {
    assert_eq!(title("fix\n the  bug"), "fix the bug");
    assert_eq!(title(&"word ".repeat(40)).chars().count(), TITLE_COLUMNS);
    let deleted = v1::Deleted { id: TASK.to_owned() };
    let mut watch = TurnWatch::new(MESSAGE.to_owned(), Vec::new());
    assert_eq!(
        watch.observe(&event("task.deleted", 0, Payload::Deleted(deleted))),
        TurnEvent::TaskDeleted
    );
}

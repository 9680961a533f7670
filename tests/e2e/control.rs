//! Control of an active task: canceling and suspending in every phase, interrupting messages, and
//! rewinding, editing and forking a conversation.

mod latency;

use construct_proto::v1::{
    self, MessagePriority, MessageSource, TaskPhase, TurnOutcome, event::Payload,
};
use construct_tests::{
    client::{Conversation, TURN_TIMEOUT, id, wait_for_file},
    mesh::{Mesh, Service},
    recorder::check_order,
    transcript::{Transcript, status, text},
    wait::until,
};
use serde_json::json;
use tonic::Code;

use crate::{is_running, wait_for_process_end};

/// Sends a message that interrupts the running turn.
async fn interrupt(conversation: &Conversation, words: &str) -> v1::Message {
    let block = v1::block::Block::Text(v1::Text { text: words.to_owned() });
    let spec = v1::MessageSpec {
        task: conversation.id().to_owned(),
        blocks: vec![v1::Block { block: Some(block) }],
        priority: MessagePriority::Interrupt.into(),
    };
    let request =
        v1::CreateMessageRequest { spec: Some(spec), ..v1::CreateMessageRequest::default() };
    conversation.client().messages().create_message(request).await.unwrap().into_inner()
}

async fn edit(
    conversation: &Conversation,
    message: &v1::Message,
    words: &str,
    key: &str,
) -> v1::Message {
    let block = v1::block::Block::Text(v1::Text { text: words.to_owned() });
    let request = v1::EditMessageRequest {
        message: id(message.metadata.as_ref()),
        blocks: vec![v1::Block { block: Some(block) }],
        idempotency_key: key.to_owned(),
    };
    conversation.client().messages().edit_message(request).await.unwrap().into_inner()
}

async fn rewind(
    conversation: &Conversation,
    message: &v1::Message,
    keep: bool,
) -> Result<v1::Task, tonic::Status> {
    let request = v1::RewindTaskRequest {
        task: conversation.id().to_owned(),
        message: id(message.metadata.as_ref()),
        keep,
        ..v1::RewindTaskRequest::default()
    };
    Ok(conversation.client().tasks().rewind_task(request).await?.into_inner())
}

async fn fork(
    conversation: &Conversation,
    message: &v1::Message,
) -> Result<Conversation, tonic::Status> {
    let request = v1::ForkTaskRequest {
        task: conversation.id().to_owned(),
        message: id(message.metadata.as_ref()),
        ..v1::ForkTaskRequest::default()
    };
    let task = conversation.client().tasks().fork_task(request).await?.into_inner();
    Ok(conversation.client().conversation(&id(task.metadata.as_ref())))
}

/// The user message with this text.
fn user_message<'a>(transcript: &'a Transcript, words: &str) -> &'a v1::Message {
    let found = transcript.messages.iter().find(|message| text(message) == words);
    found.unwrap_or_else(|| panic!("{words:?} was not said:\n{}", transcript.show()))
}

fn errors(transcript: &Transcript) -> Vec<String> {
    transcript
        .from_source(MessageSource::User)
        .into_iter()
        .map(|message| status(message).error)
        .collect()
}

#[tokio::test]
async fn interrupting_message_is_answered_at_once_and_partial_kept() {
    let mesh = Mesh::start().await.unwrap();
    let stall = json!({"stall_ms": 600_000, "times": 1, "after_chars": 15});
    let script = json!({"conversations": [
        {"match": "story", "turns": [{"text": "Once upon a time there was a fox.", "fault": stall}]},
        {"match": "command", "turns": [
            {"code": ["const mark = read_file('mark.txt').trim(); execute_command(`touch begun; sleep ${mark}`);", "2"]},
            {"text": "unused"},
        ]},
        {"match": "quick", "turns": [{"text": "quick: {{last_user_text}}"}]},
    ]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let client = mesh.client().unwrap();

    let speaking = async {
        let conversation =
            client.create_task("worker", Some(&mesh.folder("speaking").unwrap())).await.unwrap();
        let recorder = conversation.record();
        conversation.submit("A story, please.").await;
        conversation.submit("quick, later").await;
        recorder.wait_for_count("message.delta", 1).await;
        interrupt(&conversation, "quick, now").await;
        let status = conversation.wait_until_idle().await.status.unwrap();
        let transcript = conversation.transcript().await;
        transcript.check(&["A story, please.", "quick, now", "quick, later"]);
        assert_eq!(
            transcript.answers(),
            ["Once upon a tim", "quick: quick, now", "quick: quick, later"]
        );
        let marks: Vec<String> =
            transcript.from_source(MessageSource::System).into_iter().map(text).collect();
        assert!(
            matches!(marks.as_slice(), [mark] if mark.contains("broken off here")),
            "{marks:?}"
        );
        assert_eq!(errors(&transcript), ["interrupted by a newer message of the user", "", ""]);
        let events = recorder.wait_for_sequence(status.event_sequence).await;
        check_order(&events);
        let outcomes: Vec<TurnOutcome> = events
            .iter()
            .filter_map(|event| match &event.payload {
                Some(Payload::TurnCompleted(turn)) => Some(turn.outcome()),
                _ => None,
            })
            .collect();
        assert_eq!(
            outcomes,
            [TurnOutcome::Interrupted, TurnOutcome::Completed, TurnOutcome::Completed]
        );
    };

    let working = async {
        let folder = mesh.folder("working").unwrap();
        let mark = format!("401.{}", std::process::id());
        std::fs::write(folder.join("mark.txt"), &mark).unwrap();
        let conversation = client.create_task("worker", Some(&folder)).await.unwrap();
        conversation.submit("A command, please.").await;
        wait_for_file(&folder.join("begun"), |_| true).await;
        let process = format!("sleep {mark}");
        assert!(is_running(&process));
        interrupt(&conversation, "quick, now").await;
        conversation.wait_until_idle().await;
        wait_for_process_end(&process).await;
        let transcript = conversation.transcript().await;
        transcript.check(&["A command, please.", "quick, now"]);
        let results = transcript.results();
        assert_eq!(results.len(), 2, "each script has one result:\n{}", transcript.show());
        assert!(results[0].error.contains("interrupted by a newer message"), "{results:?}");
        assert_eq!(transcript.answers().last().map(String::as_str), Some("quick: quick, now"));
    };

    tokio::join!(speaking, working);
}

#[tokio::test]
async fn conversation_is_rewound_edited_and_forked() {
    let mut mesh = Mesh::start().await.unwrap();
    let script = json!({"conversations": [
        {"match": "slow", "turns": [
            {"code": "execute_command('touch begun; sleep 402')"},
            {"text": "unused"},
        ]},
        {"match": "script", "turns": [{"code": "1 + 1"}, {"text": "It is {{last_result}}, {{user_messages}} asked."}]},
        {"match": "", "turns": [{"text": "{{user_messages}}: {{last_user_text}}"}]},
    ]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let client = mesh.client().unwrap();
    let folder = mesh.folder("own").unwrap();
    // With a title, no model call is made for one.
    let (agent, workspace) = ("worker".to_owned(), folder.display().to_string());
    let spec =
        v1::TaskSpec { agent, workspace, title: "A job".to_owned(), ..v1::TaskSpec::default() };
    let conversation = client.create_task_with(spec).await.unwrap();
    let recorder = conversation.record();
    conversation.ask("one").await;
    conversation.ask("a script").await;
    conversation.ask("three").await;
    let before = conversation.transcript().await;
    before.check(&["one", "a script", "three"]);
    assert_eq!(before.answers(), ["1: one", "", "It is 2, 2 asked.", "3: three"]);

    // A fork up to the script's end: its own task and transcript, and nothing pending.
    let answer = before.from_source(MessageSource::Assistant)[2];
    let copy = fork(&conversation, answer).await.unwrap();
    let copied = copy.task().await.unwrap();
    let (spec, state) = (copied.spec.unwrap(), copied.status.unwrap());
    assert_eq!((spec.workspace.as_str(), state.usage), ("", Some(v1::Usage::default())));
    assert_eq!(state.forked_from.as_ref().map(|from| from.task.as_str()), Some(conversation.id()));
    copy.ask("other").await;
    let transcript = copy.transcript().await;
    transcript.check(&["one", "a script", "other"]);
    assert_eq!(transcript.answers(), ["1: one", "", "It is 2, 2 asked.", "3: other"]);
    let notice = transcript
        .from_source(MessageSource::System)
        .into_iter()
        .map(text)
        .find(|text| text.contains("is a copy"));
    assert!(notice.is_some(), "{}", transcript.show());
    assert_eq!(
        conversation.transcript().await.messages,
        before.messages,
        "the original is as it was"
    );

    // A fork at the message that calls the script includes the result.
    let at_call =
        fork(&conversation, before.from_source(MessageSource::Assistant)[1]).await.unwrap();
    at_call.ask("other").await;
    let transcript = at_call.transcript().await;
    transcript.check(&["one", "a script", "other"]);
    assert_eq!(transcript.answers(), ["1: one", "", "3: other"]);

    // While a script runs and the reconciler is dead, a message is edited; the repeated request has
    // one effect.
    conversation.submit("slow").await;
    wait_for_file(&folder.join("begun"), |_| true).await;
    mesh.kill(Service::Reconciler).unwrap();
    let edited = edit(&conversation, user_message(&before, "a script"), "two", "key").await;
    assert_eq!(edit(&conversation, user_message(&before, "a script"), "two", "key").await, edited);
    assert_eq!(status(&edited).replaces, id(user_message(&before, "a script").metadata.as_ref()));
    let why = conversation.explain().await.unwrap();
    assert!(why.waiting_for.contains("rewind the conversation"), "{why:?}");
    mesh.spawn(Service::Reconciler).unwrap();
    let answered = async || {
        let transcript = conversation.transcript().await;
        if transcript.answers().last().is_some_and(|answer| answer == "2: two") {
            Ok(())
        } else {
            Err(transcript.show())
        }
    };
    until("the edited message to be answered", TURN_TIMEOUT, answered).await;
    wait_for_process_end("sleep 402").await;
    conversation.wait_until_idle().await;
    let shown: Vec<String> =
        conversation.transcript().await.placed_messages().into_iter().map(text).collect();
    assert_eq!(shown, ["one", "1: one", "two", "2: two"]);

    // Superseded messages keep their positions: no gap, each script with its result.
    let whole = conversation.full_transcript().await;
    whole.check(&["one", "a script", "three", "slow", "two"]);
    let aside =
        whole.messages.iter().filter(|message| status(message).superseded_at.is_some()).count();
    assert_eq!(aside, whole.messages.len() - 4, "{}", whole.show());
    assert!(errors(&whole)[3].contains("rewound"), "{}", whole.show());

    // Rewound to the beginning, and continued.
    let first = user_message(&whole, "one").clone();
    rewind(&conversation, &first, true).await.unwrap();
    let rewound = |_: &v1::Task, status: &v1::TaskStatus| status.phase() == TaskPhase::AwaitInput;
    conversation.wait_for_task("to await input", rewound).await;
    recorder.wait_for_count("task.rewound", 2).await;
    let gone = rewind(&conversation, user_message(&whole, "three"), false).await.unwrap_err();
    assert_eq!(gone.code(), Code::FailedPrecondition, "{gone:?}");
    let task = conversation.ask("again").await;
    assert_eq!(conversation.transcript().await.answers(), ["2: again"]);
    let events = recorder.wait_for_sequence(task.status.clone().unwrap().event_sequence).await;
    check_order(&events);
    // The cost of superseded messages stays charged.
    let spent: i64 = conversation
        .full_transcript()
        .await
        .messages
        .iter()
        .map(|message| status(message).usage.unwrap_or_default().cost_pico_usd)
        .sum();
    assert_eq!(task.status.unwrap().usage.unwrap_or_default().cost_pico_usd, spent);
}

//! A script's requests about tasks, with a crash of the process that sends them (the interpreter)
//! or executes them (the reconciler). A conversation is handed over once, and a message to the
//! parent is sent once, because a repeated call has the same effect (docs/adr/0031-subtasks.md); no
//! outcome is ever unknown.

use construct_proto::v1::{TaskSpec, TurnOutcome};
use construct_tests::{
    client::{Conversation, id},
    mesh::Service,
    proxy::Moment,
    recorder::{Recorder, check_order},
};
use serde_json::json;

use super::{JOURNAL, KillPoint, ProxiedMesh, RESULT, WAKE};
use crate::read;

/// The subjects of a script's requests about tasks and of their replies.
const REQUEST: &str = "construct.v1.ctl.reconciler.subtasks";
const REPLY: &str = "_INBOX.interpreter.";
/// Text that is written for a hand-over and for a message to the parent, and for nothing else in
/// these jobs.
const HANDED_OVER: &str = "task.updated";
const PARENT_MESSAGE: &str = "[Message of the subtask";

/// The points at which the interpreter is killed.
const INTERPRETER_KILL_POINTS: [(&str, KillPoint); 5] = [
    ("it is not asked", KillPoint::Message(Moment::Sent, REQUEST, 1, None)),
    ("it is done, and that is not known", KillPoint::Message(Moment::Answered, REQUEST, 1, None)),
    (
        "it is known to be done, and that is not written",
        KillPoint::Message(Moment::Sent, JOURNAL, 1, Some(REQUEST)),
    ),
    (
        "that is written, and not known to be",
        KillPoint::Message(Moment::Answered, JOURNAL, 1, Some(REQUEST)),
    ),
    (
        "the script is over, the result is not published",
        KillPoint::Message(Moment::Sent, RESULT, 1, Some(REQUEST)),
    ),
];

/// The points at which the reconciler is killed during a hand-over.
const HAND_OVER_KILL_POINTS: [(&str, KillPoint); 3] = [
    ("it is not committed", KillPoint::Commit(Moment::Sent, HANDED_OVER)),
    ("it is committed, and that is not known", KillPoint::Commit(Moment::Answered, HANDED_OVER)),
    ("it is committed, who asks is not answered", KillPoint::Message(Moment::Sent, REPLY, 1, None)),
];

/// The points at which the reconciler is killed during a message to a parent.
const PARENT_MESSAGE_KILL_POINTS: [(&str, KillPoint); 5] = [
    ("it is not committed", KillPoint::Commit(Moment::Sent, PARENT_MESSAGE)),
    ("it is committed, and that is not known", KillPoint::Commit(Moment::Answered, PARENT_MESSAGE)),
    ("it is committed, the parent is not woken", KillPoint::Message(Moment::Sent, WAKE, 1, None)),
    (
        "the parent is woken, and that is not known",
        KillPoint::Message(Moment::Answered, WAKE, 1, None),
    ),
    ("it is committed, who asks is not answered", KillPoint::Message(Moment::Sent, REPLY, 1, None)),
];

/// A conversation whose task has a title: a model call for one would write something else.
async fn begin(proxied: &ProxiedMesh, agent: &str, name: &str) -> (Conversation, Recorder) {
    let workspace = proxied.mesh.folder(name).unwrap().display().to_string();
    let spec = TaskSpec {
        agent: agent.to_owned(),
        workspace,
        title: "A job".to_owned(),
        ..TaskSpec::default()
    };
    let conversation = proxied.mesh.client().unwrap().create_task_with(spec).await.unwrap();
    let recorder = conversation.record();
    (conversation, recorder)
}

/// Waits until the task is idle, its last turn has completed, and its events are complete. Returns
/// its agent and its events.
async fn wait_until_idle(
    conversation: &Conversation,
    recorder: &Recorder,
) -> (String, Vec<String>) {
    let status = conversation.wait_until_idle().await.status.unwrap();
    assert_eq!(
        status.last_outcome(),
        TurnOutcome::Completed,
        "{}",
        conversation.transcript().await.show()
    );
    let events = recorder.wait_for_sequence(status.event_sequence).await;
    check_order(&events);
    (status.agent_id, events.into_iter().map(|event| event.r#type).collect())
}

async fn hand_over_survives(service: Service, places: &[(&str, KillPoint)]) {
    let mut proxied = ProxiedMesh::start(service).await;
    let code = [
        "execute_command('echo done >> effects.log');",
        "tasks.hand_off('lawyer', 'mind the contract');",
        "'handed over'",
    ];
    let script =
        json!({"turns": [{"text": "That is for a lawyer.", "code": [code]}, {"text": "unused"}]});
    proxied.mesh.scripted_agent("clerk", &script).await.unwrap();
    let script =
        json!({"turns": [{"text": "unused"}, {"text": "The lawyer says: {{last_result}}"}]});
    let lawyer = proxied.mesh.scripted_agent("lawyer", &script).await.unwrap();
    let lawyer = id(lawyer.metadata.as_ref());
    for (n, (name, place)) in places.iter().enumerate() {
        println!("{service:?}: {name}");
        let folder = format!("hand-over-{n}");
        let (conversation, recorder) = begin(&proxied, "clerk", &folder).await;
        let working = async {
            conversation.submit("Do it.").await;
            recorder.wait_for_count("turn.completed", 1).await;
        };
        let killed = proxied.kill_during(working, Some(*place)).await;
        assert!(killed, "{service:?} did not come to where it is to be killed: {name}");
        let (agent, events) = wait_until_idle(&conversation, &recorder).await;
        assert_eq!(agent, lawyer, "{name}");
        let told = events.iter().filter(|kind| *kind == HANDED_OVER).count();
        assert_eq!(told, 1, "{name}: it is published once: {events:?}");
        let transcript = conversation.transcript().await;
        transcript.check(&["Do it."]);
        let last = "The lawyer says: handed over\n[the agent lawyer takes over this conversation: mind the contract]";
        assert_eq!(
            transcript.answers(),
            ["That is for a lawyer.", last],
            "{name}: {}",
            transcript.show()
        );
        assert_eq!(
            read(&proxied.mesh.workspace().join(folder).join("effects.log")),
            "done\n",
            "{name}"
        );
        proxied.mesh.wait_until_ready(service).await.unwrap();
    }
}

async fn message_to_parent_survives(service: Service, places: &[(&str, KillPoint)]) {
    let mut proxied = ProxiedMesh::start(service).await;
    let code = "tasks.spawn({ message: 'Wait.', agent: 'child', title: 'A part' }).task";
    let script = json!({"conversations": [
        {"match": "Go.", "turns": [{"code": code}, {"text": "{{last_result}}"}]},
        {"match": "halfway", "turns": [{"text": "I heard."}]},
    ]});
    proxied.mesh.scripted_agent("parent", &script).await.unwrap();
    let code =
        ["execute_command('echo done >> effects.log');", "tasks.parent('halfway');", "'told'"];
    let script = json!({"conversations": [
        {"match": "Wait.", "turns": [{"text": "I wait."}]},
        {"match": "Tell it.", "turns": [{"code": [code]}, {"text": "I am {{last_result}}."}]},
    ]});
    proxied.mesh.scripted_agent("child", &script).await.unwrap();
    let (parent, heard) = begin(&proxied, "parent", "family").await;
    parent.submit("Go.").await;
    wait_until_idle(&parent, &heard).await;
    let child = parent.client().conversation(&parent.transcript().await.result().output);
    let said = child.record();
    wait_until_idle(&child, &said).await;
    // The messages to each task so far, and its answers beside scripts.
    let (mut to_parent, mut to_child) = (vec!["Go.".to_owned()], vec!["Wait."]);
    let (mut from_parent, mut from_child) = (vec![child.id().to_owned()], vec!["I wait."]);
    for (name, place) in places {
        println!("{service:?}: {name}");
        let turns = to_child.len() + 1;
        let working = async {
            child.submit("Tell it.").await;
            said.wait_for_count("turn.completed", turns).await;
            heard.wait_for_count("turn.completed", turns).await;
        };
        let killed = proxied.kill_during(working, Some(*place)).await;
        assert!(killed, "{service:?} did not come to where it is to be killed: {name}");
        to_child.push("Tell it.");
        from_child.push("I am told.");
        to_parent.push(format!("{PARENT_MESSAGE} {} (A part)]\n\nhalfway", child.id()));
        from_parent.push("I heard.".to_owned());
        wait_until_idle(&child, &said).await;
        wait_until_idle(&parent, &heard).await;
        let spoken = |answers: Vec<String>| {
            answers.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>()
        };
        let transcript = child.transcript().await;
        transcript.check(&to_child);
        assert_eq!(spoken(transcript.answers()), from_child, "{name}: {}", transcript.show());
        let transcript = parent.transcript().await;
        transcript.check(&to_parent.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(spoken(transcript.answers()), from_parent, "{name}: {}", transcript.show());
        let effects = read(&proxied.mesh.workspace().join("family").join("effects.log"));
        assert_eq!(effects, "done\n".repeat(turns - 1), "{name}");
        proxied.mesh.wait_until_ready(service).await.unwrap();
    }
}

#[tokio::test]
async fn hand_over_survives_interpreter_crash_around_its_request() {
    hand_over_survives(Service::Interpreter, &INTERPRETER_KILL_POINTS).await;
}

#[tokio::test]
async fn hand_over_survives_reconciler_crash_around_request_and_reply() {
    hand_over_survives(Service::Reconciler, &HAND_OVER_KILL_POINTS).await;
}

#[tokio::test]
async fn message_to_parent_survives_interpreter_crash_around_request() {
    message_to_parent_survives(Service::Interpreter, &INTERPRETER_KILL_POINTS).await;
}

#[tokio::test]
async fn message_to_parent_survives_reconciler_crash_around_request() {
    message_to_parent_survives(Service::Reconciler, &PARENT_MESSAGE_KILL_POINTS).await;
}

//! What a script asks about tasks, and whose process ends in the middle of it: who asks (the
//! interpreter) and who carries it out (the reconciler). A conversation is handed over once, and a
//! message to the parent is said once, because a call that is made again makes the same
//! (docs/adr/0031-subtasks.md); nothing of it is ever of unknown outcome.

use construct_proto::v1::{TaskSpec, TurnOutcome};
use construct_tests::{
    client::{Conversation, id},
    mesh::Service,
    proxy::Moment,
    recorder::{Recorder, check_order},
};
use serde_json::json;

use super::{JOURNAL, Place, RESULT, WAKE, Watched};
use crate::read;

/// Where a script's questions about tasks go, and the answers to them.
const QUESTION: &str = "construct.v1.ctl.reconciler.subtasks";
const ANSWER: &str = "_INBOX.interpreter.";
/// What is written of a hand-over, and of a message to the parent, and of nothing else in these
/// jobs.
const HANDED_OVER: &str = "task.updated";
const SAID: &str = "[Message of the subtask";

/// Where the interpreter is killed.
const ASKING: [(&str, Place); 5] = [
    ("it is not asked", Place::Message(Moment::Sent, QUESTION, 1, None)),
    ("it is done, and that is not known", Place::Message(Moment::Answered, QUESTION, 1, None)),
    (
        "it is known to be done, and that is not written",
        Place::Message(Moment::Sent, JOURNAL, 1, Some(QUESTION)),
    ),
    (
        "that is written, and not known to be",
        Place::Message(Moment::Answered, JOURNAL, 1, Some(QUESTION)),
    ),
    (
        "the script is over, the result is not published",
        Place::Message(Moment::Sent, RESULT, 1, Some(QUESTION)),
    ),
];

/// Where the reconciler is killed that hands a conversation over.
const HANDING_OVER: [(&str, Place); 3] = [
    ("it is not committed", Place::Commit(Moment::Sent, HANDED_OVER)),
    ("it is committed, and that is not known", Place::Commit(Moment::Answered, HANDED_OVER)),
    ("it is committed, who asks is not answered", Place::Message(Moment::Sent, ANSWER, 1, None)),
];

/// Where the one is killed that says something to a parent.
const SAYING: [(&str, Place); 5] = [
    ("it is not committed", Place::Commit(Moment::Sent, SAID)),
    ("it is committed, and that is not known", Place::Commit(Moment::Answered, SAID)),
    ("it is committed, the parent is not woken", Place::Message(Moment::Sent, WAKE, 1, None)),
    ("the parent is woken, and that is not known", Place::Message(Moment::Answered, WAKE, 1, None)),
    ("it is committed, who asks is not answered", Place::Message(Moment::Sent, ANSWER, 1, None)),
];

/// A conversation whose task has a title: a model call for one would be something else that is
/// written.
async fn begin(watched: &Watched, agent: &str, name: &str) -> (Conversation, Recorder) {
    let workspace = watched.mesh.folder(name).unwrap().display().to_string();
    let spec = TaskSpec {
        agent: agent.to_owned(),
        workspace,
        title: "A job".to_owned(),
        ..TaskSpec::default()
    };
    let conversation = watched.mesh.client().unwrap().begin_as(spec).await.unwrap();
    let recorder = conversation.record();
    (conversation, recorder)
}

/// The task is at rest, its last turn went well, and its events are whole. Gives its agent, and its
/// events.
async fn rests(conversation: &Conversation, recorder: &Recorder) -> (String, Vec<String>) {
    let status = conversation.settled().await.status.unwrap();
    assert_eq!(
        status.last_outcome(),
        TurnOutcome::Completed,
        "{}",
        conversation.transcript().await.show()
    );
    let events = recorder.until_sequence(status.event_sequence).await;
    check_order(&events);
    (status.agent_id, events.into_iter().map(|event| event.r#type).collect())
}

async fn hands_over(service: Service, places: &[(&str, Place)]) {
    let mut watched = Watched::start(service).await;
    let code = [
        "execute_command('echo done >> effects.log');",
        "tasks.hand_off('lawyer', 'mind the contract');",
        "'handed over'",
    ];
    let script =
        json!({"turns": [{"text": "That is for a lawyer.", "code": [code]}, {"text": "unused"}]});
    watched.mesh.scripted_agent("clerk", &script).await.unwrap();
    let script =
        json!({"turns": [{"text": "unused"}, {"text": "The lawyer says: {{last_result}}"}]});
    let lawyer = watched.mesh.scripted_agent("lawyer", &script).await.unwrap();
    let lawyer = id(lawyer.metadata.as_ref());
    for (n, (name, place)) in places.iter().enumerate() {
        println!("{service:?}: {name}");
        let folder = format!("hand-over-{n}");
        let (conversation, recorder) = begin(&watched, "clerk", &folder).await;
        let working = async {
            conversation.say("Do it.").await;
            recorder.until_count("turn.completed", 1).await;
        };
        let killed = watched.kill_during(working, Some(*place)).await;
        assert!(killed, "{service:?} did not come to where it is to be killed: {name}");
        let (agent, events) = rests(&conversation, &recorder).await;
        assert_eq!(agent, lawyer, "{name}");
        let told = events.iter().filter(|kind| *kind == HANDED_OVER).count();
        assert_eq!(told, 1, "{name}: it is told of once: {events:?}");
        let transcript = conversation.transcript().await;
        transcript.check(&["Do it."]);
        let last = "The lawyer says: handed over\n[the agent lawyer goes on with this conversation: mind the contract]";
        assert_eq!(
            transcript.answers(),
            ["That is for a lawyer.", last],
            "{name}: {}",
            transcript.show()
        );
        assert_eq!(
            read(&watched.mesh.workspace().join(folder).join("effects.log")),
            "done\n",
            "{name}"
        );
        watched.mesh.ready(service).await.unwrap();
    }
}

async fn tells_its_parent(service: Service, places: &[(&str, Place)]) {
    let mut watched = Watched::start(service).await;
    let code = "tasks.spawn({ message: 'Wait.', agent: 'child', title: 'A part' }).task";
    let script = json!({"conversations": [
        {"match": "Go.", "turns": [{"code": code}, {"text": "{{last_result}}"}]},
        {"match": "halfway", "turns": [{"text": "I heard."}]},
    ]});
    watched.mesh.scripted_agent("parent", &script).await.unwrap();
    let code =
        ["execute_command('echo done >> effects.log');", "tasks.parent('halfway');", "'told'"];
    let script = json!({"conversations": [
        {"match": "Wait.", "turns": [{"text": "I wait."}]},
        {"match": "Tell it.", "turns": [{"code": [code]}, {"text": "I am {{last_result}}."}]},
    ]});
    watched.mesh.scripted_agent("child", &script).await.unwrap();
    let (parent, heard) = begin(&watched, "parent", "family").await;
    parent.say("Go.").await;
    rests(&parent, &heard).await;
    let child = parent.client().conversation(&parent.transcript().await.result().output);
    let said = child.record();
    rests(&child, &said).await;
    // What was said to each so far, by whoever it was, and what each has answered beside scripts.
    let (mut to_parent, mut to_child) = (vec!["Go.".to_owned()], vec!["Wait."]);
    let (mut from_parent, mut from_child) = (vec![child.id().to_owned()], vec!["I wait."]);
    for (name, place) in places {
        println!("{service:?}: {name}");
        let turns = to_child.len() + 1;
        let working = async {
            child.say("Tell it.").await;
            said.until_count("turn.completed", turns).await;
            heard.until_count("turn.completed", turns).await;
        };
        let killed = watched.kill_during(working, Some(*place)).await;
        assert!(killed, "{service:?} did not come to where it is to be killed: {name}");
        to_child.push("Tell it.");
        from_child.push("I am told.");
        to_parent.push(format!("{SAID} {} (A part)]\n\nhalfway", child.id()));
        from_parent.push("I heard.".to_owned());
        rests(&child, &said).await;
        rests(&parent, &heard).await;
        let spoken = |answers: Vec<String>| {
            answers.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>()
        };
        let transcript = child.transcript().await;
        transcript.check(&to_child);
        assert_eq!(spoken(transcript.answers()), from_child, "{name}: {}", transcript.show());
        let transcript = parent.transcript().await;
        transcript.check(&to_parent.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(spoken(transcript.answers()), from_parent, "{name}: {}", transcript.show());
        let effects = read(&watched.mesh.workspace().join("family").join("effects.log"));
        assert_eq!(effects, "done\n".repeat(turns - 1), "{name}");
        watched.mesh.ready(service).await.unwrap();
    }
}

#[tokio::test]
async fn hand_over_survives_interpreter_crash_around_its_request() {
    hands_over(Service::Interpreter, &ASKING).await;
}

#[tokio::test]
async fn hand_over_survives_reconciler_crash_around_request_and_reply() {
    hands_over(Service::Reconciler, &HANDING_OVER).await;
}

#[tokio::test]
async fn message_to_parent_survives_interpreter_crash_around_request()
{
    tells_its_parent(Service::Interpreter, &ASKING).await;
}

#[tokio::test]
async fn message_to_parent_survives_reconciler_crash_around_request() {
    tells_its_parent(Service::Reconciler, &SAYING).await;
}

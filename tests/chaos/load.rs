//! What is worked on meanwhile: conversations whose every message has side effects, done by their scripts or by subtasks of them.

use std::{
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use construct_tests::{client::Conversation, mesh::Mesh, recorder::Recorder};
use serde_json::{Value, json};

/// Conversations at the same time, and how many of them have subtasks do the work.
const CONVERSATIONS: usize = 5;
const WITH_SUBTASKS: usize = 1;
/// Side effects of each message.
pub(crate) const EFFECTS: usize = 6;

/// One conversation.
pub(crate) struct Job {
    pub(crate) conversation: Conversation,
    pub(crate) recorder: Recorder,
    pub(crate) folder: PathBuf,
    /// Whether subtasks do the work.
    pub(crate) delegates: bool,
    pub(crate) said: Mutex<Vec<String>>,
}

/// Each effect is a line or a file of its own, named after the message. What is not known is taken down, as the model is asked to.
fn script() -> Value {
    let code = [
        "const message = {{json last_user_text}}, unknown = [];",
        "const effect = async n => {",
        "  try {",
        "    if (n % 3 === 0) await tools.create_file(`made/${message}.${n}`, 'made');",
        "    else {",
        "      const done = await tools.execute_command(`echo ${message}.${n} >> effects.log && sleep 0.0${n}`);",
        "      if (done.exit_code !== 0) throw new Error(`effect ${n} has failed: ${done.stderr}`);",
        "    }",
        "  } catch (error) {",
        "    if (error.name !== 'OutcomeUnknown') throw error;",
        "    unknown.push(n);",
        "  }",
        "};",
        "for (let n = 1; n <= 3; n++) await effect(n);",
        "await Promise.all([4, 5, 6].map(effect));",
        "`unknown of ${message}: ${JSON.stringify(unknown)}.`",
    ];
    json!({"count": "since_user", "turns": [
        {"text": "I shall do that now.", "tokens_per_second": 40, "code": [code]},
        {"text": "Done. {{last_result}}", "tokens_per_second": 80},
    ]})
}

/// Each half of a message's effects is a subtask's. What that does not know is taken down as well, and so is all of one that has not completed.
fn manager() -> Value {
    let code = [
        "const message = {{json last_user_text}}, unknown = [], halves = [[1, 2, 3], [4, 5, 6]], begun = [];",
        "for (const half of halves) {",
        "  const order = { message: JSON.stringify({ message, half }), agent: 'hand', title: `${message} ${half}` };",
        "  try { begun.push(tasks.spawn(order).task) }",
        "  catch (error) { if (error.name !== 'TooManySubtasks') throw error; unknown.push(...half) }",
        "}",
        "const ended = begun.length > 0 ? tasks.await(begun) : [];",
        "ended.forEach((one, n) => {",
        "  if (one.task !== begun[n]) throw new Error('answers are not in order');",
        "  unknown.push(...(one.status === 'completed' ? JSON.parse(one.answer) : halves[n]));",
        "});",
        "`unknown of ${message}: ${JSON.stringify(unknown)}.`",
    ];
    json!({"count": "since_user", "turns": [
        {"text": "I shall have that done.", "tokens_per_second": 40, "code": [code]},
        {"text": "Done. {{last_result}}", "tokens_per_second": 80},
    ]})
}

fn hand() -> Value {
    let code = [
        "const { message, half } = JSON.parse({{json last_user_text}}), unknown = [];",
        "for (const n of half) {",
        "  try {",
        "    const done = execute_command(`echo ${message}.${n} >> effects.log && sleep 0.0${n}`);",
        "    if (done.exit_code !== 0) throw new Error(`effect ${n} has failed: ${done.stderr}`);",
        "  }",
        "  catch (error) { if (error.name !== 'OutcomeUnknown') throw error; unknown.push(n) }",
        "}",
        "JSON.stringify(unknown)",
    ];
    json!({"count": "since_user", "turns": [{"code": [code]}, {"text": "{{last_result}}", "tokens_per_second": 80}]})
}

/// Begins all conversations.
pub(crate) async fn begin(mesh: &Mesh) -> Vec<Job> {
    mesh.scripted_agent("worker", &script()).await.unwrap();
    mesh.scripted_agent("manager", &manager()).await.unwrap();
    mesh.scripted_agent("hand", &hand()).await.unwrap();
    let mut jobs = Vec::new();
    for n in 0..CONVERSATIONS {
        let folder = mesh.folder(&format!("job-{n}")).unwrap();
        let delegates = n < WITH_SUBTASKS;
        let agent = if delegates { "manager" } else { "worker" };
        let conversation = mesh.client().unwrap().begin(agent, Some(&folder)).await.unwrap();
        let recorder = conversation.record();
        jobs.push(Job { conversation, recorder, folder, delegates, said: Mutex::default() });
    }
    jobs
}

/// Sends messages until it is `over`: some while the one before them is worked on, some after.
pub(crate) async fn speak(jobs: &[Job], over: &AtomicBool) {
    let speaking = jobs.iter().map(async |job| {
        for n in 0.. {
            let text = format!("m{n}");
            job.conversation.say(&text).await;
            job.said.lock().unwrap().push(text);
            if n % 2 == 1 {
                job.conversation.settled().await;
                if over.load(Ordering::Relaxed) {
                    return;
                }
            }
        }
    });
    futures::future::join_all(speaking).await;
}

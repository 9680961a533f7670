//! Commands that pin facts, rewind and fork conversations, schedule messages, and handle dead
//! letters and quarantined tasks.

use std::time::Duration;

use construct_bus::subject;
use construct_domain::TaskId;
use construct_proto::{mesh::v1::TaskCensus, v1::TurnOutcome};
use construct_tests::{
    client::TURN_TIMEOUT,
    mesh::{Mesh, Service},
    wait::until,
};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::{
    construct,
    entities::{check, get, run},
};

const NO_TASK: &str = "task_01890a5d-ac96-774b-bcce-b302099a8057";
const NO_MESSAGE: &str = "msg_01890a5d-ac96-774b-bcce-b302099a8057";

/// The id in a command's output.
fn id_of(made: &Value) -> String {
    made["metadata"]["id"].as_str().unwrap_or_else(|| panic!("{made}")).to_owned()
}

/// A task's listed messages: ids and texts.
async fn messages(mesh: &Mesh, task: &str) -> Vec<(String, String)> {
    let listed = run(mesh, &format!("message list {task} -o json"), "", 0, &[]).await.json();
    let text = |message: &Value| {
        message["spec"]["blocks"][0]["text"]["text"].as_str().unwrap_or_default().to_owned()
    };
    listed["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|message| (id_of(message), text(message)))
        .collect()
}

/// Waits until the task has exactly these messages.
async fn wait_for_messages(mesh: &Mesh, task: &str, expected: &[&str]) -> Vec<(String, String)> {
    until("the conversation's messages", TURN_TIMEOUT, async || {
        let messages = messages(mesh, task).await;
        if messages.iter().map(|(_, text)| text).eq(expected) {
            Ok(messages)
        } else {
            Err(messages)
        }
    })
    .await
}

#[tokio::test]
async fn pinned_facts_are_added_listed_and_removed() {
    // The task's progress does not matter here, so no worker runs.
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    mesh.spawn(Service::Gateway).unwrap();
    mesh.wait_until_ready(Service::Gateway).await.unwrap();
    mesh.scripted_agent("worker", &json!([])).await.unwrap();
    let made = run(
        &mesh,
        "task create --pin 'The port is 8417.' --pin 'Ann decides.' -o json",
        "",
        0,
        &[],
    )
    .await
    .json();
    assert_eq!(made["spec"]["pinned"], json!(["The port is 8417.", "Ann decides."]));
    let task = id_of(&made);
    check(
        &mesh,
        &[
            ("task create --pin ' '", "", 2, &["- spec.pinned[0]: must not be blank"]),
            (
                &format!("task get {task}"),
                "",
                0,
                &["pinned:\n  1. The port is 8417.\n  2. Ann decides.\n"],
            ),
            (
                &format!("task pin {task} 'It rains.'"),
                "",
                0,
                &["  2. Ann decides.\n  3. It rains.\n"],
            ),
            // It is pinned, so nothing changes.
            (
                &format!("task pin {task} 'It rains.' -o json"),
                "",
                0,
                &["\"It rains.\"", "\"revision\": \"2\""],
            ),
            (&format!("task pin {task} ' '"), "", 2, &["- pinned.facts[3]: must not be blank"]),
            (&format!("task pin {NO_TASK} x"), "", 1, &["not found"]),
            (
                &format!("task unpin {task} Ann"),
                "",
                1,
                &["there is no pinned fact Ann", "hint: construct task get"],
            ),
            (&format!("task unpin {task} 4"), "", 1, &["there is no pinned fact 4"]),
            (
                &format!("task unpin {task} 2"),
                "",
                0,
                &["pinned:\n  1. The port is 8417.\n  2. It rains.\n"],
            ),
            (&format!("task unpin {task} 'The port is 8417.'"), "", 0, &["1. It rains.\n"]),
            // Other updates leave it unchanged.
            (&format!("task update {task} --title Weather"), "", 0, &["Weather", "1. It rains.\n"]),
        ],
    )
    .await;
    assert_eq!(
        get(&mesh, &format!("task get {task}")).await["spec"]["pinned"],
        json!(["It rains."])
    );
    let without = run(&mesh, &format!("task unpin {task} 1"), "", 0, &[&task]).await;
    assert!(!without.output.contains("pinned"), "{without:?}");
}

#[tokio::test]
async fn conversation_is_rewound_edited_and_forked() {
    let mesh = Mesh::start().await.unwrap();
    let turns = json!([{"text": "{{user_messages}}: {{last_user_text}}"}]);
    mesh.scripted_agent("worker", &json!({"conversations": [{"match": "", "turns": turns}]}))
        .await
        .unwrap();
    let client = mesh.client().unwrap();
    let task = id_of(&run(&mesh, "task create --title Job -o json", "", 0, &[]).await.json());
    for words in ["one", "two", "three"] {
        client.conversation(&task).ask(words).await;
    }
    let said =
        wait_for_messages(&mesh, &task, &["one", "1: one", "two", "2: two", "three", "3: three"])
            .await;
    let (two, three) = (&said[2].0, &said[4].0);

    // Rewinds to before a message, and to after one.
    run(&mesh, &format!("task rewind {task} {three}"), "", 0, &[&task, "phase:"]).await;
    wait_for_messages(&mesh, &task, &["one", "1: one", "two", "2: two"]).await;
    check(
        &mesh,
        &[
            (&format!("message list {task} --superseded"), "", 0, &["superseded", "3: three"]),
            (&format!("message get {three}"), "", 0, &["superseded:", "three"]),
            (&format!("task rewind {task} {three}"), "", 1, &["not in the transcript"]),
            (&format!("task rewind {task} {NO_MESSAGE}"), "", 1, &["not found", NO_MESSAGE]),
            (&format!("task rewind {task} nonsense"), "", 2, &["- message: "]),
            (&format!("task rewind {task} {two} --keep -o json"), "", 0, &["\"phase\": "]),
        ],
    )
    .await;
    wait_for_messages(&mesh, &task, &["one", "1: one", "two"]).await;

    // The same message with another text, from the command line or from a pipe.
    run(&mesh, &format!("message edit {two}"), "deux", 0, &["replaces:", two, "queued", "deux"])
        .await;
    let said = wait_for_messages(&mesh, &task, &["one", "1: one", "deux", "2: deux"]).await;
    client.conversation(&task).wait_until_idle().await;
    let (deux, answer) = (&said[2].0, &said[3].0);
    check(
        &mesh,
        &[
            (&format!("message edit {two} again"), "", 1, &["not in the transcript"]),
            (&format!("message edit {deux}"), " ", 2, &["- blocks: "]),
            (&format!("message edit {NO_MESSAGE} x"), "", 1, &["not found"]),
            (&format!("task fork {task} {two}"), "", 1, &["not in the transcript"]),
            (&format!("task fork {task} {NO_MESSAGE}"), "", 1, &["not found"]),
            (&format!("task fork {task} nonsense"), "", 2, &["- message: "]),
        ],
    )
    .await;

    // A fork continues independently, and its origin is unchanged.
    let copy = run(&mesh, &format!("task fork {task} {answer} --title Copy -o json"), "", 0, &[])
        .await
        .json();
    assert_eq!(copy["spec"]["title"], "Copy", "{copy}");
    assert_eq!(copy["status"]["forkedFrom"], json!({"task": task, "message": answer}), "{copy}");
    let copy = id_of(&copy);
    client.conversation(&copy).ask("trois").await;
    let from = format!("{task}, up to {answer}");
    check(
        &mesh,
        &[
            (&format!("task get {copy}"), "", 0, &["forked from:", &from]),
            (
                &format!("message list {copy} --source assistant"),
                "",
                0,
                &["1: one", "2: deux", "3: trois"],
            ),
        ],
    )
    .await;
    wait_for_messages(&mesh, &task, &["one", "1: one", "deux", "2: deux"]).await;
}

/// The ids of the dead letters that a command lists.
async fn letters(mesh: &Mesh, options: &str) -> Vec<u64> {
    let listed = run(mesh, &format!("deadletter list {options} -o json"), "", 0, &[]).await.json();
    let letters = listed["letters"].as_array().unwrap().iter();
    letters.map(|letter| letter["id"].as_str().and_then(|id| id.parse().ok()).unwrap()).collect()
}

#[tokio::test]
async fn dead_letters_are_listed_redriven_deleted_and_tasks_retried() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &json!({"turns": [{"text": "{{last_user_text}}"}]}))
        .await
        .unwrap();
    let conversation = mesh.client().unwrap().create_task("worker", None).await.unwrap();
    let id: TaskId = conversation.id().parse().unwrap();
    let none = run(&mesh, "deadletter list", "", 0, &["ID", "SUBJECT", "REASON", "AGE"]).await;
    assert_eq!(none.output.lines().count(), 1, "{none:?}");
    // An invalid payload where wakes are expected.
    let subject = subject::Address::subject(&subject::TaskWake::new(id));
    let bus = mesh.bus().await;
    for n in 0..2 {
        let census = TaskCensus { task_ids: vec![n.to_string()] };
        bus.publish_raw(&subject, &census).await.unwrap();
    }
    let two = async |newer_than: u64| {
        until("two dead letters", TURN_TIMEOUT, async || {
            match letters(&mesh, "").await.as_slice() {
                [first, second] if *second > newer_than => Ok((*first, *second)),
                other => Err(other.to_vec()),
            }
        })
        .await
    };
    let (first, second) = two(0).await;
    assert_eq!(letters(&mesh, "--limit 1").await, [first]);
    assert_eq!(letters(&mesh, &format!("--after {first}")).await, [second]);
    let (row, kind) = (first.to_string(), "construct.mesh.v1.TaskCensus");
    check(
        &mesh,
        &[
            ("deadletter list", "", 0, &[&row, &subject, "TaskCensus"]),
            (
                &format!("deadletter show {first}"),
                "",
                0,
                &["CONSTRUCT_TASK", &subject, kind, "time:", "reason:"],
            ),
            (&format!("deadletter show {first} -o json"), "", 0, &["\"redrivable\": true", kind]),
            ("deadletter show nonsense", "", 2, &["LETTER"]),
            ("deadletter list --limit 0", "", 2, &["--limit"]),
            (
                &format!("deadletter redrive {first}"),
                "",
                0,
                &[&format!("dead letter {first} was published again\n")],
            ),
            (&format!("deadletter redrive {first}"), "", 1, &["not found"]),
        ],
    )
    .await;
    // It is still undecodable: another dead letter.
    let (left, again) = two(second).await;
    assert_eq!(left, second);
    for letter in [left, again] {
        check(
            &mesh,
            &[
                (
                    &format!("deadletter drop {letter}"),
                    "",
                    0,
                    &[&format!("dead letter {letter} was removed\n")],
                ),
                (&format!("deadletter drop {letter}"), "", 1, &["not found"]),
                (&format!("deadletter show {letter}"), "", 1, &["not found"]),
            ],
        )
        .await;
    }
    assert!(letters(&mesh, "").await.is_empty());

    // A task that cannot be read is quarantined until a person retries it.
    let task = conversation.id();
    mesh.database.corrupt_task(id, true).await;
    conversation.submit("hello").await;
    until("the task to be quarantined", TURN_TIMEOUT, async || {
        let why = construct(&mesh, &["explain", task], "").await;
        if why.output.contains("it was quarantined") && why.output.contains("construct task retry")
        {
            Ok(())
        } else {
            Err(why)
        }
    })
    .await;
    run(&mesh, &format!("task get {task}"), "", 0, &["last error:", "UNREADABLE"]).await;
    mesh.database.corrupt_task(id, false).await;
    check(
        &mesh,
        &[
            (&format!("message list {task}"), "", 0, &["queued", "hello"]),
            ("task retry nonsense", "", 2, &["- task: "]),
            (&format!("task retry {NO_TASK}"), "", 1, &["not found"]),
            (&format!("task retry {task}"), "", 0, &[task, "queued:"]),
        ],
    )
    .await;
    wait_for_messages(&mesh, task, &["hello", "hello"]).await;
}

#[tokio::test]
async fn scheduled_messages_are_sent_and_their_runs_listed() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &json!({"turns": [{"text": "{{last_user_text}}"}]}))
        .await
        .unwrap();
    let weekly = "schedule create weekly --agent worker --cron '0 9 * * MON' --time-zone Europe/Berlin --missed skip \
                  --title Monday 'Look at the news.'";
    check(
        &mesh,
        &[
            (
                weekly,
                "",
                0,
                &[
                    "weekly",
                    "0 9 * * MON Europe/Berlin",
                    "missed runs: skipped",
                    "Monday",
                    "Look at the news.",
                ],
            ),
            (weekly, "", 1, &["exists already"]),
            ("schedule create x --agent worker --cron '61 * * * *' x", "", 2, &["- spec.cron: "]),
            (
                "schedule create x --agent worker --cron '0 9 * * *' --time-zone Europe/Atlantis x",
                "",
                2,
                &["- spec.time_zone: "],
            ),
            ("schedule create x --agent nobody --cron '0 9 * * *' x", "", 1, &["nobody"]),
            (
                "schedule create x --agent worker --at 2020-01-01T00:00:00Z x",
                "",
                2,
                &["- spec.at: "],
            ),
            ("schedule create x --agent worker --at soon x", "", 2, &["--at"]),
            ("schedule create x --agent worker --cron '0 9 * * *'", " ", 2, &["- spec.blocks: "]),
            ("schedule list", "", 0, &["NAME", "weekly", "worker", "Look at the news."]),
            ("schedule list --name-prefix x -o json", "", 0, &["\"schedules\": []"]),
            (
                "schedule update weekly --cron '0 10 * * MON' --text 'Look at the weather.'",
                "",
                0,
                &["0 10 * * MON Europe/Berlin", "Look at the weather."],
            ),
            (
                "schedule update weekly --revision 1 --text late",
                "",
                1,
                &["it was changed concurrently"],
            ),
            ("schedule pause weekly", "", 0, &["next run:", "paused"]),
            ("schedule list", "", 0, &["paused"]),
            ("schedule resume weekly", "", 0, &["next run:", "(in "]),
            ("schedule runs weekly", "", 0, &["DUE", "OUTCOME"]),
            ("schedule get nobody", "", 1, &["not found", "nobody"]),
        ],
    )
    .await;
    assert_eq!(get(&mesh, "schedule get weekly").await["spec"]["missedRuns"], "MISSED_RUNS_SKIP");

    // A scheduled message in an existing task.
    let task = id_of(&run(&mesh, "task create --title Job -o json", "", 0, &[]).await.json());
    let at = Timestamp::now() + Duration::from_secs(5);
    let soon = format!("schedule create soon --task {task} --at {at} --interrupt -");
    run(&mesh, &soon, "Go on.", 0, &[&task, "one run for all", "Go on."]).await;
    let conversation = mesh.client().unwrap().conversation(&task);
    conversation
        .wait_for_task("the scheduled message to be answered", |_, status| {
            status.last_outcome() == TurnOutcome::Completed && status.queued_count == 0
        })
        .await;
    let said = wait_for_messages(&mesh, &task, &["Go on.", "Go on."]).await;
    check(
        &mesh,
        &[
            ("schedule runs soon", "", 0, &["sent", &task, &said[0].0]),
            ("schedule get soon", "", 0, &["last run:"]),
            (&format!("schedule list --task {task}"), "", 0, &["soon", "none"]),
            ("schedule delete soon", "", 0, &["schedule soon is deleted\n"]),
            ("schedule delete soon", "", 1, &["not found"]),
            ("schedule runs soon", "", 1, &["not found"]),
        ],
    )
    .await;
}

//! The actor of a task that has come to rest ends, and the next message makes the task live again.

use std::time::{Duration, Instant};

use construct_proto::v1::{TaskSpec, TurnOutcome};
use construct_tests::{
    client::TURN_TIMEOUT,
    mesh::{Mesh, Service},
    wait::until,
};
use futures::future::{join_all, try_join_all};
use serde_json::json;

const TASKS: usize = 8;
/// How long an actor stays that has nothing to do, and how much later that may show on a machine
/// that does other things.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
const TOLERANCE: Duration = Duration::from_secs(5);

/// How many tasks have an actor.
async fn actors(mesh: &Mesh) -> usize {
    let page = mesh.metrics(Service::Reconciler).await.unwrap();
    let count = page.lines().find_map(|line| line.strip_prefix("construct_reconciler_actors "));
    count.unwrap_or_else(|| panic!("actors are not counted:\n{page}")).parse().unwrap()
}

/// The last turn was over just now: waits until no task has an actor any more.
async fn wait_until_no_actors(mesh: &Mesh) {
    let began = Instant::now();
    until("the actors to end", TURN_TIMEOUT, async || match actors(mesh).await {
        0 => Ok(()),
        count => Err(count),
    })
    .await;
    assert!(began.elapsed() < IDLE_TIMEOUT + TOLERANCE, "that took {:?}", began.elapsed());
}

#[tokio::test]
async fn idle_actors_end_and_a_message_starts_one_again() {
    let mesh = Mesh::start().await.unwrap();
    let turns = json!([{"code": "1 + 1"}, {"text": "{{last_user_text}}: {{last_result}}"}]);
    mesh.scripted_agent("worker", &json!({"count": "since_user", "turns": turns})).await.unwrap();
    let client = mesh.client().unwrap();
    assert_eq!(actors(&mesh).await, 0);
    // With a title, no model call is made for one, which would be something to do.
    let spec =
        TaskSpec { agent: "worker".to_owned(), title: "A job".to_owned(), ..TaskSpec::default() };
    let tasks =
        try_join_all((0..TASKS).map(|_| client.create_task_with(spec.clone()))).await.unwrap();
    for task in join_all(tasks.iter().map(|task| task.ask("once"))).await {
        assert_eq!(task.status.unwrap().last_outcome(), TurnOutcome::Completed);
    }
    let live = actors(&mesh).await;
    assert!((1..=TASKS).contains(&live), "{live}");
    wait_until_no_actors(&mesh).await;
    // What an actor knew is not missed.
    tasks[0].ask("again").await;
    assert_eq!(actors(&mesh).await, 1);
    let transcript = tasks[0].transcript().await;
    let answers: Vec<String> = transcript.check(&["once", "again"]).answers();
    assert_eq!(
        answers.iter().filter(|answer| !answer.is_empty()).collect::<Vec<_>>(),
        ["once: 2", "again: 2"]
    );
    wait_until_no_actors(&mesh).await;
}

//! The actor of an idle task ends, and the next message starts it again.

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
/// How long an idle actor lives, and a tolerance for a busy machine.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
const TOLERANCE: Duration = Duration::from_secs(5);

/// The number of tasks with an actor.
async fn actors(mesh: &Mesh) -> usize {
    let page = mesh.metrics(Service::Reconciler).await.unwrap();
    let count = page.lines().find_map(|line| line.strip_prefix("construct_reconciler_actors "));
    count.unwrap_or_else(|| panic!("actors are not counted:\n{page}")).parse().unwrap()
}

/// The last turn has just ended: waits until no task has an actor.
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
    // With a title, no model call is made for one, which would keep the task busy.
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
    // The actor's state is not missed.
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

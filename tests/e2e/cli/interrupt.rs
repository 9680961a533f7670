//! `construct exec` and Ctrl-C: the job is canceled first, in every phase.

use construct_proto::v1::{self, TaskPhase, TurnOutcome};
use construct_tests::{
    client::Conversation,
    mesh::{Mesh, Service},
    recorder::types,
    terminal::CTRL_C,
    transcript,
};
use serde_json::json;

use super::{Job, spawn, terminal};

/// Waits until the job's message is accepted; returns its task.
async fn accepted_task(mesh: &Mesh, job: &mut Job) -> Conversation {
    let line = job.wait_for_error_line("· task task_").await;
    let task = line.trim().trim_start_matches("· task ");
    let conversation = mesh.client().unwrap().conversation(task);
    conversation
        .wait_for_task("a message", |_, status| status.queued_count + status.message_count > 0)
        .await;
    conversation
}

#[tokio::test]
async fn interrupted_job_is_canceled_in_every_phase() {
    let mut mesh = Mesh::start().await.unwrap();
    let script = json!({"conversations": [
        {"match": "stall", "turns": [{"text": "Slowly.", "fault": {"stall_ms": 600_000, "times": 0}}]},
        {"match": "run", "turns": [{"code": "execute_command('touch begun; sleep 600')"}]},
    ]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let workspace = mesh.workspace().display().to_string();

    // Ctrl-C in a terminal, during the model call.
    let mut person = terminal(&mesh, &["exec", "stall"]);
    person.wait_for_text("· invoke model").await;
    person.press(CTRL_C).await;
    person.wait_for_text("■ interrupted by the user; canceling").await;
    person.wait_for_text("■ cancelled").await;
    let screen = person.screen();
    assert_eq!(person.wait_for_exit().await, 130, "{screen}");

    // During a script, and by a supervisor's signal.
    let mut job = spawn(&mesh, &["exec", "--workspace", &workspace, "run"], "").await;
    construct_tests::client::wait_for_file(&mesh.workspace().join("begun"), |_| true).await;
    let conversation = accepted_task(&mesh, &mut job).await;
    job.signal("TERM");
    let done = job.wait().await;
    assert_eq!((done.code(), done.output.as_str()), (130, ""), "{done:?}");
    assert_eq!(
        conversation.wait_until_idle().await.status.unwrap().last_outcome(),
        TurnOutcome::Cancelled
    );
    crate::wait_for_process_end("begun; sleep 600").await;

    // Directly after sending, before the message was reconciled: it is dropped, and nothing runs.
    mesh.kill(Service::Reconciler).unwrap();
    let mut dropped = spawn(&mesh, &["exec", "stall"], "").await;
    let mut abandoned = spawn(&mesh, &["exec", "stall"], "").await;
    let conversation = accepted_task(&mesh, &mut dropped).await;
    let left = accepted_task(&mesh, &mut abandoned).await;
    for job in [&mut dropped, &mut abandoned] {
        job.signal("INT");
        job.wait_for_error_line("interrupted by the user; canceling").await;
    }
    // A second Ctrl-C exits at once, and reports that the outcome is unknown.
    abandoned.signal("INT");
    let done = abandoned.wait().await;
    assert_eq!(done.code(), 130, "{done:?}");
    assert!(done.errors.contains(&format!("construct explain {}", left.id())), "{done:?}");
    // `task.updated` shows that the cancel was accepted.
    conversation.record().wait_for_count("task.updated", 1).await;
    left.record().wait_for_count("task.updated", 1).await;
    mesh.spawn(Service::Reconciler).unwrap();
    let began = std::time::Instant::now();
    let done = dropped.wait().await;
    assert_eq!(done.code(), 130, "{done:?}");
    assert!(
        !done.errors.contains("the turn has not ended yet"),
        "the end is reported: {done:?}, {:?}",
        began.elapsed()
    );
    for conversation in [&conversation, &left] {
        let task = conversation.wait_until_idle().await.status.unwrap();
        assert_eq!(
            (task.phase(), task.last_outcome()),
            (TaskPhase::AwaitInput, TurnOutcome::Unspecified)
        );
        let transcript = conversation.transcript().await;
        let [message] = transcript.messages.as_slice() else { panic!("{}", transcript.show()) };
        let status: v1::MessageStatus = transcript::status(message);
        assert!(status.position == 0 && status.error.starts_with("cancelled"), "{status:?}");
        assert!(status.processed_at.is_some());
        let events = conversation.record().wait_for_sequence(task.event_sequence).await;
        assert!(!types(&events).contains(&"turn.completed"), "{:?}", types(&events));
    }
    mesh.wait_until_ready(Service::Reconciler).await.unwrap();
}

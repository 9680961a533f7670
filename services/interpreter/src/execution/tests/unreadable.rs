//! A command that cannot be read: its step fails at once, and no script of it is run.

use construct_bus::{ConsumeOptions, Dispatch, Pool, TaskMessage};
use construct_domain::partition;
use construct_runtime::{Common, Context};
use tokio_util::task::TaskTracker;

use super::*;

#[tokio::test]
async fn a_command_that_cannot_be_read_fails_its_step_at_once_and_others_are_carried_out() {
    let World { nats, folder: _folder, executor, command, .. } = World::new(&["1 + 1"]).await;
    let (bus, context) = (nats.bus().await, Context::new("interpreter", Common::default()));
    let config = crate::Config::default();
    crate::serve(
        Pool::code_default(),
        &config,
        &Arc::new(executor),
        &TaskTracker::new(),
        context.lifecycle(),
    );

    let step = command.step.clone().expect("it names a step");
    let task: TaskId = step.task_id.parse().expect("a task's id");
    let mut results = bus
        .consume_tasks(partition::for_task(task), ConsumeOptions::new(8, CancellationToken::new()));
    let mut outcome = async || {
        let delivery = tokio::time::timeout(Duration::from_secs(60), results.next()).await;
        let delivery = delivery.expect("waited in vain for a result").expect("the consumer runs");
        delivery.receipt.ack().await;
        let TaskMessage::Result(result) = delivery.message else {
            panic!("not a result: {:?}", delivery.message)
        };
        assert_eq!(result.step.as_ref(), Some(&step));
        result.outcome.expect("it has one")
    };
    let address = subject::CodeExecute::new(Pool::code_default(), task);
    bus.publish_unreadable(&address, &command).await.expect("the server is up");
    let step_result::Outcome::Failed(failure) = outcome().await else { panic!("it did not fail") };
    assert_eq!(failure.class(), FailureClass::Internal);
    assert!(failure.message.contains("could not read its command"), "{}", failure.message);

    // Its place is free once it is a dead letter.
    tokio::time::timeout(Duration::from_secs(20), async {
        while bus.dead_letters(0, 10).await.expect("the server is up").is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        while bus.publish_once(&address, &command).await.expect("the server is up")
            != Dispatch::Published
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("waited in vain for a free place");
    let step_result::Outcome::CodeCompleted(completed) = outcome().await else {
        panic!("it did not complete")
    };
    assert_eq!(completed.results[0].output, "2");
}

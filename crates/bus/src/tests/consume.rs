use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use async_nats::jetstream::AckKind;
use bytes::Bytes;
use construct_domain::partition;
use construct_proto::mesh::v1::{
    DeadLetter, Failure, FailureClass, StepRef, StepResult, TaskWake, step_result,
};
use futures::StreamExt as _;
use prost::Message as _;
use tokio_util::sync::CancellationToken;

use super::{
    execute, invoke, next, options, result, step_ref, task, tasks_of_first_partition, wake, within,
};
use crate::{
    Address as _, Bus, ConnectOptions, ConsumeOptions, Consumer, Pool, TaskMessage,
    envelope::TYPE,
    subject,
    testing::NatsServer,
    topology::{ACK_WAIT, Stream},
};

#[tokio::test]
async fn a_partition_gets_the_wakes_and_results_of_its_tasks_only() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let task = tasks_of_first_partition().next().expect("there are many");
    let other = super::task(
        (1..).find(|&n| partition::for_task(super::task(n)) == 1).expect("there are many"),
    );
    let mut consumer = bus.consume_tasks(0, options(8));
    bus.publish(&subject::TaskWake::new(other), &wake(other, "other")).await.expect("sent");
    bus.publish(&subject::TaskWake::new(task), &wake(task, "one")).await.expect("sent");
    bus.publish(&subject::TaskResult::new(task), &result(task, 1)).await.expect("sent");

    let first = next(&mut consumer).await;
    assert_eq!(
        (first.message, first.task, first.delivery),
        (TaskMessage::Wake(wake(task, "one")), task, 1)
    );
    let second = next(&mut consumer).await;
    assert_eq!(second.message, TaskMessage::Result(result(task, 1).into()));
    assert!(second.sequence > first.sequence);
}

#[tokio::test]
async fn what_a_process_is_at_it_is_not_given_once_more() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let address = subject::ModelInvoke::new(Pool::model_default(), task(1));
    bus.publish_once(&address, &invoke(task(1), 1)).await.expect("sent");
    let mut consumer = bus.consume_model(&Pool::model_default(), options(3));
    let held = next(&mut consumer).await;
    // As the server does when it has not heard of the message for too long.
    for _ in 0..3 {
        held.receipt.acker.send(AckKind::Nak(None)).await;
        let again = tokio::time::timeout(Duration::from_millis(100), consumer.next()).await;
        assert!(again.is_err(), "{again:?}");
    }
    // Given back by whoever is at it, it comes again.
    held.receipt.nak(Duration::ZERO).await;
    let again = next(&mut consumer).await;
    assert!(again.delivery > 1);
    again.receipt.ack().await;
    let more = tokio::time::timeout(Duration::from_millis(200), consumer.next()).await;
    assert!(more.is_err(), "{more:?}");
    assert_eq!(server.messages(Stream::Model).await, 0);
}

#[tokio::test]
async fn no_more_than_the_limit_is_in_flight_and_every_settled_one_makes_room() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    for number in 1..=30 {
        let address = subject::ModelInvoke::new(Pool::model_default(), task(number));
        bus.publish_once(&address, &invoke(task(number), 1)).await.expect("sent");
    }
    let mut consumer = bus.consume_model(&Pool::model_default(), options(3));
    let mut seen = BTreeSet::new();
    let mut held = Vec::new();
    while seen.len() < 30 {
        let delivery = next(&mut consumer).await;
        assert!(seen.insert(delivery.task), "delivered twice");
        held.push(delivery.receipt);
        if held.len() == 3 {
            let more = tokio::time::timeout(Duration::from_millis(20), consumer.next()).await;
            assert!(more.is_err(), "a fourth delivery while three are in flight");
            held.remove(0).ack().await;
        }
    }
}

#[tokio::test]
async fn the_command_of_a_dead_worker_is_delivered_again_within_the_acknowledgement_wait() {
    let server = NatsServer::start().await;
    let (dying, living) = (server.bus().await, server.bus().await);
    let address = subject::CodeExecute::new(Pool::code_default(), task(1));
    dying.publish_once(&address, &execute(task(1), 1)).await.expect("sent");
    let mut consumer = dying.consume_code(&Pool::code_default(), options(1));
    let delivery = next(&mut consumer).await;
    let taken = Instant::now();
    drop((delivery, consumer));
    let mut consumer = living.consume_code(&Pool::code_default(), options(1));
    let delivery = next(&mut consumer).await;
    assert_eq!((delivery.delivery, &delivery.message), (2, &execute(task(1), 1)));
    assert!(taken.elapsed() < ACK_WAIT + Duration::from_secs(2), "{:?}", taken.elapsed());
}

#[tokio::test]
async fn a_command_that_is_kept_alive_is_not_delivered_again() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let address = subject::CodeExecute::new(Pool::code_default(), task(1));
    bus.publish_once(&address, &execute(task(1), 1)).await.expect("sent");
    let mut worker = bus.consume_code(&Pool::code_default(), options(1));
    let mut vulture = server.bus().await.consume_code(&Pool::code_default(), options(1));
    let delivery = tokio::select! {
        delivery = next(&mut worker) => delivery,
        delivery = next(&mut vulture) => delivery,
    };
    let alive = delivery.receipt.keep_alive();
    let stolen = async {
        tokio::select! {
            _ = worker.next() => {}
            _ = vulture.next() => {}
        }
    };
    tokio::pin!(stolen);
    let longer = ACK_WAIT + Duration::from_secs(3);
    assert!(
        tokio::time::timeout(longer, &mut stolen).await.is_err(),
        "delivered again although it was kept alive"
    );
    // And the other way round: without the guard it is.
    drop(alive);
    drop(delivery);
    within("the second delivery", stolen).await;
}

#[tokio::test]
async fn what_is_given_back_comes_again_after_the_delay() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let address = subject::CodeExecute::new(Pool::code_default(), task(1));
    bus.publish_once(&address, &execute(task(1), 1)).await.expect("sent");
    let mut consumer = bus.consume_code(&Pool::code_default(), options(1));
    let delivery = next(&mut consumer).await;
    let began = Instant::now();
    delivery.receipt.nak(Duration::from_millis(300)).await;
    assert_eq!(next(&mut consumer).await.delivery, 2);
    assert!(
        (Duration::from_millis(290)..ACK_WAIT).contains(&began.elapsed()),
        "{:?}",
        began.elapsed()
    );
}

#[tokio::test]
async fn a_stopped_consumer_hands_back_what_it_had_taken() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    for number in 1..=8 {
        let address = subject::ModelInvoke::new(Pool::model_default(), task(number));
        bus.publish_once(&address, &invoke(task(number), 1)).await.expect("sent");
    }
    let stop = CancellationToken::new();
    let mut consumer =
        bus.consume_model(&Pool::model_default(), ConsumeOptions::new(8, stop.clone()));
    next(&mut consumer).await.receipt.ack().await;
    stop.cancel();
    let began = Instant::now();
    assert!(within("the consumer to end", consumer.next()).await.is_none());
    assert!(consumer.next().await.is_none());

    let mut successor = server.bus().await.consume_model(&Pool::model_default(), options(8));
    let mut seen = BTreeSet::new();
    while seen.len() < 7 {
        let delivery = next(&mut successor).await;
        seen.insert(delivery.task);
        delivery.receipt.ack().await;
    }
    assert!(
        began.elapsed() < ACK_WAIT,
        "they were waited for instead of handed back: {:?}",
        began.elapsed()
    );
}

/// Waits until every message of a work queue is settled.
async fn empty(bus: &Bus, stream: Stream) {
    within("the stream to become empty", async {
        loop {
            let stream = bus.inner.jetstream.get_stream(stream.name()).await.expect("it is there");
            if stream.cached_info().state.messages == 0 {
                return;
            }
        }
    })
    .await;
}

async fn publish_raw(bus: &Bus, subject: String, type_name: Option<&str>, payload: &[u8]) {
    let mut headers = async_nats::HeaderMap::new();
    if let Some(type_name) = type_name {
        headers.insert(TYPE, type_name);
    }
    let payload = Bytes::copy_from_slice(payload);
    let sent =
        bus.inner.jetstream.publish_with_headers(subject, headers, payload).await.expect("sent");
    sent.await.expect("accepted");
}

#[tokio::test]
async fn what_cannot_be_read_becomes_a_dead_letter_once_and_does_not_hold_up_the_rest() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let mut dead = bus.tap("construct.v1.dead.>").await.expect("tapped");
    let task = tasks_of_first_partition().next().expect("there are many");
    let subject = subject::TaskWake::new(task).subject();
    let right = wake(task, "right").encode_to_vec();
    publish_raw(&bus, subject.clone(), Some("construct.mesh.v1.TaskWake"), &[0xff, 0xff, 0xff])
        .await;
    publish_raw(&bus, subject.clone(), Some("construct.v1.Event"), &right).await;
    publish_raw(&bus, subject.clone(), None, &wake(super::task(7), "another's").encode_to_vec())
        .await;
    publish_raw(&bus, subject.replace(".wake.", ".wink."), None, &right).await;
    publish_raw(&bus, subject.replace("task_", "tusk_"), None, &right).await;
    // By hand, without any header: that is fine.
    publish_raw(&bus, subject.clone(), None, &right).await;

    let mut consumer = bus.consume_tasks(0, options(2));
    let delivery = next(&mut consumer).await;
    assert_eq!(delivery.message, TaskMessage::Wake(wake(task, "right")));
    delivery.receipt.ack().await;

    let mut reasons = Vec::new();
    while reasons.len() < 5 {
        let letter = within("a dead letter", dead.next()).await.expect("tapped");
        assert_eq!(letter.subject, "construct.v1.dead.CONSTRUCT_TASK");
        let letter = DeadLetter::decode(letter.payload).expect("a letter");
        assert_eq!(letter.deliveries, 1);
        assert!(letter.time.is_some());
        reasons.push(letter.reason);
    }
    let all = reasons.join("\n");
    for part in ["cannot be decoded", "of type construct.v1.Event", "another task"] {
        assert!(all.contains(part), "{part} is not in:\n{all}");
    }
    empty(&bus, Stream::Task).await;
}

#[tokio::test]
async fn what_nothing_can_be_done_about_is_a_dead_letter_and_can_be_published_again() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let task = tasks_of_first_partition().next().expect("there are many");
    bus.publish(&subject::TaskResult::new(task), &result(task, 1)).await.expect("sent");
    let mut consumer = bus.consume_tasks(0, options(2));
    next(&mut consumer).await.receipt.nak(Duration::ZERO).await;
    let again = next(&mut consumer).await;
    assert_eq!((again.delivery, again.receipt.deliveries()), (2, 2));
    bus.bury(again.receipt, "nobody can read its task").await;
    let letters = bus.dead_letters(0, 10).await.expect("read");
    assert_eq!(letters.len(), 1);
    let letter = &letters[0].letter;
    assert_eq!((letter.reason.as_str(), letter.deliveries), ("nobody can read its task", 2));
    assert_eq!(
        (letter.stream.as_str(), letter.subject.clone()),
        ("CONSTRUCT_TASK", subject::TaskResult::new(task).subject())
    );
    assert!(
        letter.time.is_some() && letter.message_type == "construct.mesh.v1.StepResult",
        "{letter:?}"
    );
    empty(&bus, Stream::Task).await;

    bus.redrive(letters[0].number).await.expect("published again");
    let whole = next(&mut consumer).await;
    assert_eq!((whole.message, whole.delivery), (TaskMessage::Result(result(task, 1).into()), 1));
    whole.receipt.ack().await;
    assert!(bus.dead_letters(0, 10).await.expect("read").is_empty());
}

/// How the step of a command failed, as its task is told.
async fn failed(consumer: &mut Consumer<TaskMessage>) -> (StepResult, Failure) {
    let delivery = next(consumer).await;
    delivery.receipt.ack().await;
    match delivery.message {
        TaskMessage::Result(result) => match result.outcome.clone() {
            Some(step_result::Outcome::Failed(failure)) => (*result, failure),
            other => panic!("it did not fail: {other:?}"),
        },
        other => panic!("not a result: {other:?}"),
    }
}

#[tokio::test]
async fn the_step_of_a_command_that_cannot_be_read_fails_at_once_by_its_headers() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let task = tasks_of_first_partition().next().expect("there are many");
    let (model, code) = (
        subject::ModelInvoke::new(Pool::model_default(), task),
        subject::CodeExecute::new(Pool::code_default(), task),
    );
    let mut round = execute(task, 4);
    round.step.as_mut().expect("it names one").round = 2;
    bus.publish_unreadable(&model, &invoke(task, 3)).await.expect("sent");
    bus.publish_unreadable(&code, &round).await.expect("sent");
    // By hand: nobody can say whose step it was.
    publish_raw(&bus, model.subject(), None, &[0xff; 3]).await;
    let (_models, _scripts) = (
        bus.consume_model(&Pool::model_default(), options(1)),
        bus.consume_code(&Pool::code_default(), options(1)),
    );

    let mut results = bus.consume_tasks(0, options(2));
    let mut told = vec![failed(&mut results).await, failed(&mut results).await];
    told.sort_by_key(|(result, _)| result.step.as_ref().map(|step| step.number));
    let steps: Vec<_> = told.iter().filter_map(|(result, _)| result.step.clone()).collect();
    assert_eq!(steps, [step_ref(task, 3), StepRef { round: 2, ..step_ref(task, 4) }]);
    for (result, failure) in told {
        assert_eq!(
            (result.delivery, failure.class(), failure.tries),
            (1, FailureClass::Internal, 0)
        );
        assert!(failure.message.contains("the payload cannot be decoded"), "{}", failure.message);
    }
    empty(&bus, Stream::Model).await;
    empty(&bus, Stream::Code).await;
    let letters = bus.dead_letters(0, 10).await.expect("read");
    assert_eq!(letters.len(), 3, "people see them all the same: {letters:?}");
    empty(&bus, Stream::Task).await;
}

#[tokio::test]
async fn a_missing_blob_is_given_time_and_then_up() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let mut dead = bus.tap("construct.v1.dead.>").await.expect("tapped");
    let task = tasks_of_first_partition().next().expect("there are many");
    let address = subject::ModelInvoke::new(Pool::model_default(), task);
    let mut command = invoke(task, 1);
    command.system = "x".repeat(crate::envelope::INLINE_LIMIT);
    bus.publish_once(&address, &command).await.expect("sent");
    std::fs::remove_dir_all(server.blobs().join("sha256")).expect("removable");
    let _consumer = bus.consume_model(&Pool::model_default(), options(1));
    let letter = within("a dead letter", dead.next()).await.expect("tapped");
    let letter = DeadLetter::decode(letter.payload).expect("a letter");
    assert!(letter.reason.contains("missing"), "{}", letter.reason);
    assert!(letter.deliveries > 1);
    // Another command has its payload stored anew, but not without end.
    let (result, failure) = failed(&mut bus.consume_tasks(0, options(1))).await;
    assert_eq!(
        (result.delivery, failure.class(), failure.tries),
        (letter.deliveries, FailureClass::Transient, 1)
    );
}

#[tokio::test]
async fn a_consumer_that_is_deleted_is_made_anew() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let mut consumer = bus.consume_code(&Pool::code_default(), options(4));
    let address = |number| subject::CodeExecute::new(Pool::code_default(), task(number));
    bus.publish_once(&address(1), &execute(task(1), 1)).await.expect("sent");
    next(&mut consumer).await.receipt.ack().await;
    empty(&bus, Stream::Code).await;
    let deleted =
        bus.inner.jetstream.delete_consumer_from_stream("code-cpu-2", Stream::Code.name()).await;
    assert!(deleted.expect("deleted").success);
    bus.publish_once(&address(2), &execute(task(2), 1)).await.expect("sent");
    assert_eq!(next(&mut consumer).await.task, task(2));
}

#[tokio::test]
async fn a_consumer_started_before_the_topology_and_without_a_server_finds_its_way() {
    let mut server = NatsServer::start().await;
    let bus = Bus::connect(server.url(), ConnectOptions::new("test")).await.expect("connected");
    server.kill();
    let mut consumer = bus.consume_model(&Pool::model_default(), options(1));
    server.restart().await;
    let other = server.bus().await;
    let address = subject::ModelInvoke::new(Pool::model_default(), task(1));
    other.publish_once(&address, &invoke(task(1), 1)).await.expect("sent");
    assert_eq!(next(&mut consumer).await.task, task(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_killed_while_publishing_and_consuming_loses_nothing() {
    let mut server = NatsServer::start().await;
    let (sender, receiver) = (server.bus().await, server.bus().await);
    let done = Arc::new(AtomicBool::new(false));
    let publishing = tokio::spawn({
        let done = Arc::clone(&done);
        async move {
            let task = tasks_of_first_partition().next().expect("there are many");
            let mut accepted = BTreeSet::new();
            for number in 0.. {
                if done.load(Ordering::Acquire) {
                    break;
                }
                let wake = wake(task, number.to_string());
                sender
                    .publish(&subject::TaskWake::new(task), &wake)
                    .await
                    .expect("accepted in the end");
                accepted.insert(wake.reason);
            }
            accepted
        }
    });
    let mut consumer = receiver.consume_tasks(0, options(16));
    let mut received: HashMap<String, u32> = HashMap::new();
    for _ in 0..3 {
        let enough = received.len() + 200;
        while received.len() < enough {
            take(&mut consumer, &mut received).await;
        }
        server.restart().await;
    }
    done.store(true, Ordering::Release);
    let accepted = within("the publisher", publishing).await.expect("no panic");
    while accepted.iter().any(|reason| !received.contains_key(reason)) {
        take(&mut consumer, &mut received).await;
    }
    assert!(accepted.len() >= 600, "{}", accepted.len());
}

async fn take(consumer: &mut Consumer<TaskMessage>, received: &mut HashMap<String, u32>) {
    let delivery = next(consumer).await;
    if let TaskMessage::Wake(TaskWake { reason, .. }) = &delivery.message {
        *received.entry(reason.clone()).or_default() += 1;
    }
    delivery.receipt.ack().await;
}

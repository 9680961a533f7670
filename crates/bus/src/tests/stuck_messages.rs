//! A server that comes back with inconsistent streams and consumers.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use construct_domain::{TaskId, partition};
use tokio_util::sync::CancellationToken;

use super::{execute, invoke, next, options, result, task, within};
use crate::{
    Bus, Dispatch, Pool, TaskMessage, User, subject,
    testing::NatsServer,
    topology::{self, Stream, StuckMessages},
};

/// A copy of a stream's files at one time.
struct StreamCopy {
    messages: PathBuf,
    copy: PathBuf,
}

impl StreamCopy {
    /// Copies the files of a stream. Restarts the server for it.
    async fn take(server: &mut NatsServer, stream: Stream) -> Self {
        server.stop();
        let messages =
            folder(&server.store(), stream.name()).expect("the stream has a folder").join("msgs");
        let mut copies = (0..).map(|number| server.dir().join(format!("kept-{number}")));
        let copy = copies.find(|copy| !copy.exists()).expect("numbers do not end");
        copy_files(&messages, &copy);
        server.restart().await;
        Self { messages, copy }
    }

    /// Restores the stream from the copy. Its consumers stay as they are.
    async fn restore(&self, server: &mut NatsServer) {
        server.stop();
        fs::remove_dir_all(&self.messages).unwrap();
        copy_files(&self.copy, &self.messages);
        server.restart().await;
    }
}

fn folder(within: &Path, name: &str) -> Option<PathBuf> {
    let folders =
        fs::read_dir(within).ok()?.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    folders.collect::<Vec<_>>().into_iter().find_map(|path| {
        if path.file_name().is_some_and(|own| own == name) {
            Some(path)
        } else {
            folder(&path, name)
        }
    })
}

fn copy_files(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Removes a message from its file, as a disk does that is full for a moment, after the server has
/// assigned its sequence.
async fn remove_record(server: &mut NatsServer, stream: Stream, number: u64) {
    server.stop();
    let messages =
        folder(&server.store(), stream.name()).expect("the stream has a folder").join("msgs");
    for file in fs::read_dir(messages).unwrap().map(|entry| entry.unwrap().path()) {
        if file.extension().is_none_or(|extension| extension != "blk") {
            // The server rebuilds it from the messages.
            fs::remove_file(file).unwrap();
            continue;
        }
        let (mut rest, mut kept) = (&*fs::read(&file).unwrap(), Vec::new());
        while let Some((length, _)) = rest.split_first_chunk() {
            // The highest bit says whether the message has headers.
            let (record, others) =
                rest.split_at((u32::from_le_bytes(*length) & !(1 << 31)) as usize);
            if record[4..12] != number.to_le_bytes() {
                kept.extend_from_slice(record);
            }
            rest = others;
        }
        fs::write(&file, kept).unwrap();
    }
    server.restart().await;
}

/// A connection to the server in its present state. Ensures nothing.
async fn connected(server: &NatsServer) -> Bus {
    let options = crate::ConnectOptions::new("test").blobs(server.blobs());
    Bus::connect(server.url(), options).await.expect("the server accepts connections")
}

fn model(number: u128) -> subject::ModelInvoke {
    subject::ModelInvoke::new(Pool::model_default(), task(number))
}

/// Publishes and processes commands.
async fn process_commands(bus: &Bus, commands: u128) {
    let mut consumer = bus.consume_model(&Pool::model_default(), options(4));
    for number in 1..=commands {
        bus.publish_once(&model(number), &invoke(task(number), 1)).await.expect("sent");
        next(&mut consumer).await.receipt.ack().await;
    }
    within("the queue to be empty", async {
        while bus.is_queued(&model(commands), super::step(1), 0).await.expect("the server says") {}
    })
    .await;
}

async fn check_twice(bus: &Bus) {
    let mut stuck_messages = StuckMessages::default();
    stuck_messages.check(&bus.inner.jetstream).await.expect("the server answers");
    assert!(!stuck_messages.is_empty());
    stuck_messages.check(&bus.inner.jetstream).await.expect("the server answers");
    assert!(stuck_messages.is_empty());
}

#[tokio::test]
async fn commands_at_reused_sequences_are_delivered() {
    let mut server = NatsServer::start().await;
    server.bus().await;
    let copy = StreamCopy::take(&mut server, Stream::Model).await;
    process_commands(&connected(&server).await, 3).await;
    copy.restore(&mut server).await;

    let bus = connected(&server).await;
    assert_eq!(
        bus.publish_once(&model(7), &invoke(task(7), 1)).await.expect("sent"),
        Dispatch::Published
    );
    let mut consumer = bus.consume_model(&Pool::model_default(), options(4));
    let nothing = tokio::time::timeout(Duration::from_millis(500), consumer.next()).await;
    assert!(nothing.is_err(), "the server no longer has this bug: {nothing:?}");
    bus.ensure_topology().await.expect("the server accepts it");
    let delivery = next(&mut consumer).await;
    assert_eq!(delivery.task, task(7));
    delivery.receipt.ack().await;
}

#[tokio::test]
async fn resurrected_command_is_removed() {
    let mut server = NatsServer::start().await;
    let bus = server.bus().await;
    bus.publish_once(&model(1), &invoke(task(1), 1)).await.expect("sent");
    let copy = StreamCopy::take(&mut server, Stream::Model).await;
    process_commands(&connected(&server).await, 2).await;
    // So that the consumer is not ahead.
    copy.restore(&mut server).await;
    let bus = connected(&server).await;
    for number in [5, 6] {
        bus.publish_once(&model(number), &invoke(task(number), 1)).await.expect("sent");
    }
    assert_eq!(
        bus.publish_once(&model(1), &invoke(task(1), 1)).await.expect("sent"),
        Dispatch::AlreadyQueued
    );
    let mut consumer = bus.consume_model(&Pool::model_default(), options(4));
    // One of the two has the sequence of an earlier one.
    let delivery = next(&mut consumer).await;
    assert_eq!(delivery.task, task(6));

    check_twice(&bus).await;
    assert_eq!(
        bus.publish_once(&model(1), &invoke(task(1), 1)).await.expect("sent"),
        Dispatch::Published
    );
    assert_eq!(next(&mut consumer).await.task, task(1));
    // All of them were found.
    assert_eq!(
        bus.publish_once(&model(5), &invoke(task(5), 1)).await.expect("sent"),
        Dispatch::Published
    );
    assert_eq!(next(&mut consumer).await.task, task(5));
    // The command in progress is untouched.
    assert!(bus.is_queued(&model(6), super::step(1), 0).await.expect("the server says"));
    delivery.receipt.ack().await;
}

#[tokio::test]
async fn resurrected_result_is_redelivered() {
    let mut server = NatsServer::start().await;
    let bus = server.bus().await;
    let (task, number) = (task(1), partition::for_task(task(1)));
    bus.publish(&subject::TaskResult::new(task), &result(task, 1)).await.expect("sent");
    let copy = StreamCopy::take(&mut server, Stream::Task).await;
    let bus_before = connected(&server).await;
    let mut consumer = bus_before.consume_tasks(number, options(4));
    next(&mut consumer).await.receipt.ack().await;
    within("the queue to be empty", async {
        while bus_before.has_queued_result(task, super::step(1)).await.expect("the server says") {}
    })
    .await;
    drop((bus, consumer));
    copy.restore(&mut server).await;

    let bus = connected(&server).await;
    let mut consumer = bus.consume_tasks(number, options(4));
    check_twice(&bus).await;
    let again = next(&mut consumer).await;
    assert_eq!(again.message, TaskMessage::Result(result(task, 1).into()));
    again.receipt.ack().await;
}

#[tokio::test]
async fn unreadable_queue_does_not_hide_others() {
    let mut server = NatsServer::start().await;
    let (bus, task) = stuck_second_message(&mut server, 2).await;
    server.remove_stream(Stream::Model).await;
    let mut stuck_messages = StuckMessages::default();
    for _ in 0..2 {
        let error = stuck_messages.check(&bus.inner.jetstream).await.expect_err("a queue is gone");
        assert!(error.to_string().contains(Stream::Model.name()), "{error}");
    }
    let mut consumer = bus.consume_tasks(partition::for_task(task), options(4));
    let again = next(&mut consumer).await;
    assert_eq!(again.message, TaskMessage::Result(result(task, 1).into()));
    again.receipt.ack().await;
}

#[tokio::test]
async fn consumer_without_folder_is_recreated() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let task = super::tasks_of_first_partition().next().expect("there are some");
    let number = partition::for_task(task);
    bus.publish(&subject::TaskResult::new(task), &result(task, 1)).await.expect("sent");
    fs::remove_dir_all(consumer_folder(&server, &topology::task_consumer(number).durable)).unwrap();
    bus.ensure_topology().await.expect("it is recreated");
    bus.ensure_topology().await.expect("as it is wanted");
    let mut consumer = bus.consume_tasks(number, options(4));
    next(&mut consumer).await.receipt.ack().await;
}

/// Deletes the consumer of a partition and blocks its folder, so that the server refuses to create
/// it.
async fn block_consumer(server: &NatsServer, bus: &Bus, partition: u16) -> String {
    let durable = topology::task_consumer(partition).durable;
    let folder = consumer_folder(server, &durable);
    delete_consumer(bus, &durable).await;
    fs::write(folder, "no folder").unwrap();
    durable
}

async fn delete_consumer(bus: &Bus, durable: &str) {
    let taken = bus.inner.jetstream.delete_consumer_from_stream(durable, Stream::Task.name()).await;
    taken.expect("it is there");
}

#[tokio::test]
async fn refused_consumer_does_not_prevent_others() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let row = topology::task_consumer(1);
    let first = block_consumer(&server, &bus, 0).await;
    delete_consumer(&bus, &row.durable).await;
    let refused = bus.ensure_topology().await.expect_err("the first one has no place");
    assert!(refused.is_refusal() && refused.to_string().contains(&first), "{refused:?}");
    topology::find_consumer(&bus.inner.jetstream, &row).await.expect("it was made all the same");
}

#[tokio::test]
async fn refused_consumer_does_not_hide_stuck_messages() {
    let mut server = NatsServer::start().await;
    let (bus, task) = stuck_second_message(&mut server, 2).await;
    let number = partition::for_task(task);
    block_consumer(&server, &bus, (number + 1) % partition::COUNT).await;
    let stop = CancellationToken::new();
    let keeping =
        tokio::spawn(server.bus_for(User::Reconciler).await.maintain_topology(stop.clone()));
    // Now the topology needs a change.
    bus.inner.jetstream.delete_stream(Stream::Spending.name()).await.expect("it is there");
    // The checks are periodic.
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(60)).await;
    tokio::time::resume();
    let again = next(&mut bus.consume_tasks(number, options(4))).await;
    assert_eq!(again.message, TaskMessage::Result(result(task, 1).into()));
    again.receipt.ack().await;
    bus.ensure_topology().await.expect_err("the other one has no place all that time");
    stop.cancel();
    keeping.await.expect("it ends");
}

/// The server's folder of a task consumer.
fn consumer_folder(server: &NatsServer, durable: &str) -> PathBuf {
    folder(&server.store(), Stream::Task.name())
        .expect("the stream has a folder")
        .join("obs")
        .join(durable)
}

#[tokio::test]
async fn unreadable_commands_are_purged() {
    let mut server = NatsServer::start().await;
    let bus = server.bus().await;
    let (pool, other) = (Pool::code_default(), Pool::new("cpu-8").expect("a name"));
    topology::ensure_consumer(&bus.inner.jetstream, &topology::code_consumer(&other))
        .await
        .expect("it is made");
    let code = |number| subject::CodeExecute::new(pool.clone(), task(number));
    for number in 1..=4 {
        bus.publish_once(&code(number), &execute(task(number), 1)).await.expect("sent");
    }
    remove_record(&mut server, Stream::Code, 2).await;

    let bus = connected(&server).await;
    let mut consumer = bus.consume_code(&pool, options(4));
    next(&mut consumer).await.receipt.ack().await;
    let nothing = tokio::time::timeout(PULLER_CHECK_TIME, consumer.next()).await;
    assert!(nothing.is_err(), "the server no longer has this bug: {nothing:?}");
    // The reconciler may read the queue.
    check_twice(&server.bus_for(User::Reconciler).await).await;
    assert_eq!(
        bus.publish_once(&code(3), &execute(task(3), 1)).await.expect("sent"),
        Dispatch::Published
    );
    assert_eq!(next(&mut consumer).await.task, task(3));
}

#[tokio::test]
async fn unreadable_results_are_purged_after_readable_ones() {
    let mut server = NatsServer::start().await;
    let bus = server.bus().await;
    let tasks: Vec<_> = super::tasks_of_first_partition().take(3).collect();
    for &task in &tasks {
        bus.publish(&subject::TaskResult::new(task), &result(task, 1)).await.expect("sent");
    }
    remove_record(&mut server, Stream::Task, 2).await;

    let reconciler = server.bus_for(User::Reconciler).await;
    let mut stuck_messages = StuckMessages::default();
    stuck_messages.check(&reconciler.inner.jetstream).await.expect("the server answers");
    assert!(stuck_messages.is_empty(), "the first one can be read");
    let bus = connected(&server).await;
    let mut consumer = bus.consume_tasks(partition::for_task(tasks[0]), options(4));
    next(&mut consumer).await.receipt.ack().await;
    let nothing = tokio::time::timeout(PULLER_CHECK_TIME, consumer.next()).await;
    assert!(nothing.is_err(), "the server no longer has this bug: {nothing:?}");
    check_twice(&reconciler).await;
    assert_eq!(server.message_count(Stream::Task).await, 0);
    bus.publish(&subject::TaskResult::new(tasks[2]), &result(tasks[2], 1)).await.expect("sent");
    next(&mut consumer).await.receipt.ack().await;
}

/// A queue with the second of several messages, which its consumer considers settled. It considers
/// the others in progress, but they are lost.
async fn stuck_second_message(server: &mut NatsServer, messages: usize) -> (Bus, TaskId) {
    let bus = server.bus().await;
    let tasks: Vec<_> = super::tasks_of_first_partition().take(messages).collect();
    for &task in &tasks {
        bus.publish(&subject::TaskResult::new(task), &result(task, 1)).await.expect("sent");
    }
    let all = StreamCopy::take(server, Stream::Task).await;
    let bus = connected(server).await;
    let stream = bus.inner.jetstream.get_stream(Stream::Task.name()).await.expect("it is there");
    for sequence in (1..=messages as u64).filter(|&sequence| sequence != 2) {
        stream.delete_message(sequence).await.expect("it is there");
    }
    let second = StreamCopy::take(server, Stream::Task).await;
    all.restore(server).await;

    let bus = connected(server).await;
    let mut consumer = bus.consume_tasks(partition::for_task(tasks[0]), options(4));
    let mut deliveries = Vec::new();
    for _ in &tasks {
        deliveries.push(next(&mut consumer).await);
    }
    deliveries.swap_remove(1).receipt.ack().await;
    within("it to be settled", async {
        while bus.has_queued_result(tasks[1], super::step(1)).await.expect("the server says") {}
    })
    .await;
    drop((deliveries, consumer));
    second.restore(server).await;
    let bus = connected(server).await;
    tokio::time::sleep(PULLER_CHECK_TIME).await;
    (bus, tasks[1])
}

/// Longer than the consumer's own check of messages in progress.
const PULLER_CHECK_TIME: Duration = Duration::from_secs(2);

#[tokio::test]
async fn result_after_lost_in_progress_message_is_delivered() {
    let mut server = NatsServer::start().await;
    let (bus, task) = stuck_second_message(&mut server, 2).await;
    let mut consumer = bus.consume_tasks(partition::for_task(task), options(4));
    check_twice(&bus).await;
    let again = next(&mut consumer).await;
    assert_eq!(again.message, TaskMessage::Result(result(task, 1).into()));
    again.receipt.ack().await;
}

#[tokio::test]
async fn stuck_result_behind_lost_messages_is_delivered() {
    let mut server = NatsServer::start().await;
    let (bus, task) = stuck_second_message(&mut server, 3).await;
    let mut consumer = bus.consume_tasks(partition::for_task(task), options(4));
    let mut stuck_messages = StuckMessages::with_max_settle_time(PULLER_CHECK_TIME.mul_f32(1.5));
    for _ in 0..2 {
        stuck_messages.check(&bus.inner.jetstream).await.expect("the server answers");
        let nothing = tokio::time::timeout(PULLER_CHECK_TIME, consumer.next()).await;
        assert!(
            nothing.is_err() && stuck_messages.is_empty(),
            "it may be in progress: {nothing:?}"
        );
    }
    stuck_messages.check(&bus.inner.jetstream).await.expect("the server answers");
    let again = next(&mut consumer).await;
    assert_eq!(again.message, TaskMessage::Result(result(task, 1).into()));
    again.receipt.ack().await;
}

/// This server version does not lose messages this way. The test holds that the repair removes
/// nothing else.
#[tokio::test]
async fn purge_first_removes_only_the_first_command() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    for number in 1..=3 {
        bus.publish_once(&model(number), &invoke(task(number), 1)).await.expect("sent");
    }
    let row = topology::streams()
        .iter()
        .find(|row| row.stream == Stream::Model)
        .expect("it is one of them");
    let queued = async || {
        let mut queued = Vec::new();
        for number in 1..=3 {
            queued.push(
                bus.is_queued(&model(number), super::step(1), 0).await.expect("the server says"),
            );
        }
        queued
    };
    topology::purge_first(&bus.inner.jetstream, row, 2).await.expect("the server answers");
    assert_eq!(queued().await, [true, true, true]);
    topology::purge_first(&bus.inner.jetstream, row, 1).await.expect("the server answers");
    assert_eq!(queued().await, [false, true, true]);
    // The last one.
    for sequence in [2, 3] {
        topology::purge_first(&bus.inner.jetstream, row, sequence)
            .await
            .expect("the server answers");
    }
    assert_eq!(queued().await, [false, false, false]);
    assert_eq!(
        bus.publish_once(&model(3), &invoke(task(3), 2)).await.expect("sent"),
        Dispatch::Published
    );
}

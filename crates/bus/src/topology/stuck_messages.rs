//! Stuck messages: messages of work queues that no consumer delivers.
//!
//! # Inconsistent stream and consumer
//!
//! A server that was killed, or whose disk was full, can come back with a stream and a consumer of
//! different times: nats-server 2.9 stores them independently, each some time after it has
//! confirmed. Then the consumer considers messages delivered and settled that are not: a message
//! that was settled and is back, or one that was stored under a sequence that another one had
//! before. The server notices neither, and a work queue removes a message only when it is settled.
//! Such a message would stay forever and block others of its subject.
//!
//! # Gap in the message file
//!
//! A disk that was full may leave a gap in a file of messages. From the gap on, the server finds
//! none of its messages by sequence, including those that it appends and confirms later
//! (`indexCacheBuf` and `cacheLookup` in its `filestore.go`). A restart does not help.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use async_nats::jetstream::{
    self,
    consumer::{Consumer, Info, pull},
    stream::{RawMessageErrorKind, State},
};

use super::{
    ConsumerRow, Retention, Stream, StreamRow,
    ensure::{Error, all_consumers, ensure_consumer},
    streams,
};

/// How long a result, or another message that is processed quickly, may be in progress. Messages
/// that only seem to be in progress stay so forever.
const MAX_SETTLE_TIME: Duration = Duration::from_secs(60);

/// The findings of the last check, by consumer.
#[derive(Debug)]
pub(crate) struct StuckMessages {
    /// How long a message that is processed quickly may seem to be in progress.
    max_settle_time: Duration,
    /// Leftovers. The server may be about to remove them; at the next check they are known to stay.
    found: HashMap<String, Leftover>,
    /// The oldest message that seems to be in progress, and since when it is the oldest.
    taken: HashMap<String, (u64, Instant)>,
    /// The oldest message of a queue if it cannot be read.
    unreadable: HashMap<&'static str, u64>,
}

/// A queue to check.
struct Queue<'a> {
    stream: &'a StreamRow,
    consumer: &'a ConsumerRow,
    /// Whether it is the only consumer of the stream.
    is_only: bool,
}

/// Messages that should be gone.
#[derive(Debug, Clone, Copy)]
struct Leftover {
    /// The sequence of the oldest one.
    oldest: u64,
    /// The last sequence that the consumer considers settled.
    settled: u64,
}

impl Default for StuckMessages {
    fn default() -> Self {
        Self {
            max_settle_time: MAX_SETTLE_TIME,
            found: HashMap::new(),
            taken: HashMap::new(),
            unreadable: HashMap::new(),
        }
    }
}

impl StuckMessages {
    #[cfg(test)]
    pub(crate) fn with_max_settle_time(max_settle_time: Duration) -> Self {
        Self { max_settle_time, ..Self::default() }
    }

    /// Finds messages that their consumers consider settled, and repairs those that the last check
    /// had found too.
    ///
    /// A command is removed: its task's row says whether it is needed, and it is published again
    /// from there. Other messages are redelivered, with everything else in the queue, by recreating
    /// the consumer.
    ///
    /// # Errors
    /// The first error. All other queues are still checked: a queue that the server cannot read any
    /// more must not hide stuck messages in others.
    pub(crate) async fn check(&mut self, jetstream: &jetstream::Context) -> Result<(), Error> {
        let rows = all_consumers(jetstream).await?;
        // What this check does not reach needs two checks again.
        let before = std::mem::replace(
            self,
            Self { max_settle_time: self.max_settle_time, ..Self::default() },
        );
        let mut failed = None;
        for row in streams().iter().filter(|row| row.retention == Retention::WorkQueue) {
            match state(jetstream, row).await {
                Ok(state) if state.messages == 0 => continue,
                Ok(_) => {}
                Err(error) => {
                    failed.get_or_insert(error);
                    continue;
                }
            }
            let of_stream: Vec<_> =
                rows.iter().filter(|consumer| consumer.stream == row.stream).collect();
            for consumer in &of_stream {
                let queue = Queue { stream: row, consumer, is_only: of_stream.len() == 1 };
                if let Err(error) = self.check_consumer(jetstream, &queue, &before).await {
                    failed.get_or_insert(error);
                }
            }
            if is_readable(row.stream)
                && let Err(error) = self.check_unreadable(jetstream, row, &before).await
            {
                failed.get_or_insert(error);
            }
        }
        failed.map_or(Ok(()), Err)
    }

    async fn check_consumer(
        &mut self,
        jetstream: &jetstream::Context,
        queue: &Queue<'_>,
        before: &Self,
    ) -> Result<(), Error> {
        let durable = &queue.consumer.durable;
        // In this order: settled messages have been removed from the stream when it is read.
        let state = ensure_consumer(jetstream, queue.consumer).await?;
        let (settled, delivered) =
            (settled_sequence(state.cached_info()), state.cached_info().delivered.stream_sequence);
        let Some(oldest) = oldest(jetstream, queue).await? else { return Ok(()) };
        if oldest <= settled {
            return match before.found.get(durable).filter(|before| before.oldest == oldest) {
                Some(before) => release(jetstream, queue, *before).await,
                None => {
                    self.found.insert(durable.clone(), Leftover { oldest, settled });
                    Ok(())
                }
            };
        }
        if oldest <= delivered && settles_soon(queue.stream.stream) {
            let known = before.taken.get(durable).filter(|(known, _)| *known == oldest);
            let since = known.map_or_else(Instant::now, |(_, since)| *since);
            if since.elapsed() > self.max_settle_time {
                return release(jetstream, queue, Leftover { oldest, settled }).await;
            }
            self.taken.insert(durable.clone(), (oldest, since));
        }
        Ok(())
    }

    /// Checks whether a queue begins with an unreadable message. If it stays so, the queue is
    /// purged. Commands that are needed are published again; of other queues no readable message is
    /// lost, because those are settled first.
    async fn check_unreadable(
        &mut self,
        jetstream: &jetstream::Context,
        row: &StreamRow,
        before: &Self,
    ) -> Result<(), Error> {
        let Some(Unreadable { sequence, is_all }) = unreadable(jetstream, row).await? else {
            return Ok(());
        };
        let stays = before.unreadable.get(row.stream.name()) == Some(&sequence);
        if stays && (is_all || is_commands(row.stream)) {
            return purge(jetstream, row).await;
        }
        self.unreadable.insert(row.stream.name(), sequence);
        Ok(())
    }

    /// Whether another check should follow soon.
    pub(crate) fn is_empty(&self) -> bool {
        self.found.is_empty() && self.unreadable.is_empty()
    }
}

/// The last sequence that a consumer considers settled. It counts messages as in progress that its
/// stream has lost, and when it drops them, the acknowledgement floor does not advance until it
/// learns of another one.
const fn settled_sequence(info: &Info) -> u64 {
    if info.num_ack_pending == 0 {
        info.delivered.stream_sequence
    } else {
        info.ack_floor.stream_sequence
    }
}

/// Whether this user may read the queue's messages. Others are not its business.
const fn is_readable(stream: Stream) -> bool {
    matches!(stream, Stream::Task | Stream::Model | Stream::Code)
}

/// Whether the rows of tasks determine its messages.
const fn is_commands(stream: Stream) -> bool {
    matches!(stream, Stream::Model | Stream::Code)
}

/// Whether its messages are processed quickly, whatever they cause, and may be redelivered.
const fn settles_soon(stream: Stream) -> bool {
    matches!(stream, Stream::Task | Stream::Spending | Stream::Slack)
}

/// Recreates a consumer that is ahead of its stream: it would skip as many messages as it is ahead.
pub(crate) async fn recreate_if_ahead(
    jetstream: &jetstream::Context,
    row: &ConsumerRow,
    consumer: &Consumer<pull::Config>,
) -> Result<(), Error> {
    let delivered = consumer.cached_info().delivered.stream_sequence;
    let stream = streams().iter().find(|stream| stream.stream == row.stream);
    let Some(stream) = stream.filter(|_| delivered > 0) else { return Ok(()) };
    // Read after the delivered sequence, so it can only be behind for one reason.
    let last = state(jetstream, stream).await?.last_sequence;
    if delivered <= last {
        return Ok(());
    }
    // Other services do the same after a reconnect. A consumer that was already recreated is kept
    // for its workers.
    let made = consumer.cached_info().created;
    if ensure_consumer(jetstream, row).await?.cached_info().created != made {
        return Ok(());
    }
    let consumer = &row.durable;
    tracing::warn!(
        consumer,
        delivered,
        last,
        "the consumer is ahead of its stream, whose end the server has lost; recreating it"
    );
    recreate(jetstream, row).await
}

/// Repairs leftovers that have stayed.
async fn release(
    jetstream: &jetstream::Context,
    queue: &Queue<'_>,
    found: Leftover,
) -> Result<(), Error> {
    let (consumer, mut sequence) = (&queue.consumer.durable, found.oldest);
    if !is_commands(queue.stream.stream) {
        tracing::warn!(
            consumer,
            sequence,
            "the queue has a message that its consumer considers settled; recreating the consumer"
        );
        return recreate(jetstream, queue.consumer).await;
    }
    let stream = jetstream.get_stream_no_info(queue.stream.stream.name()).await;
    let stream = stream.map_err(|error| failed(queue.stream, error))?;
    // All of them: finding them one by one would make the last one's task wait too long.
    while sequence <= found.settled {
        tracing::warn!(
            consumer,
            sequence,
            "the queue has a command that its consumer considers settled; removing it"
        );
        if let Err(error) = stream.delete_message(sequence).await {
            // Another process may have been faster; the next check shows it.
            tracing::warn!(consumer, sequence, %error, "the command could not be removed");
            // Removing an unreadable message may crash that server.
            let is_unreadable = error.to_string().contains(NOT_FOUND_BY_SEQUENCE);
            return if is_unreadable {
                purge(jetstream, queue.stream).await
            } else {
                purge_first(jetstream, queue.stream, sequence).await
            };
        }
        match oldest(jetstream, queue).await? {
            Some(next) => sequence = next,
            None => break,
        }
    }
    Ok(())
}

/// The server's error for a message that it does not find by sequence.
const NOT_FOUND_BY_SEQUENCE: &str = "did not match";

/// The first message of a queue if it cannot be read.
struct Unreadable {
    sequence: u64,
    /// Whether all messages are unreadable.
    is_all: bool,
}

/// Finds it. A message that is the first both before and after the read existed all the time.
async fn unreadable(
    jetstream: &jetstream::Context,
    row: &StreamRow,
) -> Result<Option<Unreadable>, Error> {
    let before = state(jetstream, row).await?;
    if before.messages == 0 {
        return Ok(None);
    }
    let found = jetstream
        .get_stream_no_info(row.stream.name())
        .await
        .map_err(|error| failed(row, error))?;
    let read = match found.get_first_raw_message_by_subject(">", 1).await {
        Ok(message) => Some(message.sequence),
        Err(error) => match error.kind() {
            RawMessageErrorKind::NoMessageFound | RawMessageErrorKind::JetStream(_) => None,
            _ => return Err(failed(row, error)),
        },
    };
    let after = state(jetstream, row).await?;
    let sequence = before.first_sequence;
    let stays = after.messages > 0 && after.first_sequence == sequence;
    Ok((stays && read != Some(sequence)).then_some(Unreadable { sequence, is_all: read.is_none() }))
}

/// Removes all messages of a queue, including unreadable ones. Its next messages are stored in
/// another file.
async fn purge(jetstream: &jetstream::Context, row: &StreamRow) -> Result<(), Error> {
    tracing::warn!(
        stream = row.stream.name(),
        "the queue has messages that NATS cannot read any more, as after a full disk; purging it"
    );
    let found = jetstream
        .get_stream_no_info(row.stream.name())
        .await
        .map_err(|error| failed(row, error))?;
    found.purge().await.map(drop).map_err(|error| failed(row, error))
}

/// Purges a stream up to a message that is its first and cannot be removed. A server that was
/// killed may count a message that does not exist
/// (<https://github.com/nats-io/nats-server/issues/3996>), and would refuse others of its subject.
pub(crate) async fn purge_first(
    jetstream: &jetstream::Context,
    row: &StreamRow,
    sequence: u64,
) -> Result<(), Error> {
    if state(jetstream, row).await?.first_sequence != sequence {
        return Ok(());
    }
    let found = jetstream
        .get_stream_no_info(row.stream.name())
        .await
        .map_err(|error| failed(row, error))?;
    found.purge().sequence(sequence + 1).await.map(drop).map_err(|error| failed(row, error))
}

async fn recreate(jetstream: &jetstream::Context, row: &ConsumerRow) -> Result<(), Error> {
    let deleted = jetstream.delete_consumer_from_stream(&row.durable, row.stream.name()).await;
    deleted.map_err(|error| Error::Consumer {
        consumer: row.durable.clone(),
        retryable: true,
        source: error.into(),
    })?;
    ensure_consumer(jetstream, row).await.map(drop)
}

fn failed(row: &StreamRow, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Stream { stream: row.stream.name(), retryable: true, source: source.into() }
}

async fn state(jetstream: &jetstream::Context, row: &StreamRow) -> Result<State, Error> {
    let found =
        jetstream.get_stream(row.stream.name()).await.map_err(|error| failed(row, error))?;
    Ok(found.cached_info().state.clone())
}

/// The sequence of the oldest message of a consumer.
async fn oldest(jetstream: &jetstream::Context, queue: &Queue<'_>) -> Result<Option<u64>, Error> {
    if queue.is_only {
        let state = state(jetstream, queue.stream).await?;
        return Ok((state.messages > 0).then_some(state.first_sequence));
    }
    let found = jetstream.get_stream_no_info(queue.stream.stream.name()).await;
    let found = found.map_err(|error| failed(queue.stream, error))?;
    match found.get_first_raw_message_by_subject(&queue.consumer.filter, 1).await {
        Ok(message) => Ok(Some(message.sequence)),
        Err(error) if error.kind() == RawMessageErrorKind::NoMessageFound => Ok(None),
        Err(error) => Err(failed(queue.stream, error)),
    }
}

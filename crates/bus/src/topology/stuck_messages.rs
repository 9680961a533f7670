//! Messages of work queues that nobody gets, although they are there.
//!
//! A server that was killed, or whose disk was full, can come back with a stream and a consumer of
//! different times: nats-server 2.9 stores them independently, each some time after it has said
//! that it did. Then the consumer takes messages for delivered and settled that are not: one that
//! was settled and is there again, or one that was stored under a number that another one had
//! before. The server notices neither, and a work queue lets go of a message only when it is
//! settled. Such a message would stand for ever, and keep out others of its subject.
//!
//! And a disk that was full may leave a gap in a file of messages. From there on that server finds
//! none of them by its number, nor those that it adds to the file later, which it confirms all the
//! same (`indexCacheBuf` and `cacheLookup` in its `filestore.go`): to start it anew does not help.

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

/// How long a result, or something else that is soon done with, may be under way. Messages that
/// only seem to be are so for ever.
const MAX_SETTLE_TIME: Duration = Duration::from_secs(60);

/// What the last look found, by consumer.
#[derive(Debug)]
pub(crate) struct StuckMessages {
    /// How long what is soon done with may seem to be under way.
    max_settle_time: Duration,
    /// The server may be about to remove it; at the next look it is known to stay.
    found: HashMap<String, Leftover>,
    /// The oldest message that a worker seems to have, and since when it is the oldest.
    taken: HashMap<String, (u64, Instant)>,
    /// The oldest message of a queue, where it cannot be read.
    unreadable: HashMap<&'static str, u64>,
}

/// Whose messages are looked through.
struct Queue<'a> {
    stream: &'a StreamRow,
    consumer: &'a ConsumerRow,
    /// Whether all messages of the stream are its.
    is_only: bool,
}

/// Messages that should be gone.
#[derive(Debug, Clone, Copy)]
struct Leftover {
    /// The number of the oldest.
    oldest: u64,
    /// Up to here everything is settled, as the consumer has it.
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

    /// Looks for messages that their consumers take for settled, and does something about those
    /// that were there the last time.
    ///
    /// A command is removed: whether it is wanted is in its task's row, from which it is published
    /// again. Other messages are had delivered once more, with everything that stands in the queue,
    /// by making the consumer anew.
    ///
    /// # Errors
    /// The first of those that came up. All others are looked through: a queue that the server
    /// cannot read any more keeps nothing else from being found.
    pub(crate) async fn check(&mut self, jetstream: &jetstream::Context) -> Result<(), Error> {
        let rows = all_consumers(jetstream).await?;
        // What is not come to is looked at twice again.
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
        // In this order: what is settled was removed from the stream by the time it is looked at.
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

    /// Looks whether a queue begins with what cannot be read. It is emptied then, if it stays so:
    /// of commands those that are wanted are sent again; of others nothing is lost that could still
    /// be read, because that is settled first.
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

    /// Whether there is something to look at again soon.
    pub(crate) fn is_empty(&self) -> bool {
        self.found.is_empty() && self.unreadable.is_empty()
    }
}

/// Up to where a consumer takes everything for settled. It counts messages as under way that its
/// stream has lost, and when it lets go of them it does not go on counting from there until it is
/// told of another one.
const fn settled_sequence(info: &Info) -> u64 {
    if info.num_ack_pending == 0 {
        info.delivered.stream_sequence
    } else {
        info.ack_floor.stream_sequence
    }
}

/// Whether who looks may read what it has: of others it is not their business.
const fn is_readable(stream: Stream) -> bool {
    matches!(stream, Stream::Task | Stream::Model | Stream::Code)
}

/// Whether what it has follows from the rows of tasks.
const fn is_commands(stream: Stream) -> bool {
    matches!(stream, Stream::Model | Stream::Code)
}

/// Whether its messages are soon done with, however much there is to do about them, and may be
/// delivered again.
const fn settles_soon(stream: Stream) -> bool {
    matches!(stream, Stream::Task | Stream::Spending | Stream::Slack)
}

/// Makes a consumer anew that has delivered what its stream does not have yet: it would leave out
/// as many messages as it is ahead.
pub(crate) async fn recreate_if_ahead(
    jetstream: &jetstream::Context,
    row: &ConsumerRow,
    consumer: &Consumer<pull::Config>,
) -> Result<(), Error> {
    let delivered = consumer.cached_info().delivered.stream_sequence;
    let stream = streams().iter().find(|stream| stream.stream == row.stream);
    let Some(stream) = stream.filter(|_| delivered > 0) else { return Ok(()) };
    // Read after what was delivered, it can be behind in one way only.
    let last = state(jetstream, stream).await?.last_sequence;
    if delivered <= last {
        return Ok(());
    }
    // Others do the same after a reconnect: what has been made anew already is not taken from who
    // works through it.
    let made = consumer.cached_info().created;
    if ensure_consumer(jetstream, row).await?.cached_info().created != made {
        return Ok(());
    }
    let consumer = &row.durable;
    tracing::warn!(
        consumer,
        delivered,
        last,
        "the consumer is ahead of its stream, of which the server has lost the end; making it anew"
    );
    recreate(jetstream, row).await
}

/// Does something about the messages that were found and have stayed.
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
            "a message stands in the queue that its consumer takes for settled; making the consumer anew"
        );
        return recreate(jetstream, queue.consumer).await;
    }
    let stream = jetstream.get_stream_no_info(queue.stream.stream.name()).await;
    let stream = stream.map_err(|error| failed(queue.stream, error))?;
    // All of them: the last one's task would not wait as long as it takes to find each.
    while sequence <= found.settled {
        tracing::warn!(
            consumer,
            sequence,
            "a command stands in the queue that its consumer takes for settled; removing it"
        );
        if let Err(error) = stream.delete_message(sequence).await {
            // Somebody else may have been faster; the next look shows it.
            tracing::warn!(consumer, sequence, %error, "the command could not be removed");
            // To remove what else cannot be read may end that server.
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

/// What the server says of a message that it does not find by its number.
const NOT_FOUND_BY_SEQUENCE: &str = "did not match";

/// The first message of a queue, which cannot be read.
struct Unreadable {
    sequence: u64,
    /// Whether no other one can be read either.
    is_all: bool,
}

/// Looks for it. A message that is the first before and after it was asked for was there all the
/// time.
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

/// Takes everything out of a queue, also what cannot be read: its next messages are stored in
/// another file.
async fn purge(jetstream: &jetstream::Context, row: &StreamRow) -> Result<(), Error> {
    tracing::warn!(
        stream = row.stream.name(),
        "the queue has messages that NATS cannot read any more, as after its disk was full; it is emptied"
    );
    let found = jetstream
        .get_stream_no_info(row.stream.name())
        .await
        .map_err(|error| failed(row, error))?;
    found.purge().await.map(drop).map_err(|error| failed(row, error))
}

/// Empties a stream up to a message that is its first and cannot be removed: a server that was
/// killed may count one that is not there (<https://github.com/nats-io/nats-server/issues/3996>),
/// and would refuse others of its subject.
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

/// The number of the oldest message that is for a consumer.
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

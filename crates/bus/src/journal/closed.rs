//! Letting go of what closed journals leave.

use std::time::Duration;

use async_nats::{
    HeaderMap,
    header::NATS_ROLLUP,
    jetstream::consumer::{AckPolicy, Consumer, DeliverPolicy, pull},
};
use futures::StreamExt as _;
use jiff::Timestamp;

use super::{Error, Journal};
use crate::topology::Stream;

/// How long the end of a closed journal is kept. It keeps those out who still run the execution or
/// would begin it again; by then no command for it is worked on, and one that comes late is refused
/// because its deadline has passed.
pub const CLOSED_RETENTION: Duration = Duration::from_secs(24 * 3600);

/// Marks the last entry of a closed journal, so that it is found without being opened.
const CLOSED: &str = "Construct-Closed";

/// What of a stream the entry replaces: what is on its own subject.
const ROLLUP_SUBJECT: &str = "sub";

/// Entries looked at at a time.
const BATCH_MESSAGES: usize = 256;

/// How long one batch may take.
const BATCH_TIMEOUT: Duration = Duration::from_secs(2);

/// After how much inactivity the server forgets the reader, should we die before saying so.
const READER_TTL: Duration = Duration::from_secs(30);

/// Makes an entry the last of its journal, which the server keeps in place of all that were before
/// it.
pub(super) fn mark_closed(headers: &mut HeaderMap) {
    headers.insert(CLOSED, "1");
    headers.insert(NATS_ROLLUP, ROLLUP_SUBJECT);
}

impl Journal {
    /// Removes the ends of journals that were closed before a time, and says how many. The journals
    /// of open executions stay, however old. Safe to run in any number of processes.
    ///
    /// # Errors
    /// [`Error::Purge`] when the server cannot be reached; what was removed until then stays
    /// removed.
    pub async fn remove_closed(&self, before: Timestamp) -> Result<u64, Error> {
        let stream = self.stream().await.map_err(|error| Error::Purge(error.into()))?;
        let config = pull::Config {
            name: Some(self.bus.unique_id()),
            deliver_policy: DeliverPolicy::All,
            ack_policy: AckPolicy::None,
            headers_only: true,
            inactive_threshold: READER_TTL,
            memory_storage: true,
            ..Default::default()
        };
        let jetstream = &self.bus.inner.jetstream;
        let reader = jetstream.create_consumer_on_stream(config, Stream::Journal.name()).await;
        let reader = reader.map_err(|error| Error::Purge(error.into()))?;
        let mut removed = 0;
        let ended = loop {
            match closed_before(&reader, before).await {
                Err(error) => break Err(Error::Purge(error)),
                Ok(ClosedBatch { closed, more }) => {
                    for sequence in closed {
                        match stream.delete_message(sequence).await {
                            Ok(_) => removed += 1,
                            // Another process was first, or the server is away, which the next
                            // batch will say.
                            Err(error) => {
                                tracing::debug!(%error, sequence, "the end of a journal was not removed")
                            }
                        }
                    }
                    if !more {
                        break Ok(removed);
                    }
                }
            }
        };
        // Best effort: the server forgets it anyway.
        if let Err(error) = jetstream
            .delete_consumer_from_stream(&reader.cached_info().name, Stream::Journal.name())
            .await
        {
            tracing::debug!(%error, "a reader could not be removed");
        }
        ended
    }
}

struct ClosedBatch {
    /// Sequences of the ends that are old enough.
    closed: Vec<u64>,
    /// Whether there may be more.
    more: bool,
}

/// Looks at the next batch.
async fn closed_before(
    reader: &Consumer<pull::Config>,
    before: Timestamp,
) -> Result<ClosedBatch, async_nats::Error> {
    let mut closed = Vec::new();
    let mut last = None;
    let mut batch =
        reader.fetch().max_messages(BATCH_MESSAGES).expires(BATCH_TIMEOUT).messages().await?;
    while let Some(message) = batch.next().await {
        let message = message?;
        let info = message.info()?;
        let old = info.published.unix_timestamp_nanos() < before.as_nanosecond();
        if old && message.headers.as_ref().is_some_and(|headers| headers.get(CLOSED).is_some()) {
            closed.push(info.stream_sequence);
        }
        last = Some((old, info.pending));
    }
    // Entries lie in the order of their age: behind a young one there is nothing old.
    Ok(ClosedBatch { closed, more: last.is_some_and(|(old, pending)| old && pending > 0) })
}

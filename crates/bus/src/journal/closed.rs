//! Removing closed journals.

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

/// How long the closing entry of a journal is kept. It fences processes that still run the
/// execution or would start it again. After this time no command for the execution is in progress,
/// and a late one is rejected because its deadline has passed.
pub const CLOSED_RETENTION: Duration = Duration::from_secs(24 * 3600);

/// Marks the last entry of a closed journal, so that it is found without decoding.
const CLOSED: &str = "Construct-Closed";

/// What the entry replaces: all messages on its own subject.
const ROLLUP_SUBJECT: &str = "sub";

/// Entries read at a time.
const BATCH_MESSAGES: usize = 256;

/// Timeout of one batch.
const BATCH_TIMEOUT: Duration = Duration::from_secs(2);

/// Inactivity after which the server deletes the reader, if we die before deleting it.
const READER_TTL: Duration = Duration::from_secs(30);

/// Makes an entry the last of its journal, which replaces all earlier ones at the server.
pub(super) fn mark_closed(headers: &mut HeaderMap) {
    headers.insert(CLOSED, "1");
    headers.insert(NATS_ROLLUP, ROLLUP_SUBJECT);
}

impl Journal {
    /// Removes journals that were closed before a time, and returns their number. Journals of open
    /// executions stay, however old. Safe to run in any number of processes.
    ///
    /// # Errors
    /// [`Error::Purge`] when the server is unreachable. What was removed before that stays removed.
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
                            // Another process was first, or the server is unreachable, which the
                            // next batch reports.
                            Err(error) => {
                                tracing::debug!(%error, sequence, "a closed journal was not removed")
                            }
                        }
                    }
                    if !more {
                        break Ok(removed);
                    }
                }
            }
        };
        // Best effort: the server deletes the reader anyway.
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
    /// Sequences of closing entries that are old enough.
    closed: Vec<u64>,
    /// Whether there may be more.
    more: bool,
}

/// Reads the next batch.
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
    // Entries are ordered by age: after a young one there is no old one.
    Ok(ClosedBatch { closed, more: last.is_some_and(|(old, pending)| old && pending > 0) })
}

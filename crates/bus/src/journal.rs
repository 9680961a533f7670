//! Journals of executions: appended with fencing, read completely.
//!
//! Every entry names the sequence of the previous entry, and the stream rejects it when another
//! entry is the last by now. So of two processes that run the same execution (one of them presumed
//! dead), only one can continue. The other learns it before its next side effect.

mod closed;

use std::time::{Duration, Instant};

use async_nats::{
    header::NATS_MESSAGE_ID,
    jetstream::{message::StreamMessage, stream::LastRawMessageErrorKind},
};
use construct_domain::StepId;
use construct_proto::mesh::v1::{JournalClosed, JournalEntry, journal_entry};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::{
    Bus, blob,
    envelope::{OpenError, SealedMessage},
    history,
    publish::{self, DEADLINE, Expectation, Refusal},
    subject::{self, Address as _},
    topology::Stream,
};

pub use closed::CLOSED_RETENTION;

/// Why a journal could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process has written to the journal: the execution is no longer ours.
    #[error("another process has written to the journal")]
    Conflict,
    /// The stream has lost the journal's entries.
    #[error("the journal is gone: the stream has lost its entries")]
    Lost,
    /// The entry could not be written. After a timeout or a lost connection, it is unknown whether
    /// it was.
    #[error("the journal could not be written")]
    Publish(#[source] publish::Error),
    /// The journal could not be read.
    #[error("the journal could not be read")]
    Read(#[source] history::Error),
    /// The entries of a closed journal could not be removed.
    #[error("the entries of a closed journal could not be removed")]
    Purge(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Whether another attempt may help without a change by anybody.
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::Conflict | Self::Lost => false,
            Self::Publish(error) => error.is_retryable(),
            Self::Read(error) => error.is_retryable(),
            Self::Purge(_) => true,
        }
    }
}

/// How long to wait for a missing blob, which a network share may show later.
const BLOB_WAIT_TIMEOUT: Duration = Duration::from_secs(2);

/// The interval of checks for it.
const BLOB_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The delay before an append is retried.
const APPEND_RETRY_DELAY: Duration = Duration::from_millis(250);

/// The content of a journal.
#[derive(Debug)]
pub struct LoadedJournal {
    /// The decodable entries in order.
    pub entries: Vec<JournalEntry>,
    /// The sequence of the newest entry, decodable or not; 0 when there is none.
    pub last: u64,
    /// Why the first undecodable entry cannot be decoded, now or later: a missing blob, or invalid
    /// bytes. An execution must not continue from a journal with a hole.
    pub unreadable: Option<history::Error>,
}

/// Access to the journals of all executions.
#[derive(Debug, Clone)]
pub struct Journal {
    bus: Bus,
}

impl Bus {
    /// The journals of executions.
    pub fn journal(&self) -> Journal {
        Journal { bus: self.clone() }
    }
}

impl Journal {
    /// Appends an entry after the one with sequence `expected_last` (0: the journal is empty) and
    /// returns its sequence. A retry after a lost acknowledgement recognizes its own entry.
    ///
    /// # Errors
    /// [`Error::Conflict`] when another entry is the last, [`Error::Lost`] when the expected one is
    /// missing; otherwise as [`Bus::publish`]. A full stream rejects entries rather than dropping
    /// old ones.
    pub async fn append(
        &self,
        step: StepId,
        entry: &JournalEntry,
        expected_last: u64,
    ) -> Result<u64, Error> {
        self.append_as(step, entry, expected_last, &self.bus.unique_id()).await
    }

    /// As [`Journal::append`], with retries while these may help and `give_up` is not cancelled. If
    /// another process takes over the execution meanwhile, the entry is rejected.
    ///
    /// # Errors
    /// Those of [`Journal::append`]; retryable ones only after `give_up`.
    pub async fn append_while(
        &self,
        step: StepId,
        entry: &JournalEntry,
        expected_last: u64,
        give_up: &CancellationToken,
    ) -> Result<u64, Error> {
        let id = self.bus.unique_id();
        loop {
            match self.append_as(step, entry, expected_last, &id).await {
                Err(error) if error.is_retryable() && !give_up.is_cancelled() => {
                    tracing::warn!(%step, %error, "a journal cannot be written yet; retrying");
                    tokio::select! {
                        () = give_up.cancelled() => return Err(error),
                        () = tokio::time::sleep(APPEND_RETRY_DELAY) => {}
                    }
                }
                done => return done,
            }
        }
    }

    pub(crate) async fn append_as(
        &self,
        step: StepId,
        entry: &JournalEntry,
        expected_last: u64,
        id: &str,
    ) -> Result<u64, Error> {
        let address = subject::Journal { step };
        let subject = address.subject();
        let sealed = self.bus.seal_for(&address, entry).await.map_err(Error::Publish)?;
        let expect = Expectation::unique_after(id.to_owned(), expected_last);
        match self.bus.deliver(&subject, sealed, expect, DEADLINE).await {
            Ok(ack) => Ok(ack.sequence),
            Err(Refusal::WrongLast) => self.resolve_refusal(&subject, id, expected_last).await,
            Err(Refusal::Failed(error)) => Err(Error::Publish(error)),
        }
    }

    /// Whether the entry in our place is our own, from an attempt whose acknowledgement was lost.
    /// Older servers recognize the duplicate themselves. Newer ones check the sequence first and
    /// reject it.
    async fn resolve_refusal(
        &self,
        subject: &str,
        id: &str,
        expected_last: u64,
    ) -> Result<u64, Error> {
        // Without an answer it is unknown whether the entry was written, which is what a timeout
        // means.
        let unknown = || Error::Publish(publish::Error::Timeout);
        let mut attempt = 1;
        loop {
            let Ok(stream) = self.stream().await else { return Err(unknown()) };
            match stream.get_last_raw_message_by_subject(subject).await {
                Ok(last) => {
                    let own =
                        last.headers.get(NATS_MESSAGE_ID).is_some_and(|found| found.as_str() == id);
                    return match own {
                        true => Ok(last.sequence),
                        // A later writer has a greater sequence: our entries are lost.
                        false if last.sequence < expected_last => Err(Error::Lost),
                        false => Err(Error::Conflict),
                    };
                }
                Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => {
                    return Err(if expected_last > 0 { Error::Lost } else { Error::Conflict });
                }
                // Each attempt waits for the server for up to two seconds.
                Err(_) if attempt < 3 => attempt += 1,
                Err(_) => return Err(unknown()),
            }
        }
    }

    /// All entries in order that were written before the call.
    ///
    /// # Errors
    /// When the stream or the blob of an entry cannot be read now.
    pub async fn load(&self, step: StepId) -> Result<LoadedJournal, Error> {
        let address = subject::Journal { step };
        let messages =
            self.bus.read_singly(Stream::Journal, &address.subject()).await.map_err(Error::Read)?;
        let last = messages.last().map_or(0, |message| message.sequence);
        let mut entries = Vec::with_capacity(messages.len());
        let mut unreadable = None;
        let blob_deadline = Instant::now() + BLOB_WAIT_TIMEOUT;
        for message in messages {
            let sequence = message.sequence;
            match self.open(&address, &message, blob_deadline).await {
                Ok(entry) => entries.push(entry),
                Err(source) => {
                    let retryable = source.is_retryable()
                        && !matches!(source, OpenError::Blob(blob::Error::Missing(_)));
                    let error =
                        history::Error::Entry { stream: Stream::Journal.name(), sequence, source };
                    if retryable {
                        return Err(Error::Read(error));
                    }
                    unreadable = unreadable.or(Some(error));
                }
            }
        }
        Ok(LoadedJournal { entries, last, unreadable })
    }

    /// Decodes one entry. Waits for a missing blob until `blob_deadline`.
    async fn open(
        &self,
        address: &subject::Journal,
        message: &StreamMessage,
        blob_deadline: Instant,
    ) -> Result<JournalEntry, OpenError> {
        loop {
            match self
                .bus
                .open::<JournalEntry>(Some(&message.headers), message.payload.clone())
                .await
            {
                Ok(entry) => {
                    return address.check(&entry).map(|()| entry).map_err(OpenError::Invalid);
                }
                Err(OpenError::Blob(blob::Error::Missing(_))) if Instant::now() < blob_deadline => {
                    tokio::time::sleep(BLOB_POLL_INTERVAL).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Closes the journal of an execution for good. A process that still runs the execution fails
    /// at its next entry, and a process that would start it again finds it closed. Only the closing
    /// entry is kept, for [`CLOSED_RETENTION`].
    ///
    /// A full stream rejects even the entry that would free space. Then the journal is purged first
    /// except for its last entry, which keeps other processes from starting the execution in
    /// between.
    ///
    /// # Errors
    /// When the server is unreachable, or still has no space. Safe to repeat.
    pub async fn close(&self, step: StepId) -> Result<(), Error> {
        let (subject, sealed) = self.closing_entry(step).await?;
        let id = self.bus.unique_id();
        let close = || {
            self.bus.deliver(&subject, sealed.clone(), Expectation::unique(id.clone()), DEADLINE)
        };
        let mut closed = close().await;
        if let Err(Refusal::Failed(publish::Error::Full)) = closed {
            tracing::warn!(%step, "the journal stream is full; purging a finished journal before closing it");
            self.keep_last(&subject).await?;
            closed = close().await;
        }
        match closed {
            Ok(_) => Ok(()),
            // The closing entry expects no particular last sequence.
            Err(Refusal::WrongLast) => Err(Error::Conflict),
            Err(Refusal::Failed(error)) => Err(Error::Publish(error)),
        }
    }

    /// Removes all entries of a journal but the last.
    async fn keep_last(&self, subject: &str) -> Result<(), Error> {
        let stream = self.stream().await.map_err(|error| Error::Purge(error.into()))?;
        stream.purge().filter(subject).keep(1).await.map_err(|error| Error::Purge(error.into()))?;
        Ok(())
    }

    /// Closes the journal of an execution that never started. Returns false and changes nothing
    /// when the journal has entries. Safe to repeat by any process: a repetition returns true
    /// again.
    ///
    /// # Errors
    /// When the server is unreachable, or entries written since `requested_at` may have been lost.
    pub async fn close_unstarted(
        &self,
        step: StepId,
        requested_at: Timestamp,
    ) -> Result<bool, Error> {
        if self.retained_since().await? > requested_at {
            return Err(Error::Lost);
        }
        let (subject, sealed) = self.closing_entry(step).await?;
        let id = format!("unbegun {step}");
        match self
            .bus
            .deliver(&subject, sealed, Expectation::unique_after(id.clone(), 0), DEADLINE)
            .await
        {
            Ok(_) => Ok(true),
            Err(Refusal::WrongLast) => match self.resolve_refusal(&subject, &id, 0).await {
                Ok(_) => Ok(true),
                Err(Error::Conflict) => Ok(false),
                Err(error) => Err(error),
            },
            Err(Refusal::Failed(error)) => Err(Error::Publish(error)),
        }
    }

    /// The closing entry and its subject.
    async fn closing_entry(&self, step: StepId) -> Result<(String, SealedMessage), Error> {
        let address = subject::Journal { step };
        let entry = journal_entry::Entry::Closed(JournalClosed {});
        let entry = JournalEntry {
            step_id: step.to_string(),
            entry: Some(entry),
            ..JournalEntry::default()
        };
        let mut sealed = self.bus.seal_for(&address, &entry).await.map_err(Error::Publish)?;
        closed::mark_closed(&mut sealed.headers);
        Ok((address.subject(), sealed))
    }

    /// Since when entries are retained; earlier ones are lost.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn retained_since(&self) -> Result<Timestamp, Error> {
        let jetstream = &self.bus.inner.jetstream;
        let stream = jetstream.get_stream(Stream::Journal.name()).await;
        let stream = stream.map_err(|error| {
            Error::Read(history::Error::Read {
                stream: Stream::Journal.name(),
                source: Box::new(error),
            })
        })?;
        let created = stream.cached_info().created.unix_timestamp_nanos();
        Ok(Timestamp::from_nanosecond(created).unwrap_or(Timestamp::UNIX_EPOCH))
    }

    async fn stream(
        &self,
    ) -> Result<
        async_nats::jetstream::stream::Stream<()>,
        async_nats::jetstream::context::GetStreamError,
    > {
        self.bus.inner.jetstream.get_stream_no_info(Stream::Journal.name()).await
    }
}

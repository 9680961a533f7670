//! Journals of executions: appended with a fence, read completely.
//!
//! Every entry names the sequence of the entry before it, and the stream refuses it when another
//! one is last by now. So of two processes that hold the same execution (one of them presumed dead)
//! only one can go on; the other learns it before its next side effect.

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
    /// The journal is gone: the stream has lost what was written to it.
    #[error("the journal is gone: the stream has lost its entries")]
    Lost,
    /// The entry could not be written; whether it was is unknown only for a timeout or a lost
    /// connection.
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
    /// Whether another try may help, without anybody changing anything.
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::Conflict | Self::Lost => false,
            Self::Publish(error) => error.is_retryable(),
            Self::Read(error) => error.is_retryable(),
            Self::Purge(_) => true,
        }
    }
}

/// How long a missing blob is waited for: where the folder is a network share, it may be on its
/// way.
const BLOB_WAIT_TIMEOUT: Duration = Duration::from_secs(2);

/// The pause between two looks for it.
const BLOB_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The pause before an entry is tried again.
const APPEND_RETRY_DELAY: Duration = Duration::from_millis(250);

/// What a journal holds.
#[derive(Debug)]
pub struct LoadedJournal {
    /// The entries in order, without those that cannot be read.
    pub entries: Vec<JournalEntry>,
    /// Sequence of the newest one, readable or not; 0 when there is none.
    pub last: u64,
    /// Why the first of those that cannot be read cannot, now and later: a blob that is gone, bytes
    /// that are no entry. A journal with a hole must not be gone on with.
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
    /// returns its sequence. A try whose acknowledgement was lost recognizes its own entry.
    ///
    /// # Errors
    /// [`Error::Conflict`] when another entry is last by now, [`Error::Lost`] when there is none
    /// although there should be; otherwise as [`Bus::publish`]. The stream refuses entries when it
    /// is full rather than forgetting old ones.
    pub async fn append(
        &self,
        step: StepId,
        entry: &JournalEntry,
        expected_last: u64,
    ) -> Result<u64, Error> {
        self.append_as(step, entry, expected_last, &self.bus.unique_id()).await
    }

    /// As [`Journal::append`], tried again with pauses while that may help and `give_up` is not
    /// cancelled. Nobody else can have the execution meanwhile without it being noticed: then the
    /// entry is refused.
    ///
    /// # Errors
    /// Those of [`Journal::append`]; retryable ones only when it was given up.
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
                    tracing::warn!(%step, %error, "a journal cannot be written yet");
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

    /// Whether the entry that stands in our way is our own, from a try whose acknowledgement was
    /// lost. Older servers recognize the duplicate themselves; newer ones check the sequence first
    /// and refuse it.
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
                        // Whoever has written after us has a greater number: ours are gone.
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

    /// All entries in order, up to what was written before the call.
    ///
    /// # Errors
    /// When the stream, or the blob of an entry, cannot be read now.
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

    /// One entry of a journal; a missing blob is waited for until `blob_deadline`.
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

    /// Ends an execution for good: whoever still runs it fails at its next entry, and whoever would
    /// begin it again finds that it is over. Of the journal only that is kept, for [`CLOSED_RETENTION`].
    ///
    /// A full stream refuses also the entry that would give room back. Then the journal is emptied
    /// first, but for its last entry, which keeps out whoever would begin the execution again in
    /// between.
    ///
    /// # Errors
    /// When the server cannot be reached, or has no room all the same; may be repeated.
    pub async fn close(&self, step: StepId) -> Result<(), Error> {
        let (subject, sealed) = self.closing_entry(step).await?;
        let id = self.bus.unique_id();
        let close = || {
            self.bus.deliver(&subject, sealed.clone(), Expectation::unique(id.clone()), DEADLINE)
        };
        let mut closed = close().await;
        if let Err(Refusal::Failed(publish::Error::Full)) = closed {
            tracing::warn!(%step, "the journals are full: one that is over is emptied before it is closed");
            self.keep_last(&subject).await?;
            closed = close().await;
        }
        match closed {
            Ok(_) => Ok(()),
            // Nothing is expected of the entry before it.
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

    /// The same of an execution that was never begun. False, and nothing is ended, when anything
    /// was written. May be repeated, by anybody: it is known again that it was never begun.
    ///
    /// # Errors
    /// When the server cannot be reached, or not everything that was written since `wanted` may
    /// still be there.
    pub async fn close_unstarted(&self, step: StepId, wanted: Timestamp) -> Result<bool, Error> {
        if self.retained_since().await? > wanted {
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

    /// The last entry of a journal, and where it goes.
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

    /// Since when journals are kept: what was written before that is lost.
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

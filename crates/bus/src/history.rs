//! Reading stored messages of a subject in order, up to the moment of the call.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use async_nats::jetstream::{
    Message,
    consumer::{AckPolicy, Consumer, DeliverPolicy, pull},
    message::StreamMessage,
    stream::{LastRawMessageError, LastRawMessageErrorKind},
};
use construct_domain::{OrganizationId, TaskId};
use construct_proto::v1::Event;
use futures::StreamExt as _;

use crate::{
    Bus, Position,
    envelope::OpenError,
    subject::{Address as _, Delta, TaskEvent},
    topology::Stream,
};

/// How long reading is retried after failures.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// The delay between two attempts.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// Messages requested at a time; with the largest inline payload this is 64 MiB.
const BATCH_MESSAGES: usize = 256;

/// Timeout of one batch.
const BATCH_TIMEOUT: Duration = Duration::from_secs(2);

/// Inactivity after which the server deletes the reader, if we die before deleting it.
const READER_TTL: Duration = Duration::from_secs(30);

/// The most bytes of a task's progress that are kept per subject: the newest. A script may make ten
/// thousand calls, with 4 KiB shown of each one's arguments and result.
const MAX_REPLAY_BYTES: usize = 4 * 1024 * 1024;

/// Why history could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server is unreachable, or did not answer fully in time.
    #[error("stream {stream} could not be read")]
    Read {
        /// The stream's name.
        stream: &'static str,
        /// The error of the server or the connection.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An entry cannot be decoded.
    #[error("entry {sequence} of stream {stream} cannot be read")]
    Entry {
        /// The stream's name.
        stream: &'static str,
        /// The entry's sequence.
        sequence: u64,
        /// The cause.
        source: OpenError,
    },
}

impl Error {
    /// Whether another attempt may help without a change by anybody.
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::Read { .. } => true,
            Self::Entry { source, .. } => source.is_retryable(),
        }
    }
}

/// How far a task's progress has been read, for continuing from there ([`Bus::replay_progress`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bookmark {
    /// The generation of the connection it was read with; 0 when there was none. After a reconnect
    /// the streams may be new ones with sequences from 1. Then everything is read again.
    generation: u64,
    /// The last sequence read, for each subject of the task's progress.
    read: [u64; 3],
}

#[cfg(any(test, feature = "testing"))]
impl Bookmark {
    /// A bookmark that differs from those with another number.
    pub const fn for_tests(read: u64) -> Self {
        Self { generation: 1, read: [read; 3] }
    }
}

/// The result of [`Bus::replay_progress`].
#[derive(Debug)]
pub struct Replay {
    /// Sorted by position, without duplicates.
    pub events: Vec<Event>,
    /// The size of their messages in bytes.
    pub bytes: usize,
    /// How far everything has been read.
    pub until: Bookmark,
}

impl Bus {
    /// The retained progress of a task after a bookmark (the default one: all of it): live text of
    /// the last hour, and calls of its scripts. Only events after the position `after`, and of each
    /// of the three subjects the newest 4 MiB.
    ///
    /// # Errors
    /// When the streams cannot be read within five seconds.
    pub async fn replay_progress(
        &self,
        organization: OrganizationId,
        task: TaskId,
        after: Option<Position>,
        from: Bookmark,
    ) -> Result<Replay, Error> {
        let generation = self.generation();
        let from = if from.generation == generation && generation > 0 {
            from
        } else {
            Bookmark::default()
        };
        let [called, result] = TaskEvent::tools(organization, task);
        let deltas = Delta { organization, task }.subject();
        let subjects =
            [(Stream::Deltas, deltas), (Stream::Events, called), (Stream::Events, result)];
        let reads = subjects
            .iter()
            .zip(from.read)
            .map(|((stream, subject), read)| self.read(*stream, subject, read));
        let found = futures::future::try_join_all(reads).await?;
        let mut until = Bookmark { generation, ..from };
        let (mut sorted, mut bytes) = (BTreeMap::new(), 0);
        for ((messages, (stream, _)), read) in found.into_iter().zip(&subjects).zip(&mut until.read)
        {
            for (sequence, message) in messages {
                *read = sequence;
                let message = message.message;
                let length = message.length;
                match self.open::<Event>(message.headers.as_ref(), message.payload).await {
                    Ok(event) if after.is_none_or(|after| Position::from_event(&event) > after) => {
                        bytes += length;
                        sorted.insert(Position::from_event(&event), event);
                    }
                    Ok(_) => {}
                    // Omit one event rather than return nothing.
                    Err(error) => {
                        let error: &dyn std::error::Error = &error;
                        tracing::warn!(
                            stream = stream.name(),
                            sequence,
                            error,
                            "an event cannot be decoded and is omitted"
                        );
                    }
                }
            }
        }
        Ok(Replay { events: sorted.into_values().collect(), bytes, until })
    }

    /// A bookmark at the end of the retained progress of any task: everything stored before this
    /// call lies before it.
    ///
    /// # Errors
    /// When the server does not answer.
    pub async fn progress_end(&self) -> Result<Bookmark, Error> {
        // Read before the request: if the connection is lost meanwhile, this generation is out of
        // date.
        let generation = self.generation();
        let [deltas, events] = [Stream::Deltas, Stream::Events].map(async |stream| {
            match self.inner.jetstream.get_stream(stream.name()).await {
                Ok(known) => Ok(known.cached_info().state.last_sequence),
                Err(source) => Err(Error::Read { stream: stream.name(), source: source.into() }),
            }
        });
        let (deltas, events) = futures::future::try_join(deltas, events).await?;
        Ok(Bookmark { generation, read: [deltas, events, events] })
    }

    /// The messages of a limits stream on a subject without wildcards after the sequence `read`,
    /// oldest first, and [`MAX_REPLAY_BYTES`] at most.
    async fn read(
        &self,
        stream: Stream,
        subject: &str,
        read: u64,
    ) -> Result<VecDeque<(u64, Message)>, Error> {
        let end = Instant::now() + READ_TIMEOUT;
        loop {
            // Boxed, because the future of the retries would be large.
            match Box::pin(self.read_once(stream, subject, read)).await {
                Ok(messages) => return Ok(messages),
                Err(source) if Instant::now() >= end => {
                    return Err(Error::Read { stream: stream.name(), source });
                }
                Err(error) => {
                    tracing::debug!(stream = stream.name(), subject, %error, "retrying to read");
                    tokio::time::sleep(RETRY_DELAY).await;
                }
            }
        }
    }

    async fn read_once(
        &self,
        stream: Stream,
        subject: &str,
        read: u64,
    ) -> Result<VecDeque<(u64, Message)>, async_nats::Error> {
        // Most histories are empty. For a new reader, the server counts the messages before it,
        // which takes longer the more the stream holds (milliseconds for thousands of subjects).
        // The bounds of a subject it knows at once.
        let known = self.inner.jetstream.get_stream_no_info(stream.name()).await?;
        let Some(last) = message_if_present(known.get_last_raw_message_by_subject(subject).await)?
        else {
            return Ok(VecDeque::new());
        };
        if last.sequence <= read {
            return Ok(VecDeque::new());
        }
        match message_if_present(known.get_first_raw_message_by_subject(subject, read + 1).await)? {
            Some(first) => self.read_range(stream, subject, first.sequence, last.sequence).await,
            // It expired meanwhile.
            None => Ok(VecDeque::new()),
        }
    }

    /// Reads message by message, for users that may not create consumers of the stream because they
    /// publish into it as well.
    pub(crate) async fn read_singly(
        &self,
        stream: Stream,
        subject: &str,
    ) -> Result<Vec<StreamMessage>, Error> {
        let mut end = Instant::now() + READ_TIMEOUT;
        let mut messages: Vec<StreamMessage> = Vec::new();
        loop {
            let before = messages.len();
            match Box::pin(self.read_more(stream, subject, &mut messages)).await {
                Ok(()) => return Ok(messages),
                // A long history may take its time as long as it makes progress.
                Err(_) if messages.len() > before => end = Instant::now() + READ_TIMEOUT,
                Err(source) if Instant::now() >= end => {
                    return Err(Error::Read { stream: stream.name(), source });
                }
                Err(error) => {
                    tracing::debug!(stream = stream.name(), subject, %error, "retrying to read");
                    tokio::time::sleep(RETRY_DELAY).await;
                }
            }
        }
    }

    /// Reads the messages after those already read, up to the last one at the time of the call.
    async fn read_more(
        &self,
        stream: Stream,
        subject: &str,
        messages: &mut Vec<StreamMessage>,
    ) -> Result<(), async_nats::Error> {
        let stream = self.inner.jetstream.get_stream_no_info(stream.name()).await?;
        let Some(last) = message_if_present(stream.get_last_raw_message_by_subject(subject).await)?
        else {
            return Ok(());
        };
        loop {
            let read = messages.last().map_or(0, |message| message.sequence);
            if read >= last.sequence {
                return Ok(());
            }
            let Some(next) = message_if_present(
                stream.get_first_raw_message_by_subject(subject, read + 1).await,
            )?
            else {
                return Ok(());
            };
            messages.push(next);
        }
    }

    /// Reads a subject from one of its messages to another.
    async fn read_range(
        &self,
        stream: Stream,
        subject: &str,
        first: u64,
        last: u64,
    ) -> Result<VecDeque<(u64, Message)>, async_nats::Error> {
        let config = pull::Config {
            // With a name, the request contains the filter, so that the server's permissions can
            // restrict it.
            name: Some(self.unique_id()),
            deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: first },
            ack_policy: AckPolicy::None,
            filter_subject: subject.to_owned(),
            inactive_threshold: READER_TTL,
            memory_storage: true,
            ..Default::default()
        };
        let jetstream = &self.inner.jetstream;
        let reader = jetstream.create_consumer_on_stream(config, stream.name()).await?;
        let read = drain(&reader, last).await;
        // Best effort: the server deletes the reader anyway.
        if let Err(error) =
            jetstream.delete_consumer_from_stream(&reader.cached_info().name, stream.name()).await
        {
            tracing::debug!(%error, "a reader could not be removed");
        }
        read
    }
}

/// A missing message is not an error.
fn message_if_present(
    message: Result<StreamMessage, LastRawMessageError>,
) -> Result<Option<StreamMessage>, async_nats::Error> {
    match message {
        Ok(message) => Ok(Some(message)),
        Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Takes all messages up to `last`. The server reports a count too, but may count messages that it
/// never sends, and waiting for them would delay the subscriber.
async fn drain(
    reader: &Consumer<pull::Config>,
    last: u64,
) -> Result<VecDeque<(u64, Message)>, async_nats::Error> {
    let (mut messages, mut bytes) = (VecDeque::new(), 0);
    loop {
        let mut came = false;
        let mut batch =
            reader.fetch().max_messages(BATCH_MESSAGES).expires(BATCH_TIMEOUT).messages().await?;
        while let Some(message) = batch.next().await {
            let message = message?;
            let (sequence, behind) = {
                let info = message.info()?;
                (info.stream_sequence, info.pending)
            };
            came = true;
            bytes += message.length;
            messages.push_back((sequence, message));
            while bytes > MAX_REPLAY_BYTES
                && let Some((_, oldest)) = messages.pop_front()
            {
                bytes -= oldest.length;
            }
            // The last message may have expired meanwhile and never arrives.
            if sequence >= last || behind == 0 {
                return Ok(messages);
            }
        }
        if !came {
            return Err("the server sent nothing although messages exist".into());
        }
    }
}

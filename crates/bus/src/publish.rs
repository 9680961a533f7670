//! Publishing into streams: acknowledged, and retried until a deadline, so that a restart of NATS
//! loses nothing.

use std::{
    error::Error as _,
    time::{Duration, Instant},
};

use async_nats::{
    HeaderMap,
    header::NATS_MESSAGE_ID,
    jetstream::{self, context::PublishErrorKind, message::PublishMessage},
};
use bytes::Bytes;
use construct_proto::v1::Event;

use crate::{
    Bus, Connection, blob,
    envelope::{STEP, SealError, SealedMessage},
    subject::{EventAddress, Invalid, StreamAddress},
};

/// How long a publish is retried by default.
pub const DEADLINE: Duration = Duration::from_secs(5);

/// Timeout of one attempt's acknowledgement.
const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(1500);

/// The delay after an attempt that failed at once.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// Why a message could not be published.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The payload exceeds the limit.
    #[error("the payload has {size} bytes; at most {limit} can be sent")]
    TooLarge {
        /// The size in bytes.
        size: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The payload does not belong on the subject.
    #[error("the payload does not belong on its subject")]
    Invalid(#[source] Invalid),
    /// A large payload could not be stored.
    #[error("the payload could not be stored as a blob")]
    Blob(#[source] blob::Error),
    /// The stream accepts no more messages.
    #[error("the stream is full")]
    Full,
    /// No acknowledgement arrived in time. The message may have been accepted.
    #[error("NATS did not acknowledge in time")]
    Timeout,
    /// There was no connection to NATS.
    #[error("not connected to NATS")]
    Disconnected,
    /// No stream listens to the subject: the topology was not ensured, or JetStream is still
    /// starting.
    #[error("no stream listens to {subject}")]
    NoStream {
        /// The subject.
        subject: String,
    },
    /// The server refused the message.
    #[error("NATS refused the message")]
    Rejected {
        /// Whether another attempt may help.
        retryable: bool,
        /// The server's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Error {
    /// Whether another attempt may help without a change by anybody.
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::TooLarge { .. } | Self::Invalid(_) => false,
            Self::Blob(error) => error.is_retryable(),
            Self::Full | Self::Timeout | Self::Disconnected | Self::NoStream { .. } => true,
            Self::Rejected { retryable, .. } => *retryable,
        }
    }
}

impl From<SealError> for Error {
    fn from(error: SealError) -> Self {
        match error {
            SealError::TooLarge { size, limit } => Self::TooLarge { size, limit },
            SealError::Blob(error) => Self::Blob(error),
        }
    }
}

/// The acknowledgement of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// The sequence in the stream.
    pub sequence: u64,
    /// Whether the stream already had the message, by its `Nats-Msg-Id`.
    pub duplicate: bool,
}

/// Why one attempt failed.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The last message of the subject is not the expected one.
    WrongLast,
    Failed(Error),
}

impl Bus {
    /// Publishes and waits until the stream has the message. Retries for up to [`DEADLINE`] with
    /// the same `Nats-Msg-Id`.
    ///
    /// # Errors
    /// When the payload does not belong on the subject or is too large, or when the deadline has
    /// passed; see [`Error`].
    pub async fn publish<A: StreamAddress>(
        &self,
        address: &A,
        message: &A::Message,
    ) -> Result<Ack, Error> {
        self.publish_within(address, message, DEADLINE).await
    }

    /// Publishes with another deadline.
    ///
    /// # Errors
    /// As [`Bus::publish`].
    pub async fn publish_within<A: StreamAddress>(
        &self,
        address: &A,
        message: &A::Message,
        deadline: Duration,
    ) -> Result<Ack, Error> {
        let sealed = self.seal_for(address, message).await?;
        let key = A::duplicate_key(message).unwrap_or_else(|| self.unique_id());
        match self.deliver(&address.subject(), sealed, Expectation::unique(key), deadline).await {
            Ok(ack) => Ok(ack),
            Err(Refusal::Failed(error)) => Err(error),
            Err(Refusal::WrongLast) => Err(unexpected_refusal()),
        }
    }

    /// Publishes an event to the subject that follows from its content.
    ///
    /// # Errors
    /// As [`Bus::publish`]; [`Error::Invalid`] when the event names no organization, or neither a
    /// task nor an entity.
    pub async fn publish_event(&self, event: &Event) -> Result<Ack, Error> {
        self.publish_event_within(event, DEADLINE).await
    }

    /// Publishes an event with another deadline.
    ///
    /// # Errors
    /// As [`Bus::publish_event`].
    pub async fn publish_event_within(
        &self,
        event: &Event,
        deadline: Duration,
    ) -> Result<Ack, Error> {
        match EventAddress::from_event(event).map_err(Error::Invalid)? {
            EventAddress::Task(address) => self.publish_within(&address, event, deadline).await,
            EventAddress::Entity(address) => self.publish_within(&address, event, deadline).await,
            EventAddress::Delta(address) => self.publish_within(&address, event, deadline).await,
        }
    }

    /// Checks a payload against its address and encodes it.
    pub(crate) async fn seal_for<A: StreamAddress>(
        &self,
        address: &A,
        message: &A::Message,
    ) -> Result<SealedMessage, Error> {
        address.check(message).map_err(Error::Invalid)?;
        let mut sealed = self.seal(message).await?;
        if let Some(step) = A::step(message) {
            sealed.headers.insert(STEP, step);
        }
        Ok(sealed)
    }

    /// Retries until the message is accepted, rejected for good, or the deadline has passed.
    pub(crate) async fn deliver(
        &self,
        subject: &str,
        sealed: SealedMessage,
        expect: Expectation,
        deadline: Duration,
    ) -> Result<Ack, Refusal> {
        let end = Instant::now() + deadline;
        let mut connection = self.connection();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let up = wait_connected(&mut connection);
            let Ok(generation) = tokio::time::timeout(left, up).await else {
                return Err(Refusal::Failed(Error::Disconnected));
            };
            let left = end.saturating_duration_since(Instant::now());
            let attempt =
                self.attempt(subject, sealed.headers.clone(), sealed.payload.clone(), &expect);
            let outcome = tokio::select! {
                outcome = tokio::time::timeout(left.min(ATTEMPT_TIMEOUT), attempt) => outcome,
                // The acknowledgement of a broken connection never arrives.
                () = connection_changed(&mut connection, generation) => Ok(Err(Refusal::Failed(Error::Disconnected))),
            };
            let error = match outcome {
                Ok(Ok(ack)) => return Ok(ack),
                Ok(Err(Refusal::WrongLast)) => return Err(Refusal::WrongLast),
                Ok(Err(Refusal::Failed(error))) => error,
                Err(_elapsed) => Error::Timeout,
            };
            // An attempt without time would only replace a clear error by a timeout.
            if !error.is_retryable()
                || end.saturating_duration_since(Instant::now()) <= 2 * RETRY_DELAY
            {
                return Err(Refusal::Failed(error));
            }
            tracing::debug!(subject, %error, "retrying to publish");
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    async fn attempt(
        &self,
        subject: &str,
        headers: HeaderMap,
        payload: Bytes,
        expect: &Expectation,
    ) -> Result<Ack, Refusal> {
        let future = self
            .inner
            .jetstream
            .send_publish(subject.to_owned(), expect.apply(headers, payload))
            .await;
        let acknowledged = match future {
            Ok(future) => future.await,
            Err(error) => Err(error),
        };
        match acknowledged {
            Ok(ack) => Ok(Ack { sequence: ack.sequence, duplicate: ack.duplicate }),
            Err(error) => Err(refusal(subject, error)),
        }
    }
}

/// What the stream must check before it accepts a message.
#[derive(Debug, Clone, Default)]
pub(crate) struct Expectation {
    message_id: Option<String>,
    last_on_subject: Option<u64>,
}

impl Expectation {
    pub(crate) fn unique(message_id: String) -> Self {
        Self { message_id: Some(message_id), last_on_subject: None }
    }

    pub(crate) fn last(sequence: u64) -> Self {
        Self { message_id: None, last_on_subject: Some(sequence) }
    }

    pub(crate) fn unique_after(message_id: String, sequence: u64) -> Self {
        Self { message_id: Some(message_id), last_on_subject: Some(sequence) }
    }

    fn apply(&self, mut headers: HeaderMap, payload: Bytes) -> PublishMessage {
        if let Some(id) = &self.message_id {
            headers.insert(NATS_MESSAGE_ID, id.as_str());
        }
        let message = PublishMessage::build().payload(payload).headers(headers);
        match self.last_on_subject {
            Some(sequence) => message.expected_last_subject_sequence(sequence),
            None => message,
        }
    }
}

/// The server's code for a full store, whichever limit was reached.
const STORE_FAILED: jetstream::ErrorCode = jetstream::ErrorCode::STREAM_STORE_FAILED;

pub(crate) fn refusal(subject: &str, error: jetstream::context::PublishError) -> Refusal {
    let failed = match error.kind() {
        PublishErrorKind::WrongLastSequence => return Refusal::WrongLast,
        PublishErrorKind::StreamNotFound => Error::NoStream { subject: subject.to_owned() },
        PublishErrorKind::TimedOut => Error::Timeout,
        PublishErrorKind::BrokenPipe => Error::Disconnected,
        _ => {
            let answer =
                error.source().and_then(|source| source.downcast_ref::<jetstream::Error>());
            match answer.map(|answer| (answer.error_code(), answer.code())) {
                Some((STORE_FAILED, _)) => Error::Full,
                answer => Error::Rejected {
                    retryable: answer.is_some_and(|(_, status)| status == 503),
                    source: error.into(),
                },
            }
        }
    };
    Refusal::Failed(failed)
}

/// The server rejected a sequence although none was expected.
pub(crate) fn unexpected_refusal() -> Error {
    Error::Rejected {
        retryable: false,
        source: "a sequence was rejected although none was expected".into(),
    }
}

/// Waits for a connection and returns its generation.
async fn wait_connected(connection: &mut tokio::sync::watch::Receiver<Connection>) -> u64 {
    loop {
        if let Connection::Up { generation } = *connection.borrow_and_update() {
            return generation;
        }
        if connection.changed().await.is_err() {
            // The client is closed, which happens only at the end of the process; the caller's
            // deadline decides.
            std::future::pending::<()>().await;
        }
    }
}

/// Waits until the connection is lost or replaced.
pub(crate) async fn connection_changed(
    connection: &mut tokio::sync::watch::Receiver<Connection>,
    generation: u64,
) {
    loop {
        if *connection.borrow_and_update() != (Connection::Up { generation }) {
            return;
        }
        if connection.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

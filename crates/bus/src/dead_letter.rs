//! Dead letters: listing, redriving and removing them.

use std::collections::HashMap;

use async_nats::{
    HeaderMap,
    jetstream::{
        message::StreamMessage,
        stream::{LastRawMessageErrorKind, Stream as Server},
    },
};
use construct_proto::mesh::v1::DeadLetter;

use crate::{
    Bus,
    envelope::{BLOB, ORGANIZATION, OpenError, STEP, STEP_NUMBER, STEP_ROUND, TYPE},
    publish::{self, DEADLINE, Expectation, Refusal},
    subject::{Address as _, DeadLetters},
    topology::{Stream, streams},
};

/// The subjects of all dead letters.
const ALL_LETTERS: &str = "construct.v1.dead.>";

/// Why an operation on a dead letter failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no dead letter with this number (any more).
    #[error("there is no such dead letter")]
    NotFound,
    /// The message is a command. Its step has failed; for a retry, the reconciler publishes a new
    /// command.
    #[error(
        "the message of the dead letter is a command: its step has failed, and a retry publishes a new command"
    )]
    Command,
    /// It names a subject of another stream than its own.
    #[error("the dead letter names a subject of another stream")]
    Subject,
    /// It lacks the headers that are needed to publish its message again.
    #[error("the dead letter has no headers of its message, so it cannot be published again")]
    Headers,
    /// The dead letter itself cannot be decoded.
    #[error("the dead letter cannot be decoded")]
    Read(#[source] OpenError),
    /// The server could not be reached.
    #[error("the dead letters could not be reached")]
    Server(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The message was not accepted.
    #[error("the message could not be published again")]
    Publish(#[source] publish::Error),
}

/// A dead letter and its number.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredLetter {
    /// The sequence in its stream.
    pub number: u64,
    /// The content.
    pub letter: DeadLetter,
}

impl StoredLetter {
    /// Whether the message can and may be published again.
    ///
    /// # Errors
    /// [`Error::Command`], [`Error::Subject`], [`Error::Headers`].
    pub fn check(&self) -> Result<(), Error> {
        let DeadLetter { stream, subject, headers, .. } = &self.letter;
        let row = streams().iter().find(|row| row.stream.name() == stream).ok_or(Error::Subject)?;
        if matches!(row.stream, Stream::Code | Stream::Model) {
            return Err(Error::Command);
        }
        // A user that may write dead letters of a stream can redrive into this stream only.
        if !subject.starts_with(row.subject.trim_end_matches('>')) {
            return Err(Error::Subject);
        }
        if headers.is_empty() { Err(Error::Headers) } else { Ok(()) }
    }
}

impl Bus {
    /// The oldest dead letters with a number above `after`, at most `limit`. Letters that cannot be
    /// decoded are omitted.
    ///
    /// # Errors
    /// [`Error::Server`].
    pub async fn dead_letters(&self, after: u64, limit: usize) -> Result<Vec<StoredLetter>, Error> {
        let stream = self.dead_letter_stream().await?;
        let (mut found, mut next) = (Vec::new(), after.saturating_add(1));
        while found.len() < limit {
            // The next existing one, whatever the gap.
            let message = match stream.get_first_raw_message_by_subject(ALL_LETTERS, next).await {
                Ok(message) => message,
                Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => break,
                Err(error) => return Err(server(error)),
            };
            next = message.sequence.saturating_add(1);
            match self.read_letter(message).await {
                Ok(letter) => found.push(letter),
                Err(error) => {
                    let error: &dyn std::error::Error = &error;
                    tracing::warn!(error, "a dead letter cannot be decoded and is omitted");
                }
            }
        }
        Ok(found)
    }

    /// The dead letter with this number.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Read`], [`Error::Server`].
    pub async fn find_dead_letter(&self, number: u64) -> Result<StoredLetter, Error> {
        let stream = self.dead_letter_stream().await?;
        self.letter(&stream, number).await
    }

    /// Publishes the message of a dead letter to its original subject, then removes the letter. If
    /// the process dies in between, the letter can be redriven once more, which every consumer must
    /// tolerate anyway.
    ///
    /// Commands are not redriven: their steps have failed, and only the reconciler may command the
    /// interpreter.
    ///
    /// # Errors
    /// All of [`Error`].
    pub async fn redrive(&self, number: u64) -> Result<(), Error> {
        let stream = self.dead_letter_stream().await?;
        let found = self.letter(&stream, number).await?;
        found.check()?;
        let DeadLetter { subject, headers, payload, .. } = found.letter;
        let mut sent = HeaderMap::new();
        for (name, value) in headers {
            sent.insert(name, value);
        }
        let sealed = crate::envelope::SealedMessage { headers: sent, payload: payload.into() };
        match self.deliver(&subject, sealed, Expectation::unique(self.unique_id()), DEADLINE).await
        {
            Ok(_) => {}
            Err(Refusal::Failed(error)) => return Err(Error::Publish(error)),
            Err(Refusal::WrongLast) => return Err(Error::Publish(publish::unexpected_refusal())),
        }
        self.remove_letter(&stream, number).await
    }

    /// Removes a dead letter.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Server`].
    pub async fn remove_dead_letter(&self, number: u64) -> Result<(), Error> {
        let stream = self.dead_letter_stream().await?;
        self.remove_letter(&stream, number).await
    }

    async fn remove_letter(&self, stream: &Server, number: u64) -> Result<(), Error> {
        match stream.delete_message(number).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::NotFound),
            // The error of NATS for a missing message differs between versions.
            Err(error) => match stream.get_raw_message(number).await {
                Err(missing) if missing.kind() == LastRawMessageErrorKind::NoMessageFound => {
                    Err(Error::NotFound)
                }
                _ => Err(server(error)),
            },
        }
    }

    async fn letter(&self, stream: &Server, number: u64) -> Result<StoredLetter, Error> {
        let message = match stream.get_raw_message(number).await {
            Ok(message) => message,
            Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => {
                return Err(Error::NotFound);
            }
            Err(error) => return Err(server(error)),
        };
        self.read_letter(message).await
    }

    async fn read_letter(&self, message: StreamMessage) -> Result<StoredLetter, Error> {
        let number = message.sequence;
        let letter: DeadLetter =
            self.open(Some(&message.headers), message.payload).await.map_err(Error::Read)?;
        let address = DeadLetters::parse(message.subject.as_str())
            .map_err(|error| Error::Read(OpenError::Invalid(error)))?;
        address.check(&letter).map_err(|error| Error::Read(OpenError::Invalid(error)))?;
        Ok(StoredLetter { number, letter })
    }

    async fn dead_letter_stream(&self) -> Result<Server, Error> {
        self.inner.jetstream.get_stream(Stream::DeadLetters.name()).await.map_err(server)
    }
}

fn server(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Server(error.into())
}

/// The headers that a dead letter keeps: what describes the message, and its trace. Headers that
/// the server evaluates on publishing apply to the first time only.
pub(crate) fn kept_headers(headers: &HeaderMap) -> HashMap<String, String> {
    let known =
        [TYPE, BLOB, ORGANIZATION, STEP, STEP_NUMBER, STEP_ROUND, "traceparent", "tracestate"];
    let kept = known.iter().filter_map(|name| {
        let value = headers.get(*name)?;
        Some(((*name).to_owned(), value.as_str().to_owned()))
    });
    kept.collect()
}

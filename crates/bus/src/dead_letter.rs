//! DeadLetters letters: reading them, publishing them again where they were found, and removing them.

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

/// Where letters of all streams are.
const ALL_LETTERS: &str = "construct.v1.dead.>";

/// Why nothing could be done about a letter.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is none of this number (any more).
    #[error("there is no such dead letter")]
    NotFound,
    /// Its message is a command. Its step has failed, and what is tried again the reconciler
    /// commands anew.
    #[error(
        "the message of the dead letter is a command: its step has failed, and what is tried again is command_step anew"
    )]
    Command,
    /// It names a subject of another stream than the one it was found in.
    #[error("the dead letter names a subject that is not one of its stream")]
    Subject,
    /// It does not say enough to be published again.
    #[error(
        "the dead letter does not say which headers its message had, so it cannot be published again"
    )]
    Headers,
    /// The letter itself cannot be read.
    #[error("the dead letter cannot be read")]
    Read(#[source] OpenError),
    /// The server could not be asked.
    #[error("the dead letters could not be reached")]
    Server(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Its message was not accepted.
    #[error("the message could not be published again")]
    Publish(#[source] publish::Error),
}

/// A letter and its number.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredLetter {
    /// Its sequence in the stream.
    pub number: u64,
    /// What it says.
    pub letter: DeadLetter,
}

impl StoredLetter {
    /// Whether its message can be published again, and may be.
    ///
    /// # Errors
    /// [`Error::Command`], [`Error::Subject`], [`Error::Headers`].
    pub fn check(&self) -> Result<(), Error> {
        let DeadLetter { stream, subject, headers, .. } = &self.letter;
        let row = streams().iter().find(|row| row.stream.name() == stream).ok_or(Error::Subject)?;
        if matches!(row.stream, Stream::Code | Stream::Model) {
            return Err(Error::Command);
        }
        // Who may write letters of a stream has others publish into this stream only.
        if !subject.starts_with(row.subject.trim_end_matches('>')) {
            return Err(Error::Subject);
        }
        if headers.is_empty() { Err(Error::Headers) } else { Ok(()) }
    }
}

impl Bus {
    /// The oldest letters behind number `after`, at most `limit`. Those that cannot be read are
    /// left out.
    ///
    /// # Errors
    /// [`Error::Server`].
    pub async fn dead_letters(&self, after: u64, limit: usize) -> Result<Vec<StoredLetter>, Error> {
        let stream = self.dead_letter_stream().await?;
        let (mut found, mut next) = (Vec::new(), after.saturating_add(1));
        while found.len() < limit {
            // The next that is there, however many are gone between.
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
                    tracing::warn!(error, "a dead letter cannot be read and is left out");
                }
            }
        }
        Ok(found)
    }

    /// The letter with this number.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Read`], [`Error::Server`].
    pub async fn find_dead_letter(&self, number: u64) -> Result<StoredLetter, Error> {
        let stream = self.dead_letter_stream().await?;
        self.letter(&stream, number).await
    }

    /// Publishes a letter's message where it was found, then removes the letter. When the process
    /// dies between the two, the letter can be published once more, which every receiver must bear
    /// anyway.
    ///
    /// Commands are not published again: their steps have failed, and nobody but the reconciler may
    /// command the interpreter.
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

    /// Removes a letter.
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
            // What NATS says of a message that is not there differs from version to version.
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

/// The headers of a message that a letter keeps: what the message is, and the trace it belongs to.
/// What the server looks at when it accepts a message is of the first time alone.
pub(crate) fn kept_headers(headers: &HeaderMap) -> HashMap<String, String> {
    let known =
        [TYPE, BLOB, ORGANIZATION, STEP, STEP_NUMBER, STEP_ROUND, "traceparent", "tracestate"];
    let kept = known.iter().filter_map(|name| {
        let value = headers.get(*name)?;
        Some(((*name).to_owned(), value.as_str().to_owned()))
    });
    kept.collect()
}

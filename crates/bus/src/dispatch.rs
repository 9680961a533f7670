//! Dispatching a command so that repeating it is harmless.
//!
//! The stream accepts it only while its subject has no message
//! (`Nats-Expected-Last-Subject-Sequence: 0`). A work queue removes a message when it is
//! acknowledged. A `Nats-Msg-Id` is deliberately absent: within its window it would swallow a
//! legitimate second dispatch of a step whose first command was acknowledged.

use std::time::Instant;

use async_nats::{
    HeaderMap,
    jetstream::stream::{LastRawMessageErrorKind, RawMessageErrorKind},
};

use construct_domain::{StepId, TaskId};

use crate::{
    Bus,
    envelope::{ORGANIZATION, STEP, STEP_NUMBER, STEP_ROUND, SealedMessage},
    publish::{DEADLINE, Error, Expectation, Refusal},
    subject::{self, Address as _, Command, CommandStep},
    topology::{ConsumerRow, Stream},
};

/// The outcome of a dispatch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dispatch {
    /// The command now waits for a worker.
    Published,
    /// A command of the same step is queued or in progress.
    AlreadyQueued,
    /// It replaced the command of an earlier step, or of an earlier round of this one, which a dead
    /// worker had left.
    Superseded {
        /// The earlier step.
        step_id: String,
    },
    /// The queue has the command of a later step or round: this dispatcher is out of date. Nothing
    /// was published.
    Stale {
        /// The number of the later step.
        number: u64,
    },
}

impl Bus {
    /// Publishes a command unless it is already queued. Safe to repeat at any time.
    ///
    /// # Errors
    /// As [`Bus::publish`].
    pub async fn publish_once<A: Command>(
        &self,
        address: &A,
        message: &A::Message,
    ) -> Result<Dispatch, Error> {
        let end = Instant::now() + DEADLINE;
        let sealed = self.seal_command(address, message).await?;
        let CommandStep { step: step_id, number, round, .. } = A::command_step(message);
        let subject = address.subject();
        let mut superseded = None;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.deliver(&subject, sealed.clone(), Expectation::last(0), left).await {
                Ok(_) => {
                    return Ok(superseded
                        .map_or(Dispatch::Published, |step_id| Dispatch::Superseded { step_id }));
                }
                Err(Refusal::Failed(error)) => return Err(error),
                Err(Refusal::WrongLast) => {}
            }
            // Acknowledged between the two requests, so the subject is free now.
            let Some(queued) = self.find_queued(A::STREAM, &subject).await? else { continue };
            if queued.step_id == step_id && queued.round == round {
                return Ok(Dispatch::AlreadyQueued);
            }
            if (queued.number, queued.round) > (number, round) {
                return Ok(Dispatch::Stale { number: queued.number });
            }
            self.remove(A::STREAM, queued.sequence).await?;
            superseded = Some(queued.step_id);
        }
    }

    /// Encodes a command. Its headers suffice to answer it without decoding the payload.
    pub(crate) async fn seal_command<A: Command>(
        &self,
        address: &A,
        message: &A::Message,
    ) -> Result<SealedMessage, Error> {
        let mut sealed = self.seal_for(address, message).await?;
        let CommandStep { organization, number, round, .. } = A::command_step(message);
        sealed.headers.insert(ORGANIZATION, organization);
        sealed.headers.insert(STEP_NUMBER, number.to_string());
        sealed.headers.insert(STEP_ROUND, round.to_string());
        Ok(sealed)
    }

    /// Withdraws a command that is no longer needed, if it is queued or in progress: it is not
    /// delivered again.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn withdraw<A: Command>(&self, address: &A, step: StepId) -> Result<(), Error> {
        match self.find_queued(A::STREAM, &address.subject()).await? {
            Some(queued) if queued.step_id == step.to_string() => {
                self.remove(A::STREAM, queued.sequence).await
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Withdraws a command that no worker has taken. `Some(true)` when none will take it,
    /// `Some(false)` when a worker has it, and `None` when the command is not in its queue, because
    /// it was executed or never sent.
    ///
    /// # Errors
    /// When the server is unreachable. The command may have been withdrawn.
    pub async fn withdraw_undelivered<A: Command>(
        &self,
        address: &A,
        consumer: &ConsumerRow,
        step: StepId,
    ) -> Result<Option<bool>, Error> {
        let queued = self.find_queued(A::STREAM, &address.subject()).await?;
        let Some(queued) = queued.filter(|queued| queued.step_id == step.to_string()) else {
            return Ok(None);
        };
        if self.last_delivered(consumer).await? >= queued.sequence {
            return Ok(Some(false));
        }
        let stream =
            self.inner.jetstream.get_stream_no_info(A::STREAM.name()).await.map_err(rejected)?;
        stream.delete_message(queued.sequence).await.map_err(rejected)?;
        // It may have been delivered in between.
        Ok(Some(self.last_delivered(consumer).await? < queued.sequence))
    }

    /// The last sequence that a queue has delivered.
    async fn last_delivered(&self, consumer: &ConsumerRow) -> Result<u64, Error> {
        let state = self.inspect_consumer(consumer).await.map_err(rejected)?;
        Ok(state.map_or(0, |state| state.reached))
    }

    /// Whether this command is queued or in progress.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn is_queued<A: Command>(
        &self,
        address: &A,
        step: StepId,
        round: u32,
    ) -> Result<bool, Error> {
        Ok(self.queue_position(address, step, round).await?.is_some())
    }

    /// The stream sequence of this command if it is queued or in progress.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn queue_position<A: Command>(
        &self,
        address: &A,
        step: StepId,
        round: u32,
    ) -> Result<Option<u64>, Error> {
        let queued = self.find_queued(A::STREAM, &address.subject()).await?;
        let own =
            queued.filter(|queued| queued.step_id == step.to_string() && queued.round == round);
        Ok(own.map(|queued| queued.sequence))
    }

    /// Whether a worker's result for a step of the task is queued. A result of another step says
    /// nothing about this one.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn has_queued_result(&self, task: TaskId, step: StepId) -> Result<bool, Error> {
        let (subject, step) = (subject::TaskResult::new(task).subject(), step.to_string());
        let Some(newest) = self.find_queued(Stream::Task, &subject).await? else {
            return Ok(false);
        };
        if newest.step_id == step {
            return Ok(true);
        }
        // The result of a title may have arrived after it.
        let stream =
            self.inner.jetstream.get_stream_no_info(Stream::Task.name()).await.map_err(rejected)?;
        let mut from = 1;
        while from < newest.sequence {
            match stream.get_first_raw_message_by_subject(&subject, from).await {
                Ok(message) => {
                    let queued = QueuedCommand::read(message.sequence, &message.headers);
                    if queued.step_id == step {
                        return Ok(true);
                    }
                    from = queued.sequence + 1;
                }
                Err(error) => match error.kind() {
                    RawMessageErrorKind::NoMessageFound => break,
                    RawMessageErrorKind::Other => return Err(Error::Timeout),
                    _ => return Err(rejected(error)),
                },
            }
        }
        Ok(false)
    }

    /// The last message on a command's subject.
    async fn find_queued(
        &self,
        stream: Stream,
        subject: &str,
    ) -> Result<Option<QueuedCommand>, Error> {
        let stream =
            self.inner.jetstream.get_stream_no_info(stream.name()).await.map_err(rejected)?;
        match stream.get_last_raw_message_by_subject(subject).await {
            Ok(message) => Ok(Some(QueuedCommand::read(message.sequence, &message.headers))),
            Err(error) => match error.kind() {
                LastRawMessageErrorKind::NoMessageFound => Ok(None),
                LastRawMessageErrorKind::Other => Err(Error::Timeout),
                _ => Err(rejected(error)),
            },
        }
    }

    async fn remove(&self, stream: Stream, sequence: u64) -> Result<(), Error> {
        let stream =
            self.inner.jetstream.get_stream_no_info(stream.name()).await.map_err(rejected)?;
        match stream.delete_message(sequence).await {
            // Whether it existed does not matter: the next attempt checks again.
            Ok(_) => Ok(()),
            Err(error) => {
                tracing::debug!(sequence, %error, "an earlier command could not be removed");
                Ok(())
            }
        }
    }
}

struct QueuedCommand {
    sequence: u64,
    step_id: String,
    number: u64,
    round: u32,
}

impl QueuedCommand {
    /// A command without these headers was published by hand and counts as the earliest.
    fn read(sequence: u64, headers: &HeaderMap) -> Self {
        let text = |name| headers.get(name).map(|value| value.as_str());
        Self {
            sequence,
            step_id: text(STEP).unwrap_or_default().to_owned(),
            number: text(STEP_NUMBER).and_then(|number| number.parse().ok()).unwrap_or(0),
            round: text(STEP_ROUND).and_then(|round| round.parse().ok()).unwrap_or(0),
        }
    }
}

fn rejected(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Rejected { retryable: true, source: error.into() }
}

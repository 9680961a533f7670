//! Messages that cannot be decoded or processed become dead letters with the reason, and are not
//! delivered any more. If such a message is a command, its task receives a failure first.

use std::{fmt::Write as _, time::Duration};

use async_nats::{
    HeaderMap, HeaderValue, Message,
    jetstream::{AckKind, stream::LastRawMessageErrorKind},
};
use construct_domain::{OrganizationId, StepId, TaskId};
use construct_proto::mesh::v1::{
    DeadLetter, Failure, FailureClass, StepRef, StepResult, step_result,
};
use jiff::Timestamp;

use super::{Acker, Handle, Inbound, Origin, Receipt};
use crate::{
    Bus, dead_letter,
    envelope::{ORGANIZATION, OpenError, STEP, STEP_NUMBER, STEP_ROUND, TYPE},
    metrics, subject,
    topology::Stream,
};

/// How often a message is redelivered when its payload could not be fetched, before it becomes a
/// dead letter.
const FETCH_ATTEMPTS: u32 = 4;

/// The delay between these deliveries.
const FETCH_RETRY_DELAY: Duration = Duration::from_millis(500);

/// Longest reason in a task's failure, in characters. The dead letter has the full reason.
const MAX_REASON_CHARS: usize = 500;

/// The delay before another attempt when the dead letter could not be published.
const PUBLISH_RETRY_DELAY: Duration = Duration::from_secs(5);

pub(super) async fn handle_unreadable<T: Inbound>(
    bus: Bus,
    stream: Stream,
    message: Message,
    deliveries: u32,
    handle: Handle,
    error: OpenError,
) {
    let subject = message.subject.as_str();
    if error.is_retryable() && deliveries < FETCH_ATTEMPTS {
        tracing::debug!(subject, deliveries, error = %chain(&error), "a message cannot be decoded yet");
        return handle.acker.send(AckKind::Nak(Some(FETCH_RETRY_DELAY))).await;
    }
    let headers = message.headers.as_ref();
    if let Some(task) = T::command_task(subject)
        && let Some(result) =
            headers.and_then(|headers| failed_result(task, headers, deliveries, &error))
        && let Err(error) = bus.publish(&subject::TaskResult::new(task), &result).await
        && error.is_retryable()
    {
        return retry_later(&handle.acker, &error).await;
    }
    let letter = letter(subject, headers, &message.payload);
    publish_letter(
        &bus,
        &handle.acker,
        stream,
        DeadLetter { deliveries, reason: chain(&error), ..letter },
    )
    .await;
}

/// The result of a command that cannot be decoded, made from its headers alone: the step fails at
/// once instead of at its deadline. `None` for a command without these headers, published by hand
/// or by an earlier version of the reconciler.
fn failed_result(
    task: TaskId,
    headers: &HeaderMap,
    deliveries: u32,
    error: &OpenError,
) -> Option<StepResult> {
    let text = |name| headers.get(name).map(HeaderValue::as_str);
    let organization: OrganizationId = text(ORGANIZATION)?.parse().ok()?;
    let step: StepId = text(STEP)?.parse().ok()?;
    let step = StepRef {
        organization_id: organization.to_string(),
        task_id: task.to_string(),
        step_id: step.to_string(),
        number: text(STEP_NUMBER)?.parse().ok()?,
        round: text(STEP_ROUND)?.parse().ok()?,
        deadline: None,
    };
    let reason: String = chain(error).chars().take(MAX_REASON_CHARS).collect();
    let message = format!(
        "a worker could not read the command, which is now a dead letter (`construct deadletter list`): {reason}"
    );
    // If only the payload could not be fetched, another command may succeed. It counts as a call,
    // so that the attempts end.
    let (class, attempts) = if error.is_retryable() {
        (FailureClass::Transient, 1)
    } else {
        (FailureClass::Internal, 0)
    };
    let failure = Failure { class: class.into(), message, attempts, ..Failure::default() };
    let outcome = Some(step_result::Outcome::Failed(failure));
    Some(StepResult { step: Some(step), delivery: deliveries, outcome, ..StepResult::default() })
}

impl Bus {
    /// Turns a decoded message that cannot be processed into a dead letter, which can be redriven
    /// ([`Bus::redrive`]). If that fails, the message is redelivered.
    pub async fn dead_letter(&self, receipt: Receipt, reason: &str) {
        let Origin { stream, sequence, deliveries } = receipt.origin;
        let found = match self.inner.jetstream.get_stream_no_info(stream.name()).await {
            Ok(server) => server.get_raw_message(sequence).await,
            Err(error) => return retry_later(&receipt.acker, &error).await,
        };
        match found {
            Ok(message) => {
                let letter = letter(&message.subject, Some(&message.headers), &message.payload);
                let letter = DeadLetter { deliveries, reason: reason.to_owned(), ..letter };
                publish_letter(self, &receipt.acker, stream, letter).await;
            }
            // It was settled meanwhile.
            Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => {
                receipt.acker.send(AckKind::Term).await;
            }
            Err(error) => retry_later(&receipt.acker, &error).await,
        }
    }
}

/// A dead letter for a message.
fn letter(subject: &str, headers: Option<&HeaderMap>, payload: &[u8]) -> DeadLetter {
    let message_type = headers.and_then(|headers| headers.get(TYPE));
    DeadLetter {
        subject: subject.to_owned(),
        message_type: message_type.map(|name| name.as_str().to_owned()).unwrap_or_default(),
        payload: payload.to_vec(),
        headers: headers.map(dead_letter::kept_headers).unwrap_or_default(),
        ..DeadLetter::default()
    }
}

/// Publishes a dead letter; then its message is not delivered any more.
async fn publish_letter(bus: &Bus, acker: &Acker, stream: Stream, letter: DeadLetter) {
    let time = Some(timestamp(Timestamp::now()));
    let letter = DeadLetter { stream: stream.name().to_owned(), time, ..letter };
    match bus.publish(&subject::DeadLetters { stream }, &letter).await {
        Ok(_) => {
            let DeadLetter { subject, deliveries, reason, .. } = letter;
            tracing::warn!(subject, deliveries, reason, "a message has become a dead letter");
            metrics::dead_letter(stream);
            acker.send(AckKind::Term).await;
        }
        Err(error) => retry_later(acker, &error).await,
    }
}

async fn retry_later(acker: &Acker, error: &(dyn std::error::Error + Send + Sync)) {
    tracing::warn!(error = chain(error), "a dead letter could not be published; retrying later");
    acker.send(AckKind::Nak(Some(PUBLISH_RETRY_DELAY))).await;
}

/// An error with all its causes, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Writing to a string cannot fail.
        let _ = write!(text, ": {error}");
        cause = error.source();
    }
    text
}

fn timestamp(time: Timestamp) -> prost_types::Timestamp {
    prost_types::Timestamp { seconds: time.as_second(), nanos: time.subsec_nanosecond() }
}

//! What becomes of a message that cannot be read: a letter that says why, and then no more deliveries.

use std::{fmt::Write as _, time::Duration};

use async_nats::{Message, jetstream::AckKind};
use construct_proto::mesh::v1::DeadLetter;
use jiff::Timestamp;

use super::Handle;
use crate::{
    Bus, dead,
    envelope::{OpenError, TYPE},
    metrics, subject,
    topology::Stream,
};

/// How often a message is delivered again when its payload could not be fetched, before it is given up.
const FETCH_ATTEMPTS: u32 = 4;

/// The pause between these.
const FETCH_PAUSE: Duration = Duration::from_millis(500);

/// The pause when not even the letter could be published.
const LETTER_PAUSE: Duration = Duration::from_secs(5);

pub(super) async fn give_up(
    bus: Bus,
    stream: Stream,
    message: Message,
    deliveries: u32,
    handle: Handle,
    error: OpenError,
) {
    let subject = message.subject.as_str();
    if error.is_retryable() && deliveries < FETCH_ATTEMPTS {
        tracing::debug!(subject, deliveries, error = %chain(&error), "a message cannot be read yet");
        return handle.acker.send(AckKind::Nak(Some(FETCH_PAUSE))).await;
    }
    let reason = chain(&error);
    let message_type = message.headers.as_ref().and_then(|headers| headers.get(TYPE));
    let letter = DeadLetter {
        stream: stream.name().to_owned(),
        subject: subject.to_owned(),
        message_type: message_type.map(|name| name.as_str().to_owned()).unwrap_or_default(),
        reason: reason.clone(),
        payload: message.payload.to_vec(),
        time: Some(timestamp(Timestamp::now())),
        deliveries,
        headers: message.headers.as_ref().map(dead::kept).unwrap_or_default(),
    };
    match bus.publish(&subject::Dead { stream }, &letter).await {
        Ok(_) => {
            tracing::warn!(subject, deliveries, reason, "a message cannot be read; it is a dead letter now");
            metrics::dead(stream);
            handle.acker.send(AckKind::Term).await;
        }
        Err(error) => {
            tracing::warn!(subject, error = %chain(&error), "a dead letter could not be published; trying again later");
            handle.acker.send(AckKind::Nak(Some(LETTER_PAUSE))).await;
        }
    }
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

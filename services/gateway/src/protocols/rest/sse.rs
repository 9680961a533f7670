//! Server-sent events, for browsers and for `curl`.
//!
//! Events have no SSE name, so that one handler receives all of them; the type is in the data. The
//! id is the subscription's cursor: a client that returns with it as `Last-Event-ID`, as browsers
//! do by themselves, misses nothing and gets nothing twice. `event: end` says that no event will
//! follow; `event: problem` says why the stream ends early.

use std::{borrow::Cow, time::Duration};

use bytes::Bytes;
use futures::stream;
use http_body::Frame;
use http_body_util::StreamBody;
use prost_reflect::{DynamicMessage, MessageDescriptor, Value};
use tonic::{
    Status,
    body::Body,
    codegen::http::{HeaderValue, Response, header},
};

use crate::{
    protocols::{call::Answers, errors},
    status,
};

/// The interval of heartbeats. They show the client and all intermediaries that the stream is
/// alive.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(15);
/// The first line of a stream: the client reconnects after so many milliseconds.
const RETRY_LINE: &str = "retry: 1000\n\n";
const HEARTBEAT_LINE: &str = ": alive\n\n";

/// Whether a stream of this type is a stream of events, which can be resumed by cursor.
pub(super) fn is_for(kind: &MessageDescriptor) -> bool {
    kind.get_field_by_name("cursor").is_some()
}

/// A stream of events. It asks for the next event when the client has taken the previous one, so a
/// slow client delays only its own subscription.
pub(super) fn response(mut answers: Answers, kind: MessageDescriptor) -> Response<Body> {
    let metadata = std::mem::take(&mut answers.metadata);
    let events = Events { answers, kind, has_begun: false };
    let body = StreamBody::new(stream::unfold(Some(events), async |events| {
        let mut events = events?;
        let (text, last) = events.next().await;
        Some((
            Ok::<_, Status>(Frame::data(Bytes::from(text.into_owned()))),
            (!last).then_some(events),
        ))
    }));
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    errors::append(headers, metadata);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // nginx would buffer events until it has a page of them.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct Events {
    answers: Answers,
    kind: MessageDescriptor,
    has_begun: bool,
}

impl Events {
    /// The next text to send, and whether it is the last.
    async fn next(&mut self) -> (Cow<'static, str>, bool) {
        if !std::mem::replace(&mut self.has_begun, true) {
            return (RETRY_LINE.into(), false);
        }
        let next = match tokio::time::timeout(HEARTBEAT_INTERVAL, self.answers.next()).await {
            Err(_) => return (HEARTBEAT_LINE.into(), false),
            Ok(next) => next,
        };
        match next.and_then(|message| message.map(|message| self.event(message)).transpose()) {
            Ok(Some(event)) => (event.into(), false),
            Ok(None) => ("event: end\ndata: {}\n\n".into(), true),
            Err(status) => {
                let problem = errors::problem_json(errors::http_status(status.code()), &status);
                (format!("event: problem\ndata: {problem}\n\n").into(), true)
            }
        }
    }

    fn event(&self, message: Bytes) -> Result<String, Status> {
        let message = DynamicMessage::decode(self.kind.clone(), message)
            .map_err(|error| status::internal("an event cannot be read", &error))?;
        let json = serde_json::to_string(&message)
            .map_err(|error| status::internal("an event cannot be written as JSON", &error))?;
        // Only a stream of events has a cursor; another stream couldn't be resumed.
        let id = match message.get_field_by_name("cursor").as_deref() {
            Some(Value::String(cursor)) => format!("id: {cursor}\n"),
            _ => String::new(),
        };
        Ok(format!("{id}data: {json}\n\n"))
    }
}

#[cfg(test)]
mod tests {
    use construct_proto::{DESCRIPTORS, v1};
    use prost::Message as _;

    use super::*;
    use crate::protocols::envelope::Envelope;

    #[tokio::test(start_paused = true)]
    async fn quiet_stream_has_a_heartbeat() {
        let event = v1::Event { cursor: "7.1.0".into(), ..v1::Event::default() }.encode_to_vec();
        let (sender, receiver) = tokio::sync::mpsc::channel::<Bytes>(1);
        let body = StreamBody::new(stream::unfold(receiver, async |mut receiver| {
            let bytes = receiver.recv().await?;
            Some((Ok::<_, Status>(Frame::data(bytes)), receiver))
        }));
        let kind =
            DESCRIPTORS.get_message_by_name("construct.v1.Event").expect("it is in the contract");
        let mut events = Events { answers: Answers::new(Body::new(body)), kind, has_begun: false };
        assert_eq!(events.next().await, (RETRY_LINE.into(), false));
        let start = tokio::time::Instant::now();
        assert_eq!(events.next().await, (HEARTBEAT_LINE.into(), false));
        assert_eq!(events.next().await, (HEARTBEAT_LINE.into(), false));
        assert_eq!(start.elapsed(), 2 * HEARTBEAT_INTERVAL);
        // Half an event is not lost at a heartbeat.
        let bytes = Envelope::encode(0, &event);
        sender.send(bytes.slice(..7)).await.expect("it is read");
        assert_eq!(events.next().await, (HEARTBEAT_LINE.into(), false));
        sender.send(bytes.slice(7..)).await.expect("it is read");
        let (text, last) = events.next().await;
        assert_eq!((&*text, last), ("id: 7.1.0\ndata: {\"cursor\":\"7.1.0\"}\n\n", false));
        drop(sender);
        let (text, last) = events.next().await;
        assert!(text.starts_with("event: problem\ndata: {") && last, "{text}");
    }
}

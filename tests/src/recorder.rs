//! Records everything that a subscriber of a task receives, in the background, across lost
//! connections.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use construct_proto::v1::{
    Event, MessageDelta, SubscribeRequest, event::Payload,
    event_service_client::EventServiceClient, message_delta,
};
use tokio::task::AbortHandle;
use tonic::{Code, Status, transport::Channel};

use crate::{
    client::TURN_TIMEOUT,
    wait::{self, until},
};

/// A recording that continues until it is dropped.
pub struct Recorder {
    shared: Arc<Mutex<Recording>>,
    abort: AbortHandle,
}

#[derive(Default)]
struct Recording {
    events: Vec<Event>,
    connections: usize,
    /// How the stream ended for good, if it did.
    end: Option<Result<(), Status>>,
    last_error: Option<Status>,
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder")
            .field("events", &self.lock().events.len())
            .finish_non_exhaustive()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.abort.abort();
    }
}

impl Recorder {
    /// Records the subscription of `request`. With `every`, the stream is dropped after so many
    /// events and resumed with the last cursor.
    pub fn start(
        client: EventServiceClient<Channel>,
        request: SubscribeRequest,
        every: Option<usize>,
    ) -> Self {
        let shared = Arc::new(Mutex::new(Recording::default()));
        let abort =
            tokio::spawn(record(client, request, every, Arc::clone(&shared))).abort_handle();
        Self { shared, abort }
    }

    fn lock(&self) -> MutexGuard<'_, Recording> {
        lock(&self.shared)
    }

    /// The events so far, in order.
    pub fn events(&self) -> Vec<Event> {
        self.lock().events.clone()
    }

    /// Reads the events so far without a copy.
    pub fn with_events<T>(&self, read: impl FnOnce(&[Event]) -> T) -> T {
        read(&self.lock().events)
    }

    /// The number of connections so far.
    pub fn connections(&self) -> usize {
        self.lock().connections
    }

    /// Waits until the first connection.
    pub async fn wait_until_connected(&self) {
        until("a connection", TURN_TIMEOUT, async || match self.connections() {
            0 => Err(self.lock().last_error.clone()),
            connections => Ok(connections),
        })
        .await;
    }

    /// Waits until `predicate` accepts the events so far.
    pub async fn wait_until(&self, what: &str, predicate: impl Fn(&[Event]) -> bool) -> Vec<Event> {
        until(what, TURN_TIMEOUT, async || {
            let events = self.events();
            if predicate(&events) {
                return Ok(events);
            }
            let seen = events.iter().map(describe).collect::<Vec<_>>();
            Err(format!("{seen:?}; last error: {:?}", self.lock().last_error))
        })
        .await
    }

    /// Waits for the `count`-th event of this type.
    pub async fn wait_for_count(&self, kind: &str, count: usize) -> Vec<Event> {
        let what = format!("{count} events of the type {kind}");
        self.wait_until(&what, |events| {
            events.iter().filter(|event| event.r#type == kind).count() >= count
        })
        .await
    }

    /// Waits for the record with this sequence, and returns everything up to it.
    pub async fn wait_for_sequence(&self, sequence: u64) -> Vec<Event> {
        let what = format!("the record {sequence}");
        let mut events = self
            .wait_until(&what, |events| events.iter().any(|event| event.sequence >= sequence))
            .await;
        let end = events
            .iter()
            .position(|event| event.sequence >= sequence)
            .map_or(events.len(), |last| last + 1);
        events.truncate(end);
        events
    }

    /// Waits until the server ends the stream.
    pub async fn wait_for_end(&self) -> Result<(), Status> {
        until("the end of the stream", TURN_TIMEOUT, async || {
            let end = self.lock().end.clone();
            end.ok_or_else(|| self.events().iter().map(describe).collect::<Vec<_>>())
        })
        .await
    }
}

fn lock(shared: &Mutex<Recording>) -> MutexGuard<'_, Recording> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn record(
    mut client: EventServiceClient<Channel>,
    mut request: SubscribeRequest,
    every: Option<usize>,
    shared: Arc<Mutex<Recording>>,
) {
    loop {
        let end = async {
            let mut stream = client.subscribe(request.clone()).await?.into_inner();
            lock(&shared).connections += 1;
            let mut left = every.unwrap_or(usize::MAX);
            while left > 0 {
                let Some(event) = stream.message().await? else { return Ok(true) };
                request.cursor.clone_from(&event.cursor);
                lock(&shared).events.push(event);
                left -= 1;
            }
            Ok(false)
        };
        match end.await {
            Ok(true) => {
                lock(&shared).end = Some(Ok(()));
                return;
            }
            Ok(false) => {}
            Err(status) => {
                let status: Status = status;
                let refused = matches!(
                    status.code(),
                    Code::InvalidArgument | Code::NotFound | Code::Internal
                ) && !crate::client::is_unavailable(&status);
                lock(&shared).last_error = Some(status.clone());
                if refused {
                    lock(&shared).end = Some(Err(status));
                    return;
                }
                tokio::time::sleep(wait::POLL_INTERVAL).await;
            }
        }
    }
}

/// A short description of an event, for failure messages.
pub fn describe(event: &Event) -> String {
    match event.sequence {
        0 => format!("{}@{}/{:x}", event.r#type, event.step, event.index),
        sequence => format!("{}#{sequence}", event.r#type),
    }
}

/// The types in order.
pub fn types(events: &[Event]) -> Vec<&str> {
    events.iter().map(|event| event.r#type.as_str()).collect()
}

/// The records only.
pub fn records(events: &[Event]) -> Vec<&Event> {
    events.iter().filter(|event| event.sequence > 0).collect()
}

/// Panics unless the records are numbered 1, 2, 3, …, and the progress of each step is increasing
/// and ends before the record that ends the step.
pub fn check_order(events: &[Event]) {
    let seen = || events.iter().map(describe).collect::<Vec<_>>();
    let numbers: Vec<u64> = records(events).iter().map(|event| event.sequence).collect();
    let expected: Vec<u64> = (1..=numbers.len() as u64).collect();
    assert_eq!(numbers, expected, "the records have a gap or a duplicate: {:?}", seen());
    let (mut step, mut index, mut over) = (0, None, 0);
    for event in events {
        if event.sequence > 0 {
            over = over.max(event.step);
            continue;
        }
        assert!(
            event.step > over,
            "{} comes after the record that ends its step: {:?}",
            describe(event),
            seen()
        );
        if event.step != step {
            assert!(
                event.step > step,
                "{} belongs to an earlier step: {:?}",
                describe(event),
                seen()
            );
            (step, index) = (event.step, None);
        }
        assert!(
            index.is_none_or(|index| event.index > index),
            "{} does not rise: {:?}",
            describe(event),
            seen()
        );
        index = Some(event.index);
    }
    let mut cursors: Vec<&str> = events.iter().map(|event| event.cursor.as_str()).collect();
    cursors.sort_unstable();
    cursors.dedup();
    assert_eq!(cursors.len(), events.len(), "two events have the same cursor");
    let mut ids: Vec<&str> = events.iter().map(|event| event.id.as_str()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), events.len(), "two events have the same id: {:?}", seen());
}

/// The streamed text of `step`. A restart discards the text before it.
pub fn streamed_text(events: &[Event], step: u64) -> String {
    let mut text = String::new();
    let mut next = 0;
    for event in events.iter().filter(|event| event.step == step) {
        match &event.payload {
            Some(Payload::MessageRestarted(_)) => {
                text.clear();
                next = 0;
            }
            Some(Payload::MessageDelta(MessageDelta { index, delta, .. })) => {
                assert_eq!(*index, next, "deltas are counted without a gap");
                next += 1;
                if let Some(message_delta::Delta::Text(piece)) = delta {
                    text.push_str(piece);
                }
            }
            _ => {}
        }
    }
    text
}

//! Publishing a worker's progress: many small events, pipelined, never worth stopping the work for.
//!
//! Events are never sent twice, so acknowledgements only serve to notice that NATS accepts nothing
//! any more, and to count losses. One for every few events suffices. The events of a short step
//! need none: the step's result follows them over the same connection and is acknowledged.

use std::{collections::VecDeque, fmt, mem, time::Duration};

use async_nats::jetstream::{context::PublishError, message::PublishMessage, publish::PublishAck};
use construct_proto::v1::Event;
use futures::{
    FutureExt as _,
    future::{BoxFuture, join_all},
};
use tokio::time::{Instant, timeout, timeout_at};

use crate::{
    Bus,
    envelope::SealedMessage,
    publish::Error,
    subject::{Address as _, EventAddress},
};

/// One acknowledgement is requested for this many events. It covers those before it as well: a
/// server processes a connection's messages in order.
const EVENTS_PER_ACK: u64 = 16;

/// How many acknowledgements may be pending: those of 64 events. The next event then waits for the
/// oldest one, until that times out.
const MAX_PENDING_ACKS: usize = 4;

/// Timeout of an acknowledgement; its events then count as lost. For the same time, further events
/// are dropped, so that a NATS that hangs delays the work now and then and not with every event.
const ACK_TIMEOUT: Duration = Duration::from_secs(2);

/// Publishes the progress of one step. Events of one publisher arrive in order.
pub struct Progress {
    bus: Bus,
    /// In the order of the requests.
    waiting: VecDeque<PendingAck>,
    /// Events sent since the last requested acknowledgement, and the connection used.
    unacknowledged: u64,
    generation: u64,
    dropping_until: Option<Instant>,
    totals: ProgressCount,
}

/// A requested acknowledgement.
struct PendingAck {
    requested_at: Instant,
    /// How many events it covers.
    events: u64,
    acknowledgement: BoxFuture<'static, Result<PublishAck, PublishError>>,
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress")
            .field("waiting", &self.waiting.len())
            .field("totals", &self.totals)
            .finish()
    }
}

/// What became of the events of one publisher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProgressCount {
    /// Events that the stream has, as far as is known.
    pub sent: u64,
    /// Events that were dropped because NATS was away or too slow, and events with an unknown
    /// outcome because their connection broke. Subscribers may miss them; the step's result
    /// contains everything.
    pub lost: u64,
}

impl Bus {
    /// Starts publishing the progress of a step.
    pub fn progress(&self) -> Progress {
        Progress {
            bus: self.clone(),
            waiting: VecDeque::new(),
            unacknowledged: 0,
            generation: self.generation(),
            dropping_until: None,
            totals: ProgressCount::default(),
        }
    }
}

impl Progress {
    /// Publishes an event without waiting for an acknowledgement. While NATS is away, the event is
    /// dropped and counted.
    ///
    /// # Errors
    /// Only when the event itself is invalid: too large, or without an organization or a task.
    pub async fn send(&mut self, event: &Event) -> Result<(), Error> {
        let (subject, sealed) = match EventAddress::from_event(event).map_err(Error::Invalid)? {
            EventAddress::Task(address) => {
                (address.subject(), self.bus.seal_for(&address, event).await?)
            }
            EventAddress::Entity(address) => {
                (address.subject(), self.bus.seal_for(&address, event).await?)
            }
            EventAddress::Delta(address) => {
                (address.subject(), self.bus.seal_for(&address, event).await?)
            }
        };
        let dropping = self.dropping_until.is_some_and(|until| Instant::now() < until);
        if dropping || !self.bus.is_connected() {
            self.totals.lost += 1;
            return Ok(());
        }
        self.note_connection();
        self.collect_ready();
        if self.waiting.len() >= MAX_PENDING_ACKS {
            self.collect_oldest().await;
        }
        // No retry, hence no `Nats-Msg-Id`: an event is sent once or lost.
        if self.unacknowledged + 1 < EVENTS_PER_ACK {
            self.publish_unacknowledged(subject, sealed).await
        } else {
            self.publish_acknowledged(subject, sealed).await
        }
        Ok(())
    }

    /// Publishes without an acknowledgement.
    async fn publish_unacknowledged(
        &mut self,
        subject: String,
        SealedMessage { headers, payload }: SealedMessage,
    ) {
        // This waits only when the connection accepts nothing any more.
        let sent = timeout(
            ACK_TIMEOUT,
            self.bus.inner.client.publish_with_headers(subject, headers, payload),
        );
        match sent.await {
            Ok(Ok(())) => self.unacknowledged += 1,
            Ok(Err(error)) => self.lose(1, &error),
            Err(_elapsed) => self.pause(1),
        }
    }

    /// Publishes and requests an acknowledgement, also for the events before it.
    async fn publish_acknowledged(
        &mut self,
        subject: String,
        SealedMessage { headers, payload }: SealedMessage,
    ) {
        let events = mem::take(&mut self.unacknowledged) + 1;
        let message = PublishMessage::build().payload(payload).headers(headers);
        match self.bus.inner.jetstream.send_publish(subject, message).await {
            Ok(acknowledgement) => {
                let acknowledgement = acknowledgement.into_future().boxed();
                self.waiting.push_back(PendingAck {
                    requested_at: Instant::now(),
                    events,
                    acknowledgement,
                });
            }
            Err(error) => self.lose(events, &error),
        }
    }

    /// Waits for pending acknowledgements, at most two seconds. Events without an acknowledgement
    /// by then count as lost. Does not wait until the stream has the events after the last request.
    pub async fn finish(mut self) -> ProgressCount {
        self.note_connection();
        let all = self.waiting.drain(..).map(
            |PendingAck { requested_at, events, acknowledgement }| async move {
                (events, timeout_at(requested_at + ACK_TIMEOUT, acknowledgement).await)
            },
        );
        for (events, outcome) in join_all(all).await {
            match outcome {
                Ok(outcome) => self.record_ack(events, outcome),
                Err(_elapsed) => self.totals.lost += events,
            }
        }
        self.totals.sent += self.unacknowledged;
        self.totals
    }

    /// Events without a requested acknowledgement have an unknown outcome when their connection
    /// breaks.
    fn note_connection(&mut self) {
        let generation = self.bus.generation();
        if generation != self.generation {
            self.generation = generation;
            self.totals.lost += mem::take(&mut self.unacknowledged);
        }
    }

    /// Counts acknowledged and lost events. Acknowledgements of a broken connection never arrive.
    fn collect_ready(&mut self) {
        while let Some(oldest) = self.waiting.front_mut() {
            let events = oldest.events;
            match (&mut oldest.acknowledgement).now_or_never() {
                Some(outcome) => self.record_ack(events, outcome),
                None if oldest.requested_at.elapsed() >= ACK_TIMEOUT => self.totals.lost += events,
                None => return,
            }
            self.waiting.pop_front();
        }
    }

    async fn collect_oldest(&mut self) {
        let Some(PendingAck { requested_at, events, acknowledgement }) = self.waiting.pop_front()
        else {
            return;
        };
        match timeout_at(requested_at + ACK_TIMEOUT, acknowledgement).await {
            Ok(outcome) => self.record_ack(events, outcome),
            Err(_elapsed) => self.pause(events),
        }
    }

    fn record_ack(&mut self, events: u64, outcome: Result<PublishAck, PublishError>) {
        match outcome {
            Ok(_) => self.totals.sent += events,
            Err(error) => self.lose(events, &error),
        }
    }

    fn lose(&mut self, events: u64, error: &dyn std::error::Error) {
        tracing::debug!(events, %error, "events of a step's progress were lost");
        self.totals.lost += events;
    }

    /// Drops events for a while.
    fn pause(&mut self, lost: u64) {
        tracing::debug!(
            "NATS does not acknowledge; events of this step's progress are dropped for a while"
        );
        self.dropping_until = Some(Instant::now() + ACK_TIMEOUT);
        self.totals.lost += lost;
    }
}

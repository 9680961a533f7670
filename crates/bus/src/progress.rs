//! Publishing what a worker says while it works: many small events, pipelined, never worth stopping
//! the work for.
//!
//! No event is sent twice, so acknowledgements serve two ends only: to notice that NATS takes
//! nothing any more, and to count what was lost. One for every few events does, and the events of a
//! short step need none: what follows them over the same connection, the step's result, is
//! acknowledged.

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
    envelope::Sealed,
    publish::Error,
    subject::{Address as _, EventAddress},
};

/// For every so many events an acknowledgement is asked for. It speaks for those before it as well:
/// a server takes what comes over one connection in its order.
const ASKED: u64 = 16;

/// How many acknowledgements may be out: those of 64 events. The next one then waits for the
/// oldest, until that is lost.
const WINDOW: usize = 4;

/// How long after it was asked for an acknowledgement that has not come is lost, with the events it
/// speaks for; and for how long events are dropped after that was waited for, so that a NATS that
/// hangs slows the work now and then and not with every event.
const PATIENCE: Duration = Duration::from_secs(2);

/// Writes the progress of one step. Events of one writer arrive in order.
pub struct Progress {
    bus: Bus,
    /// In the order in which they were asked for.
    waiting: VecDeque<Waiting>,
    /// Events that were sent since one was asked for, and the connection they went over.
    unasked: u64,
    generation: u64,
    paused_until: Option<Instant>,
    written: Written,
}

/// An acknowledgement that was asked for.
struct Waiting {
    asked: Instant,
    /// How many events it speaks for.
    events: u64,
    acknowledgement: BoxFuture<'static, Result<PublishAck, PublishError>>,
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress")
            .field("waiting", &self.waiting.len())
            .field("written", &self.written)
            .finish()
    }
}

/// What became of the events of one writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Written {
    /// Events that the stream has, as far as is known: nothing was heard of their loss.
    pub sent: u64,
    /// Events that were dropped, because NATS was away or too slow, and those of which nobody
    /// knows, because the connection broke that they went over. Whoever watches may miss them; the
    /// step's result holds everything.
    pub lost: u64,
}

impl Bus {
    /// Begins to write the progress of a step.
    pub fn progress(&self) -> Progress {
        Progress {
            bus: self.clone(),
            waiting: VecDeque::new(),
            unasked: 0,
            generation: self.generation(),
            paused_until: None,
            written: Written::default(),
        }
    }
}

impl Progress {
    /// Publishes an event without waiting for an acknowledgement. While NATS is away the event is
    /// dropped and counted.
    ///
    /// # Errors
    /// Only when the event itself is wrong: too large, or naming no organization or task.
    pub async fn send(&mut self, event: &Event) -> Result<(), Error> {
        let (subject, sealed) = match EventAddress::of(event).map_err(Error::Invalid)? {
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
        let paused = self.paused_until.is_some_and(|until| Instant::now() < until);
        if paused || !self.bus.is_connected() {
            self.written.lost += 1;
            return Ok(());
        }
        self.note_connection();
        self.collect_ready();
        if self.waiting.len() >= WINDOW {
            self.collect_oldest().await;
        }
        // No retry, hence no `Nats-Msg-Id`: an event is sent once or lost.
        if self.unasked + 1 < ASKED {
            self.say(subject, sealed).await
        } else {
            self.ask(subject, sealed).await
        }
        Ok(())
    }

    /// Publishes without asking for an acknowledgement.
    async fn say(&mut self, subject: String, Sealed { headers, payload }: Sealed) {
        // It has to wait only where the connection takes nothing any more.
        let said = timeout(
            PATIENCE,
            self.bus.inner.client.publish_with_headers(subject, headers, payload),
        );
        match said.await {
            Ok(Ok(())) => self.unasked += 1,
            Ok(Err(error)) => self.lose(1, &error),
            Err(_elapsed) => self.pause(1),
        }
    }

    /// Publishes and asks for an acknowledgement, also for those before it.
    async fn ask(&mut self, subject: String, Sealed { headers, payload }: Sealed) {
        let events = mem::take(&mut self.unasked) + 1;
        let message = PublishMessage::build().payload(payload).headers(headers);
        match self.bus.inner.jetstream.send_publish(subject, message).await {
            Ok(acknowledgement) => {
                let acknowledgement = acknowledgement.into_future().boxed();
                self.waiting.push_back(Waiting { asked: Instant::now(), events, acknowledgement });
            }
            Err(error) => self.lose(events, &error),
        }
    }

    /// Waits for the acknowledgements that are still out, at most two seconds; what is not
    /// acknowledged by then counts as lost. It is not waited until the stream has the events for
    /// which none was asked.
    pub async fn finish(mut self) -> Written {
        self.note_connection();
        let all =
            self.waiting.drain(..).map(|Waiting { asked, events, acknowledgement }| async move {
                (events, timeout_at(asked + PATIENCE, acknowledgement).await)
            });
        for (events, outcome) in join_all(all).await {
            match outcome {
                Ok(outcome) => self.count(events, outcome),
                Err(_elapsed) => self.written.lost += events,
            }
        }
        self.written.sent += self.unasked;
        self.written
    }

    /// Of what went over a connection that broke, and was not asked about, nobody knows.
    fn note_connection(&mut self) {
        let generation = self.bus.generation();
        if generation != self.generation {
            self.generation = generation;
            self.written.lost += mem::take(&mut self.unasked);
        }
    }

    /// Counts what is acknowledged, and what is lost: the acknowledgements of a connection that
    /// broke never come.
    fn collect_ready(&mut self) {
        while let Some(oldest) = self.waiting.front_mut() {
            let events = oldest.events;
            match (&mut oldest.acknowledgement).now_or_never() {
                Some(outcome) => self.count(events, outcome),
                None if oldest.asked.elapsed() >= PATIENCE => self.written.lost += events,
                None => return,
            }
            self.waiting.pop_front();
        }
    }

    async fn collect_oldest(&mut self) {
        let Some(Waiting { asked, events, acknowledgement }) = self.waiting.pop_front() else {
            return;
        };
        match timeout_at(asked + PATIENCE, acknowledgement).await {
            Ok(outcome) => self.count(events, outcome),
            Err(_elapsed) => self.pause(events),
        }
    }

    fn count(&mut self, events: u64, outcome: Result<PublishAck, PublishError>) {
        match outcome {
            Ok(_) => self.written.sent += events,
            Err(error) => self.lose(events, &error),
        }
    }

    fn lose(&mut self, events: u64, error: &dyn std::error::Error) {
        tracing::debug!(events, %error, "events of a step's progress were lost");
        self.written.lost += events;
    }

    /// Drops what comes for a while.
    fn pause(&mut self, lost: u64) {
        tracing::debug!(
            "NATS does not acknowledge; events of this step's progress are dropped for a while"
        );
        self.paused_until = Some(Instant::now() + PATIENCE);
        self.written.lost += lost;
    }
}

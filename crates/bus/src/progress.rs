//! Publishing what a worker says while it works: many small events, pipelined, never worth stopping the work for.

use std::{collections::VecDeque, fmt, time::Duration};

use async_nats::jetstream::{context::PublishError, message::PublishMessage, publish::PublishAck};
use construct_proto::v1::Event;
use futures::{
    FutureExt as _,
    future::{BoxFuture, join_all},
};
use tokio::time::{Instant, timeout_at};

use crate::{
    Bus,
    publish::Error,
    subject::{Address as _, EventAddress},
};

/// How many events may wait for their acknowledgement. The next one then waits for the oldest, until that is lost.
const WINDOW: usize = 64;

/// How long after it was sent an event without acknowledgement is lost; and for how long events are dropped after that was waited for, so
/// that a NATS that hangs slows the work now and then and not with every event.
const PATIENCE: Duration = Duration::from_secs(2);

/// Writes the progress of one step. Events of one writer arrive in order.
pub struct Progress {
    bus: Bus,
    /// In the order in which they were sent.
    waiting: VecDeque<Waiting>,
    paused_until: Option<Instant>,
    written: Written,
}

/// An event that was sent.
struct Waiting {
    sent: Instant,
    acknowledgement: BoxFuture<'static, Result<PublishAck, PublishError>>,
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress").field("waiting", &self.waiting.len()).field("written", &self.written).finish()
    }
}

/// What became of the events of one writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Written {
    /// Events that the stream has.
    pub sent: u64,
    /// Events that were dropped, because NATS was away or too slow. Whoever watches misses them; the step's result
    /// holds everything.
    pub lost: u64,
}

impl Bus {
    /// Begins to write the progress of a step.
    pub fn progress(&self) -> Progress {
        Progress {
            bus: self.clone(),
            waiting: VecDeque::with_capacity(WINDOW),
            paused_until: None,
            written: Written::default(),
        }
    }
}

impl Progress {
    /// Publishes an event without waiting for its acknowledgement. While NATS is away the event is dropped and counted.
    ///
    /// # Errors
    /// Only when the event itself is wrong: too large, or naming no organisation or task.
    pub async fn send(&mut self, event: &Event) -> Result<(), Error> {
        let (subject, sealed) = match EventAddress::of(event).map_err(Error::Invalid)? {
            EventAddress::Task(address) => (address.subject(), self.bus.seal_for(&address, event).await?),
            EventAddress::Entity(address) => (address.subject(), self.bus.seal_for(&address, event).await?),
            EventAddress::Delta(address) => (address.subject(), self.bus.seal_for(&address, event).await?),
        };
        let paused = self.paused_until.is_some_and(|until| Instant::now() < until);
        if paused || !self.bus.is_connected() {
            self.written.lost += 1;
            return Ok(());
        }
        self.collect_ready();
        if self.waiting.len() >= WINDOW {
            self.collect_oldest().await;
        }
        // No retry, hence no `Nats-Msg-Id`: an event is sent once or lost.
        let message = PublishMessage::build().payload(sealed.payload).headers(sealed.headers);
        match self.bus.inner.jetstream.send_publish(subject, message).await {
            Ok(acknowledgement) => {
                let acknowledgement = acknowledgement.into_future().boxed();
                self.waiting.push_back(Waiting { sent: Instant::now(), acknowledgement });
            }
            Err(error) => self.count(Err(error)),
        }
        Ok(())
    }

    /// Waits for the acknowledgements that are still out, at most two seconds; what is not acknowledged by then counts
    /// as lost.
    pub async fn finish(mut self) -> Written {
        let all = self.waiting.drain(..).map(|waiting| timeout_at(waiting.sent + PATIENCE, waiting.acknowledgement));
        for outcome in join_all(all).await {
            match outcome {
                Ok(outcome) => self.count(outcome),
                Err(_elapsed) => self.written.lost += 1,
            }
        }
        self.written
    }

    /// Counts what is acknowledged, and what is lost: the acknowledgements of a connection that broke never come.
    fn collect_ready(&mut self) {
        while let Some(oldest) = self.waiting.front_mut() {
            match (&mut oldest.acknowledgement).now_or_never() {
                Some(outcome) => self.count(outcome),
                None if oldest.sent.elapsed() >= PATIENCE => self.written.lost += 1,
                None => return,
            }
            self.waiting.pop_front();
        }
    }

    async fn collect_oldest(&mut self) {
        let Some(oldest) = self.waiting.pop_front() else { return };
        match timeout_at(oldest.sent + PATIENCE, oldest.acknowledgement).await {
            Ok(outcome) => self.count(outcome),
            Err(_elapsed) => {
                tracing::debug!("NATS does not acknowledge; events of this step's progress are dropped for a while");
                self.paused_until = Some(Instant::now() + PATIENCE);
                self.written.lost += 1;
            }
        }
    }

    fn count(&mut self, outcome: Result<PublishAck, PublishError>) {
        match outcome {
            Ok(_) => self.written.sent += 1,
            Err(error) => {
                tracing::debug!(%error, "an event of a step's progress was lost");
                self.written.lost += 1;
            }
        }
    }
}

//! A stream of events that survives lost connections: it reconnects and continues after the last
//! event.

use std::time::{Duration, Instant};

use construct_proto::v1::{Event, SubscribeRequest};
use tonic::{Status, Streaming};

use crate::{
    failure::{Exit, Failure, is_retryable},
    gateway::Gateway,
};

/// The delay before the first and the longest delay before a later reconnect.
const RECONNECT_DELAYS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// A connection that lasted this long counts as stable, even without events.
const STABLE_CONNECTION: Duration = Duration::from_secs(5);

/// An event, or a change of the connection.
#[derive(Debug)]
pub(crate) enum StreamUpdate {
    Event(Box<Event>),
    /// The connection broke, with the reason. Reported once until it is back.
    Disconnected(String),
    /// The connection is back.
    Reconnected,
}

/// Whether the event is the last one of its task: the task was deleted.
pub(crate) fn is_last(event: &Event) -> bool {
    event.r#type == "task.deleted"
}

/// Follows the events of a task, or of the organization.
#[derive(Debug)]
pub(crate) struct EventFollower {
    gateway: Gateway,
    request: SubscribeRequest,
    retry_timeout: Duration,
    stream: Option<Streaming<Event>>,
    connected_at: Instant,
    /// Set while no event arrives.
    outage: Option<Outage>,
}

#[derive(Debug)]
struct Outage {
    since: Instant,
    /// Whether the caller was told.
    reported: bool,
    delay: Duration,
    cause: Failure,
}

impl EventFollower {
    /// Subscribes. After this returns, no event is missed. Retries for at most `connect_timeout` at
    /// first, and for at most `retry_timeout` whenever the connection breaks later.
    ///
    /// # Errors
    /// When the gateway stays away, or refuses.
    pub(crate) async fn open(
        gateway: Gateway,
        request: SubscribeRequest,
        connect_timeout: Duration,
        retry_timeout: Duration,
    ) -> Result<Self, Failure> {
        let mut follower = Self {
            gateway,
            request,
            retry_timeout: connect_timeout,
            stream: None,
            connected_at: Instant::now(),
            outage: None,
        };
        while follower.stream.is_none() {
            follower.connect().await?;
        }
        follower.outage = None;
        follower.retry_timeout = retry_timeout;
        Ok(follower)
    }

    /// After a connection that broke before the first event, continues from the beginning instead
    /// of the moment of the reconnect.
    pub(crate) fn rewind_if_lost(&mut self) {
        if self.request.cursor.is_empty() {
            "0".clone_into(&mut self.request.cursor);
        }
    }

    /// The cursor of the last event.
    pub(crate) fn cursor(&self) -> &str {
        &self.request.cursor
    }

    /// The next update. Cancel-safe.
    ///
    /// # Errors
    /// When the gateway stays away, or refuses.
    pub(crate) async fn next(&mut self) -> Result<StreamUpdate, Failure> {
        loop {
            let Some(stream) = &mut self.stream else {
                if let Some(outage) = self.outage.as_mut().filter(|outage| !outage.reported) {
                    outage.reported = true;
                    return Ok(StreamUpdate::Disconnected(outage.cause.message().to_owned()));
                }
                self.connect().await?;
                continue;
            };
            if self.outage.as_ref().is_some_and(|outage| outage.reported) {
                // The next break is reported again. The outage lasts until an event arrives or the
                // connection is stable.
                let outage = self.outage.take();
                self.outage = outage.map(|outage| Outage { reported: false, ..outage });
                return Ok(StreamUpdate::Reconnected);
            }
            match stream.message().await {
                Ok(Some(event)) => {
                    self.outage = None;
                    if !event.cursor.is_empty() {
                        self.request.cursor.clone_from(&event.cursor);
                    }
                    return Ok(StreamUpdate::Event(Box::new(event)));
                }
                Ok(None) => self.disconnected(Failure::new(
                    Exit::Unreachable,
                    "the gateway ended the stream",
                ))?,
                Err(status) => self.disconnected(retryable(status)?)?,
            }
        }
    }

    fn disconnected(&mut self, cause: Failure) -> Result<(), Failure> {
        self.stream = None;
        if self.connected_at.elapsed() >= STABLE_CONNECTION {
            self.outage = None;
        }
        self.record_outage(cause)
    }

    async fn connect(&mut self) -> Result<(), Failure> {
        if let Some(outage) = &self.outage {
            tokio::time::sleep(outage.delay).await;
        }
        match self.gateway.events().subscribe(self.request.clone()).await {
            Ok(stream) => {
                self.stream = Some(stream.into_inner());
                self.connected_at = Instant::now();
                Ok(())
            }
            Err(status) => self.record_outage(retryable(status)?),
        }
    }

    /// # Errors
    /// When the outage exceeds the retry timeout.
    fn record_outage(&mut self, cause: Failure) -> Result<(), Failure> {
        let outage = self.outage.get_or_insert_with(|| Outage {
            since: Instant::now(),
            reported: false,
            delay: RECONNECT_DELAYS.0,
            cause: cause.clone(),
        });
        outage.delay = (outage.delay * 2).min(RECONNECT_DELAYS.1);
        if outage.since.elapsed() < self.retry_timeout {
            return Ok(());
        }
        // Whatever the cause, the gateway is unreachable.
        Err(if cause.exit() == Exit::Unreachable {
            cause
        } else {
            Failure::new(Exit::Unreachable, cause.message())
        })
    }
}

/// The status as a failure to retry after.
///
/// # Errors
/// The failure, when a retry does not help.
fn retryable(status: Status) -> Result<Failure, Failure> {
    if is_retryable(&status) { Ok(status.into()) } else { Err(status.into()) }
}

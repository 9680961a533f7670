//! A stream of events that outlives its connections: when the gateway goes away, it goes on behind
//! the last event.

use std::time::{Duration, Instant};

use construct_proto::v1::{Event, SubscribeRequest};
use tonic::{Status, Streaming};

use crate::{
    failure::{Exit, Failure, may_pass},
    gateway::Gateway,
};

/// The pause before another try, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// A connection that held this long was a good one, even when nothing came.
const GOOD: Duration = Duration::from_secs(5);

/// What there is to know.
#[derive(Debug)]
pub(crate) enum News {
    Event(Box<Event>),
    /// The connection broke, and why; said once until it is back.
    Lost(String),
    /// It is there again.
    Back,
}

/// Whether nothing comes after this event of a task: the task is gone.
pub(crate) fn is_last(event: &Event) -> bool {
    event.r#type == "task.deleted"
}

/// Follows a task's events, or the organization's.
#[derive(Debug)]
pub(crate) struct Follow {
    gateway: Gateway,
    request: SubscribeRequest,
    patience: Duration,
    stream: Option<Streaming<Event>>,
    opened: Instant,
    /// Since when nothing has come.
    away: Option<Away>,
}

#[derive(Debug)]
struct Away {
    since: Instant,
    said: bool,
    pause: Duration,
    why: Failure,
}

impl Follow {
    /// Subscribes: when this returns, nothing that happens from then on is missed. Without an
    /// answer it is tried again for at most `first`, and later, whenever the connection breaks, for
    /// at most `patience`.
    ///
    /// # Errors
    /// When the gateway stays away, or refuses.
    pub(crate) async fn open(
        gateway: Gateway,
        request: SubscribeRequest,
        first: Duration,
        patience: Duration,
    ) -> Result<Self, Failure> {
        let mut follow = Self {
            gateway,
            request,
            patience: first,
            stream: None,
            opened: Instant::now(),
            away: None,
        };
        while follow.stream.is_none() {
            follow.connect().await?;
        }
        follow.away = None;
        follow.patience = patience;
        Ok(follow)
    }

    /// When the connection breaks before anything has come, goes on from the beginning and not from
    /// the moment of the next connection.
    pub(crate) fn rewind_if_lost(&mut self) {
        if self.request.cursor.is_empty() {
            "0".clone_into(&mut self.request.cursor);
        }
    }

    /// Where the stream stands.
    pub(crate) fn cursor(&self) -> &str {
        &self.request.cursor
    }

    /// The next news. Nothing is lost when the future is dropped.
    ///
    /// # Errors
    /// When the gateway stays away, or refuses.
    pub(crate) async fn next(&mut self) -> Result<News, Failure> {
        loop {
            let Some(stream) = &mut self.stream else {
                if let Some(away) = self.away.as_mut().filter(|away| !away.said) {
                    away.said = true;
                    return Ok(News::Lost(away.why.message().to_owned()));
                }
                self.connect().await?;
                continue;
            };
            if self.away.as_ref().is_some_and(|away| away.said) {
                // The next break is news again, but it only ends the wait for a good connection.
                let away = self.away.take();
                self.away = away.map(|away| Away { said: false, ..away });
                return Ok(News::Back);
            }
            match stream.message().await {
                Ok(Some(event)) => {
                    self.away = None;
                    if !event.cursor.is_empty() {
                        self.request.cursor.clone_from(&event.cursor);
                    }
                    return Ok(News::Event(Box::new(event)));
                }
                Ok(None) => {
                    self.lost(Failure::new(Exit::Unreachable, "the gateway ended the stream"))?
                }
                Err(status) => self.lost(passing(status)?)?,
            }
        }
    }

    fn lost(&mut self, why: Failure) -> Result<(), Failure> {
        self.stream = None;
        if self.opened.elapsed() >= GOOD {
            self.away = None;
        }
        self.note_away(why)
    }

    async fn connect(&mut self) -> Result<(), Failure> {
        if let Some(away) = &self.away {
            tokio::time::sleep(away.pause).await;
        }
        match self.gateway.events().subscribe(self.request.clone()).await {
            Ok(stream) => {
                self.stream = Some(stream.into_inner());
                self.opened = Instant::now();
                Ok(())
            }
            Err(status) => self.note_away(passing(status)?),
        }
    }

    /// # Errors
    /// When tries were made for too long.
    fn note_away(&mut self, why: Failure) -> Result<(), Failure> {
        let away = self.away.get_or_insert_with(|| Away {
            since: Instant::now(),
            said: false,
            pause: PAUSES.0,
            why: why.clone(),
        });
        away.pause = (away.pause * 2).min(PAUSES.1);
        if away.since.elapsed() < self.patience {
            return Ok(());
        }
        // Whatever went wrong on the way, what it means is that the gateway is away.
        Err(if why.exit() == Exit::Unreachable {
            why
        } else {
            Failure::new(Exit::Unreachable, why.message())
        })
    }
}

/// What went wrong, when another try may help.
///
/// # Errors
/// What went wrong, when it is of no use.
fn passing(status: Status) -> Result<Failure, Failure> {
    if may_pass(&status) { Ok(status.into()) } else { Err(status.into()) }
}

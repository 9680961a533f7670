//! What time it is in the mesh.
//!
//! What one process writes down and another compares (when a task is to be looked at, when a step
//! ends, until when a lease holds) has to come from one clock, and that is PostgreSQL's ([ADR
//! 40](../../../docs/adr/0040-one-clock.md)). A process that reads the database takes the time from
//! there now and then ([`follow`]), and counts on by the machine's monotonic clock, which nobody
//! sets. A worker hears it from those ([`listen`]). Until one of the two has happened it is the
//! machine's own clock that counts.

use std::{
    sync::{PoisonError, RwLock},
    time::{Duration, Instant},
};

use futures::{Stream, StreamExt as _};
use jiff::{SignedDuration, Timestamp};
use tokio_util::sync::CancellationToken;

/// How often PostgreSQL is asked. A machine that slept finds its monotonic clock behind for so long
/// at most.
const SYNC_INTERVAL: Duration = Duration::from_secs(5);
/// How often while it does not say.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// An answer that took longer says too little.
const MAX_ROUND_TRIP: Duration = Duration::from_secs(1);
/// What was heard before this does not count against what is heard now: PostgreSQL's own clock may
/// have been set back meanwhile.
const ANCHOR_TTL: Duration = Duration::from_secs(600);
/// How long a worker waits at its start until somebody says what time it is: it is said every half
/// second, unless nobody is there.
const FIRST_TIME_TIMEOUT: Duration = Duration::from_millis(700);
/// How far the machine's clock may be away before that is said.
const MAX_SKEW: SignedDuration = SignedDuration::from_secs(10);

static CLOCK: Clock = Clock::new();

/// The time.
pub fn now() -> Timestamp {
    CLOCK.now(Instant::now())
}

/// Takes the time from who knows it.
///
/// # Errors
/// Those of `query`.
pub async fn sync_once<E, Query: Future<Output = Result<Timestamp, E>>>(
    query: impl FnOnce() -> Query,
) -> Result<(), E> {
    let began = Instant::now();
    let time = query().await?;
    let took = began.elapsed();
    if took <= MAX_ROUND_TRIP || !CLOCK.is_set() {
        CLOCK.set(time + took / 2, Instant::now());
    }
    Ok(())
}

/// Hears the time from who knows it, for as long as it is said. Gives back what goes on with it,
/// after the first word or when that takes long.
pub async fn sync_from_stream<S: Stream<Item = Timestamp> + Unpin>(
    mut times: S,
    stop: CancellationToken,
) -> impl Future<Output = ()> {
    if let Ok(Some(time)) = tokio::time::timeout(FIRST_TIME_TIMEOUT, times.next()).await {
        CLOCK.observe(time, Instant::now());
    }
    async move {
        while let Some(Some(time)) = stop.run_until_cancelled(times.next()).await {
            CLOCK.observe(time, Instant::now());
        }
    }
}

/// Takes it again and again, and says when the machine's own clock is wrong, and no longer.
pub async fn keep_synced<E, Query: Future<Output = Result<Timestamp, E>>>(
    query: impl Fn() -> Query,
    stop: CancellationToken,
) {
    let mut wrong = false;
    let mut delay = SYNC_INTERVAL;
    while stop.run_until_cancelled(tokio::time::sleep(delay)).await.is_some() {
        // Why PostgreSQL does not answer is said by who wants something of it.
        delay = if sync_once(&query).await.is_ok() { SYNC_INTERVAL } else { RETRY_INTERVAL };
        let off = Timestamp::now().duration_since(now());
        let is_wrong = off.abs() > MAX_SKEW;
        if is_wrong && !wrong {
            tracing::warn!(
                seconds = off.as_secs(),
                "this machine's clock is away from PostgreSQL's, which is what counts"
            );
        } else if wrong && !is_wrong {
            tracing::info!("this machine's clock agrees with PostgreSQL's again");
        }
        wrong = is_wrong;
    }
}

struct Clock(RwLock<Option<Anchor>>);

/// What time it was at a moment of the monotonic clock.
#[derive(Debug, Clone, Copy)]
struct Anchor {
    time: Timestamp,
    at: Instant,
}

impl Anchor {
    fn now(self, at: Instant) -> Timestamp {
        self.time.checked_add(at.saturating_duration_since(self.at)).unwrap_or(Timestamp::MAX)
    }
}

impl Clock {
    const fn new() -> Self {
        Self(RwLock::new(None))
    }

    fn anchor(&self) -> Option<Anchor> {
        *self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_set(&self) -> bool {
        self.anchor().is_some()
    }

    fn now(&self, at: Instant) -> Timestamp {
        self.anchor().map_or_else(Timestamp::now, |anchor| anchor.now(at))
    }

    fn set(&self, time: Timestamp, at: Instant) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(Anchor { time, at });
    }

    /// It was this time when it was said, and is later now.
    fn observe(&self, time: Timestamp, at: Instant) {
        let known =
            self.anchor().filter(|anchor| at.saturating_duration_since(anchor.at) < ANCHOR_TTL);
        if known.is_none_or(|anchor| anchor.now(at) < time) {
            self.set(time, at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn counts_on_from_what_was_said_whatever_the_machine_says() {
        let (clock, began) = (Clock::new(), Instant::now());
        assert!(
            Timestamp::now().duration_since(clock.now(began)).abs() < SignedDuration::from_mins(1),
            "its own at first"
        );
        clock.set(seconds(1_000), began);
        assert_eq!(clock.now(began + Duration::from_secs(7)), seconds(1_007));
        clock.set(seconds(500), began + Duration::from_secs(10));
        assert_eq!(
            clock.now(began + Duration::from_secs(11)),
            seconds(501),
            "PostgreSQL's clock was set back"
        );
    }

    #[test]
    fn words_that_were_held_up_do_not_set_it_back() {
        let (clock, began) = (Clock::new(), Instant::now());
        let later = |seconds| began + Duration::from_secs(seconds);
        clock.observe(seconds(1_000), began);
        clock.observe(seconds(990), later(5));
        assert_eq!(clock.now(later(5)), seconds(1_005));
        clock.observe(seconds(1_020), later(10));
        assert_eq!(clock.now(later(10)), seconds(1_020), "it was behind");
        clock.observe(seconds(400), later(10 + 599));
        assert_eq!(clock.now(later(609)), seconds(1_619));
        clock.observe(seconds(400), later(610));
        assert_eq!(clock.now(later(610)), seconds(400), "for long nothing later was heard");
    }

    #[tokio::test]
    async fn who_does_not_answer_changes_nothing() {
        assert_eq!(sync_once(async || Err::<Timestamp, _>("away")).await, Err("away"));
    }
}

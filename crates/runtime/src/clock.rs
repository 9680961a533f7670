//! The time of the mesh.
//!
//! Times that one process writes and another compares (when a task is due, when a step ends, until
//! when a lease is valid) must come from one clock, which is PostgreSQL's ([ADR
//! 40](../../../docs/adr/0040-one-clock.md)). A process that uses the database reads the time from
//! it periodically ([`keep_synced`]), and advances it by the machine's monotonic clock, which is
//! never set. A worker receives the time from those processes ([`sync_from_stream`]). Before the
//! first of either, the machine's own clock counts.

use std::{
    sync::{PoisonError, RwLock},
    time::{Duration, Instant},
};

use futures::{Stream, StreamExt as _};
use jiff::{SignedDuration, Timestamp};
use tokio_util::sync::CancellationToken;

/// The interval of reading PostgreSQL's clock. After a machine slept, its monotonic clock is behind
/// for at most this long.
const SYNC_INTERVAL: Duration = Duration::from_secs(5);
/// The interval while that fails.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// A slower answer is too imprecise.
const MAX_ROUND_TRIP: Duration = Duration::from_secs(1);
/// A time received longer ago than this does not take precedence over an earlier one received now:
/// PostgreSQL's own clock may have been set back meanwhile.
const ANCHOR_TTL: Duration = Duration::from_secs(600);
/// How long a starting worker waits for the first time. Reconcilers publish it every half second.
const FIRST_TIME_TIMEOUT: Duration = Duration::from_millis(700);
/// The difference to the machine's clock that is logged.
const MAX_SKEW: SignedDuration = SignedDuration::from_secs(10);

static CLOCK: Clock = Clock::new();

/// The current time.
pub fn now() -> Timestamp {
    CLOCK.now(Instant::now())
}

/// Reads the time once with `query`.
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

/// Receives the time from a stream. Returns a future that continues to receive it, after the first
/// time or a timeout.
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

/// Reads the time periodically, and logs when the machine's own clock becomes wrong or right again.
pub async fn keep_synced<E, Query: Future<Output = Result<Timestamp, E>>>(
    query: impl Fn() -> Query,
    stop: CancellationToken,
) {
    let mut wrong = false;
    let mut delay = SYNC_INTERVAL;
    while stop.run_until_cancelled(tokio::time::sleep(delay)).await.is_some() {
        // Users of PostgreSQL report why it does not answer.
        delay = if sync_once(&query).await.is_ok() { SYNC_INTERVAL } else { RETRY_INTERVAL };
        let off = Timestamp::now().duration_since(now());
        let is_wrong = off.abs() > MAX_SKEW;
        if is_wrong && !wrong {
            tracing::warn!(
                seconds = off.as_secs(),
                "this machine's clock differs from PostgreSQL's, which counts"
            );
        } else if wrong && !is_wrong {
            tracing::info!("this machine's clock agrees with PostgreSQL's again");
        }
        wrong = is_wrong;
    }
}

struct Clock(RwLock<Option<Anchor>>);

/// The time at a moment of the monotonic clock.
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

    /// The time when it was published; it is later now.
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
    fn set_time_advances_monotonically() {
        let (clock, began) = (Clock::new(), Instant::now());
        assert!(
            Timestamp::now().duration_since(clock.now(began)).abs() < SignedDuration::from_mins(1),
            "its own clock at first"
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
    fn delayed_times_do_not_set_the_clock_back() {
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
        assert_eq!(clock.now(later(610)), seconds(400), "no later time was received for long");
    }

    #[tokio::test]
    async fn failed_query_leaves_the_clock_unchanged() {
        assert_eq!(sync_once(async || Err::<Timestamp, _>("away")).await, Err("away"));
    }
}

//! A token bucket: as many requests as in a minute may come at once, and from then on as many as
//! fit into the time that passes.
//!
//! Kept is only one moment: until when the requests that were let in would take, each its part of a
//! minute, if they came one after the other. A bucket whose moment is past is as good as a new one,
//! so that it can be forgotten.

use std::time::Duration;

use tokio::time::Instant;

/// What a limit is about.
pub(super) const WINDOW: Duration = Duration::from_secs(60);

/// What was let in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bucket {
    paid_until: Instant,
}

/// How a bucket stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Level {
    /// Requests that would be let in at once.
    pub(super) remaining: u32,
    /// How long until it is full again.
    pub(super) full_in: Duration,
}

impl Bucket {
    pub(super) const fn new(now: Instant) -> Self {
        Self { paid_until: now }
    }

    /// Whether it is as good as a new one.
    pub(super) fn is_full(&self, now: Instant) -> bool {
        self.paid_until <= now
    }

    /// How long the next request would have to wait; none: it need not.
    pub(super) fn wait(&self, limit: u32, now: Instant) -> Option<Duration> {
        let Some(part) = part(limit) else { return Some(WINDOW) };
        let wait = (self.debt(now) + part).saturating_sub(WINDOW);
        (!wait.is_zero()).then_some(wait)
    }

    /// Lets a request in.
    pub(super) fn take(&mut self, limit: u32, now: Instant) {
        self.paid_until = self.paid_until.max(now) + part(limit).unwrap_or_default();
    }

    pub(super) fn level(&self, limit: u32, now: Instant) -> Level {
        let debt = self.debt(now);
        let left = WINDOW.saturating_sub(debt).as_nanos();
        let remaining = part(limit).map_or(0, |part| left / part.as_nanos());
        Level { remaining: u32::try_from(remaining).unwrap_or(u32::MAX).min(limit), full_in: debt }
    }

    fn debt(&self, now: Instant) -> Duration {
        self.paid_until.saturating_duration_since(now)
    }
}

/// The part of a minute that one request takes. None: none ever fits.
fn part(limit: u32) -> Option<Duration> {
    (limit > 0).then(|| WINDOW / limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn pass(time: Duration) {
        tokio::time::advance(time).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_minutes_worth_comes_at_once_and_then_what_fits_into_the_time() {
        let mut bucket = Bucket::new(Instant::now());
        for left in (0..60).rev() {
            assert_eq!(bucket.wait(60, Instant::now()), None);
            bucket.take(60, Instant::now());
            assert_eq!(bucket.level(60, Instant::now()).remaining, left);
        }
        assert_eq!(bucket.wait(60, Instant::now()), Some(Duration::from_secs(1)));
        pass(Duration::from_millis(400)).await;
        assert_eq!(bucket.wait(60, Instant::now()), Some(Duration::from_millis(600)));
        pass(Duration::from_millis(600)).await;
        assert_eq!(bucket.wait(60, Instant::now()), None);
        bucket.take(60, Instant::now());
        assert_eq!(bucket.wait(60, Instant::now()), Some(Duration::from_secs(1)));
        assert_eq!(bucket.level(60, Instant::now()), Level { remaining: 0, full_in: WINDOW });
        pass(WINDOW).await;
        assert!(bucket.is_full(Instant::now()));
        assert_eq!(bucket.level(60, Instant::now()).remaining, 60);
    }

    #[tokio::test(start_paused = true)]
    async fn over_an_hour_no_more_come_through_than_the_rate_and_one_minutes_worth() {
        let (mut bucket, mut admitted) = (Bucket::new(Instant::now()), 0);
        // Somebody who asks 100 times a second.
        for _ in 0..360_000 {
            if bucket.wait(600, Instant::now()).is_none() {
                bucket.take(600, Instant::now());
                admitted += 1;
            }
            pass(Duration::from_millis(10)).await;
        }
        assert!((36_000..=36_601).contains(&admitted), "{admitted}");
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_nothing_and_a_limit_that_changes_holds_at_once() {
        let mut bucket = Bucket::new(Instant::now());
        assert_eq!(bucket.wait(0, Instant::now()), Some(WINDOW));
        assert_eq!(bucket.level(0, Instant::now()).remaining, 0);
        for _ in 0..10 {
            bucket.take(10, Instant::now());
        }
        assert!(bucket.wait(10, Instant::now()).is_some());
        // The next one takes less of a minute, and waits only for that.
        assert_eq!(bucket.wait(60_000, Instant::now()), Some(Duration::from_millis(1)));
        pass(Duration::from_millis(1)).await;
        assert_eq!(bucket.wait(60_000, Instant::now()), None);
    }
}

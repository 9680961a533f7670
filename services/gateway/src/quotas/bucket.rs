//! A token bucket: a burst may use a whole minute of the rate, and then requests are admitted at
//! the rate.
//!
//! The only state is one time: when the admitted requests would end, if each took its part of a
//! minute, one after the other. A bucket whose time has passed equals a new one, and can be
//! dropped.

use std::time::Duration;

use tokio::time::Instant;

/// The period of a limit.
pub(super) const WINDOW: Duration = Duration::from_secs(60);

/// The admitted requests.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bucket {
    paid_until: Instant,
}

/// The fill level of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Level {
    /// Requests that would be admitted now.
    pub(super) remaining: u32,
    /// Time until it is full.
    pub(super) full_in: Duration,
}

impl Bucket {
    pub(super) const fn new(now: Instant) -> Self {
        Self { paid_until: now }
    }

    /// Whether it equals a new one.
    pub(super) fn is_full(&self, now: Instant) -> bool {
        self.paid_until <= now
    }

    /// How long the next request would have to wait; `None`: it is admitted now.
    pub(super) fn wait(&self, limit: u32, now: Instant) -> Option<Duration> {
        let Some(interval) = request_interval(limit) else { return Some(WINDOW) };
        let wait = (self.debt(now) + interval).saturating_sub(WINDOW);
        (!wait.is_zero()).then_some(wait)
    }

    /// Admits a request.
    pub(super) fn take(&mut self, limit: u32, now: Instant) {
        self.paid_until = self.paid_until.max(now) + request_interval(limit).unwrap_or_default();
    }

    pub(super) fn level(&self, limit: u32, now: Instant) -> Level {
        let debt = self.debt(now);
        let left = WINDOW.saturating_sub(debt).as_nanos();
        let remaining = request_interval(limit).map_or(0, |interval| left / interval.as_nanos());
        Level { remaining: u32::try_from(remaining).unwrap_or(u32::MAX).min(limit), full_in: debt }
    }

    fn debt(&self, now: Instant) -> Duration {
        self.paid_until.saturating_duration_since(now)
    }
}

/// The part of a minute that one request takes. `None`: no request is admitted.
fn request_interval(limit: u32) -> Option<Duration> {
    (limit > 0).then(|| WINDOW / limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn pass(time: Duration) {
        tokio::time::advance(time).await;
    }

    #[tokio::test(start_paused = true)]
    async fn burst_of_a_minute_then_steady_rate() {
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
    async fn hour_admits_the_rate_plus_one_burst() {
        let (mut bucket, mut admitted) = (Bucket::new(Instant::now()), 0);
        // A client that sends 100 requests a second.
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
    async fn zero_admits_nothing_and_changed_limit_applies_at_once() {
        let mut bucket = Bucket::new(Instant::now());
        assert_eq!(bucket.wait(0, Instant::now()), Some(WINDOW));
        assert_eq!(bucket.level(0, Instant::now()).remaining, 0);
        for _ in 0..10 {
            bucket.take(10, Instant::now());
        }
        assert!(bucket.wait(10, Instant::now()).is_some());
        // With the higher limit a request takes less time, and waits only for that.
        assert_eq!(bucket.wait(60_000, Instant::now()), Some(Duration::from_millis(1)));
        pass(Duration::from_millis(1)).await;
        assert_eq!(bucket.wait(60_000, Instant::now()), None);
    }
}

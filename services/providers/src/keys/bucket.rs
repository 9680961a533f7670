//! A token bucket that may go into debt: the real usage of a call is known only afterwards.

use std::time::Duration;

use tokio::time::Instant;

const MINUTE: Duration = Duration::from_secs(60);

/// Refills evenly within a minute.
#[derive(Debug, Clone)]
pub(super) struct Bucket {
    per_minute: f64,
    level: f64,
    at: Instant,
}

impl Bucket {
    /// Creates a full bucket; none without a limit.
    pub(super) fn new(per_minute: i64, now: Instant) -> Option<Self> {
        let per_minute = to_f64(per_minute);
        (per_minute > 0.0).then_some(Self { per_minute, level: per_minute, at: now })
    }

    /// Changes the limit. Used capacity stays used.
    pub(super) fn set_limit(&mut self, per_minute: i64, now: Instant) {
        self.fill(now);
        let per_minute = to_f64(per_minute);
        self.level += per_minute - self.per_minute;
        self.per_minute = per_minute;
    }

    /// How long until `wanted` can be taken. More than the capacity can be taken from a full
    /// bucket.
    pub(super) fn wait(&mut self, wanted: i64, now: Instant) -> Duration {
        self.fill(now);
        let missing = to_f64(wanted).min(self.per_minute) - self.level;
        // Less than a nanosecond's worth is rounding.
        if missing <= 1e-6 { Duration::ZERO } else { MINUTE.mul_f64(missing / self.per_minute) }
    }

    /// Takes, into debt if need be; a negative amount is given back.
    pub(super) fn take(&mut self, wanted: i64, now: Instant) {
        self.fill(now);
        self.level = (self.level - to_f64(wanted)).min(self.per_minute);
    }

    fn fill(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.at);
        self.level = (self.level + self.per_minute * since.as_secs_f64() / MINUTE.as_secs_f64())
            .min(self.per_minute);
        self.at = now;
    }
}

/// Exact for every limit of a vendor.
fn to_f64(value: i64) -> f64 {
    const EXACT: i64 = 1 << 52;
    let value = value.clamp(-EXACT, EXACT);
    // Both halves are exact.
    let (high, low) = (value >> 32, value & 0xffff_ffff);
    f64::from(i32::try_from(high).unwrap_or(i32::MAX)) * 4_294_967_296.0
        + f64::from(u32::try_from(low).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_starts_full_and_refills_evenly() {
        let now = Instant::now();
        let mut bucket = Bucket::new(60, now).expect("there is a limit");
        bucket.take(60, now);
        assert_eq!(bucket.wait(1, now), Duration::from_secs(1));
        assert_eq!(bucket.wait(30, now + Duration::from_secs(10)), Duration::from_secs(20));
        assert_eq!(bucket.wait(60, now + Duration::from_secs(3_600)), Duration::ZERO);
        assert!(Bucket::new(0, now).is_none());
    }

    #[test]
    fn wrong_estimate_is_corrected_afterwards() {
        let now = Instant::now();
        let mut bucket = Bucket::new(600, now).expect("there is a limit");
        bucket.take(500, now);
        bucket.take(-400, now);
        assert_eq!(bucket.wait(500, now), Duration::ZERO);
        bucket.take(1_100, now);
        assert_eq!(bucket.wait(0, now), Duration::from_secs(60), "a debt is waited for");
        assert_eq!(
            bucket.wait(5_000, now),
            Duration::from_secs(120),
            "more than there can ever be waits for a full one"
        );
    }

    #[test]
    fn integer_amounts_convert_exactly() {
        for value in [
            0,
            1,
            -1,
            400,
            -400,
            1_000_000_000,
            i64::from(u32::MAX) + 7,
            -(i64::from(u32::MAX) + 7),
        ] {
            assert_eq!(format!("{}", to_f64(value)), value.to_string());
        }
    }
}

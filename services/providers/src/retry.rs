//! When a failed attempt is retried within the same call.
//!
//! Calls are counted over all targets, all commands for one answer and all their deliveries. The
//! command says how many are left, and a failure says how many were made. So these retries, the
//! reconciler's and JetStream's never multiply (D8 in ARCHITECTURE.md). A call that a circuit
//! breaker rejects was not made and does not count. What a lost delivery did is unknown; it counts
//! as one call.

use std::time::Duration;

use jiff::Timestamp;

use crate::failure::Failure;

/// How many attempts, and with which delays.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    /// Attempts at one target within a command, the first included.
    pub(crate) attempts: u32,
    /// Upper bound of the first delay; doubles with each attempt.
    pub(crate) initial_delay: Duration,
    /// Upper bound of every delay that the vendor did not ask for.
    pub(crate) max_delay: Duration,
}

impl Policy {
    /// The same policy with at most this many attempts; 0 means no further limit.
    pub(crate) fn limited_to(self, attempts: u32) -> Self {
        if attempts == 0 { self } else { Self { attempts: self.attempts.min(attempts), ..self } }
    }

    /// The longest delay within a call, if the vendor asks for it. For longer ones the reconciler
    /// waits, which occupies no worker.
    pub(crate) fn max_requested_delay(&self) -> Duration {
        self.max_delay.saturating_mul(2)
    }

    /// The delay before the next attempt; none when the failure is final.
    ///
    /// `jitter` is from 0 to 1 and scales the upper half of the delay (equal jitter). Calls that
    /// failed together don't retry together, and none retries at once against a failing vendor.
    /// `left` is the time until the deadline: a delay that leaves no time for an answer is not
    /// worth waiting, and the failure says when to retry.
    pub(crate) fn delay(
        &self,
        failed: u32,
        failure: &Failure,
        left: Duration,
        now: Timestamp,
        jitter: f64,
    ) -> Option<Duration> {
        if failed >= self.attempts || !failure.is_retryable() {
            return None;
        }
        let doubled = self
            .initial_delay
            .saturating_mul(2_u32.saturating_pow(failed.saturating_sub(1).min(16)));
        let delay = doubled.min(self.max_delay).mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0);
        let asked = failure.requested_delay(now).unwrap_or_default();
        if asked > self.max_requested_delay() {
            return None;
        }
        let delay = delay.max(asked);
        (delay < left).then_some(delay)
    }
}

#[cfg(test)]
mod tests {
    use construct_proto::mesh::v1::FailureClass;

    use super::*;

    const POLICY: Policy = Policy {
        attempts: 3,
        initial_delay: Duration::from_secs(1),
        max_delay: Duration::from_secs(10),
    };
    const HOUR: Duration = Duration::from_secs(3600);

    fn now() -> Timestamp {
        Timestamp::UNIX_EPOCH
    }

    #[test]
    fn retry_delays_double_and_third_failure_is_final() {
        let failure = Failure::transient("x");
        let pauses: Vec<_> =
            (1..=3).map(|failed| POLICY.delay(failed, &failure, HOUR, now(), 1.0)).collect();
        assert_eq!(pauses, [Some(Duration::from_secs(1)), Some(Duration::from_secs(2)), None]);
        let least = |failed| POLICY.delay(failed, &failure, HOUR, now(), 0.0);
        assert_eq!(
            [least(1), least(2)],
            [Some(Duration::from_millis(500)), Some(Duration::from_secs(1))]
        );
        let patient = Policy { attempts: 99, ..POLICY };
        assert_eq!(patient.delay(50, &failure, HOUR, now(), 1.0), Some(Duration::from_secs(10)));
    }

    #[test]
    fn command_can_only_lower_the_number_of_attempts() {
        assert_eq!([0, 1, 3, 9].map(|attempts| POLICY.limited_to(attempts).attempts), [3, 1, 3, 3]);
    }

    #[test]
    fn only_transient_failures_are_retried() {
        for class in [
            FailureClass::Authentication,
            FailureClass::InvalidRequest,
            FailureClass::ContextTooLong,
            FailureClass::ContentRefused,
            FailureClass::Configuration,
            FailureClass::Internal,
            FailureClass::DeadlineExceeded,
        ] {
            assert_eq!(
                POLICY.delay(1, &Failure::new(class, "x"), HOUR, now(), 1.0),
                None,
                "{class:?}"
            );
        }
        for class in [FailureClass::Transient, FailureClass::RateLimited, FailureClass::Overloaded]
        {
            assert!(
                POLICY.delay(1, &Failure::new(class, "x"), HOUR, now(), 1.0).is_some(),
                "{class:?}"
            );
        }
    }

    #[test]
    fn vendor_delay_is_honored_within_the_limit() {
        let asks = |seconds| {
            let at = now().checked_add(Duration::from_secs(seconds)).expect("a time");
            Failure::new(FailureClass::RateLimited, "x").with_retry_at(Some(at))
        };
        assert_eq!(POLICY.delay(1, &asks(7), HOUR, now(), 0.5), Some(Duration::from_secs(7)));
        assert_eq!(POLICY.delay(1, &asks(7), Duration::from_secs(5), now(), 0.5), None);
        assert_eq!(POLICY.delay(1, &asks(600), HOUR, now(), 0.5), None);
    }
}

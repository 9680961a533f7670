//! The delay before a step is retried.

use std::time::Duration;

/// Maximum number of vendor calls for one answer, the first included. Providers retry within a
/// command, and the reconciler with another command (D8 in ARCHITECTURE.md); both count.
pub const MAX_ATTEMPTS: u32 = 5;

const INITIAL_DELAY: Duration = Duration::from_secs(1);
const MAX_DELAY: Duration = Duration::from_secs(10);

/// The delay after `failed` attempts in a row (at least one is assumed): 1 s, doubling to 10 s. The
/// upper half is scaled by `jitter` (0 to 1), so that tasks that failed together do not retry
/// together.
pub fn delay(failed: u32, jitter: f64) -> Duration {
    let full = INITIAL_DELAY
        .saturating_mul(2_u32.saturating_pow(failed.saturating_sub(1).min(8)))
        .min(MAX_DELAY);
    full.mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_from_one_to_ten_seconds() {
        let full: Vec<u64> = (1..=6).map(|attempt| delay(attempt, 1.0).as_secs()).collect();
        assert_eq!(full, [1, 2, 4, 8, 10, 10]);
        assert_eq!(delay(1, 0.0), Duration::from_millis(500));
    }
}

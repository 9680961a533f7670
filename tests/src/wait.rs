//! Waiting for a condition, never for time to pass: a wait that fails says what it saw last.

use std::{fmt::Debug, time::Duration};

/// How often a condition is looked at.
pub const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Looks again and again until `check` gives `Ok`; panics with its last `Err` when that takes longer
/// than `timeout`.
pub async fn until<T, E: Debug>(
    what: &str,
    timeout: Duration,
    mut check: impl AsyncFnMut() -> Result<T, E>,
) -> T {
    let deadline = tokio::time::Instant::now() + timeout;
    loop {
        match check().await {
            Ok(value) => return value,
            Err(last) if tokio::time::Instant::now() >= deadline => {
                panic!("waited {timeout:?} for {what}; last: {last:?}")
            }
            Err(_) => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
}

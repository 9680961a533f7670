//! Waits for conditions, never for time to pass. A failed wait reports the last state it saw.

use std::{fmt::Debug, time::Duration};

/// The time between two checks of a condition.
pub const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Calls `check` until it returns `Ok`. Panics with the last `Err` after `timeout`.
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

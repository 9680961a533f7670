//! Waiting for a condition, never for time to pass: a wait that fails says what it saw last.

use std::{fmt::Debug, time::Duration};

/// How often a condition is looked at.
pub const INTERVAL: Duration = Duration::from_millis(20);

/// Looks again and again until `look` gives `Ok`; panics with its last `Err` when that takes longer
/// than `patience`.
pub async fn until<T, E: Debug>(
    what: &str,
    patience: Duration,
    mut look: impl AsyncFnMut() -> Result<T, E>,
) -> T {
    let deadline = tokio::time::Instant::now() + patience;
    loop {
        match look().await {
            Ok(value) => return value,
            Err(last) if tokio::time::Instant::now() >= deadline => {
                panic!("waited {patience:?} for {what}; last: {last:?}")
            }
            Err(_) => tokio::time::sleep(INTERVAL).await,
        }
    }
}

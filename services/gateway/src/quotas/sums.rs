//! Sums of what was used, made when somebody asks for them. Each reads as much of the ledger as
//! there is of the time that is asked for, so that many at once would take the database from those
//! who work with it.
//!
//! What is counted: statements that run at the same time in this gateway, whoever has asked. Who
//! finds no place waits a moment for one; who waits in vain is refused, and told to come back.
//! Counting for what is to be allowed is no such statement: it is done once in two seconds for each
//! organization, however many ask.

use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tonic::Status;

use crate::status;

/// Statements at the same time.
const AT_ONCE: usize = 4;
/// How long a place is waited for.
const PATIENCE: Duration = Duration::from_secs(2);

/// The places.
#[derive(Debug)]
pub(crate) struct Sums {
    places: Semaphore,
}

impl Default for Sums {
    fn default() -> Self {
        Self { places: Semaphore::new(AT_ONCE) }
    }
}

impl Sums {
    /// A place, held as long as the statement runs.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub(crate) async fn place(&self) -> Result<SemaphorePermit<'_>, Status> {
        match tokio::time::timeout(PATIENCE, self.places.acquire()).await {
            Ok(Ok(place)) => Ok(place),
            // It is never closed.
            Ok(Err(_)) | Err(_) => Err(status::exhausted(
                "too many ask at the moment for what was used; try again later",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;
    use tonic::Code;
    use tonic_types::StatusExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_few_sums_are_made_at_once_and_who_waits_in_vain_is_told_when_to_come_back() {
        let sums = Sums::default();
        let mut held = Vec::new();
        for _ in 0..AT_ONCE {
            held.push(sums.place().await.expect("there is one"));
        }
        let before = Instant::now();
        let refused = sums.place().await.expect_err("all are taken");
        assert_eq!((refused.code(), before.elapsed()), (Code::ResourceExhausted, PATIENCE));
        assert!(refused.get_details_retry_info().is_some_and(|info| info.retry_delay.is_some()));
        // Who comes in time gets the one that becomes free.
        let (got, ()) = tokio::join!(sums.place(), async {
            tokio::time::sleep(PATIENCE / 2).await;
            held.pop();
        });
        assert!(got.is_ok());
    }
}

//! Deletes old data. A while after a mention is over, its event, its error and its posts are
//! deleted. The row itself stays, because it prevents a second answer.

use std::{sync::Arc, time::Duration};

use construct_runtime::{clock, telemetry::Chain};
use jiff::SignedDuration;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::shared::Shared;

/// How long data is kept after a mention is over.
const RETENTION: SignedDuration = SignedDuration::from_hours(30 * 24);
/// The interval between deletions.
const INTERVAL: Duration = Duration::from_secs(10 * 60);
/// Rows that are deleted per statement, so that no other statement waits long.
const BATCH_SIZE: i64 = 2_000;

/// Deletes old data until the service drains.
pub(crate) async fn run(shared: Arc<Shared>, draining: CancellationToken) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = draining.cancelled() => return,
            _ = ticks.tick() => {}
        }
        match shared.store.slack_cleanup(clock::now() - RETENTION, BATCH_SIZE).await {
            Ok(0) => {}
            Ok(deleted) => tracing::debug!(deleted, "deleted old data of mentions"),
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "cannot delete old data of mentions")
            }
        }
    }
}

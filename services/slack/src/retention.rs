//! What people have asked is not kept for ever: a while after a mention is over, what Slack sent of
//! it, why it failed and which posts were made for it are forgotten. That it was taken stays,
//! because that is what keeps it from being answered twice.

use std::{sync::Arc, time::Duration};

use construct_runtime::{clock, telemetry::Chain};
use jiff::SignedDuration;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::shared::Shared;

/// How long it is kept after it is over.
const RETENTION: SignedDuration = SignedDuration::from_hours(30 * 24);
/// How often it is looked for.
const INTERVAL: Duration = Duration::from_secs(10 * 60);
/// How much is forgotten at once, so that nobody waits for it.
const BATCH_SIZE: i64 = 2_000;

/// Forgets until the service drains.
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
            Ok(forgotten) => tracing::debug!(forgotten, "what is long over was forgotten"),
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "what is long over could not be forgotten")
            }
        }
    }
}

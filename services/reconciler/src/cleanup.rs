//! Removes unreferenced data: old blobs, and the ends of closed journals.

use std::time::Duration;

use construct_bus::{Bus, blob, journal};
use construct_runtime::clock;
use tokio_util::sync::CancellationToken;

/// Interval. Every replica cleans up; what one has removed, the next does not find.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(3600);

/// Cleans up until stopped.
pub(crate) async fn run(
    bus: Bus,
    blobs: blob::Store,
    stop: CancellationToken,
) -> Result<(), std::convert::Infallible> {
    loop {
        match blobs.remove_older_than(clock::now() - blob::RETENTION).await {
            Ok(blob::RemovedBlobs { blobs: 0, .. }) => {}
            Ok(removed) => tracing::info!(
                blobs = removed.blobs,
                bytes = removed.bytes,
                "old blobs were removed"
            ),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "old blobs could not be removed; retrying in an hour");
            }
        }
        match bus.journal().remove_closed(clock::now() - journal::CLOSED_RETENTION).await {
            Ok(0) => {}
            Ok(removed) => tracing::info!(removed, "the ends of old journals were removed"),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(
                    error,
                    "the ends of old journals could not be removed; retrying in an hour"
                );
            }
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(CLEANUP_INTERVAL) => {}
        }
    }
}

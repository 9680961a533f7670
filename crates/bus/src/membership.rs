//! Heartbeats of reconcilers over core NATS: not stored, delivered at most once.

use std::time::Duration;

use construct_proto::mesh::v1 as mesh;
use futures::{StreamExt as _, stream::BoxStream};
use jiff::Timestamp;

use crate::{
    Bus, control::subscribe, publish::Error as PublishError, subject::ReconcilerHeartbeat,
};

/// Timeout for flushing the last heartbeat of a process.
const LEAVE_FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

impl Bus {
    /// Publishes a heartbeat to all reconcilers, including this one.
    ///
    /// # Errors
    /// When the heartbeat names another process than the address, or the client is closed.
    pub async fn publish_heartbeat(
        &self,
        address: &ReconcilerHeartbeat,
        beat: &mesh::ReconcilerHeartbeat,
    ) -> Result<(), PublishError> {
        self.publish_core(address, beat).await?;
        if beat.leaving {
            // The process may end before the client flushes by itself.
            let _ = tokio::time::timeout(LEAVE_FLUSH_TIMEOUT, self.inner.client.flush()).await;
        }
        Ok(())
    }

    /// Subscribes to the heartbeats of all reconcilers, including this one. Survives reconnects.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn subscribe_heartbeats(
        &self,
    ) -> Result<BoxStream<'static, mesh::ReconcilerHeartbeat>, subscribe::Error> {
        self.subscribe_decoded(ReconcilerHeartbeat::filter()).await
    }

    /// Subscribes to the time of the reconcilers, which each publishes twice a second.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn subscribe_time(&self) -> Result<BoxStream<'static, Timestamp>, subscribe::Error> {
        let time = |beat: mesh::ReconcilerHeartbeat| {
            beat.time.and_then(|time| Timestamp::new(time.seconds, time.nanos).ok())
        };
        Ok(self
            .subscribe_heartbeats()
            .await?
            .filter_map(move |beat| std::future::ready(time(beat)))
            .boxed())
    }
}

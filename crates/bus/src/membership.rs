//! How reconcilers hear of each other, over plain NATS: not kept, at most once.

use std::time::Duration;

use construct_proto::mesh::v1 as mesh;
use futures::{StreamExt as _, stream::BoxStream};
use jiff::Timestamp;

use crate::{Bus, control::subscribe, publish::Error as PublishError, subject::ReconcilerBeat};

/// How long the last word of a process may take.
const LEAVE_FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

impl Bus {
    /// Tells all reconcilers, oneself included, that this one lives.
    ///
    /// # Errors
    /// When the beat names another process than the address, or the client is closed.
    pub async fn publish_beat(
        &self,
        address: &ReconcilerBeat,
        beat: &mesh::ReconcilerBeat,
    ) -> Result<(), PublishError> {
        self.publish_core(address, beat).await?;
        if beat.leaves {
            // The process may be gone before the client gets to it by itself.
            let _ = tokio::time::timeout(LEAVE_FLUSH_TIMEOUT, self.inner.client.flush()).await;
        }
        Ok(())
    }

    /// Hears which reconcilers live, oneself included. Survives reconnects.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn subscribe_beats(
        &self,
    ) -> Result<BoxStream<'static, mesh::ReconcilerBeat>, subscribe::Error> {
        self.subscribe_decoded(ReconcilerBeat::filter()).await
    }

    /// Hears from the reconcilers what time it is, twice a second from each.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn subscribe_time(&self) -> Result<BoxStream<'static, Timestamp>, subscribe::Error> {
        let time = |beat: mesh::ReconcilerBeat| {
            beat.time.and_then(|time| Timestamp::new(time.seconds, time.nanos).ok())
        };
        Ok(self
            .subscribe_beats()
            .await?
            .filter_map(move |beat| std::future::ready(time(beat)))
            .boxed())
    }
}

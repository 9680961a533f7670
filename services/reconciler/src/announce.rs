//! Publishes committed events without delaying the task. The records are in PostgreSQL, and a
//! subscriber that misses one on the mesh reads it there.

use construct_bus::{Bus, Progress};
use construct_store::StoredEvent;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Maximum number of commits whose events wait to be published. When NATS is slower than PostgreSQL
/// for long, further events are not published; subscribers find them by themselves, seconds later.
const MAX_PENDING_COMMITS: usize = 1024;

/// Accepts the events of commits.
#[derive(Debug, Clone)]
pub(crate) struct Announcer(mpsc::Sender<Vec<StoredEvent>>);

/// Publishes the accepted events in order: the events of a task are published in the order of their
/// numbers.
#[derive(Debug)]
pub(crate) struct Announcements(mpsc::Receiver<Vec<StoredEvent>>);

/// Creates both ends of a queue.
pub(crate) fn queue() -> (Announcer, Announcements) {
    let (sender, receiver) = mpsc::channel(MAX_PENDING_COMMITS);
    (Announcer(sender), Announcements(receiver))
}

impl Announcer {
    /// Queues the events of one commit for publication.
    pub(crate) fn announce(&self, events: Vec<StoredEvent>) {
        if !events.is_empty() && self.0.try_send(events).is_err() {
            tracing::debug!("too many events wait to be published; subscribers read these later");
        }
    }
}

impl Announcements {
    /// Publishes until `over`, and then the rest of the queue.
    pub(crate) async fn run(
        mut self,
        bus: Bus,
        over: CancellationToken,
    ) -> Result<(), std::convert::Infallible> {
        let mut progress = bus.progress();
        loop {
            let events = tokio::select! {
                biased;
                events = self.0.recv() => events,
                () = over.cancelled() => None,
            };
            let Some(events) = events else { break };
            for event in &events {
                publish_event(&mut progress, event).await;
            }
        }
        progress.finish().await;
        Ok(())
    }
}

async fn publish_event(progress: &mut Progress, stored: &StoredEvent) {
    let published = match construct_wire::record::read(stored) {
        Ok(event) => progress.send(&event).await.map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = published {
        tracing::warn!(
            sequence = stored.sequence,
            kind = stored.kind,
            error,
            "an event could not be published"
        );
    }
}

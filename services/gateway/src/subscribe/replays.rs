//! Limits the memory that replays of retained progress use.
//!
//! One replay is bounded, but a client that begins many subscriptions without reading them would
//! make the process hold as many. Progress may be lost: a replay that exceeds the limit is omitted,
//! and the records have everything that is durable.

use construct_bus::{Bookmark, Bus, Position, Replay, history};
use construct_domain::{OrganizationId, TaskId};
use tokio::sync::Semaphore;

use crate::limit::{Holder, Limit, Permit};

/// Concurrent reads; further ones wait.
const MAX_CONCURRENT_READS: usize = 4;
/// Smaller replays are not charged, in bytes.
const UNCHARGED_BYTES: usize = 64 * 1024;

/// The replays of the process.
#[derive(Debug)]
pub(super) struct Replays {
    reading: Semaphore,
}

impl Default for Replays {
    fn default() -> Self {
        Self { reading: Semaphore::new(MAX_CONCURRENT_READS) }
    }
}

impl Replays {
    /// Reads the retained progress of a task ([`Bus::replay_progress`]), and takes its size from
    /// `answers`: the permit is released with the progress.
    pub(super) async fn read(
        &self,
        bus: &Bus,
        answers: &Limit,
        organization: OrganizationId,
        task: TaskId,
        after: Option<Position>,
        from: Bookmark,
    ) -> Result<(Replay, Option<Permit>), history::Error> {
        let _reading = self.reading.acquire().await;
        let replay = bus.replay_progress(organization, task, after, from).await?;
        if replay.bytes < UNCHARGED_BYTES {
            return Ok((replay, None));
        }
        match answers.acquire(Holder::Organization(organization), replay.bytes) {
            Ok(permit) => Ok((replay, Some(permit))),
            Err(_) => {
                tracing::warn!(%task, bytes = replay.bytes, "retained progress is omitted: unread answers use up the limit");
                Ok((Replay { events: Vec::new(), ..replay }, None))
            }
        }
    }
}

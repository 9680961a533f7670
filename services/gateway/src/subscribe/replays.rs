//! What replays of retained progress may take of the process's memory.
//!
//! One is bounded, but who begins many subscriptions and does not read them would have the process
//! hold as many. Progress may be lost: what does not fit any more is left out, and the records tell
//! everything that lasts.

use construct_bus::{Bookmark, Bus, Position, Replay, history};
use construct_domain::{OrganizationId, TaskId};
use tokio::sync::Semaphore;

use crate::limit::{Holder, Limit, Share};

/// How many are read at the same time; the others wait.
const AT_ONCE: usize = 4;
/// One of less is held whatever others hold, in bytes.
const SMALL: usize = 64 * 1024;

/// The replays of the process.
#[derive(Debug)]
pub(super) struct Replays {
    reading: Semaphore,
}

impl Default for Replays {
    fn default() -> Self {
        Self { reading: Semaphore::new(AT_ONCE) }
    }
}

impl Replays {
    /// What is kept of a task's progress ([`Bus::replay_progress`]), and what it takes of
    /// `answers`, to be given up with it.
    pub(super) async fn read(
        &self,
        bus: &Bus,
        answers: &Limit,
        organization: OrganizationId,
        task: TaskId,
        after: Option<Position>,
        from: Bookmark,
    ) -> Result<(Replay, Option<Share>), history::Error> {
        let _reading = self.reading.acquire().await;
        let replay = bus.replay_progress(organization, task, after, from).await?;
        if replay.bytes < SMALL {
            return Ok((replay, None));
        }
        match answers.take(Holder::Organization(organization), replay.bytes) {
            Ok(share) => Ok((replay, Some(share))),
            Err(_) => {
                tracing::warn!(%task, bytes = replay.bytes, "retained progress is left out: unread answers fill the room for it");
                Ok((Replay { events: Vec::new(), ..replay }, None))
            }
        }
    }
}

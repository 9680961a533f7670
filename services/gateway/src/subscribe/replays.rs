//! What replays of retained progress may take of the process's memory.
//!
//! One is bounded, but who begins many subscriptions and does not read them would have the process
//! hold as many. Progress may be lost: what does not fit any more is left out, and the records tell
//! everything that lasts.

use std::sync::Arc;

use construct_bus::{Bookmark, Bus, Position, Replay, history};
use construct_domain::{OrganizationId, TaskId};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How many are read at the same time; the others wait.
const AT_ONCE: usize = 16;
/// One of less is held whatever others hold, in bytes.
const SMALL: usize = 64 * 1024;
/// What the others hold at most, in KiB of messages.
const HELD: usize = 256 * 1024;

/// The replays of the process.
#[derive(Debug)]
pub(super) struct Replays {
    reading: Semaphore,
    held: Arc<Semaphore>,
}

impl Default for Replays {
    fn default() -> Self {
        Self { reading: Semaphore::new(AT_ONCE), held: Arc::new(Semaphore::new(HELD)) }
    }
}

impl Replays {
    /// What is kept of a task's progress ([`Bus::replay_progress`]), and its place, which is to be
    /// given up with it.
    pub(super) async fn read(
        &self,
        bus: &Bus,
        organization: OrganizationId,
        task: TaskId,
        after: Option<Position>,
        from: Bookmark,
    ) -> Result<(Replay, Option<OwnedSemaphorePermit>), history::Error> {
        let _reading = self.reading.acquire().await;
        let replay = bus.replay_progress(organization, task, after, from).await?;
        let place = self.place(replay.bytes);
        if replay.bytes >= SMALL && place.is_none() {
            tracing::warn!(%task, bytes = replay.bytes, "retained progress is left out: what others do not take fills the room for it");
            return Ok((Replay { events: Vec::new(), ..replay }, None));
        }
        Ok((replay, place))
    }

    /// A place for so many bytes; none when they need none, or there is none.
    fn place(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let size = u32::try_from(bytes / 1024).unwrap_or(u32::MAX);
        (bytes >= SMALL).then(|| Arc::clone(&self.held).try_acquire_many_owned(size).ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_bounded_and_small_ones_always_fit() {
        let (replays, large) = (Replays::default(), 12 * 1024 * 1024);
        let mut held: Vec<_> = std::iter::from_fn(|| replays.place(large)).collect();
        assert_eq!(held.len(), HELD * 1024 / large);
        assert!(replays.place(SMALL - 1).is_none(), "it needs none");
        drop(held.pop());
        assert!(replays.place(large).is_some(), "there is room again");
    }
}

//! How many more messages a consumer may take, and which it holds.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::Notify;

/// A message of a stream: its sequence, and when it was published (in nanoseconds), which tells it
/// from the one that has the same sequence in a stream that was made anew.
pub(super) type MessageKey = (u64, i64);

/// Counts receipts that do not exist yet.
#[derive(Debug)]
pub(super) struct Slots {
    free: AtomicUsize,
    freed: Notify,
    held: Mutex<HashSet<MessageKey>>,
    pub(super) total: usize,
}

/// One of them, free again when dropped.
#[derive(Debug)]
pub(super) struct Slot {
    slots: Arc<Slots>,
    key: MessageKey,
}

/// Why there is no slot for a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoSlot {
    /// All are taken.
    Full,
    /// This process is at the message already: the server has not heard of that for too long, and
    /// delivers it again.
    InProgress,
}

impl Slots {
    pub(super) fn new(total: usize) -> Arc<Self> {
        Arc::new(Self {
            free: AtomicUsize::new(total),
            freed: Notify::new(),
            held: Mutex::default(),
            total,
        })
    }

    pub(super) fn free(&self) -> usize {
        self.free.load(Ordering::Acquire)
    }

    /// Takes one for a message.
    pub(super) fn take(self: &Arc<Self>, message: MessageKey) -> Result<Slot, NoSlot> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.contains(&message) {
            return Err(NoSlot::InProgress);
        }
        let taken =
            self.free.fetch_update(Ordering::AcqRel, Ordering::Acquire, |free| free.checked_sub(1));
        taken.map_err(|_| NoSlot::Full)?;
        held.insert(message);
        Ok(Slot { slots: Arc::clone(self), key: message })
    }

    /// Waits until one became free since the last time this was asked.
    pub(super) async fn freed(&self) {
        self.freed.notified().await;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.held.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
        self.slots.free.fetch_add(1, Ordering::AcqRel);
        self.slots.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_dropped_frees_its_message() {
        let slots = Slots::new(2);
        let first = slots.take((1, 10)).expect("free");
        assert_eq!(slots.take((1, 10)).err(), Some(NoSlot::InProgress));
        // The same sequence of a stream that was made anew.
        let other = slots.take((1, 20)).expect("free");
        assert_eq!(slots.take((2, 30)).err(), Some(NoSlot::Full));
        drop(first);
        let again = slots.take((1, 10)).expect("free");
        drop((other, again));
        assert_eq!(slots.free(), 2);
    }
}

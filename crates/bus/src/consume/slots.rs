//! The free slots of a consumer, and the messages in progress.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::Notify;

/// Identifies a message: its sequence, and its publication time in nanoseconds. The time
/// distinguishes it from the message with the same sequence in a recreated stream.
pub(super) type MessageKey = (u64, i64);

/// Bounds the receipts that exist at a time.
#[derive(Debug)]
pub(super) struct Slots {
    free: AtomicUsize,
    freed: Notify,
    held: Mutex<HashSet<MessageKey>>,
    pub(super) total: usize,
}

/// One slot, freed when dropped.
#[derive(Debug)]
pub(super) struct Slot {
    slots: Arc<Slots>,
    key: MessageKey,
}

/// Why there is no slot for a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoSlot {
    /// All slots are in use.
    Full,
    /// This process already works on the message. The server redelivers it, because it received no
    /// progress report for too long.
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

    /// Takes a slot for a message.
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

    /// Waits until a slot has been freed since the last call.
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
        // The same sequence of a recreated stream.
        let other = slots.take((1, 20)).expect("free");
        assert_eq!(slots.take((2, 30)).err(), Some(NoSlot::Full));
        drop(first);
        let again = slots.take((1, 10)).expect("free");
        drop((other, again));
        assert_eq!(slots.free(), 2);
    }
}

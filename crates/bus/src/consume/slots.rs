//! How many more messages a consumer may take.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::Notify;

/// Counts receipts that do not exist yet.
#[derive(Debug)]
pub(super) struct Slots {
    free: AtomicUsize,
    freed: Notify,
    pub(super) total: usize,
}

/// One of them, free again when dropped.
#[derive(Debug)]
pub(super) struct Slot(Arc<Slots>);

impl Slots {
    pub(super) fn new(total: usize) -> Arc<Self> {
        Arc::new(Self { free: AtomicUsize::new(total), freed: Notify::new(), total })
    }

    pub(super) fn free(&self) -> usize {
        self.free.load(Ordering::Acquire)
    }

    /// Takes one, if there is one.
    pub(super) fn take(self: &Arc<Self>) -> Option<Slot> {
        self.free
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |free| free.checked_sub(1))
            .is_ok()
            .then(|| Slot(Arc::clone(self)))
    }

    /// Waits until one became free since the last time this was asked.
    pub(super) async fn freed(&self) {
        self.freed.notified().await;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.free.fetch_add(1, Ordering::AcqRel);
        self.0.freed.notify_one();
    }
}

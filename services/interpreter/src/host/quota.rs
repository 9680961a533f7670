//! Limits the size of all call results in the journal of one execution.
//!
//! Each result is bounded, and so is the number of calls, but thousands of large results would
//! still fill the stream that all executions share, and the memory of a process that takes over the
//! execution. It counts what is in the journal, so a replayed script starts with the same count.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Results up to this size are always journaled, in bytes: most results, and every error. The
/// number of calls bounds their total.
const SMALL_RESULT_BYTES: usize = 4096;

/// The size of the journaled results, and its limit.
#[derive(Debug)]
pub(crate) struct ResultQuota {
    limit: usize,
    bytes: AtomicUsize,
}

impl ResultQuota {
    /// The quota of an execution whose journal contains `bytes` bytes of results.
    pub(crate) fn new(limit: usize, bytes: usize) -> Self {
        Self { limit, bytes: AtomicUsize::new(bytes) }
    }

    /// The limit, in bytes.
    pub(super) const fn limit(&self) -> usize {
        self.limit
    }

    /// Whether no more calls may be made.
    pub(super) fn is_full(&self) -> bool {
        self.bytes.load(Relaxed) >= self.limit
    }

    /// Adds a result if it fits. A required result is always added.
    pub(super) fn try_add(&self, result: &str, is_required: bool) -> bool {
        let is_required = is_required || result.len() <= SMALL_RESULT_BYTES;
        let more = |bytes: usize| {
            Some(bytes + result.len()).filter(|bytes| is_required || *bytes <= self.limit)
        };
        self.bytes.fetch_update(Relaxed, Relaxed, more).is_ok()
    }
}

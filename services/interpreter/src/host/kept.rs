//! How much the journal of one execution keeps of what its calls have given.
//!
//! Each result is bounded, and the number of calls; thousands of large ones would still fill the
//! stream that all executions share, and the memory of whoever takes this one over. What is counted
//! is what the journal holds, so that a script that is run again finds the count as it was.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What is journaled however little room is left, in bytes: what most calls give, and each error.
/// The number of calls bounds it.
const SMALL: usize = 4096;

/// What is kept, and how much may be.
#[derive(Debug)]
pub(crate) struct Kept {
    limit: usize,
    bytes: AtomicUsize,
}

impl Kept {
    /// Of an execution whose journal holds so many bytes of results.
    pub(crate) fn new(limit: usize, bytes: usize) -> Self {
        Self { limit, bytes: AtomicUsize::new(bytes) }
    }

    /// How much may be kept, in bytes.
    pub(super) const fn limit(&self) -> usize {
        self.limit
    }

    /// Whether nothing more is to be called.
    pub(super) fn is_full(&self) -> bool {
        self.bytes.load(Relaxed) >= self.limit
    }

    /// Counts a result in, if there is room for it. One that `must` be kept is counted in any case.
    pub(super) fn takes(&self, result: &str, must: bool) -> bool {
        let must = must || result.len() <= SMALL;
        let more =
            |bytes: usize| Some(bytes + result.len()).filter(|bytes| must || *bytes <= self.limit);
        self.bytes.fetch_update(Relaxed, Relaxed, more).is_ok()
    }
}

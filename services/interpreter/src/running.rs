//! The executions of this process, so that one can be told to stop; and those that were stopped
//! before they began.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use construct_domain::StepId;
use tokio_util::sync::CancellationToken;

use crate::metrics;

/// How long it is remembered that a step was told to stop, in case its command arrives later.
const REMEMBERED: Duration = Duration::from_secs(15 * 60);
/// How many are remembered at most; older ones are forgotten first.
const LIMIT: usize = 10_000;

/// The executions of this process.
#[derive(Debug, Default)]
pub(crate) struct Running {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    running: HashMap<StepId, std::sync::Arc<Handle>>,
    stopped: HashMap<StepId, (Instant, String)>,
}

#[derive(Debug, Default)]
struct Handle {
    token: CancellationToken,
    reason: OnceLock<String>,
}

/// One execution that runs, until this is dropped.
#[derive(Debug)]
pub(crate) struct Entry<'a> {
    running: &'a Running,
    step: StepId,
    handle: std::sync::Arc<Handle>,
}

impl Running {
    /// Notes that a step is begun; it may already have been told to stop.
    pub(crate) fn enter(&self, step: StepId) -> Entry<'_> {
        let mut inner = self.lock();
        let handle = std::sync::Arc::new(Handle::default());
        if let Some((_, reason)) = inner.stopped.get(&step) {
            handle.stop(reason);
        }
        inner.running.insert(step, std::sync::Arc::clone(&handle));
        metrics::running(1);
        Entry { running: self, step, handle }
    }

    /// Tells a step to stop, now or when its command arrives.
    pub(crate) fn stop(&self, step: StepId, reason: &str) {
        let mut inner = self.lock();
        if let Some(handle) = inner.running.get(&step) {
            handle.stop(reason);
        }
        let now = Instant::now();
        if inner.stopped.len() >= LIMIT {
            inner.stopped.retain(|_, (when, _)| now.duration_since(*when) < REMEMBERED);
        }
        if inner.stopped.len() >= LIMIT
            && let Some(oldest) =
                inner.stopped.iter().min_by_key(|(_, (when, _))| *when).map(|(step, _)| *step)
        {
            inner.stopped.remove(&oldest);
        }
        inner.stopped.insert(step, (now, reason.to_owned()));
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Handle {
    fn stop(&self, reason: &str) {
        let _ = self.reason.set(reason.to_owned());
        self.token.cancel();
    }
}

impl Entry<'_> {
    /// Cancelled when the step is told to stop.
    pub(crate) fn token(&self) -> &CancellationToken {
        &self.handle.token
    }

    /// Why the step was told to stop, if it was.
    pub(crate) fn reason(&self) -> Option<String> {
        self.handle.reason.get().cloned()
    }
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        metrics::running(-1);
        let mut inner = self.running.lock();
        // A later delivery of the same command may have taken the place.
        if inner
            .running
            .get(&self.step)
            .is_some_and(|handle| std::sync::Arc::ptr_eq(handle, &self.handle))
        {
            inner.running.remove(&self.step);
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_step_told_to_stop_before_it_began_is_stopped_when_it_begins() {
        let running = Running::default();
        let step = StepId::from_uuid(Uuid::from_u128(1));
        running.stop(step, "enough");
        let entry = running.enter(step);
        assert_eq!(entry.reason().as_deref(), Some("enough"));
        assert!(entry.token().is_cancelled());
    }

    #[test]
    fn stopping_one_step_leaves_others_alone() {
        let running = Running::default();
        let (one, other) =
            (StepId::from_uuid(Uuid::from_u128(1)), StepId::from_uuid(Uuid::from_u128(2)));
        let (one_entry, other_entry) = (running.enter(one), running.enter(other));
        running.stop(one, "enough");
        assert!(one_entry.token().is_cancelled());
        assert!(!other_entry.token().is_cancelled());
    }
}

//! The running executions of this process, so that they can be canceled, and the cancellations of
//! steps whose command has not arrived.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use construct_domain::StepId;
use tokio_util::sync::CancellationToken;

use crate::metrics;

/// How long a cancellation is kept, in case the step's command arrives later.
const CANCEL_RETENTION: Duration = Duration::from_secs(15 * 60);
/// At most this many cancellations are kept; the oldest is dropped first.
const MAX_CANCELS: usize = 10_000;

/// The running executions of this process, so that they can be canceled, and the cancellations of
/// steps whose command has not arrived.
#[derive(Debug, Default)]
pub(crate) struct Running {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    running: HashMap<StepId, std::sync::Arc<Handle>>,
    canceled: HashMap<StepId, (Instant, String)>,
}

#[derive(Debug, Default)]
struct Handle {
    token: CancellationToken,
    reason: OnceLock<String>,
}

/// Registration of a running execution; dropping it ends the registration.
#[derive(Debug)]
pub(crate) struct RunningStep<'a> {
    running: &'a Running,
    step: StepId,
    handle: std::sync::Arc<Handle>,
}

impl Running {
    /// Registers a running step. It is canceled at once if a cancellation has arrived before.
    pub(crate) fn register(&self, step: StepId) -> RunningStep<'_> {
        let mut inner = self.lock();
        let handle = std::sync::Arc::new(Handle::default());
        if let Some((_, reason)) = inner.canceled.get(&step) {
            handle.stop(reason);
        }
        inner.running.insert(step, std::sync::Arc::clone(&handle));
        metrics::add_running(1);
        RunningStep { running: self, step, handle }
    }

    /// Cancels a step, now or when its command arrives.
    pub(crate) fn cancel(&self, step: StepId, reason: &str) {
        let mut inner = self.lock();
        if let Some(handle) = inner.running.get(&step) {
            handle.stop(reason);
        }
        let now = Instant::now();
        if inner.canceled.len() >= MAX_CANCELS {
            inner.canceled.retain(|_, (when, _)| now.duration_since(*when) < CANCEL_RETENTION);
        }
        if inner.canceled.len() >= MAX_CANCELS
            && let Some(oldest) =
                inner.canceled.iter().min_by_key(|(_, (when, _))| *when).map(|(step, _)| *step)
        {
            inner.canceled.remove(&oldest);
        }
        inner.canceled.insert(step, (now, reason.to_owned()));
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

impl RunningStep<'_> {
    /// Canceled when the step is canceled.
    pub(crate) fn token(&self) -> &CancellationToken {
        &self.handle.token
    }

    /// The reason for the cancellation, if the step was canceled.
    pub(crate) fn reason(&self) -> Option<String> {
        self.handle.reason.get().cloned()
    }
}

impl Drop for RunningStep<'_> {
    fn drop(&mut self) {
        metrics::add_running(-1);
        let mut inner = self.running.lock();
        // A later delivery of the same command may have replaced the entry.
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
    fn step_canceled_before_it_starts_is_canceled_at_start() {
        let running = Running::default();
        let step = StepId::from_uuid(Uuid::from_u128(1));
        running.cancel(step, "enough");
        let entry = running.register(step);
        assert_eq!(entry.reason().as_deref(), Some("enough"));
        assert!(entry.token().is_cancelled());
    }

    #[test]
    fn canceling_one_step_leaves_others_running() {
        let running = Running::default();
        let (one, other) =
            (StepId::from_uuid(Uuid::from_u128(1)), StepId::from_uuid(Uuid::from_u128(2)));
        let (one_entry, other_entry) = (running.register(one), running.register(other));
        running.cancel(one, "enough");
        assert!(one_entry.token().is_cancelled());
        assert!(!other_entry.token().is_cancelled());
    }
}

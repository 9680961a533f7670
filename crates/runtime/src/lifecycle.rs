//! How a service runs and ends.
//!
//! 1. **Running.** Every task has a name and is spawned through [`Lifecycle::spawn`] or
//!    [`Lifecycle::spawn_job`].
//! 2. **Draining**, after the first SIGTERM or SIGINT, a call of [`Lifecycle::stop`], or the
//!    failure of an essential task: the process is no longer ready and accepts no new work; work in
//!    flight is finished or handed back.
//! 3. **Hard stop**, when the grace period is over or a second signal arrives: running tasks are
//!    dropped. That is safe, because nothing is acknowledged before its outcome is durable; it only
//!    costs a repetition elsewhere.
//! 4. The caller flushes telemetry and exits with the code of the [`Outcome`].

mod signals;

use std::{
    any::Any,
    borrow::Cow,
    collections::BTreeMap,
    panic::AssertUnwindSafe,
    pin::pin,
    process::ExitCode,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::FutureExt as _;
use tokio::{sync::watch, time};
use tokio_util::sync::CancellationToken;

use crate::telemetry::Chain;

pub(crate) use signals::watch as watch_signals;

/// How long dropped tasks have to end after a hard stop. A task that needs longer is stuck in code
/// that never yields, and the process ends without it.
const DROP_TIMEOUT: Duration = Duration::from_secs(1);

/// Exit code when tasks were dropped.
const EXIT_CUT_OFF: u8 = 3;

type Name = Cow<'static, str>;

/// The phases of one process. Clones share the lifecycle.
#[derive(Clone)]
pub struct Lifecycle {
    shared: Arc<Shared>,
}

struct Shared {
    grace: Duration,
    draining: CancellationToken,
    hard_stop: CancellationToken,
    /// Names of running tasks, by a number that distinguishes equal names.
    running: watch::Sender<BTreeMap<u64, Name>>,
    next_id: AtomicU64,
    signals: AtomicU64,
    outcome: Mutex<Outcome>,
}

/// How the process ended.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Why it failed, unless it was stopped.
    pub failure: Option<Error>,
    /// Names of the tasks that were dropped at the hard stop.
    pub cut_off: Vec<String>,
}

impl Outcome {
    /// 0 after a clean stop, 1 after a failure, 3 when tasks were dropped.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self { failure: Some(_), .. } => ExitCode::FAILURE,
            Self { cut_off, .. } if !cut_off.is_empty() => ExitCode::from(EXIT_CUT_OFF),
            Self { .. } => ExitCode::SUCCESS,
        }
    }
}

/// Why the process failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The service could not start.
    #[error("the service could not start")]
    Start {
        /// The cause.
        source: anyhow::Error,
    },
    /// An essential task failed.
    #[error("task `{task}` failed")]
    Failed {
        /// Name of the task.
        task: String,
        /// The cause.
        source: anyhow::Error,
    },
    /// An essential task panicked.
    #[error("task `{task}` panicked: {message}")]
    Panicked {
        /// Name of the task.
        task: String,
        /// The message of the panic.
        message: String,
    },
    /// An essential task ended although the process was not stopping.
    #[error("task `{task}` ended unexpectedly")]
    Ended {
        /// Name of the task.
        task: String,
    },
}

/// Work was abandoned because the process is stopping. As an error of a service's `run`, it is not
/// a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the service is stopping")]
pub struct Stopping;

impl std::fmt::Debug for Lifecycle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lifecycle").field("draining", &self.is_draining()).finish_non_exhaustive()
    }
}

impl Lifecycle {
    /// A running lifecycle. `grace` is the time between the first stop signal and the hard stop.
    pub fn new(grace: Duration) -> Self {
        let shared = Shared {
            grace,
            draining: CancellationToken::new(),
            hard_stop: CancellationToken::new(),
            running: watch::Sender::new(BTreeMap::new()),
            next_id: AtomicU64::new(0),
            signals: AtomicU64::new(0),
            outcome: Mutex::new(Outcome::default()),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Cancelled when no new work may be accepted.
    pub fn draining(&self) -> CancellationToken {
        self.shared.draining.clone()
    }

    /// Cancelled when work in flight is abandoned as well. Tasks are dropped then; only what runs
    /// outside of them, such as a child process, must watch this.
    pub fn hard_stop(&self) -> CancellationToken {
        self.shared.hard_stop.clone()
    }

    /// Whether the process is draining.
    pub fn is_draining(&self) -> bool {
        self.shared.draining.is_cancelled()
    }

    /// Starts draining, as the first signal does. Further calls have no effect.
    pub fn stop(&self, reason: &str) {
        if !self.is_draining() {
            tracing::info!(reason, grace = ?self.shared.grace, "stopping");
        }
        self.shared.draining.cancel();
    }

    /// Spawns an essential task, which must live as long as the process.
    ///
    /// It watches [`draining`](Self::draining), finishes or hands back its work, and returns `Ok`.
    /// If it panics, fails, or ends before that, the process stops with an error that names it. An
    /// error during draining is logged. At the hard stop the task is dropped. Must be called inside
    /// a tokio runtime.
    pub fn spawn<E>(
        &self,
        name: impl Into<Cow<'static, str>>,
        task: impl Future<Output = Result<(), E>> + Send + 'static,
    ) where
        E: Into<anyhow::Error> + Send + 'static,
    {
        let entry = self.register(name.into());
        tokio::spawn(async move {
            let lifecycle = &entry.lifecycle;
            let name = entry.name.to_string();
            match lifecycle.until_hard_stop(task).await {
                None => {}
                Some(Err(message)) => lifecycle.fail(Error::Panicked { task: name, message }),
                Some(Ok(Ok(()))) if lifecycle.is_draining() => {}
                Some(Ok(Ok(()))) => lifecycle.fail(Error::Ended { task: name }),
                Some(Ok(Err(error))) if lifecycle.is_draining() => {
                    tracing::error!(
                        task = name,
                        error = format!("{:#}", error.into()),
                        "task failed while draining"
                    );
                }
                Some(Ok(Err(error))) => {
                    lifecycle.fail(Error::Failed { task: name, source: error.into() })
                }
            }
        });
    }

    /// Spawns a job, which may end at any time.
    ///
    /// Draining waits for it up to the grace period; at the hard stop it is dropped. A panic is
    /// logged and ends only this job, so that one request cannot affect the others. Must be called
    /// inside a tokio runtime.
    pub fn spawn_job(
        &self,
        name: impl Into<Cow<'static, str>>,
        job: impl Future<Output = ()> + Send + 'static,
    ) {
        let entry = self.register(name.into());
        tokio::spawn(async move {
            if let Some(Err(message)) = entry.lifecycle.until_hard_stop(job).await {
                tracing::error!(task = %entry.name, message, "job panicked");
            }
        });
    }

    /// Starts the service and goes through all phases. Returns when no task runs any more, or the
    /// remaining ones are stuck.
    ///
    /// `start` spawns the tasks of the service and returns. Its error is a failure of the process,
    /// except [`Stopping`] while draining. When `start` returns without having spawned a task, the
    /// work is done and the process ends.
    pub async fn run_until_stopped(
        &self,
        start: impl Future<Output = anyhow::Result<()>>,
    ) -> Outcome {
        let start_task = self.register("start".into());
        let mut work = pin!(async move {
            match self.until_hard_stop(start).await {
                None | Some(Ok(Ok(()))) => {}
                Some(Err(message)) => {
                    self.fail(Error::Panicked { task: "start".to_owned(), message })
                }
                Some(Ok(Err(error)))
                    if self.is_draining() && error.chain().any(|cause| cause.is::<Stopping>()) => {}
                Some(Ok(Err(source))) => self.fail(Error::Start { source }),
            }
            drop(start_task);
            self.wait_idle().await;
        });
        let shared = &self.shared;
        let finished = tokio::select! {
            () = &mut work => true,
            () = shared.draining.cancelled() => tokio::select! {
                () = &mut work => true,
                () = shared.hard_stop.cancelled() => false,
                () = time::sleep(shared.grace) => {
                    self.cut_off("the grace period is over");
                    false
                }
            },
        };
        if !finished && time::timeout(DROP_TIMEOUT, &mut work).await.is_err() {
            tracing::error!(tasks = ?self.names(), "tasks are stuck and cannot be dropped; exiting without them");
        }
        std::mem::take(&mut *self.outcome())
    }

    /// Handles a signal: the first one drains, the second one is the hard stop.
    pub(crate) fn on_signal(&self, signal: &str) {
        match self.shared.signals.fetch_add(1, Ordering::Relaxed) {
            0 => self.stop(signal),
            _ => self.cut_off(signal),
        }
    }

    fn cut_off(&self, reason: &str) {
        if self.shared.hard_stop.is_cancelled() {
            return;
        }
        let names = self.names();
        tracing::warn!(reason, tasks = ?names, "dropping running tasks");
        self.outcome().cut_off = names;
        self.shared.draining.cancel();
        self.shared.hard_stop.cancel();
    }

    /// The first failure is the cause; later ones mostly follow from it.
    fn fail(&self, error: Error) {
        tracing::error!(error = %Chain(&error), "the service failed");
        self.stop(&error.to_string());
        self.outcome().failure.get_or_insert(error);
    }

    /// The output of the future, or the message of its panic; `None` at the hard stop.
    async fn until_hard_stop<F: Future>(&self, future: F) -> Option<Result<F::Output, String>> {
        tokio::select! {
            biased;
            ended = AssertUnwindSafe(future).catch_unwind() => Some(ended.map_err(|panic| panic_message(&*panic))),
            () = self.shared.hard_stop.cancelled() => None,
        }
    }

    async fn wait_idle(&self) {
        let mut running = self.shared.running.subscribe();
        // The sender lives in `self`, so the wait can only end with an empty map.
        let _ = running.wait_for(BTreeMap::is_empty).await;
    }

    fn register(&self, name: Name) -> RunningTask {
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        self.shared.running.send_modify(|running| {
            running.insert(id, name.clone());
        });
        RunningTask { lifecycle: self.clone(), id, name }
    }

    fn names(&self) -> Vec<String> {
        self.shared.running.borrow().values().map(|name| name.to_string()).collect()
    }

    fn outcome(&self) -> MutexGuard<'_, Outcome> {
        self.shared.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running task, registered for as long as this exists.
struct RunningTask {
    lifecycle: Lifecycle,
    id: u64,
    name: Name,
}

impl Drop for RunningTask {
    fn drop(&mut self) {
        self.lifecycle.shared.running.send_modify(|running| {
            running.remove(&self.id);
        });
    }
}

/// The message of a panic: a literal or a formatted string, unless the panic has another value.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "a value that is not text".to_owned()
    }
}

#[cfg(test)]
mod tests;

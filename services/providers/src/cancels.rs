//! The steps in flight and their cancels.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use construct_domain::StepId;
use construct_proto::mesh::v1::CancelStep;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long a cancel without its command is remembered: a cancel overtakes commands that wait in
/// the stream.
const EARLY_CANCEL_TTL: Duration = Duration::from_secs(60);
/// Early cancels in memory at most; the oldest is dropped first. A dropped one costs a call whose
/// result is not used.
const MAX_EARLY_CANCELS: usize = 4_096;

/// Signals that one step is canceled, and why.
#[derive(Debug, Clone, Default)]
pub(crate) struct CancelSignal {
    token: CancellationToken,
    reason: Arc<OnceLock<String>>,
}

impl CancelSignal {
    /// Completes with the reason when the step is canceled.
    pub(crate) async fn cancelled(&self) -> String {
        self.token.cancelled().await;
        self.reason.get().cloned().unwrap_or_default()
    }

    pub(crate) fn cancel(&self, reason: &str) {
        // The first reason stays.
        let _ = self.reason.set(reason.to_owned());
        self.token.cancel();
    }
}

/// The steps in flight in this process, and the cancels that arrived before their command.
#[derive(Debug, Clone, Default)]
pub(crate) struct CancelRegistry(Arc<Mutex<Steps>>);

#[derive(Debug, Default)]
struct Steps {
    /// By a local number: a command may be redelivered while its first delivery is still in flight.
    running: HashMap<u64, Running>,
    next: u64,
    early_cancels: VecDeque<EarlyCancel>,
}

#[derive(Debug)]
struct Running {
    task_id: String,
    /// Empty for a call that belongs to the task and to none of its steps.
    step_id: String,
    cancel: CancelSignal,
}

#[derive(Debug)]
struct EarlyCancel {
    step_id: String,
    reason: String,
    at: Instant,
}

/// A step in flight, until this is dropped.
#[derive(Debug)]
pub(crate) struct StepGuard {
    steps: CancelRegistry,
    number: u64,
    pub(crate) cancel: CancelSignal,
}

impl CancelRegistry {
    /// Starts a call outside a command. `id` is the id of its token. The token of a script has the
    /// id of its step; a call with another token on behalf of a task ends with any canceled step of
    /// that task.
    pub(crate) fn begin_for_token(&self, task_id: &str, id: &str) -> StepGuard {
        self.begin(task_id, if id.parse::<StepId>().is_ok() { id } else { "" })
    }

    /// Starts work on a step.
    pub(crate) fn begin(&self, task_id: &str, step_id: &str) -> StepGuard {
        let cancel = CancelSignal::default();
        let mut steps = self.lock();
        steps.drop_expired();
        if let Some(early) = steps.early_cancels.iter().find(|early| early.step_id == step_id) {
            cancel.cancel(&early.reason);
        }
        let number = steps.next;
        steps.next += 1;
        let running = Running {
            task_id: task_id.to_owned(),
            step_id: step_id.to_owned(),
            cancel: cancel.clone(),
        };
        steps.running.insert(number, running);
        StepGuard { steps: self.clone(), number, cancel }
    }

    /// Cancels a step, or with an empty step id everything of the task.
    pub(crate) fn cancel(&self, order: &CancelStep) {
        let mut steps = self.lock();
        let of_task = |running: &&Running| running.task_id == order.task_id;
        let mut found = false;
        for running in steps.running.values().filter(of_task) {
            if order.step_id.is_empty()
                || running.step_id.is_empty()
                || running.step_id == order.step_id
            {
                running.cancel.cancel(&order.reason);
                // The step itself may still wait in the stream.
                found |= running.step_id == order.step_id;
            }
        }
        steps.drop_expired();
        if !found && !order.step_id.is_empty() {
            if steps.early_cancels.len() >= MAX_EARLY_CANCELS {
                steps.early_cancels.pop_front();
            }
            let early = EarlyCancel {
                step_id: order.step_id.clone(),
                reason: order.reason.clone(),
                at: Instant::now(),
            };
            steps.early_cancels.push_back(early);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Steps> {
        // No code panics between two changes that belong together.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Steps {
    fn drop_expired(&mut self) {
        while self.early_cancels.front().is_some_and(|early| early.at.elapsed() > EARLY_CANCEL_TTL)
        {
            self.early_cancels.pop_front();
        }
    }
}

impl Drop for StepGuard {
    fn drop(&mut self) {
        self.steps.lock().running.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn order(task: &str, step: &str) -> CancelStep {
        CancelStep { task_id: task.into(), step_id: step.into(), reason: "suspended".into() }
    }

    fn reason(guard: &StepGuard) -> Option<String> {
        guard.cancel.cancelled().now_or_never()
    }

    #[tokio::test]
    async fn cancel_stops_only_the_addressed_step() {
        let cancels = CancelRegistry::default();
        let (one, two, other) =
            (cancels.begin("t", "1"), cancels.begin("t", "2"), cancels.begin("u", "1"));
        cancels.cancel(&order("t", "1"));
        assert_eq!(reason(&one).as_deref(), Some("suspended"));
        assert_eq!((reason(&two), reason(&other)), (None, None));
        cancels.cancel(&order("t", ""));
        assert!(reason(&two).is_some());
        assert_eq!(reason(&other), None);
    }

    #[tokio::test]
    async fn cancel_ends_calls_of_its_task_but_not_of_other_steps() {
        let (step, other) = (
            format!("step_{}", uuid::Uuid::from_u128(1)),
            format!("step_{}", uuid::Uuid::from_u128(2)),
        );
        let cancels = CancelRegistry::default();
        let (program, elsewhere) =
            (cancels.begin_for_token("t", "token_1"), cancels.begin_for_token("u", "token_2"));
        let script = cancels.begin_for_token("t", &step);
        cancels.cancel(&order("t", &other));
        assert_eq!(reason(&program).as_deref(), Some("suspended"));
        assert_eq!((reason(&script), reason(&elsewhere)), (None, None));
        assert!(reason(&cancels.begin("t", &other)).is_some(), "its command may come yet");
        cancels.cancel(&order("t", &step));
        assert!(reason(&script).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn early_cancel_is_remembered_for_its_ttl() {
        let cancels = CancelRegistry::default();
        cancels.cancel(&order("t", "1"));
        assert!(reason(&cancels.begin("t", "1")).is_some());
        tokio::time::advance(EARLY_CANCEL_TTL + Duration::from_secs(1)).await;
        assert!(reason(&cancels.begin("t", "1")).is_none());
    }

    #[tokio::test]
    async fn ended_steps_are_forgotten() {
        let cancels = CancelRegistry::default();
        drop(cancels.begin("t", "1"));
        for n in 0..2 * MAX_EARLY_CANCELS {
            cancels.cancel(&order("t", &n.to_string()));
        }
        let steps = cancels.lock();
        assert_eq!((steps.running.len(), steps.early_cancels.len()), (0, MAX_EARLY_CANCELS));
    }
}

//! Tasks whose reconciles currently fail, and why. For diagnosis of transient failures, which are
//! retried without end.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use construct_domain::TaskId;
use jiff::Timestamp;

/// Consecutive failed reconciles of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FailureStreak {
    /// When the first of them failed.
    pub(crate) since: Timestamp,
    pub(crate) count: u32,
    /// The last error, with its causes.
    pub(crate) error: String,
    /// When the task is reconciled again.
    pub(crate) next: Timestamp,
}

/// The tasks of the process whose last reconcile failed. At most as many as have actors.
#[derive(Debug, Clone, Default)]
pub(crate) struct FailingTasks(Arc<Mutex<HashMap<TaskId, FailureStreak>>>);

impl FailingTasks {
    /// The failures of a task since its last successful reconcile.
    pub(crate) fn find(&self, task: TaskId) -> Option<FailureStreak> {
        self.tasks().get(&task).cloned()
    }

    /// Returns the handle with which the task's actor records its reconciles.
    pub(crate) fn for_task(&self, task: TaskId) -> ReconcileFailures {
        ReconcileFailures { tasks: self.clone(), task }
    }

    fn tasks(&self) -> MutexGuard<'_, HashMap<TaskId, FailureStreak>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records the failures of one task for as long as its actor lives.
#[derive(Debug)]
pub(crate) struct ReconcileFailures {
    tasks: FailingTasks,
    task: TaskId,
}

impl ReconcileFailures {
    /// Records a failed reconcile: the number of consecutive failures, and the time of the next
    /// reconcile.
    pub(crate) fn record(&self, count: u32, error: String, now: Timestamp, next: Timestamp) {
        let mut tasks = self.tasks.tasks();
        let since = tasks.get(&self.task).map_or(now, |before| before.since);
        tasks.insert(self.task, FailureStreak { since, count, error, next });
    }

    /// Clears the failures after a successful reconcile or a quarantine.
    pub(crate) fn clear(&self) {
        self.tasks.tasks().remove(&self.task);
    }
}

impl Drop for ReconcileFailures {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("it is a time")
    }

    #[test]
    fn failures_are_kept_from_first_until_next_success() {
        let (tasks, task) = (FailingTasks::default(), TaskId::from_uuid(uuid::Uuid::from_u128(7)));
        let failures = tasks.for_task(task);
        assert_eq!(tasks.find(task), None);
        failures.record(1, "away".to_owned(), seconds(10), seconds(11));
        failures.record(2, "still away".to_owned(), seconds(11), seconds(13));
        let streak = FailureStreak {
            since: seconds(10),
            count: 2,
            error: "still away".to_owned(),
            next: seconds(13),
        };
        assert_eq!(tasks.find(task), Some(streak));
        assert_eq!(tasks.find(TaskId::from_uuid(uuid::Uuid::from_u128(8))), None);
        failures.clear();
        assert_eq!(tasks.find(task), None);
        failures.record(1, "away again".to_owned(), seconds(20), seconds(21));
        assert_eq!(
            tasks.find(task).map(|streak| (streak.since, streak.count)),
            Some((seconds(20), 1))
        );
        // The actor has ended.
        drop(failures);
        assert_eq!(tasks.find(task), None);
    }
}

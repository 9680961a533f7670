//! Which tasks can't be looked at just now, and why: what is told of a task whose looks fail for
//! something that passes by itself, which are tried again without end.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use construct_domain::TaskId;
use jiff::Timestamp;

/// Looks at a task that failed, one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FailureStreak {
    /// When the first of them did.
    pub(crate) since: Timestamp,
    pub(crate) count: u32,
    /// Of the last one, with its causes.
    pub(crate) error: String,
    /// When the task is looked at again.
    pub(crate) next: Timestamp,
}

/// The tasks of the process whose last look failed. No more than have actors.
#[derive(Debug, Clone, Default)]
pub(crate) struct FailingTasks(Arc<Mutex<HashMap<TaskId, FailureStreak>>>);

impl FailingTasks {
    /// What has failed of a task since it was last looked at with success.
    pub(crate) fn find(&self, task: TaskId) -> Option<FailureStreak> {
        self.tasks().get(&task).cloned()
    }

    /// What the actor of a task tells of its looks.
    pub(crate) fn for_task(&self, task: TaskId) -> ReconcileFailures {
        ReconcileFailures { tasks: self.clone(), task }
    }

    fn tasks(&self) -> MutexGuard<'_, HashMap<TaskId, FailureStreak>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells of the looks at one task for as long as somebody looks at it.
#[derive(Debug)]
pub(crate) struct ReconcileFailures {
    tasks: FailingTasks,
    task: TaskId,
}

impl ReconcileFailures {
    /// One has failed, with which it is so many in a row, and the next one will be then.
    pub(crate) fn record(&self, count: u32, error: String, now: Timestamp, next: Timestamp) {
        let mut tasks = self.tasks.tasks();
        let since = tasks.get(&self.task).map_or(now, |before| before.since);
        tasks.insert(self.task, FailureStreak { since, count, error, next });
    }

    /// One went well, or the task is put aside.
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

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("it is a time")
    }

    #[test]
    fn failures_are_told_from_the_first_to_the_next_look_that_goes_well() {
        let (failing, task) =
            (FailingTasks::default(), TaskId::from_uuid(uuid::Uuid::from_u128(7)));
        let looks = failing.for_task(task);
        assert_eq!(failing.find(task), None);
        looks.record(1, "away".to_owned(), at(10), at(11));
        looks.record(2, "still away".to_owned(), at(11), at(13));
        let told =
            FailureStreak { since: at(10), count: 2, error: "still away".to_owned(), next: at(13) };
        assert_eq!(failing.find(task), Some(told));
        assert_eq!(failing.find(TaskId::from_uuid(uuid::Uuid::from_u128(8))), None);
        looks.clear();
        assert_eq!(failing.find(task), None);
        looks.record(1, "away again".to_owned(), at(20), at(21));
        assert_eq!(failing.find(task).map(|told| (told.since, told.count)), Some((at(20), 1)));
        // Nobody looks any more.
        drop(looks);
        assert_eq!(failing.find(task), None);
    }
}

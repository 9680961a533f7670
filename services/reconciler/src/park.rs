//! Puts tasks aside that cannot be looked at, with the reason (`construct why`): trying for ever would only fill the log.

use construct_domain::TaskId;
use construct_runtime::telemetry::Chain;
use jiff::Timestamp;

use crate::activation::Activator;

impl Activator {
    /// Puts a task aside. False when not even that works: then it is tried on.
    pub(crate) async fn park(&self, task: TaskId, reason: &str) -> bool {
        match self.store.task_park(task, reason, Timestamp::now()).await {
            Ok(()) => {
                tracing::error!(%task, reason, "the task is put aside, because looking at it fails each time");
                true
            }
            Err(error) => {
                tracing::warn!(%task, error = %Chain(&error), "the task could not be put aside");
                false
            }
        }
    }
}

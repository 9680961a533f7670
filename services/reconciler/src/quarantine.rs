//! Quarantines tasks that fail to reconcile, with the reason (`construct explain`). Retrying them
//! without end would only fill the log.

use construct_domain::{OrganizationId, TaskId};
use construct_runtime::{clock, telemetry::Chain};

use crate::{metrics, reconcile::Reconciler};

impl Reconciler {
    /// Quarantines a task that failed to reconcile with these `intents`. Returns false when there
    /// is a newer intent, or when this fails as well: then the task is retried.
    pub(crate) async fn quarantine(&self, task: TaskId, intents: i64, reason: &str) -> bool {
        match self.store.task_quarantine(task, intents, reason, clock::now()).await {
            Ok(true) => {
                self.limiter.forget(task);
                metrics::record_quarantine();
                tracing::error!(%task, reason, "the task is quarantined, because it fails to reconcile each time");
                true
            }
            Ok(false) => false,
            Err(error) => {
                tracing::warn!(%task, error = %Chain(&error), "the task could not be quarantined");
                false
            }
        }
    }

    /// The reason of a task's quarantine, if it is quarantined and there is no newer intent.
    pub(crate) async fn quarantine_reason(
        &self,
        organization: OrganizationId,
        task: TaskId,
    ) -> Option<String> {
        let quarantine = self.store.task_quarantine_get(organization, task).await;
        quarantine.ok().flatten().map(|quarantine| quarantine.reason)
    }

    /// The number of a task's intents; `None` when it cannot be read.
    pub(crate) async fn intents(&self, task: TaskId) -> Option<i64> {
        self.store.task_intents(task).await.ok().flatten()
    }
}

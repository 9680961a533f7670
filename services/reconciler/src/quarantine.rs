//! Puts tasks aside that cannot be looked at, with the reason (`construct why`): trying for ever
//! would only fill the log.

use construct_domain::{OrganizationId, TaskId};
use construct_runtime::{clock, telemetry::Chain};

use crate::{metrics, reconcile::Reconciler};

impl Reconciler {
    /// Puts a task aside that could not be looked at with these `intents`. False when somebody has
    /// asked for something since, or when not even that works: then it is tried on.
    pub(crate) async fn quarantine(&self, task: TaskId, intents: i64, reason: &str) -> bool {
        match self.store.task_quarantine(task, intents, reason, clock::now()).await {
            Ok(true) => {
                self.limiter.forget(task);
                metrics::record_quarantine();
                tracing::error!(%task, reason, "the task is put aside, because looking at it fails each time");
                true
            }
            Ok(false) => false,
            Err(error) => {
                tracing::warn!(%task, error = %Chain(&error), "the task could not be put aside");
                false
            }
        }
    }

    /// Why a task is put aside, if it is, and nobody has asked for anything since.
    pub(crate) async fn quarantine_reason(
        &self,
        organization: OrganizationId,
        task: TaskId,
    ) -> Option<String> {
        let parked = self.store.task_quarantine_get(organization, task).await;
        parked.ok().flatten().map(|parked| parked.reason)
    }

    /// What was asked for of a task by now; none when that cannot be read.
    pub(crate) async fn intents(&self, task: TaskId) -> Option<i64> {
        self.store.task_intents(task).await.ok().flatten()
    }
}

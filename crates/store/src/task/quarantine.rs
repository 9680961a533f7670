//! Quarantine of tasks that fail to reconcile repeatedly, and retries that a person requests.

use construct_domain::{OrganizationId, TaskId};
use jiff::Timestamp;

use crate::{
    Error, Store, StoredTask, Write, WriteOutcome, WriteOutput, task::write::task_reload, text,
    time::sql, write::begin,
};

/// Maximum length of a stored reason, in characters.
const MAX_REASON_CHARS: usize = 2_000;

/// The quarantine of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantine {
    /// When it was quarantined.
    pub since: Timestamp,
    /// The error, with its causes.
    pub reason: String,
}

impl Store {
    /// The number of intents of a task, also of an unreadable one. None when the task does not
    /// exist.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_intents(&self, id: TaskId) -> Result<Option<i64>, Error> {
        Ok(sqlx::query_scalar!("SELECT intents FROM tasks WHERE id = $1", id.uuid())
            .fetch_optional(&self.pool)
            .await?)
    }

    /// Quarantines a task: the sweep leaves it out until there are more than `intents` intents,
    /// which failed to reconcile. False when there already are more. A repeated quarantine keeps
    /// the time of the first one.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_quarantine(
        &self,
        id: TaskId,
        intents: i64,
        reason: &str,
        now: Timestamp,
    ) -> Result<bool, Error> {
        let reason: String = text::clean(reason).chars().take(MAX_REASON_CHARS).collect();
        let done = sqlx::query!(
            "UPDATE tasks SET
                 parked_intents = intents,
                 parked_at = CASE WHEN parked_intents = intents THEN parked_at ELSE $2 END,
                 parked_reason = $3
             WHERE id = $1 AND intents = $4",
            id.uuid(),
            sql(now),
            reason,
            intents,
        )
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected() > 0)
    }

    /// The quarantine of a task, if it is quarantined.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_quarantine_get(
        &self,
        organization: OrganizationId,
        id: TaskId,
    ) -> Result<Option<Quarantine>, Error> {
        let quarantine = sqlx::query!(
            r#"SELECT parked_at AS "since!: jiff_sqlx::Timestamp", parked_reason AS "reason!" FROM tasks
               WHERE organization_id = $1 AND id = $2 AND parked_intents = intents"#,
            organization.uuid(),
            id.uuid(),
        )
        .fetch_optional(&self.pool)
        .await?;
        Ok(quarantine.map(|row| Quarantine { since: row.since.into(), reason: row.reason }))
    }

    /// Requests a retry. A quarantined task, readable or not, is reconciled again. A turn that
    /// failed, or reached its limit of model calls, continues: the model is called with the current
    /// transcript.
    ///
    /// No effect on any other task, or if the transcript ends with an answer of the model that its
    /// vendor refused or cut off: the model would be asked about its own answer.
    ///
    /// # Errors
    /// [`Error::NotFound`]; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_retry(
        &self,
        write: &Write,
        id: TaskId,
        render: impl FnOnce(&StoredTask) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredTask>, Error> {
        let mut writer = begin!(self, write);
        let done = sqlx::query!(
            "UPDATE tasks SET
                 retry_intent = CASE WHEN parked_intents = intents THEN retry_intent ELSE intents + 1 END,
                 intents = intents + 1,
                 intent_at = CASE WHEN intents > intents_seen THEN intent_at ELSE $3 END,
                 event_sequence = event_sequence + 1,
                 revision = revision + 1,
                 updated_at = $3
             WHERE organization_id = $1 AND id = $2 AND deleted_at IS NULL AND (parked_intents = intents OR (
                 turn IS NULL AND NOT suspend AND last_outcome IN ('failed', 'max_turns')
                 AND (SELECT m.source <> 'assistant' FROM messages m
                      WHERE m.task_id = $2 AND m.position IS NOT NULL AND m.superseded_at IS NULL
                      ORDER BY m.position DESC LIMIT 1)))",
            writer.organization(),
            id.uuid(),
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        let entity = task_reload(&mut writer, id).await?;
        if done.rows_affected() == 0 {
            return writer.finish_unchanged(entity, render).await;
        }
        writer.finish_on_task(id, entity.event_sequence, entity, render).await
    }
}

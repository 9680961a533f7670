//! Tasks that are put aside, because looking at them fails each time, and what is tried again
//! because a person asks for it.

use construct_domain::{OrganizationId, TaskId};
use jiff::Timestamp;

use crate::{
    Error, WriteOutput, Store, StoredTask, Write, WriteOutcome, task::write::task_reload, text, time::sql,
    write::begin,
};

/// Characters of a reason that are kept.
const MAX_REASON_CHARS: usize = 2_000;

/// Why a task was put aside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantine {
    /// The start.
    pub since: Timestamp,
    /// What failed, with its causes.
    pub reason: String,
}

impl Store {
    /// How often something was asked for of a task, also of one that cannot be read otherwise. None
    /// when there is no such task.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_intents(&self, id: TaskId) -> Result<Option<i64>, Error> {
        Ok(sqlx::query_scalar!("SELECT intents FROM tasks WHERE id = $1", id.uuid())
            .fetch_optional(&self.pool)
            .await?)
    }

    /// Puts a task aside: the sweep leaves it out until somebody asks for something beyond the
    /// first `intents`, which looks have failed at. False when somebody has already. One that is
    /// put aside stays so since when it was first.
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

    /// Why a task is put aside, if it is.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_quarantine_get(
        &self,
        organization: OrganizationId,
        id: TaskId,
    ) -> Result<Option<Quarantine>, Error> {
        let parked = sqlx::query!(
            r#"SELECT parked_at AS "since!: jiff_sqlx::Timestamp", parked_reason AS "reason!" FROM tasks
               WHERE organization_id = $1 AND id = $2 AND parked_intents = intents"#,
            organization.uuid(),
            id.uuid(),
        )
        .fetch_optional(&self.pool)
        .await?;
        Ok(parked.map(|row| Quarantine { since: row.since.into(), reason: row.reason }))
    }

    /// Asks for a task that was put aside to be looked at again, readable or not, or for a turn
    /// that has failed, or came to its limit of model calls, to be gone on with: the model is asked
    /// with what the transcript has. Nothing happens to any other task, nor when the model has had
    /// the last word (an answer that its vendor refused, or cut off), because it would be asked
    /// about its own words.
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

//! Propagation in a tree when one of its tasks is canceled, deleted, or ends.

use construct_domain::{OrganizationId, TaskId};
use jiff::Timestamp;
use sqlx::PgConnection;

use super::store_event;
use crate::{
    Error, LoadedTask, NewEvent, Store, Write,
    event::to_u64,
    text,
    time::{micros, sql},
};

impl Store {
    /// Cancels the active descendants of a task like the API does, and returns the tasks to wake.
    /// Tasks that were canceled before and have not ended yet are left as they are, so that this
    /// can be repeated.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn subtasks_cancel(
        &self,
        above: &LoadedTask,
        reason: &str,
        now: Timestamp,
    ) -> Result<Vec<TaskId>, Error> {
        let cancelled = sqlx::query_scalar!(
            r#"WITH below AS (
                   SELECT c.id FROM tasks c
                   WHERE c.root_id = $1 AND c.parent_id IS NOT NULL AND $2 = ANY (c.ancestors) AND c.deleted_at IS NULL
                     AND c.cancel_reason IS NULL AND (c.turn IS NOT NULL OR EXISTS (
                         SELECT FROM messages q WHERE q.task_id = c.id AND q.position IS NULL AND q.processed_at IS NULL))
                   ORDER BY cardinality(c.ancestors), c.id
                   FOR NO KEY UPDATE
               )
               UPDATE tasks t SET
                   cancel_reason = $3,
                   cancel_intent = t.intents + 1,
                   intents = t.intents + 1,
                   intent_at = CASE WHEN t.intents > t.intents_seen THEN t.intent_at ELSE $4 END,
                   revision = t.revision + 1,
                   updated_at = $4
               FROM below WHERE t.id = below.id AND t.cancel_reason IS NULL
               RETURNING t.id"#,
            above.root.uuid(),
            above.task.id.uuid(),
            &*text::clean(reason),
            sql(now) as _,
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(cancelled.into_iter().map(TaskId::from_uuid).collect())
    }

    /// Marks the ended subtasks of a loaded task as seen. Subtasks that ended since stay unseen.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn subtasks_mark_seen(&self, loaded: &LoadedTask) -> Result<(), Error> {
        let Some(ended) = &loaded.ended_subtasks else { return Ok(()) };
        // A locked row stays unseen, which costs another reconcile. Waiting for several locks could
        // deadlock.
        sqlx::query!(
            "UPDATE tasks t SET parent_due_at = NULL FROM (
                 SELECT c.id FROM tasks c JOIN jsonb_to_recordset($2) AS e (id uuid, at timestamptz) ON e.id = c.id
                 WHERE c.parent_id = $1 AND c.parent_due_at = e.at
                 FOR NO KEY UPDATE OF c SKIP LOCKED
             ) AS seen
             WHERE t.id = seen.id",
            loaded.task.id.uuid(),
            ended,
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }
}

/// Deletes the subtasks of a task that is about to be purged. Each is then purged separately, with
/// its descendants. Also wakes a task that waits for the purged one.
pub(in crate::task) async fn children_delete(
    connection: &mut PgConnection,
    parent: TaskId,
    deleted_event: impl Fn(TaskId) -> NewEvent + Send,
    now: Timestamp,
) -> Result<Vec<TaskId>, Error> {
    sqlx::query!(
        "UPDATE tasks SET
             intents = intents + 1,
             intent_at = CASE WHEN intents > intents_seen THEN intent_at ELSE $2 END
         WHERE id = (SELECT c.parent_id FROM tasks c WHERE c.id = $1 AND c.deleted_at IS NOT NULL)",
        parent.uuid(),
        sql(now) as _,
    )
    .execute(&mut *connection)
    .await?;
    let owner = sqlx::query_scalar!(
        "SELECT organization_id FROM tasks WHERE id = $1 AND deleted_at IS NOT NULL FOR UPDATE",
        parent.uuid()
    )
    .fetch_optional(&mut *connection)
    .await?;
    let Some(owner) = owner else { return Ok(Vec::new()) };
    let write = Write::new(OrganizationId::from_uuid(owner), micros(now));
    let children = sqlx::query!(
        "UPDATE tasks SET
             deleted_at = $2,
             intents = intents + 1,
             intent_at = CASE WHEN intents > intents_seen THEN intent_at ELSE $2 END,
             event_sequence = event_sequence + 1,
             revision = revision + 1,
             updated_at = $2
         WHERE id IN (SELECT c.id FROM tasks c WHERE c.parent_id = $1 AND c.deleted_at IS NULL ORDER BY c.id FOR UPDATE)
         RETURNING id, event_sequence",
        parent.uuid(),
        sql(now) as _,
    )
    .fetch_all(&mut *connection)
    .await?;
    let mut deleted = Vec::with_capacity(children.len());
    for child in children {
        let id = TaskId::from_uuid(child.id);
        store_event(&mut *connection, &write, id, to_u64(child.event_sequence), deleted_event(id))
            .await?;
        deleted.push(id);
    }
    Ok(deleted)
}

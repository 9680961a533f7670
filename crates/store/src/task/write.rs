//! What people want of tasks: the gateway's writes. None of them touches a column that the reconciler writes, except
//! for counters; each raises `intents`, so that the reconciler looks even when the wake is lost.

use construct_domain::{AgentId, TaskId};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::{
    Error, NewTask, Rendered, Store, StoredTask, TaskChanges, Write, Written,
    agent::turns_to_sql,
    task::{WHAT, select_counted},
    text,
    write::{Writer, begin},
};

impl Store {
    /// Creates a task; its first event is number 1 of its stream.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is no such agent; those of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_create(
        &self,
        write: &Write,
        new: NewTask,
        render: impl FnOnce(&StoredTask) -> Rendered + Send,
    ) -> Result<Written<StoredTask>, Error> {
        let mut writer = begin!(self, write);
        let title = text::clean(&new.title);
        let pinned = text::clean_list(&new.pinned);
        sqlx::query!(
            "INSERT INTO tasks
                 (id, organization_id, agent_id, workspace, title, titled, max_turns_override, policy, compute, phase_since,
                  event_sequence, created_at, updated_at, root_id, api_key_id, asked_key_id, pinned)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $9,
                     coalesce($10, (SELECT compute FROM agents WHERE organization_id = $2 AND id = $3), ''), $8, 1, $8, $8, $1, $11, $11, $12)",
            new.id.uuid(),
            writer.organization(),
            new.agent.uuid(),
            &*text::clean(&new.workspace),
            &*title,
            !title.is_empty(),
            turns_to_sql(new.max_turns_override),
            writer.now(),
            text::json(&new.policy)?,
            new.compute,
            writer.key() as _,
            &pinned,
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::of_write)?;
        let entity = task_reload(&mut writer, new.id).await?;
        writer.finish_on_task(new.id, entity.event_sequence, entity, render).await
    }

    /// Changes a task.
    ///
    /// # Errors
    /// [`Error::NotFound`] of the task or the new agent, [`Error::Conflict`] when it has another revision than
    /// expected.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_update(
        &self,
        write: &Write,
        id: TaskId,
        expected_revision: Option<i64>,
        changes: TaskChanges,
        render: impl FnOnce(&StoredTask) -> Rendered + Send,
    ) -> Result<Written<StoredTask>, Error> {
        let mut writer = begin!(self, write);
        let policy = changes.policy.as_ref().map(text::json).transpose()?;
        let pinned = changes.pinned.as_deref().map(text::clean_list);
        let done = sqlx::query!(
            "UPDATE tasks SET
                 agent_id = coalesce($5, agent_id),
                 title = coalesce($6, title),
                 titled = CASE WHEN $6::text IS NULL THEN titled ELSE $6 <> '' END,
                 max_turns_override = coalesce($7, max_turns_override),
                 policy = coalesce($8, policy),
                 pinned = coalesce($9, pinned),
                 intents = intents + 1,
                 intent_at = CASE WHEN intents > intents_seen THEN intent_at ELSE $4 END,
                 event_sequence = event_sequence + 1,
                 revision = revision + 1,
                 updated_at = $4
             WHERE organization_id = $1 AND id = $2 AND deleted_at IS NULL AND ($3::bigint IS NULL OR revision = $3)",
            writer.organization(),
            id.uuid(),
            expected_revision,
            writer.now(),
            changes.agent.map(AgentId::uuid),
            text::clean_option(changes.title.as_deref()),
            changes.max_turns_override.map(turns_to_sql),
            policy,
            pinned.as_deref() as _,
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::of_write)?;
        let entity = task_reload(&mut writer, id).await?;
        if done.rows_affected() == 0 {
            return Err(Error::Conflict);
        }
        writer.finish_on_task(id, entity.event_sequence, entity, render).await
    }

    /// Asks for the task to be paused. Nothing happens when that is wanted already.
    ///
    /// # Errors
    /// [`Error::NotFound`]; those of every write.
    pub async fn task_suspend(
        &self,
        write: &Write,
        id: TaskId,
        render: impl FnOnce(&StoredTask) -> Rendered + Send,
    ) -> Result<Written<StoredTask>, Error> {
        self.task_set_suspend(write, id, true, render).await
    }

    /// Asks for the task to go on. Nothing happens when that is wanted already.
    ///
    /// # Errors
    /// [`Error::NotFound`]; those of every write.
    pub async fn task_resume(
        &self,
        write: &Write,
        id: TaskId,
        render: impl FnOnce(&StoredTask) -> Rendered + Send,
    ) -> Result<Written<StoredTask>, Error> {
        self.task_set_suspend(write, id, false, render).await
    }

    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    async fn task_set_suspend(
        &self,
        write: &Write,
        id: TaskId,
        suspend: bool,
        render: impl FnOnce(&StoredTask) -> Rendered + Send,
    ) -> Result<Written<StoredTask>, Error> {
        let mut writer = begin!(self, write);
        let done = sqlx::query!(
            "UPDATE tasks SET
                 suspend = $3,
                 intents = intents + 1,
                 intent_at = CASE WHEN intents > intents_seen THEN intent_at ELSE $4 END,
                 event_sequence = event_sequence + 1,
                 revision = revision + 1,
                 updated_at = $4
             WHERE organization_id = $1 AND id = $2 AND deleted_at IS NULL AND suspend <> $3",
            writer.organization(),
            id.uuid(),
            suspend,
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

    /// Asks for the running turn to be ended and for the messages that wait now to be dropped. Messages that come
    /// afterwards are not touched by it.
    ///
    /// # Errors
    /// [`Error::NotFound`]; those of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_cancel(
        &self,
        write: &Write,
        id: TaskId,
        reason: &str,
        render: impl FnOnce(&StoredTask) -> Rendered + Send,
    ) -> Result<Written<StoredTask>, Error> {
        let mut writer = begin!(self, write);
        sqlx::query!(
            "UPDATE tasks SET
                 cancel_reason = $3,
                 cancel_intent = intents + 1,
                 intents = intents + 1,
                 intent_at = CASE WHEN intents > intents_seen THEN intent_at ELSE $4 END,
                 event_sequence = event_sequence + 1,
                 revision = revision + 1,
                 updated_at = $4
             WHERE organization_id = $1 AND id = $2 AND deleted_at IS NULL",
            writer.organization(),
            id.uuid(),
            &*text::clean(reason),
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        let entity = task_reload(&mut writer, id).await?;
        writer.finish_on_task(id, entity.event_sequence, entity, render).await
    }

    /// Deletes a task as far as people can see. The reconciler stops what runs and then purges it. The entity in the
    /// result is what it was, with the sequence of the event.
    ///
    /// # Errors
    /// [`Error::NotFound`]; those of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_delete(
        &self,
        write: &Write,
        id: TaskId,
        render: impl FnOnce(&StoredTask) -> Rendered + Send,
    ) -> Result<Written<StoredTask>, Error> {
        let mut writer = begin!(self, write);
        // Locks the row and counts the event, so that what is read next is what is deleted.
        let done = sqlx::query!(
            "UPDATE tasks SET
                 deleted_at = $3,
                 intents = intents + 1,
                 intent_at = CASE WHEN intents > intents_seen THEN intent_at ELSE $3 END,
                 event_sequence = event_sequence + 1,
                 revision = revision + 1,
                 updated_at = $3
             WHERE organization_id = $1 AND id = $2 AND deleted_at IS NULL",
            writer.organization(),
            id.uuid(),
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        if done.rows_affected() == 0 {
            return Err(Error::NotFound { what: WHAT });
        }
        let entity: StoredTask =
            select_counted!(["WHERE t.organization_id = $1 AND t.id = $2"], writer.organization(), id.uuid())
                .fetch_one(&mut *writer.transaction)
                .await?
                .into();
        writer.finish_on_task(id, entity.event_sequence, entity, render).await
    }
}

pub(super) async fn task_reload(writer: &mut Writer<'_>, id: TaskId) -> Result<StoredTask, Error> {
    let organization = writer.organization();
    task_read(&mut writer.transaction, organization, id).await
}

pub(crate) async fn task_read(
    connection: &mut PgConnection,
    organization: Uuid,
    id: TaskId,
) -> Result<StoredTask, Error> {
    select_counted!(["WHERE t.organization_id = $1 AND t.id = $2 AND t.deleted_at IS NULL"], organization, id.uuid(),)
        .fetch_optional(connection)
        .await?
        .map(StoredTask::from)
        .ok_or(Error::NotFound { what: WHAT })
}

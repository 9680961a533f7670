//! Writes of users on tasks, made by the gateway. None of them touches a column that the reconciler
//! writes, except for counters. Each increments `intents`, so that the task is reconciled even if
//! the wake is lost.

use std::collections::BTreeMap;

use construct_domain::{
    AgentId, ApiKeyId, TaskId,
    context::Context,
    money::{Usage, tokens_of_bytes},
    task::{Phase, Task},
};
use serde_json::Value;
use sqlx::{PgConnection, PgExecutor};
use uuid::Uuid;

use crate::{
    Error, NewEvent, NewTask, Store, StoredTask, TaskChanges, Write, WriteOutcome, WriteOutput,
    agent::{self, turns_to_sql},
    event::to_i64,
    task::{ENTITY, max_input_tokens, max_turns, select_counted},
    text, time,
    write::{ORGANIZATION, Writer, begin, no_entries},
};

impl Store {
    /// Creates a task. Its first event has number 1.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the agent does not exist; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_create(
        &self,
        write: &Write,
        new: NewTask,
        render: impl FnOnce(&StoredTask) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredTask>, Error> {
        if write.idempotency.is_none() {
            let host = agent_defaults(&self.pool, write, new.agent).await?;
            let entity = new_task_entity(write, new, host)?;
            let WriteOutput { event, response } = render(&entity);
            let audit =
                write.audit.as_ref().map_or(Ok(no_entries()), |audit| audit.rows(&response))?;
            let written = insert(&self.pool, write, entity, event, audit).await?;
            if let Some(audit) = &write.audit {
                audit.mark_written();
            }
            return Ok(written);
        }
        let mut writer = begin!(self, write);
        let host = agent_defaults(&mut *writer.transaction, write, new.agent).await?;
        let entity = new_task_entity(write, new, host)?;
        let WriteOutput { event, response } = render(&entity);
        // The audit entry is stored together with the response.
        let written = insert(&mut *writer.transaction, write, entity, event, no_entries()).await?;
        writer.commit(&response).await?;
        Ok(written)
    }

    /// Changes a task.
    ///
    /// # Errors
    /// [`Error::NotFound`] for the task or the new agent, [`Error::Conflict`] when the revision is
    /// not the expected one.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_update(
        &self,
        write: &Write,
        id: TaskId,
        expected_revision: Option<i64>,
        changes: TaskChanges,
        render: impl FnOnce(&StoredTask) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredTask>, Error> {
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
        .map_err(Error::from_write)?;
        let entity = task_reload(&mut writer, id).await?;
        if done.rows_affected() == 0 {
            return Err(Error::Conflict);
        }
        writer.finish_on_task(id, entity.event_sequence, entity, render).await
    }

    /// Requests that the task is suspended. No effect if that was requested before.
    ///
    /// # Errors
    /// [`Error::NotFound`]; the errors of every write.
    pub async fn task_suspend(
        &self,
        write: &Write,
        id: TaskId,
        render: impl FnOnce(&StoredTask) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredTask>, Error> {
        self.task_set_suspend(write, id, true, render).await
    }

    /// Requests that the task resumes. No effect if that was requested before.
    ///
    /// # Errors
    /// [`Error::NotFound`]; the errors of every write.
    pub async fn task_resume(
        &self,
        write: &Write,
        id: TaskId,
        render: impl FnOnce(&StoredTask) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredTask>, Error> {
        self.task_set_suspend(write, id, false, render).await
    }

    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    async fn task_set_suspend(
        &self,
        write: &Write,
        id: TaskId,
        suspend: bool,
        render: impl FnOnce(&StoredTask) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredTask>, Error> {
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

    /// Requests a cancel: end the running turn, and drop the messages that are queued now. Later
    /// messages are not affected.
    ///
    /// # Errors
    /// [`Error::NotFound`]; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_cancel(
        &self,
        write: &Write,
        id: TaskId,
        reason: &str,
        render: impl FnOnce(&StoredTask) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredTask>, Error> {
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

    /// Deletes a task: it disappears from the API, and the reconciler stops and then purges it. The
    /// entity in the result is the task before the deletion, with the sequence of the event.
    ///
    /// # Errors
    /// [`Error::NotFound`]; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_delete(
        &self,
        write: &Write,
        id: TaskId,
        render: impl FnOnce(&StoredTask) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredTask>, Error> {
        let mut writer = begin!(self, write);
        // Locks the row and counts the event, so that the next read returns the deleted state.
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
            return Err(Error::NotFound { what: ENTITY });
        }
        let entity: StoredTask = select_counted!(
            ["WHERE t.organization_id = $1 AND t.id = $2"],
            writer.organization(),
            id.uuid()
        )
        .fetch_one(&mut *writer.transaction)
        .await?
        .into();
        writer.finish_on_task(id, entity.event_sequence, entity, render).await
    }
}

/// What a new task takes from its agent.
struct AgentDefaults {
    name: String,
    max_turns: i32,
    compute: String,
    compact_at_percent: i32,
    context_window: i64,
    max_output_tokens: i64,
    max_tokens: Option<i64>,
    instructions_bytes: i32,
}

async fn agent_defaults(
    executor: impl PgExecutor<'_>,
    write: &Write,
    agent: AgentId,
) -> Result<AgentDefaults, Error> {
    sqlx::query_as!(
        AgentDefaults,
        r#"SELECT a.name, a.max_turns, a.compute, a.compact_at_percent, w.context_window, w.max_output_tokens,
                  (a.parameters ->> 'max_tokens')::bigint AS max_tokens, octet_length(a.instructions) AS "instructions_bytes!"
           FROM agents a JOIN models w ON w.organization_id = a.organization_id AND w.id = a.model_id
           WHERE a.organization_id = $1 AND a.id = $2"#,
        write.organization.uuid(),
        agent.uuid(),
    )
    .fetch_optional(executor)
    .await?
    .ok_or(Error::NotFound { what: agent::ENTITY })
}

/// The entity that an insert creates.
fn new_task_entity(write: &Write, new: NewTask, host: AgentDefaults) -> Result<StoredTask, Error> {
    let now = time::micros(write.now);
    let title = text::clean(&new.title).into_owned();
    let pinned = text::clean_list(&new.pinned);
    let bytes = usize::try_from(host.instructions_bytes).unwrap_or_default()
        + pinned.iter().map(String::len).sum::<usize>();
    let context = Context {
        input_limit: max_input_tokens(host.context_window, host.max_output_tokens, host.max_tokens),
        compact_at: u32::try_from(host.compact_at_percent).unwrap_or_default(),
        base: tokens_of_bytes(bytes),
        ..Context::default()
    };
    Ok(StoredTask {
        state: Task {
            id: new.id,
            organization: write.organization,
            agent: new.agent,
            suspend: false,
            cancel: None,
            rewind: None,
            retry: None,
            max_turns: max_turns([turns_to_sql(new.max_turns_override), host.max_turns]),
            titled: !title.is_empty(),
            phase: Phase::AwaitInput,
            turn: None,
            step: None,
            title_step: None,
            steps: 0,
            last_position: 0,
            next_wake: None,
            last_outcome: None,
            last_error: None,
            approvals: Vec::new(),
            subtasks: None,
            context,
        },
        agent_name: host.name,
        workspace: text::clean(&new.workspace).into_owned(),
        title,
        max_turns_override: new.max_turns_override,
        policy: serde_json::from_value(text::json(&new.policy)?).map_err(Error::internal)?,
        pinned,
        compute: new.compute.unwrap_or(host.compute),
        phase_since: now,
        usage: Usage::default(),
        tool_uses: BTreeMap::new(),
        queued_count: 0,
        event_sequence: 1,
        trace_id: None,
        forked_from: None,
        ancestors: Vec::new(),
        subtasks: Vec::new(),
        revision: 1,
        created_at: now,
        updated_at: now,
        unreadable: Vec::new(),
    })
}

/// Stores a task with its event in one statement: one round trip, all or nothing.
async fn insert(
    executor: impl PgExecutor<'_>,
    write: &Write,
    entity: StoredTask,
    event: NewEvent,
    audit: Value,
) -> Result<WriteOutcome<StoredTask>, Error> {
    let id = entity.state.id.uuid();
    sqlx::query_scalar!(
        r#"WITH here AS (
               SELECT id FROM organizations WHERE id = $2 AND deleted_at IS NULL FOR KEY SHARE
           ), task AS (
               INSERT INTO tasks
                   (id, organization_id, agent_id, workspace, title, titled, max_turns_override, policy, compute, phase_since,
                    event_sequence, created_at, updated_at, root_id, api_key_id, asked_key_id, pinned)
               SELECT $1, here.id, $3, $4, $5, $6, $7, $9, $10, $8, 1, $8, $8, $1, $11, $11, $12 FROM here
           ), recorded AS (
               INSERT INTO events (organization_id, stream_id, sequence, type, payload, step, created_at)
               SELECT here.id, $1, 1, $13, $14, $15, $8 FROM here
           ), audited AS (
               INSERT INTO audit_entries SELECT entry.* FROM here, jsonb_populate_recordset(NULL::audit_entries, $16) AS entry
               ON CONFLICT ON CONSTRAINT audit_entries_pkey DO NOTHING
           )
           SELECT id FROM here"#,
        id,
        write.organization.uuid(),
        entity.state.agent.uuid(),
        entity.workspace,
        entity.title,
        entity.state.titled,
        turns_to_sql(entity.max_turns_override),
        time::sql(write.now) as _,
        text::json(&entity.policy)?,
        entity.compute,
        write.key.map(ApiKeyId::uuid) as _,
        &entity.pinned,
        event.kind,
        event.payload,
        event.step.map(to_i64) as _,
        audit,
    )
    .fetch_optional(executor)
    .await
    .map_err(Error::from_write)?
    .ok_or(Error::NotFound { what: ORGANIZATION })?;
    let event = write.to_stored_event(id, 1, event);
    Ok(WriteOutcome::Applied { entity, event: Some(event) })
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
    select_counted!(
        ["WHERE t.organization_id = $1 AND t.id = $2 AND t.deleted_at IS NULL"],
        organization,
        id.uuid(),
    )
    .fetch_optional(connection)
    .await?
    .map(StoredTask::from)
    .ok_or(Error::NotFound { what: ENTITY })
}

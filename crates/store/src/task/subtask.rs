//! Subtasks: calls of scripts about tasks, and the propagation of cancels and deletions in a tree.
//!
//! # Locks
//!
//! A write to several tasks of a tree locks them from the root downwards. A script can create
//! something only while its step runs, which is checked under the lock of its task's row. So
//! nothing is created after a commit that ends the step, or after a cancel.

pub(crate) mod state;
mod tree;

use construct_domain::{
    AgentId, ApiKeyId, MessageId, OrganizationId, StepId, TaskId,
    message::Content,
    subtask::{CallIds, Limits, Refusal},
};
use jiff::Timestamp;
use sqlx::PgConnection;
use uuid::Uuid;

pub use state::{DescendantTotals, SubtaskState, SubtaskStatus};
pub(super) use tree::children_delete;

use crate::{
    Error, NewEvent, NewUserMessage, Store, StoredEvent, StoredMessage, StoredTask, Write,
    WriteOutcome,
    event::{to_i64, to_u64},
    message::write::message_insert,
    task::write::task_read,
    text,
    time::sql,
};

/// The script that makes a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScriptCaller {
    /// The organization of the task.
    pub organization: OrganizationId,
    /// Which task.
    pub task: TaskId,
    /// The step that runs the script.
    pub step: StepId,
}

/// A subtask to create.
#[derive(Debug, Clone, PartialEq)]
pub struct NewSubtask {
    /// The ids of the subtask and of its first message.
    pub ids: CallIds,
    /// The agent; none: the agent of the parent.
    pub agent: Option<AgentId>,
    /// Its first message.
    pub content: Content,
    /// Empty: generated from the conversation.
    pub title: String,
    /// The budget of it and its descendants, in 10⁻¹² US dollars.
    pub budget: Option<i64>,
}

/// The events of a script's call.
#[derive(Debug, Clone, Copy)]
pub struct SubtaskEvents {
    /// The event of a created task.
    pub task: fn(&StoredTask) -> NewEvent,
    /// The event of a created task in its parent's stream.
    pub spawned: fn(&StoredTask) -> NewEvent,
    /// The event of a task that has another agent.
    pub changed: fn(&StoredTask) -> NewEvent,
    /// The event of an accepted message.
    pub message: fn(&StoredMessage) -> NewEvent,
}

/// The effect of a script's call.
#[derive(Debug, Clone, PartialEq)]
pub struct SubtaskChange {
    /// The task that was created or received the message.
    pub task: TaskId,
    /// The stored events, to be published. Empty when the same call was executed before.
    pub events: Vec<StoredEvent>,
}

/// The task of the calling script, with its row locked.
struct LockedCaller {
    agent: Uuid,
    parent: Option<Uuid>,
    ancestors: Vec<Uuid>,
    root: Uuid,
    /// The API key that the task's work counts for. Its subtasks and messages count for it too.
    key: Option<ApiKeyId>,
}

impl Store {
    /// Creates a subtask with its first message.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the agent does not exist; [`Error::Unavailable`]: the outcome is
    /// unknown, and the same call can be repeated.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn subtask_spawn(
        &self,
        caller: ScriptCaller,
        new: NewSubtask,
        limits: Limits,
        events: SubtaskEvents,
        now: Timestamp,
    ) -> Result<Result<SubtaskChange, Refusal>, Error> {
        let mut transaction = self.pool.begin().await?;
        let parent = match lock_caller(&mut transaction, caller).await? {
            Ok(parent) => parent,
            Err(refused) => return Ok(Err(refused)),
        };
        let write = Write { key: parent.key, ..Write::new(caller.organization, now) };
        let (id, organization) = (new.ids.task, caller.organization.uuid());
        // Its events outlive it: a subtask that was deleted meanwhile is not created again.
        let begun = sqlx::query_scalar!(
            r#"SELECT EXISTS (SELECT FROM events WHERE stream_id = $1) AS "begun!""#,
            id.uuid()
        )
        .fetch_one(&mut *transaction)
        .await?;
        if begun {
            return Ok(Ok(SubtaskChange { task: id, events: Vec::new() }));
        }
        if parent.ancestors.len() >= limits.depth as usize {
            return Ok(Err(Refusal::TooDeep { limit: limits.depth }));
        }
        // Serializes the counts of one tree.
        sqlx::query!(
            r#"SELECT pg_advisory_xact_lock(hashtextextended($1::text, 24))::text AS "done""#,
            parent.root.to_string()
        )
        .fetch_one(&mut *transaction)
        .await?;
        let count = sqlx::query!(
            r#"SELECT
                   (SELECT count(*) FROM tasks c WHERE c.parent_id = $1) AS "children!",
                   (SELECT count(*) FROM tasks c
                    WHERE c.root_id = $2 AND c.parent_id IS NOT NULL AND c.deleted_at IS NULL AND (c.turn IS NOT NULL OR EXISTS (
                        SELECT FROM messages q WHERE q.task_id = c.id AND q.position IS NULL AND q.processed_at IS NULL))) AS "at_work!""#,
            caller.task.uuid(),
            parent.root,
        )
        .fetch_one(&mut *transaction)
        .await?;
        if count.children >= i64::from(limits.children) {
            return Ok(Err(Refusal::TooMany { limit: limits.children }));
        }
        if count.at_work >= i64::from(limits.at_work) {
            return Ok(Err(Refusal::TooManyAtWork { limit: limits.at_work }));
        }
        let title = text::clean(&new.title);
        let inserted = sqlx::query!(
            "INSERT INTO tasks
                 (id, organization_id, agent_id, workspace, title, titled, max_turns_override, policy, compute, phase_since,
                  event_sequence, created_at, updated_at, root_id, parent_id, ancestors, api_key_id, asked_key_id)
             SELECT $1, p.organization_id, a.id, p.workspace, $4, $4 <> '', 0, p.policy, a.compute, $5, 1, $5, $5, p.root_id, p.id,
                    p.ancestors || p.id, p.asked_key_id, p.asked_key_id
             FROM tasks p JOIN agents a ON a.organization_id = p.organization_id AND a.id = $3
             WHERE p.id = $2",
            id.uuid(),
            caller.task.uuid(),
            new.agent.map_or(parent.agent, AgentId::uuid),
            &*title,
            sql(now) as _,
        )
        .execute(&mut *transaction)
        .await
        .map_err(Error::from_write)?;
        if inserted.rows_affected() == 0 {
            return Err(Error::NotFound { what: "agent" });
        }
        if let Some(limit) = new.budget {
            sqlx::query!(
                "INSERT INTO budgets
                     (id, organization_id, task_id, period, limit_pico_usd, window_start, counted_at, created_at, updated_at)
                 VALUES ($1, $2, $3, 'total', $4, budgets_window('total', $5), $5, $5, $5)",
                new.ids.budget,
                organization,
                id.uuid(),
                limit,
                sql(now) as _,
            )
            .execute(&mut *transaction)
            .await
            .map_err(Error::from_write)?;
        }
        let child = task_read(&mut transaction, organization, id).await?;
        let mut stored = vec![
            store_event(&mut transaction, &write, id, child.event_sequence, (events.task)(&child))
                .await?,
        ];
        stored.push(
            append_event(&mut transaction, &write, caller.task, (events.spawned)(&child)).await?,
        );
        match accept_message(&mut transaction, &write, id, new.ids.message, new.content, events)
            .await?
        {
            Ok(event) => stored.extend(event),
            Err(refused) => return Ok(Err(refused)),
        }
        transaction.commit().await?;
        Ok(Ok(SubtaskChange { task: id, events: stored }))
    }

    /// Sends a message to a subtask of the caller's task.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: the outcome is unknown, and the same call can be repeated.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn subtask_send(
        &self,
        caller: ScriptCaller,
        child: TaskId,
        message: MessageId,
        content: Content,
        events: SubtaskEvents,
        now: Timestamp,
    ) -> Result<Result<SubtaskChange, Refusal>, Error> {
        let mut transaction = self.pool.begin().await?;
        let own = match lock_caller(&mut transaction, caller).await? {
            Ok(own) => own,
            Err(refused) => return Ok(Err(refused)),
        };
        let write = Write { key: own.key, ..Write::new(caller.organization, now) };
        let is_child = sqlx::query_scalar!(
            r#"SELECT EXISTS (SELECT FROM tasks WHERE id = $1 AND parent_id = $2 AND deleted_at IS NULL) AS "is_child!""#,
            child.uuid(),
            caller.task.uuid(),
        )
        .fetch_one(&mut *transaction)
        .await?;
        if !is_child {
            return Ok(Err(Refusal::NotASubtask(child.to_string())));
        }
        let outcome =
            accept_message(&mut transaction, &write, child, message, content, events).await?;
        Ok(match outcome {
            Ok(event) => {
                transaction.commit().await?;
                Ok(SubtaskChange { task: child, events: event.into_iter().collect() })
            }
            Err(refused) => Err(refused),
        })
    }

    /// Sends a message to the parent of the caller's task. `content` creates it from the title of
    /// the caller's task.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: the outcome is unknown, and the same call can be repeated.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn subtask_message_parent(
        &self,
        caller: ScriptCaller,
        message: MessageId,
        content: impl FnOnce(&str) -> Content + Send,
        events: SubtaskEvents,
        now: Timestamp,
    ) -> Result<Result<SubtaskChange, Refusal>, Error> {
        let mut transaction = self.pool.begin().await?;
        // Locks from the root downwards: the parent's row first.
        let above = sqlx::query!(
            "SELECT p.id, c.title FROM tasks c JOIN tasks p ON p.id = c.parent_id AND p.deleted_at IS NULL
             WHERE c.organization_id = $1 AND c.id = $2 FOR NO KEY UPDATE OF p",
            caller.organization.uuid(),
            caller.task.uuid(),
        )
        .fetch_optional(&mut *transaction)
        .await?;
        let own = match lock_caller(&mut transaction, caller).await? {
            Ok(own) => own,
            Err(refused) => return Ok(Err(refused)),
        };
        let write = Write { key: own.key, ..Write::new(caller.organization, now) };
        let Some(above) = above.filter(|above| own.parent == Some(above.id)) else {
            return Ok(Err(Refusal::NoParent));
        };
        let task = TaskId::from_uuid(above.id);
        let outcome =
            accept_message(&mut transaction, &write, task, message, content(&above.title), events)
                .await?;
        Ok(match outcome {
            Ok(event) => {
                transaction.commit().await?;
                Ok(SubtaskChange { task, events: event.into_iter().collect() })
            }
            Err(refused) => Err(refused),
        })
    }

    /// Hands the caller's task to another agent, from its next model call on.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the agent does not exist; [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_hand_off(
        &self,
        caller: ScriptCaller,
        agent: AgentId,
        events: SubtaskEvents,
        now: Timestamp,
    ) -> Result<Result<SubtaskChange, Refusal>, Error> {
        let write = Write::new(caller.organization, now);
        let mut transaction = self.pool.begin().await?;
        let own = match lock_caller(&mut transaction, caller).await? {
            Ok(own) => own,
            Err(refused) => return Ok(Err(refused)),
        };
        if own.agent == agent.uuid() {
            return Ok(Ok(SubtaskChange { task: caller.task, events: Vec::new() }));
        }
        sqlx::query!(
            "UPDATE tasks SET
                 agent_id = $2,
                 intents = intents + 1,
                 intent_at = CASE WHEN intents > intents_seen THEN intent_at ELSE $3 END,
                 event_sequence = event_sequence + 1,
                 revision = revision + 1,
                 updated_at = $3
             WHERE id = $1",
            caller.task.uuid(),
            agent.uuid(),
            sql(now) as _,
        )
        .execute(&mut *transaction)
        .await
        .map_err(Error::from_write)?;
        let task = task_read(&mut transaction, caller.organization.uuid(), caller.task).await?;
        let event = store_event(
            &mut transaction,
            &write,
            caller.task,
            task.event_sequence,
            (events.changed)(&task),
        )
        .await?;
        transaction.commit().await?;
        Ok(Ok(SubtaskChange { task: caller.task, events: vec![event] }))
    }
}

/// Locks the task of a script that asks. Refusal when the script's step does not run, or is about
/// to be stopped.
async fn lock_caller(
    connection: &mut PgConnection,
    caller: ScriptCaller,
) -> Result<Result<LockedCaller, Refusal>, Error> {
    let row = sqlx::query!(
        r#"SELECT t.agent_id, t.parent_id, t.ancestors, t.root_id, t.asked_key_id,
                  (t.turn IS NOT NULL AND t.step ->> 'id' = $3 AND t.step #>> '{state,state}' = 'in_flight' AND NOT t.suspend
                   AND t.cancel_reason IS NULL AND t.rewind_from IS NULL AND t.deleted_at IS NULL) AS "runs!"
           FROM tasks t WHERE t.organization_id = $1 AND t.id = $2
           FOR NO KEY UPDATE"#,
        caller.organization.uuid(),
        caller.task.uuid(),
        caller.step.to_string(),
    )
    .fetch_optional(connection)
    .await?;
    Ok(match row {
        Some(row) if row.runs => Ok(LockedCaller {
            agent: row.agent_id,
            parent: row.parent_id,
            ancestors: row.ancestors,
            root: row.root_id,
            key: row.asked_key_id.map(ApiKeyId::from_uuid),
        }),
        Some(_) | None => Err(Refusal::ScriptOver),
    })
}

/// Accepts a message for a task. No event if it was accepted before.
async fn accept_message(
    connection: &mut PgConnection,
    write: &Write,
    task: TaskId,
    id: MessageId,
    content: Content,
    events: SubtaskEvents,
) -> Result<Result<Option<StoredEvent>, Refusal>, Error> {
    let exists = sqlx::query_scalar!(
        r#"SELECT EXISTS (SELECT FROM messages WHERE id = $1) AS "said!""#,
        id.uuid()
    )
    .fetch_one(&mut *connection)
    .await?;
    if exists {
        return Ok(Ok(None));
    }
    let new = NewUserMessage { id, task, content, interrupts: false };
    match message_insert(connection, write, new, events.message).await {
        Ok(WriteOutcome::Applied { event, .. }) => Ok(Ok(event)),
        Ok(WriteOutcome::Repeated { .. }) => Ok(Ok(None)),
        Err(Error::QueueFull { limit }) => Ok(Err(Refusal::QueueFull { limit })),
        Err(error) => Err(error),
    }
}

/// Stores an event of a task's stream, and counts it in the task's row.
async fn append_event(
    connection: &mut PgConnection,
    write: &Write,
    task: TaskId,
    event: NewEvent,
) -> Result<StoredEvent, Error> {
    let sequence = sqlx::query_scalar!(
        "UPDATE tasks SET event_sequence = event_sequence + 1, revision = revision + 1, updated_at = $2 WHERE id = $1
         RETURNING event_sequence",
        task.uuid(),
        sql(write.now) as _,
    )
    .fetch_one(&mut *connection)
    .await?;
    store_event(connection, write, task, to_u64(sequence), event).await
}

/// Stores an event of a task's stream, with a sequence from its row.
async fn store_event(
    connection: &mut PgConnection,
    write: &Write,
    task: TaskId,
    sequence: u64,
    event: NewEvent,
) -> Result<StoredEvent, Error> {
    let event = write.to_stored_event(task.uuid(), sequence, event);
    sqlx::query!(
        "INSERT INTO events (organization_id, stream_id, sequence, type, payload, step, created_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7)",
        write.organization.uuid(),
        event.stream,
        to_i64(event.sequence),
        event.kind,
        event.payload,
        event.step.map(to_i64) as _,
        sql(write.now) as _,
    )
    .execute(connection)
    .await?;
    Ok(event)
}

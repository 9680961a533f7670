//! Tasks. This module reads them for the API, [`write`] changes them for users, and the other
//! modules serve the reconciler.

mod commit;
mod drive;
mod fork;
mod quarantine;
pub(crate) mod rewind;
mod statement;
pub(crate) mod subtask;
mod unreadable;
pub(crate) mod write;

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;
use uuid::Uuid;

use construct_domain::{
    AgentId, ApprovalId, MessageId, OrganizationId, StepId, TaskId,
    approval::{Approval, ApprovalCall, ApprovalState},
    context::Context,
    money::{Usage, tokens_of_bytes},
    policy::Rule,
    task::{DEFAULT_MAX_TURNS, Phase, Task, TaskError, TurnOutcome, UNREADABLE},
};

use crate::{
    Cursor, Error, Key, Page, Store,
    agent::turns_from_sql,
    event::to_u64,
    task::unreadable::UnreadableColumns,
    time::{from_sql_option, sql_option},
};

pub use commit::{AppendedMessage, CommittedTask, EndedMessage, NewApproval, TaskCommit};
pub use drive::{CostInputs, DueTask, LoadedTask};
pub use fork::NewFork;
pub use quarantine::Quarantine;
pub use rewind::Rewind;
pub use subtask::{
    DescendantTotals, NewSubtask, ScriptCaller, SubtaskChange, SubtaskEvents, SubtaskState,
    SubtaskStatus,
};

pub(crate) const ENTITY: &str = "task";

/// The column of a task's phase.
const PHASE_COLUMN: &str = "phase";

/// A stored task.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredTask {
    /// Its state. [`Task::max_turns`] is the effective limit: the task's, the agent's, or the
    /// default. The length of its transcript is [`Task::last_position`].
    pub state: Task,
    /// The name of [`Task::agent`].
    pub agent_name: String,
    /// The directory its tools may access; empty: a directory of its own.
    pub workspace: String,
    /// Empty until it is set.
    pub title: String,
    /// The task's own limit of model calls per user message; 0: none.
    pub max_turns_override: u32,
    /// Rules for the calls of its scripts, in addition to the agent's policy.
    pub policy: Vec<Rule>,
    /// Facts that are part of every prompt.
    pub pinned: Vec<String>,
    /// The pool of interpreters that runs its scripts. It never changes.
    pub compute: String,
    /// When it entered its phase.
    pub phase_since: Timestamp,
    /// Usage of all its model calls.
    pub usage: Usage,
    /// The number of calls of each tool.
    pub tool_uses: BTreeMap<String, i64>,
    /// The number of queued messages.
    pub queued_count: i64,
    /// Sequence of its newest event.
    pub event_sequence: u64,
    /// The trace of the running turn, or of the last one.
    pub trace_id: Option<String>,
    /// The task that it was forked from, and the last copied message, in that task.
    pub forked_from: Option<(TaskId, MessageId)>,
    /// Its ancestors, the root first. The last one is its parent.
    pub ancestors: Vec<TaskId>,
    /// Its direct subtasks, oldest first.
    pub subtasks: Vec<TaskId>,
    /// Incremented by every change.
    pub revision: i64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
    /// The unreadable columns of its row. Their values are left out, and [`Task::last_error`] says
    /// why.
    pub unreadable: Vec<&'static str>,
}

impl StoredTask {
    /// Its phase. None when this version does not know the stored one.
    pub fn phase(&self) -> Option<Phase> {
        (!self.unreadable.contains(&PHASE_COLUMN)).then_some(self.state.phase)
    }

    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        let key = if key == Key::Name { Key::CreatedAt } else { key };
        Cursor::new(key, self.state.id.uuid(), "", self.created_at, self.updated_at)
    }
}

/// A task to create.
#[derive(Debug, Clone, PartialEq)]
pub struct NewTask {
    /// Its id.
    pub id: TaskId,
    /// The agent.
    pub agent: AgentId,
    /// The directory its tools may access; empty: a directory of its own.
    pub workspace: String,
    /// Empty: generated from the conversation.
    pub title: String,
    /// Model calls per user message; 0: the agent's limit.
    pub max_turns_override: u32,
    /// Rules for the calls of its scripts, in addition to the agent's policy.
    pub policy: Vec<Rule>,
    /// Facts that are part of every prompt.
    pub pinned: Vec<String>,
    /// The pool of interpreters that runs its scripts; none: the agent's.
    pub compute: Option<String>,
}

/// Changes to a task. `None` leaves a field as it is.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TaskChanges {
    /// The agent from the next model call on.
    pub agent: Option<AgentId>,
    /// Empty: generated again from the conversation.
    pub title: Option<String>,
    /// Model calls per user message; 0: the agent's limit.
    pub max_turns_override: Option<u32>,
    /// Replaces all of it.
    pub policy: Option<Vec<Rule>>,
    /// Replaces all pinned facts, from the next model call on.
    pub pinned: Option<Vec<String>>,
}

/// Filter for a list of tasks.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TaskFilter {
    /// Of this agent only.
    pub agent: Option<AgentId>,
    /// In this phase only.
    pub phase: Option<Phase>,
    /// With exactly this workspace.
    pub workspace: Option<String>,
    /// Created after this time.
    pub created_after: Option<Timestamp>,
    /// Created before this time.
    pub created_before: Option<Timestamp>,
    /// Subtasks of this one only.
    pub parent: Option<TaskId>,
}

/// A row, as gateway and reconciler read it. Only the gateway reads `queued_count`; only the
/// reconciler reads `queued`, `queued_interrupts`, `queued_tokens`, `approvals`, `subtasks`,
/// `ended` and `spending`.
struct Row {
    id: Uuid,
    organization_id: Uuid,
    agent_id: Uuid,
    agent_name: String,
    agent_max_turns: i32,
    workspace: String,
    title: String,
    titled: bool,
    max_turns_override: i32,
    policy: Value,
    agent_policy: Value,
    pinned: Vec<String>,
    compute: String,
    phase: String,
    phase_since: Timestamp,
    turn: Option<Value>,
    step: Option<Value>,
    title_step: Option<Uuid>,
    steps: i64,
    last_position: i64,
    next_wake: Option<jiff_sqlx::Timestamp>,
    last_outcome: Option<String>,
    error_code: Option<String>,
    error_message: Option<String>,
    error_time: Option<jiff_sqlx::Timestamp>,
    input_tokens: i64,
    output_tokens: i64,
    cache_read_tokens: i64,
    cache_write_tokens: i64,
    thinking_tokens: i64,
    cost_pico_usd: i64,
    tool_uses: Value,
    suspend: bool,
    cancel_reason: Option<String>,
    cancel_intent: Option<i64>,
    rewind_from: Option<i64>,
    rewind_intent: Option<i64>,
    forked_from: Option<Uuid>,
    forked_from_message: Option<Uuid>,
    deleted: bool,
    event_sequence: i64,
    version: i64,
    revision: i64,
    intents: i64,
    intents_seen: i64,
    trace_id: Option<String>,
    created_at: Timestamp,
    updated_at: Timestamp,
    queued_count: i64,
    queued: Option<Uuid>,
    queued_interrupts: bool,
    retry: Option<Uuid>,
    approvals: Option<Value>,
    root_id: Uuid,
    parent_id: Option<Uuid>,
    ancestors: Vec<Uuid>,
    children: Option<Vec<Uuid>>,
    subtasks: Option<Value>,
    ended: Option<Value>,
    spending: Option<Value>,
    agent_revision: i64,
    context_scale: i32,
    context_tokens: i64,
    compacted_through: i64,
    transcript_tokens: i64,
    compact_at_percent: i32,
    context_window: i64,
    max_output_tokens: i64,
    max_tokens: Option<i64>,
    instructions_bytes: i32,
    queued_tokens: i64,
}

/// An approval, as the statement encodes it.
#[derive(Deserialize)]
struct ApprovalRow {
    id: Uuid,
    script: u32,
    number: u32,
    hash: String,
    state: ApprovalState,
}

impl From<ApprovalRow> for Approval {
    fn from(row: ApprovalRow) -> Self {
        let ApprovalRow { id, script, number, hash, state } = row;
        Self { id: ApprovalId::from_uuid(id), call: ApprovalCall { script, number, hash }, state }
    }
}

impl Row {
    /// Bytes of the pinned facts, which are part of every prompt like the agent's instructions.
    fn pinned_bytes(&self) -> usize {
        self.pinned.iter().map(String::len).sum()
    }

    /// Takes the state out of the row, without unreadable columns.
    fn state(&mut self, unreadable: &mut UnreadableColumns) -> Task {
        let last_error = match (
            self.error_code.take(),
            self.error_message.take(),
            from_sql_option(self.error_time),
        ) {
            (Some(code), Some(message), Some(time)) => Some(TaskError { code, message, time }),
            _ => None,
        };
        let approvals: Option<Vec<ApprovalRow>> =
            unreadable.option("approvals", self.approvals.take());
        let subtasks: Option<Vec<Uuid>> = unreadable.option("subtasks", self.subtasks.take());
        let outcome = self.last_outcome.take();
        let context = Context {
            input_limit: max_input_tokens(
                self.context_window,
                self.max_output_tokens,
                self.max_tokens,
            ),
            compact_at: u32::try_from(self.compact_at_percent).unwrap_or_default(),
            base: tokens_of_bytes(
                usize::try_from(self.instructions_bytes).unwrap_or_default() + self.pinned_bytes(),
            ),
            transcript: self.transcript_tokens,
            queued: self.queued_tokens,
            scale: u32::try_from(self.context_scale).unwrap_or_default(),
            counted: None,
            tokens: self.context_tokens,
            through: self.compacted_through,
            outline: None,
        };
        Task {
            id: TaskId::from_uuid(self.id),
            organization: OrganizationId::from_uuid(self.organization_id),
            agent: AgentId::from_uuid(self.agent_id),
            suspend: self.suspend,
            cancel: self.cancel_reason.take(),
            rewind: self.rewind_from,
            retry: self.retry.map(MessageId::from_uuid),
            max_turns: max_turns([self.max_turns_override, self.agent_max_turns]),
            titled: self.titled,
            phase: unreadable
                .text(PHASE_COLUMN, &self.phase, Phase::parse)
                .unwrap_or(Phase::AwaitInput),
            turn: unreadable.option("turn", self.turn.take()),
            step: unreadable.option("step", self.step.take()),
            title_step: self.title_step.map(StepId::from_uuid),
            steps: to_u64(self.steps),
            last_position: self.last_position,
            next_wake: from_sql_option(self.next_wake),
            last_outcome: outcome
                .and_then(|outcome| unreadable.text("last_outcome", &outcome, TurnOutcome::parse)),
            last_error,
            approvals: approvals.unwrap_or_default().into_iter().map(Approval::from).collect(),
            subtasks: subtasks.map(|tasks| tasks.into_iter().map(TaskId::from_uuid).collect()),
            context,
        }
    }
}

/// The effective limit: the task's, the agent's, or the default.
fn max_turns(said: [i32; 2]) -> u32 {
    said.into_iter().map(turns_from_sql).find(|&turns| turns > 0).unwrap_or(DEFAULT_MAX_TURNS)
}

/// The longest input of a model in tokens, given the longest answer that the agent requests.
fn max_input_tokens(context_window: i64, max_output_tokens: i64, max_tokens: Option<i64>) -> i64 {
    let shorter = max_tokens.filter(|&asked| asked > 0).unwrap_or(i64::MAX);
    Context::input_limit_for(context_window, max_output_tokens.min(shorter))
}

/// The API shows what can be read: users must see a task that cannot be reconciled, and must be
/// able to act on it.
impl From<Row> for StoredTask {
    fn from(mut row: Row) -> Self {
        let mut unreadable = UnreadableColumns::default();
        let mut state = row.state(&mut unreadable);
        let policy = unreadable.json("policy", row.policy);
        let tool_uses = unreadable.json("tool_uses", row.tool_uses);
        if let Some(description) = unreadable.describe() {
            let message = format!("some columns of the task cannot be read: {description}");
            state.last_error =
                Some(TaskError { code: UNREADABLE.to_owned(), message, time: row.updated_at });
        }
        Self {
            state,
            agent_name: row.agent_name,
            workspace: row.workspace,
            title: row.title,
            max_turns_override: turns_from_sql(row.max_turns_override),
            policy,
            pinned: row.pinned,
            compute: row.compute,
            phase_since: row.phase_since,
            usage: Usage {
                input_tokens: row.input_tokens,
                output_tokens: row.output_tokens,
                cache_read_tokens: row.cache_read_tokens,
                cache_write_tokens: row.cache_write_tokens,
                thinking_tokens: row.thinking_tokens,
                cost_pico_usd: row.cost_pico_usd,
            },
            tool_uses,
            queued_count: row.queued_count,
            event_sequence: to_u64(row.event_sequence),
            trace_id: row.trace_id,
            forked_from: row
                .forked_from
                .zip(row.forked_from_message)
                .map(|(task, message)| (TaskId::from_uuid(task), MessageId::from_uuid(message))),
            ancestors: row.ancestors.into_iter().map(TaskId::from_uuid).collect(),
            subtasks: row.children.unwrap_or_default().into_iter().map(TaskId::from_uuid).collect(),
            revision: row.revision,
            created_at: row.created_at,
            updated_at: row.updated_at,
            unreadable: unreadable.columns(),
        }
    }
}

/// Reads tasks as [`Row`]s. The first list selects the columns that only one side reads.
macro_rules! select {
    ([$($queue:literal)+], [$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            crate::task::Row,
            r#"SELECT t.id, t.organization_id, t.agent_id, a.name AS agent_name, a.max_turns AS agent_max_turns, t.workspace, t.title,
                    t.titled, t.max_turns_override, t.policy, a.policy AS agent_policy, t.pinned, t.compute, t.phase, t.phase_since, t.turn, t.step, t.title_step, t.steps, t.last_position,
                    t.next_wake, t.last_outcome, t.error_code, t.error_message, t.error_time, t.input_tokens, t.output_tokens,
                    t.cache_read_tokens, t.cache_write_tokens, t.thinking_tokens, t.cost_pico_usd, t.tool_uses, t.suspend, t.cancel_reason,
                    t.cancel_intent, t.rewind_from, t.rewind_intent, t.forked_from, t.forked_from_message, t.deleted_at IS NOT NULL AS "deleted!", t.event_sequence, t.version, t.revision, t.intents,
                    t.intents_seen, t.trace_id, t.root_id, t.parent_id, t.ancestors, a.revision AS agent_revision, t.created_at, t.updated_at,
                    t.context_scale, t.context_tokens, t.compacted_through, t.transcript_tokens, a.compact_at_percent,
                    w.context_window, w.max_output_tokens, (a.parameters ->> 'max_tokens')::bigint AS max_tokens,
                    octet_length(a.instructions) AS "instructions_bytes!",
                    CASE WHEN t.retry_intent > t.intents_seen THEN (
                        SELECT r.id FROM messages r
                        WHERE r.task_id = t.id AND r.source = 'user' AND r.position IS NOT NULL AND r.superseded_at IS NULL
                        ORDER BY r.position DESC LIMIT 1
                    ) END AS retry, "# $(+ $queue)+ + r#"
             FROM tasks t
             JOIN agents a ON a.organization_id = t.organization_id AND a.id = t.agent_id
             JOIN models w ON w.organization_id = a.organization_id AND w.id = a.model_id "# $(+ $tail)+,
            $($argument),*
        )
    };
}
use select;

/// [`select`] for the gateway: with the length of the queue.
macro_rules! select_counted {
    ([$($tail:literal)+], $($argument:expr),* $(,)?) => {
        crate::task::select!(
            [r#"(SELECT count(*) FROM messages q WHERE q.task_id = t.id AND q.position IS NULL AND q.processed_at IS NULL)
                    AS "queued_count!", NULL::uuid AS queued, false AS "queued_interrupts!", 0::bigint AS "queued_tokens!",
                    NULL::jsonb AS approvals, NULL::jsonb AS spending, NULL::jsonb AS subtasks,
                    NULL::jsonb AS ended,
                    ARRAY(SELECT c.id FROM tasks c WHERE c.parent_id = t.id AND c.deleted_at IS NULL ORDER BY c.created_at, c.id)
                    AS children"#],
            [$($tail)+],
            $($argument),*
        )
    };
}
use select_counted;

/// Lists tasks. The first literal is a condition on `$10`, the parent.
macro_rules! list {
    ($of:literal, $organization:expr, $filter:expr, $page:expr, $key:literal, $comparison:literal, $direction:literal) => {{
        let (value, id) = $page.after_time()?;
        select_counted!(
            ["WHERE t.organization_id = $1 AND t.deleted_at IS NULL
               AND ($2::uuid IS NULL OR t.agent_id = $2)
               AND ($3::text IS NULL OR t.phase = $3)
               AND ($4::text IS NULL OR t.workspace = $4)
               AND ($5::timestamptz IS NULL OR t.created_at > $5)
               AND ($6::timestamptz IS NULL OR t.created_at < $6)
               AND " $of " AND (" $key ", t.id) " $comparison " ($7, $8)
             ORDER BY " $key $direction ", t.id" $direction " LIMIT $9"],
            $organization.uuid(),
            $filter.agent.map(AgentId::uuid) as _,
            $filter.phase.map(Phase::as_str) as _,
            $filter.workspace as _,
            sql_option($filter.created_after) as _,
            sql_option($filter.created_before) as _,
            value,
            id,
            $page.limit(),
            $filter.parent.map(TaskId::uuid) as _,
        )
    }};
}

/// Lists tasks with one of four statements, according to the order of the page.
macro_rules! list_ordered {
    ($of:literal, $store:expr, $organization:expr, $filter:expr, $page:expr) => {
        match ($page.order.key, $page.order.descending) {
            (Key::CreatedAt | Key::Name, false) => {
                list!($of, $organization, $filter, $page, "t.created_at", ">", "")
                    .fetch_all(&$store.pool)
                    .await
            }
            (Key::CreatedAt | Key::Name, true) => {
                list!($of, $organization, $filter, $page, "t.created_at", "<", " DESC")
                    .fetch_all(&$store.pool)
                    .await
            }
            (Key::UpdatedAt, false) => {
                list!($of, $organization, $filter, $page, "t.updated_at", ">", "")
                    .fetch_all(&$store.pool)
                    .await
            }
            (Key::UpdatedAt, true) => {
                list!($of, $organization, $filter, $page, "t.updated_at", "<", " DESC")
                    .fetch_all(&$store.pool)
                    .await
            }
        }
    };
}

impl Store {
    /// A task by id.
    ///
    /// # Errors
    /// [`Error::NotFound`], also for a deleted task.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_get(
        &self,
        organization: OrganizationId,
        id: TaskId,
    ) -> Result<StoredTask, Error> {
        select_counted!(
            ["WHERE t.organization_id = $1 AND t.id = $2 AND t.deleted_at IS NULL"],
            organization.uuid(),
            id.uuid(),
        )
        .fetch_optional(&self.pool)
        .await?
        .map(StoredTask::from)
        .ok_or(Error::NotFound { what: ENTITY })
    }

    /// A page of tasks. They have no name: [`Key::Name`] is taken as [`Key::CreatedAt`].
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_list(
        &self,
        organization: OrganizationId,
        filter: &TaskFilter,
        page: &Page,
    ) -> Result<Vec<StoredTask>, Error> {
        // A separate statement, which PostgreSQL can plan for the few subtasks of one task, however
        // many tasks the organization has.
        let rows = if filter.parent.is_some() {
            list_ordered!("t.parent_id = $10", self, organization, filter, page)
        } else {
            list_ordered!("$10::uuid IS NULL", self, organization, filter, page)
        };
        Ok(rows?.into_iter().map(StoredTask::from).collect())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use sqlx::Execute as _;

    use super::*;

    /// The statement of [`Store::task_list`] for the subtasks of one task, for tests of its plan.
    pub(crate) fn statement_of_subtasks() -> Result<String, Error> {
        let page = Page { limit: 100, order: crate::Order::default(), after: None };
        let (organization, filter) = (OrganizationId::LOCAL, TaskFilter::default());
        let statement =
            list!("t.parent_id = $10", organization, filter, page, "t.created_at", ">", "");
        Ok(statement.sql().as_str().to_owned())
    }
}

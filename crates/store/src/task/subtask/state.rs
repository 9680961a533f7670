//! States of subtasks, for the scripts that wait for them.

use std::collections::{HashMap, HashSet};

use construct_domain::{
    OrganizationId, TaskId, message::Content, subtask::Refusal, task::TurnOutcome,
};
use serde_json::Value;
use uuid::Uuid;

use crate::{Error, Store};

/// The status of a subtask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubtaskStatus {
    /// It is active, or has a queued message.
    Running,
    /// It has work to do, but is suspended.
    Suspended,
    /// It is idle; the outcome of its last turn.
    Ended(TurnOutcome),
    /// It was deleted.
    Deleted,
}

/// The state of a subtask, for its parent.
#[derive(Debug, Clone, PartialEq)]
pub struct SubtaskState {
    /// The subtask.
    pub task: TaskId,
    /// The name of its agent; empty when the subtask was purged.
    pub agent: String,
    /// Its title.
    pub title: String,
    /// Its status.
    pub status: SubtaskStatus,
    /// The last answer of its agent.
    pub answer: Content,
    /// Its last error.
    pub error: String,
    /// The cost of it and its descendants, in 10⁻¹² US dollars.
    pub cost_pico_usd: i64,
}

struct Row {
    id: Uuid,
    agent: String,
    title: String,
    suspend: bool,
    last_outcome: Option<String>,
    error_message: Option<String>,
    deleted: bool,
    at_work: bool,
    answer: Option<Value>,
    cost: i64,
}

impl TryFrom<Row> for SubtaskState {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        let status = match (row.deleted, row.at_work, row.suspend) {
            (true, ..) => SubtaskStatus::Deleted,
            (_, true, true) => SubtaskStatus::Suspended,
            (_, true, false) => SubtaskStatus::Running,
            // Without an outcome, its first message was deleted before it was answered.
            (_, false, _) => SubtaskStatus::Ended(row.last_outcome.as_deref().map_or(
                Ok(TurnOutcome::Cancelled),
                |outcome| {
                    TurnOutcome::parse(outcome)
                        .ok_or_else(|| Error::internal(format!("unknown outcome `{outcome}`")))
                },
            )?),
        };
        let answer = row.answer.map(serde_json::from_value).transpose().map_err(Error::internal)?;
        Ok(Self {
            task: TaskId::from_uuid(row.id),
            agent: row.agent,
            title: row.title,
            status,
            answer: answer.unwrap_or_default(),
            error: row.error_message.unwrap_or_default(),
            cost_pico_usd: row.cost,
        })
    }
}

/// Reads the subtasks of `$2` that the rest of the statement selects. Reads their descendants once,
/// level by level, and nothing else of their tree.
macro_rules! states {
    ([$($picked:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            Row,
            r#"WITH RECURSIVE picked AS MATERIALIZED (
                   SELECT c.id, c.cost_pico_usd FROM tasks c
                   WHERE c.organization_id = $1 AND c.parent_id = $2 "# $(+ $picked)+ + r#"
               ), below AS (
                   SELECT p.id AS top, p.id, p.cost_pico_usd FROM picked p
                   UNION ALL
                   SELECT b.top, d.id, d.cost_pico_usd FROM below b JOIN tasks d ON d.parent_id = b.id AND d.parent_id IS NOT NULL
               ), costs AS (
                   SELECT b.top, least(sum(b.cost_pico_usd), 9223372036854775807)::bigint AS cost FROM below b GROUP BY b.top
               )
               SELECT c.id, a.name AS agent, c.title, c.suspend, c.last_outcome, c.error_message,
                      c.deleted_at IS NOT NULL AS "deleted!",
                      c.turn IS NOT NULL OR EXISTS (
                          SELECT FROM messages q WHERE q.task_id = c.id AND q.position IS NULL AND q.processed_at IS NULL) AS "at_work!",
                      (SELECT m.content FROM messages m
                       WHERE m.task_id = c.id AND m.position IS NOT NULL AND m.source = 'assistant' AND m.superseded_at IS NULL
                       ORDER BY m.position DESC LIMIT 1) AS answer,
                      s.cost AS "cost!"
               FROM costs s
               JOIN tasks c ON c.id = s.top
               JOIN agents a ON a.organization_id = c.organization_id AND a.id = c.agent_id
               ORDER BY c.created_at, c.id"#,
            $($argument),*
        )
    };
}

macro_rules! states_of {
    ($organization:expr, $parent:expr, $ids:expr) => {
        states!(["AND c.id = ANY ($3)"], $organization.uuid(), $parent.uuid(), $ids)
    };
}

macro_rules! states_page {
    ($organization:expr, $parent:expr, $after:expr, $limit:expr) => {
        states!(
            ["AND c.deleted_at IS NULL
               AND ($3::uuid IS NULL OR (c.created_at, c.id) > (SELECT l.created_at, l.id FROM tasks l WHERE l.id = $3))
             ORDER BY c.created_at, c.id LIMIT $4"],
            $organization.uuid(),
            $parent.uuid(),
            $after as _,
            $limit,
        )
    };
}

/// Totals over the descendants of a task.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DescendantTotals {
    /// The number of descendants.
    pub count: i64,
    /// The number of those that are in a turn or have a queued message, and are not suspended.
    pub at_work: i64,
    /// Their cost, in 10⁻¹² US dollars.
    pub cost_pico_usd: i64,
}

/// Reads the descendants of `$2`, level by level, and nothing else of its tree.
macro_rules! descendants {
    ($organization:expr, $task:expr) => {
        sqlx::query_as!(
            DescendantTotals,
            r#"WITH RECURSIVE below AS (
                   SELECT c.id FROM tasks c WHERE c.organization_id = $1 AND c.parent_id = $2
                   UNION ALL
                   SELECT d.id FROM below b JOIN tasks d ON d.parent_id = b.id AND d.parent_id IS NOT NULL
               )
               SELECT count(*) AS "count!",
                      count(*) FILTER (WHERE t.phase <> 'suspended' AND (t.turn IS NOT NULL OR EXISTS (
                          SELECT FROM messages q WHERE q.task_id = t.id AND q.position IS NULL AND q.processed_at IS NULL))) AS "at_work!",
                      least(coalesce(sum(t.cost_pico_usd), 0), 9223372036854775807)::bigint AS "cost_pico_usd!"
               FROM tasks t WHERE t.id = ANY (ARRAY (SELECT id FROM below)) AND t.deleted_at IS NULL"#,
            $organization.uuid(),
            $task.uuid(),
        )
    };
}

impl Store {
    /// Totals over the descendants of a task; zero when the task does not exist.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_descendants(
        &self,
        organization: OrganizationId,
        task: TaskId,
    ) -> Result<DescendantTotals, Error> {
        Ok(descendants!(organization, task).fetch_one(&self.pool).await?)
    }

    /// The states of these subtasks of a task, in the given order.
    ///
    /// # Errors
    /// [`Error::Unavailable`]; [`Error::Internal`] when a row cannot be read.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn subtasks(
        &self,
        organization: OrganizationId,
        parent: TaskId,
        which: &[TaskId],
    ) -> Result<Result<Vec<SubtaskState>, Refusal>, Error> {
        let ids: Vec<Uuid> = which.iter().map(|task| task.uuid()).collect();
        let rows = states_of!(organization, parent, &ids).fetch_all(&self.pool).await?;
        let found: Vec<SubtaskState> =
            rows.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?;
        let found: HashMap<TaskId, SubtaskState> =
            found.into_iter().map(|state| (state.task, state)).collect();
        let missing: Vec<Uuid> =
            which.iter().filter(|task| !found.contains_key(task)).map(|task| task.uuid()).collect();
        let purged = if missing.is_empty() {
            HashSet::new()
        } else {
            self.purged_subtasks(organization, &missing).await?
        };
        let mut states = Vec::with_capacity(which.len());
        for task in which {
            match found.get(task) {
                Some(state) => states.push(state.clone()),
                None if purged.contains(task) => states.push(SubtaskState {
                    task: *task,
                    agent: String::new(),
                    title: String::new(),
                    status: SubtaskStatus::Deleted,
                    answer: Content::default(),
                    error: String::new(),
                    cost_pico_usd: 0,
                }),
                None => return Ok(Err(Refusal::NotASubtask(task.to_string()))),
            }
        }
        Ok(Ok(states))
    }

    /// The states of a task's subtasks after `after`: at most `limit`, oldest first.
    ///
    /// # Errors
    /// [`Error::Unavailable`]; [`Error::Internal`] when a row cannot be read.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn subtask_list(
        &self,
        organization: OrganizationId,
        parent: TaskId,
        after: Option<TaskId>,
        limit: u32,
    ) -> Result<Vec<SubtaskState>, Error> {
        let after = after.map(TaskId::uuid);
        let rows = states_page!(organization, parent, after, i64::from(limit))
            .fetch_all(&self.pool)
            .await?;
        rows.into_iter().map(TryInto::try_into).collect()
    }

    /// Whether all of these are subtasks of a task and at least one is active, which is all that a
    /// continuing wait needs to know. Does not read their trees.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn subtasks_at_work(
        &self,
        organization: OrganizationId,
        parent: TaskId,
        which: &[TaskId],
    ) -> Result<bool, Error> {
        let mut ids: Vec<Uuid> = which.iter().map(|task| task.uuid()).collect();
        ids.sort_unstable();
        ids.dedup();
        let at_work = sqlx::query_scalar!(
            r#"SELECT count(*) = cardinality($3::uuid[]) AND coalesce(bool_or(c.deleted_at IS NULL AND (c.turn IS NOT NULL OR EXISTS (
                      SELECT FROM messages q WHERE q.task_id = c.id AND q.position IS NULL AND q.processed_at IS NULL))), false) AS "at_work!"
               FROM tasks c WHERE c.organization_id = $1 AND c.parent_id = $2 AND c.id = ANY ($3)"#,
            organization.uuid(),
            parent.uuid(),
            &ids,
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(at_work)
    }

    /// Those of these tasks that existed and were purged.
    async fn purged_subtasks(
        &self,
        organization: OrganizationId,
        tasks: &[Uuid],
    ) -> Result<HashSet<TaskId>, Error> {
        let purged = sqlx::query_scalar!(
            r#"SELECT e.stream_id FROM events e
               WHERE e.organization_id = $1 AND e.stream_id = ANY ($2) AND e.type = 'task.deleted'
                 AND NOT EXISTS (SELECT FROM tasks t WHERE t.id = e.stream_id)"#,
            organization.uuid(),
            tasks,
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(purged.into_iter().map(TaskId::from_uuid).collect())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use sqlx::Execute as _;

    use super::*;

    /// The statement of [`Store::task_descendants`], for tests of its plan.
    pub(crate) fn descendants_statement() -> String {
        let (organization, task) = (OrganizationId::LOCAL, TaskId::from_uuid(Uuid::nil()));
        descendants!(organization, task).sql().as_str().to_owned()
    }

    /// The statements of [`Store::subtasks`] and [`Store::subtask_list`], for tests of their plans.
    pub(crate) fn statements() -> [String; 2] {
        let (organization, parent) = (OrganizationId::LOCAL, TaskId::from_uuid(Uuid::nil()));
        let ids: Vec<Uuid> = Vec::new();
        let states = states_of!(organization, parent, &ids).sql().as_str().to_owned();
        [states, states_page!(organization, parent, None::<Uuid>, 1_i64).sql().as_str().to_owned()]
    }
}

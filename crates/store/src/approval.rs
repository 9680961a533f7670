//! Approvals: decisions of people about calls of scripts.
//!
//! The reconciler creates and closes them in [`Store::task_commit`]. A person's decision is an
//! intent that the gateway writes here.

use jiff::Timestamp;
use uuid::Uuid;

use construct_domain::{
    ApprovalId, OrganizationId, StepId, TaskId,
    approval::{ApprovalCall, ApprovalState},
};

use crate::{
    Cursor, Error, Key, Page, Store, Write, WriteOutcome, WriteOutput,
    event::to_u64,
    text,
    time::from_sql_option,
    write::{Writer, begin},
};

const ENTITY: &str = "approval";

/// A stored approval.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredApproval {
    /// Its id.
    pub id: ApprovalId,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// The task.
    pub task: TaskId,
    /// The step that runs the script.
    pub step: StepId,
    /// The call.
    pub call: ApprovalCall,
    /// The tool.
    pub tool: String,
    /// The canonical arguments as JSON, possibly truncated.
    pub arguments: String,
    /// Size of the complete arguments, in bytes.
    pub arguments_size: u64,
    /// Why the call needs an approval.
    pub reason: String,
    /// Its state.
    pub state: ApprovalState,
    /// The decider; empty when there was no decision.
    pub decided_by: String,
    /// The decider's comment, or why it was closed.
    pub comment: String,
    /// When it was decided or closed.
    pub decided_at: Option<Timestamp>,
    /// The deadline for a decision.
    pub expires_at: Timestamp,
    /// Incremented by every change.
    pub revision: i64,
    /// When it was requested.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

impl StoredApproval {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        let key = if key == Key::Name { Key::CreatedAt } else { key };
        Cursor::new(key, self.id.uuid(), "", self.created_at, self.updated_at)
    }
}

/// Filter for a list of approvals.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ApprovalFilter {
    /// Of this task only.
    pub task: Option<TaskId>,
    /// In this state only.
    pub state: Option<ApprovalState>,
    /// Of this task and its descendants only.
    pub tree: Option<TaskId>,
}

/// A person's decision about a call.
#[derive(Debug, Clone, PartialEq)]
pub struct ApprovalDecision {
    /// Whether the call is approved.
    pub approved: bool,
    /// The decider.
    pub decided_by: String,
    /// The decider's comment.
    pub comment: String,
    /// The hash of the arguments that the decider saw; none: decide regardless of the arguments.
    pub arguments_hash: Option<String>,
}

pub(crate) struct Row {
    id: Uuid,
    organization_id: Uuid,
    task_id: Uuid,
    step_id: Uuid,
    script: i64,
    number: i64,
    tool: String,
    arguments: String,
    arguments_size: i64,
    arguments_hash: String,
    reason: String,
    state: String,
    decided_by: String,
    words: String,
    decided_at: Option<jiff_sqlx::Timestamp>,
    expires_at: Timestamp,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl TryFrom<Row> for StoredApproval {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        let number = |number: i64| u32::try_from(number).map_err(Error::internal);
        Ok(Self {
            id: ApprovalId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            task: TaskId::from_uuid(row.task_id),
            step: StepId::from_uuid(row.step_id),
            call: ApprovalCall {
                script: number(row.script)?,
                number: number(row.number)?,
                hash: row.arguments_hash,
            },
            tool: row.tool,
            arguments: row.arguments,
            arguments_size: to_u64(row.arguments_size),
            reason: row.reason,
            state: ApprovalState::parse(&row.state)
                .ok_or_else(|| Error::internal(format!("unknown state `{}`", row.state)))?,
            decided_by: row.decided_by,
            comment: row.words,
            decided_at: from_sql_option(row.decided_at),
            expires_at: row.expires_at,
            revision: row.revision,
            created_at: row.created_at,
            updated_at: row.updated_at,
        })
    }
}

macro_rules! select {
    ([$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            Row,
            "SELECT p.id, p.organization_id, p.task_id, p.step_id, p.script, p.number, p.tool, p.arguments, p.arguments_size,
                    p.arguments_hash, p.reason, p.state, p.decided_by, p.words, p.decided_at, p.expires_at, p.revision,
                    p.created_at, p.updated_at
             FROM approvals p " $(+ $tail)+,
            $($argument),*
        )
    };
}

macro_rules! list {
    ($store:expr, $organization:expr, $filter:expr, $page:expr, $key:literal, $comparison:literal, $direction:literal) => {{
        let (value, id) = $page.after_time()?;
        select!(
            ["JOIN tasks t ON t.organization_id = p.organization_id AND t.id = p.task_id
             WHERE p.organization_id = $1 AND t.deleted_at IS NULL
               AND ($2::uuid IS NULL OR p.task_id = $2)
               AND ($3::text IS NULL OR p.state = $3)
               AND (" $key ", p.id) " $comparison " ($4, $5)
             ORDER BY " $key $direction ", p.id" $direction " LIMIT $6"],
            $organization.uuid(),
            $filter.task.map(TaskId::uuid),
            $filter.state.map(ApprovalState::as_str),
            value,
            id,
            $page.limit(),
        )
        .fetch_all(&$store.pool)
        .await?
    }};
}

/// Lists the approvals of a task and its descendants. Reads the tree level by level, then the
/// approvals of exactly its tasks, so that the cost does not grow with the organization.
macro_rules! list_of_tree {
    ($organization:expr, $tree:expr, $filter:expr, $page:expr, $key:literal, $comparison:literal, $direction:literal) => {{
        let (value, id) = $page.after_time()?;
        sqlx::query_as!(
            Row,
            "WITH RECURSIVE below AS (
                 SELECT r.id FROM tasks r WHERE r.organization_id = $1 AND r.id = $2
                 UNION ALL
                 SELECT c.id FROM below b JOIN tasks c ON c.parent_id = b.id AND c.parent_id IS NOT NULL
             ), found AS MATERIALIZED (
                 SELECT f.* FROM approvals f
                 WHERE f.task_id = ANY (ARRAY (SELECT id FROM below)) AND f.organization_id = $1
                   AND ($3::uuid IS NULL OR f.task_id = $3)
                   AND ($4::text IS NULL OR f.state = $4)
             )
             SELECT p.id, p.organization_id, p.task_id, p.step_id, p.script, p.number, p.tool, p.arguments, p.arguments_size,
                    p.arguments_hash, p.reason, p.state, p.decided_by, p.words, p.decided_at, p.expires_at, p.revision,
                    p.created_at, p.updated_at
             FROM found p
             JOIN tasks t ON t.organization_id = p.organization_id AND t.id = p.task_id
             WHERE t.deleted_at IS NULL AND (" + $key + ", p.id) " + $comparison + " ($5, $6)
             ORDER BY " + $key + $direction + ", p.id" + $direction + " LIMIT $7",
            $organization.uuid(),
            $tree.uuid(),
            $filter.task.map(TaskId::uuid) as _,
            $filter.state.map(ApprovalState::as_str) as _,
            value,
            id,
            $page.limit(),
        )
    }};
}

impl Store {
    /// An approval by id.
    ///
    /// # Errors
    /// [`Error::NotFound`], also of a deleted task's.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn approval_get(
        &self,
        organization: OrganizationId,
        id: ApprovalId,
    ) -> Result<StoredApproval, Error> {
        select!(
            ["JOIN tasks t ON t.organization_id = p.organization_id AND t.id = p.task_id
             WHERE p.organization_id = $1 AND p.id = $2 AND t.deleted_at IS NULL"],
            organization.uuid(),
            id.uuid(),
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
    }

    /// A page of approvals. They have no name: [`Key::Name`] is taken as [`Key::CreatedAt`].
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn approval_list(
        &self,
        organization: OrganizationId,
        filter: &ApprovalFilter,
        page: &Page,
    ) -> Result<Vec<StoredApproval>, Error> {
        if let Some(tree) = filter.tree {
            return self.approval_list_of_tree(organization, tree, filter, page).await;
        }
        let rows = match (page.order.key, page.order.descending) {
            (Key::CreatedAt | Key::Name, false) => {
                list!(self, organization, filter, page, "p.created_at", ">", "")
            }
            (Key::CreatedAt | Key::Name, true) => {
                list!(self, organization, filter, page, "p.created_at", "<", " DESC")
            }
            (Key::UpdatedAt, false) => {
                list!(self, organization, filter, page, "p.updated_at", ">", "")
            }
            (Key::UpdatedAt, true) => {
                list!(self, organization, filter, page, "p.updated_at", "<", " DESC")
            }
        };
        rows.into_iter().map(TryInto::try_into).collect()
    }

    async fn approval_list_of_tree(
        &self,
        organization: OrganizationId,
        tree: TaskId,
        filter: &ApprovalFilter,
        page: &Page,
    ) -> Result<Vec<StoredApproval>, Error> {
        let pool = &self.pool;
        let rows = match (page.order.key, page.order.descending) {
            (Key::CreatedAt | Key::Name, false) => {
                list_of_tree!(organization, tree, filter, page, "p.created_at", ">", "")
                    .fetch_all(pool)
                    .await
            }
            (Key::CreatedAt | Key::Name, true) => {
                list_of_tree!(organization, tree, filter, page, "p.created_at", "<", " DESC")
                    .fetch_all(pool)
                    .await
            }
            (Key::UpdatedAt, false) => {
                list_of_tree!(organization, tree, filter, page, "p.updated_at", ">", "")
                    .fetch_all(pool)
                    .await
            }
            (Key::UpdatedAt, true) => {
                list_of_tree!(organization, tree, filter, page, "p.updated_at", "<", " DESC")
                    .fetch_all(pool)
                    .await
            }
        };
        rows?.into_iter().map(TryInto::try_into).collect()
    }

    /// All approvals of a step, in the order of its calls.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn approvals_of_step(&self, step: StepId) -> Result<Vec<StoredApproval>, Error> {
        select!(["WHERE p.step_id = $1 ORDER BY p.script, p.number"], step.uuid())
            .fetch_all(&self.pool)
            .await?
            .into_iter()
            .map(TryInto::try_into)
            .collect()
    }

    /// Stores a person's decision. The reconciler acts on it.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::ApprovalClosed`]; [`Error::Conflict`] when the person saw
    /// other arguments.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn approval_decide(
        &self,
        write: &Write,
        id: ApprovalId,
        decision: ApprovalDecision,
        render: impl FnOnce(&StoredApproval) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredApproval>, Error> {
        let mut writer = begin!(self, write);
        // Increments the version too: a concurrent commit may be about to close the approval.
        let task = sqlx::query!(
            "UPDATE tasks t SET
                 intents = t.intents + 1,
                 intent_at = CASE WHEN t.intents > t.intents_seen THEN t.intent_at ELSE $3 END,
                 version = t.version + 1,
                 event_sequence = t.event_sequence + 1,
                 revision = t.revision + 1,
                 updated_at = $3
             FROM approvals p
             WHERE p.organization_id = $1 AND p.id = $2 AND t.organization_id = $1 AND t.id = p.task_id AND t.deleted_at IS NULL
             RETURNING t.id, t.event_sequence",
            writer.organization(),
            id.uuid(),
            writer.now(),
        )
        .fetch_optional(&mut *writer.transaction)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?;
        let state =
            if decision.approved { ApprovalState::Approved } else { ApprovalState::Rejected };
        let done = sqlx::query!(
            "UPDATE approvals SET
                 state = $3, decided_by = $4, words = $5, decided_at = $6, updated_at = $6, revision = revision + 1
             WHERE organization_id = $1 AND id = $2 AND state = 'pending' AND expires_at > $6
               AND ($7::text IS NULL OR arguments_hash = $7)",
            writer.organization(),
            id.uuid(),
            state.as_str(),
            &*text::clean(&decision.decided_by),
            &*text::clean(&decision.comment),
            writer.now(),
            decision.arguments_hash,
        )
        .execute(&mut *writer.transaction)
        .await?;
        let entity = approval_reload(&mut writer, id).await?;
        if done.rows_affected() == 0 {
            // The rollback undoes the increments above.
            return Err(match entity.state {
                // Expired, but not closed yet.
                ApprovalState::Pending if entity.expires_at <= Timestamp::from(writer.now()) => {
                    Error::ApprovalClosed {
                        state: ApprovalState::Expired,
                        by: String::new(),
                        at: Some(entity.expires_at),
                    }
                }
                ApprovalState::Pending => Error::Conflict,
                state => {
                    Error::ApprovalClosed { state, by: entity.decided_by, at: entity.decided_at }
                }
            });
        }
        writer
            .finish_on_task(TaskId::from_uuid(task.id), to_u64(task.event_sequence), entity, render)
            .await
    }
}

async fn approval_reload(writer: &mut Writer<'_>, id: ApprovalId) -> Result<StoredApproval, Error> {
    select!(["WHERE p.organization_id = $1 AND p.id = $2"], writer.organization(), id.uuid())
        .fetch_optional(&mut *writer.transaction)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
}

#[cfg(test)]
pub(crate) mod tests {
    use sqlx::Execute as _;

    use super::*;

    /// The statement of [`Store::approval_list`] about a tree, for tests of its plan.
    pub(crate) fn statement_of_tree() -> Result<String, Error> {
        let (organization, tree) = (OrganizationId::LOCAL, TaskId::from_uuid(Uuid::nil()));
        let (filter, page) = (
            ApprovalFilter::default(),
            Page { limit: 1, order: crate::Order::default(), after: None },
        );
        let statement =
            list_of_tree!(organization, tree, filter, page, "p.created_at", "<", " DESC");
        Ok(statement.sql().as_str().to_owned())
    }
}

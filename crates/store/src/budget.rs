//! Budgets, as the API shows and changes them. The functions in `migrations/0012_money.sql` write
//! their spent and reserved sums.

use jiff::Timestamp;
use uuid::Uuid;

use construct_domain::{
    AgentId, BudgetId, OrganizationId, TaskId,
    budget::{Period, Scope},
};

use crate::{
    Cursor, Error, Key, Page, Store, Write, WriteOutcome, WriteOutput, time,
    write::{Writer, begin},
};

const ENTITY: &str = "budget";

/// A limit on spending. Amounts are in 10⁻¹² US dollars.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Budget {
    /// Its id.
    pub id: BudgetId,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// The scope whose spending it limits.
    pub scope: Scope,
    /// The agent's name, when it is an agent's.
    pub agent_name: String,
    /// The period that the limit applies to.
    pub period: Period,
    /// The amount.
    pub limit: i64,
    /// Start of the current period; none when it has no start.
    pub since: Option<Timestamp>,
    /// Spent in the current period.
    pub spent: i64,
    /// Reserved for calls in flight.
    pub reserved: i64,
    /// Incremented by every change of the limit.
    pub revision: i64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When its limit last changed.
    pub updated_at: Timestamp,
}

impl Budget {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        let key = if key == Key::Name { Key::CreatedAt } else { key };
        Cursor::new(key, self.id.uuid(), "", self.created_at, self.updated_at)
    }
}

/// A budget to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewBudget {
    /// Its id.
    pub id: BudgetId,
    /// The scope whose spending it limits.
    pub scope: Scope,
    /// The period that the limit applies to.
    pub period: Period,
    /// The amount.
    pub limit: i64,
}

/// Filter for a list of budgets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BudgetFilter {
    /// Of this agent only.
    pub agent: Option<AgentId>,
    /// Of this task only.
    pub task: Option<TaskId>,
}

struct Row {
    id: Uuid,
    organization_id: Uuid,
    agent_id: Option<Uuid>,
    agent_name: Option<String>,
    task_id: Option<Uuid>,
    token_id: Option<String>,
    period: String,
    limit_pico_usd: i64,
    since: Timestamp,
    spent: i64,
    reserved_pico_usd: i64,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl TryFrom<Row> for Budget {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        let scope = match (row.agent_id, row.task_id, row.token_id) {
            (Some(agent), ..) => Scope::Agent(AgentId::from_uuid(agent)),
            (_, Some(task), _) => Scope::Task(TaskId::from_uuid(task)),
            (_, _, Some(token)) => Scope::Token(token),
            (None, None, None) => Scope::Organization,
        };
        let period = Period::parse(&row.period)
            .ok_or_else(|| Error::internal(format!("unknown period `{}`", row.period)))?;
        Ok(Self {
            id: BudgetId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            scope,
            agent_name: row.agent_name.unwrap_or_default(),
            period,
            limit: row.limit_pico_usd,
            since: matches!(period, Period::Day | Period::Month).then_some(row.since),
            spent: row.spent,
            reserved: row.reserved_pico_usd,
            revision: row.revision,
            created_at: row.created_at,
            updated_at: row.updated_at,
        })
    }
}

/// Reads budgets at the time `$2`: a new period may have begun since the last call.
macro_rules! select {
    ([$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            Row,
            r#"SELECT b.id, b.organization_id, b.agent_id, a.name AS "agent_name?", b.task_id, b.token_id, b.period, b.limit_pico_usd,
                    greatest(b.window_start, budgets_window(b.period, $2)) AS "since!: jiff_sqlx::Timestamp",
                    CASE WHEN budgets_window(b.period, $2) > b.window_start THEN 0 ELSE b.spent_pico_usd END AS "spent!",
                    b.reserved_pico_usd, b.revision, b.created_at, b.updated_at
             FROM budgets b
             LEFT JOIN agents a ON a.organization_id = b.organization_id AND a.id = b.agent_id "# $(+ $tail)+,
            $($argument),*
        )
    };
}

macro_rules! list {
    ($store:expr, $organization:expr, $filter:expr, $page:expr, $now:expr, $key:literal, $comparison:literal, $direction:literal) => {{
        let (value, id) = $page.after_time()?;
        select!(
            ["WHERE b.organization_id = $1
               AND ($3::uuid IS NULL OR b.agent_id = $3) AND ($4::uuid IS NULL OR b.task_id = $4)
               AND (" $key ", b.id) " $comparison " ($5, $6)
             ORDER BY " $key $direction ", b.id" $direction " LIMIT $7"],
            $organization.uuid(),
            time::sql($now) as _,
            $filter.agent.map(AgentId::uuid) as _,
            $filter.task.map(TaskId::uuid) as _,
            value,
            id,
            $page.limit(),
        )
        .fetch_all(&$store.pool)
        .await?
    }};
}

impl Store {
    /// A budget.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn budget_get(
        &self,
        organization: OrganizationId,
        id: BudgetId,
        now: Timestamp,
    ) -> Result<Budget, Error> {
        select!(
            ["WHERE b.organization_id = $1 AND b.id = $3"],
            organization.uuid(),
            time::sql(now) as _,
            id.uuid()
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
    }

    /// A page of budgets. They have no name: [`Key::Name`] is taken as [`Key::CreatedAt`].
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn budget_list(
        &self,
        organization: OrganizationId,
        filter: &BudgetFilter,
        page: &Page,
        now: Timestamp,
    ) -> Result<Vec<Budget>, Error> {
        let rows = match (page.order.key, page.order.descending) {
            (Key::CreatedAt | Key::Name, false) => {
                list!(self, organization, filter, page, now, "b.created_at", ">", "")
            }
            (Key::CreatedAt | Key::Name, true) => {
                list!(self, organization, filter, page, now, "b.created_at", "<", " DESC")
            }
            (Key::UpdatedAt, false) => {
                list!(self, organization, filter, page, now, "b.updated_at", ">", "")
            }
            (Key::UpdatedAt, true) => {
                list!(self, organization, filter, page, now, "b.updated_at", "<", " DESC")
            }
        };
        rows.into_iter().map(TryInto::try_into).collect()
    }

    /// Creates a budget. Earlier spending in its period counts.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] when the scope has a budget for the period, [`Error::NotFound`]
    /// when the agent or task does not exist; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn budget_create(
        &self,
        write: &Write,
        new: NewBudget,
        render: impl FnOnce(&Budget) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Budget>, Error> {
        let mut writer = begin!(self, write);
        let (agent, task, token) = match &new.scope {
            Scope::Organization => (None, None, None),
            Scope::Agent(agent) => (Some(agent.uuid()), None, None),
            Scope::Task(task) => (None, Some(task.uuid()), None),
            Scope::Token(token) => (None, None, Some(token.as_str())),
        };
        sqlx::query!(
            "INSERT INTO budgets
                 (id, organization_id, agent_id, task_id, token_id, period, limit_pico_usd, window_start, created_at, updated_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, budgets_window($6, $8), $8, $8)",
            new.id.uuid(),
            writer.organization(),
            agent as _,
            task as _,
            token as _,
            new.period.as_str(),
            new.limit,
            writer.now() as _,
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        sqlx::query!(
            r#"SELECT budgets_count($1, $2)::text AS "done""#,
            new.id.uuid(),
            writer.now() as _
        )
        .fetch_one(&mut *writer.transaction)
        .await?;
        let entity = budget_reload(&mut writer, new.id).await?;
        writer.finish(entity, render).await
    }

    /// Changes the amount of a budget.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Conflict`] when the revision is not the expected one.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn budget_update(
        &self,
        write: &Write,
        id: BudgetId,
        expected_revision: Option<i64>,
        limit: i64,
        render: impl FnOnce(&Budget) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Budget>, Error> {
        let mut writer = begin!(self, write);
        let done = sqlx::query!(
            "UPDATE budgets SET limit_pico_usd = $5, revision = revision + 1, updated_at = $4
             WHERE organization_id = $1 AND id = $2 AND ($3::bigint IS NULL OR revision = $3)",
            writer.organization(),
            id.uuid(),
            expected_revision,
            writer.now(),
            limit,
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        let entity = budget_reload(&mut writer, id).await?;
        if done.rows_affected() == 0 {
            return Err(Error::Conflict);
        }
        writer.finish(entity, render).await
    }

    /// Deletes a budget. The entity in the result is the budget before the deletion.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn budget_delete(
        &self,
        write: &Write,
        id: BudgetId,
        render: impl FnOnce(&Budget) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Budget>, Error> {
        let mut writer = begin!(self, write);
        let entity = budget_reload(&mut writer, id).await?;
        let done = sqlx::query!(
            "DELETE FROM budgets WHERE organization_id = $1 AND id = $2",
            writer.organization(),
            id.uuid()
        )
        .execute(&mut *writer.transaction)
        .await?;
        if done.rows_affected() == 0 {
            return Err(Error::NotFound { what: ENTITY });
        }
        writer.finish(entity, render).await
    }
}

async fn budget_reload(writer: &mut Writer<'_>, id: BudgetId) -> Result<Budget, Error> {
    select!(
        ["WHERE b.organization_id = $1 AND b.id = $3"],
        writer.organization(),
        writer.now() as _,
        id.uuid()
    )
    .fetch_optional(&mut *writer.transaction)
    .await?
    .ok_or(Error::NotFound { what: ENTITY })?
    .try_into()
}

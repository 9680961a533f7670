//! Costs: sums over the ledger.

use jiff::Timestamp;
use uuid::Uuid;

use construct_domain::{AgentId, ModelId, OrganizationId, TaskId, money::Usage};

use crate::{Error, Store, time::sql_option};

/// Filter for the summed calls.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CostFilter {
    /// Of this agent only.
    pub agent: Option<AgentId>,
    /// Of this task and its subtasks only.
    pub task: Option<TaskId>,
    /// Of this model only.
    pub model: Option<ModelId>,
    /// Booked at this time or later.
    pub since: Option<Timestamp>,
    /// Booked earlier than this.
    pub until: Option<Timestamp>,
}

/// What the sums are grouped by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CostGroup {
    /// Everything.
    All,
    /// An agent.
    Agent,
    /// A model.
    Model,
    /// A task with its subtasks.
    Task,
    /// A day of UTC.
    Day,
    /// The purpose of the calls.
    Purpose,
}

impl CostGroup {
    const fn as_str(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Agent => "agent",
            Self::Model => "model",
            Self::Task => "task",
            Self::Day => "day",
            Self::Purpose => "purpose",
        }
    }

    /// The group's key as the API shows it.
    fn external_key(self, stored: Option<String>) -> String {
        let stored = stored.unwrap_or_default();
        let Ok(id) = Uuid::parse_str(&stored) else { return stored };
        match self {
            Self::Agent => AgentId::from_uuid(id).to_string(),
            Self::Model => ModelId::from_uuid(id).to_string(),
            Self::Task => TaskId::from_uuid(id).to_string(),
            Self::All | Self::Day | Self::Purpose => stored,
        }
    }
}

/// One sum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CostRow {
    /// An id, a day as `2026-11-22`, or a purpose; empty for the total, and for calls that belong
    /// to no group.
    pub key: String,
    /// The name of the agent or model, or the title of the task, while it exists.
    pub name: String,
    /// The number of calls.
    pub calls: i64,
    /// Their usage.
    pub usage: Usage,
}

struct Row {
    key: Option<String>,
    name: Option<String>,
    calls: i64,
    input_tokens: i64,
    output_tokens: i64,
    cache_read_tokens: i64,
    cache_write_tokens: i64,
    thinking_tokens: i64,
    cost_pico_usd: i64,
}

/// Sums the ledger, restricted by a condition on the task (`$3`).
macro_rules! sums {
    ($of:literal, $organization:expr, $filter:expr, $group:expr, $limit:expr) => {
        sqlx::query_as!(
            Row,
            r#"WITH sums AS (
               SELECT CASE $7
                          WHEN 'agent' THEN u.agent_id::text
                          WHEN 'model' THEN u.model_id::text
                          WHEN 'task' THEN u.root_id::text
                          WHEN 'day' THEN to_char(u.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')
                          WHEN 'purpose' THEN u.purpose
                      END AS key,
                      count(*) AS calls,
                      least(sum(u.input_tokens), 9223372036854775807)::bigint AS input_tokens,
                      least(sum(u.output_tokens), 9223372036854775807)::bigint AS output_tokens,
                      least(sum(u.cache_read_tokens), 9223372036854775807)::bigint AS cache_read_tokens,
                      least(sum(u.cache_write_tokens), 9223372036854775807)::bigint AS cache_write_tokens,
                      least(sum(u.thinking_tokens), 9223372036854775807)::bigint AS thinking_tokens,
                      least(sum(u.cost_pico_usd), 9223372036854775807)::bigint AS cost_pico_usd
               FROM step_usage u
               WHERE u.organization_id = $1
                 AND ($2::uuid IS NULL OR u.agent_id = $2)
                 "# + $of + r#"
                 AND ($4::uuid IS NULL OR u.model_id = $4)
                 AND ($5::timestamptz IS NULL OR u.created_at >= $5)
                 AND ($6::timestamptz IS NULL OR u.created_at < $6)
               GROUP BY 1
           )
           SELECT s.key, s.calls AS "calls!",
                  s.input_tokens AS "input_tokens!", s.output_tokens AS "output_tokens!",
                  s.cache_read_tokens AS "cache_read_tokens!", s.cache_write_tokens AS "cache_write_tokens!",
                  s.thinking_tokens AS "thinking_tokens!", s.cost_pico_usd AS "cost_pico_usd!",
                  CASE $7
                      WHEN 'agent' THEN (SELECT a.name FROM agents a WHERE a.organization_id = $1 AND a.id = s.key::uuid)
                      WHEN 'model' THEN (SELECT m.name FROM models m WHERE m.organization_id = $1 AND m.id = s.key::uuid)
                      WHEN 'task' THEN (SELECT t.title FROM tasks t WHERE t.organization_id = $1 AND t.id = s.key::uuid)
                  END AS name
           FROM sums s
           ORDER BY CASE WHEN $7 = 'day' THEN s.key END, s.cost_pico_usd DESC, s.key
           LIMIT $8"#,
            $organization.uuid(),
            $filter.agent.map(AgentId::uuid) as _,
            $filter.task.map(TaskId::uuid) as _,
            $filter.model.map(ModelId::uuid) as _,
            sql_option($filter.since) as _,
            sql_option($filter.until) as _,
            $group.as_str(),
            i64::from($limit),
        )
    };
}

/// The sums of one task. A separate statement, because a generic plan cannot use an index for an
/// optional parameter.
macro_rules! sums_of_task {
    ($($argument:expr),*) => {
        sums!("AND (u.root_id = $3 OR u.tree @> ARRAY[$3]::uuid[])", $($argument),*)
    };
}

impl Store {
    /// Sums the ledger: the most expensive group first, days in their order; at most `limit` rows.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn cost_list(
        &self,
        organization: OrganizationId,
        filter: &CostFilter,
        group: CostGroup,
        limit: u32,
    ) -> Result<Vec<CostRow>, Error> {
        let rows = match filter.task {
            Some(_) => {
                sums_of_task!(organization, filter, group, limit).fetch_all(&self.pool).await?
            }
            None => {
                sums!("AND $3::uuid IS NULL", organization, filter, group, limit)
                    .fetch_all(&self.pool)
                    .await?
            }
        };
        Ok(rows
            .into_iter()
            .map(|row| CostRow {
                key: group.external_key(row.key),
                name: row.name.unwrap_or_default(),
                calls: row.calls,
                usage: Usage {
                    input_tokens: row.input_tokens,
                    output_tokens: row.output_tokens,
                    cache_read_tokens: row.cache_read_tokens,
                    cache_write_tokens: row.cache_write_tokens,
                    thinking_tokens: row.thinking_tokens,
                    cost_pico_usd: row.cost_pico_usd,
                },
            })
            .collect())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use sqlx::Execute as _;

    use super::*;

    /// The statement of [`Store::cost_list`] about one task, for tests of its plan.
    pub(crate) fn statement_of_task() -> String {
        let (organization, filter) = (OrganizationId::LOCAL, CostFilter::default());
        sums_of_task!(organization, filter, CostGroup::All, 1_u32).sql().as_str().to_owned()
    }
}

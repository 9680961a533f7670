//! Usage by day, agent, key, model and tool: sums over the ledger, and for tool calls over the
//! results of scripts.
//!
//! The ledger keeps the usage of models permanently. Tool calls are part of the results of the
//! scripts that made them, and are deleted with their task.

use construct_domain::{AgentId, ApiKeyId, ModelId, OrganizationId, money::Usage};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{Error, Store, time};

/// Filter for the summed usage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageFilter {
    /// Of this agent only.
    pub agent: Option<AgentId>,
    /// Of this model only. Does not apply to tools.
    pub model: Option<ModelId>,
    /// Of this API key only.
    pub key: Option<ApiKeyId>,
    /// Of this tool only.
    pub tool: Option<String>,
    /// Earliest time, inclusive.
    pub since: Timestamp,
    /// Latest time, exclusive.
    pub until: Timestamp,
    /// The IANA name of the time zone of the days.
    pub time_zone: String,
}

/// What the sums are grouped by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dimensions {
    /// A day.
    pub day: bool,
    /// An agent.
    pub agent: bool,
    /// A key.
    pub key: bool,
    /// A model. Does not apply to tools.
    pub model: bool,
    /// A tool: sums tool calls instead of model calls.
    pub tool: bool,
}

/// A position in a list of sums.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageCursor {
    /// `2026-11-22`.
    pub day: String,
    /// Its id, as a UUID.
    pub agent: String,
    /// Its id, as a UUID.
    #[serde(default)]
    pub key: String,
    /// The id of a model, as a UUID, or the name of a tool.
    #[serde(rename = "what")]
    pub item: String,
}

/// Part of a list of sums: by day, then by agent, then by key, then by model or tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsagePage {
    /// Rows at most.
    pub limit: u32,
    /// The newest day first.
    pub descending: bool,
    /// The last row of the previous page.
    pub after: Option<UsageCursor>,
}

/// One sum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageRow {
    /// Its position in the list.
    pub cursor: UsageCursor,
    /// The agent, if grouped by it; none: calls of no agent.
    pub agent: Option<AgentId>,
    /// The agent's name, while it exists.
    pub agent_name: String,
    /// The API key, if grouped by it; none: calls without one.
    pub key: Option<ApiKeyId>,
    /// The key's name, while it exists.
    pub key_name: String,
    /// The model, if grouped by it.
    pub model: Option<ModelId>,
    /// The model's name, while it exists.
    pub model_name: String,
    /// The sums.
    pub totals: UsageTotals,
}

/// The sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsageTotals {
    /// Of models.
    Models {
        /// The number of calls.
        calls: i64,
        /// Their usage.
        usage: Usage,
    },
    /// Of tools.
    Tools {
        /// The number of calls.
        calls: i64,
        /// The number of calls that threw an exception.
        failed: i64,
        /// Their total duration, in microseconds.
        micros: i64,
    },
}

struct ModelRow {
    day: String,
    agent: String,
    key: String,
    what: String,
    agent_name: Option<String>,
    key_name: Option<String>,
    model_name: Option<String>,
    calls: i64,
    input_tokens: i64,
    output_tokens: i64,
    cache_read_tokens: i64,
    cache_write_tokens: i64,
    thinking_tokens: i64,
    cost_pico_usd: i64,
}

struct ToolRow {
    day: String,
    agent: String,
    key: String,
    what: String,
    agent_name: Option<String>,
    key_name: Option<String>,
    calls: i64,
    failed: i64,
    micros: i64,
}

fn parse_id(text: &str) -> Option<Uuid> {
    Uuid::parse_str(text).ok()
}

macro_rules! model_usage {
    ($organization:expr, $filter:expr, $dimensions:expr, $page:expr, $after:expr) => {
        sqlx::query_as!(
            ModelRow,
            r#"WITH sums AS (
                   SELECT CASE WHEN $7 THEN to_char(u.created_at AT TIME ZONE $6, 'YYYY-MM-DD') ELSE '' END COLLATE "C" AS day,
                          CASE WHEN $8 THEN coalesce(u.agent_id::text, '') ELSE '' END COLLATE "C" AS agent,
                          CASE WHEN $15 THEN coalesce(u.api_key_id::text, '') ELSE '' END COLLATE "C" AS key,
                          CASE WHEN $9 THEN u.model_id::text ELSE '' END COLLATE "C" AS what,
                          count(*) AS calls,
                          least(sum(u.input_tokens), 9223372036854775807)::bigint AS input_tokens,
                          least(sum(u.output_tokens), 9223372036854775807)::bigint AS output_tokens,
                          least(sum(u.cache_read_tokens), 9223372036854775807)::bigint AS cache_read_tokens,
                          least(sum(u.cache_write_tokens), 9223372036854775807)::bigint AS cache_write_tokens,
                          least(sum(u.thinking_tokens), 9223372036854775807)::bigint AS thinking_tokens,
                          least(sum(u.cost_pico_usd), 9223372036854775807)::bigint AS cost_pico_usd
                   FROM step_usage u
                   WHERE u.organization_id = $1 AND u.created_at >= $2 AND u.created_at < $3
                     AND ($4::uuid IS NULL OR u.agent_id = $4) AND ($5::uuid IS NULL OR u.model_id = $5)
                     AND ($16::uuid IS NULL OR u.api_key_id = $16)
                   GROUP BY 1, 2, 3, 4
               )
               SELECT s.day AS "day!", s.agent AS "agent!", s.key AS "key!", s.what AS "what!", s.calls AS "calls!",
                      s.input_tokens AS "input_tokens!", s.output_tokens AS "output_tokens!",
                      s.cache_read_tokens AS "cache_read_tokens!", s.cache_write_tokens AS "cache_write_tokens!",
                      s.thinking_tokens AS "thinking_tokens!", s.cost_pico_usd AS "cost_pico_usd!",
                      (SELECT a.name FROM agents a WHERE a.organization_id = $1 AND a.id = nullif(s.agent, '')::uuid) AS agent_name,
                      (SELECT k.name FROM api_keys k WHERE k.organization_id = $1 AND k.id = nullif(s.key, '')::uuid) AS key_name,
                      (SELECT m.name FROM models m WHERE m.organization_id = $1 AND m.id = nullif(s.what, '')::uuid) AS model_name
               FROM sums s
               WHERE $11::text IS NULL
                  OR CASE WHEN $10 THEN s.day < $11 ELSE s.day > $11 END
                  OR (s.day = $11 AND (s.agent, s.key, s.what) > ($12 COLLATE "C", $17 COLLATE "C", $13 COLLATE "C"))
               ORDER BY CASE WHEN $10 THEN s.day END DESC, s.day, s.agent, s.key, s.what
               LIMIT $14"#,
            $organization.uuid(),
            time::sql($filter.since) as _,
            time::sql($filter.until) as _,
            $filter.agent.map(AgentId::uuid) as _,
            $filter.model.map(ModelId::uuid) as _,
            $filter.time_zone,
            $dimensions.day,
            $dimensions.agent,
            $dimensions.model,
            $page.descending,
            $after.map(|cursor| cursor.day.as_str()) as _,
            $after.map(|cursor| cursor.agent.as_str()) as _,
            $after.map(|cursor| cursor.item.as_str()) as _,
            i64::from($page.limit),
            $dimensions.key,
            $filter.key.map(ApiKeyId::uuid) as _,
            $after.map(|cursor| cursor.key.as_str()) as _,
        )
    };
}

macro_rules! tool_usage {
    ($organization:expr, $filter:expr, $dimensions:expr, $page:expr, $after:expr) => {
        sqlx::query_as!(
            ToolRow,
            r#"WITH calls AS (
                   SELECT m.created_at, m.api_key_id, use ->> 'name' AS tool, (use ->> 'succeeded')::boolean AS succeeded,
                          (use ->> 'duration_micros')::bigint AS micros,
                          -- Who asked for the run: the script stands in the message before.
                          CASE WHEN $7 OR $4::uuid IS NOT NULL THEN (
                              SELECT asked.agent_id FROM messages asked
                              WHERE asked.task_id = m.task_id AND asked.position < m.position AND asked.agent_id IS NOT NULL
                              ORDER BY asked.position DESC LIMIT 1
                          ) END AS agent_id
                   FROM messages m,
                        jsonb_path_query(m.content, '$.blocks[*] ? (@.kind == "code_interpreter_result").payload.tool_uses[*]') AS use
                   WHERE m.organization_id = $1 AND m.created_at >= $2 AND m.created_at < $3
                     AND m.step_id IS NOT NULL AND m.content #>> '{blocks,0,kind}' = 'code_interpreter_result'
                     AND ($15::uuid IS NULL OR m.api_key_id = $15)
               ), sums AS (
                   SELECT CASE WHEN $6 THEN to_char(c.created_at AT TIME ZONE $5, 'YYYY-MM-DD') ELSE '' END COLLATE "C" AS day,
                          CASE WHEN $7 THEN coalesce(c.agent_id::text, '') ELSE '' END COLLATE "C" AS agent,
                          CASE WHEN $14 THEN coalesce(c.api_key_id::text, '') ELSE '' END COLLATE "C" AS key,
                          c.tool COLLATE "C" AS what,
                          count(*) AS calls,
                          count(*) FILTER (WHERE NOT c.succeeded) AS failed,
                          least(sum(c.micros), 9223372036854775807)::bigint AS micros
                   FROM calls c
                   WHERE ($4::uuid IS NULL OR c.agent_id = $4) AND ($13::text IS NULL OR c.tool = $13)
                   GROUP BY 1, 2, 3, 4
               )
               SELECT s.day AS "day!", s.agent AS "agent!", s.key AS "key!", s.what AS "what!", s.calls AS "calls!", s.failed AS "failed!",
                      s.micros AS "micros!",
                      (SELECT a.name FROM agents a WHERE a.organization_id = $1 AND a.id = nullif(s.agent, '')::uuid) AS agent_name,
                      (SELECT k.name FROM api_keys k WHERE k.organization_id = $1 AND k.id = nullif(s.key, '')::uuid) AS key_name
               FROM sums s
               WHERE $9::text IS NULL
                  OR CASE WHEN $8 THEN s.day < $9 ELSE s.day > $9 END
                  OR (s.day = $9 AND (s.agent, s.key, s.what) > ($10 COLLATE "C", $16 COLLATE "C", $11 COLLATE "C"))
               ORDER BY CASE WHEN $8 THEN s.day END DESC, s.day, s.agent, s.key, s.what
               LIMIT $12"#,
            $organization.uuid(),
            time::sql($filter.since) as _,
            time::sql($filter.until) as _,
            $filter.agent.map(AgentId::uuid) as _,
            $filter.time_zone,
            $dimensions.day,
            $dimensions.agent,
            $page.descending,
            $after.map(|cursor| cursor.day.as_str()) as _,
            $after.map(|cursor| cursor.agent.as_str()) as _,
            $after.map(|cursor| cursor.item.as_str()) as _,
            i64::from($page.limit),
            $filter.tool.as_deref() as _,
            $dimensions.key,
            $filter.key.map(ApiKeyId::uuid) as _,
            $after.map(|cursor| cursor.key.as_str()) as _,
        )
    };
}

impl Store {
    /// The usage of an organization, one row for each value of the requested dimensions.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn usage_list(
        &self,
        organization: OrganizationId,
        filter: &UsageFilter,
        dimensions: Dimensions,
        page: &UsagePage,
    ) -> Result<Vec<UsageRow>, Error> {
        let after = page.after.as_ref();
        if dimensions.tool {
            let rows = tool_usage!(organization, filter, dimensions, page, after)
                .fetch_all(&self.pool)
                .await?;
            return Ok(rows.into_iter().map(UsageRow::from).collect());
        }
        let rows = model_usage!(organization, filter, dimensions, page, after)
            .fetch_all(&self.pool)
            .await?;
        Ok(rows.into_iter().map(UsageRow::from).collect())
    }
}

impl From<ModelRow> for UsageRow {
    fn from(row: ModelRow) -> Self {
        Self {
            agent: parse_id(&row.agent).map(AgentId::from_uuid),
            agent_name: row.agent_name.unwrap_or_default(),
            key: parse_id(&row.key).map(ApiKeyId::from_uuid),
            key_name: row.key_name.unwrap_or_default(),
            model: parse_id(&row.what).map(ModelId::from_uuid),
            model_name: row.model_name.unwrap_or_default(),
            cursor: UsageCursor { day: row.day, agent: row.agent, key: row.key, item: row.what },
            totals: UsageTotals::Models {
                calls: row.calls,
                usage: Usage {
                    input_tokens: row.input_tokens,
                    output_tokens: row.output_tokens,
                    cache_read_tokens: row.cache_read_tokens,
                    cache_write_tokens: row.cache_write_tokens,
                    thinking_tokens: row.thinking_tokens,
                    cost_pico_usd: row.cost_pico_usd,
                },
            },
        }
    }
}

impl From<ToolRow> for UsageRow {
    fn from(row: ToolRow) -> Self {
        Self {
            agent: parse_id(&row.agent).map(AgentId::from_uuid),
            agent_name: row.agent_name.unwrap_or_default(),
            key: parse_id(&row.key).map(ApiKeyId::from_uuid),
            key_name: row.key_name.unwrap_or_default(),
            model: None,
            model_name: String::new(),
            cursor: UsageCursor { day: row.day, agent: row.agent, key: row.key, item: row.what },
            totals: UsageTotals::Tools { calls: row.calls, failed: row.failed, micros: row.micros },
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use sqlx::Execute as _;

    use super::*;

    /// The statements of [`Store::usage_list`], for tests of their plans: for models, for tools.
    pub(crate) fn statements() -> [String; 2] {
        let (organization, dimensions, after) =
            (OrganizationId::LOCAL, Dimensions::default(), None::<&UsageCursor>);
        let page = UsagePage { limit: 1, descending: false, after: None };
        let (since, until) = (Timestamp::UNIX_EPOCH, Timestamp::UNIX_EPOCH);
        let time_zone = "UTC".into();
        let filter = UsageFilter {
            agent: None,
            model: None,
            key: None,
            tool: None,
            since,
            until,
            time_zone,
        };
        [
            model_usage!(organization, filter, dimensions, page, after).sql().as_str().to_owned(),
            tool_usage!(organization, filter, dimensions, page, after).sql().as_str().to_owned(),
        ]
    }
}

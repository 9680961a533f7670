//! The condition of the database and its content, for operators.

use construct_domain::{AgentId, OrganizationId, task::Phase};
use jiff::Timestamp;

use crate::{Error, Store, store::MIGRATOR, time};

/// The server and the schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatabaseState {
    /// The version of the server.
    pub version: String,
    /// The time of the server's clock.
    pub now: Timestamp,
    /// Connections to the server, of all clients.
    pub connections: i64,
    /// The maximum number of connections.
    pub max_connections: i64,
    /// Whether it is a replica that refuses writes.
    pub is_standby: bool,
    /// The last applied migration.
    pub applied_migration: i64,
    /// The last migration of this version of Construct.
    pub latest_migration: i64,
    /// Bytes on disk.
    pub size: i64,
}

/// Tasks that need attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuarantinedTasks {
    /// The number of tasks that are quarantined because they failed to reconcile repeatedly.
    pub count: i64,
    /// When the first of them was quarantined.
    pub since: Option<Timestamp>,
}

/// The usage of model calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModelSpending {
    /// The number of calls.
    pub calls: i64,
    /// Input and output tokens, including cache reads and writes.
    pub tokens: i64,
    /// In 10⁻¹² US dollars.
    pub cost_pico_usd: i64,
}

/// The usage of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentSpending {
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// The organization's name.
    pub organization_name: String,
    /// The agent; none for calls of no agent.
    pub agent: Option<AgentId>,
    /// The agent's name; empty when it was deleted.
    pub agent_name: String,
    /// Its usage.
    pub spending: ModelSpending,
}

/// A kind of keyring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyringKind {
    /// Master keys: credentials of vendors, repositories and Slack, and the tokens of scans.
    Credentials,
    /// Keys of the secrets of scripts.
    Secrets,
}

/// The rows of a table that one key encrypts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealedRows {
    /// The key's id.
    pub key: String,
    /// The table.
    pub table: String,
    /// The number of rows.
    pub count: i64,
}

impl Store {
    /// The number of active tasks in each phase, in all organizations. Phases that this version
    /// does not know are left out.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn active_task_counts(&self) -> Result<Vec<(Phase, i64)>, Error> {
        // Idle and suspended tasks have no next wake, and are not read.
        let rows = sqlx::query!(
            r#"SELECT phase, count(*) AS "count!" FROM tasks
               WHERE next_wake IS NOT NULL AND deleted_at IS NULL GROUP BY phase ORDER BY phase"#
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows.iter().filter_map(|row| Some((Phase::parse(&row.phase)?, row.count))).collect())
    }

    /// The usage of all organizations since a time, and the `limit` agents that spent most, in
    /// descending order. Uses the ledger's index of each organization.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn top_spenders(
        &self,
        since: Timestamp,
        limit: usize,
    ) -> Result<(ModelSpending, Vec<AgentSpending>), Error> {
        let rows = sqlx::query!(
            r#"SELECT o.id AS organization, o.name AS organization_name, u.agent_id AS agent, coalesce(a.name, '') AS "agent_name!",
                      u.calls AS "calls!", u.tokens AS "tokens!", u.cost AS "cost!"
               FROM organizations o
               CROSS JOIN LATERAL (
                   SELECT l.agent_id, count(*) AS calls,
                          least(sum(l.input_tokens + l.output_tokens + l.cache_read_tokens + l.cache_write_tokens), 9223372036854775807)::bigint AS tokens,
                          least(sum(l.cost_pico_usd), 9223372036854775807)::bigint AS cost
                   FROM step_usage l WHERE l.organization_id = o.id AND l.created_at >= $1 GROUP BY l.agent_id
               ) u
               LEFT JOIN agents a ON a.organization_id = o.id AND a.id = u.agent_id
               ORDER BY u.cost DESC, u.calls DESC, o.id, u.agent_id"#,
            time::sql(since) as _,
        )
        .fetch_all(&self.pool)
        .await?;
        let mut all = ModelSpending::default();
        let mut spenders = Vec::new();
        for row in rows {
            let spending =
                ModelSpending { calls: row.calls, tokens: row.tokens, cost_pico_usd: row.cost };
            all.calls += spending.calls;
            all.tokens = all.tokens.saturating_add(spending.tokens);
            all.cost_pico_usd = all.cost_pico_usd.saturating_add(spending.cost_pico_usd);
            if spenders.len() < limit {
                spenders.push(AgentSpending {
                    organization: OrganizationId::from_uuid(row.organization),
                    organization_name: row.organization_name,
                    agent: row.agent.map(AgentId::from_uuid),
                    agent_name: row.agent_name,
                    spending,
                });
            }
        }
        Ok((all, spenders))
    }

    /// The state of the server and the schema.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn database_state(&self) -> Result<DatabaseState, Error> {
        let row = sqlx::query!(
            r#"SELECT current_setting('server_version') AS "version!", clock_timestamp() AS "now!: jiff_sqlx::Timestamp",
                      (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS "connections!",
                      current_setting('max_connections')::bigint AS "max_connections!", pg_is_in_recovery() AS "is_standby!",
                      pg_database_size(current_database()) AS "size!""#
        )
        .fetch_one(&self.pool)
        .await?;
        // The migrator's own table. No migration creates it, so no query on it can be checked.
        let applied_migration: i64 = sqlx::query_scalar(
            "SELECT coalesce(max(version), 0) FROM _sqlx_migrations WHERE success",
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(DatabaseState {
            version: row.version,
            now: row.now.into(),
            connections: row.connections,
            max_connections: row.max_connections,
            is_standby: row.is_standby,
            applied_migration,
            latest_migration: MIGRATOR
                .iter()
                .map(|migration| migration.version)
                .max()
                .unwrap_or_default(),
            size: row.size,
        })
    }

    /// The number of quarantined tasks ([`Store::task_quarantine`]), in all organizations.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn tasks_quarantined(&self) -> Result<QuarantinedTasks, Error> {
        let row = sqlx::query!(
            r#"SELECT count(*) AS "count!", min(parked_at) AS "since: jiff_sqlx::Timestamp"
               FROM tasks WHERE parked_at IS NOT NULL AND parked_intents = intents"#
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(QuarantinedTasks { count: row.count, since: row.since.map(Into::into) })
    }

    /// The number of credentials that are not sealed with the active keys of this installation:
    /// those of model providers and scan connections with the key `active`, secrets with the key
    /// `secrets`. At its start the gateway reseals everything that it can open, so the rest cannot
    /// be opened.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn sealed_with_other_keys(
        &self,
        active: &str,
        secrets: Option<&str>,
    ) -> Result<i64, Error> {
        let count = sqlx::query_scalar!(
            r#"SELECT (SELECT count(*) FROM model_providers WHERE key_id <> $1)
                    + (SELECT count(*) FROM model_provider_keys WHERE key_id <> $1)
                    + (SELECT count(*) FROM scan_connections WHERE key_id <> $1)
                    + (SELECT count(*) FROM secrets WHERE $2::text IS NULL OR key_id <> $2) AS "count!""#,
            active,
            secrets,
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(count)
    }

    /// The number of rows that each key encrypts, by table, in all organizations.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn sealed_rows(&self, sealing: KeyringKind) -> Result<Vec<SealedRows>, Error> {
        let rows = sqlx::query!(
            r#"SELECT key AS "key!", what AS "what!", count(*) AS "count!" FROM (
                   SELECT 'credentials' AS sealing, key_id AS key, 'model_providers' AS what FROM model_providers
                   UNION ALL SELECT 'credentials', key_id, 'model_provider_keys' FROM model_provider_keys
                   UNION ALL SELECT 'credentials', key_id, 'scan_connections' FROM scan_connections
                   UNION ALL SELECT 'credentials', token_key_id, 'scans' FROM scans
                   UNION ALL SELECT 'credentials', key_id, 'slack_installations' FROM slack_installations
                   UNION ALL SELECT 'credentials', key_id, 'slack_members' FROM slack_members
                   UNION ALL SELECT 'secrets', key_id, 'secrets' FROM secrets
               ) AS sealed
               WHERE sealing = $1 AND key IS NOT NULL
               GROUP BY key, what ORDER BY key, what"#,
            match sealing {
                KeyringKind::Credentials => "credentials",
                KeyringKind::Secrets => "secrets",
            },
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows
            .into_iter()
            .map(|row| SealedRows { key: row.key, table: row.what, count: row.count })
            .collect())
    }

    /// The number of running scripts that may hold secrets in their previous encryption: they
    /// started before the latest change of a secret, or within a minute after it.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scripts_with_stale_secrets(&self) -> Result<i64, Error> {
        let count = sqlx::query_scalar!(
            r#"SELECT count(*) AS "count!" FROM tasks t
               WHERE t.next_wake IS NOT NULL AND t.phase = 'execute_tools'
                 AND t.phase_since <= (
                     SELECT max(s.updated_at) + interval '1 minute' FROM secrets s JOIN agent_secrets a ON a.secret_id = s.id
                     WHERE a.organization_id = t.organization_id AND a.agent_id = t.agent_id)"#
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(count)
    }
}

//! Erasure of deleted organizations (docs/adr/0035-erasure.md). It proceeds in parts. Each part is
//! a transaction that also counts the removed rows. There is no other state, so that any process
//! can continue after a crash.

use std::collections::BTreeMap;

use construct_domain::OrganizationId;
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use sqlx::{PgConnection, Postgres, Transaction};
use uuid::Uuid;

use crate::{
    AuditEntry, Error, Store, audit,
    error::violated_constraint,
    file,
    time::{self, sql},
};

/// The tables to empty once all tasks are removed, in an order that respects foreign keys, with the
/// condition that finds their rows.
pub(crate) const TABLES: [(&str, &str); 40] = [
    ("scan_candidates", BY_ORGANIZATION),
    ("scan_hand_overs", BY_ORGANIZATION),
    ("scan_events", BY_ORGANIZATION),
    ("scan_manifests", BY_ORGANIZATION),
    ("scans", BY_ORGANIZATION),
    ("scan_connections", BY_ORGANIZATION),
    ("schedule_runs", "schedule_id IN (SELECT id FROM schedules WHERE organization_id = $1)"),
    ("schedules", BY_ORGANIZATION),
    ("approvals", REMOVED_WITH_TASKS),
    ("compactions", REMOVED_WITH_TASKS),
    ("messages", REMOVED_WITH_TASKS),
    ("tasks", REMOVED_WITH_TASKS),
    ("agent_secrets", BY_ORGANIZATION),
    ("agent_script_models", BY_ORGANIZATION),
    ("reservations", BY_ORGANIZATION),
    ("budgets", BY_ORGANIZATION),
    ("step_usage", BY_ORGANIZATION),
    ("agents", BY_ORGANIZATION),
    ("secrets", BY_ORGANIZATION),
    ("model_fallbacks", BY_ORGANIZATION),
    ("models", BY_ORGANIZATION),
    ("model_provider_keys", BY_ORGANIZATION),
    ("model_providers", BY_ORGANIZATION),
    ("slack_grants", BY_SLACK_TEAM),
    ("slack_posts", BY_SLACK_TEAM),
    ("slack_mentions", BY_ORGANIZATION),
    ("slack_threads", BY_ORGANIZATION),
    ("slack_states", BY_ORGANIZATION),
    ("slack_members", BY_ORGANIZATION),
    ("slack_installations", BY_ORGANIZATION),
    ("idempotency_keys", BY_ORGANIZATION),
    ("file_parts", BY_ORGANIZATION),
    ("files", BY_ORGANIZATION),
    ("state_versions", BY_ORGANIZATION),
    ("states", BY_ORGANIZATION),
    ("invitations", BY_ORGANIZATION),
    ("setup_codes", BY_ORGANIZATION),
    ("api_keys", BY_ORGANIZATION),
    ("members", BY_ORGANIZATION),
    ("quotas", BY_ORGANIZATION),
];

/// Rows that were removed with their tasks. They are found by task, so that large shared tables are
/// not searched.
const REMOVED_WITH_TASKS: &str = "";
const BY_ORGANIZATION: &str = "organization_id = $1";
const BY_SLACK_TEAM: &str =
    "team IN (SELECT team FROM slack_installations WHERE organization_id = $1)";

/// How long the scanner has to end scans and remove their files. Without a running scanner, erasure
/// proceeds after it.
const SCAN_GRACE_PERIOD: SignedDuration = SignedDuration::from_hours(1);
/// How long the reconciler has to purge a task. Erasure removes tasks that cannot be reconciled
/// after it.
const TASK_GRACE_PERIOD: SignedDuration = SignedDuration::from_mins(1);
/// Tasks that one part removes, with their rows.
const TASK_BATCH: i64 = 10;
/// How long the ids of erased tasks are kept. Interpreters remove their workspaces every ten
/// minutes.
const ERASED_TASK_RETENTION: SignedDuration = SignedDuration::from_hours(90 * 24);

/// The progress of an erasure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErasureProgress {
    /// There may be more to remove immediately.
    More(OrganizationId),
    /// Other services must finish first: the reconciler ends tasks, the scanner ends scans.
    Blocked(OrganizationId),
    /// The organization is erased.
    Done(OrganizationId),
}

struct Row {
    id: Uuid,
    name: String,
    erasing_since: Timestamp,
    erased: Value,
}

/// The number of removed rows, by table.
type Counts = BTreeMap<String, i64>;

impl Store {
    /// Removes the next part, at most `limit` rows, of the organization to erase that was visited
    /// longest ago. None when there is none, or other processes work on all of them. `record` is
    /// the audit entry for the operator's organization when an organization is erased, without its
    /// objects.
    ///
    /// # Errors
    /// [`Error::Unavailable`]; earlier parts stay removed.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn organization_erase(
        &self,
        record: AuditEntry,
        limit: u32,
        now: Timestamp,
    ) -> Result<Option<ErasureProgress>, Error> {
        let now = time::micros(now);
        let mut transaction = self.pool.begin().await?;
        // Not `FOR UPDATE`: statements that refer to the row need not wait.
        let row = sqlx::query_as!(
            Row,
            r#"SELECT id, name, erasing_since AS "erasing_since!", erased FROM organizations
               WHERE erasing_since IS NOT NULL
               ORDER BY erasing_looked_at LIMIT 1
               FOR NO KEY UPDATE SKIP LOCKED"#
        )
        .fetch_optional(&mut *transaction)
        .await?;
        let Some(row) = row else { return Ok(None) };
        let id = row.id;
        let erased = self.erase_part(transaction, row, record, limit, now).await;
        if erased.is_err() {
            // Move it behind the others, so that a repeated failure does not block them.
            sqlx::query!(
                "UPDATE organizations SET erasing_looked_at = $2 WHERE id = $1",
                id,
                sql(now) as _
            )
            .execute(&self.pool)
            .await?;
        }
        erased
    }

    async fn erase_part(
        &self,
        mut transaction: Transaction<'_, Postgres>,
        row: Row,
        mut record: AuditEntry,
        limit: u32,
        now: Timestamp,
    ) -> Result<Option<ErasureProgress>, Error> {
        let organization = OrganizationId::from_uuid(row.id);
        let mut counts: Counts =
            serde_json::from_value(row.erased.clone()).map_err(Error::internal)?;
        let part = ErasurePart { organization: row.id, limit: i64::from(limit), now };
        let connection = &mut *transaction;
        part.cancel_scans(connection).await?;
        let has_more = part.delete_tasks(connection, &mut counts).await?;
        let is_blocked = !has_more
            && (part.has_tasks(connection).await? || part.has_scans(connection, &row).await?);
        let has_more = has_more || !is_blocked && part.events(connection, &mut counts).await?;
        let has_more = has_more || !is_blocked && part.tables(connection, &mut counts).await?;
        if has_more || is_blocked {
            sqlx::query!(
                "UPDATE organizations SET erasing_looked_at = $2, erased = $3 WHERE id = $1",
                row.id,
                sql(now) as _,
                serde_json::to_value(&counts).map_err(Error::internal)?,
            )
            .execute(&mut *connection)
            .await?;
            transaction.commit().await?;
            return Ok(Some(if is_blocked {
                ErasureProgress::Blocked(organization)
            } else {
                ErasureProgress::More(organization)
            }));
        }
        sqlx::query!(
            "DELETE FROM erased_tasks WHERE erased_at < $1",
            sql(now - ERASED_TASK_RETENTION) as _
        )
        .execute(&mut *connection)
        .await?;
        // The content in the folder is removed shortly after the rows.
        file::record_organization_removal(&mut *connection, organization, now).await?;
        record.organization = OrganizationId::LOCAL;
        record.objects = vec![organization.to_string(), row.name];
        record.objects.extend(counts.iter().map(|(what, count)| format!("{what}={count}")));
        audit::insert(&mut *connection, audit::rows(&[record])?).await?;
        let removed = sqlx::query!("DELETE FROM organizations WHERE id = $1", row.id)
            .execute(&mut *connection)
            .await;
        match removed {
            Ok(_) => {
                transaction.commit().await?;
                Ok(Some(ErasureProgress::Done(organization)))
            }
            // A service that did not know of the deletion has written a row meanwhile. The next
            // part removes it.
            Err(error) if violated_constraint(&error).is_some() => {
                transaction.rollback().await?;
                Ok(Some(ErasureProgress::More(organization)))
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// One part of an erasure.
struct ErasurePart {
    organization: Uuid,
    limit: i64,
    now: Timestamp,
}

impl ErasurePart {
    async fn cancel_scans(&self, connection: &mut PgConnection) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE scans SET cancel_requested_at = $2, cancel_reason = 'the organization is deleted', next_wake = $2,
                 revision = revision + 1, updated_at = $2
             WHERE organization_id = $1 AND next_wake IS NOT NULL AND cancel_requested_at IS NULL",
            self.organization,
            sql(self.now) as _,
        )
        .execute(connection)
        .await?;
        Ok(())
    }

    /// Deletes tasks like the API does. The reconciler stops and purges them. Returns whether there
    /// were any.
    async fn delete_tasks(
        &self,
        connection: &mut PgConnection,
        counts: &mut Counts,
    ) -> Result<bool, Error> {
        // A task is older than its descendants: in order of time, locks are taken from the root
        // downwards.
        let tasks = sqlx::query_scalar!(
            "UPDATE tasks SET
                 deleted_at = $2,
                 intents = intents + 1,
                 intent_at = CASE WHEN intents > intents_seen THEN intent_at ELSE $2 END,
                 revision = revision + 1,
                 updated_at = $2
             WHERE id IN (
                 SELECT id FROM tasks WHERE organization_id = $1 AND deleted_at IS NULL ORDER BY created_at, id LIMIT $3 FOR UPDATE)
             RETURNING id",
            self.organization,
            sql(self.now) as _,
            self.limit,
        )
        .fetch_all(&mut *connection)
        .await?;
        if tasks.is_empty() {
            return Ok(false);
        }
        sqlx::query!(
            "INSERT INTO erased_tasks (id, organization_id, erased_at) SELECT id, $2, $3 FROM unnest($1::uuid[]) AS id
             ON CONFLICT ON CONSTRAINT erased_tasks_pkey DO NOTHING",
            &tasks,
            self.organization,
            sql(self.now) as _,
        )
        .execute(&mut *connection)
        .await?;
        let messages = sqlx::query_scalar!(
            r#"SELECT count(*) AS "count!" FROM messages WHERE task_id = ANY ($1)"#,
            &tasks
        )
        .fetch_one(&mut *connection)
        .await?;
        add_count(counts, "tasks", i64::try_from(tasks.len()).unwrap_or(i64::MAX));
        add_count(counts, "messages", messages);
        Ok(true)
    }

    /// Whether there are tasks that the reconciler has not purged yet. Removes those that it cannot
    /// reconcile.
    async fn has_tasks(&self, connection: &mut PgConnection) -> Result<bool, Error> {
        sqlx::query!(
            "DELETE FROM tasks WHERE id IN (
                 SELECT id FROM tasks
                 WHERE organization_id = $1 AND deleted_at < $2 AND parked_intents = intents
                 ORDER BY created_at, id LIMIT $3 FOR UPDATE)",
            self.organization,
            sql(self.now - TASK_GRACE_PERIOD) as _,
            self.limit.min(TASK_BATCH),
        )
        .execute(&mut *connection)
        .await?;
        Ok(sqlx::query_scalar!(
            r#"SELECT EXISTS (SELECT 1 FROM tasks WHERE organization_id = $1) AS "left!""#,
            self.organization
        )
        .fetch_one(connection)
        .await?)
    }

    async fn has_scans(&self, connection: &mut PgConnection, row: &Row) -> Result<bool, Error> {
        if row.erasing_since + SCAN_GRACE_PERIOD < self.now {
            return Ok(false);
        }
        Ok(sqlx::query_scalar!(
            r#"SELECT EXISTS (
                   SELECT 1 FROM scans WHERE organization_id = $1 AND (next_wake IS NOT NULL OR cleaned_at IS NULL)) AS "left!""#,
            self.organization
        )
        .fetch_one(connection)
        .await?)
    }

    /// Removes the events of tasks and of the organization. Returns whether there were any.
    async fn events(
        &self,
        connection: &mut PgConnection,
        counts: &mut Counts,
    ) -> Result<bool, Error> {
        // The streams of tasks that were purged earlier.
        sqlx::query!(
            "INSERT INTO erased_tasks (id, organization_id, erased_at)
             SELECT DISTINCT stream_id, $1::uuid, $2::timestamptz FROM (
                 SELECT stream_id FROM events WHERE organization_id = $1 AND type = 'task.deleted' LIMIT $3) AS gone
             ON CONFLICT ON CONSTRAINT erased_tasks_pkey DO UPDATE SET organization_id = excluded.organization_id",
            self.organization,
            sql(self.now) as _,
            self.limit,
        )
        .execute(&mut *connection)
        .await?;
        let streams = sqlx::query_scalar!(
            "SELECT id FROM erased_tasks WHERE organization_id = $1 ORDER BY id LIMIT $2",
            self.organization,
            self.limit,
        )
        .fetch_all(&mut *connection)
        .await?;
        let of_tasks = sqlx::query!(
            "DELETE FROM events WHERE ctid = ANY (ARRAY (SELECT ctid FROM events WHERE stream_id = ANY ($1) LIMIT $2))",
            &streams,
            self.limit,
        )
        .execute(&mut *connection)
        .await?;
        let of_tasks = i64::try_from(of_tasks.rows_affected()).unwrap_or(i64::MAX);
        let emptied = sqlx::query!(
            "UPDATE erased_tasks t SET organization_id = NULL
             WHERE t.id = ANY ($1) AND NOT EXISTS (SELECT FROM events e WHERE e.stream_id = t.id)",
            &streams,
        )
        .execute(&mut *connection)
        .await?;
        let own = sqlx::query!(
            "DELETE FROM events WHERE stream_id = $1 AND sequence IN (
                 SELECT sequence FROM events WHERE stream_id = $1 ORDER BY sequence LIMIT $2)",
            self.organization,
            self.limit,
        )
        .execute(connection)
        .await?;
        let own = i64::try_from(own.rows_affected()).unwrap_or(i64::MAX);
        add_count(counts, "events", own.saturating_add(of_tasks));
        Ok(own > 0 || of_tasks > 0 || emptied.rows_affected() > 0)
    }

    /// Removes rows of the first tables that have any. Returns whether there were any.
    async fn tables(
        &self,
        connection: &mut PgConnection,
        counts: &mut Counts,
    ) -> Result<bool, Error> {
        let mut left = self.limit;
        for (table, found_by) in
            TABLES.into_iter().filter(|(_, found_by)| *found_by != REMOVED_WITH_TASKS)
        {
            // The names are constants of this file. One statement serves all tables, so it cannot
            // be checked at compile time.
            let cost = if table == "step_usage" { "cost_pico_usd" } else { "0" };
            let statement = format!(
                "WITH gone AS (
                     DELETE FROM {table} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {table} WHERE {found_by} LIMIT $2)) RETURNING {cost} AS cost)
                 SELECT count(*), coalesce(sum(cost), 0)::bigint FROM gone"
            );
            let (rows, cost): (i64, i64) = sqlx::query_as(sqlx::AssertSqlSafe(statement))
                .bind(self.organization)
                .bind(left)
                .fetch_one(&mut *connection)
                .await?;
            add_count(counts, table, rows);
            add_count(counts, "cost_pico_usd", cost);
            left -= rows;
            if left <= 0 {
                break;
            }
        }
        Ok(left < self.limit)
    }
}

fn add_count(counts: &mut Counts, what: &str, count: i64) {
    if count > 0 {
        let sum = counts.entry(what.to_owned()).or_default();
        *sum = sum.saturating_add(count);
    }
}

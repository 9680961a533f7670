//! Quotas of organizations, and their use. The operator writes the quotas as rows. The use is
//! always counted from the tables that hold the work, and stored nowhere else
//! (docs/adr/0033-quotas.md).

use std::collections::{BTreeMap, HashMap};

use jiff::{Timestamp, Unit, ZonedRound, tz::TimeZone};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::PgExecutor;
use uuid::Uuid;

use construct_domain::{ApiKeyId, OrganizationId};

use crate::{Error, Store, Write, WriteOutcome, WriteOutput, text, time, write::begin};

const ENTITY: &str = "organization";

/// Limits of an organization or API key. None: unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Calls of the API by an organization.
    pub requests_per_minute: Option<i64>,
    /// Calls of the API with each of its keys.
    pub key_requests_per_minute: Option<i64>,
    /// Created tasks, subtasks included.
    pub tasks_per_day: Option<i64>,
    /// Steps that ran scripts.
    pub runs_per_day: Option<i64>,
    /// Tokens that models read and wrote, cached or not.
    pub tokens_per_day: Option<i64>,
    /// What models cost, in 10⁻¹² US dollars.
    pub spend_per_month_pico_usd: Option<i64>,
    /// Stored bytes of files, uploads and clients' documents.
    pub storage_bytes: Option<i64>,
}

impl Limits {
    /// These limits; where one is not set, that of `others`.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self {
            requests_per_minute: self.requests_per_minute.or(others.requests_per_minute),
            key_requests_per_minute: self
                .key_requests_per_minute
                .or(others.key_requests_per_minute),
            tasks_per_day: self.tasks_per_day.or(others.tasks_per_day),
            runs_per_day: self.runs_per_day.or(others.runs_per_day),
            tokens_per_day: self.tokens_per_day.or(others.tokens_per_day),
            spend_per_month_pico_usd: self
                .spend_per_month_pico_usd
                .or(others.spend_per_month_pico_usd),
            storage_bytes: self.storage_bytes.or(others.storage_bytes),
        }
    }

    /// Decodes the value of a column.
    pub(crate) fn from_column(stored: Value) -> Result<Self, Error> {
        serde_json::from_value(stored).map_err(Error::internal)
    }

    /// Replaces all of them.
    pub fn all(&self) -> [Option<i64>; 7] {
        [
            self.requests_per_minute,
            self.key_requests_per_minute,
            self.tasks_per_day,
            self.runs_per_day,
            self.tokens_per_day,
            self.spend_per_month_pico_usd,
            self.storage_bytes,
        ]
    }
}

/// The quota that the operator set for an organization.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quota {
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// The name of its tier; empty: the default tier.
    pub tier: String,
    /// Limits that replace those of the tier.
    pub overrides: Limits,
    /// Incremented by every change; 0: no quota was set.
    pub revision: i64,
    /// When it last changed.
    pub updated_at: Option<Timestamp>,
}

/// The current quota periods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Periods {
    /// Start of the day.
    pub day: Timestamp,
    /// Start of the next one.
    pub next_day: Timestamp,
    /// Start of the month.
    pub month: Timestamp,
    /// Start of the next one.
    pub next_month: Timestamp,
}

impl Periods {
    /// The UTC day and month that contain a time.
    pub fn containing(now: Timestamp) -> Self {
        let zoned = now.to_zoned(TimeZone::UTC);
        // Rounding and adding fail only at the ends of time.
        let day = zoned.round(ZonedRound::new().smallest(Unit::Day).mode(jiff::RoundMode::Trunc));
        let day = day.unwrap_or_else(|_| zoned.clone());
        let month = day.first_of_month().unwrap_or_else(|_| day.clone());
        let next = |from: &jiff::Zoned, span: jiff::Span| {
            from.checked_add(span).map_or(now, |at| at.timestamp())
        };
        Self {
            day: day.timestamp(),
            next_day: next(&day, jiff::Span::new().days(1)),
            month: month.timestamp(),
            next_month: next(&month, jiff::Span::new().months(1)),
        }
    }
}

/// The use of a quota.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tasks created today.
    pub tasks: i64,
    /// Steps that ran scripts today.
    pub runs: i64,
    /// Tokens of today.
    pub tokens: i64,
    /// Spent this month, in 10⁻¹² US dollars.
    pub spend_pico_usd: i64,
    /// Stored bytes of files, uploads and clients' documents.
    pub storage_bytes: i64,
}

/// Selects what is selection. Everything else is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CountSelection {
    /// [`Counts::tasks`].
    pub tasks: bool,
    /// [`Counts::runs`].
    pub runs: bool,
    /// [`Counts::tokens`].
    pub tokens: bool,
    /// [`Counts::spend_pico_usd`].
    pub spend: bool,
    /// [`Counts::storage_bytes`].
    pub storage: bool,
}

impl CountSelection {
    /// The union of two selections.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self {
            tasks: self.tasks || other.tasks,
            runs: self.runs || other.runs,
            tokens: self.tokens || other.tokens,
            spend: self.spend || other.spend,
            storage: self.storage || other.storage,
        }
    }

    /// Everything.
    pub const ALL: Self =
        Self { tasks: true, runs: true, tokens: true, spend: true, storage: true };

    /// What these limits apply to.
    pub fn for_limits(limits: &Limits) -> Self {
        Self {
            tasks: limits.tasks_per_day.is_some(),
            runs: limits.runs_per_day.is_some(),
            tokens: limits.tokens_per_day.is_some(),
            spend: limits.spend_per_month_pico_usd.is_some(),
            storage: limits.storage_bytes.is_some(),
        }
    }
}

/// The smallest id of a task that was created at this time or later: a UUIDv7 begins with its time.
fn least_id(time: Timestamp) -> Uuid {
    let millis = u64::try_from(time.as_millisecond()).unwrap_or_default();
    uuid::Builder::from_unix_timestamp_millis(millis, &[0; 10]).into_uuid()
}

/// Each period has two bounds, so that a generic plan reads only a part of an index.
macro_rules! counts {
    ($organization:expr, $selection:expr, $periods:expr) => {
        sqlx::query_as!(
            Counts,
            r#"SELECT
                   CASE WHEN $2 THEN
                       (SELECT count(*) FROM tasks t
                        WHERE t.organization_id = $1 AND t.created_at >= $7 AND t.created_at < $10 AND t.deleted_at IS NULL)
                       -- Those of a version other than 7 are subtasks, whose ids don't say when they were made.
                       + (SELECT count(*) FROM events e
                          WHERE e.organization_id = $1 AND e.type = 'task.deleted' AND e.stream_id >= $9 AND e.stream_id < $12
                            AND substr(e.stream_id::text, 15, 1) = '7')
                   ELSE 0 END AS "tasks!",
                   CASE WHEN $3 THEN
                       (SELECT count(*) FROM messages m
                        WHERE m.organization_id = $1 AND m.created_at >= $7 AND m.created_at < $10 AND m.step_id IS NOT NULL
                          AND m.content #>> '{blocks,0,kind}' = 'code_interpreter_result')
                   ELSE 0 END AS "runs!",
                   CASE WHEN $4 THEN
                       (SELECT least(coalesce(sum(u.input_tokens::numeric + u.output_tokens + u.cache_read_tokens
                                                  + u.cache_write_tokens), 0), 9223372036854775807)
                        FROM step_usage u WHERE u.organization_id = $1 AND u.created_at >= $7 AND u.created_at < $10)::bigint
                   ELSE 0 END AS "tokens!",
                   CASE WHEN $5 THEN
                       (SELECT least(coalesce(sum(u.cost_pico_usd), 0), 9223372036854775807)
                        FROM step_usage u WHERE u.organization_id = $1 AND u.created_at >= $8 AND u.created_at < $11)::bigint
                   ELSE 0 END AS "spend_pico_usd!",
                   CASE WHEN $6 THEN
                       least(
                           (SELECT coalesce(sum(split_part(s.archive, ';size=', 2)::numeric), 0) FROM scans s
                            WHERE s.organization_id = $1 AND s.archive IS NOT NULL AND s.cleaned_at IS NULL)
                           + (SELECT coalesce(sum(f.size), 0) FROM files f WHERE f.organization_id = $1 AND f.state <> 'refused')
                           + (SELECT coalesce(sum(octet_length(d.json)), 0) FROM states d WHERE d.organization_id = $1)
                           + (SELECT coalesce(sum(octet_length(v.json)), 0) FROM state_versions v WHERE v.organization_id = $1),
                           9223372036854775807)::bigint
                   ELSE 0 END AS "storage_bytes!""#,
            $organization.uuid(),
            $selection.tasks,
            $selection.runs,
            $selection.tokens,
            $selection.spend,
            $selection.storage,
            time::sql($periods.day) as _,
            time::sql($periods.month) as _,
            least_id($periods.day),
            time::sql($periods.next_day) as _,
            time::sql($periods.next_month) as _,
            least_id($periods.next_day),
        )
    };
}

/// The use of all API keys of an organization that have any. They are read together by organization
/// and time, so that single keys need no index.
macro_rules! key_counts {
    ($organization:expr, $selection:expr, $periods:expr) => {
        sqlx::query!(
            r#"SELECT done.key AS "key!", sum(done.tasks)::bigint AS "tasks!", sum(done.runs)::bigint AS "runs!",
                   least(sum(done.tokens), 9223372036854775807)::bigint AS "tokens!",
                   least(sum(done.spent), 9223372036854775807)::bigint AS "spend_pico_usd!",
                   least(sum(done.kept), 9223372036854775807)::bigint AS "storage_bytes!"
               FROM (
                   -- One that is deleted, but whose row is there, says itself which key it was begun with. Those have an index of their own.
                   SELECT t.api_key_id AS key, 1 AS tasks, 0 AS runs, 0::numeric AS tokens, 0::numeric AS spent, 0::numeric AS kept
                   FROM tasks t
                   WHERE $2 AND t.organization_id = $1 AND t.created_at >= $6 AND t.created_at < $9 AND t.api_key_id IS NOT NULL
                     AND t.deleted_at IS NULL
                   UNION ALL
                   SELECT t.api_key_id, 1, 0, 0, 0, 0
                   FROM tasks t
                   WHERE $2 AND t.organization_id = $1 AND t.created_at >= $6 AND t.created_at < $9 AND t.api_key_id IS NOT NULL
                     AND t.deleted_at IS NOT NULL
                   UNION ALL
                   SELECT e.api_key_id, 1, 0, 0, 0, 0
                   FROM events e
                   WHERE $2 AND e.organization_id = $1 AND e.type = 'task.deleted' AND e.stream_id >= $8 AND e.stream_id < $11
                     AND substr(e.stream_id::text, 15, 1) = '7' AND e.api_key_id IS NOT NULL
                   UNION ALL
                   SELECT m.api_key_id, 0, 1, 0, 0, 0
                   FROM messages m
                   WHERE $3 AND m.organization_id = $1 AND m.created_at >= $6 AND m.created_at < $9 AND m.step_id IS NOT NULL
                     AND m.content #>> '{blocks,0,kind}' = 'code_interpreter_result' AND m.api_key_id IS NOT NULL
                   UNION ALL
                   SELECT u.api_key_id, 0, 0, u.input_tokens::numeric + u.output_tokens + u.cache_read_tokens + u.cache_write_tokens, 0, 0
                   FROM step_usage u
                   WHERE $4 AND u.organization_id = $1 AND u.created_at >= $6 AND u.created_at < $9 AND u.api_key_id IS NOT NULL
                   UNION ALL
                   SELECT u.api_key_id, 0, 0, 0, u.cost_pico_usd, 0
                   FROM step_usage u
                   WHERE $5 AND u.organization_id = $1 AND u.created_at >= $7 AND u.created_at < $10 AND u.api_key_id IS NOT NULL
                   UNION ALL
                   SELECT s.api_key_id, 0, 0, 0, 0, split_part(s.archive, ';size=', 2)::numeric
                   FROM scans s
                   WHERE $12 AND s.organization_id = $1 AND s.archive IS NOT NULL AND s.cleaned_at IS NULL AND s.api_key_id IS NOT NULL
                   UNION ALL
                   SELECT f.api_key_id, 0, 0, 0, 0, f.size
                   FROM files f
                   WHERE $12 AND f.organization_id = $1 AND f.state <> 'refused' AND f.api_key_id IS NOT NULL
                   UNION ALL
                   SELECT d.api_key_id, 0, 0, 0, 0, octet_length(d.json)
                   FROM states d
                   WHERE $12 AND d.organization_id = $1 AND d.json IS NOT NULL AND d.api_key_id IS NOT NULL
                   UNION ALL
                   SELECT v.api_key_id, 0, 0, 0, 0, octet_length(v.json)
                   FROM state_versions v
                   WHERE $12 AND v.organization_id = $1 AND v.api_key_id IS NOT NULL
               ) AS done
               GROUP BY done.key"#,
            $organization.uuid(),
            $selection.tasks,
            $selection.runs,
            $selection.tokens,
            $selection.spend,
            time::sql($periods.day) as _,
            time::sql($periods.month) as _,
            least_id($periods.day),
            time::sql($periods.next_day) as _,
            time::sql($periods.next_month) as _,
            least_id($periods.next_day),
            $selection.storage,
        )
    };
}

/// [`Store::quota_counts`], also within a transaction.
pub(crate) async fn counts(
    executor: impl PgExecutor<'_>,
    organization: OrganizationId,
    selection: CountSelection,
    periods: &Periods,
) -> Result<Counts, Error> {
    Ok(counts!(organization, selection, periods).fetch_one(executor).await?)
}

/// [`Store::quota_key_counts`], also within a transaction.
pub(crate) async fn key_counts(
    executor: impl PgExecutor<'_>,
    organization: OrganizationId,
    selection: CountSelection,
    periods: &Periods,
) -> Result<HashMap<ApiKeyId, Counts>, Error> {
    let rows = key_counts!(organization, selection, periods).fetch_all(executor).await?;
    let counts = rows.into_iter().map(|row| {
        let counts = Counts {
            tasks: row.tasks,
            runs: row.runs,
            tokens: row.tokens,
            spend_pico_usd: row.spend_pico_usd,
            storage_bytes: row.storage_bytes,
        };
        (ApiKeyId::from_uuid(row.key), counts)
    });
    Ok(counts.collect())
}

impl Store {
    /// Stores the configured tiers, and the name of the default tier; empty: unlimited by default.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn tiers_set(
        &self,
        tiers: &BTreeMap<String, Limits>,
        default: &str,
    ) -> Result<(), Error> {
        let names: Vec<String> = tiers.keys().cloned().collect();
        let limits = tiers.values().map(text::json).collect::<Result<Vec<_>, _>>()?;
        let mut transaction = self.pool.begin().await?;
        // Several gateways may start at once.
        sqlx::query!("LOCK TABLE tiers IN SHARE ROW EXCLUSIVE MODE")
            .execute(&mut *transaction)
            .await?;
        sqlx::query!("DELETE FROM tiers WHERE name <> ALL($1)", &names)
            .execute(&mut *transaction)
            .await?;
        sqlx::query!(
            "INSERT INTO tiers (name, limits, is_default) SELECT name, limits, name = $3 FROM unnest($1::text[], $2::jsonb[]) AS t (name, limits)
             ON CONFLICT ON CONSTRAINT tiers_pkey DO UPDATE SET limits = excluded.limits, is_default = excluded.is_default",
            &names,
            &limits,
            default,
        )
        .execute(&mut *transaction)
        .await?;
        Ok(transaction.commit().await?)
    }

    /// The quota of an organization. Most have none.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the organization does not exist; [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn quota_get(&self, organization: OrganizationId) -> Result<Quota, Error> {
        let row = sqlx::query!(
            r#"SELECT q.tier AS "tier?", q.requests_per_minute, q.key_requests_per_minute, q.tasks_per_day, q.runs_per_day,
                      q.tokens_per_day, q.spend_per_month_pico_usd, q.storage_bytes, q.revision AS "revision?",
                      q.updated_at AS "updated_at?: jiff_sqlx::Timestamp"
               FROM organizations o LEFT JOIN quotas q ON q.organization_id = o.id
               WHERE o.id = $1 AND o.deleted_at IS NULL"#,
            organization.uuid(),
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?;
        Ok(Quota {
            organization,
            tier: row.tier.unwrap_or_default(),
            overrides: Limits {
                requests_per_minute: row.requests_per_minute,
                key_requests_per_minute: row.key_requests_per_minute,
                tasks_per_day: row.tasks_per_day,
                runs_per_day: row.runs_per_day,
                tokens_per_day: row.tokens_per_day,
                spend_per_month_pico_usd: row.spend_per_month_pico_usd,
                storage_bytes: row.storage_bytes,
            },
            revision: row.revision.unwrap_or_default(),
            updated_at: time::from_sql_option(row.updated_at),
        })
    }

    /// Sets the quota of an organization. The write and its idempotency key belong to the
    /// operator's organization.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the organization does not exist; [`Error::Conflict`] when the
    /// revision is not the expected one; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn quota_set(
        &self,
        write: &Write,
        organization: OrganizationId,
        tier: &str,
        overrides: Limits,
        expected_revision: Option<i64>,
        render: impl FnOnce(&Quota) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Quota>, Error> {
        let mut writer = begin!(self, write);
        let organization_exists = sqlx::query_scalar!(
            "SELECT id FROM organizations WHERE id = $1 AND deleted_at IS NULL FOR KEY SHARE",
            organization.uuid(),
        );
        organization_exists
            .fetch_optional(&mut *writer.transaction)
            .await?
            .ok_or(Error::NotFound { what: ENTITY })?;
        // Of two concurrent inserts one updates the row of the other.
        let revision = sqlx::query_scalar!(
            "INSERT INTO quotas AS q
                 (organization_id, tier, requests_per_minute, key_requests_per_minute, tasks_per_day, runs_per_day, tokens_per_day,
                  spend_per_month_pico_usd, storage_bytes, created_at, updated_at)
             SELECT $1::uuid, $2::text, $3::bigint, $4::bigint, $5::bigint, $6::bigint, $7::bigint, $8::bigint, $9::bigint,
                    $10::timestamptz, $10::timestamptz
             WHERE $11::bigint IS NULL OR EXISTS (SELECT FROM quotas known WHERE known.organization_id = $1)
             ON CONFLICT ON CONSTRAINT quotas_pkey DO UPDATE SET
                 tier = $2, requests_per_minute = $3, key_requests_per_minute = $4, tasks_per_day = $5, runs_per_day = $6,
                 tokens_per_day = $7, spend_per_month_pico_usd = $8, storage_bytes = $9, revision = q.revision + 1,
                 updated_at = $10
             WHERE $11::bigint IS NULL OR q.revision = $11
             RETURNING revision",
            organization.uuid(),
            tier,
            overrides.requests_per_minute,
            overrides.key_requests_per_minute,
            overrides.tasks_per_day,
            overrides.runs_per_day,
            overrides.tokens_per_day,
            overrides.spend_per_month_pico_usd,
            overrides.storage_bytes,
            writer.now() as _,
            expected_revision,
        )
        .fetch_optional(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?
        .ok_or(Error::Conflict)?;
        let updated_at = Some(time::micros(write.now));
        let quota = Quota { organization, tier: tier.to_owned(), overrides, revision, updated_at };
        writer.finish_unchanged(quota, render).await
    }

    /// The use of an organization in `periods`.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn quota_counts(
        &self,
        organization: OrganizationId,
        selection: CountSelection,
        periods: &Periods,
    ) -> Result<Counts, Error> {
        counts(&self.pool, organization, selection, periods).await
    }

    /// The use of each API key of an organization in `periods`, and the storage that counts for it.
    /// Keys without any use are missing.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn quota_key_counts(
        &self,
        organization: OrganizationId,
        selection: CountSelection,
        periods: &Periods,
    ) -> Result<HashMap<ApiKeyId, Counts>, Error> {
        key_counts(&self.pool, organization, selection, periods).await
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use sqlx::Execute as _;

    use super::*;

    /// The statement of [`Store::quota_counts`], for tests of its plan.
    pub(crate) fn statement() -> String {
        let (organization, periods) =
            (OrganizationId::LOCAL, Periods::containing(Timestamp::UNIX_EPOCH));
        counts!(organization, CountSelection::ALL, periods).sql().as_str().to_owned()
    }

    /// The statement of [`Store::quota_key_counts`].
    pub(crate) fn key_statement() -> String {
        let (organization, periods) =
            (OrganizationId::LOCAL, Periods::containing(Timestamp::UNIX_EPOCH));
        key_counts!(organization, CountSelection::ALL, periods).sql().as_str().to_owned()
    }

    #[test]
    fn quota_periods_are_utc_days_and_months() {
        let at = |text: &str| text.parse::<Timestamp>().expect("a time");
        let periods = Periods::containing(at("2026-12-31T23:59:59.999999Z"));
        assert_eq!(
            [periods.day, periods.next_day, periods.month, periods.next_month],
            [
                "2026-12-31T00:00:00Z",
                "2027-01-01T00:00:00Z",
                "2026-12-01T00:00:00Z",
                "2027-01-01T00:00:00Z"
            ]
            .map(at)
        );
        assert_eq!(Periods::containing(at("2027-01-01T00:00:00Z")).day, at("2027-01-01T00:00:00Z"));
    }

    #[test]
    fn quota_overrides_replace_limits_of_the_tier() {
        let tier = Limits { tasks_per_day: Some(5), runs_per_day: Some(7), ..Limits::default() };
        let overrides =
            Limits { tasks_per_day: Some(0), storage_bytes: Some(1), ..Limits::default() };
        let both = overrides.or(tier);
        assert_eq!(
            (both.tasks_per_day, both.runs_per_day, both.storage_bytes),
            (Some(0), Some(7), Some(1))
        );
        assert_eq!(both.all().iter().flatten().count(), 3);
    }

    #[test]
    fn least_id_bounds_ids_by_time() {
        let at = |millis| Timestamp::from_millisecond(millis).expect("a time");
        let id = uuid::Builder::from_unix_timestamp_millis(1_800_000_000_000, &[7; 10]).into_uuid();
        assert!(id >= least_id(at(1_800_000_000_000)) && id < least_id(at(1_800_000_000_001)));
    }
}

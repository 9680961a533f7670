//! Reservations: money that is reserved before a call and settled after it.
//! `migrations/0012_money.sql` defines the functions that are called here, and their lock order.

use jiff::Timestamp;
use serde::Deserialize;
use uuid::Uuid;

use construct_domain::{
    ApiKeyId, ModelId, OrganizationId, StepId, TaskId,
    budget::{ExhaustedBudget, Period, Scope},
    money::Usage,
};

use crate::{Error, Store, text, time, usage::Booking};

/// The SQLSTATE of `budgets_reserve_tree` when a budget cannot cover a reservation.
pub(crate) const EXHAUSTED_SQLSTATE: &str = "CB001";
/// Reservations that one cleanup expires at most.
const EXPIRE_BATCH: i64 = 500;
/// Age at which a new budget is recounted. By then all transactions that began before it existed
/// have ended: statements may take 5 s, and an idle transaction twice that.
const RECOUNT_DELAY: jiff::SignedDuration = jiff::SignedDuration::from_secs(30);
/// How long a report can still replace a reservation that was counted as spent.
const EXPIRED_RETENTION: jiff::SignedDuration = jiff::SignedDuration::from_hours(24 * 90);
/// How long the spending of a token is kept. Longer than a token is valid.
const TOKEN_RETENTION: jiff::SignedDuration = jiff::SignedDuration::from_hours(24 * 366);

/// The reservation of a step, made in the commit that starts it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepReservation {
    /// The step.
    pub step: StepId,
    /// Upper estimate of its cost.
    pub amount_pico_usd: i64,
    /// When it is released if the step does not report.
    pub expires_at: Timestamp,
}

/// The reservation of a call outside a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallReservation {
    /// Its id. A repeated id requests the same reservation.
    pub id: Uuid,
    /// The organization that pays.
    pub organization: OrganizationId,
    /// The task it is for.
    pub task: Option<TaskId>,
    /// The token of the call, and the limit of its total spending; 0: limited only by the other
    /// budgets.
    pub token: Option<(String, i64)>,
    /// Upper estimate of the cost.
    pub amount_pico_usd: i64,
    /// A reservation that is not settled by then counts as spent.
    pub expires_at: Timestamp,
}

/// The usage of a call outside a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallReport {
    /// The call's id. It is booked once.
    pub id: Uuid,
    /// Its reservation.
    pub reservation: Option<Uuid>,
    /// The organization that pays.
    pub organization: OrganizationId,
    /// The task it is for.
    pub task: Option<TaskId>,
    /// The API key that the token was created with; none: it counts for the key that the task's
    /// work counts for.
    pub key: Option<ApiKeyId>,
    /// The called model.
    pub model: ModelId,
    /// The purpose, in a word or two.
    pub purpose: String,
    /// How much.
    pub usage: Usage,
}

/// What a cleanup of reservations and budgets did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CleanupReport {
    /// Reservations that expired.
    pub expired: u64,
    /// Budgets that were recounted.
    pub recounted: u64,
}

#[derive(Deserialize)]
struct ExhaustedDetail {
    agent: Option<String>,
    task_id: Option<Uuid>,
    token_id: Option<String>,
    period: String,
    limit: i64,
    spent: i64,
    reserved: i64,
    needed: i64,
    agent_id: Option<Uuid>,
}

/// Parses the error detail of the function: which budget is exhausted.
pub(crate) fn parse_exhausted(detail: Option<&str>) -> Result<ExhaustedBudget, String> {
    let detail: ExhaustedDetail =
        serde_json::from_str(detail.unwrap_or_default()).map_err(|error| error.to_string())?;
    let period = Period::parse(&detail.period)
        .ok_or_else(|| format!("unknown period `{}`", detail.period))?;
    let scope = match (detail.agent_id, detail.task_id, detail.token_id) {
        (Some(agent), ..) => Scope::Agent(construct_domain::AgentId::from_uuid(agent)),
        (_, Some(task), _) => Scope::Task(TaskId::from_uuid(task)),
        (_, _, Some(token)) => Scope::Token(token),
        (None, None, None) => Scope::Organization,
    };
    let ExhaustedDetail { limit, spent, reserved, needed, .. } = detail;
    Ok(ExhaustedBudget {
        scope,
        agent_name: detail.agent.unwrap_or_default(),
        period,
        limit,
        spent,
        reserved,
        needed,
    })
}

impl Store {
    /// Reserves money for a call outside a turn. Stores nothing when no budget applies.
    ///
    /// # Errors
    /// [`Error::Exhausted`]; [`Error::NotFound`] when there is no such organization;
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn call_reserve(
        &self,
        request: &CallReservation,
        now: Timestamp,
    ) -> Result<(), Error> {
        let mut transaction = self.pool.begin().await?;
        let (organization, token) = (request.organization.uuid(), request.token.as_ref());
        if let Some((token, limit)) = token.filter(|(_, limit)| *limit > 0) {
            sqlx::query!(
                "INSERT INTO budgets
                     (id, organization_id, token_id, period, limit_pico_usd, window_start, counted_at, created_at, updated_at)
                 VALUES ($1, $2, $3, 'total', $4, budgets_window('total', $5), $5, $5, $5)
                 ON CONFLICT ON CONSTRAINT budgets_scope_key DO NOTHING",
                Uuid::now_v7(),
                organization,
                &*text::clean(token),
                limit,
                time::sql(now) as _,
            )
            .execute(&mut *transaction)
            .await
            .map_err(Error::from_write)?;
        }
        sqlx::query!(
            r#"SELECT budgets_reserve_tree(
                   $1, $2, (SELECT agent_id FROM tasks WHERE organization_id = $2 AND id = $3),
                   coalesce((SELECT ancestors || id FROM tasks WHERE organization_id = $2 AND id = $3), array_remove(ARRAY[$3::uuid], NULL)), $4, $5, $6,
                   true, $7
               )::text AS "done""#,
            request.id,
            organization,
            request.task.map(TaskId::uuid) as _,
            token.map(|(token, _)| text::clean(token).into_owned()) as _,
            request.amount_pico_usd.max(0),
            time::sql(request.expires_at) as _,
            time::sql(now) as _,
        )
        .fetch_one(&mut *transaction)
        .await
        .map_err(Error::from_reservation)?;
        transaction.commit().await?;
        Ok(())
    }

    /// Books the usage of a call outside a turn, and settles its reservation. False when it was
    /// booked before.
    ///
    /// # Errors
    /// [`Error::Unavailable`]; [`Error::NotFound`] when there is no such organization.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn call_book(&self, report: &CallReport, now: Timestamp) -> Result<bool, Error> {
        let booking = Booking {
            call: report.id,
            organization: report.organization,
            task: report.task,
            agent: None,
            key: report.key,
            model: report.model,
            purpose: &text::clean(&report.purpose),
            usage: &report.usage,
            reservation: report.reservation,
            is_final: false,
        };
        self.book(&booking, now).await
    }

    /// Releases the reservation of a step that used nothing.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn step_release(
        &self,
        organization: OrganizationId,
        step: StepId,
        now: Timestamp,
    ) -> Result<(), Error> {
        sqlx::query!(
            r#"SELECT budgets_settle_tree($1, $2, NULL, NULL, 0, true, $3)::text AS "done""#,
            step.uuid(),
            organization.uuid(),
            time::sql(now) as _,
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(())
    }

    /// Marks a step as abandoned: its reservation is released at `until`, unless its worker reports
    /// its usage before.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn step_abandon(&self, step: StepId, until: Timestamp) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE reservations SET expires_at = least(expires_at, $2) WHERE id = $1",
            step.uuid(),
            time::sql(until) as _,
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Expires reservations and recounts new budgets. May run in several processes at once.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn budgets_cleanup(&self, now: Timestamp) -> Result<CleanupReport, Error> {
        let mut tidied = CleanupReport::default();
        let over = sqlx::query_scalar!(
            "SELECT id FROM reservations WHERE expires_at <= $1 AND expired_at IS NULL ORDER BY expires_at LIMIT $2",
            time::sql(now),
            EXPIRE_BATCH,
        )
        .fetch_all(&self.pool)
        .await?;
        for id in over {
            // One by one: a single transaction would lock every budget at once.
            let ended = sqlx::query_scalar!(
                r#"SELECT budgets_expire($1, $2) AS "ended!""#,
                id,
                time::sql(now) as _
            )
            .fetch_one(&self.pool)
            .await?;
            tidied.expired += u64::from(ended);
        }
        let new = sqlx::query_scalar!(
            "SELECT id FROM budgets
             WHERE token_id IS NULL AND created_at <= $1 AND (counted_at IS NULL OR counted_at < created_at + $2::float8 * interval '1 second')",
            time::sql(now - RECOUNT_DELAY),
            RECOUNT_DELAY.as_secs_f64(),
        )
        .fetch_all(&self.pool)
        .await?;
        for id in new {
            sqlx::query!(
                r#"SELECT budgets_count($1, $2)::text AS "done""#,
                id,
                time::sql(now) as _
            )
            .fetch_one(&self.pool)
            .await?;
            tidied.recounted += 1;
        }
        sqlx::query!(
            "DELETE FROM reservations WHERE expired_at < $1",
            time::sql(now - EXPIRED_RETENTION)
        )
        .execute(&self.pool)
        .await?;
        sqlx::query!(
            "DELETE FROM budgets WHERE token_id IS NOT NULL AND created_at < $1 AND reserved_pico_usd = 0",
            time::sql(now - TOKEN_RETENTION)
        )
        .execute(&self.pool)
        .await?;
        Ok(tidied)
    }
}

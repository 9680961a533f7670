//! The ledger: what each model call used, once, however often its result is delivered.

use jiff::Timestamp;
use serde::Serialize;

use construct_domain::{ModelId, OrganizationId, StepId, TaskId, money::Usage};

use crate::{Error, Store, time};

/// What a model was called for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// An answer in the conversation.
    Turn,
    /// A title for the task.
    Title,
}

impl Purpose {
    /// As stored.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Turn => "turn",
            Self::Title => "title",
        }
    }
}

/// What one step used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepUsage {
    /// The step: what is counted once.
    pub step: StepId,
    /// The model that was called.
    pub model: ModelId,
    /// What for.
    pub purpose: Purpose,
    /// How much.
    pub usage: Usage,
}

/// A row of the ledger as a statement reads it from JSON.
#[derive(Serialize)]
pub(crate) struct LedgerRow {
    step_id: uuid::Uuid,
    model_id: uuid::Uuid,
    purpose: &'static str,
    #[serde(flatten)]
    usage: Usage,
}

impl From<&StepUsage> for LedgerRow {
    fn from(entry: &StepUsage) -> Self {
        Self {
            step_id: entry.step.uuid(),
            model_id: entry.model.uuid(),
            purpose: entry.purpose.as_str(),
            usage: entry.usage,
        }
    }
}

impl Store {
    /// Books what a step used whose result came too late to matter otherwise, and adds it to its task's sums. The
    /// task's version stays, so that no commit on its way is disturbed. False when it was booked before.
    ///
    /// # Errors
    /// [`Error::Unavailable`]; [`Error::NotFound`] when there is no such organisation.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn step_usage_record(
        &self,
        organization: OrganizationId,
        task: TaskId,
        entry: &StepUsage,
        now: Timestamp,
    ) -> Result<bool, Error> {
        let mut transaction = self.pool.begin().await?;
        let usage = &entry.usage;
        let done = sqlx::query!(
            "INSERT INTO step_usage
                 (step_id, organization_id, task_id, model_id, purpose,
                  input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, cost_pico_usd, created_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
             ON CONFLICT ON CONSTRAINT step_usage_pkey DO NOTHING",
            entry.step.uuid(),
            organization.uuid(),
            task.uuid(),
            entry.model.uuid(),
            entry.purpose.as_str(),
            usage.input_tokens,
            usage.output_tokens,
            usage.cache_read_tokens,
            usage.cache_write_tokens,
            usage.cost_pico_usd,
            time::sql(now),
        )
        .execute(&mut *transaction)
        .await
        .map_err(Error::of_write)?;
        let new = done.rows_affected() == 1;
        if new {
            // Sums stop at the greatest number instead of failing, like `Usage` itself.
            sqlx::query!(
                "UPDATE tasks SET
                     input_tokens = least(input_tokens::numeric + $3::bigint, 9223372036854775807)::bigint,
                     output_tokens = least(output_tokens::numeric + $4::bigint, 9223372036854775807)::bigint,
                     cache_read_tokens = least(cache_read_tokens::numeric + $5::bigint, 9223372036854775807)::bigint,
                     cache_write_tokens = least(cache_write_tokens::numeric + $6::bigint, 9223372036854775807)::bigint,
                     cost_pico_usd = least(cost_pico_usd::numeric + $7::bigint, 9223372036854775807)::bigint,
                     revision = revision + 1,
                     updated_at = $8
                 WHERE id = $1 AND organization_id = $2",
                task.uuid(),
                organization.uuid(),
                usage.input_tokens as _,
                usage.output_tokens as _,
                usage.cache_read_tokens as _,
                usage.cache_write_tokens as _,
                usage.cost_pico_usd as _,
                time::sql(now) as _,
            )
            .execute(&mut *transaction)
            .await?;
        }
        transaction.commit().await?;
        Ok(new)
    }
}

//! The ledger: the usage of each model call, booked once however often its result is delivered. A
//! step whose command two workers executed has two calls.

use jiff::Timestamp;
use serde::Serialize;

use construct_domain::{AgentId, ApiKeyId, ModelId, OrganizationId, StepId, TaskId, money::Usage};
use uuid::Uuid;

use crate::{Error, Store, time};

/// The purpose of a model call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// An answer in the conversation.
    Turn,
    /// A title for the task.
    Title,
    /// A summary of the older part of the conversation.
    Compaction,
}

impl Purpose {
    /// The stored form.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Turn => "turn",
            Self::Title => "title",
            Self::Compaction => "compaction",
        }
    }
}

/// The usage of one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepUsage {
    /// The step.
    pub step: StepId,
    /// Its id in the ledger, where it is booked once. When a live worker was considered dead, or a
    /// command was redelivered, two workers called the vendor for one step, each with its own id.
    pub call: Uuid,
    /// The model that was called.
    pub model: ModelId,
    /// Its purpose.
    pub purpose: Purpose,
    /// How much.
    pub usage: Usage,
}

/// A row of the ledger, as a statement reads it from JSON.
#[derive(Serialize)]
pub(crate) struct LedgerRow {
    step_id: Uuid,
    model_id: Uuid,
    purpose: &'static str,
    #[serde(flatten)]
    usage: Usage,
}

impl From<&StepUsage> for LedgerRow {
    fn from(entry: &StepUsage) -> Self {
        Self {
            step_id: entry.call,
            model_id: entry.model.uuid(),
            purpose: entry.purpose.as_str(),
            usage: entry.usage,
        }
    }
}

/// An entry to book in the ledger.
pub(crate) struct Booking<'a> {
    /// [`StepUsage::call`], or the id of a call outside a turn: booked once.
    pub(crate) call: Uuid,
    pub(crate) organization: OrganizationId,
    pub(crate) task: Option<TaskId>,
    /// The calling agent; none: the agent of the reservation, or of the task.
    pub(crate) agent: Option<AgentId>,
    /// The API key that it counts for; none: the key that the task's work counts for.
    pub(crate) key: Option<ApiKeyId>,
    pub(crate) model: ModelId,
    pub(crate) purpose: &'a str,
    pub(crate) usage: &'a Usage,
    pub(crate) reservation: Option<Uuid>,
    /// Whether this is the last report for the reservation.
    pub(crate) is_final: bool,
}

impl Store {
    /// Books the usage of a step whose result came too late for its turn: adds it to the sums of
    /// its task and settles its reservation. The task's version stays the same, so that no
    /// concurrent commit conflicts. The task may be deleted. False when it was booked before.
    ///
    /// # Errors
    /// [`Error::Unavailable`]; [`Error::NotFound`] when the organization does not exist.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn step_usage_record(
        &self,
        organization: OrganizationId,
        task: TaskId,
        agent: Option<AgentId>,
        entry: &StepUsage,
        now: Timestamp,
    ) -> Result<bool, Error> {
        let booking = Booking {
            call: entry.call,
            organization,
            task: Some(task),
            agent,
            key: None,
            model: entry.model,
            purpose: entry.purpose.as_str(),
            usage: &entry.usage,
            reservation: Some(entry.step.uuid()),
            is_final: true,
        };
        self.book(&booking, now).await
    }

    pub(crate) async fn book(&self, booking: &Booking<'_>, now: Timestamp) -> Result<bool, Error> {
        let mut transaction = self.pool.begin().await?;
        let Booking {
            call,
            organization,
            task,
            agent,
            key,
            model,
            purpose,
            usage,
            reservation,
            is_final,
        } = booking;
        let (organization, task) = (organization.uuid(), task.map(TaskId::uuid));
        let booked = sqlx::query!(
            "INSERT INTO step_usage
                 (step_id, organization_id, task_id, model_id, purpose, input_tokens, output_tokens, cache_read_tokens,
                  cache_write_tokens, cost_pico_usd, created_at, thinking_tokens, root_id, agent_id, tree, api_key_id)
             SELECT $1::uuid, $2::uuid, $3::uuid, $4::uuid, $5::text, $6::bigint, $7::bigint, $8::bigint, $9::bigint, $10::bigint,
                    $11::timestamptz, $12::bigint, coalesce(t.root_id, r.root_id, $3), coalesce($13::uuid, r.agent_id, t.agent_id),
                    CASE WHEN cardinality(whole.tree) > 1 THEN whole.tree END, coalesce($15::uuid, t.asked_key_id)
             FROM (SELECT) AS once
             LEFT JOIN tasks t ON t.organization_id = $2 AND t.id = $3
             LEFT JOIN reservations r ON r.organization_id = $2 AND r.id = $14
             CROSS JOIN LATERAL (SELECT coalesce(CASE WHEN t.id IS NOT NULL THEN t.ancestors || t.id END, r.tree) AS tree) AS whole
             ON CONFLICT ON CONSTRAINT step_usage_pkey DO NOTHING
             RETURNING coalesce(tree, array_remove(ARRAY[root_id], NULL)) AS tree, agent_id",
            call,
            organization,
            task as _,
            model.uuid(),
            purpose,
            usage.input_tokens,
            usage.output_tokens,
            usage.cache_read_tokens,
            usage.cache_write_tokens,
            usage.cost_pico_usd,
            time::sql(now) as _,
            usage.thinking_tokens,
            agent.map(AgentId::uuid) as _,
            *reservation as _,
            key.map(ApiKeyId::uuid) as _,
        )
        .fetch_optional(&mut *transaction)
        .await
        .map_err(Error::from_write)?;
        if let Some(booked) = &booked {
            // Sums saturate instead of failing, like `Usage` itself.
            sqlx::query!(
                "UPDATE tasks SET
                     input_tokens = least(input_tokens::numeric + $3::bigint, 9223372036854775807)::bigint,
                     output_tokens = least(output_tokens::numeric + $4::bigint, 9223372036854775807)::bigint,
                     cache_read_tokens = least(cache_read_tokens::numeric + $5::bigint, 9223372036854775807)::bigint,
                     cache_write_tokens = least(cache_write_tokens::numeric + $6::bigint, 9223372036854775807)::bigint,
                     cost_pico_usd = least(cost_pico_usd::numeric + $7::bigint, 9223372036854775807)::bigint,
                     thinking_tokens = least(thinking_tokens::numeric + $9::bigint, 9223372036854775807)::bigint,
                     revision = revision + 1,
                     updated_at = $8
                 WHERE id = $1 AND organization_id = $2",
                task as _,
                organization,
                usage.input_tokens as _,
                usage.output_tokens as _,
                usage.cache_read_tokens as _,
                usage.cache_write_tokens as _,
                usage.cost_pico_usd as _,
                time::sql(now) as _,
                usage.thinking_tokens as _,
            )
            .execute(&mut *transaction)
            .await?;
            sqlx::query!(
                r#"SELECT budgets_settle_tree($1, $2, $3, $4, $5, $6, $7)::text AS "done""#,
                *reservation as _,
                organization,
                booked.agent_id as _,
                booked.tree.as_deref() as _,
                usage.cost_pico_usd,
                is_final,
                time::sql(now) as _,
            )
            .fetch_one(&mut *transaction)
            .await?;
        }
        transaction.commit().await?;
        Ok(booked.is_some())
    }
}

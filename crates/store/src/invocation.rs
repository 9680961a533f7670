//! Everything a model call needs to know besides the transcript.

use construct_domain::{AgentId, ModelId, ModelProviderId, OrganizationId, TaskId, money::Prices};

use crate::{
    Error, ModelParameters, ModelProviderKind, SealedSecret, Store, model::long_context, model_provider::sealed,
};

/// What a model call of a task needs to know besides the transcript.
#[derive(Debug, Clone, PartialEq)]
pub struct Invocation {
    /// Who answers.
    pub agent: InvocationAgent,
    /// With which model.
    pub model: InvocationModel,
    /// Over which account.
    pub provider: InvocationProvider,
}

/// Who answers.
#[derive(Debug, Clone, PartialEq)]
pub struct InvocationAgent {
    /// Its id.
    pub id: AgentId,
    /// Its name.
    pub name: String,
    /// What it is told about its job.
    pub instructions: String,
    /// How its model samples.
    pub parameters: ModelParameters,
}

/// With which model.
#[derive(Debug, Clone, PartialEq)]
pub struct InvocationModel {
    /// Its id.
    pub id: ModelId,
    /// Its name.
    pub name: String,
    /// What the vendor calls it.
    pub vendor_model: String,
    /// Tokens it can see.
    pub context_window: i64,
    /// Tokens it may answer at most.
    pub max_output_tokens: i64,
    /// What they cost.
    pub prices: Prices,
    /// Whether it can call tools.
    pub tool_calling: bool,
}

/// Over which account.
#[derive(Debug, Clone, PartialEq)]
pub struct InvocationProvider {
    /// Its id.
    pub id: ModelProviderId,
    /// Its name.
    pub name: String,
    /// Which protocol it speaks.
    pub kind: ModelProviderKind,
    /// Empty: the vendor's own address.
    pub base_url: String,
    /// Of a scripted provider.
    pub script: Option<String>,
    /// The API key, sealed for the provider's id.
    pub key: Option<SealedSecret>,
}

impl Store {
    /// The task's agent, its model, and the provider of that, as they are now. None when there is no such task.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Internal`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn invocation(&self, task: TaskId) -> Result<Option<Invocation>, Error> {
        let row = sqlx::query!(
            "SELECT a.id AS agent_id, a.name AS agent_name, a.instructions, a.parameters,
                    m.id AS model_id, m.name AS model_name, m.vendor_model, m.context_window, m.max_output_tokens,
                    m.input_price, m.output_price, m.cache_read_price, m.cache_write_price,
                    m.thinking_price, m.request_price, m.long_context_prices, m.tool_calling,
                    p.id AS provider_id, p.name AS provider_name, p.kind, p.base_url, p.script, p.key_id, p.key_nonce, p.key_ciphertext
             FROM tasks t
             JOIN agents a ON a.organization_id = t.organization_id AND a.id = t.agent_id
             JOIN models m ON m.organization_id = a.organization_id AND m.id = a.model_id
             JOIN model_providers p ON p.organization_id = m.organization_id AND p.id = m.provider_id
             WHERE t.id = $1",
            task.uuid(),
        )
        .fetch_optional(&self.pool)
        .await?;
        let Some(row) = row else { return Ok(None) };
        Ok(Some(Invocation {
            agent: InvocationAgent {
                id: AgentId::from_uuid(row.agent_id),
                name: row.agent_name,
                instructions: row.instructions,
                parameters: serde_json::from_value(row.parameters).map_err(Error::internal)?,
            },
            model: InvocationModel {
                id: ModelId::from_uuid(row.model_id),
                name: row.model_name,
                vendor_model: row.vendor_model,
                context_window: row.context_window,
                max_output_tokens: row.max_output_tokens,
                prices: Prices {
                    input: row.input_price,
                    output: row.output_price,
                    cache_read: row.cache_read_price,
                    cache_write: row.cache_write_price,
                    thinking: row.thinking_price,
                    request: row.request_price,
                    long_context: long_context(row.long_context_prices)?,
                },
                tool_calling: row.tool_calling,
            },
            provider: InvocationProvider {
                id: ModelProviderId::from_uuid(row.provider_id),
                name: row.provider_name,
                kind: ModelProviderKind::stored(&row.kind)?,
                base_url: row.base_url,
                script: row.script,
                key: sealed(row.key_id, row.key_nonce, row.key_ciphertext),
            },
        }))
    }
}

/// A model with the account it is reached over.
#[derive(Debug, Clone, PartialEq)]
pub struct Callable {
    /// The model.
    pub model: InvocationModel,
    /// The account.
    pub provider: InvocationProvider,
}

impl Store {
    /// How a model is reached, by id or name, as it is now. None when there is none.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Internal`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn callable(&self, organization: OrganizationId, name_or_id: &str) -> Result<Option<Callable>, Error> {
        let id = name_or_id.parse::<ModelId>().ok().map(ModelId::uuid);
        let row = sqlx::query!(
            "SELECT m.id AS model_id, m.name AS model_name, m.vendor_model, m.context_window, m.max_output_tokens,
                    m.input_price, m.output_price, m.cache_read_price, m.cache_write_price,
                    m.thinking_price, m.request_price, m.long_context_prices, m.tool_calling,
                    p.id AS provider_id, p.name AS provider_name, p.kind, p.base_url, p.script, p.key_id, p.key_nonce, p.key_ciphertext
             FROM models m
             JOIN model_providers p ON p.organization_id = m.organization_id AND p.id = m.provider_id
             WHERE m.organization_id = $1 AND (m.id = $2 OR m.name = $3)
             ORDER BY (m.id = $2) IS TRUE DESC LIMIT 1",
            organization.uuid(),
            id as _,
            name_or_id,
        )
        .fetch_optional(&self.pool)
        .await?;
        let Some(row) = row else { return Ok(None) };
        Ok(Some(Callable {
            model: InvocationModel {
                id: ModelId::from_uuid(row.model_id),
                name: row.model_name,
                vendor_model: row.vendor_model,
                context_window: row.context_window,
                max_output_tokens: row.max_output_tokens,
                prices: Prices {
                    input: row.input_price,
                    output: row.output_price,
                    cache_read: row.cache_read_price,
                    cache_write: row.cache_write_price,
                    thinking: row.thinking_price,
                    request: row.request_price,
                    long_context: long_context(row.long_context_prices)?,
                },
                tool_calling: row.tool_calling,
            },
            provider: InvocationProvider {
                id: ModelProviderId::from_uuid(row.provider_id),
                name: row.provider_name,
                kind: ModelProviderKind::stored(&row.kind)?,
                base_url: row.base_url,
                script: row.script,
                key: sealed(row.key_id, row.key_nonce, row.key_ciphertext),
            },
        }))
    }
}

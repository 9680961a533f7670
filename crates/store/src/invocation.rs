//! The inputs of a model call, besides the transcript.

use construct_domain::{AgentId, ModelId, ModelProviderId, OrganizationId, TaskId, money::Prices};

use crate::{
    Error, KeyLimits, ModelParameters, ModelProviderKind, SealedSecret, Store, model::long_context,
    model_provider::sealed_secret, routing::additional_keys,
};

/// The inputs of a model call of a task, besides the transcript.
#[derive(Debug, Clone, PartialEq)]
pub struct Invocation {
    /// The agent.
    pub agent: InvocationAgent,
    /// The model.
    pub model: InvocationModel,
    /// The account that the model is called with.
    pub provider: InvocationProvider,
    /// The models that are called when that one fails, in order.
    pub fallbacks: Vec<InvocationFallback>,
    /// Milliseconds after which the next fallback is called as well (a hedge); 0: never.
    pub hedge_after_ms: i64,
    /// Whether the agent may use secrets: [`Store::task_secrets`].
    pub has_secrets: bool,
}

/// A model that is called when another one fails.
#[derive(Debug, Clone, PartialEq)]
pub struct InvocationFallback {
    /// The model.
    pub model: InvocationModel,
    /// The account that the model is called with.
    pub provider: InvocationProvider,
    /// 0: none.
    pub weight: u32,
}

/// The agent of a model call.
#[derive(Debug, Clone, PartialEq)]
pub struct InvocationAgent {
    /// Its id.
    pub id: AgentId,
    /// Its name.
    pub name: String,
    /// Instructions for its model.
    pub instructions: String,
    /// Sampling parameters of its model.
    pub parameters: ModelParameters,
}

/// The model.
#[derive(Debug, Clone, PartialEq)]
pub struct InvocationModel {
    /// Its id.
    pub id: ModelId,
    /// Its name.
    pub name: String,
    /// The vendor's name for it.
    pub vendor_model: String,
    /// Its context window, in tokens.
    pub context_window: i64,
    /// The longest answer, in tokens.
    pub max_output_tokens: i64,
    /// Its prices.
    pub prices: Prices,
    /// Whether it can call tools.
    pub tool_calling: bool,
}

/// The account that the model is called with.
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
    /// The script of a scripted provider.
    pub script: Option<String>,
    /// The API key, sealed for the provider's id.
    pub key: Option<SealedSecret>,
    /// Additional keys, sealed like the first.
    pub additional_keys: Vec<SealedSecret>,
    /// Limits of each key.
    pub limits: KeyLimits,
}

/// Selects what [`model_and_provider`] reads, of the model `m` and the provider `p`, after the
/// columns `more`.
macro_rules! select_with_provider {
    ([$more:literal], [$from:literal], $($parameter:expr),*) => {
        sqlx::query!(
            r#"SELECT "#
                + $more
                + r#"m.id AS model_id, m.name AS model_name, m.vendor_model, m.context_window, m.max_output_tokens,
                    m.input_price, m.output_price, m.cache_read_price, m.cache_write_price,
                    m.thinking_price, m.request_price, m.long_context_prices, m.tool_calling,
                    p.id AS provider_id, p.name AS provider_name, p.kind, p.base_url, p.script, p.key_id, p.key_nonce, p.key_ciphertext,
                    p.max_concurrency, p.requests_per_minute, p.tokens_per_minute,
                    ARRAY(SELECT k.key_id FROM model_provider_keys k WHERE k.provider_id = p.id ORDER BY k.position)
                        AS "further_ids!",
                    ARRAY(SELECT k.key_nonce FROM model_provider_keys k WHERE k.provider_id = p.id ORDER BY k.position)
                        AS "further_nonces!",
                    ARRAY(SELECT k.key_ciphertext FROM model_provider_keys k WHERE k.provider_id = p.id ORDER BY k.position)
                        AS "further_ciphertexts!"
                "#
                + $from,
            $($parameter),*
        )
    };
}

/// Reads a model and its provider from a row, which may have further columns.
macro_rules! model_and_provider {
    ($row:ident) => {
        (
            InvocationModel {
                id: ModelId::from_uuid($row.model_id),
                name: $row.model_name,
                vendor_model: $row.vendor_model,
                context_window: $row.context_window,
                max_output_tokens: $row.max_output_tokens,
                prices: Prices {
                    input: $row.input_price,
                    output: $row.output_price,
                    cache_read: $row.cache_read_price,
                    cache_write: $row.cache_write_price,
                    thinking: $row.thinking_price,
                    request: $row.request_price,
                    long_context: long_context($row.long_context_prices)?,
                },
                tool_calling: $row.tool_calling,
            },
            InvocationProvider {
                id: ModelProviderId::from_uuid($row.provider_id),
                name: $row.provider_name,
                kind: ModelProviderKind::from_column(&$row.kind)?,
                base_url: $row.base_url,
                script: $row.script,
                key: sealed_secret($row.key_id, $row.key_nonce, $row.key_ciphertext),
                additional_keys: additional_keys(
                    $row.further_ids,
                    $row.further_nonces,
                    $row.further_ciphertexts,
                ),
                limits: KeyLimits {
                    max_concurrency: $row.max_concurrency,
                    requests_per_minute: $row.requests_per_minute,
                    tokens_per_minute: $row.tokens_per_minute,
                },
            },
        )
    };
}

/// A model with its provider and fallbacks.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelRoute {
    /// The model.
    pub model: InvocationModel,
    /// Its provider.
    pub provider: InvocationProvider,
    /// The models that are called when it fails, in order.
    pub fallbacks: Vec<InvocationFallback>,
    /// Milliseconds without output after which the next fallback is called as well (a hedge); 0:
    /// never.
    pub hedge_after_ms: i64,
}

impl Store {
    /// The current agent of a task, with its model, provider and fallbacks. None when the task does
    /// not exist.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Internal`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn invocation(&self, task: TaskId) -> Result<Option<Invocation>, Error> {
        let row = select_with_provider!(
            [r#"a.id AS agent_id, a.name AS agent_name, a.instructions, a.parameters, m.hedge_after_ms,
                EXISTS (SELECT FROM model_fallbacks f WHERE f.model_id = m.id) AS "has_fallbacks!",
                EXISTS (SELECT FROM agent_secrets s WHERE s.organization_id = a.organization_id AND s.agent_id = a.id) AS "has_secrets!", "#],
            ["FROM tasks t
             JOIN agents a ON a.organization_id = t.organization_id AND a.id = t.agent_id
             JOIN models m ON m.organization_id = a.organization_id AND m.id = a.model_id
             JOIN model_providers p ON p.organization_id = m.organization_id AND p.id = m.provider_id
             WHERE t.id = $1"],
            task.uuid()
        )
        .fetch_optional(&self.pool)
        .await?;
        let Some(row) = row else { return Ok(None) };
        let fallbacks = if row.has_fallbacks {
            self.invocation_fallbacks(ModelId::from_uuid(row.model_id)).await?
        } else {
            Vec::new()
        };
        let (hedge_after_ms, has_secrets) = (row.hedge_after_ms, row.has_secrets);
        let agent = InvocationAgent {
            id: AgentId::from_uuid(row.agent_id),
            name: row.agent_name,
            instructions: row.instructions,
            parameters: serde_json::from_value(row.parameters).map_err(Error::internal)?,
        };
        let (model, provider) = model_and_provider!(row);
        Ok(Some(Invocation { agent, model, provider, fallbacks, hedge_after_ms, has_secrets }))
    }

    /// The fallbacks of a model, in order.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Internal`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn invocation_fallbacks(
        &self,
        model: ModelId,
    ) -> Result<Vec<InvocationFallback>, Error> {
        let rows = select_with_provider!(
            [r#"f.weight, "#],
            ["FROM model_fallbacks f
             JOIN models m ON m.organization_id = f.organization_id AND m.id = f.fallback_id
             JOIN model_providers p ON p.organization_id = m.organization_id AND p.id = m.provider_id
             WHERE f.model_id = $1
             ORDER BY f.position"],
            model.uuid()
        )
        .fetch_all(&self.pool)
        .await?;
        rows.into_iter()
            .map(|row| {
                let weight = u32::try_from(row.weight).unwrap_or_default();
                let (model, provider) = model_and_provider!(row);
                Ok(InvocationFallback { model, provider, weight })
            })
            .collect()
    }

    /// The current route to a model, by id or name. None when it does not exist.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Internal`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_route(
        &self,
        organization: OrganizationId,
        name_or_id: &str,
    ) -> Result<Option<ModelRoute>, Error> {
        let id = name_or_id.parse::<ModelId>().ok().map(ModelId::uuid);
        let row = select_with_provider!(
            [r#"m.hedge_after_ms,
                EXISTS (SELECT FROM model_fallbacks f WHERE f.model_id = m.id) AS "has_fallbacks!", "#],
            ["FROM models m
             JOIN model_providers p ON p.organization_id = m.organization_id AND p.id = m.provider_id
             WHERE m.organization_id = $1 AND (m.id = $2 OR m.name = $3)
               AND EXISTS (SELECT FROM organizations o WHERE o.id = m.organization_id AND o.deleted_at IS NULL)
             ORDER BY (m.id = $2) IS TRUE DESC LIMIT 1"],
            organization.uuid(),
            id as _,
            name_or_id
        )
        .fetch_optional(&self.pool)
        .await?;
        let Some(row) = row else { return Ok(None) };
        let fallbacks = if row.has_fallbacks {
            self.invocation_fallbacks(ModelId::from_uuid(row.model_id)).await?
        } else {
            Vec::new()
        };
        let hedge_after_ms = row.hedge_after_ms;
        let (model, provider) = model_and_provider!(row);
        Ok(Some(ModelRoute { model, provider, fallbacks, hedge_after_ms }))
    }
}

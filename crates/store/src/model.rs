//! Models.

use jiff::Timestamp;
use uuid::Uuid;

use construct_domain::{
    ModelId, ModelProviderId, OrganizationId,
    money::{LongContext, Prices},
};
use serde_json::Value;

use crate::{
    Cursor, Error, Fallback, Key, Page, Store, Write, WriteOutcome, WriteOutput,
    routing::{FallbackRow, fallbacks, fallbacks_replace},
    text,
    write::{Writer, begin},
};

const ENTITY: &str = "model";

/// A model of a provider, with its prices.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Its id.
    pub id: ModelId,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// The provider that offers it.
    pub provider: ModelProviderId,
    /// That provider's name.
    pub provider_name: String,
    /// Unique in the organization.
    pub name: String,
    /// The vendor's name for it.
    pub vendor_model: String,
    /// Its context window, in tokens.
    pub context_window: i64,
    /// The longest answer, in tokens.
    pub max_output_tokens: i64,
    /// Its prices.
    pub prices: Prices,
    /// The origin of the prices.
    pub prices_source: PricesSource,
    /// Whether it can call tools.
    pub tool_calling: bool,
    /// The models that are called when it fails, in order.
    pub fallbacks: Vec<Fallback>,
    /// Milliseconds after which the next fallback is called as well (a hedge); 0: never.
    pub hedge_after_ms: i64,
    /// Incremented by every change.
    pub revision: i64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

impl Model {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.id.uuid(), &self.name, self.created_at, self.updated_at)
    }
}

/// A model to create.
#[derive(Debug, Clone, PartialEq)]
pub struct NewModel {
    /// Its id.
    pub id: ModelId,
    /// The provider that offers it.
    pub provider: ModelProviderId,
    /// Unique in the organization.
    pub name: String,
    /// The vendor's name for it.
    pub vendor_model: String,
    /// Its context window, in tokens.
    pub context_window: i64,
    /// The longest answer, in tokens.
    pub max_output_tokens: i64,
    /// Its prices.
    pub prices: Prices,
    /// The origin of the prices.
    pub prices_source: PricesSource,
    /// Whether it can call tools.
    pub tool_calling: bool,
    /// The models that are called when it fails, in order.
    pub fallbacks: Vec<Fallback>,
    /// Milliseconds after which the next fallback is called as well (a hedge); 0: never.
    pub hedge_after_ms: i64,
}

/// Changes to a model. `None` leaves a field as it is.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelChanges {
    /// Unique in the organization.
    pub name: Option<String>,
    /// The vendor's name for it.
    pub vendor_model: Option<String>,
    /// Its context window, in tokens.
    pub context_window: Option<i64>,
    /// The longest answer, in tokens.
    pub max_output_tokens: Option<i64>,
    /// Replaces all prices. Their source is then `Given`.
    pub prices: Option<Prices>,
    /// Whether it can call tools.
    pub tool_calling: Option<bool>,
    /// Replaces all of them.
    pub fallbacks: Option<Vec<Fallback>>,
    /// Milliseconds after which the next fallback is called as well (a hedge); 0: never.
    pub hedge_after_ms: Option<i64>,
}

/// Filter for a list of models.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelFilter {
    /// Of this provider only.
    pub provider: Option<ModelProviderId>,
    /// Prefix of the name; empty: all.
    pub name_prefix: String,
}

/// The origin of a model's prices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PricesSource {
    /// Entered by a user.
    Given,
    /// The catalog of the product.
    Catalog,
    /// Free of charge: a local or scripted model.
    Free,
    /// Unknown; calls count as free.
    Unknown,
}

impl PricesSource {
    /// The stored form.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Given => "given",
            Self::Catalog => "catalogue", // stored
            Self::Free => "free",
            Self::Unknown => "unknown",
        }
    }

    fn from_column(text: &str) -> Result<Self, Error> {
        [Self::Given, Self::Catalog, Self::Free, Self::Unknown]
            .into_iter()
            .find(|source| source.as_str() == text)
            .ok_or_else(|| Error::internal(format!("unknown price source `{text}`")))
    }
}

/// Decodes the prices of long inputs.
pub(crate) fn long_context(stored: Option<Value>) -> Result<Option<LongContext>, Error> {
    stored.map(serde_json::from_value).transpose().map_err(Error::internal)
}

struct Row {
    id: Uuid,
    organization_id: Uuid,
    provider_id: Uuid,
    provider_name: String,
    name: String,
    vendor_model: String,
    context_window: i64,
    max_output_tokens: i64,
    input_price: i64,
    output_price: i64,
    cache_read_price: i64,
    cache_write_price: i64,
    thinking_price: i64,
    request_price: i64,
    long_context_prices: Option<Value>,
    prices_source: String,
    tool_calling: bool,
    fallbacks: sqlx::types::Json<Vec<FallbackRow>>,
    hedge_after_ms: i64,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl TryFrom<Row> for Model {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        Ok(Self {
            id: ModelId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            provider: ModelProviderId::from_uuid(row.provider_id),
            provider_name: row.provider_name,
            name: row.name,
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
            prices_source: PricesSource::from_column(&row.prices_source)?,
            tool_calling: row.tool_calling,
            fallbacks: fallbacks(row.fallbacks),
            hedge_after_ms: row.hedge_after_ms,
            revision: row.revision,
            created_at: row.created_at,
            updated_at: row.updated_at,
        })
    }
}

macro_rules! select {
    ([$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            Row,
            r#"SELECT m.id, m.organization_id, m.provider_id, p.name AS provider_name, m.name, m.vendor_model, m.context_window,
                    m.max_output_tokens, m.input_price, m.output_price, m.cache_read_price, m.cache_write_price,
                    m.thinking_price, m.request_price, m.long_context_prices, m.prices_source, m.tool_calling,
                    m.hedge_after_ms, m.revision, m.created_at, m.updated_at,
                    (SELECT coalesce(
                         jsonb_agg(jsonb_build_object('id', n.id, 'name', n.name, 'weight', f.weight) ORDER BY f.position), '[]')
                     FROM model_fallbacks f
                     JOIN models n ON n.organization_id = f.organization_id AND n.id = f.fallback_id
                     WHERE f.model_id = m.id) AS "fallbacks!: sqlx::types::Json<Vec<FallbackRow>>"
             FROM models m
             JOIN model_providers p ON p.organization_id = m.organization_id AND p.id = m.provider_id "# $(+ $tail)+,
            $($argument),*
        )
    };
}

macro_rules! list {
    ($store:expr, $organization:expr, $filter:expr, $page:expr, $after:expr, $key:literal, $comparison:literal, $direction:literal) => {{
        let (value, id) = $after?;
        select!(
            ["WHERE m.organization_id = $1
               AND ($2::uuid IS NULL OR m.provider_id = $2) AND starts_with(m.name, $3) AND (" $key ", m.id) " $comparison " ($4, $5)
             ORDER BY " $key $direction ", m.id" $direction " LIMIT $6"],
            $organization.uuid(),
            $filter.provider.map(ModelProviderId::uuid),
            $filter.name_prefix,
            value,
            id,
            $page.limit(),
        )
        .fetch_all(&$store.pool)
        .await?
    }};
}

impl Store {
    /// A model by id.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_get(
        &self,
        organization: OrganizationId,
        id: ModelId,
    ) -> Result<Model, Error> {
        select!(["WHERE m.organization_id = $1 AND m.id = $2"], organization.uuid(), id.uuid())
            .fetch_optional(&self.pool)
            .await?
            .ok_or(Error::NotFound { what: ENTITY })?
            .try_into()
    }

    /// A model by id or name. If the name of one model is the id of another, the id wins.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_find(
        &self,
        organization: OrganizationId,
        name_or_id: &str,
    ) -> Result<Model, Error> {
        let id = name_or_id.parse::<ModelId>().ok().map(ModelId::uuid);
        select!(
            ["WHERE m.organization_id = $1 AND (m.id = $2 OR m.name = $3) ORDER BY (m.id = $2) IS TRUE DESC LIMIT 1"],
            organization.uuid(),
            id as _,
            name_or_id,
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
    }

    /// The id of a model by id or name.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_resolve(
        &self,
        organization: OrganizationId,
        name_or_id: &str,
    ) -> Result<ModelId, Error> {
        let id = name_or_id.parse::<ModelId>().ok().map(ModelId::uuid);
        sqlx::query_scalar!(
            "SELECT id FROM models WHERE organization_id = $1 AND (id = $2 OR name = $3) ORDER BY (id = $2) IS TRUE DESC LIMIT 1",
            organization.uuid(),
            id as _,
            name_or_id,
        )
        .fetch_optional(&self.pool)
        .await?
        .map(ModelId::from_uuid)
        .ok_or(Error::NotFound { what: ENTITY })
    }

    /// A page of models.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_list(
        &self,
        organization: OrganizationId,
        filter: &ModelFilter,
        page: &Page,
    ) -> Result<Vec<Model>, Error> {
        let rows = match (page.order.key, page.order.descending) {
            (Key::CreatedAt, false) => {
                list!(self, organization, filter, page, page.after_time(), "m.created_at", ">", "")
            }
            (Key::CreatedAt, true) => {
                list!(
                    self,
                    organization,
                    filter,
                    page,
                    page.after_time(),
                    "m.created_at",
                    "<",
                    " DESC"
                )
            }
            (Key::UpdatedAt, false) => {
                list!(self, organization, filter, page, page.after_time(), "m.updated_at", ">", "")
            }
            (Key::UpdatedAt, true) => {
                list!(
                    self,
                    organization,
                    filter,
                    page,
                    page.after_time(),
                    "m.updated_at",
                    "<",
                    " DESC"
                )
            }
            (Key::Name, false) => {
                list!(self, organization, filter, page, page.after_name(), "m.name", ">", "")
            }
            (Key::Name, true) => {
                list!(self, organization, filter, page, page.after_name(), "m.name", "<", " DESC")
            }
        };
        rows.into_iter().map(TryInto::try_into).collect()
    }

    /// Creates a model.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] when the name is taken, [`Error::NotFound`] when a referenced
    /// entity does not exist; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_create(
        &self,
        write: &Write,
        new: NewModel,
        render: impl FnOnce(&Model) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Model>, Error> {
        let mut writer = begin!(self, write);
        sqlx::query!(
            "INSERT INTO models
                 (id, organization_id, provider_id, name, vendor_model, context_window, max_output_tokens,
                  input_price, output_price, cache_read_price, cache_write_price, tool_calling,
                  created_at, updated_at, thinking_price, request_price, long_context_prices, prices_source, hedge_after_ms)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $13, $14, $15, $16, $17, $18)",
            new.id.uuid(),
            writer.organization(),
            new.provider.uuid(),
            new.name,
            new.vendor_model,
            new.context_window,
            new.max_output_tokens,
            new.prices.input,
            new.prices.output,
            new.prices.cache_read,
            new.prices.cache_write,
            new.tool_calling,
            writer.now(),
            new.prices.thinking,
            new.prices.request,
            new.prices.long_context.as_ref().map(text::json).transpose()?,
            new.prices_source.as_str(),
            new.hedge_after_ms,
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        if !new.fallbacks.is_empty() {
            let organization = writer.organization();
            fallbacks_replace(&mut writer.transaction, organization, new.id, &new.fallbacks)
                .await?;
        }
        let entity = model_reload(&mut writer, new.id).await?;
        writer.finish(entity, render).await
    }

    /// Changes a model.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::AlreadyExists`], [`Error::Conflict`] when the revision is not
    /// the expected one.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_update(
        &self,
        write: &Write,
        id: ModelId,
        expected_revision: Option<i64>,
        changes: ModelChanges,
        render: impl FnOnce(&Model) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Model>, Error> {
        let mut writer = begin!(self, write);
        let done = sqlx::query!(
            "UPDATE models SET
                 name = coalesce($5, name),
                 vendor_model = coalesce($6, vendor_model),
                 context_window = coalesce($7, context_window),
                 max_output_tokens = coalesce($8, max_output_tokens),
                 input_price = coalesce($9, input_price),
                 output_price = coalesce($10, output_price),
                 cache_read_price = coalesce($11, cache_read_price),
                 cache_write_price = coalesce($12, cache_write_price),
                 tool_calling = coalesce($13, tool_calling),
                 thinking_price = coalesce($14, thinking_price),
                 request_price = coalesce($15, request_price),
                 long_context_prices = CASE WHEN $14::bigint IS NULL THEN long_context_prices ELSE $16 END,
                 prices_source = CASE WHEN $14::bigint IS NULL THEN prices_source ELSE 'given' END,
                 hedge_after_ms = coalesce($17, hedge_after_ms),
                 revision = revision + 1,
                 updated_at = $4
             WHERE organization_id = $1 AND id = $2 AND ($3::bigint IS NULL OR revision = $3)",
            writer.organization(),
            id.uuid(),
            expected_revision,
            writer.now(),
            changes.name,
            changes.vendor_model,
            changes.context_window,
            changes.max_output_tokens,
            changes.prices.map(|prices| prices.input),
            changes.prices.map(|prices| prices.output),
            changes.prices.map(|prices| prices.cache_read),
            changes.prices.map(|prices| prices.cache_write),
            changes.tool_calling,
            changes.prices.map(|prices| prices.thinking),
            changes.prices.map(|prices| prices.request),
            changes.prices.and_then(|prices| prices.long_context).as_ref().map(text::json).transpose()? as _,
            changes.hedge_after_ms,
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        if done.rows_affected() > 0
            && let Some(fallbacks) = &changes.fallbacks
        {
            let organization = writer.organization();
            fallbacks_replace(&mut writer.transaction, organization, id, fallbacks).await?;
        }
        let entity = model_reload(&mut writer, id).await?;
        if done.rows_affected() == 0 {
            return Err(Error::Conflict);
        }
        writer.finish(entity, render).await
    }

    /// Deletes a model. The entity in the result is the model before the deletion.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::InUse`] while other entities refer to it.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_delete(
        &self,
        write: &Write,
        id: ModelId,
        render: impl FnOnce(&Model) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Model>, Error> {
        let mut writer = begin!(self, write);
        let entity = model_reload(&mut writer, id).await?;
        let done = sqlx::query!(
            "DELETE FROM models WHERE organization_id = $1 AND id = $2",
            writer.organization(),
            id.uuid()
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_delete)?;
        if done.rows_affected() == 0 {
            return Err(Error::NotFound { what: ENTITY });
        }
        writer.finish(entity, render).await
    }
}

async fn model_reload(writer: &mut Writer<'_>, id: ModelId) -> Result<Model, Error> {
    select!(["WHERE m.organization_id = $1 AND m.id = $2"], writer.organization(), id.uuid())
        .fetch_optional(&mut *writer.transaction)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
}

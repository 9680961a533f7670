//! Accounts with model vendors.

use jiff::Timestamp;
use uuid::Uuid;

use construct_domain::{ModelProviderId, OrganizationId};

use crate::{
    Cursor, Error, Key, KeyLimits, Keyring, Page, SealError, SealedSecret, Store, Write,
    WriteOutcome, WriteOutput,
    routing::{additional_keys, additional_keys_replace},
    time,
    write::{Writer, begin},
};

const ENTITY: &str = "model provider";

/// The protocol of a vendor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelProviderKind {
    /// Anthropic's Messages API.
    Anthropic,
    /// OpenAI's Chat Completions.
    Openai,
    /// No vendor: answers come from a script.
    Scripted,
    /// OpenAI's Responses.
    OpenaiResponses,
    /// Google's Gemini API.
    Gemini,
    /// AWS Bedrock's Converse.
    Bedrock,
    /// xAI.
    Xai,
    /// DeepSeek.
    Deepseek,
    /// Ollama.
    Ollama,
    /// OpenRouter.
    Openrouter,
    /// No vendor: embedding models from files.
    Local,
}

impl ModelProviderKind {
    /// Replaces all of them.
    pub const ALL: [Self; 11] = [
        Self::Anthropic,
        Self::Openai,
        Self::Scripted,
        Self::OpenaiResponses,
        Self::Gemini,
        Self::Bedrock,
        Self::Xai,
        Self::Deepseek,
        Self::Ollama,
        Self::Openrouter,
        Self::Local,
    ];

    /// The stored form.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Anthropic => "anthropic",
            Self::Openai => "openai",
            Self::Scripted => "scripted",
            Self::OpenaiResponses => "openai_responses",
            Self::Gemini => "gemini",
            Self::Bedrock => "bedrock",
            Self::Xai => "xai",
            Self::Deepseek => "deepseek",
            Self::Ollama => "ollama",
            Self::Openrouter => "openrouter",
            Self::Local => "local",
        }
    }

    /// Reads what [`ModelProviderKind::as_str`] wrote.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text)
    }

    pub(crate) fn from_column(text: &str) -> Result<Self, Error> {
        Self::parse(text)
            .ok_or_else(|| Error::internal(format!("unknown kind of model provider `{text}`")))
    }
}

/// An account with a model vendor.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelProvider {
    /// Its id.
    pub id: ModelProviderId,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// Unique in the organization.
    pub name: String,
    /// Its protocol.
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
    /// Incremented by every change.
    pub revision: i64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

impl ModelProvider {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.id.uuid(), &self.name, self.created_at, self.updated_at)
    }
}

/// A provider to create.
#[derive(Debug, Clone, PartialEq)]
pub struct NewModelProvider {
    /// Its id.
    pub id: ModelProviderId,
    /// Unique in the organization.
    pub name: String,
    /// Its protocol.
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

/// Changes to a provider. `None` leaves a field as it is; `Some(None)` removes its value.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelProviderChanges {
    /// Unique in the organization.
    pub name: Option<String>,
    /// Empty: the vendor's own address.
    pub base_url: Option<String>,
    /// The script of a scripted provider.
    pub script: Option<Option<String>>,
    /// The API key, sealed for the provider's id.
    pub key: Option<Option<SealedSecret>>,
    /// Replaces all additional keys.
    pub additional_keys: Option<Vec<SealedSecret>>,
    /// Concurrent calls.
    pub max_concurrency: Option<i64>,
    /// Calls per minute.
    pub requests_per_minute: Option<i64>,
    /// Tokens per minute.
    pub tokens_per_minute: Option<i64>,
}

/// Filter for a list of providers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelProviderFilter {
    /// Of this kind only.
    pub kind: Option<ModelProviderKind>,
    /// Prefix of the name; empty: all.
    pub name_prefix: String,
}

/// The result of a key rotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResealReport<I> {
    /// The number of resealed records.
    pub resealed: u64,
    /// Records that could not be opened: their key is not in the keyring.
    pub failed: Vec<I>,
}

struct Row {
    id: Uuid,
    organization_id: Uuid,
    name: String,
    kind: String,
    base_url: String,
    script: Option<String>,
    key_id: Option<String>,
    key_nonce: Option<Vec<u8>>,
    key_ciphertext: Option<Vec<u8>>,
    max_concurrency: i64,
    requests_per_minute: i64,
    tokens_per_minute: i64,
    further_ids: Vec<String>,
    further_nonces: Vec<Vec<u8>>,
    further_ciphertexts: Vec<Vec<u8>>,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl TryFrom<Row> for ModelProvider {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        Ok(Self {
            id: ModelProviderId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            name: row.name,
            kind: ModelProviderKind::from_column(&row.kind)?,
            base_url: row.base_url,
            script: row.script,
            key: sealed_secret(row.key_id, row.key_nonce, row.key_ciphertext),
            additional_keys: additional_keys(
                row.further_ids,
                row.further_nonces,
                row.further_ciphertexts,
            ),
            limits: KeyLimits {
                max_concurrency: row.max_concurrency,
                requests_per_minute: row.requests_per_minute,
                tokens_per_minute: row.tokens_per_minute,
            },
            revision: row.revision,
            created_at: row.created_at,
            updated_at: row.updated_at,
        })
    }
}

/// The three columns of a sealed secret, which are null together.
pub(crate) fn sealed_secret(
    key_id: Option<String>,
    nonce: Option<Vec<u8>>,
    ciphertext: Option<Vec<u8>>,
) -> Option<SealedSecret> {
    Some(SealedSecret { key_id: key_id?, nonce: nonce?, ciphertext: ciphertext? })
}

macro_rules! select {
    ([$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            Row,
            r#"SELECT p.id, p.organization_id, p.name, p.kind, p.base_url, p.script, p.key_id, p.key_nonce, p.key_ciphertext,
                    p.max_concurrency, p.requests_per_minute, p.tokens_per_minute,
                    ARRAY(SELECT k.key_id FROM model_provider_keys k WHERE k.provider_id = p.id ORDER BY k.position)
                        AS "further_ids!",
                    ARRAY(SELECT k.key_nonce FROM model_provider_keys k WHERE k.provider_id = p.id ORDER BY k.position)
                        AS "further_nonces!",
                    ARRAY(SELECT k.key_ciphertext FROM model_provider_keys k WHERE k.provider_id = p.id ORDER BY k.position)
                        AS "further_ciphertexts!",
                    p.revision, p.created_at, p.updated_at
             FROM model_providers p "# $(+ $tail)+,
            $($argument),*
        )
    };
}

macro_rules! list {
    ($store:expr, $organization:expr, $filter:expr, $page:expr, $after:expr, $key:literal, $comparison:literal, $direction:literal) => {{
        let (value, id) = $after?;
        select!(
            ["WHERE p.organization_id = $1
               AND ($2::text IS NULL OR p.kind = $2) AND starts_with(p.name, $3) AND (" $key ", p.id) " $comparison " ($4, $5)
             ORDER BY " $key $direction ", p.id" $direction " LIMIT $6"],
            $organization.uuid(),
            $filter.kind.map(ModelProviderKind::as_str),
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
    /// A provider by id.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_provider_get(
        &self,
        organization: OrganizationId,
        id: ModelProviderId,
    ) -> Result<ModelProvider, Error> {
        select!(["WHERE p.organization_id = $1 AND p.id = $2"], organization.uuid(), id.uuid())
            .fetch_optional(&self.pool)
            .await?
            .ok_or(Error::NotFound { what: ENTITY })?
            .try_into()
    }

    /// A provider by id or name. If the name of one provider is the id of another, the id wins.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_provider_find(
        &self,
        organization: OrganizationId,
        name_or_id: &str,
    ) -> Result<ModelProvider, Error> {
        let id = name_or_id.parse::<ModelProviderId>().ok().map(ModelProviderId::uuid);
        select!(
            ["WHERE p.organization_id = $1 AND (p.id = $2 OR p.name = $3) ORDER BY (p.id = $2) IS TRUE DESC LIMIT 1"],
            organization.uuid(),
            id as _,
            name_or_id,
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
    }

    /// The id of a provider by id or name.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn model_provider_resolve(
        &self,
        organization: OrganizationId,
        name_or_id: &str,
    ) -> Result<ModelProviderId, Error> {
        Ok(self.model_provider_find(organization, name_or_id).await?.id)
    }

    /// A page of providers.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_provider_list(
        &self,
        organization: OrganizationId,
        filter: &ModelProviderFilter,
        page: &Page,
    ) -> Result<Vec<ModelProvider>, Error> {
        let rows = match (page.order.key, page.order.descending) {
            (Key::CreatedAt, false) => {
                list!(self, organization, filter, page, page.after_time(), "p.created_at", ">", "")
            }
            (Key::CreatedAt, true) => {
                list!(
                    self,
                    organization,
                    filter,
                    page,
                    page.after_time(),
                    "p.created_at",
                    "<",
                    " DESC"
                )
            }
            (Key::UpdatedAt, false) => {
                list!(self, organization, filter, page, page.after_time(), "p.updated_at", ">", "")
            }
            (Key::UpdatedAt, true) => {
                list!(
                    self,
                    organization,
                    filter,
                    page,
                    page.after_time(),
                    "p.updated_at",
                    "<",
                    " DESC"
                )
            }
            (Key::Name, false) => {
                list!(self, organization, filter, page, page.after_name(), "p.name", ">", "")
            }
            (Key::Name, true) => {
                list!(self, organization, filter, page, page.after_name(), "p.name", "<", " DESC")
            }
        };
        rows.into_iter().map(TryInto::try_into).collect()
    }

    /// Creates a provider.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] when the name is taken; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_provider_create(
        &self,
        write: &Write,
        new: NewModelProvider,
        render: impl FnOnce(&ModelProvider) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<ModelProvider>, Error> {
        let mut writer = begin!(self, write);
        let key = new.key.as_ref();
        sqlx::query!(
            "INSERT INTO model_providers
                 (id, organization_id, name, kind, base_url, script, key_id, key_nonce, key_ciphertext,
                  max_concurrency, requests_per_minute, tokens_per_minute, created_at, updated_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $13)",
            new.id.uuid(),
            writer.organization(),
            new.name,
            new.kind.as_str(),
            new.base_url,
            new.script,
            key.map(|key| key.key_id.as_str()),
            key.map(|key| key.nonce.as_slice()),
            key.map(|key| key.ciphertext.as_slice()),
            new.limits.max_concurrency,
            new.limits.requests_per_minute,
            new.limits.tokens_per_minute,
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        if !new.additional_keys.is_empty() {
            let organization = writer.organization();
            additional_keys_replace(
                &mut writer.transaction,
                organization,
                new.id,
                &new.additional_keys,
            )
            .await?;
        }
        let entity = model_provider_reload(&mut writer, new.id).await?;
        writer.finish(entity, render).await
    }

    /// Changes a provider.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::AlreadyExists`], [`Error::Conflict`] when the revision is not
    /// the expected one.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_provider_update(
        &self,
        write: &Write,
        id: ModelProviderId,
        expected_revision: Option<i64>,
        changes: ModelProviderChanges,
        render: impl FnOnce(&ModelProvider) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<ModelProvider>, Error> {
        let mut writer = begin!(self, write);
        let key = changes.key.as_ref().and_then(Option::as_ref);
        let done = sqlx::query!(
            "UPDATE model_providers SET
                 name = coalesce($4, name),
                 base_url = coalesce($5, base_url),
                 script = CASE WHEN $6 THEN $7 ELSE script END,
                 key_id = CASE WHEN $8 THEN $9 ELSE key_id END,
                 key_nonce = CASE WHEN $8 THEN $10 ELSE key_nonce END,
                 key_ciphertext = CASE WHEN $8 THEN $11 ELSE key_ciphertext END,
                 max_concurrency = coalesce($13, max_concurrency),
                 requests_per_minute = coalesce($14, requests_per_minute),
                 tokens_per_minute = coalesce($15, tokens_per_minute),
                 revision = revision + 1,
                 updated_at = $12
             WHERE organization_id = $1 AND id = $2 AND ($3::bigint IS NULL OR revision = $3)",
            writer.organization(),
            id.uuid(),
            expected_revision,
            changes.name,
            changes.base_url,
            changes.script.is_some(),
            changes.script.flatten(),
            changes.key.is_some(),
            key.map(|key| key.key_id.as_str()),
            key.map(|key| key.nonce.as_slice()),
            key.map(|key| key.ciphertext.as_slice()),
            writer.now(),
            changes.max_concurrency,
            changes.requests_per_minute,
            changes.tokens_per_minute,
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        if done.rows_affected() > 0
            && let Some(keys) = &changes.additional_keys
        {
            let organization = writer.organization();
            additional_keys_replace(&mut writer.transaction, organization, id, keys).await?;
        }
        let entity = model_provider_reload(&mut writer, id).await?;
        if done.rows_affected() == 0 {
            return Err(Error::Conflict);
        }
        writer.finish(entity, render).await
    }

    /// Deletes a provider. The entity in the result is the provider before the deletion.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::InUse`] while a model refers to it.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_provider_delete(
        &self,
        write: &Write,
        id: ModelProviderId,
        render: impl FnOnce(&ModelProvider) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<ModelProvider>, Error> {
        let mut writer = begin!(self, write);
        let entity = model_provider_reload(&mut writer, id).await?;
        let done = sqlx::query!(
            "DELETE FROM model_providers WHERE organization_id = $1 AND id = $2",
            writer.organization(),
            id.uuid(),
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_delete)?;
        if done.rows_affected() == 0 {
            return Err(Error::NotFound { what: ENTITY });
        }
        writer.finish(entity, render).await
    }

    /// Reseals every provider's key that is not sealed with the keyring's active master key, in all
    /// organizations. It can be repeated, and can run while keys change: a key that was written
    /// concurrently is left as it is.
    ///
    /// # Errors
    /// [`Error::Unavailable`]; [`Error::Internal`] when the operating system provides no
    /// randomness.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn model_provider_reseal_all(
        &self,
        keyring: &Keyring,
        now: Timestamp,
    ) -> Result<ResealReport<ModelProviderId>, Error> {
        let rows = select!(["WHERE p.key_id <> $1 ORDER BY p.id"], keyring.active())
            .fetch_all(&self.pool)
            .await?;
        let mut report = ResealReport { resealed: 0, failed: Vec::new() };
        for row in rows {
            let provider = ModelProvider::try_from(row)?;
            let Some(old) = provider.key else { continue };
            let new = match reseal(keyring, provider.id, &old) {
                Ok(new) => new,
                Err(SealError::Unsealable) => return Err(Error::internal(SealError::Unsealable)),
                Err(SealError::UnknownKey { .. } | SealError::Unopenable { .. }) => {
                    report.failed.push(provider.id);
                    continue;
                }
            };
            let done = sqlx::query!(
                "UPDATE model_providers SET key_id = $4, key_nonce = $5, key_ciphertext = $6, revision = revision + 1, updated_at = $7
                 WHERE id = $1 AND key_id = $2 AND key_nonce = $3",
                provider.id.uuid(),
                old.key_id,
                old.nonce,
                new.key_id,
                new.nonce,
                new.ciphertext,
                time::sql(now),
            )
            .execute(&self.pool)
            .await?;
            report.resealed += done.rows_affected();
        }
        self.additional_keys_reseal_all(keyring, &mut report).await?;
        Ok(report)
    }

    /// Reseals the additional keys. This is no visible change of their provider.
    async fn additional_keys_reseal_all(
        &self,
        keyring: &Keyring,
        report: &mut ResealReport<ModelProviderId>,
    ) -> Result<(), Error> {
        let rows = sqlx::query!(
            "SELECT provider_id, position, key_id, key_nonce, key_ciphertext FROM model_provider_keys
             WHERE key_id <> $1 ORDER BY provider_id, position",
            keyring.active(),
        )
        .fetch_all(&self.pool)
        .await?;
        for row in rows {
            let provider = ModelProviderId::from_uuid(row.provider_id);
            let old = SealedSecret {
                key_id: row.key_id,
                nonce: row.key_nonce,
                ciphertext: row.key_ciphertext,
            };
            let new = match reseal(keyring, provider, &old) {
                Ok(new) => new,
                Err(SealError::Unsealable) => return Err(Error::internal(SealError::Unsealable)),
                Err(SealError::UnknownKey { .. } | SealError::Unopenable { .. }) => {
                    report.failed.push(provider);
                    continue;
                }
            };
            let done = sqlx::query!(
                "UPDATE model_provider_keys SET key_id = $4, key_nonce = $5, key_ciphertext = $6
                 WHERE provider_id = $1 AND position = $2 AND key_nonce = $3",
                row.provider_id,
                row.position,
                old.nonce,
                new.key_id,
                new.nonce,
                new.ciphertext,
            )
            .execute(&self.pool)
            .await?;
            report.resealed += done.rows_affected();
        }
        Ok(())
    }
}

/// The same secret, sealed with the active key.
pub(crate) fn reseal(
    keyring: &Keyring,
    id: impl ToString,
    old: &SealedSecret,
) -> Result<SealedSecret, SealError> {
    use secrecy::ExposeSecret as _;
    let record = id.to_string();
    keyring.seal(&record, keyring.open(&record, old)?.expose_secret())
}

async fn model_provider_reload(
    writer: &mut Writer<'_>,
    id: ModelProviderId,
) -> Result<ModelProvider, Error> {
    select!(["WHERE p.organization_id = $1 AND p.id = $2"], writer.organization(), id.uuid())
        .fetch_optional(&mut *writer.transaction)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
}

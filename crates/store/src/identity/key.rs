//! API keys, and the setup codes that are exchanged for one. Only the SHA-256 of a key or code is
//! stored.

use construct_domain::{
    ApiKeyId, OrganizationId, UserId,
    access::{Role, Scope},
};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use uuid::Uuid;

use super::{list_by_time, parse_role, parse_scopes, scope_names};
use crate::{
    Audit, AuditEntry, Cursor, Error, Key, Limits, Page, Store, Write, WriteOutcome, WriteOutput,
    audit, text,
    time::{self, from_sql_option, sql_option},
    write::{Writer, begin},
};

const ENTITY: &str = "API key";

/// The resolution of a key's last use. An exact value would need a write with every read.
const LAST_USE_RESOLUTION: SignedDuration = SignedDuration::from_secs(60);

/// An API key, without its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// Its id.
    pub id: ApiKeyId,
    /// The organization it gives access to.
    pub organization: OrganizationId,
    /// Shown to people.
    pub name: String,
    /// The first characters, shown to people.
    pub prefix: String,
    /// The highest role it can have.
    pub role: Role,
    /// Its scopes.
    pub scopes: Vec<Scope>,
    /// The user it acts for.
    pub user: UserId,
    /// When it expires; none: valid until revoked.
    pub expires_at: Option<Timestamp>,
    /// Its limits: those of [`Limits`] for requests, tasks, runs, tokens and money.
    pub limits: Limits,
    /// When it was revoked.
    pub revoked_at: Option<Timestamp>,
    /// When it was last used, to the minute.
    pub last_used_at: Option<Timestamp>,
    /// Incremented when its limits change.
    pub revision: i64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When its limits last changed.
    pub updated_at: Timestamp,
}

/// The stored form of a key or code.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretHash {
    /// The first characters, shown to people.
    pub prefix: String,
    /// SHA-256 of the whole key or code.
    pub hash: [u8; 32],
}

impl std::fmt::Debug for SecretHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secret").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

/// An API key to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewApiKey {
    /// Its id.
    pub id: ApiKeyId,
    /// Shown to people.
    pub name: String,
    /// The prefix and hash of the key.
    pub secret: SecretHash,
    /// The highest role it can have.
    pub role: Role,
    /// Its scopes.
    pub scopes: Vec<Scope>,
    /// The user it acts for.
    pub user: UserId,
    /// When it expires; none: valid until revoked.
    pub expires_at: Option<Timestamp>,
    /// Its limits.
    pub limits: Limits,
}

/// A setup code to create, with the properties of its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSetupCode {
    /// The prefix and hash of the code.
    pub secret: SecretHash,
    /// A property of the key.
    pub name: String,
    /// A property of the key.
    pub role: Role,
    /// A property of the key.
    pub scopes: Vec<Scope>,
    /// The user the key acts for.
    pub user: UserId,
    /// The API key that it is created with. Revoking that key revokes the code.
    pub made_by: Option<ApiKeyId>,
    /// A property of the key.
    pub key_expires_at: Option<Timestamp>,
    /// A property of the key.
    pub limits: Limits,
    /// The deadline for exchanging it.
    pub expires_at: Timestamp,
}

/// The holder of a valid API key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyHolder {
    /// The key.
    pub key: ApiKeyId,
    /// The organization it gives access to.
    pub organization: OrganizationId,
    /// The user it acts for.
    pub user: UserId,
    /// Its role: at most the user's current role.
    pub role: Role,
    /// Its scopes.
    pub scopes: Vec<Scope>,
    /// When it expires; none: valid until revoked.
    pub expires_at: Option<Timestamp>,
    /// Its limits.
    pub limits: Limits,
}

impl ApiKey {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.id.uuid(), &self.name, self.created_at, self.created_at)
    }
}

struct Row {
    id: Uuid,
    organization_id: Uuid,
    name: String,
    prefix: String,
    role: String,
    scopes: Vec<String>,
    user_id: Uuid,
    expires_at: Option<jiff_sqlx::Timestamp>,
    revoked_at: Option<jiff_sqlx::Timestamp>,
    last_used_at: Option<jiff_sqlx::Timestamp>,
    limits: Value,
    revision: i64,
    created_at: Timestamp,
    updated_at: Option<jiff_sqlx::Timestamp>,
}

impl TryFrom<Row> for ApiKey {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        Ok(Self {
            id: ApiKeyId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            name: row.name,
            prefix: row.prefix,
            role: parse_role(&row.role)?,
            scopes: parse_scopes(&row.scopes),
            user: UserId::from_uuid(row.user_id),
            expires_at: from_sql_option(row.expires_at),
            revoked_at: from_sql_option(row.revoked_at),
            last_used_at: from_sql_option(row.last_used_at),
            limits: Limits::from_column(row.limits)?,
            revision: row.revision,
            created_at: row.created_at,
            updated_at: from_sql_option(row.updated_at).unwrap_or(row.created_at),
        })
    }
}

macro_rules! select {
    ([$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            Row,
            r#"SELECT k.id, k.organization_id, k.name, k.prefix, k.role, k.scopes, k.user_id, k.expires_at, k.revoked_at, k.last_used_at,
                    k.limits, k.revision, k.created_at, k.updated_at
             FROM api_keys k WHERE "# $(+ $tail)+,
            $($argument),*
        )
    };
}

impl Store {
    /// The holder of the key with this hash, if it is valid. Valid, unknown, expired and revoked
    /// keys cost the same: one index lookup.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn api_key_holder(
        &self,
        hash: &[u8; 32],
        now: Timestamp,
    ) -> Result<Option<KeyHolder>, Error> {
        let row = sqlx::query!(
            r#"SELECT k.id, k.organization_id, k.user_id, k.role, k.scopes, k.expires_at, k.last_used_at, k.limits, m.role AS member_role
               FROM api_keys k
               JOIN organizations o ON o.id = k.organization_id
               JOIN members m ON m.organization_id = k.organization_id AND m.user_id = k.user_id
               WHERE k.hash = $1 AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > $2) AND o.deleted_at IS NULL"#,
            hash.as_slice(),
            time::sql(now) as _,
        )
        .fetch_optional(&self.pool)
        .await?;
        let Some(row) = row else { return Ok(None) };
        let noted: Option<Timestamp> = from_sql_option(row.last_used_at);
        if noted.is_none_or(|noted| now.duration_since(noted) >= LAST_USE_RESOLUTION) {
            // Of several concurrent processes one writes.
            sqlx::query!(
                "UPDATE api_keys SET last_used_at = $2 WHERE id = $1 AND (last_used_at IS NULL OR last_used_at <= $3)",
                row.id,
                time::sql(now) as _,
                time::sql(now - LAST_USE_RESOLUTION) as _,
            )
            .execute(&self.pool)
            .await?;
        }
        Ok(Some(KeyHolder {
            key: ApiKeyId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            user: UserId::from_uuid(row.user_id),
            role: parse_role(&row.role)?.min(parse_role(&row.member_role)?),
            scopes: parse_scopes(&row.scopes),
            expires_at: from_sql_option(row.expires_at),
            limits: Limits::from_column(row.limits)?,
        }))
    }

    /// Whether a key is still valid.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn api_key_is_valid(&self, key: ApiKeyId, now: Timestamp) -> Result<bool, Error> {
        Ok(sqlx::query_scalar!(
            r#"SELECT EXISTS (SELECT 1 FROM api_keys k
                   JOIN organizations o ON o.id = k.organization_id
                   JOIN members m ON m.organization_id = k.organization_id AND m.user_id = k.user_id
                   WHERE k.id = $1 AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > $2)
                     AND o.deleted_at IS NULL) AS "holds!""#,
            key.uuid(),
            time::sql(now) as _,
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// A page of an organization's API keys, by time: those of one user, or all.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn api_key_list(
        &self,
        organization: OrganizationId,
        user: Option<UserId>,
        page: &Page,
    ) -> Result<Vec<ApiKey>, Error> {
        let rows = list_by_time!(
            self,
            select,
            "k.organization_id = $1 AND ($2::uuid IS NULL OR k.user_id = $2)",
            "k.created_at",
            "k.id",
            page,
            [organization.uuid(), user.map(UserId::uuid) as _],
            ("3", "4", "5")
        );
        rows.into_iter().map(ApiKey::try_from).collect()
    }

    /// An API key, of one user or of any user of the organization.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn api_key_get(
        &self,
        organization: OrganizationId,
        id: ApiKeyId,
        user: Option<UserId>,
    ) -> Result<ApiKey, Error> {
        select!(
            ["k.organization_id = $1 AND k.id = $2 AND ($3::uuid IS NULL OR k.user_id = $3)"],
            organization.uuid(),
            id.uuid(),
            user.map(UserId::uuid) as _,
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
    }

    /// Replaces the limits of a key, of one user or of any user of the organization.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::InsufficientRole`] when the key's role is above `by`;
    /// [`Error::Conflict`] when the revision is not the expected one; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn api_key_set_limits(
        &self,
        write: &Write,
        (id, user): (ApiKeyId, Option<UserId>),
        (limits, expected_revision): (Limits, Option<i64>),
        by: Role,
        render: impl FnOnce(&ApiKey) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<ApiKey>, Error> {
        let mut writer = begin!(self, write);
        let done = sqlx::query!(
            "UPDATE api_keys SET limits = $4, revision = revision + 1, updated_at = $5
             WHERE organization_id = $1 AND id = $2 AND ($3::uuid IS NULL OR user_id = $3) AND ($6::bigint IS NULL OR revision = $6)",
            writer.organization(),
            id.uuid(),
            user.map(UserId::uuid),
            text::json(&limits)?,
            writer.now(),
            expected_revision,
        )
        .execute(&mut *writer.transaction)
        .await?;
        let entity = reload(&mut writer, id, user).await?;
        if entity.role > by {
            return Err(Error::InsufficientRole);
        }
        if done.rows_affected() == 0 {
            return Err(Error::Conflict);
        }
        writer.finish_unchanged(entity, render).await
    }

    /// Creates an API key.
    ///
    /// # Errors
    /// The errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn api_key_create(&self, write: &Write, new: NewApiKey) -> Result<ApiKey, Error> {
        let organization = write.organization;
        // Without an idempotency key a write is never a repeated one.
        let plain = Write { idempotency: None, ..write.clone() };
        if let crate::write::WriteStart::New(mut writer) = self.write_begin(&plain).await? {
            api_key_insert(&mut writer.transaction, organization, &new, write.now).await?;
            writer.commit(&[]).await?;
        }
        Ok(ApiKey {
            id: new.id,
            organization,
            name: text::clean(&new.name).into_owned(),
            prefix: new.secret.prefix,
            role: new.role,
            scopes: new.scopes,
            user: new.user,
            expires_at: new.expires_at,
            limits: new.limits,
            revoked_at: None,
            last_used_at: None,
            revision: 1,
            created_at: time::micros(write.now),
            updated_at: time::micros(write.now),
        })
    }

    /// Creates an owner's key of the operator's organization, unless it has a valid one. Returns
    /// whether it was created; then `entry` is in the audit trail.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn api_key_create_first(
        &self,
        new: &NewApiKey,
        entry: AuditEntry,
        now: Timestamp,
    ) -> Result<bool, Error> {
        let local = OrganizationId::LOCAL;
        let mut transaction = self.pool.begin().await?;
        // Serializes concurrent calls.
        sqlx::query_scalar!("SELECT id FROM organizations WHERE id = $1 FOR UPDATE", local.uuid())
            .fetch_one(&mut *transaction)
            .await?;
        let existing = sqlx::query_scalar!(
            r#"SELECT EXISTS (SELECT 1 FROM api_keys k
                   JOIN members m ON m.organization_id = k.organization_id AND m.user_id = k.user_id AND m.role = 'owner'
                   WHERE k.organization_id = $1 AND k.role = 'owner' AND k.revoked_at IS NULL AND 'admin' = ANY (k.scopes)
                     AND (k.expires_at IS NULL OR k.expires_at > $2)) AS "there!""#,
            local.uuid(),
            time::sql(now) as _,
        )
        .fetch_one(&mut *transaction)
        .await?;
        if existing {
            return Ok(false);
        }
        api_key_insert(&mut transaction, local, new, now).await?;
        audit::insert(&mut transaction, audit::rows(&[entry])?).await?;
        transaction.commit().await?;
        Ok(true)
    }

    /// Revokes a key, of one user or of any user of the organization, and the codes that were
    /// created with it. No effect if it is already revoked.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::InsufficientRole`] when the key's role is above `by`; the
    /// errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn api_key_revoke(
        &self,
        write: &Write,
        id: ApiKeyId,
        user: Option<UserId>,
        by: Role,
        render: impl FnOnce(&ApiKey) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<ApiKey>, Error> {
        let mut writer = begin!(self, write);
        sqlx::query!(
            "UPDATE api_keys SET revoked_at = $4
             WHERE organization_id = $1 AND id = $2 AND ($3::uuid IS NULL OR user_id = $3) AND revoked_at IS NULL",
            writer.organization(),
            id.uuid(),
            user.map(UserId::uuid),
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        let entity = reload(&mut writer, id, user).await?;
        if entity.role > by {
            return Err(Error::InsufficientRole);
        }
        sqlx::query!("DELETE FROM setup_codes WHERE made_by = $1", id.uuid())
            .execute(&mut *writer.transaction)
            .await?;
        writer.finish_unchanged(entity, render).await
    }

    /// Creates a setup code.
    ///
    /// # Errors
    /// The errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn setup_code_create(&self, write: &Write, new: &NewSetupCode) -> Result<(), Error> {
        // Without an idempotency key a write is never a repeated one.
        let plain = Write { idempotency: None, ..write.clone() };
        if let crate::write::WriteStart::New(mut writer) = self.write_begin(&plain).await? {
            setup_code_insert(&mut writer, write.organization, new).await?;
            writer.commit(&[]).await?;
        }
        Ok(())
    }

    /// Exchanges a code for a key, once: of several concurrent attempts one succeeds. None when the
    /// code is unknown, expired or used, or its user is no longer a member. `audit` is stored in
    /// the trail of the key's organization, with the key's user.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn setup_code_exchange(
        &self,
        code: &[u8; 32],
        id: ApiKeyId,
        secret: &SecretHash,
        audit: Option<&Audit>,
        now: Timestamp,
    ) -> Result<Option<ApiKey>, Error> {
        let mut transaction = self.pool.begin().await?;
        let row = sqlx::query_as!(
            Row,
            r#"WITH code AS (
                   DELETE FROM setup_codes c USING organizations o, members m
                   WHERE c.hash = $1 AND c.expires_at > $2 AND o.id = c.organization_id AND o.deleted_at IS NULL
                     AND m.organization_id = c.organization_id AND m.user_id = c.user_id
                   RETURNING c.organization_id, c.name, c.role, c.scopes, c.user_id, c.key_expires_at, c.limits
               )
               INSERT INTO api_keys (id, organization_id, name, prefix, hash, role, scopes, user_id, expires_at, created_at, limits)
               SELECT $3, organization_id, name, $4, $5, role, scopes, user_id, key_expires_at, $2, limits FROM code
               RETURNING id, organization_id, name, prefix, role, scopes, user_id, expires_at, revoked_at, last_used_at, limits, revision,
                         created_at, updated_at"#,
            code.as_slice(),
            time::sql(now) as _,
            id.uuid(),
            secret.prefix,
            secret.hash.as_slice(),
        )
        .fetch_optional(&mut *transaction)
        .await?;
        let Some(key) = row.map(ApiKey::try_from).transpose()? else { return Ok(None) };
        if let Some(audit) = audit {
            let objects = vec![key.id.to_string()];
            let entry = AuditEntry {
                organization: key.organization,
                user: Some(key.user),
                objects,
                ..audit.entry.clone()
            };
            audit::insert(&mut transaction, audit::rows(&[entry])?).await?;
        }
        transaction.commit().await?;
        if let Some(audit) = audit {
            audit.mark_written();
        }
        Ok(Some(key))
    }
}

/// The current row of a key, within a write.
async fn reload(
    writer: &mut Writer<'_>,
    id: ApiKeyId,
    user: Option<UserId>,
) -> Result<ApiKey, Error> {
    select!(
        ["k.organization_id = $1 AND k.id = $2 AND ($3::uuid IS NULL OR k.user_id = $3)"],
        writer.organization(),
        id.uuid(),
        user.map(UserId::uuid) as _,
    )
    .fetch_optional(&mut *writer.transaction)
    .await?
    .ok_or(Error::NotFound { what: ENTITY })?
    .try_into()
}

async fn api_key_insert(
    connection: &mut sqlx::PgConnection,
    organization: OrganizationId,
    new: &NewApiKey,
    now: Timestamp,
) -> Result<(), Error> {
    sqlx::query!(
        "INSERT INTO api_keys (id, organization_id, name, prefix, hash, role, scopes, user_id, expires_at, created_at, limits)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
        new.id.uuid(),
        organization.uuid(),
        &*text::clean(&new.name),
        new.secret.prefix,
        new.secret.hash.as_slice(),
        new.role.as_str(),
        &scope_names(&new.scopes),
        new.user.uuid(),
        sql_option(new.expires_at) as _,
        time::sql(now) as _,
        text::json(&new.limits)?,
    )
    .execute(connection)
    .await
    .map_err(Error::from_write)?;
    Ok(())
}

/// Stores a code, and deletes expired ones.
pub(super) async fn setup_code_insert(
    writer: &mut Writer<'_>,
    organization: OrganizationId,
    new: &NewSetupCode,
) -> Result<(), Error> {
    sqlx::query!("DELETE FROM setup_codes WHERE expires_at <= $1", writer.now())
        .execute(&mut *writer.transaction)
        .await?;
    sqlx::query!(
        "INSERT INTO setup_codes (hash, organization_id, name, role, scopes, user_id, key_expires_at, expires_at, created_at, made_by, limits)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
        new.secret.hash.as_slice(),
        organization.uuid(),
        &*text::clean(&new.name),
        new.role.as_str(),
        &scope_names(&new.scopes),
        new.user.uuid(),
        sql_option(new.key_expires_at) as _,
        time::sql(new.expires_at) as _,
        writer.now(),
        new.made_by.map(ApiKeyId::uuid),
        text::json(&new.limits)?,
    )
    .execute(&mut *writer.transaction)
    .await
    .map_err(Error::from_write)?;
    Ok(())
}

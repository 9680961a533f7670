//! Secrets that scripts use without seeing them. Their values are sealed before they get here.

use jiff::Timestamp;
use uuid::Uuid;

use construct_domain::{OrganizationId, SecretId, TaskId, secret::MAX_PER_AGENT};

use crate::{
    Cursor, Error, Key, Keyring, Page, ResealReport, SealError, SealedSecret, Store, Write,
    WriteOutcome, WriteOutput,
    model_provider::reseal,
    text, time,
    write::{Writer, begin},
};

const ENTITY: &str = "secret";

/// A secret.
#[derive(Debug, Clone, PartialEq)]
pub struct Secret {
    /// Its id.
    pub id: SecretId,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// Unique in the organization.
    pub name: String,
    /// Shown to people and models.
    pub description: String,
    /// Where it may be sent.
    pub bindings: Bindings,
    /// The value, sealed for the secret's id.
    pub value: SealedSecret,
    /// The number of agents that may use it.
    pub agent_count: i64,
    /// Incremented by every change.
    pub revision: i64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

/// Where a secret may be sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bindings {
    /// Hosts of requests.
    pub hosts: Vec<String>,
    /// Programs.
    pub commands: Vec<String>,
}

impl Bindings {
    /// Whether `others` contains all of these.
    pub fn is_within(&self, others: &Self) -> bool {
        self.hosts.iter().all(|host| others.hosts.contains(host))
            && self.commands.iter().all(|command| others.commands.contains(command))
    }
}

impl Secret {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.id.uuid(), &self.name, self.created_at, self.updated_at)
    }
}

/// A secret to create.
#[derive(Debug, Clone, PartialEq)]
pub struct NewSecret {
    /// Its id.
    pub id: SecretId,
    /// Unique in the organization.
    pub name: String,
    /// Shown to people and models.
    pub description: String,
    /// Where it may be sent.
    pub bindings: Bindings,
    /// The value, sealed for the secret's id.
    pub value: SealedSecret,
}

/// Changes to a secret. `None` leaves a field as it is.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SecretChanges {
    /// Unique in the organization.
    pub name: Option<String>,
    /// Shown to people and models.
    pub description: Option<String>,
    /// Replaces all of them.
    pub bindings: Option<Bindings>,
    /// The value, sealed for the secret's id.
    pub value: Option<SealedSecret>,
}

struct Row {
    id: Uuid,
    organization_id: Uuid,
    name: String,
    description: String,
    hosts: Vec<String>,
    commands: Vec<String>,
    key_id: String,
    key_nonce: Vec<u8>,
    key_ciphertext: Vec<u8>,
    agent_count: i64,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl From<Row> for Secret {
    fn from(row: Row) -> Self {
        Self {
            id: SecretId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            name: row.name,
            description: row.description,
            bindings: Bindings { hosts: row.hosts, commands: row.commands },
            value: SealedSecret {
                key_id: row.key_id,
                nonce: row.key_nonce,
                ciphertext: row.key_ciphertext,
            },
            agent_count: row.agent_count,
            revision: row.revision,
            created_at: row.created_at,
            updated_at: row.updated_at,
        }
    }
}

macro_rules! select {
    ([$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            Row,
            r#"SELECT s.id, s.organization_id, s.name, s.description, s.hosts, s.commands, s.key_id, s.key_nonce, s.key_ciphertext,
                    (SELECT count(*) FROM agent_secrets x
                     WHERE x.organization_id = s.organization_id AND x.secret_id = s.id) AS "agent_count!",
                    s.revision, s.created_at, s.updated_at
             FROM secrets s "# $(+ $tail)+,
            $($argument),*
        )
    };
}

macro_rules! list {
    ($store:expr, $organization:expr, $prefix:expr, $page:expr, $after:expr, $key:literal, $comparison:literal, $direction:literal) => {{
        let (value, id) = $after?;
        select!(
            ["WHERE s.organization_id = $1 AND starts_with(s.name, $2) AND (" $key ", s.id) " $comparison " ($3, $4)
             ORDER BY " $key $direction ", s.id" $direction " LIMIT $5"],
            $organization.uuid(),
            $prefix,
            value,
            id,
            $page.limit(),
        )
        .fetch_all(&$store.pool)
        .await?
    }};
}

impl Store {
    /// A secret by id or name. Names are in upper case, ids are not.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn secret_find(
        &self,
        organization: OrganizationId,
        name_or_id: &str,
    ) -> Result<Secret, Error> {
        let id = name_or_id.parse::<SecretId>().ok().map(SecretId::uuid);
        select!(
            ["WHERE s.organization_id = $1 AND (s.id = $2 OR s.name = $3)"],
            organization.uuid(),
            id as _,
            name_or_id
        )
        .fetch_optional(&self.pool)
        .await?
        .map(Secret::from)
        .ok_or(Error::NotFound { what: ENTITY })
    }

    /// The id of a secret by id or name.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn secret_resolve(
        &self,
        organization: OrganizationId,
        name_or_id: &str,
    ) -> Result<SecretId, Error> {
        let id = name_or_id.parse::<SecretId>().ok().map(SecretId::uuid);
        sqlx::query_scalar!(
            "SELECT id FROM secrets WHERE organization_id = $1 AND (id = $2 OR name = $3)",
            organization.uuid(),
            id as _,
            name_or_id,
        )
        .fetch_optional(&self.pool)
        .await?
        .map(SecretId::from_uuid)
        .ok_or(Error::NotFound { what: ENTITY })
    }

    /// A page of secrets whose names begin with `prefix`.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn secret_list(
        &self,
        organization: OrganizationId,
        prefix: &str,
        page: &Page,
    ) -> Result<Vec<Secret>, Error> {
        let rows = match (page.order.key, page.order.descending) {
            (Key::CreatedAt, false) => {
                list!(self, organization, prefix, page, page.after_time(), "s.created_at", ">", "")
            }
            (Key::CreatedAt, true) => {
                list!(
                    self,
                    organization,
                    prefix,
                    page,
                    page.after_time(),
                    "s.created_at",
                    "<",
                    " DESC"
                )
            }
            (Key::UpdatedAt, false) => {
                list!(self, organization, prefix, page, page.after_time(), "s.updated_at", ">", "")
            }
            (Key::UpdatedAt, true) => {
                list!(
                    self,
                    organization,
                    prefix,
                    page,
                    page.after_time(),
                    "s.updated_at",
                    "<",
                    " DESC"
                )
            }
            (Key::Name, false) => {
                list!(self, organization, prefix, page, page.after_name(), "s.name", ">", "")
            }
            (Key::Name, true) => {
                list!(self, organization, prefix, page, page.after_name(), "s.name", "<", " DESC")
            }
        };
        Ok(rows.into_iter().map(Secret::from).collect())
    }

    /// The secrets that the scripts of a task may use: the current ones of its agent, by name.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_secrets(&self, task: TaskId) -> Result<Vec<Secret>, Error> {
        let rows = select!(
            ["JOIN agent_secrets a ON a.organization_id = s.organization_id AND a.secret_id = s.id
             JOIN tasks t ON t.organization_id = a.organization_id AND t.agent_id = a.agent_id
             WHERE t.id = $1 ORDER BY s.name LIMIT $2"],
            task.uuid(),
            i64::try_from(MAX_PER_AGENT).unwrap_or(i64::MAX),
        );
        Ok(rows.fetch_all(&self.pool).await?.into_iter().map(Secret::from).collect())
    }

    /// Creates a secret.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] when the name is taken; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn secret_create(
        &self,
        write: &Write,
        new: NewSecret,
        render: impl FnOnce(&Secret) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Secret>, Error> {
        let mut writer = begin!(self, write);
        sqlx::query!(
            "INSERT INTO secrets
                 (id, organization_id, name, description, hosts, commands, key_id, key_nonce, key_ciphertext, created_at, updated_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $10)",
            new.id.uuid(),
            writer.organization(),
            new.name,
            &*text::clean(&new.description),
            &new.bindings.hosts,
            &new.bindings.commands,
            new.value.key_id,
            new.value.nonce,
            new.value.ciphertext,
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        let entity = secret_reload(&mut writer, new.id).await?;
        writer.finish(entity, render).await
    }

    /// Changes a secret.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::AlreadyExists`], [`Error::Conflict`] when the revision is not
    /// the expected one.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn secret_update(
        &self,
        write: &Write,
        id: SecretId,
        expected_revision: Option<i64>,
        changes: SecretChanges,
        render: impl FnOnce(&Secret) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Secret>, Error> {
        let mut writer = begin!(self, write);
        let (bindings, value) = (changes.bindings.as_ref(), changes.value.as_ref());
        let done = sqlx::query!(
            "UPDATE secrets SET
                 name = coalesce($5, name),
                 description = coalesce($6, description),
                 hosts = coalesce($7, hosts),
                 commands = coalesce($8, commands),
                 key_id = coalesce($9, key_id),
                 key_nonce = coalesce($10, key_nonce),
                 key_ciphertext = coalesce($11, key_ciphertext),
                 revision = revision + 1,
                 updated_at = $4
             WHERE organization_id = $1 AND id = $2 AND ($3::bigint IS NULL OR revision = $3)",
            writer.organization(),
            id.uuid(),
            expected_revision,
            writer.now(),
            changes.name,
            text::clean_option(changes.description.as_deref()),
            bindings.map(|bindings| bindings.hosts.as_slice()) as _,
            bindings.map(|bindings| bindings.commands.as_slice()) as _,
            value.map(|value| value.key_id.as_str()),
            value.map(|value| value.nonce.as_slice()),
            value.map(|value| value.ciphertext.as_slice()),
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        let entity = secret_reload(&mut writer, id).await?;
        if done.rows_affected() == 0 {
            return Err(Error::Conflict);
        }
        writer.finish(entity, render).await
    }

    /// Deletes a secret. The entity in the result is the secret before the deletion.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::InUse`] while an agent may use it.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn secret_delete(
        &self,
        write: &Write,
        id: SecretId,
        render: impl FnOnce(&Secret) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Secret>, Error> {
        let mut writer = begin!(self, write);
        let entity = secret_reload(&mut writer, id).await?;
        let done = sqlx::query!(
            "DELETE FROM secrets WHERE organization_id = $1 AND id = $2",
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

    /// Reseals every value that is not sealed with the keyring's active key, in all organizations.
    /// It can be repeated, and can run while secrets change: a value that was written concurrently
    /// is left as it is.
    ///
    /// # Errors
    /// [`Error::Unavailable`]; [`Error::Internal`] when the operating system provides no
    /// randomness.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn secret_reseal_all(
        &self,
        keyring: &Keyring,
        now: Timestamp,
    ) -> Result<ResealReport<SecretId>, Error> {
        let rows = select!(["WHERE s.key_id <> $1 ORDER BY s.id"], keyring.active())
            .fetch_all(&self.pool)
            .await?;
        let mut report = ResealReport { resealed: 0, failed: Vec::new() };
        for Secret { id, value: old, .. } in rows.into_iter().map(Secret::from) {
            let new = match reseal(keyring, id, &old) {
                Ok(new) => new,
                Err(SealError::Unsealable) => return Err(Error::internal(SealError::Unsealable)),
                Err(SealError::UnknownKey { .. } | SealError::Unopenable { .. }) => {
                    report.failed.push(id);
                    continue;
                }
            };
            let done = sqlx::query!(
                "UPDATE secrets SET key_id = $4, key_nonce = $5, key_ciphertext = $6, revision = revision + 1, updated_at = $7
                 WHERE id = $1 AND key_id = $2 AND key_nonce = $3",
                id.uuid(),
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
        Ok(report)
    }
}

/// Replaces the secrets that an agent may use.
pub(crate) async fn agent_secrets_set(
    writer: &mut Writer<'_>,
    agent: Uuid,
    secrets: &[SecretId],
) -> Result<(), Error> {
    let organization = writer.organization();
    sqlx::query!(
        "DELETE FROM agent_secrets WHERE organization_id = $1 AND agent_id = $2",
        organization,
        agent
    )
    .execute(&mut *writer.transaction)
    .await?;
    let secrets: Vec<Uuid> = secrets.iter().map(|secret| secret.uuid()).collect();
    sqlx::query!(
        "INSERT INTO agent_secrets (organization_id, agent_id, secret_id)
         SELECT DISTINCT $1::uuid, $2::uuid, secret FROM unnest($3::uuid[]) AS secret",
        organization,
        agent,
        &secrets,
    )
    .execute(&mut *writer.transaction)
    .await
    .map_err(Error::from_write)?;
    Ok(())
}

async fn secret_reload(writer: &mut Writer<'_>, id: SecretId) -> Result<Secret, Error> {
    select!(["WHERE s.organization_id = $1 AND s.id = $2"], writer.organization(), id.uuid())
        .fetch_optional(&mut *writer.transaction)
        .await?
        .map(Secret::from)
        .ok_or(Error::NotFound { what: ENTITY })
}

//! Connections to repository hosts. Their credentials are sealed before they get here.

use construct_domain::{OrganizationId, ScanConnectionId};
use jiff::Timestamp;
use uuid::Uuid;

use super::{ScanCredential, ScanHost};
use crate::{
    Cursor, Error, Key, Keyring, Page, ResealReport, SealError, SealedSecret, Store, Write,
    WriteOutcome, WriteOutput, model_provider::reseal, time, write::begin,
};

const ENTITY: &str = "connection";

/// A connection to a repository host.
#[derive(Debug, Clone, PartialEq)]
pub struct ScanConnection {
    /// Its id.
    pub id: ScanConnectionId,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// Unique in the organization.
    pub name: String,
    /// The host.
    pub host: ScanHost,
    /// The address of its API; empty: the host's default.
    pub base_url: String,
    /// The kind of credential.
    pub credential: ScanCredential,
    /// The credential, sealed for the connection's id.
    pub sealed: SealedSecret,
    /// Incremented by every change.
    pub revision: i64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

impl ScanConnection {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.id.uuid(), &self.name, self.created_at, self.updated_at)
    }
}

/// A connection to create.
#[derive(Debug, Clone, PartialEq)]
pub struct NewScanConnection {
    /// Its id.
    pub id: ScanConnectionId,
    /// Unique in the organization.
    pub name: String,
    /// The host.
    pub host: ScanHost,
    /// The address of its API; empty: the host's default.
    pub base_url: String,
    /// The kind of credential.
    pub credential: ScanCredential,
    /// The credential, sealed for the connection's id.
    pub sealed: SealedSecret,
}

struct Row {
    id: Uuid,
    organization_id: Uuid,
    name: String,
    host: String,
    base_url: String,
    credential: String,
    key_id: String,
    key_nonce: Vec<u8>,
    key_ciphertext: Vec<u8>,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl TryFrom<Row> for ScanConnection {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        Ok(Self {
            id: ScanConnectionId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            name: row.name,
            host: ScanHost::from_column(&row.host)?,
            base_url: row.base_url,
            credential: ScanCredential::from_column(&row.credential)?,
            sealed: SealedSecret {
                key_id: row.key_id,
                nonce: row.key_nonce,
                ciphertext: row.key_ciphertext,
            },
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
            "SELECT c.id, c.organization_id, c.name, c.host, c.base_url, c.credential, c.key_id, c.key_nonce, c.key_ciphertext,
                 c.revision, c.created_at, c.updated_at
             FROM scan_connections c " $(+ $tail)+,
            $($argument),*
        )
    };
}

macro_rules! list {
    ($store:expr, $organization:expr, $page:expr, $after:expr, $key:literal, $comparison:literal, $direction:literal) => {{
        let (value, id) = $after?;
        select!(
            ["WHERE c.organization_id = $1 AND (" $key ", c.id) " $comparison " ($2, $3)
             ORDER BY " $key $direction ", c.id" $direction " LIMIT $4"],
            $organization.uuid(),
            value,
            id,
            $page.limit(),
        )
        .fetch_all(&$store.pool)
        .await?
    }};
}

impl Store {
    /// A connection by id or name.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_connection_find(
        &self,
        organization: OrganizationId,
        name_or_id: &str,
    ) -> Result<ScanConnection, Error> {
        let id = name_or_id.parse::<ScanConnectionId>().ok().map(ScanConnectionId::uuid);
        select!(
            ["WHERE c.organization_id = $1 AND (c.id = $2 OR c.name = $3) ORDER BY (c.id = $2) IS TRUE DESC LIMIT 1"],
            organization.uuid(),
            id as _,
            name_or_id,
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
    }

    /// A page of connections.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_connection_list(
        &self,
        organization: OrganizationId,
        page: &Page,
    ) -> Result<Vec<ScanConnection>, Error> {
        let rows = match (page.order.key, page.order.descending) {
            (Key::CreatedAt, false) => {
                list!(self, organization, page, page.after_time(), "c.created_at", ">", "")
            }
            (Key::CreatedAt, true) => {
                list!(self, organization, page, page.after_time(), "c.created_at", "<", " DESC")
            }
            (Key::UpdatedAt, false) => {
                list!(self, organization, page, page.after_time(), "c.updated_at", ">", "")
            }
            (Key::UpdatedAt, true) => {
                list!(self, organization, page, page.after_time(), "c.updated_at", "<", " DESC")
            }
            (Key::Name, false) => {
                list!(self, organization, page, page.after_name(), "c.name", ">", "")
            }
            (Key::Name, true) => {
                list!(self, organization, page, page.after_name(), "c.name", "<", " DESC")
            }
        };
        rows.into_iter().map(TryInto::try_into).collect()
    }

    /// Creates a connection.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] when the name is taken; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_connection_create(
        &self,
        write: &Write,
        new: NewScanConnection,
        render: impl FnOnce(&ScanConnection) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<ScanConnection>, Error> {
        let mut writer = begin!(self, write);
        sqlx::query!(
            "INSERT INTO scan_connections
                 (id, organization_id, name, host, base_url, credential, key_id, key_nonce, key_ciphertext, created_at, updated_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $10)",
            new.id.uuid(),
            writer.organization(),
            new.name,
            new.host.as_str(),
            new.base_url,
            new.credential.as_str(),
            new.sealed.key_id,
            new.sealed.nonce,
            new.sealed.ciphertext,
            writer.now() as _,
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        let row = select!(
            ["WHERE c.organization_id = $1 AND c.id = $2"],
            writer.organization(),
            new.id.uuid()
        );
        let entity = row.fetch_one(&mut *writer.transaction).await?.try_into()?;
        let response = render(&entity).response;
        writer.commit(&response).await?;
        Ok(WriteOutcome::Applied { entity, event: None })
    }

    /// Deletes a connection. The entity in the result is the connection before the deletion.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::InUse`] while an unfinished scan uses it.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_connection_delete(
        &self,
        write: &Write,
        id: ScanConnectionId,
        render: impl FnOnce(&ScanConnection) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<ScanConnection>, Error> {
        let mut writer = begin!(self, write);
        // A concurrent creation of a scan waits for this lock, and then finds no connection.
        let row = select!(
            ["WHERE c.organization_id = $1 AND c.id = $2 FOR UPDATE"],
            writer.organization(),
            id.uuid()
        );
        let row = row
            .fetch_optional(&mut *writer.transaction)
            .await?
            .ok_or(Error::NotFound { what: ENTITY })?;
        let used = sqlx::query_scalar!(
            r#"SELECT EXISTS (SELECT 1 FROM scans WHERE organization_id = $1 AND connection_id = $2 AND next_wake IS NOT NULL)
                   AS "used!""#,
            writer.organization(),
            id.uuid(),
        )
        .fetch_one(&mut *writer.transaction)
        .await?;
        if used {
            return Err(Error::InUse { what: ENTITY, by: "scan" });
        }
        sqlx::query!(
            "DELETE FROM scan_connections WHERE organization_id = $1 AND id = $2",
            writer.organization(),
            id.uuid()
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_delete)?;
        let entity = row.try_into()?;
        let response = render(&entity).response;
        writer.commit(&response).await?;
        Ok(WriteOutcome::Applied { entity, event: None })
    }

    /// Reseals the credentials that are not sealed with the keyring's active key, in all
    /// organizations. It can be repeated.
    ///
    /// # Errors
    /// [`Error::Unavailable`]; [`Error::Internal`] when the operating system provides no
    /// randomness.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_connection_reseal_all(
        &self,
        keyring: &Keyring,
        now: Timestamp,
    ) -> Result<ResealReport<ScanConnectionId>, Error> {
        let rows = select!(["WHERE c.key_id <> $1 ORDER BY c.id"], keyring.active())
            .fetch_all(&self.pool)
            .await?;
        let mut report = ResealReport { resealed: 0, failed: Vec::new() };
        for row in rows {
            let ScanConnection { id, sealed: old, .. } = row.try_into()?;
            let new = match reseal(keyring, id, &old) {
                Ok(new) => new,
                Err(SealError::Unsealable) => return Err(Error::internal(SealError::Unsealable)),
                Err(SealError::UnknownKey { .. } | SealError::Unopenable { .. }) => {
                    report.failed.push(id);
                    continue;
                }
            };
            let done = sqlx::query!(
                "UPDATE scan_connections SET key_id = $4, key_nonce = $5, key_ciphertext = $6, revision = revision + 1, updated_at = $7
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

//! Removal of content from the folder.

use construct_domain::{FileId, OrganizationId};
use jiff::Timestamp;
use sqlx::{PgConnection, Postgres, Transaction};
use uuid::Uuid;

use super::{File, digest};
use crate::{Error, Store, time};

/// Content to remove from the folder.
#[derive(Debug, Clone, PartialEq)]
pub struct Removal {
    /// Its id.
    pub id: Uuid,
    /// The organization it belonged to.
    pub organization: OrganizationId,
    /// The content.
    pub target: RemovalTarget,
}

/// A kind of content in the folder.
#[derive(Debug, Clone, PartialEq)]
pub enum RemovalTarget {
    /// A content, if no file refers to it.
    Content([u8; 32]),
    /// The uploaded parts of a file.
    Upload(FileId),
    /// Everything of an organization.
    Everything,
}

/// A locked content of an organization. No other process stores or removes it meanwhile.
#[derive(Debug)]
pub struct FileContent {
    transaction: Transaction<'static, Postgres>,
    organization: OrganizationId,
    sha256: [u8; 32],
}

impl Store {
    /// Locks a content, so that the folder and the rows change together.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_content(
        &self,
        organization: OrganizationId,
        sha256: [u8; 32],
    ) -> Result<FileContent, Error> {
        let mut transaction = self.pool.begin().await?;
        lock(&mut transaction, organization.uuid(), &sha256).await?;
        Ok(FileContent { transaction, organization, sha256 })
    }

    /// The next contents to remove.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_removals(&self, limit: u32) -> Result<Vec<Removal>, Error> {
        let rows = sqlx::query!(
            "SELECT id, owner, sha256, file_id FROM file_removals ORDER BY created_at, id LIMIT $1",
            i64::from(limit),
        );
        let read = |row: (Uuid, Uuid, Option<Vec<u8>>, Option<Uuid>)| {
            let (id, owner, sha256, file) = row;
            let target = match (digest(sha256)?, file) {
                (Some(sha256), _) => RemovalTarget::Content(sha256),
                (None, Some(file)) => RemovalTarget::Upload(FileId::from_uuid(file)),
                (None, None) => RemovalTarget::Everything,
            };
            Ok(Removal { id, organization: OrganizationId::from_uuid(owner), target })
        };
        let rows = rows.fetch_all(&self.pool).await?.into_iter();
        rows.map(|row| read((row.id, row.owner, row.sha256, row.file_id))).collect()
    }

    /// Records that a content was removed from the folder.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_removal_done(&self, removal: Uuid) -> Result<(), Error> {
        sqlx::query!("DELETE FROM file_removals WHERE id = $1", removal)
            .execute(&self.pool)
            .await?;
        Ok(())
    }
}

impl FileContent {
    /// Whether a file refers to this content.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn is_needed(&mut self) -> Result<bool, Error> {
        Ok(sqlx::query_scalar!(
            r#"SELECT EXISTS (SELECT 1 FROM files WHERE organization_id = $1 AND sha256 = $2) AS "needed!""#,
            self.organization.uuid(),
            self.sha256.as_slice(),
        )
        .fetch_one(&mut *self.transaction)
        .await?)
    }

    /// Ends a removal: the content was removed from the folder, or is needed.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn finish(mut self, removal: Uuid) -> Result<(), Error> {
        sqlx::query!("DELETE FROM file_removals WHERE id = $1", removal)
            .execute(&mut *self.transaction)
            .await?;
        Ok(self.transaction.commit().await?)
    }

    /// Marks a file as ready after its content was stored. False when the file was deleted
    /// meanwhile; then the removal of the content is recorded.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn mark_ready(
        mut self,
        file: FileId,
        media_type: &str,
        now: Timestamp,
    ) -> Result<bool, Error> {
        let done = sqlx::query!(
            "UPDATE files SET state = 'ready', sha256 = $2, media_type = $3, expires_at = NULL, claimed_until = NULL,
                 revision = revision + 1, updated_at = $4
             WHERE id = $1 AND state = 'checking'",
            file.uuid(),
            self.sha256.as_slice(),
            media_type,
            time::sql(now) as _,
        )
        .execute(&mut *self.transaction)
        .await?;
        let is_there = done.rows_affected() > 0;
        if is_there {
            sqlx::query!("DELETE FROM file_parts WHERE file_id = $1", file.uuid())
                .execute(&mut *self.transaction)
                .await?;
        } else {
            insert(&mut self.transaction, self.organization, Some(&self.sha256), None, now).await?;
        }
        record_upload_removal(&mut self.transaction, self.organization, file, now).await?;
        self.transaction.commit().await?;
        Ok(is_there)
    }
}

/// Locks a content until the end of the transaction.
pub(super) async fn lock(
    connection: &mut PgConnection,
    organization: Uuid,
    sha256: &[u8; 32],
) -> Result<(), Error> {
    let name: String = sha256.iter().map(|byte| format!("{byte:02x}")).collect();
    sqlx::query_scalar!(
        r#"SELECT pg_advisory_xact_lock(hashtextextended($1::text, 35))::text AS "done""#,
        format!("{organization}/{name}"),
    )
    .fetch_one(connection)
    .await?;
    Ok(())
}

/// Records the removal of what the folder may hold of a file.
pub(super) async fn record_removal(
    connection: &mut PgConnection,
    file: &File,
    now: Timestamp,
) -> Result<(), Error> {
    match &file.sha256 {
        Some(sha256) => insert(connection, file.organization, Some(sha256), None, now).await,
        None => record_upload_removal(connection, file.organization, file.id, now).await,
    }
}

pub(super) async fn record_upload_removal(
    connection: &mut PgConnection,
    organization: OrganizationId,
    file: FileId,
    now: Timestamp,
) -> Result<(), Error> {
    insert(connection, organization, None, Some(file), now).await
}

/// Records the removal of all content of an organization.
pub(crate) async fn record_organization_removal(
    connection: &mut PgConnection,
    organization: OrganizationId,
    now: Timestamp,
) -> Result<(), Error> {
    insert(connection, organization, None, None, now).await
}

async fn insert(
    connection: &mut PgConnection,
    organization: OrganizationId,
    sha256: Option<&[u8; 32]>,
    file: Option<FileId>,
    now: Timestamp,
) -> Result<(), Error> {
    sqlx::query!(
        "INSERT INTO file_removals (id, owner, sha256, file_id, created_at) VALUES ($1, $2, $3, $4, $5)",
        Uuid::now_v7(),
        organization.uuid(),
        sha256.map(<[u8; 32]>::as_slice) as _,
        file.map(FileId::uuid) as _,
        time::sql(now) as _,
    )
    .execute(connection)
    .await?;
    Ok(())
}

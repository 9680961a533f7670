//! Upload of the parts of a file, and their assembly.

use construct_domain::{FileId, OrganizationId};
use jiff::{SignedDuration, Timestamp};
use uuid::Uuid;

use super::{ENTITY, File, FileState, MAX_PARTS, Row, reload, removal, select};
use crate::{Error, Store, Write, WriteOutput, time};

/// How long a gateway may process a file before another one takes over. Longer than the check of
/// the largest file takes.
const CLAIM_TIMEOUT: SignedDuration = SignedDuration::from_mins(5);

/// A part that was stored in the folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewPart {
    /// Its offset in the file.
    pub position: i64,
    /// Its size in bytes.
    pub size: i64,
    /// Its name in the folder.
    pub part: Uuid,
    /// SHA-256 of its content. A repeated part with the same hash is no conflict.
    pub sha256: [u8; 32],
}

/// The outcome of a part.
#[derive(Debug, Clone, PartialEq)]
pub enum PartOutcome {
    /// The part was appended to the file.
    Accepted(File),
    /// A repetition of the last part. Its stored copy is superfluous.
    Duplicate(File),
}

/// A part of a file in the folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Its name in the folder.
    pub part: Uuid,
}

/// A file whose parts are complete, claimed for assembly.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimedFile {
    /// The file.
    pub file: File,
    /// Its parts, in order.
    pub parts: Vec<Part>,
}

impl Store {
    /// Appends a part to a file.
    ///
    /// # Errors
    /// [`Error::WrongOffset`] when the part does not begin at the end of the file,
    /// [`Error::NotUploading`] when the file is complete, [`Error::TooManyParts`],
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_part_add(
        &self,
        write: &Write,
        id: FileId,
        new: NewPart,
        render: impl FnOnce(&File) -> WriteOutput + Send,
    ) -> Result<PartOutcome, Error> {
        let mut writer = match self.write_begin(write).await? {
            crate::write::WriteStart::New(writer) => writer,
            crate::write::WriteStart::Repeated(_) => return Err(Error::IdempotencyMismatch),
        };
        let row = sqlx::query!(
            "SELECT state, size, received, part_count FROM files WHERE organization_id = $1 AND id = $2 FOR UPDATE",
            writer.organization(),
            id.uuid(),
        );
        let row = row
            .fetch_optional(&mut *writer.transaction)
            .await?
            .ok_or(Error::NotFound { what: ENTITY })?;
        if new.position.checked_add(new.size) == Some(row.received)
            && row.state != FileState::Refused.as_str()
        {
            let last = sqlx::query_scalar!(
                "SELECT sha256 FROM file_parts WHERE file_id = $1 AND position = $2 AND size = $3",
                id.uuid(),
                new.position,
                new.size,
            );
            let last = last.fetch_optional(&mut *writer.transaction).await?;
            // The parts of a ready file are removed, so a repetition of the last one cannot be
            // recognized.
            if last.is_some_and(|last| last == new.sha256) {
                let file = reload(&mut writer, id).await?;
                let response = render(&file).response;
                writer.commit(&response).await?;
                return Ok(PartOutcome::Duplicate(file));
            }
        }
        if row.state != FileState::Uploading.as_str() {
            return Err(Error::NotUploading);
        }
        if new.position != row.received {
            return Err(Error::WrongOffset { offset: row.received });
        }
        if new.size > row.size - row.received {
            return Err(Error::TooLong { size: row.size });
        }
        if row.part_count >= i32::try_from(MAX_PARTS).unwrap_or(i32::MAX) {
            return Err(Error::TooManyParts { limit: MAX_PARTS });
        }
        sqlx::query!(
            "INSERT INTO file_parts (organization_id, file_id, position, size, part, sha256) VALUES ($1, $2, $3, $4, $5, $6)",
            writer.organization(),
            id.uuid(),
            new.position,
            new.size,
            new.part,
            new.sha256.as_slice(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        sqlx::query!(
            "UPDATE files SET received = received + $2, part_count = part_count + 1, revision = revision + 1,
                 updated_at = $3::timestamptz,
                 state = CASE WHEN received + $2 = size THEN 'checking' ELSE state END,
                 claimed_until = CASE WHEN received + $2 = size THEN $3::timestamptz END
             WHERE id = $1",
            id.uuid(),
            new.size,
            writer.now() as _,
        )
        .execute(&mut *writer.transaction)
        .await?;
        let file = reload(&mut writer, id).await?;
        let response = render(&file).response;
        writer.commit(&response).await?;
        Ok(PartOutcome::Accepted(file))
    }

    /// Claims a file whose parts are complete, for assembly. None: another gateway has claimed it,
    /// or it is done.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_claim(
        &self,
        id: FileId,
        now: Timestamp,
    ) -> Result<Option<ClaimedFile>, Error> {
        let mut transaction = self.pool.begin().await?;
        let claimed = sqlx::query!(
            "UPDATE files SET claimed_until = $3 WHERE id = $1 AND state = 'checking' AND claimed_until <= $2",
            id.uuid(),
            time::sql(now) as _,
            time::sql(now + CLAIM_TIMEOUT) as _,
        );
        if claimed.execute(&mut *transaction).await?.rows_affected() == 0 {
            return Ok(None);
        }
        let row = select!(["WHERE f.id = $1"], id.uuid()).fetch_one(&mut *transaction).await?;
        let parts = sqlx::query_as!(
            Part,
            "SELECT part FROM file_parts WHERE file_id = $1 ORDER BY position",
            id.uuid()
        );
        let parts = parts.fetch_all(&mut *transaction).await?;
        transaction.commit().await?;
        Ok(Some(ClaimedFile { file: row.try_into()?, parts }))
    }

    /// Files whose parts are complete and that no gateway has claimed.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_list_unclaimed(&self, now: Timestamp) -> Result<Vec<FileId>, Error> {
        let ids = sqlx::query_scalar!(
            "SELECT id FROM files WHERE state = 'checking' AND expires_at IS NOT NULL AND claimed_until <= $1
             ORDER BY claimed_until LIMIT 10",
            time::sql(now) as _,
        );
        Ok(ids.fetch_all(&self.pool).await?.into_iter().map(FileId::from_uuid).collect())
    }

    /// Releases the claim of a file that could not be processed, so that it is retried.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_release(&self, id: FileId, now: Timestamp) -> Result<(), Error> {
        let done = sqlx::query!(
            "UPDATE files SET claimed_until = $2 WHERE id = $1 AND state = 'checking'",
            id.uuid(),
            time::sql(now) as _
        );
        done.execute(&self.pool).await?;
        Ok(())
    }

    /// Refuses a file with a reason, and records the removal of its parts.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_refuse(&self, id: FileId, reason: &str, now: Timestamp) -> Result<(), Error> {
        let mut transaction = self.pool.begin().await?;
        let refused = select!(["WHERE f.id = $1 AND f.state = 'checking' FOR UPDATE"], id.uuid());
        let Some(row) = refused.fetch_optional(&mut *transaction).await? else { return Ok(()) };
        let file = File::try_from(row)?;
        sqlx::query!(
            "UPDATE files SET state = 'refused', reason = $2, received = 0, claimed_until = NULL, revision = revision + 1,
                 updated_at = $3
             WHERE id = $1",
            id.uuid(),
            reason,
            time::sql(now) as _,
        )
        .execute(&mut *transaction)
        .await?;
        sqlx::query!("DELETE FROM file_parts WHERE file_id = $1", id.uuid())
            .execute(&mut *transaction)
            .await?;
        removal::record_removal(&mut transaction, &file, now).await?;
        Ok(transaction.commit().await?)
    }

    /// Deletes the rows of uploads that were not finished in time, and of old refusals. Returns
    /// their number.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_expire(&self, now: Timestamp) -> Result<usize, Error> {
        let mut transaction = self.pool.begin().await?;
        let rows = select!(
            ["WHERE f.expires_at <= $1 AND (f.claimed_until IS NULL OR f.claimed_until <= $1)
              ORDER BY f.expires_at LIMIT 100 FOR UPDATE SKIP LOCKED"],
            time::sql(now) as _,
        );
        let files = rows.fetch_all(&mut *transaction).await?;
        for row in &files {
            let (owner, file) =
                (OrganizationId::from_uuid(row.organization_id), FileId::from_uuid(row.id));
            removal::record_upload_removal(&mut transaction, owner, file, now).await?;
        }
        let ids: Vec<Uuid> = files.iter().map(|row| row.id).collect();
        sqlx::query!("DELETE FROM files WHERE id = ANY ($1)", &ids)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(ids.len())
    }
}

//! Uploaded files. The store holds their rows, and what must be removed from the folder that holds
//! their content (`migrations/0034_files.sql`, docs/adr/0038-files.md). It does not access the
//! folder.
//!
//! # Concurrent gateways
//!
//! A part is accepted under the lock of the file's row. A content is stored and removed under its
//! own lock ([`Store::file_content`]), so that no content is removed that another file has just
//! started to use.

mod removal;
mod upload;

use jiff::{SignedDuration, Timestamp};
use uuid::Uuid;

use construct_domain::{FileId, OrganizationId};

use crate::{
    Cursor, Error, Key, Page, Store, Write, WriteOutcome, WriteOutput,
    write::{Writer, begin},
};

pub(crate) use removal::record_organization_removal;
pub use removal::{FileContent, Removal, RemovalTarget};
pub use upload::{ClaimedFile, NewPart, Part, PartOutcome};

const ENTITY: &str = "file";

/// Maximum number of unfinished uploads of an organization.
pub const MAX_UNFINISHED_UPLOADS: u32 = 100;
/// How long an upload may take, and how long a refusal can be read.
pub const UPLOAD_TIMEOUT: SignedDuration = SignedDuration::from_hours(24);
/// Maximum number of parts of a file.
pub const MAX_PARTS: u32 = 10_000;

/// The state of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileState {
    /// Parts are missing.
    Uploading,
    /// All parts are there and are checked.
    Checking,
    /// The file can be read.
    Ready,
    /// The file was refused.
    Refused,
}

impl FileState {
    /// The stored form.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Uploading => "uploading",
            Self::Checking => "checking",
            Self::Ready => "ready",
            Self::Refused => "refused",
        }
    }

    fn from_column(text: &str) -> Result<Self, Error> {
        [Self::Uploading, Self::Checking, Self::Ready, Self::Refused]
            .into_iter()
            .find(|state| state.as_str() == text)
            .ok_or_else(|| Error::internal(format!("unknown state of a file `{text}`")))
    }
}

/// A file.
#[derive(Debug, Clone, PartialEq)]
pub struct File {
    /// Its id.
    pub id: FileId,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// Not unique.
    pub name: String,
    /// Empty until it is detected.
    pub media_type: String,
    /// Its size in bytes, as declared.
    pub size: i64,
    /// The expected SHA-256.
    pub expected_sha256: Option<[u8; 32]>,
    /// Its state.
    pub state: FileState,
    /// Received bytes.
    pub received: i64,
    /// SHA-256 of the content, once the file is ready.
    pub sha256: Option<[u8; 32]>,
    /// Why it was refused.
    pub reason: String,
    /// The creator.
    pub created_by: String,
    /// When it is deleted automatically.
    pub expires_at: Option<Timestamp>,
    /// Incremented by every change.
    pub revision: i64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

impl File {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.id.uuid(), &self.name, self.created_at, self.updated_at)
    }
}

/// A file to create.
#[derive(Debug, Clone, PartialEq)]
pub struct NewFile {
    /// Its id.
    pub id: FileId,
    /// Its name.
    pub name: String,
    /// Empty: detected from the content.
    pub media_type: String,
    /// Its size in bytes.
    pub size: i64,
    /// The expected SHA-256.
    pub expected_sha256: Option<[u8; 32]>,
    /// The creator.
    pub created_by: String,
    /// Whether the folder holds the content. Then an existing ready file with the content makes
    /// this one ready too.
    pub is_stored: bool,
}

/// Filter for a list of files. All conditions must hold.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FileFilter {
    /// With exactly this name.
    pub name: Option<String>,
    /// With exactly this media type.
    pub media_type: Option<String>,
    /// With this kind of media type: `image/`.
    pub media_kind: Option<String>,
    /// With this SHA-256, received or expected.
    pub sha256: Option<[u8; 32]>,
    /// In this state.
    pub state: Option<FileState>,
}

struct Row {
    id: Uuid,
    organization_id: Uuid,
    name: String,
    media_type: String,
    size: i64,
    expected: Option<Vec<u8>>,
    state: String,
    received: i64,
    sha256: Option<Vec<u8>>,
    reason: String,
    created_by: String,
    expires_at: Option<jiff_sqlx::Timestamp>,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

fn digest(bytes: Option<Vec<u8>>) -> Result<Option<[u8; 32]>, Error> {
    let digest = bytes.map(<[u8; 32]>::try_from).transpose();
    digest.map_err(|_| Error::internal("a hash of a file has the wrong length"))
}

impl TryFrom<Row> for File {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        Ok(Self {
            id: FileId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            name: row.name,
            media_type: row.media_type,
            size: row.size,
            expected_sha256: digest(row.expected)?,
            state: FileState::from_column(&row.state)?,
            received: row.received,
            sha256: digest(row.sha256)?,
            reason: row.reason,
            created_by: row.created_by,
            expires_at: crate::time::from_sql_option(row.expires_at),
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
            r#"SELECT f.id, f.organization_id, f.name, f.media_type, f.size, f.expected, f.state, f.received, f.sha256, f.reason,
                      f.created_by, f.expires_at AS "expires_at: jiff_sqlx::Timestamp", f.revision, f.created_at, f.updated_at
               FROM files f "# $(+ $tail)+,
            $($argument),*
        )
    };
}
use select;

macro_rules! list {
    ($store:expr, $organization:expr, $filter:expr, $page:expr, $key:literal, $comparison:literal, $direction:literal) => {{
        let (value, id) = $page.after_time()?;
        select!(
            ["WHERE f.organization_id = $1
                AND ($5::text IS NULL OR f.name = $5) AND ($6::text IS NULL OR f.media_type = $6)
                AND ($7::text IS NULL OR starts_with(f.media_type, $7))
                AND ($8::bytea IS NULL OR f.sha256 = $8 OR f.expected = $8) AND ($9::text IS NULL OR f.state = $9)
                AND (" $key ", f.id) " $comparison " ($2, $3)
              ORDER BY " $key $direction ", f.id" $direction " LIMIT $4"],
            $organization.uuid(),
            value as _,
            id,
            $page.limit(),
            $filter.name.as_deref() as _,
            $filter.media_type.as_deref() as _,
            $filter.media_kind.as_deref() as _,
            $filter.sha256.as_ref().map(|hash| hash.as_slice()) as _,
            $filter.state.map(FileState::as_str) as _,
        )
        .fetch_all(&$store.pool)
        .await?
    }};
}

impl Store {
    /// A file.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_get(&self, organization: OrganizationId, id: FileId) -> Result<File, Error> {
        let row =
            select!(["WHERE f.organization_id = $1 AND f.id = $2"], organization.uuid(), id.uuid());
        row.fetch_optional(&self.pool).await?.ok_or(Error::NotFound { what: ENTITY })?.try_into()
    }

    /// A page of files. They cannot be ordered by name.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_list(
        &self,
        organization: OrganizationId,
        filter: &FileFilter,
        page: &Page,
    ) -> Result<Vec<File>, Error> {
        let rows = match (page.order.key, page.order.descending) {
            (Key::CreatedAt | Key::Name, false) => {
                list!(self, organization, filter, page, "f.created_at", ">", "")
            }
            (Key::CreatedAt | Key::Name, true) => {
                list!(self, organization, filter, page, "f.created_at", "<", " DESC")
            }
            (Key::UpdatedAt, false) => {
                list!(self, organization, filter, page, "f.updated_at", ">", "")
            }
            (Key::UpdatedAt, true) => {
                list!(self, organization, filter, page, "f.updated_at", "<", " DESC")
            }
        };
        rows.into_iter().map(File::try_from).collect()
    }

    /// Whether the organization has a ready file with this content.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_content_exists(
        &self,
        organization: OrganizationId,
        sha256: &[u8; 32],
        size: i64,
    ) -> Result<bool, Error> {
        Ok(sqlx::query_scalar!(
            r#"SELECT EXISTS (SELECT 1 FROM files WHERE organization_id = $1 AND sha256 = $2 AND size = $3) AS "known!""#,
            organization.uuid(),
            sha256.as_slice(),
            size,
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// Creates a file: to be uploaded, or ready if its content exists.
    ///
    /// # Errors
    /// [`Error::TooManyUploads`]; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_create(
        &self,
        write: &Write,
        new: NewFile,
        render: impl FnOnce(&File) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<File>, Error> {
        let mut writer = begin!(self, write);
        let organization = writer.organization();
        let known_media_type = match &new.expected_sha256 {
            Some(expected) if new.is_stored => {
                removal::lock(&mut writer.transaction, organization, expected).await?;
                sqlx::query_scalar!(
                    "SELECT media_type FROM files WHERE organization_id = $1 AND sha256 = $2 AND size = $3
                     ORDER BY media_type <> $4, created_at LIMIT 1",
                    organization,
                    expected.as_slice(),
                    new.size,
                    new.media_type,
                )
                .fetch_optional(&mut *writer.transaction)
                .await?
            }
            _ => None,
        };
        // The detected media type is known. A different declared type needs a check of its own.
        let known_media_type = known_media_type.filter(|known_media_type| {
            new.media_type.is_empty() || *known_media_type == new.media_type
        });
        let is_ready = known_media_type.is_some();
        if !is_ready {
            self.check_upload_limit(&mut writer).await?;
        }
        let state = match () {
            () if is_ready => FileState::Ready,
            () if new.size == 0 => FileState::Checking,
            () => FileState::Uploading,
        };
        let media_type = known_media_type.unwrap_or(new.media_type);
        let expires_at = (!is_ready).then(|| crate::time::sql(write.now + UPLOAD_TIMEOUT));
        sqlx::query!(
            "INSERT INTO files
                 (id, organization_id, name, media_type, size, expected, state, received, sha256, created_by, expires_at, claimed_until,
                  created_at, updated_at, api_key_id)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $13, $14)",
            new.id.uuid(),
            organization,
            new.name,
            media_type,
            new.size,
            new.expected_sha256.as_ref().map(<[u8; 32]>::as_slice),
            state.as_str(),
            if is_ready { new.size } else { 0 },
            new.expected_sha256.as_ref().filter(|_| is_ready).map(<[u8; 32]>::as_slice),
            new.created_by,
            expires_at as _,
            (state == FileState::Checking).then(|| writer.now()) as _,
            writer.now() as _,
            writer.key(),
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        let entity = reload(&mut writer, new.id).await?;
        writer.finish_unchanged(entity, render).await
    }

    /// Refuses an upload beyond the limit. Concurrent uploads wait here for each other, so that
    /// each counts the other.
    async fn check_upload_limit(&self, writer: &mut Writer<'_>) -> Result<(), Error> {
        sqlx::query_scalar!(
            r#"SELECT pg_advisory_xact_lock(hashtextextended($1::text, 34))::text AS "done""#,
            writer.organization().to_string(),
        )
        .fetch_one(&mut *writer.transaction)
        .await?;
        let unfinished = sqlx::query_scalar!(
            r#"SELECT count(*) AS "count!" FROM files WHERE organization_id = $1 AND state IN ('uploading', 'checking')"#,
            writer.organization(),
        )
        .fetch_one(&mut *writer.transaction)
        .await?;
        if unfinished >= i64::from(MAX_UNFINISHED_UPLOADS) {
            return Err(Error::TooManyUploads { limit: MAX_UNFINISHED_UPLOADS });
        }
        Ok(())
    }

    /// Renames a file.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Conflict`] when the revision is not the expected one.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_update(
        &self,
        write: &Write,
        id: FileId,
        expected_revision: Option<i64>,
        name: Option<&str>,
        render: impl FnOnce(&File) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<File>, Error> {
        let mut writer = begin!(self, write);
        let done = sqlx::query!(
            "UPDATE files SET name = coalesce($5, name), revision = revision + 1, updated_at = $4
             WHERE organization_id = $1 AND id = $2 AND ($3::bigint IS NULL OR revision = $3)",
            writer.organization(),
            id.uuid(),
            expected_revision,
            writer.now() as _,
            name,
        )
        .execute(&mut *writer.transaction)
        .await?;
        let entity = reload(&mut writer, id).await?;
        if done.rows_affected() == 0 {
            return Err(Error::Conflict);
        }
        writer.finish_unchanged(entity, render).await
    }

    /// Deletes a file, and records what must be removed from the folder. The entity in the result
    /// is the file before the deletion.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn file_delete(
        &self,
        write: &Write,
        id: FileId,
        render: impl FnOnce(&File) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<File>, Error> {
        let mut writer = begin!(self, write);
        let row = select!(
            ["WHERE f.organization_id = $1 AND f.id = $2 FOR UPDATE"],
            writer.organization(),
            id.uuid()
        );
        let row = row
            .fetch_optional(&mut *writer.transaction)
            .await?
            .ok_or(Error::NotFound { what: ENTITY })?;
        let entity = File::try_from(row)?;
        removal::record_removal(&mut writer.transaction, &entity, write.now).await?;
        sqlx::query!("DELETE FROM files WHERE id = $1", id.uuid())
            .execute(&mut *writer.transaction)
            .await?;
        writer.finish_unchanged(entity, render).await
    }
}

/// The current row.
async fn reload(writer: &mut Writer<'_>, id: FileId) -> Result<File, Error> {
    let row =
        select!(["WHERE f.organization_id = $1 AND f.id = $2"], writer.organization(), id.uuid());
    row.fetch_optional(&mut *writer.transaction)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
}

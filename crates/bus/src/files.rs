//! Uploaded files, in the same folder as blobs: `files/<organization>/<two digits>/<rest of the
//! SHA-256>`, and uploads in progress in `files/<organization>/uploads/<file>/`.
//!
//! Blobs can be recreated, but these files are the only copy. They are flushed to disk before their
//! upload is confirmed, are kept until they are deleted, and belong in a backup. The same content
//! of two organizations is stored twice: deduplication would reveal what another organization has.
//!
//! Database rows say which files exist; nothing is discovered from the folder.

mod sha256;

use std::{
    fs::File,
    io::ErrorKind,
    ops::Range,
    os::unix::fs::{DirBuilderExt as _, FileExt as _},
    path::PathBuf,
    sync::Arc,
};

use bytes::{Bytes, BytesMut};
use construct_domain::{FileId, OrganizationId};
use futures::{Stream, TryStreamExt as _, stream};
use object_store::{
    GetResultPayload, ObjectStoreExt as _, PutPayload, local::LocalFileSystem, path::Path,
};
use sha2::Digest as _;
use uuid::Uuid;

pub use sha256::Sha256;

/// Bytes of a content held in memory at a time, of parts being assembled and of reads.
pub const CHUNK_BYTES: usize = 512 * 1024;

/// The folder beside `sha256/`, which has the blobs.
const ROOT: &str = "files";
/// Not two digits of a hash, so that it never holds content.
const UPLOADS: &str = "uploads";

/// Why content could not be stored or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It does not exist (any more).
    #[error("the content is missing")]
    Missing,
    /// The content does not match its name.
    #[error("the content is corrupt")]
    Corrupt,
    /// It is larger than the caller accepts.
    #[error("the content has {0} bytes, which is too much")]
    TooLarge(u64),
    /// The folder could not be created or removed.
    #[error("the folder of files failed")]
    Folder(#[source] std::io::Error),
    /// The storage failed.
    #[error("the storage of files failed")]
    Storage(#[source] object_store::Error),
    /// The runtime is shutting down.
    #[error("hashing was interrupted")]
    Interrupted(#[source] tokio::task::JoinError),
}

impl Error {
    /// Whether another attempt may help without a change by anybody.
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::Folder(_) | Self::Storage(_) | Self::Interrupted(_))
    }

    fn storage(error: object_store::Error) -> Self {
        match error {
            object_store::Error::NotFound { .. } => Self::Missing,
            other => Self::Storage(other),
        }
    }
}

/// The name of an uploaded part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartName(Uuid);

impl PartName {
    /// From its stored form.
    pub const fn from_uuid(uuid: Uuid) -> Self {
        Self(uuid)
    }

    /// Its stored form.
    pub const fn uuid(self) -> Uuid {
        self.0
    }
}

/// The hash and size of a content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredContent {
    /// The hash.
    pub sha256: Sha256,
    /// The size in bytes.
    pub size: u64,
}

/// Assembled parts, for inspection before they become a file.
#[derive(Debug)]
pub struct Assembled {
    stored: StoredContent,
    location: Path,
    content: PathBuf,
}

impl Assembled {
    /// The hash and size.
    pub const fn stored(&self) -> StoredContent {
        self.stored
    }

    /// Opens it for reading, on a blocking thread.
    ///
    /// # Errors
    /// When it no longer exists.
    pub fn open(&self) -> std::io::Result<File> {
        File::open(&self.content)
    }
}

/// The files of all organizations, in a folder that services share.
#[derive(Debug, Clone)]
pub struct Store {
    folder: PathBuf,
    files: Arc<LocalFileSystem>,
}

impl Store {
    /// Opens the files in the folder of blobs. A missing folder is created, accessible by its owner
    /// only.
    ///
    /// # Errors
    /// When the folder cannot be created or is not a folder.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, Error> {
        let folder = dir.into();
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)
            .map_err(Error::Folder)?;
        let files =
            LocalFileSystem::new_with_prefix(&folder).map_err(Error::Storage)?.with_fsync(true);
        Ok(Self { folder, files: Arc::new(files) })
    }

    /// Stores a part of an upload. It is on disk when this returns.
    ///
    /// # Errors
    /// When the storage fails.
    pub async fn put_part(
        &self,
        organization: OrganizationId,
        file: FileId,
        part: Bytes,
    ) -> Result<PartName, Error> {
        let name = PartName(Uuid::now_v7());
        self.files
            .put(&part_path(organization, file, name), part.into())
            .await
            .map_err(Error::Storage)?;
        Ok(name)
    }

    /// Removes a part that lost a race. Idempotent.
    ///
    /// # Errors
    /// When the storage fails.
    pub async fn remove_part(
        &self,
        organization: OrganizationId,
        file: FileId,
        part: PartName,
    ) -> Result<(), Error> {
        self.delete(&part_path(organization, file, part)).await
    }

    /// Concatenates parts in their order. Holds [`CHUNK_BYTES`] bytes of them at a time.
    ///
    /// # Errors
    /// When a part is missing or the storage fails.
    pub async fn assemble(
        &self,
        organization: OrganizationId,
        file: FileId,
        parts: &[PartName],
    ) -> Result<Assembled, Error> {
        let location = upload(organization, file).join(format!("whole-{}", Uuid::now_v7()));
        let mut whole = self.files.put_multipart(&location).await.map_err(Error::storage)?;
        let mut hasher = sha2::Sha256::new();
        let mut size = 0;
        for part in parts {
            let path = part_path(organization, file, *part);
            let mut chunks = Box::pin(self.chunks(path, None).await?);
            while let Some(chunk) = chunks.try_next().await? {
                size += chunk.len() as u64;
                let (chunk, hashed) = hash(chunk, hasher).await?;
                hasher = hashed;
                whole.put_part(PutPayload::from_bytes(chunk)).await.map_err(Error::Storage)?;
            }
        }
        whole.complete().await.map_err(Error::Storage)?;
        let content = self.files.path_to_filesystem(&location).map_err(Error::Storage)?;
        Ok(Assembled {
            stored: StoredContent { sha256: Sha256::from_hasher(hasher), size },
            location,
            content,
        })
    }

    /// Turns an assembled content into a file, atomically. An existing file of the same name has
    /// the same content or is damaged, and is replaced either way.
    ///
    /// # Errors
    /// When the storage fails.
    pub async fn place(
        &self,
        organization: OrganizationId,
        whole: Assembled,
    ) -> Result<StoredContent, Error> {
        let to = content_path(organization, &whole.stored.sha256);
        self.files.rename(&whole.location, &to).await.map_err(Error::storage)?;
        Ok(whole.stored)
    }

    /// The size of a content in bytes, if it exists.
    ///
    /// # Errors
    /// When the storage fails.
    pub async fn head(
        &self,
        organization: OrganizationId,
        sha256: &Sha256,
    ) -> Result<Option<u64>, Error> {
        match self.files.head(&content_path(organization, sha256)).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(Error::Storage(error)),
        }
    }

    /// Reads a content in chunks of at most [`CHUNK_BYTES`] bytes: all of it, or the existing part
    /// of `range`. A reader continues even if the file is deleted meanwhile. The hash is not
    /// verified.
    ///
    /// # Errors
    /// When the content is missing or the storage fails, at once or in the middle.
    pub async fn read(
        &self,
        organization: OrganizationId,
        sha256: &Sha256,
        range: Option<Range<u64>>,
    ) -> Result<impl Stream<Item = Result<Bytes, Error>> + Send + use<>, Error> {
        self.chunks(content_path(organization, sha256), range).await
    }

    /// A whole content of at most `at_most` bytes, verified against its hash.
    ///
    /// # Errors
    /// When it is missing, larger or corrupt, or the storage fails.
    pub async fn get(
        &self,
        organization: OrganizationId,
        sha256: &Sha256,
        at_most: u64,
    ) -> Result<Bytes, Error> {
        let found =
            self.files.get(&content_path(organization, sha256)).await.map_err(Error::storage)?;
        if found.meta.size > at_most {
            return Err(Error::TooLarge(found.meta.size));
        }
        let content = found.bytes().await.map_err(Error::storage)?;
        let (content, hasher) = hash(content, sha2::Sha256::new()).await?;
        if Sha256::from_hasher(hasher) == *sha256 { Ok(content) } else { Err(Error::Corrupt) }
    }

    /// Removes a content. Idempotent.
    ///
    /// # Errors
    /// When the storage fails.
    pub async fn remove(&self, organization: OrganizationId, sha256: &Sha256) -> Result<(), Error> {
        self.delete(&content_path(organization, sha256)).await
    }

    /// Removes an unfinished upload. Idempotent.
    ///
    /// # Errors
    /// When the storage fails.
    pub async fn remove_upload(
        &self,
        organization: OrganizationId,
        file: FileId,
    ) -> Result<(), Error> {
        self.remove_folder(&upload(organization, file)).await
    }

    /// Removes all files of an organization. Idempotent.
    ///
    /// # Errors
    /// When the storage fails.
    pub async fn remove_organization(&self, organization: OrganizationId) -> Result<(), Error> {
        self.remove_folder(&organization_path(organization)).await
    }

    async fn delete(&self, path: &Path) -> Result<(), Error> {
        match self.files.delete(path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(Error::Storage(error)),
        }
    }

    /// Also removes what the storage does not list: partial writes of a killed process.
    async fn remove_folder(&self, path: &Path) -> Result<(), Error> {
        let folder = self.folder.join(path.as_ref());
        // A part may be stored at the same time.
        for _ in 0..3 {
            match tokio::fs::remove_dir_all(&folder).await {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {}
                Err(error) => return Err(Error::Folder(error)),
            }
        }
        Err(Error::Folder(ErrorKind::DirectoryNotEmpty.into()))
    }

    /// An object in chunks, or the existing part of `range`.
    async fn chunks(
        &self,
        path: Path,
        range: Option<Range<u64>>,
    ) -> Result<impl Stream<Item = Result<Bytes, Error>> + Send + use<>, Error> {
        let found = self.files.get(&path).await.map_err(Error::storage)?;
        let size = found.meta.size;
        let range = range.map_or(0..size, |range| range.start.min(size)..range.end.min(size));
        let GetResultPayload::File(file, _) = found.payload else {
            return Err(Error::Storage(object_store::Error::NotImplemented {
                operation: "reading from a file".to_owned(),
                implementer: "this storage".to_owned(),
            }));
        };
        let file = Arc::new(file);
        Ok(stream::try_unfold(range, move |left| {
            let file = Arc::clone(&file);
            async move {
                if left.is_empty() {
                    return Ok(None);
                }
                let end = left.end.min(left.start + CHUNK_BYTES as u64);
                let chunk = read_at(file, left.start..end).await?;
                Ok(Some((chunk, end..left.end)))
            }
        }))
    }
}

fn organization_path(organization: OrganizationId) -> Path {
    Path::from_iter([ROOT, &organization.to_string()])
}

fn upload(organization: OrganizationId, file: FileId) -> Path {
    organization_path(organization).join(UPLOADS).join(file.to_string())
}

fn part_path(organization: OrganizationId, file: FileId, part: PartName) -> Path {
    upload(organization, file).join(part.0.to_string())
}

/// The first two digits of the hash are the folder, so that no folder grows without bound.
fn content_path(organization: OrganizationId, sha256: &Sha256) -> Path {
    let digits = sha256.to_string();
    let (folder, rest) = digits.split_at(2);
    organization_path(organization).join(folder).join(rest)
}

async fn read_at(file: Arc<File>, range: Range<u64>) -> Result<Bytes, Error> {
    let read = tokio::task::spawn_blocking(move || {
        let length = usize::try_from(range.end - range.start).unwrap_or(CHUNK_BYTES);
        let mut chunk = BytesMut::zeroed(length);
        file.read_exact_at(&mut chunk, range.start).map(|()| chunk.freeze())
    });
    read.await.map_err(Error::Interrupted)?.map_err(|error| match error.kind() {
        // The file became shorter, which no code of ours does.
        ErrorKind::UnexpectedEof => Error::Corrupt,
        _ => Error::Folder(error),
    })
}

/// Hashes on a blocking thread: it would block an executor's thread.
async fn hash(chunk: Bytes, mut hasher: sha2::Sha256) -> Result<(Bytes, sha2::Sha256), Error> {
    tokio::task::spawn_blocking(move || {
        hasher.update(&chunk);
        (chunk, hasher)
    })
    .await
    .map_err(Error::Interrupted)
}

#[cfg(test)]
mod tests;

//! What people upload, in the folder of blobs beside them: `files/<organization>/<two digits>/<the
//! rest of the SHA-256>`, and what is on its way in `files/<organization>/uploads/<file>/`.
//!
//! Other than blobs, which can be made again, these are the only copy: they are flushed to disk
//! before anybody is told that they are there, are kept until somebody deletes them, and belong
//! into a backup. The same content of two organizations is kept twice, because whoever could see
//! that it is there already would know what another has.
//!
//! Rows say what there is; nothing here is found by looking into the folder.

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

/// Most bytes that are held of a content at a time: of a part that is put together with others, and
/// of what is read.
pub const CHUNK_BYTES: usize = 512 * 1024;

/// Beside `sha256/`, where blobs are.
const ROOT: &str = "files";
/// No two digits of a hash, so that no content lies there.
const UPLOADS: &str = "uploads";

/// Why a content could not be stored or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not there, or not any more.
    #[error("the content is missing")]
    Missing,
    /// What lies there is not what its name says.
    #[error("the content is corrupt")]
    Corrupt,
    /// It is larger than the asker wants to hold.
    #[error("the content has {0} bytes, which is too much")]
    TooLarge(u64),
    /// The folder could not be made or removed.
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
    /// Whether another try may help, without anybody changing anything.
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

/// A part of a file that is being uploaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartName(Uuid);

impl PartName {
    /// As it was stored.
    pub const fn from_uuid(uuid: Uuid) -> Self {
        Self(uuid)
    }

    /// What is stored of it.
    pub const fn uuid(self) -> Uuid {
        self.0
    }
}

/// What parts gave together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredContent {
    /// The hash of it.
    pub sha256: Sha256,
    /// Bytes.
    pub size: u64,
}

/// Parts that were put together and are no file yet: first somebody looks through them.
#[derive(Debug)]
pub struct Assembled {
    stored: StoredContent,
    location: Path,
    content: PathBuf,
}

impl Assembled {
    /// What it is.
    pub const fn stored(&self) -> StoredContent {
        self.stored
    }

    /// Opens it for reading, on a thread that may block.
    ///
    /// # Errors
    /// When it is gone.
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
    /// Opens them in the folder of blobs, making that for its owner alone when it is not there.
    ///
    /// # Errors
    /// When it cannot be made or is not a folder.
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

    /// Stores a part of what is uploaded. It is on disk when this returns.
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

    /// Removes a part that somebody else was faster with. Idempotent.
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

    /// Puts parts together, in their order. Holds [`CHUNK_BYTES`] bytes of them at a time.
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
            let mut pieces = Box::pin(self.pieces(path, None).await?);
            while let Some(piece) = pieces.try_next().await? {
                size += piece.len() as u64;
                let (piece, hashed) = hash(piece, hasher).await?;
                hasher = hashed;
                whole.put_part(PutPayload::from_bytes(piece)).await.map_err(Error::Storage)?;
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

    /// Makes what was assembled a file, all at once. What is there with the same name is the same,
    /// or damaged, and replaced either way.
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

    /// How many bytes a content has, if it is there.
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

    /// Reads a content in pieces of at most [`CHUNK_BYTES`] bytes: all of it, or the range of it, as far
    /// as it has that. Who reads goes on though the file is deleted meanwhile. The hash is not
    /// compared.
    ///
    /// # Errors
    /// When it is missing or the storage fails, at once or in the middle.
    pub async fn read(
        &self,
        organization: OrganizationId,
        sha256: &Sha256,
        range: Option<Range<u64>>,
    ) -> Result<impl Stream<Item = Result<Bytes, Error>> + Send + use<>, Error> {
        self.pieces(content_path(organization, sha256), range).await
    }

    /// A whole content of no more than so many bytes, which is what its name says.
    ///
    /// # Errors
    /// When it is missing, larger, not what its name says, or the storage fails.
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

    /// Removes what there is of an upload. Idempotent.
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

    /// Also what the storage does not list: what a process had begun to write when it was killed.
    async fn remove_folder(&self, path: &Path) -> Result<(), Error> {
        let folder = self.folder.join(path.as_ref());
        // Somebody may put a part there meanwhile.
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

    /// An object in pieces, or the range of it that there is.
    async fn pieces(
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
                let piece = read_at(file, left.start..end).await?;
                Ok(Some((piece, end..left.end)))
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

/// Two digits of the hash are the folder, so that no folder grows without bound.
fn content_path(organization: OrganizationId, sha256: &Sha256) -> Path {
    let digits = sha256.to_string();
    let (folder, rest) = digits.split_at(2);
    organization_path(organization).join(folder).join(rest)
}

async fn read_at(file: Arc<File>, range: Range<u64>) -> Result<Bytes, Error> {
    let read = tokio::task::spawn_blocking(move || {
        let length = usize::try_from(range.end - range.start).unwrap_or(CHUNK_BYTES);
        let mut piece = BytesMut::zeroed(length);
        file.read_exact_at(&mut piece, range.start).map(|()| piece.freeze())
    });
    read.await.map_err(Error::Interrupted)?.map_err(|error| match error.kind() {
        // It has become shorter, which nothing of ours does.
        ErrorKind::UnexpectedEof => Error::Corrupt,
        _ => Error::Folder(error),
    })
}

/// Hashing would hold up everything else on an executor's thread.
async fn hash(piece: Bytes, mut hasher: sha2::Sha256) -> Result<(Bytes, sha2::Sha256), Error> {
    tokio::task::spawn_blocking(move || {
        hasher.update(&piece);
        (piece, hasher)
    })
    .await
    .map_err(Error::Interrupted)
}

#[cfg(test)]
mod tests;

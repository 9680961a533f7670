//! Large payloads, stored under their SHA-256. Written once, verified on every read.
//!
//! Files are not flushed to disk one by one: JetStream does not do so with the messages that refer to them either, and
//! PostgreSQL is the truth for both.

use std::{fmt, os::unix::fs::DirBuilderExt as _, path::PathBuf, str::FromStr, sync::Arc};

use bytes::Bytes;
use object_store::{ObjectStore, ObjectStoreExt as _, PutMode, local::LocalFileSystem, path::Path};
use sha2::{Digest as _, Sha256};

/// Why a blob could not be stored or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such blob.
    #[error("blob {0} is missing")]
    Missing(Reference),
    /// What lies there is not what its name says.
    #[error("blob {0} is corrupt")]
    Corrupt(Reference),
    /// This process was given no folder for blobs.
    #[error("no blob folder is configured")]
    Unconfigured,
    /// The folder could not be made.
    #[error("the folder could not be made")]
    Folder(#[source] std::io::Error),
    /// The storage failed.
    #[error("blob storage failed")]
    Storage(#[source] object_store::Error),
    /// The runtime is shutting down.
    #[error("hashing was interrupted")]
    Interrupted(#[source] tokio::task::JoinError),
}

impl Error {
    /// Whether another try may help, without anybody changing anything.
    pub const fn is_retryable(&self) -> bool {
        // A missing blob may still be on its way when the folder is a network share.
        matches!(self, Self::Missing(_) | Self::Storage(_) | Self::Interrupted(_))
    }
}

/// Names a blob: `sha256:<64 hexadecimal digits>;size=<bytes>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    hash: String,
    size: u64,
}

impl Reference {
    /// Size of the blob in bytes.
    pub const fn size(&self) -> u64 {
        self.size
    }

    fn of(content: &[u8]) -> Self {
        let hash = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
        Self { hash, size: content.len() as u64 }
    }

    /// Two digits of the hash are the folder, so that no folder grows without bound.
    fn path(&self) -> Path {
        Path::from_iter(["sha256", &self.hash[..2], &self.hash[2..]])
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{};size={}", self.hash, self.size)
    }
}

impl FromStr for Reference {
    type Err = crate::subject::Invalid;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || crate::subject::Invalid::new("not a reference to a blob", text);
        let (hash, size) = text.strip_prefix("sha256:").and_then(|rest| rest.split_once(";size=")).ok_or_else(wrong)?;
        let canonical = hash.len() == 64 && hash.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        match size.parse() {
            Ok(size) if canonical => Ok(Self { hash: hash.to_owned(), size }),
            _ => Err(wrong()),
        }
    }
}

/// A folder of blobs, shared by all services.
#[derive(Debug, Clone)]
pub struct Store {
    files: Arc<LocalFileSystem>,
}

impl Store {
    /// Opens the folder, making it for its owner alone when it is not there.
    ///
    /// # Errors
    /// When it cannot be made or is not a folder.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, Error> {
        let dir = dir.into();
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(Error::Folder)?;
        let files = LocalFileSystem::new_with_prefix(&dir).map_err(Error::Storage)?;
        Ok(Self { files: Arc::new(files) })
    }

    /// Stores content, unless it is there already, and names it.
    ///
    /// # Errors
    /// When the storage fails.
    pub async fn put(&self, content: Bytes) -> Result<Reference, Error> {
        let (content, reference) = blocking(content, Reference::of).await?;
        let created = self.files.put_opts(&reference.path(), content.clone().into(), PutMode::Create.into()).await;
        match created {
            Ok(_) => Ok(reference),
            Err(object_store::Error::AlreadyExists { .. }) => match self.get(&reference).await {
                Ok(_) => Ok(reference),
                // Heals a damaged blob: whoever was told this name before gets the right content from now on.
                Err(Error::Corrupt(_) | Error::Missing(_)) => {
                    self.files.put(&reference.path(), content.into()).await.map_err(Error::Storage)?;
                    Ok(reference)
                }
                Err(error) => Err(error),
            },
            Err(error) => Err(Error::Storage(error)),
        }
    }

    /// Reads a blob and verifies it.
    ///
    /// # Errors
    /// When it is missing, is not what its name says, or the storage fails.
    pub async fn get(&self, reference: &Reference) -> Result<Bytes, Error> {
        let read = match self.files.get(&reference.path()).await {
            // A file of another size is not read at all: it may be of any length.
            Ok(read) if read.meta.size != reference.size => return Err(Error::Corrupt(reference.clone())),
            Ok(read) => read.bytes().await.map_err(Error::Storage)?,
            Err(object_store::Error::NotFound { .. }) => return Err(Error::Missing(reference.clone())),
            Err(error) => return Err(Error::Storage(error)),
        };
        let (content, found) = blocking(read, Reference::of).await?;
        if found == *reference { Ok(content) } else { Err(Error::Corrupt(reference.clone())) }
    }
}

/// Hashing tens of megabytes would hold up everything else on an executor's thread.
async fn blocking<T: Send + 'static>(
    content: Bytes,
    work: impl FnOnce(&[u8]) -> T + Send + 'static,
) -> Result<(Bytes, T), Error> {
    tokio::task::spawn_blocking(move || {
        let made = work(&content);
        (content, made)
    })
    .await
    .map_err(Error::Interrupted)
}

//! Large payloads, stored under their SHA-256. Written once, verified on every read.
//!
//! Blobs are not flushed to disk one by one. JetStream does not flush the messages that refer to
//! them either, and PostgreSQL is the source of truth for both.

use std::{
    fmt,
    os::unix::fs::DirBuilderExt as _,
    path::PathBuf,
    str::FromStr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use futures::TryStreamExt as _;
use jiff::Timestamp;
use object_store::{ObjectStore, ObjectStoreExt as _, PutMode, local::LocalFileSystem, path::Path};
use sha2::{Digest as _, Sha256};

/// How long a blob is kept after its last `put`: a day longer than any message that refers to it.
/// (A command is kept until a worker takes it, but after this time its result is no longer needed.)
pub const RETENTION: Duration = Duration::from_secs(31 * 24 * 3600);

/// A blob younger than this keeps its age when it is put again, so that frequent puts write it
/// once.
const REFRESH_AGE: Duration = Duration::from_secs(24 * 3600);

/// The folder of blobs within the storage.
const ROOT: &str = "sha256";

/// What a cleanup removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemovedBlobs {
    /// Number of blobs.
    pub blobs: u64,
    /// Their size in bytes.
    pub bytes: u64,
}

/// Why a blob could not be stored or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such blob.
    #[error("blob {0} is missing")]
    Missing(Reference),
    /// The content does not match its name.
    #[error("blob {0} is corrupt")]
    Corrupt(Reference),
    /// The process has no folder for blobs.
    #[error("no blob folder is configured")]
    Unconfigured,
    /// The folder could not be created.
    #[error("the folder could not be created")]
    Folder(#[source] std::io::Error),
    /// The storage failed.
    #[error("blob storage failed")]
    Storage(#[source] object_store::Error),
    /// The runtime is shutting down.
    #[error("hashing was interrupted")]
    Interrupted(#[source] tokio::task::JoinError),
}

impl Error {
    /// Whether another attempt may help without a change by anybody.
    pub const fn is_retryable(&self) -> bool {
        // A network share may show a missing blob later.
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

    fn from_content(content: &[u8]) -> Self {
        let hash = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
        Self { hash, size: content.len() as u64 }
    }

    /// The first two digits of the hash are the folder, so that no folder grows without bound.
    fn path(&self) -> Path {
        Path::from_iter([ROOT, &self.hash[..2], &self.hash[2..]])
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
        let invalid = || crate::subject::Invalid::new("not a reference to a blob", text);
        let (hash, size) = text
            .strip_prefix("sha256:")
            .and_then(|rest| rest.split_once(";size="))
            .ok_or_else(invalid)?;
        let canonical =
            hash.len() == 64 && hash.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        match size.parse() {
            Ok(size) if canonical => Ok(Self { hash: hash.to_owned(), size }),
            _ => Err(invalid()),
        }
    }
}

/// A folder of blobs, shared by all services.
#[derive(Debug, Clone)]
pub struct Store {
    files: Arc<LocalFileSystem>,
}

impl Store {
    /// Opens the folder. A missing folder is created, accessible by its owner only.
    ///
    /// # Errors
    /// When the folder cannot be created or is not a folder.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, Error> {
        let dir = dir.into();
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(Error::Folder)?;
        let files = LocalFileSystem::new_with_prefix(&dir).map_err(Error::Storage)?;
        Ok(Self { files: Arc::new(files) })
    }

    /// Stores content if it is not stored yet, and returns its reference.
    ///
    /// # Errors
    /// When the storage fails.
    pub async fn put(&self, content: Bytes) -> Result<Reference, Error> {
        let (content, reference) = blocking(content, Reference::from_content).await?;
        let created = self
            .files
            .put_opts(&reference.path(), content.clone().into(), PutMode::Create.into())
            .await;
        match created {
            Ok(_) => Ok(reference),
            Err(object_store::Error::AlreadyExists { .. }) => {
                let young = self.age(&reference).await?.is_some_and(|age| age < REFRESH_AGE);
                match self.get(&reference).await {
                    Ok(_) if young => return Ok(reference),
                    // An old blob gets a new modification time, and a damaged one is replaced:
                    // earlier references resolve to the right content again.
                    Ok(_) | Err(Error::Corrupt(_) | Error::Missing(_)) => {}
                    Err(error) => return Err(error),
                }
                self.files.put(&reference.path(), content.into()).await.map_err(Error::Storage)?;
                Ok(reference)
            }
            Err(error) => Err(Error::Storage(error)),
        }
    }

    /// Reads a blob and verifies it.
    ///
    /// # Errors
    /// When the blob is missing or corrupt, or the storage fails.
    pub async fn get(&self, reference: &Reference) -> Result<Bytes, Error> {
        let read = match self.files.get(&reference.path()).await {
            // Do not read a file of another size: it may be of any length.
            Ok(read) if read.meta.size != reference.size => {
                return Err(Error::Corrupt(reference.clone()));
            }
            Ok(read) => read.bytes().await.map_err(Error::Storage)?,
            Err(object_store::Error::NotFound { .. }) => {
                return Err(Error::Missing(reference.clone()));
            }
            Err(error) => return Err(Error::Storage(error)),
        };
        let (content, found) = blocking(read, Reference::from_content).await?;
        if found == *reference { Ok(content) } else { Err(Error::Corrupt(reference.clone())) }
    }

    /// Removes a blob before its retention ends. Idempotent. Only for content that no other process
    /// can have put, such as encrypted content: another holder of the same reference misses it
    /// afterwards.
    ///
    /// # Errors
    /// When the storage fails.
    pub async fn remove(&self, reference: &Reference) -> Result<(), Error> {
        match self.files.delete(&reference.path()).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(Error::Storage(error)),
        }
    }
}

impl Store {
    /// Removes blobs whose last `put` was before the given time. Safe to run in any number of
    /// processes.
    ///
    /// # Errors
    /// When the storage fails. What was removed before that stays removed.
    pub async fn remove_older_than(&self, before: Timestamp) -> Result<RemovedBlobs, Error> {
        let mut removed = RemovedBlobs::default();
        // Uploaded files lie beside the blobs and are kept until they are deleted.
        let mut all = self.files.list(Some(&Path::from(ROOT)));
        while let Some(blob) = all.try_next().await.map_err(Error::Storage)? {
            // An unknown time does not count as old.
            if Timestamp::try_from(SystemTime::from(blob.last_modified))
                .map_or(true, |put| put >= before)
            {
                continue;
            }
            match self.files.delete(&blob.location).await {
                Ok(()) => {
                    removed =
                        RemovedBlobs { blobs: removed.blobs + 1, bytes: removed.bytes + blob.size }
                }
                // Another process removed it first.
                Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(Error::Storage(error)),
            }
        }
        Ok(removed)
    }

    async fn age(&self, reference: &Reference) -> Result<Option<Duration>, Error> {
        match self.files.head(&reference.path()).await {
            Ok(blob) => Ok(Some(age(blob.last_modified))),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(Error::Storage(error)),
        }
    }
}

/// How long ago `time` was; zero when it is in the future or unknown.
fn age(time: impl Into<SystemTime>) -> Duration {
    let time = Timestamp::try_from(time.into()).unwrap_or_else(|_| Timestamp::now());
    Duration::try_from(Timestamp::now().duration_since(time)).unwrap_or_default()
}

/// Hashes on a blocking thread: tens of megabytes would block an executor's thread.
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

#[cfg(test)]
mod tests {
    use super::*;

    const MONTHS: Duration = Duration::from_secs(90 * 24 * 3600);

    fn make_old(folder: &std::path::Path, reference: &Reference) {
        let file = std::fs::File::options()
            .append(true)
            .open(folder.join(reference.path().as_ref()))
            .expect("stored");
        file.set_modified((Timestamp::now() - MONTHS).into()).expect("a time");
    }

    #[tokio::test]
    async fn blob_not_put_again_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(folder.path()).expect("opened");
        let [old, put_again, young] = [&b"old"[..], b"put again", b"young"].map(Bytes::from_static);
        let mut references = Vec::new();
        for content in [&old, &put_again, &young] {
            references.push(store.put(content.clone()).await.expect("put"));
        }
        make_old(folder.path(), &references[0]);
        make_old(folder.path(), &references[1]);
        store.put(put_again.clone()).await.expect("put again");
        let removed = store.remove_older_than(Timestamp::now() - RETENTION).await.expect("cleaned");
        assert_eq!(removed, RemovedBlobs { blobs: 1, bytes: 3 });
        assert!(matches!(store.get(&references[0]).await, Err(Error::Missing(_))));
        assert_eq!(store.get(&references[1]).await.expect("kept"), put_again);
        assert_eq!(store.get(&references[2]).await.expect("kept"), young);
        assert_eq!(
            store.remove_older_than(Timestamp::now() - RETENTION).await.expect("cleaned"),
            RemovedBlobs::default()
        );
        for _ in 0..2 {
            store.remove(&references[2]).await.expect("removed, or gone already");
            assert!(matches!(store.get(&references[2]).await, Err(Error::Missing(_))));
        }
    }
}

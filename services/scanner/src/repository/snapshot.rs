//! A snapshot: the files of one commit, unpacked once, below a directory that nothing can leave.
//!
//! On disk it is a folder named after the commit's id, with the files in `tree` and the notes
//! beside it. It appears atomically: it is filled under another name and renamed. An existing
//! commit is not fetched again.
//!
//! A commit's id is the source's claim. So snapshots of different sources need different folders.
//! Otherwise whoever controls a host could claim the id of another source's commit, and would get
//! its files. The scanner has a folder for each scan.

mod download;
mod limits;
mod names;
mod tarball;
mod unpack;
mod zipfile;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, SystemTime},
};

pub use self::limits::{Limit, Limits};
use super::{
    Changes, Manifest, SourceError,
    blocking::blocking,
    manifest::printable,
    source::{Archive, ArchiveKind, Commit, Source},
    tree::Tree,
};

/// The files, within the snapshot's folder.
const TREE_DIR: &str = "tree";
/// The manifest, beside the files.
const MANIFEST_FILE: &str = "manifest.json";
/// The prefix of unfinished folders, which the sweep removes.
pub(crate) const STAGING_PREFIX: &str = ".taking-";
/// Bytes of a file; snapshots contain no larger ones.
pub(super) const MAX_FILE_BYTES: u64 = 1 << 30;
/// Bytes of a file that are checked for zero bytes.
const PROBE_BYTES: usize = 8192;
/// Bytes of a note; larger ones were not written by the scanner.
const MAX_NOTE_BYTES: u64 = 256 * 1024 * 1024;

/// Why a snapshot cannot be taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The source failed.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The archive exceeds a limit.
    #[error("the archive is refused: {limit} (at {entry:?})")]
    Exceeded {
        /// The limit.
        limit: Limit,
        /// The printable entry; empty for the archive as a whole.
        entry: String,
    },
    /// An entry that no honest archive has: it would be written elsewhere, or over another one.
    #[error("the archive is refused: {reason} (at {entry:?})")]
    Hostile {
        /// What is wrong.
        reason: &'static str,
        /// The printable entry.
        entry: String,
    },
    /// The archive is damaged or truncated.
    #[error("the archive cannot be read: {reason}")]
    Malformed {
        /// What is wrong.
        reason: String,
    },
    /// The caller no longer waits.
    #[error("the caller no longer waits for the snapshot")]
    Abandoned,
    /// The disk fails or is full.
    #[error("the snapshot cannot be written or read")]
    Io(#[from] io::Error),
}

impl SnapshotError {
    pub(crate) fn exceeded(limit: Limit, entry: &[u8]) -> Self {
        Self::Exceeded { limit, entry: printable(entry) }
    }

    pub(crate) fn hostile(reason: &'static str, entry: &[u8]) -> Self {
        Self::Hostile { reason, entry: printable(entry) }
    }

    pub(crate) fn malformed(reason: impl ToString) -> Self {
        Self::Malformed { reason: reason.to_string().chars().take(300).collect() }
    }

    /// Whether the same may succeed later without any change.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        match self {
            Self::Source(error) => error.is_transient(),
            // A stalled download may succeed the next time.
            Self::Abandoned | Self::Io(_) | Self::Exceeded { limit: Limit::Download, .. } => true,
            Self::Exceeded { .. } | Self::Hostile { .. } | Self::Malformed { .. } => false,
        }
    }
}

/// The files of one commit, with their secrets. Code that reads them for others takes a
/// [`super::MaskedSnapshot`]. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Snapshot {
    path: PathBuf,
    manifest: Arc<Manifest>,
    /// All access uses this descriptor, so that it concerns this snapshot even when another one has
    /// its name meanwhile.
    folder: Arc<Tree>,
}

impl Snapshot {
    /// Takes a snapshot of a commit into a folder below `into`, or returns the existing one.
    /// Everything below `into` must come from one source, requested by one organization: snapshots
    /// are identified by the commit's id alone.
    ///
    /// When the future is dropped, unfinished work is removed.
    ///
    /// # Errors
    /// When the source fails, or the archive is damaged, hostile, or exceeds a limit.
    pub async fn take(
        source: &dyn Source,
        commit: &Commit,
        limits: &Limits,
        into: &Path,
    ) -> Result<Self, SnapshotError> {
        if let Some(existing) = Self::open(commit, into).await? {
            return Ok(existing);
        }
        let archive = source.archive(commit).await?;
        Self::unpack(commit, archive, limits, into).await
    }

    /// Takes a snapshot from an existing archive.
    ///
    /// # Errors
    /// As [`Snapshot::take`].
    pub async fn unpack(
        commit: &Commit,
        archive: Archive,
        limits: &Limits,
        into: &Path,
    ) -> Result<Self, SnapshotError> {
        tokio::fs::create_dir_all(into).await?;
        let staging = tempfile::Builder::new().prefix(STAGING_PREFIX).tempdir_in(into)?;
        let packed = staging.path().join("archive");
        let kind = archive.kind;
        let size = download::download(archive, &packed, limits).await?;
        // When this future is dropped, the other thread stops at its next check and removes what it
        // wrote.
        let (commit, limits, into) = (commit.clone(), limits.clone(), into.to_owned());
        let work = move |wanted: &AtomicBool| {
            unpack_staged(staging, kind, size, &commit, &limits, &into, wanted)
        };
        blocking(work).await.map_err(SnapshotError::Io)?
    }

    /// Opens the snapshot of a commit below `into`, if it exists.
    ///
    /// # Errors
    /// When the disk fails. An incomplete snapshot counts as none.
    pub async fn open(commit: &Commit, into: &Path) -> Result<Option<Self>, SnapshotError> {
        let folder = into.join(commit.id());
        let work = move || Self::open_folder(folder);
        tokio::task::spawn_blocking(work)
            .await
            .map_err(|failed| SnapshotError::Io(io::Error::other(failed)))?
    }

    fn open_folder(path: PathBuf) -> Result<Option<Self>, SnapshotError> {
        let read = || -> io::Result<(Vec<u8>, Tree)> {
            let folder = Tree::open(&path)?;
            folder.open_subtree(TREE_DIR)?;
            Ok((folder.read(MANIFEST_FILE, MAX_NOTE_BYTES)?, folder))
        };
        match read() {
            // An unreadable manifest was being written when the machine stopped.
            Ok((manifest, folder)) => Ok(serde_json::from_slice(&manifest).ok().map(|manifest| {
                Self { path, manifest: Arc::new(manifest), folder: Arc::new(folder) }
            })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes a snapshot with its notes. Idempotent.
    ///
    /// # Errors
    /// When the disk fails.
    pub async fn remove(commit: &Commit, into: &Path) -> Result<(), SnapshotError> {
        // Rename it first, so that nobody opens half of it.
        let removed = into.join(format!("{STAGING_PREFIX}gone-{}", uuid::Uuid::now_v7().simple()));
        match tokio::fs::rename(into.join(commit.id()), &removed).await {
            Ok(()) => Ok(tokio::fs::remove_dir_all(removed).await?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes unfinished snapshots of crashed processes below `into` that are older than `age` at
    /// `now`.
    ///
    /// # Errors
    /// When the disk fails.
    pub async fn sweep(into: &Path, age: Duration, now: SystemTime) -> Result<(), SnapshotError> {
        let mut entries = match tokio::fs::read_dir(into).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        while let Some(entry) = entries.next_entry().await? {
            if !entry.file_name().to_string_lossy().starts_with(STAGING_PREFIX) {
                continue;
            }
            let result = async {
                let modified = entry.metadata().await?.modified()?;
                if now.duration_since(modified).is_ok_and(|old| old >= age) {
                    tokio::fs::remove_dir_all(entry.path()).await?;
                }
                Ok(())
            };
            match result.await {
                // Its owner finished or removed it meanwhile.
                Err(error) if io::Error::kind(&error) == io::ErrorKind::NotFound => {}
                result => result?,
            }
        }
        Ok(())
    }

    /// Moves the snapshot below another folder of the same file system, replacing an incomplete
    /// one. An existing snapshot stays.
    pub(super) fn move_to(&self, into: &Path) -> Result<(), SnapshotError> {
        std::fs::create_dir_all(into)?;
        let folder = into.join(&self.manifest.commit);
        match std::fs::rename(&self.path, &folder) {
            Ok(()) => Ok(()),
            // Another process did it meanwhile.
            Err(_) if Self::open_folder(folder.clone())?.is_some() => Ok(()),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists
                ) =>
            {
                let broken = format!("{STAGING_PREFIX}broken-{}", uuid::Uuid::now_v7().simple());
                std::fs::rename(&folder, self.path.with_file_name(broken))?;
                Ok(std::fs::rename(&self.path, &folder)?)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The folder of the files.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.path.join(TREE_DIR)
    }

    /// The content.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Reads at most `limit` bytes from the beginning of a file.
    ///
    /// # Errors
    /// When there is no such file.
    pub fn read(&self, path: &str, limit: u64) -> io::Result<Vec<u8>> {
        self.folder.open_subtree(TREE_DIR)?.read(path, limit)
    }

    /// Returns the lines from `first` to `last`, counted from 1 and inclusive; fewer when the file
    /// is shorter. None when the file or its line `first` does not exist, or it is not text.
    #[must_use]
    pub(super) fn lines(&self, path: &str, first: u32, last: u32) -> Option<Vec<String>> {
        line_range(&self.text(path)?, first, last)
    }

    /// Returns a file as text. None when it does not exist, or is not text.
    #[must_use]
    pub(super) fn text(&self, path: &str) -> Option<String> {
        self.manifest.files.get(path)?;
        let content = self.read(path, MAX_FILE_BYTES).ok().filter(|content| !is_binary(content))?;
        // Like the survey, which cites lines of files in other encodings, too.
        Some(String::from_utf8_lossy(&content).into_owned())
    }

    /// Lists what changed from this commit to a newer one.
    #[must_use]
    pub fn compare(&self, newer: &Self) -> Changes {
        self.manifest.compare(&newer.manifest)
    }

    /// Replaces a file.
    pub(crate) fn replace(&self, path: &str, content: &[u8]) -> io::Result<()> {
        self.folder.replace(&format!("{TREE_DIR}/{path}"), content)
    }

    /// Locks the snapshot for changes.
    pub(crate) fn lock(&self) -> io::Result<impl Drop + use<>> {
        let lock = self.folder.lock()?;
        self.folder.remove_temporary_files()?;
        Ok(lock)
    }

    /// Reads a note beside the files; none when it does not exist or cannot be read.
    pub(crate) fn note<T: serde::de::DeserializeOwned>(&self, name: &str) -> io::Result<Option<T>> {
        match self.folder.read(name, MAX_NOTE_BYTES) {
            Ok(content) => Ok(serde_json::from_slice(&content).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes a note beside the files, atomically.
    pub(crate) fn set_note(&self, name: &str, content: &impl serde::Serialize) -> io::Result<()> {
        self.folder.replace(name, &serde_json::to_vec(content).map_err(io::Error::other)?)
    }
}

/// Unpacks the downloaded archive in the staging folder, and renames the result into place.
fn unpack_staged(
    staging: tempfile::TempDir,
    kind: ArchiveKind,
    size: u64,
    commit: &Commit,
    limits: &Limits,
    into: &Path,
    wanted: &AtomicBool,
) -> Result<Snapshot, SnapshotError> {
    let packed = std::fs::File::open(staging.path().join("archive"))?;
    let mut manifest =
        unpack::unpack(packed, kind, size, limits, &staging.path().join("unpacked"), wanted)?;
    commit.id().clone_into(&mut manifest.commit);
    let ready = staging.path().join("ready");
    let written = Tree::create(&ready)?;
    std::fs::rename(staging.path().join("unpacked"), ready.join(TREE_DIR))?;
    written.replace(MANIFEST_FILE, &serde_json::to_vec(&manifest).map_err(io::Error::other)?)?;
    // A folder with its final name is complete, even when the machine stops.
    written.sync()?;
    let folder = into.join(commit.id());
    match std::fs::rename(&ready, &folder) {
        Ok(()) => {}
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists
            ) =>
        {
            // Another process took the same commit meanwhile, or the folder is unusable.
            if let Some(existing) = Snapshot::open_folder(folder.clone())? {
                return Ok(existing);
            }
            std::fs::rename(&folder, staging.path().join("broken"))?;
            std::fs::rename(&ready, &folder)?;
        }
        Err(error) => return Err(error.into()),
    }
    Snapshot::open_folder(folder)?
        .ok_or_else(|| SnapshotError::malformed("the existing snapshot is incomplete"))
}

/// Returns the lines of a text from `first` to `last`, counted from 1 and inclusive; none when the
/// first does not exist.
pub(crate) fn line_range(text: &str, first: u32, last: u32) -> Option<Vec<String>> {
    let skip = usize::try_from(first.checked_sub(1)?).ok()?;
    let count = usize::try_from(last.checked_sub(first)?).ok()?.checked_add(1)?;
    let lines: Vec<String> = text.lines().skip(skip).take(count).map(str::to_owned).collect();
    (!lines.is_empty()).then_some(lines)
}

/// Whether a file is binary: it has a zero byte near its beginning.
pub(super) fn is_binary(content: &[u8]) -> bool {
    content[..content.len().min(PROBE_BYTES)].contains(&0)
}

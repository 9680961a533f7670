//! A snapshot: the files of one commit, laid down once, where nothing can leave.
//!
//! On disk it is a folder named by the commit's id, with the files in `tree` and what is known of
//! them beside it. It appears whole or not at all: it is filled under another name and renamed. A
//! commit that is there already is not fetched again.
//!
//! That a commit has this id is said by who gave it. So snapshots of different sources lie below
//! different folders: whoever could name a host that gives the id of another one's commit would be
//! given the other one's files. The scanner has a folder for each scan.

mod download;
mod limits;
mod names;
mod tarball;
mod unpack;
mod zipped;

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
const TREE: &str = "tree";
/// What is known of them.
const MANIFEST: &str = "manifest.json";
/// What folders are called that are being filled, and what the sweep removes.
pub(crate) const STAGING: &str = ".taking-";
/// Larger files are not in a snapshot.
pub(super) const MAX_FILE: u64 = 1 << 30;
/// How much of a file is looked at to see whether it is text.
const PROBE: usize = 8192;
/// Larger files beside the tree were not written by us.
const MAX_NOTE: u64 = 256 * 1024 * 1024;

/// Why a snapshot cannot be taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The source failed.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The archive goes beyond a limit.
    #[error("the archive is refused: {limit} (at {at:?})")]
    Exceeded {
        /// Which.
        limit: Limit,
        /// The entry, made printable; empty for the archive as a whole.
        at: String,
    },
    /// An entry that no honest archive has: it would lie elsewhere, or over another one.
    #[error("the archive is refused: {why} (at {at:?})")]
    Hostile {
        /// What is wrong.
        why: &'static str,
        /// The entry, made printable.
        at: String,
    },
    /// The archive is damaged or cut off.
    #[error("the archive cannot be read: {why}")]
    Malformed {
        /// What is wrong.
        why: String,
    },
    /// Whoever wanted it has gone away.
    #[error("nobody waits for the snapshot any more")]
    Abandoned,
    /// The disk fails or is full.
    #[error("the snapshot cannot be written or read")]
    Io(#[from] io::Error),
}

impl SnapshotError {
    pub(crate) fn exceeded(limit: Limit, at: &[u8]) -> Self {
        Self::Exceeded { limit, at: printable(at) }
    }

    pub(crate) fn hostile(why: &'static str, at: &[u8]) -> Self {
        Self::Hostile { why, at: printable(at) }
    }

    pub(crate) fn malformed(why: impl ToString) -> Self {
        Self::Malformed { why: why.to_string().chars().take(300).collect() }
    }

    /// Whether the same may succeed later, with nobody changing anything.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        match self {
            Self::Source(error) => error.is_transient(),
            // A download that stands still may go on better the next time.
            Self::Abandoned | Self::Io(_) | Self::Exceeded { limit: Limit::Download, .. } => true,
            Self::Exceeded { .. } | Self::Hostile { .. } | Self::Malformed { .. } => false,
        }
    }
}

/// The files of one commit, with the secrets in them: what reads them for others takes a
/// [`super::Clean`]. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Snapshot {
    path: PathBuf,
    manifest: Arc<Manifest>,
    /// Everything goes through this descriptor, so that it is about this snapshot even when another
    /// one has its name meanwhile.
    folder: Arc<Tree>,
}

impl Snapshot {
    /// Takes a snapshot of a commit into a folder below `into`, or gives the one that is there. All
    /// below `into` has to be of one source, asked by one organization: what is there is known by
    /// its commit's id alone.
    ///
    /// When the future is dropped, what was begun is removed.
    ///
    /// # Errors
    /// When the source fails, or the archive is damaged, hostile, or beyond the limits.
    pub async fn take(
        source: &dyn Source,
        commit: &Commit,
        limits: &Limits,
        into: &Path,
    ) -> Result<Self, SnapshotError> {
        if let Some(there) = Self::open(commit, into).await? {
            return Ok(there);
        }
        let archive = source.archive(commit).await?;
        Self::unpack(commit, archive, limits, into).await
    }

    /// The same with an archive that is there already.
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
        let staging = tempfile::Builder::new().prefix(STAGING).tempdir_in(into)?;
        let packed = staging.path().join("archive");
        let kind = archive.kind;
        let size = download::download(archive, &packed, limits).await?;
        // When this future is dropped, the other thread stops at its next look and removes what it
        // has written.
        let (commit, limits, into) = (commit.clone(), limits.clone(), into.to_owned());
        let work = move |wanted: &AtomicBool| {
            lay_down(staging, kind, size, &commit, &limits, &into, wanted)
        };
        blocking(work).await.map_err(SnapshotError::Io)?
    }

    /// The snapshot of a commit below `into`, if it is there.
    ///
    /// # Errors
    /// When the disk fails. A folder that is there and is no whole snapshot counts as none.
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
            folder.below(TREE)?;
            Ok((folder.read(MANIFEST, MAX_NOTE)?, folder))
        };
        match read() {
            // One that cannot be understood was being written when the machine stopped.
            Ok((manifest, folder)) => Ok(serde_json::from_slice(&manifest).ok().map(|manifest| {
                Self { path, manifest: Arc::new(manifest), folder: Arc::new(folder) }
            })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes it, and all that is known of it. Idempotent.
    ///
    /// # Errors
    /// When the disk fails.
    pub async fn remove(commit: &Commit, into: &Path) -> Result<(), SnapshotError> {
        // Out of sight first, so that nobody opens half of it.
        let gone = into.join(format!("{STAGING}gone-{}", uuid::Uuid::now_v7().simple()));
        match tokio::fs::rename(into.join(commit.id()), &gone).await {
            Ok(()) => Ok(tokio::fs::remove_dir_all(gone).await?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes what processes that died have left below `into` half-way, and is older than `age` at
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
            if !entry.file_name().to_string_lossy().starts_with(STAGING) {
                continue;
            }
            let swept = async {
                let modified = entry.metadata().await?.modified()?;
                if now.duration_since(modified).is_ok_and(|old| old >= age) {
                    tokio::fs::remove_dir_all(entry.path()).await?;
                }
                Ok(())
            };
            match swept.await {
                // Whoever was filling it has finished or removed it meanwhile.
                Err(error) if io::Error::kind(&error) == io::ErrorKind::NotFound => {}
                swept => swept?,
            }
        }
        Ok(())
    }

    /// Gives it a place below another folder of the same file system, instead of what is no whole
    /// snapshot. One that is there stays.
    pub(super) fn move_below(&self, into: &Path) -> Result<(), SnapshotError> {
        std::fs::create_dir_all(into)?;
        let folder = into.join(&self.manifest.commit);
        match std::fs::rename(&self.path, &folder) {
            Ok(()) => Ok(()),
            // Somebody else has done it meanwhile.
            Err(_) if Self::open_folder(folder.clone())?.is_some() => Ok(()),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists
                ) =>
            {
                let broken = format!("{STAGING}broken-{}", uuid::Uuid::now_v7().simple());
                std::fs::rename(&folder, self.path.with_file_name(broken))?;
                Ok(std::fs::rename(&self.path, &folder)?)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Where the files are.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.path.join(TREE)
    }

    /// What it holds.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The beginning of a file: at most `limit` bytes.
    ///
    /// # Errors
    /// When there is no such file.
    pub fn read(&self, path: &str, limit: u64) -> io::Result<Vec<u8>> {
        self.folder.below(TREE)?.read(path, limit)
    }

    /// The lines from `first` to `last`, both counted from 1; fewer when the file is shorter. None
    /// when the file or its line `first` does not exist, or it is no text.
    #[must_use]
    pub(super) fn lines(&self, path: &str, first: u32, last: u32) -> Option<Vec<String>> {
        lines_of(&self.text(path)?, first, last)
    }

    /// A file as text. None when there is no such file, or it is no text.
    #[must_use]
    pub(super) fn text(&self, path: &str) -> Option<String> {
        self.manifest.files.get(path)?;
        let content = self.read(path, MAX_FILE).ok().filter(|content| !is_binary(content))?;
        // As the survey reads it, which cites lines of files in other encodings, too.
        Some(String::from_utf8_lossy(&content).into_owned())
    }

    /// What changed from this commit to a newer one.
    #[must_use]
    pub fn compare(&self, newer: &Self) -> Changes {
        self.manifest.compare(&newer.manifest)
    }

    /// Replaces a file.
    pub(crate) fn replace(&self, path: &str, content: &[u8]) -> io::Result<()> {
        self.folder.replace(&format!("{TREE}/{path}"), content)
    }

    /// Has the snapshot to itself among those that change it.
    pub(crate) fn lock(&self) -> io::Result<impl Drop + use<>> {
        let lock = self.folder.lock()?;
        self.folder.clear()?;
        Ok(lock)
    }

    /// What was noted beside the files under a name; none, when it cannot be understood, either.
    pub(crate) fn note<T: serde::de::DeserializeOwned>(&self, name: &str) -> io::Result<Option<T>> {
        match self.folder.read(name, MAX_NOTE) {
            Ok(content) => Ok(serde_json::from_slice(&content).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Notes something beside the files, as a whole.
    pub(crate) fn set_note(&self, name: &str, content: &impl serde::Serialize) -> io::Result<()> {
        self.folder.replace(name, &serde_json::to_vec(content).map_err(io::Error::other)?)
    }
}

/// Unpacks what was downloaded into the staging folder, and renames that into place.
fn lay_down(
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
    std::fs::rename(staging.path().join("unpacked"), ready.join(TREE))?;
    written.replace(MANIFEST, &serde_json::to_vec(&manifest).map_err(io::Error::other)?)?;
    // A folder that has its name is whole, even when the machine stops.
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
            // Somebody else has taken the same commit meanwhile, which is the same; or it is none
            // that can be used.
            if let Some(there) = Snapshot::open_folder(folder.clone())? {
                return Ok(there);
            }
            std::fs::rename(&folder, staging.path().join("broken"))?;
            std::fs::rename(&ready, &folder)?;
        }
        Err(error) => return Err(error.into()),
    }
    Snapshot::open_folder(folder)?
        .ok_or_else(|| SnapshotError::malformed("a snapshot is there that is not whole"))
}

/// The lines of a text from `first` to `last`, both counted from 1; none when it does not have the
/// first.
pub(crate) fn lines_of(text: &str, first: u32, last: u32) -> Option<Vec<String>> {
    let skip = usize::try_from(first.checked_sub(1)?).ok()?;
    let count = usize::try_from(last.checked_sub(first)?).ok()?.checked_add(1)?;
    let lines: Vec<String> = text.lines().skip(skip).take(count).map(str::to_owned).collect();
    (!lines.is_empty()).then_some(lines)
}

/// Whether a file is no text: it has a zero byte near its beginning.
pub(super) fn is_binary(content: &[u8]) -> bool {
    content[..content.len().min(PROBE)].contains(&0)
}

//! A workspace: the directory tree that tools may read and change.
//!
//! The kernel enforces the confinement. Every path is resolved with `openat2` relative to a
//! directory descriptor that is open since the workspace was opened, with `RESOLVE_BENEATH` and
//! `RESOLVE_NO_MAGICLINKS`. A `..`, an absolute path or a symbolic link that would leave the tree
//! fails inside the system call, so there is no time between check and use in which a directory
//! could be swapped for a link.
//!
//! Deliberately absent: any check of paths by string comparison. Absolute paths that start with the
//! root are made relative for convenience, and then resolved like every other path.

mod hidden;
mod remove;
mod target;
mod walk;
mod write;

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

pub(crate) use hidden::{HiddenPath, Identity, find_enclosing, hidden_below};
pub(crate) use remove::RemoveError;
pub(crate) use walk::{EntryKind, MAX_DEPTH, MAX_VISITED, Walk, WalkEnd, is_bounded_glob};
pub(crate) use write::{Expected, Version, WriteOutcome};

/// How often a resolution is attempted that the kernel aborts because of a concurrent rename
/// (`EAGAIN`).
const RESOLVE_ATTEMPTS: usize = 64;

/// Longest path accepted, in bytes (Linux `PATH_MAX`).
const MAX_PATH_BYTES: usize = 4096;

/// A directory tree that tools are confined to. Cloning shares the descriptor.
#[derive(Clone, Debug)]
pub struct Workspace {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// The root as the caller named it.
    named: PathBuf,
    /// The root with symbolic links resolved, when it was opened.
    root: PathBuf,
    directory: OwnedFd,
    /// Files and directories in it that are hidden.
    hidden: Vec<Arc<HiddenPath>>,
    /// Serializes read-modify-write of files, so that concurrent edits of a script are never lost.
    writing: std::sync::Mutex<()>,
}

/// The reason why a workspace cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The root does not exist, is not a directory, or may not be entered.
    #[error("failed to open the workspace {} as a directory", .path.display())]
    Root {
        /// The root as given.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// `/` as a workspace would confine nothing.
    #[error("the root of the file system cannot be a workspace")]
    FileSystemRoot,
    /// The kernel (before 5.6) or a seccomp filter does not offer `openat2`; there is no other
    /// confinement without races.
    #[error(
        "this kernel does not offer openat2 with RESOLVE_BENEATH (Linux 5.6 or newer, not filtered by seccomp), \
         without which a workspace cannot be confined"
    )]
    Unsupported {
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
}

/// The reason why a path inside a workspace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PathError {
    /// The path leads out of the workspace, directly or through a symbolic link.
    #[error("{path:?} leads outside of the workspace")]
    Outside {
        /// The path as given.
        path: String,
    },
    /// The path does not exist.
    #[error("{path:?} does not exist")]
    NotFound {
        /// The path as given.
        path: String,
    },
    /// A directory where a file is needed.
    #[error("{path:?} is a directory")]
    IsDirectory {
        /// The path as given.
        path: String,
    },
    /// A file where a directory is needed.
    #[error("{path:?} is not a directory, or a parent of it is not")]
    NotDirectory {
        /// The path as given.
        path: String,
    },
    /// A device, socket or pipe.
    #[error("{path:?} is not a regular file but a {kind}")]
    Special {
        /// The path as given.
        path: String,
        /// What it is.
        kind: &'static str,
    },
    /// A file or directory of the service itself.
    #[error("{path:?} is reserved for the service itself")]
    Reserved {
        /// The path as given.
        path: String,
    },
    /// The operating system denied access.
    #[error("access to {path:?} is denied")]
    Denied {
        /// The path as given.
        path: String,
    },
    /// The text is not a valid path.
    #[error("{path:?} is not a valid path: {why}")]
    Invalid {
        /// The path as given, shortened.
        path: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The file was changed between being read and being replaced.
    #[error("{path:?} was changed concurrently")]
    Changed {
        /// The path as given.
        path: String,
    },
    /// Any other error.
    #[error("input or output failed for {path:?}")]
    Io {
        /// The path as given.
        path: String,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
}

/// A path relative to the root of a workspace. It is not yet resolved: only opening it shows
/// whether it stays inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelativePath(PathBuf);

impl RelativePath {
    /// The root itself.
    pub(crate) fn root() -> Self {
        Self(PathBuf::from("."))
    }

    /// The path for system calls; `.` for the root.
    pub(crate) fn as_path(&self) -> &Path {
        &self.0
    }

    /// Whether this is the root itself.
    pub(crate) fn is_root(&self) -> bool {
        self.0 == Path::new(".")
    }

    /// The path for people and models; invalid UTF-8 is replaced.
    pub(crate) fn display(&self) -> String {
        self.0.to_string_lossy().into_owned()
    }

    /// The parent directory and the last component; `None` for the root and for `..`.
    pub(crate) fn split(&self) -> Option<(Self, &OsStr)> {
        match self.0.components().next_back() {
            Some(Component::Normal(name)) => {
                let parent = self.0.parent().unwrap_or(Path::new(""));
                let parent = if parent.as_os_str().is_empty() {
                    Self::root()
                } else {
                    Self(parent.to_owned())
                };
                Some((parent, name))
            }
            _ => None,
        }
    }

    /// The path of an entry of this directory.
    pub(crate) fn join(&self, name: &OsStr) -> Self {
        if self.is_root() { Self(PathBuf::from(name)) } else { Self(self.0.join(name)) }
    }
}

impl Workspace {
    /// Opens the directory `root` as a workspace and checks that the kernel can confine it.
    ///
    /// # Errors
    /// When the root is not a directory, is `/`, or when the kernel lacks `openat2`.
    pub fn open(root: impl AsRef<Path>) -> Result<Self, OpenError> {
        let named = root.as_ref();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(named, flags, Mode::empty())
            .map_err(|e| OpenError::Root { path: named.to_owned(), source: e.into() })?;
        Self::from_directory(named, directory, Vec::new())
    }

    /// Creates a workspace from an open directory. `hidden` paths in it can neither be read nor
    /// changed.
    pub(crate) fn from_directory(
        named: &Path,
        directory: OwnedFd,
        hidden: Vec<Arc<HiddenPath>>,
    ) -> Result<Self, OpenError> {
        let refused = |source: io::Error| OpenError::Root { path: named.to_owned(), source };
        // Based on the descriptor: the name may refer to another directory by now.
        let root = hidden::current_path(directory.as_fd()).map_err(|e| refused(e.into()))?;
        if root.parent().is_none() {
            return Err(OpenError::FileSystemRoot);
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match open_beneath(
            directory.as_fd(),
            Path::new("."),
            flags,
            Mode::empty(),
            ResolveFlags::empty(),
        ) {
            Ok(_) => {}
            Err(error @ (Errno::NOSYS | Errno::PERM | Errno::INVAL)) => {
                return Err(OpenError::Unsupported { source: error.into() });
            }
            Err(error) => return Err(refused(error.into())),
        }
        let writing = std::sync::Mutex::new(());
        Ok(Self {
            inner: Arc::new(Inner { named: named.to_owned(), root, directory, hidden, writing }),
        })
    }

    /// The absolute path of the root, without symbolic links.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.inner.root
    }

    /// Converts a caller's path into a path relative to the root. Absolute paths below the root are
    /// accepted.
    ///
    /// # Errors
    /// [`PathError::Outside`] for other absolute paths, [`PathError::Invalid`] for text that cannot
    /// be a path.
    pub fn locate(&self, given: &str) -> Result<RelativePath, PathError> {
        let invalid = |why| PathError::Invalid { path: given.chars().take(200).collect(), why };
        if given.is_empty() {
            return Err(invalid("it is empty"));
        }
        if given.contains('\0') {
            return Err(invalid("it contains a NUL character"));
        }
        if given.len() > MAX_PATH_BYTES {
            return Err(invalid("it is longer than 4096 bytes"));
        }
        let mut path = Path::new(given);
        if path.is_absolute() {
            path = self
                .strip_root(path)
                .ok_or_else(|| PathError::Outside { path: given.to_owned() })?;
        }
        // `..` stays: its meaning depends on symbolic links, which only the kernel follows
        // correctly.
        let cleaned: PathBuf =
            path.components().filter(|part| !matches!(part, Component::CurDir)).collect();
        if cleaned.as_os_str().is_empty() {
            Ok(RelativePath::root())
        } else {
            Ok(RelativePath(cleaned))
        }
    }

    /// The relative part of an absolute path below the root, by its text alone; `None` if it is not
    /// below.
    pub(crate) fn below_root(&self, path: &str) -> Option<String> {
        let path = Path::new(path);
        let below = path.is_absolute().then(|| self.strip_root(path)).flatten()?;
        below.to_str().map(str::to_owned)
    }

    fn strip_root<'a>(&self, path: &'a Path) -> Option<&'a Path> {
        path.strip_prefix(&self.inner.root).or_else(|_| path.strip_prefix(&self.inner.named)).ok()
    }

    /// Opens a regular file for reading.
    pub(crate) fn open_file(&self, path: &RelativePath) -> Result<File, PathError> {
        // Without O_NONBLOCK a pipe without a writer would block this thread forever.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = File::from(self.open_at(path, flags)?);
        let stat = rustix::fs::fstat(&file).map_err(|e| path_error(path, e))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Ok(file),
            FileType::Directory => Err(PathError::IsDirectory { path: path.display() }),
            other => Err(PathError::Special { path: path.display(), kind: kind_name(other) }),
        }
    }

    /// Opens a directory for reading its entries.
    pub(crate) fn open_directory(&self, path: &RelativePath) -> Result<OwnedFd, PathError> {
        self.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)
    }

    /// The type of the target of `path`, following symbolic links that stay inside.
    pub(crate) fn file_type(&self, path: &RelativePath) -> Result<FileType, PathError> {
        let handle = self.open_at(path, OFlags::PATH | OFlags::CLOEXEC)?;
        let stat = rustix::fs::fstat(&handle).map_err(|e| path_error(path, e))?;
        Ok(FileType::from_raw_mode(stat.st_mode))
    }

    fn open_at(&self, path: &RelativePath, flags: OFlags) -> Result<OwnedFd, PathError> {
        open_beneath(
            self.inner.directory.as_fd(),
            path.as_path(),
            flags,
            Mode::empty(),
            ResolveFlags::empty(),
        )
        .map_err(|e| path_error(path, e))
        .and_then(|handle| self.check_visible(path, handle))
    }

    /// Existing names similar to a missing path, best match first, at most `limit`.
    pub(crate) fn similar_names(&self, missing: &RelativePath, limit: usize) -> Vec<String> {
        let mut wanted = missing.clone();
        // The nearest existing directory contains the first wrong component.
        while let Some((parent, name)) = wanted.split() {
            let (parent, name) = (parent.clone(), name.to_string_lossy().into_owned());
            if let Ok(directory) = self.open_directory(&parent) {
                return similar_entries(&directory, &parent, &name, limit);
            }
            wanted = parent;
        }
        Vec::new()
    }
}

/// Opens `path` below `directory`, never leaving it. Retries when a concurrent rename made the
/// kernel abort.
pub(crate) fn open_beneath(
    directory: BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
    mode: Mode,
    extra: ResolveFlags,
) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | extra;
    let mut attempt = 0;
    loop {
        attempt += 1;
        match rustix::fs::openat2(directory, path, flags, mode, resolve) {
            Err(Errno::AGAIN | Errno::INTR) if attempt < RESOLVE_ATTEMPTS => {}
            result => return result,
        }
    }
}

fn path_error(path: &RelativePath, error: Errno) -> PathError {
    let path = path.display();
    match error {
        Errno::XDEV => PathError::Outside { path },
        Errno::NOENT => PathError::NotFound { path },
        Errno::ISDIR => PathError::IsDirectory { path },
        Errno::NOTDIR => PathError::NotDirectory { path },
        // The error for opening a socket.
        Errno::NXIO => PathError::Special { path, kind: kind_name(FileType::Socket) },
        Errno::ACCESS | Errno::PERM | Errno::ROFS => PathError::Denied { path },
        Errno::LOOP => {
            PathError::Invalid { path, why: "its symbolic links form a loop or lead into /proc" }
        }
        Errno::NAMETOOLONG => PathError::Invalid { path, why: "a name in it is too long" },
        other => PathError::Io { path, source: other.into() },
    }
}

fn kind_name(kind: FileType) -> &'static str {
    match kind {
        FileType::Fifo => "pipe",
        FileType::Socket => "socket",
        FileType::CharacterDevice | FileType::BlockDevice => "device",
        FileType::Symlink => "symbolic link",
        FileType::Directory => "directory",
        _ => "special file",
    }
}

fn similar_entries(
    directory: &OwnedFd,
    parent: &RelativePath,
    wanted: &str,
    limit: usize,
) -> Vec<String> {
    const MAX_ENTRIES: usize = 2_000;
    let Ok(entries) = rustix::fs::Dir::read_from(directory) else { return Vec::new() };
    let names: Vec<String> = entries
        .flatten()
        .take(MAX_ENTRIES)
        .map(|entry| String::from_utf8_lossy(entry.file_name().to_bytes()).into_owned())
        .filter(|name| name != "." && name != "..")
        .collect();
    let lowered = wanted.to_lowercase();
    // A name that differs only in case, or only in its extension, is the most likely match.
    let stem = lowered.split('.').next().unwrap_or_default();
    let mut found: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|name| {
            let name = name.to_lowercase();
            name == lowered || (stem.len() > 2 && name.split('.').next() == Some(stem))
        })
        .collect();
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    for name in similar::get_close_matches(wanted, &all, limit, 0.6) {
        if !found.contains(&name) {
            found.push(name);
        }
    }
    found.truncate(limit);
    found
        .into_iter()
        .map(|name| parent.join(OsStr::from_bytes(name.as_bytes())).display())
        .collect()
}

#[cfg(test)]
mod tests;

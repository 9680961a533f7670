//! What lies in a workspace and must not be seen through it: the data of the service itself.
//!
//! A repository with the service's data directory in it is an ordinary workspace, but what the
//! service keeps there (other tasks' files, compiled code, keys) is nobody's to read or change.
//! What is hidden is known by device and inode, never by its name, so that no link and no renaming
//! leads to it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::{PathError, RelativePath, Workspace, beneath, path_error};

/// How often the directory of a file is looked for while the file is being replaced by somebody.
const PARENT_ATTEMPTS: usize = 16;

/// Which file or directory something is, whatever it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    /// Of something open.
    pub(crate) fn of(handle: impl AsFd) -> rustix::io::Result<Self> {
        Ok(Self::from_stat(&rustix::fs::fstat(handle)?))
    }

    pub(super) fn from_stat(stat: &Stat) -> Self {
        Self { device: stat.st_dev, inode: stat.st_ino }
    }
}

/// A file or directory that no workspace shows.
#[derive(Debug)]
pub(crate) struct Hidden {
    handle: OwnedFd,
    identity: Identity,
    directory: bool,
}

impl Hidden {
    /// Takes hold of what `path` means now.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let handle = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let stat = rustix::fs::fstat(&handle)?;
        let directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        Ok(Self { handle, identity: Identity::from_stat(&stat), directory })
    }

    /// Which one it is.
    pub(crate) fn identity(&self) -> Identity {
        self.identity
    }

    /// Whether it is one of `directories`, or lies in one.
    pub(crate) fn lies_in(&self, directories: &[Identity]) -> rustix::io::Result<bool> {
        if self.directory {
            return Ok(enclosing(self.handle.as_fd(), directories)?.is_some());
        }
        Ok(enclosing(parent(self.handle.as_fd())?.as_fd(), directories)?.is_some())
    }

    fn is_deleted(&self) -> bool {
        rustix::fs::fstat(&self.handle).is_ok_and(|stat| stat.st_nlink == 0)
    }
}

/// The first of `wanted` that is this directory or one above it.
pub(crate) fn enclosing(
    directory: BorrowedFd<'_>,
    wanted: &[Identity],
) -> rustix::io::Result<Option<Identity>> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut current = rustix::fs::openat(directory, ".", flags, Mode::empty())?;
    let mut identity = Identity::of(&current)?;
    while !wanted.contains(&identity) {
        current = rustix::fs::openat(&current, "..", flags, Mode::empty())?;
        let above = Identity::of(&current)?;
        if above == identity {
            return Ok(None);
        }
        identity = above;
    }
    Ok(Some(identity))
}

/// Where the kernel says that something open lies now.
pub(super) fn current_path(handle: BorrowedFd<'_>) -> rustix::io::Result<PathBuf> {
    let link =
        rustix::fs::readlinkat(CWD, format!("/proc/self/fd/{}", handle.as_raw_fd()), Vec::new())?;
    Ok(PathBuf::from(std::ffi::OsString::from_vec(link.into_bytes())))
}

/// The directory that has an open file in it. The path is only where to look: what is found there
/// is compared.
fn parent(file: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let identity = Identity::of(file)?;
    for _ in 0..PARENT_ATTEMPTS {
        let path = current_path(file)?;
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else { break };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        if let Ok(directory) = rustix::fs::open(above, flags, Mode::empty())
            && let Ok(stat) = rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)
            && Identity::from_stat(&stat) == identity
        {
            return Ok(directory);
        }
    }
    // Somebody deletes or moves it all the time.
    Err(Errno::STALE)
}

/// What a command's view of the workspace needs so that hidden things stay hidden.
#[derive(Debug, Default)]
pub(crate) struct Veils {
    /// Directories between the root and something hidden, outermost first, relative to the root.
    /// Mounted on themselves: a mount point cannot be renamed, so that what is hidden cannot be
    /// carried to another path.
    pub(crate) pinned: Vec<(PathBuf, OwnedFd)>,
    /// Directories to cover, relative to the root.
    pub(crate) directories: Vec<PathBuf>,
    /// Files to cover, relative to the root.
    pub(crate) files: Vec<PathBuf>,
}

impl Workspace {
    /// Gives back what was opened, unless it is hidden or lies in something hidden.
    pub(super) fn admit(&self, path: &RelativePath, handle: OwnedFd) -> Result<OwnedFd, PathError> {
        if self.inner.hidden.is_empty() {
            return Ok(handle);
        }
        let failed = |error| path_error(path, error);
        let stat = rustix::fs::fstat(&handle).map_err(failed)?;
        if self.hides(Identity::from_stat(&stat)) {
            return Err(PathError::Reserved { path: path.shown() });
        }
        let mut known = self.hidden_identities();
        let root = Identity::of(&self.inner.directory).map_err(failed)?;
        known.push(root);
        let found = if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            enclosing(handle.as_fd(), &known)
        } else {
            parent(handle.as_fd()).and_then(|directory| enclosing(directory.as_fd(), &known))
        };
        match found.map_err(failed)? {
            Some(identity) if identity == root => Ok(handle),
            Some(_) => Err(PathError::Reserved { path: path.shown() }),
            None => Err(PathError::Outside { path: path.shown() }),
        }
    }

    /// Whether this is something hidden itself.
    pub(super) fn hides(&self, identity: Identity) -> bool {
        self.inner.hidden.iter().any(|hidden| hidden.identity == identity)
    }

    pub(super) fn hidden_identities(&self) -> Vec<Identity> {
        self.inner.hidden.iter().map(|hidden| hidden.identity).collect()
    }

    /// Finds out where the hidden things lie now.
    pub(crate) fn veils(&self) -> io::Result<Veils> {
        let mut veils = Veils::default();
        let root = Identity::of(&self.inner.directory)?;
        for hidden in &self.inner.hidden {
            if hidden.is_deleted() || !hidden.lies_in(&[root])? {
                continue;
            }
            let moved =
                || io::Error::other("a directory of the service itself was moved meanwhile");
            let path = current_path(hidden.handle.as_fd())?;
            let path = path
                .strip_prefix(current_path(self.inner.directory.as_fd())?)
                .map_err(|_| moved())?;
            if Identity::of(self.handle(path)?)? != hidden.identity {
                return Err(moved());
            }
            let above = path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty());
            for above in above {
                if !veils.pinned.iter().any(|(pinned, _)| pinned == above) {
                    veils.pinned.push((above.to_owned(), self.handle(above)?));
                }
            }
            if hidden.directory { &mut veils.directories } else { &mut veils.files }
                .push(path.to_owned());
        }
        veils.pinned.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(veils)
    }

    fn handle(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        beneath(self.inner.directory.as_fd(), path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
    }

    /// The root itself, for a process that mounts it.
    pub(crate) fn root_handle(&self) -> io::Result<OwnedFd> {
        self.inner.directory.try_clone()
    }
}

/// Those of `hidden` that lie in the directory.
pub(crate) fn hidden_below(
    directory: BorrowedFd<'_>,
    hidden: &[Arc<Hidden>],
) -> rustix::io::Result<Vec<Arc<Hidden>>> {
    let identity = Identity::of(directory)?;
    let mut below = Vec::new();
    for candidate in hidden {
        match candidate.lies_in(&[identity]) {
            Ok(true) => below.push(Arc::clone(candidate)),
            // What was deleted lies nowhere, and not every file system counts its links down to 0.
            Ok(false) | Err(Errno::NOENT) => {}
            Err(_) if candidate.is_deleted() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(below)
}

//! Hidden parts of a workspace: the data of the service itself.
//!
//! A repository that contains the service's data directory is an ordinary workspace, but tasks must
//! not read or change the data there (other tasks' files, compiled code, keys). Hidden paths are
//! identified by device and inode, never by name, so that links and renames cannot reach them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::{PathError, RelativePath, Workspace, open_beneath, path_error};

/// How often the directory of a file is searched while the file is being replaced.
const PARENT_ATTEMPTS: usize = 16;

/// Identifies a file or directory independently of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    /// The identity of an open file or directory.
    pub(crate) fn from_handle(handle: impl AsFd) -> rustix::io::Result<Self> {
        Ok(Self::from_stat(&rustix::fs::fstat(handle)?))
    }

    pub(super) fn from_stat(stat: &Stat) -> Self {
        Self { device: stat.st_dev, inode: stat.st_ino }
    }
}

/// A file or directory that is hidden in every workspace.
#[derive(Debug)]
pub(crate) struct HiddenPath {
    handle: OwnedFd,
    identity: Identity,
    directory: bool,
}

impl HiddenPath {
    /// Opens the current target of `path`.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let handle = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let stat = rustix::fs::fstat(&handle)?;
        let directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        Ok(Self { handle, identity: Identity::from_stat(&stat), directory })
    }

    /// Its identity.
    pub(crate) fn identity(&self) -> Identity {
        self.identity
    }

    /// Whether it is one of `directories`, or inside of one.
    pub(crate) fn is_inside(&self, directories: &[Identity]) -> rustix::io::Result<bool> {
        if self.directory {
            return Ok(find_enclosing(self.handle.as_fd(), directories)?.is_some());
        }
        Ok(find_enclosing(parent(self.handle.as_fd())?.as_fd(), directories)?.is_some())
    }

    fn is_deleted(&self) -> bool {
        rustix::fs::fstat(&self.handle).is_ok_and(|stat| stat.st_nlink == 0)
    }
}

/// The identity in `wanted` of this directory or its nearest ancestor.
pub(crate) fn find_enclosing(
    directory: BorrowedFd<'_>,
    wanted: &[Identity],
) -> rustix::io::Result<Option<Identity>> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut current = rustix::fs::openat(directory, ".", flags, Mode::empty())?;
    let mut identity = Identity::from_handle(&current)?;
    while !wanted.contains(&identity) {
        current = rustix::fs::openat(&current, "..", flags, Mode::empty())?;
        let above = Identity::from_handle(&current)?;
        if above == identity {
            return Ok(None);
        }
        identity = above;
    }
    Ok(Some(identity))
}

/// The current path of an open file or directory, from the kernel.
pub(super) fn current_path(handle: BorrowedFd<'_>) -> rustix::io::Result<PathBuf> {
    let link =
        rustix::fs::readlinkat(CWD, format!("/proc/self/fd/{}", handle.as_raw_fd()), Vec::new())?;
    Ok(PathBuf::from(std::ffi::OsString::from_vec(link.into_bytes())))
}

/// The directory that contains an open file. The file's path is only a hint: the entry found there
/// is compared with the file.
fn parent(file: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let identity = Identity::from_handle(file)?;
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
    // It is being deleted or moved all the time.
    Err(Errno::STALE)
}

/// Mounts that keep hidden paths hidden from commands.
#[derive(Debug, Default)]
pub(crate) struct HiddenMounts {
    /// Directories between the root and a hidden path, outermost first, relative to the root. They
    /// are mounted on themselves: a mount point cannot be renamed, so hidden paths cannot be moved
    /// to another path.
    pub(crate) pinned: Vec<(PathBuf, OwnedFd)>,
    /// Directories to cover, relative to the root.
    pub(crate) directories: Vec<PathBuf>,
    /// Files to cover, relative to the root.
    pub(crate) files: Vec<PathBuf>,
}

impl Workspace {
    /// Returns the opened file or directory, unless it is hidden or inside a hidden directory.
    pub(super) fn check_visible(
        &self,
        path: &RelativePath,
        handle: OwnedFd,
    ) -> Result<OwnedFd, PathError> {
        if self.inner.hidden.is_empty() {
            return Ok(handle);
        }
        let failed = |error| path_error(path, error);
        let stat = rustix::fs::fstat(&handle).map_err(failed)?;
        if self.is_hidden(Identity::from_stat(&stat)) {
            return Err(PathError::Reserved { path: path.display() });
        }
        let mut known = self.hidden_identities();
        let root = Identity::from_handle(&self.inner.directory).map_err(failed)?;
        known.push(root);
        let found = if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            find_enclosing(handle.as_fd(), &known)
        } else {
            parent(handle.as_fd()).and_then(|directory| find_enclosing(directory.as_fd(), &known))
        };
        match found.map_err(failed)? {
            Some(identity) if identity == root => Ok(handle),
            Some(_) => Err(PathError::Reserved { path: path.display() }),
            None => Err(PathError::Outside { path: path.display() }),
        }
    }

    /// Whether this is a hidden path itself.
    pub(super) fn is_hidden(&self, identity: Identity) -> bool {
        self.inner.hidden.iter().any(|hidden| hidden.identity == identity)
    }

    pub(super) fn hidden_identities(&self) -> Vec<Identity> {
        self.inner.hidden.iter().map(|hidden| hidden.identity).collect()
    }

    /// Computes the mounts from the current locations of the hidden paths.
    pub(crate) fn hidden_mounts(&self) -> io::Result<HiddenMounts> {
        let mut mounts = HiddenMounts::default();
        let root = Identity::from_handle(&self.inner.directory)?;
        for hidden in &self.inner.hidden {
            if hidden.is_deleted() || !hidden.is_inside(&[root])? {
                continue;
            }
            let moved =
                || io::Error::other("a directory of the service itself was moved concurrently");
            let path = current_path(hidden.handle.as_fd())?;
            let path = path
                .strip_prefix(current_path(self.inner.directory.as_fd())?)
                .map_err(|_| moved())?;
            if Identity::from_handle(self.handle(path)?)? != hidden.identity {
                return Err(moved());
            }
            let above = path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty());
            for above in above {
                if !mounts.pinned.iter().any(|(pinned, _)| pinned == above) {
                    mounts.pinned.push((above.to_owned(), self.handle(above)?));
                }
            }
            if hidden.directory { &mut mounts.directories } else { &mut mounts.files }
                .push(path.to_owned());
        }
        mounts.pinned.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(mounts)
    }

    fn handle(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        open_beneath(
            self.inner.directory.as_fd(),
            path,
            flags,
            Mode::empty(),
            ResolveFlags::NO_SYMLINKS,
        )
    }

    /// A descriptor of the root, for a process that mounts it.
    pub(crate) fn root_handle(&self) -> io::Result<OwnedFd> {
        self.inner.directory.try_clone()
    }
}

/// The paths of `hidden` that are inside the directory.
pub(crate) fn hidden_below(
    directory: BorrowedFd<'_>,
    hidden: &[Arc<HiddenPath>],
) -> rustix::io::Result<Vec<Arc<HiddenPath>>> {
    let identity = Identity::from_handle(directory)?;
    let mut below = Vec::new();
    for candidate in hidden {
        match candidate.is_inside(&[identity]) {
            Ok(true) => below.push(Arc::clone(candidate)),
            // It was deleted; not every file system reports a link count of 0 then.
            Ok(false) | Err(Errno::NOENT) => {}
            Err(_) if candidate.is_deleted() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(below)
}

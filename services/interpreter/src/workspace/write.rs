//! Replaces whole files: creates parents, writes the content to a temporary file in the same
//! directory, and renames it over the target.
//!
//! A reader sees either the old or the new file. Every step is relative to a directory descriptor
//! that was resolved beneath the root, so swapping a directory for a link has no effect.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::MutexGuard;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Uid};
use rustix::io::Errno;

use super::{Identity, PathError, RelativePath, Workspace, kind_name, open_beneath, path_error};

/// Name prefix of temporary files; walks skip them.
pub(super) const TEMPORARY_PREFIX: &str = ".construct-write-";

/// Maximum number of symbolic links that are followed to find the target.
const MAX_LINKS: usize = 16;

/// The state of the file that the writer expects.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Expected {
    /// Any existing file is replaced.
    Anything,
    /// Only this version of the file is replaced (device, inode, size, modification time in
    /// nanoseconds).
    Version(Version),
}

/// Identifies the content of a file well enough to detect that it was replaced or changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    device: u64,
    inode: u64,
    size: i64,
    modified: (i64, i64),
}

/// The outcome of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteOutcome {
    /// There was no such file.
    Created,
    /// A file was replaced; it kept its mode and, where permitted, its owner.
    Overwritten,
}

impl Version {
    /// The version of an open file.
    pub(crate) fn from_file(file: &File, path: &RelativePath) -> Result<Self, PathError> {
        Ok(Self::from_stat(&rustix::fs::fstat(file).map_err(|e| path_error(path, e))?))
    }

    fn from_stat(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            size: stat.st_size,
            modified: (stat.st_mtime, i64::try_from(stat.st_mtime_nsec).unwrap_or(0)),
        }
    }
}

/// The location of a file: an open directory and a name in it that is not a symbolic link.
struct Target {
    directory: OwnedFd,
    name: OsString,
    existing: Option<Stat>,
}

impl Workspace {
    /// Excludes other writers of this workspace. Held while a file is read and replaced.
    pub(crate) fn lock_for_writing(&self) -> MutexGuard<'_, ()> {
        // The lock guards no data, so a panicking writer leaves nothing inconsistent.
        self.inner.writing.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Writes `content` to `path`, creating missing directories. The caller holds
    /// [`Self::lock_for_writing`].
    pub(crate) fn replace(
        &self,
        path: &RelativePath,
        content: &[u8],
        expected: Expected,
    ) -> Result<WriteOutcome, PathError> {
        let target = self.resolve_target(path)?;
        let fails = |error| path_error(path, error);
        if let Expected::Version(version) = expected
            && target.existing.as_ref().map(Version::from_stat) != Some(version)
        {
            return Err(PathError::Changed { path: path.display() });
        }
        let mut temporary = Temporary::create(&target).map_err(fails)?;
        temporary.file.write_all(content).map_err(|error| fails(errno(&error)))?;
        temporary.commit().map_err(fails)
    }

    /// Writes the content from `fill` to `path`, creating missing directories. On failure the
    /// existing file is unchanged. It locks out other writers only at its end, so the caller must
    /// not hold the lock.
    pub(crate) fn replace_with<E: From<PathError>>(
        &self,
        path: &RelativePath,
        fill: impl FnOnce(&mut File) -> Result<(), E>,
    ) -> Result<WriteOutcome, E> {
        let target = self.resolve_target(path)?;
        let fails = |error| path_error(path, error);
        let mut temporary = Temporary::create(&target).map_err(fails)?;
        fill(&mut temporary.file)?;
        let _writing = self.lock_for_writing();
        Ok(temporary.commit().map_err(fails)?)
    }

    /// Resolves `path` to a directory and a name, through links that stay inside.
    fn resolve_target(&self, path: &RelativePath) -> Result<Target, PathError> {
        let mut target = path.clone();
        for _ in 0..MAX_LINKS {
            let Some((parent, name)) = target.split() else {
                return Err(PathError::IsDirectory { path: path.display() });
            };
            let name = name.to_owned();
            let directory = self.ensure_directory(&parent)?;
            let stat = match rustix::fs::statat(&directory, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => return Ok(Target { directory, name, existing: None }),
                Err(error) => return Err(path_error(path, error)),
            };
            if self.is_hidden(Identity::from_stat(&stat)) {
                return Err(PathError::Reserved { path: path.display() });
            }
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => {
                    return Ok(Target { directory, name, existing: Some(stat) });
                }
                FileType::Directory => return Err(PathError::IsDirectory { path: path.display() }),
                FileType::Symlink => target = self.follow(&directory, &parent, &name, path)?,
                other => {
                    return Err(PathError::Special {
                        path: path.display(),
                        kind: kind_name(other),
                    });
                }
            }
        }
        Err(PathError::Invalid { path: path.display(), why: "its symbolic links form a loop" })
    }

    fn follow(
        &self,
        directory: &OwnedFd,
        parent: &RelativePath,
        name: &OsStr,
        path: &RelativePath,
    ) -> Result<RelativePath, PathError> {
        let link =
            rustix::fs::readlinkat(directory, name, Vec::new()).map_err(|e| path_error(path, e))?;
        let link = PathBuf::from(OsString::from_vec(link.into_bytes()));
        if link.is_absolute() {
            return Err(PathError::Outside { path: path.display() });
        }
        // The parent is resolved again from the root: the kernel keeps the link beneath it.
        Ok(parent.join(link.as_os_str()))
    }

    /// Opens a directory, creating missing parts of its path.
    fn ensure_directory(&self, path: &RelativePath) -> Result<OwnedFd, PathError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = || {
            let root = self.inner.directory.as_fd();
            open_beneath(root, path.as_path(), flags, Mode::empty(), ResolveFlags::empty())
        };
        match open() {
            Err(Errno::NOENT) => {}
            Err(error) => return Err(path_error(path, error)),
            Ok(directory) => return self.check_visible(path, directory),
        }
        let Some((parent, name)) = path.split() else {
            return Err(PathError::NotFound { path: path.display() });
        };
        let parent = self.ensure_directory(&parent)?;
        match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o777)) {
            Ok(()) | Err(Errno::EXIST) => open()
                .map_err(|e| path_error(path, e))
                .and_then(|directory| self.check_visible(path, directory)),
            Err(error) => Err(path_error(path, error)),
        }
    }
}

/// A temporary file in the directory of the file that it replaces. It is deleted unless it is
/// committed.
struct Temporary<'a> {
    target: &'a Target,
    name: String,
    file: File,
}

impl<'a> Temporary<'a> {
    fn create(target: &'a Target) -> rustix::io::Result<Self> {
        // The name is unguessable and the file must not exist: no link can be prepared for it.
        let name = format!("{TEMPORARY_PREFIX}{}", uuid::Uuid::now_v7().simple());
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = if target.existing.is_some() {
            Mode::RUSR | Mode::WUSR
        } else {
            Mode::from_raw_mode(0o666)
        };
        let file = rustix::fs::openat(&target.directory, &name, flags, mode)?;
        Ok(Self { target, name, file: File::from(file) })
    }

    /// Replaces the file, with its mode and owner.
    ///
    /// There is no `fsync`: a crash of the process loses nothing, and the journal, not the file
    /// system, records what was done.
    fn commit(self) -> rustix::io::Result<WriteOutcome> {
        let Target { directory, name, existing } = self.target;
        if let Some(stat) = existing {
            let own = rustix::fs::fstat(&self.file)?;
            if (own.st_uid, own.st_gid) != (stat.st_uid, stat.st_gid) {
                // Only a privileged service may change the owner; otherwise the new file belongs to
                // the service.
                let (user, group) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
                let _ = rustix::fs::fchown(&self.file, Some(user), Some(group));
            }
            // Without the set-user and set-group bits, which the kernel also clears when content
            // changes.
            rustix::fs::fchmod(&self.file, Mode::from_raw_mode(stat.st_mode & 0o777))?;
        }
        rustix::fs::renameat(directory, &self.name, directory, name)?;
        Ok(if existing.is_some() { WriteOutcome::Overwritten } else { WriteOutcome::Created })
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        // After a commit there is no file of this name. Otherwise the first error is the relevant
        // one, and walks skip a leftover by its name.
        let _ = rustix::fs::unlinkat(&self.target.directory, &self.name, AtFlags::empty());
    }
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

//! Replacing a file as a whole: parents are made, the content is written beside the target and
//! renamed over it.
//!
//! A reader sees the old file or the new one, never half of one. Every step works relative to a
//! directory descriptor that was resolved beneath the root, so that a directory swapped for a link
//! meanwhile changes nothing.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::MutexGuard;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Uid};
use rustix::io::Errno;

use super::{Identity, PathError, RelativePath, Workspace, beneath, kind_name, path_error};

/// What temporary files are called; walks leave them out.
pub(super) const TEMPORARY_PREFIX: &str = ".construct-write-";

/// How many symbolic links are followed to find the file that is really meant.
const MAX_LINKS: usize = 16;

/// What the writer believes is there now.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Expected {
    /// Whatever there is, is replaced.
    Anything,
    /// Only this version of the file is replaced (device, inode, size, modification time in
    /// nanoseconds).
    Version(Version),
}

/// Identifies the content of a file well enough to notice that somebody else replaced or changed
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    device: u64,
    inode: u64,
    size: i64,
    modified: (i64, i64),
}

/// What a write did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// There was no such file.
    Created,
    /// A file was replaced; it kept its mode and, where permitted, its owner.
    Overwritten,
}

impl Version {
    /// The version of an open file.
    pub(crate) fn of(file: &File, path: &RelativePath) -> Result<Self, PathError> {
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

/// Where a file lives: an open directory and a name in it which is not a symbolic link.
struct Place {
    directory: OwnedFd,
    name: OsString,
    existing: Option<Stat>,
}

impl Workspace {
    /// Holds other writers of this workspace off. Held across reading a file and replacing it.
    pub(crate) fn lock_for_writing(&self) -> MutexGuard<'_, ()> {
        // The lock guards no data, so that a writer which panicked left nothing broken behind.
        self.inner.writing.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Writes `content` as the whole of `path`, making missing directories. The caller holds
    /// [`Self::lock_for_writing`].
    pub(crate) fn replace(
        &self,
        path: &RelativePath,
        content: &[u8],
        expected: Expected,
    ) -> Result<Written, PathError> {
        let place = self.place(path)?;
        let fails = |error| path_error(path, error);
        if let Expected::Version(version) = expected
            && place.existing.as_ref().map(Version::from_stat) != Some(version)
        {
            return Err(PathError::Changed { path: path.shown() });
        }
        let mut temporary = Temporary::beside(&place).map_err(fails)?;
        temporary.file.write_all(content).map_err(|error| fails(errno(&error)))?;
        temporary.take_place().map_err(fails)
    }

    /// Writes what `fill` gives as the whole of `path`, making missing directories. Where that
    /// fails, what is there stays as it is. Holds other writers off only at its end, so the caller
    /// must not.
    pub(crate) fn replace_with<E: From<PathError>>(
        &self,
        path: &RelativePath,
        fill: impl FnOnce(&mut File) -> Result<(), E>,
    ) -> Result<Written, E> {
        let place = self.place(path)?;
        let fails = |error| path_error(path, error);
        let mut temporary = Temporary::beside(&place).map_err(fails)?;
        fill(&mut temporary.file)?;
        let _writing = self.lock_for_writing();
        Ok(temporary.take_place().map_err(fails)?)
    }

    /// Finds the directory and the name that `path` means, through links that stay inside.
    fn place(&self, path: &RelativePath) -> Result<Place, PathError> {
        let mut target = path.clone();
        for _ in 0..MAX_LINKS {
            let Some((parent, name)) = target.split() else {
                return Err(PathError::IsDirectory { path: path.shown() });
            };
            let name = name.to_owned();
            let directory = self.ensure_directory(&parent)?;
            let stat = match rustix::fs::statat(&directory, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => return Ok(Place { directory, name, existing: None }),
                Err(error) => return Err(path_error(path, error)),
            };
            if self.hides(Identity::from_stat(&stat)) {
                return Err(PathError::Reserved { path: path.shown() });
            }
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => {
                    return Ok(Place { directory, name, existing: Some(stat) });
                }
                FileType::Directory => return Err(PathError::IsDirectory { path: path.shown() }),
                FileType::Symlink => target = self.follow(&directory, &parent, &name, path)?,
                other => {
                    return Err(PathError::Special { path: path.shown(), kind: kind_name(other) });
                }
            }
        }
        Err(PathError::Invalid { path: path.shown(), why: "its symbolic links form a loop" })
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
            return Err(PathError::Outside { path: path.shown() });
        }
        // The parent is resolved again from the root, beneath it: a link cannot lead further out
        // than the kernel allows.
        Ok(parent.join(link.as_os_str()))
    }

    /// Opens a directory, making the missing part of its path.
    fn ensure_directory(&self, path: &RelativePath) -> Result<OwnedFd, PathError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = || {
            let root = self.inner.directory.as_fd();
            beneath(root, path.as_path(), flags, Mode::empty(), ResolveFlags::empty())
        };
        match open() {
            Err(Errno::NOENT) => {}
            Err(error) => return Err(path_error(path, error)),
            Ok(directory) => return self.admit(path, directory),
        }
        let Some((parent, name)) = path.split() else {
            return Err(PathError::NotFound { path: path.shown() });
        };
        let parent = self.ensure_directory(&parent)?;
        match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o777)) {
            Ok(()) | Err(Errno::EXIST) => open()
                .map_err(|e| path_error(path, e))
                .and_then(|directory| self.admit(path, directory)),
            Err(error) => Err(path_error(path, error)),
        }
    }
}

/// A new file beside the one it is to replace. It is gone again unless it takes its place.
struct Temporary<'a> {
    place: &'a Place,
    name: String,
    file: File,
}

impl<'a> Temporary<'a> {
    fn beside(place: &'a Place) -> rustix::io::Result<Self> {
        // The name is unguessable and the file must not exist: nobody can prepare a link for it.
        let name = format!("{TEMPORARY_PREFIX}{}", uuid::Uuid::now_v7().simple());
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = if place.existing.is_some() {
            Mode::RUSR | Mode::WUSR
        } else {
            Mode::from_raw_mode(0o666)
        };
        let file = rustix::fs::openat(&place.directory, &name, flags, mode)?;
        Ok(Self { place, name, file: File::from(file) })
    }

    /// Replaces the file, with its mode and owner.
    ///
    /// There is no `fsync`: a crash of the process loses nothing, and the journal, not the file
    /// system, says what was done.
    fn take_place(self) -> rustix::io::Result<Written> {
        let Place { directory, name, existing } = self.place;
        if let Some(stat) = existing {
            let own = rustix::fs::fstat(&self.file)?;
            if (own.st_uid, own.st_gid) != (stat.st_uid, stat.st_gid) {
                // Only a privileged service may give a file away; otherwise the new file belongs to
                // the service.
                let (user, group) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
                let _ = rustix::fs::fchown(&self.file, Some(user), Some(group));
            }
            // Not the set-user and set-group bits, which the kernel too takes away from a file
            // whose content changes.
            rustix::fs::fchmod(&self.file, Mode::from_raw_mode(stat.st_mode & 0o777))?;
        }
        rustix::fs::renameat(directory, &self.name, directory, name)?;
        Ok(if existing.is_some() { Written::Overwritten } else { Written::Created })
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        // Once it has taken its place there is nothing of this name. Otherwise the first error is
        // the one worth telling, and a leftover is hidden from walks by its name.
        let _ = rustix::fs::unlinkat(&self.place.directory, &self.name, AtFlags::empty());
    }
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

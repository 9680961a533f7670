//! Deletes files and directories, through descriptors like everything else here.
//!
//! An entry is deleted by name in a directory that was resolved beneath the root. No symbolic link
//! is followed on the way down, so a directory that is concurrently swapped for a link is not
//! entered.

use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{Identity, PathError, RelativePath, Workspace, hidden_below, open_beneath, path_error};

/// Maximum depth of a deleted tree; each level holds one descriptor.
const MAX_DEPTH: usize = 256;

/// The reason why a path was not or only partially deleted.
#[derive(Debug)]
pub(crate) enum RemoveError {
    /// It is a directory and the deletion is not recursive. Nothing was deleted.
    Directory,
    /// A path cannot be used.
    Path {
        /// How many files and directories were deleted before.
        removed: usize,
        /// The error.
        source: PathError,
    },
    /// The caller stopped it.
    Stopped {
        /// How many files and directories were deleted before.
        removed: usize,
    },
}

struct Remover<'a> {
    workspace: &'a Workspace,
    proceed: &'a mut dyn FnMut() -> bool,
    removed: usize,
}

impl Workspace {
    /// Deletes a file or a symbolic link, or if `recursive` also a directory with everything in it,
    /// and returns the number of deleted files and directories. `proceed` is called before each;
    /// false stops the deletion. The caller holds [`Self::lock_for_writing`].
    pub(crate) fn remove(
        &self,
        path: &RelativePath,
        recursive: bool,
        proceed: &mut dyn FnMut() -> bool,
    ) -> Result<usize, RemoveError> {
        let mut remover = Remover { workspace: self, proceed, removed: 0 };
        let Some((parent, name)) = path.split() else {
            // A path of `..` alone, or the root.
            return Err(remover.fail(PathError::Outside { path: path.display() }));
        };
        let directory = match self.open_directory(&parent) {
            Ok(directory) => directory,
            // Report the requested path as missing, not its parent.
            Err(PathError::NotFound { .. }) => {
                return Err(remover.fail(PathError::NotFound { path: path.display() }));
            }
            Err(error) => return Err(remover.fail(error)),
        };
        let stat = rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW);
        let stat = stat.map_err(|error| remover.fail(path_error(path, error)))?;
        if self.is_hidden(Identity::from_stat(&stat)) {
            return Err(remover.fail(PathError::Reserved { path: path.display() }));
        }
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            if !recursive {
                return Err(RemoveError::Directory);
            }
            remover.directory(&directory, name, path, 0)?;
        } else {
            remover.entry(&directory, name, path, AtFlags::empty())?;
        }
        Ok(remover.removed)
    }
}

impl Remover<'_> {
    fn fail(&self, source: PathError) -> RemoveError {
        RemoveError::Path { removed: self.removed, source }
    }

    fn entry(
        &mut self,
        directory: &OwnedFd,
        name: &OsStr,
        path: &RelativePath,
        flags: AtFlags,
    ) -> Result<(), RemoveError> {
        if !(self.proceed)() {
            return Err(RemoveError::Stopped { removed: self.removed });
        }
        match rustix::fs::unlinkat(directory, name, flags) {
            Ok(()) => self.removed += 1,
            // Deleted concurrently.
            Err(Errno::NOENT) if self.removed > 0 => {}
            Err(error) => return Err(self.fail(path_error(path, error))),
        }
        Ok(())
    }

    fn directory(
        &mut self,
        parent: &OwnedFd,
        name: &OsStr,
        path: &RelativePath,
        depth: usize,
    ) -> Result<(), RemoveError> {
        if depth >= MAX_DEPTH {
            let why = "it is nested too deeply; delete it with a command";
            return Err(self.fail(PathError::Invalid {
                path: path.display().chars().take(200).collect(),
                why,
            }));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = open_beneath(
            parent.as_fd(),
            Path::new(name),
            flags,
            Mode::empty(),
            ResolveFlags::NO_SYMLINKS,
        );
        let directory = opened.map_err(|error| self.fail(path_error(path, error)))?;
        // Checked on the open directory, which cannot be swapped.
        match hidden_below(directory.as_fd(), &self.workspace.inner.hidden) {
            Ok(hidden) if hidden.is_empty() => {}
            Ok(_) => return Err(self.fail(PathError::Reserved { path: path.display() })),
            Err(error) => return Err(self.fail(path_error(path, error))),
        }
        let names = entries(&directory).map_err(|error| self.fail(path_error(path, error)))?;
        for (name, kind) in names {
            let name = OsStr::from_bytes(name.to_bytes());
            let path = path.join(name);
            if is_directory(&directory, name, kind) {
                self.directory(&directory, name, &path, depth + 1)?;
            } else {
                self.entry(&directory, name, &path, AtFlags::empty())?;
            }
        }
        self.entry(parent, name, path, AtFlags::REMOVEDIR)
    }
}

/// The entries of a directory. They are read before any of them is deleted: a file system may skip
/// entries of a changing directory.
fn entries(directory: &OwnedFd) -> rustix::io::Result<Vec<(CString, FileType)>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name: &CStr = entry.file_name();
        if name != c"." && name != c".." {
            names.push((name.to_owned(), entry.file_type()));
        }
    }
    Ok(names)
}

fn is_directory(directory: &OwnedFd, name: &OsStr, kind: FileType) -> bool {
    match kind {
        FileType::Directory => true,
        FileType::Unknown => rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory),
        _ => false,
    }
}

//! A directory tree that nothing leaves. The kernel resolves every path below a directory
//! descriptor (`openat2` with `RESOLVE_BENEATH` and `RESOLVE_NO_SYMLINKS`), so no comparison of
//! path strings has to be right.

use std::{
    ffi::OsStr,
    fs::{self, File, Permissions},
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::fs::PermissionsExt as _,
    },
    path::Path,
};

use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, ResolveFlags, fchmod, flock,
        mkdirat, openat, openat2, renameat, statat, syncfs, unlinkat,
    },
    io::Errno,
};

/// The mode of files: never executable, whatever an archive says.
const FILE_MODE: Mode = Mode::from_raw_mode(0o644);
/// The mode of directories: another user may read the snapshot.
const DIRECTORY_MODE: Mode = Mode::from_raw_mode(0o755);
/// The prefix of files that are being written.
const TEMPORARY_PREFIX: &str = ".writing-";
/// Attempts to resolve a path when the kernel gives up because of a concurrent rename.
const MAX_ATTEMPTS: usize = 64;

/// The tree.
#[derive(Debug)]
pub(crate) struct Tree {
    root: OwnedFd,
}

impl Tree {
    /// Opens an existing directory.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(Self { root: openat(CWD, path, flags, Mode::empty())? })
    }

    /// Creates a directory and opens it.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        mkdirat(CWD, path, DIRECTORY_MODE)?;
        let tree = Self::open(path)?;
        // The service's umask must not restrict readers.
        fchmod(&tree.root, DIRECTORY_MODE)?;
        Ok(tree)
    }

    /// Opens a directory below it.
    pub(crate) fn open_subtree(&self, path: &str) -> io::Result<Self> {
        Ok(Self {
            root: self.open_beneath(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)?,
        })
    }

    /// Lists a directory below it. Names that are not UTF-8 are skipped.
    pub(crate) fn entries(&self, path: &str) -> io::Result<Vec<(String, FileType)>> {
        let directory =
            self.open_beneath(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
        let mut entries = Vec::new();
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            let Some(name) =
                entry.file_name().to_str().ok().filter(|name| *name != "." && *name != "..")
            else {
                continue;
            };
            let kind = match entry.file_type() {
                // Some file systems do not report the type here.
                FileType::Unknown => FileType::from_raw_mode(
                    statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode,
                ),
                kind => kind,
            };
            entries.push((name.to_owned(), kind));
        }
        Ok(entries)
    }

    /// Locks this directory exclusively, across processes. Dropping the result unlocks it.
    pub(crate) fn lock(&self) -> io::Result<OwnedFd> {
        // Opened again: copies of a descriptor share its lock.
        let own = self.open_beneath(".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
        flock(&own, FlockOperation::LockExclusive)?;
        Ok(own)
    }

    /// Deletes unfinished files of crashed processes. The caller must hold the lock.
    pub(crate) fn remove_temporary_files(&self) -> io::Result<()> {
        for entry in Dir::read_from(&self.root)? {
            let entry = entry?;
            if entry.file_name().to_bytes().starts_with(TEMPORARY_PREFIX.as_bytes()) {
                unlinkat(&self.root, entry.file_name(), AtFlags::empty())?;
            }
        }
        Ok(())
    }

    /// Makes a directory below it deletable: its creators may have removed permissions. Names that
    /// are not UTF-8 stay unchanged.
    pub(crate) fn unlock_directories(&self, path: &str) -> io::Result<()> {
        let mut pending = vec![path.to_owned()];
        while let Some(path) = pending.pop() {
            // A closed directory can be opened as a path only. A link that takes its name meanwhile
            // is not followed.
            let place =
                self.open_beneath(&path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
            let through = format!("/proc/self/fd/{}", place.as_raw_fd());
            fs::set_permissions(through, Permissions::from_mode(0o700))?;
            let entries =
                self.entries(&path)?.into_iter().filter(|(_, kind)| *kind == FileType::Directory);
            pending.extend(entries.map(|(name, _)| format!("{path}/{name}")));
        }
        Ok(())
    }

    /// Flushes writes to the disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        Ok(syncfs(&self.root)?)
    }

    /// Opens a regular file, without waiting for anything else of that name.
    pub(crate) fn open_file(&self, path: &str) -> io::Result<File> {
        let file = File::from(
            self.open_beneath(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK)?,
        );
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(file)
    }

    /// Creates a new file and its parent directories. Fails when the name exists.
    pub(crate) fn create_file(&self, path: &str) -> io::Result<File> {
        let (parent, name) = split_parent(path);
        let parent = self.ensure_directory(parent)?;
        create_file_in(&parent, name)
    }

    /// Creates a directory and its parents.
    pub(crate) fn ensure_directory(&self, path: &str) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match self.open_beneath(path, flags) {
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
            Ok(directory) => return Ok(directory),
        }
        let mut directory = self.open_beneath(".", flags)?;
        // Step by step from the last opened directory, so that depth needs no recursion.
        for name in path.split('/') {
            match mkdirat(&directory, name, DIRECTORY_MODE) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            let next = openat(&directory, name, flags | OFlags::NOFOLLOW, Mode::empty())?;
            fchmod(&next, DIRECTORY_MODE)?;
            directory = next;
        }
        Ok(directory)
    }

    /// Reads at most `limit` bytes from the beginning of a file.
    pub(crate) fn read(&self, path: &str, limit: u64) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        self.open_file(path)?.take(limit).read_to_end(&mut content)?;
        Ok(content)
    }

    /// Replaces a file atomically: readers see the old one or the new one. The temporary file is
    /// directly below this directory, which readers should not list.
    pub(crate) fn replace(&self, path: &str, content: &[u8]) -> io::Result<()> {
        let (parent, name) = split_parent(path);
        let parent = self.ensure_directory(parent)?;
        let temporary = format!("{TEMPORARY_PREFIX}{}", uuid::Uuid::now_v7().simple());
        let replaced = create_file_in(&self.root, OsStr::new(&temporary))
            .and_then(|mut file| file.write_all(content))
            .and_then(|()| Ok(renameat(&self.root, &temporary, &parent, name)?));
        if replaced.is_err() {
            // Report the first failure.
            let _ = unlinkat(&self.root, &temporary, AtFlags::empty());
        }
        replaced
    }

    fn open_beneath(&self, path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let path = if path.is_empty() { "." } else { path };
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        for _ in 0..MAX_ATTEMPTS {
            match openat2(self.root.as_fd(), path, flags, Mode::empty(), resolve) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                done => return done,
            }
        }
        Err(Errno::AGAIN)
    }
}

fn split_parent(path: &str) -> (&str, &OsStr) {
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    (parent, OsStr::new(name))
}

fn create_file_in(parent: &OwnedFd, name: &OsStr) -> io::Result<File> {
    // `O_EXCL` follows no link, so that nobody can prepare one.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(parent, name, flags, FILE_MODE)?;
    fchmod(&file, FILE_MODE)?;
    Ok(File::from(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_directories_are_unlocked_without_following_links() {
        let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let closed = root.path().join("scan/x");
        fs::create_dir_all(closed.join("y")).unwrap();
        std::os::unix::fs::symlink(outside.path(), closed.join("link")).unwrap();
        fs::set_permissions(outside.path(), Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(closed.join("y"), Permissions::from_mode(0o0)).unwrap();
        fs::set_permissions(&closed, Permissions::from_mode(0o0)).unwrap();
        Tree::open(root.path()).unwrap().unlock_directories("scan").unwrap();
        assert_eq!(
            (mode(&closed), mode(&closed.join("y")), mode(outside.path())),
            (0o700, 0o700, 0o755)
        );
    }
}

//! A directory tree that nothing leaves: every path is resolved by the kernel below a directory
//! descriptor (`openat2` with `RESOLVE_BENEATH` and `RESOLVE_NO_SYMLINKS`), so that no comparison
//! of path strings has to be right.

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

/// What files get: never executable, whatever an archive says.
const FILE: Mode = Mode::from_raw_mode(0o644);
/// What directories get: who reads the snapshot may be another user.
const DIRECTORY: Mode = Mode::from_raw_mode(0o755);
/// What files are called that are being written.
const WRITING: &str = ".writing-";
/// How often a resolution is repeated that the kernel gave up because something was renamed
/// meanwhile.
const ATTEMPTS: usize = 64;

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

    /// Makes a directory and opens it.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        mkdirat(CWD, path, DIRECTORY)?;
        let tree = Self::open(path)?;
        // The umask of the service takes nothing away from what others are to read.
        fchmod(&tree.root, DIRECTORY)?;
        Ok(tree)
    }

    /// Opens a directory in it.
    pub(crate) fn below(&self, path: &str) -> io::Result<Self> {
        Ok(Self { root: self.beneath(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)? })
    }

    /// What lies in a directory of it. Names that are not UTF-8 are left out.
    pub(crate) fn entries(&self, path: &str) -> io::Result<Vec<(String, FileType)>> {
        let directory = self.beneath(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
        let mut found = Vec::new();
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            let Some(name) =
                entry.file_name().to_str().ok().filter(|name| *name != "." && *name != "..")
            else {
                continue;
            };
            let kind = match entry.file_type() {
                // Not every file system says it here.
                FileType::Unknown => FileType::from_raw_mode(
                    statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode,
                ),
                kind => kind,
            };
            found.push((name.to_owned(), kind));
        }
        Ok(found)
    }

    /// Waits until nobody else, in this process or another, has this directory to itself. It is
    /// given back when what is returned is dropped.
    pub(crate) fn lock(&self) -> io::Result<OwnedFd> {
        // Opened anew: what shares an opened directory shares its lock.
        let own = self.beneath(".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
        flock(&own, FlockOperation::LockExclusive)?;
        Ok(own)
    }

    /// Removes what was being written into this directory by processes that died. To be called by
    /// who has locked it.
    pub(crate) fn clear(&self) -> io::Result<()> {
        for entry in Dir::read_from(&self.root)? {
            let entry = entry?;
            if entry.file_name().to_bytes().starts_with(WRITING.as_bytes()) {
                unlinkat(&self.root, entry.file_name(), AtFlags::empty())?;
            }
        }
        Ok(())
    }

    /// Lets this user delete a directory in it: whoever made directories there may have closed
    /// them. Those whose names are not UTF-8 stay as they are.
    pub(crate) fn unlock_directories(&self, path: &str) -> io::Result<()> {
        let mut left = vec![path.to_owned()];
        while let Some(path) = left.pop() {
            // One that is closed can be had as a place only, and no link that takes its name
            // meanwhile is followed.
            let place = self.beneath(&path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
            let through = format!("/proc/self/fd/{}", place.as_raw_fd());
            fs::set_permissions(through, Permissions::from_mode(0o700))?;
            let entries =
                self.entries(&path)?.into_iter().filter(|(_, kind)| *kind == FileType::Directory);
            left.extend(entries.map(|(name, _)| format!("{path}/{name}")));
        }
        Ok(())
    }

    /// Has what was written reach the disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        Ok(syncfs(&self.root)?)
    }

    /// Opens a regular file; whatever else has the name is not waited for.
    pub(crate) fn open_file(&self, path: &str) -> io::Result<File> {
        let file =
            File::from(self.beneath(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK)?);
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(file)
    }

    /// Makes a new file, with the directories on the way to it. Fails when anything has its name.
    pub(crate) fn create_file(&self, path: &str) -> io::Result<File> {
        let (parent, name) = split(path);
        let parent = self.ensure_directory(parent)?;
        create_in(&parent, name)
    }

    /// Makes a directory, with those on the way to it.
    pub(crate) fn ensure_directory(&self, path: &str) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match self.beneath(path, flags) {
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
            Ok(directory) => return Ok(directory),
        }
        let mut directory = self.beneath(".", flags)?;
        // Step by step from what was just opened, so that depth costs no recursion.
        for name in path.split('/') {
            match mkdirat(&directory, name, DIRECTORY) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            let next = openat(&directory, name, flags | OFlags::NOFOLLOW, Mode::empty())?;
            fchmod(&next, DIRECTORY)?;
            directory = next;
        }
        Ok(directory)
    }

    /// The beginning of a file: at most `limit` bytes.
    pub(crate) fn read(&self, path: &str, limit: u64) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        self.open_file(path)?.take(limit).read_to_end(&mut content)?;
        Ok(content)
    }

    /// Replaces a file as a whole: readers see the old one or the new one. It is written directly
    /// below this directory, which should be none that readers look into.
    pub(crate) fn replace(&self, path: &str, content: &[u8]) -> io::Result<()> {
        let (parent, name) = split(path);
        let parent = self.ensure_directory(parent)?;
        let temporary = format!("{WRITING}{}", uuid::Uuid::now_v7().simple());
        let filled = create_in(&self.root, OsStr::new(&temporary))
            .and_then(|mut file| file.write_all(content))
            .and_then(|()| Ok(renameat(&self.root, &temporary, &parent, name)?));
        if filled.is_err() {
            // The first failure is the one worth telling.
            let _ = unlinkat(&self.root, &temporary, AtFlags::empty());
        }
        filled
    }

    fn beneath(&self, path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let path = if path.is_empty() { "." } else { path };
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        for _ in 0..ATTEMPTS {
            match openat2(self.root.as_fd(), path, flags, Mode::empty(), resolve) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                done => return done,
            }
        }
        Err(Errno::AGAIN)
    }
}

fn split(path: &str) -> (&str, &OsStr) {
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    (parent, OsStr::new(name))
}

fn create_in(parent: &OwnedFd, name: &OsStr) -> io::Result<File> {
    // `O_EXCL` follows no link, so that nobody can prepare one.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(parent, name, flags, FILE)?;
    fchmod(&file, FILE)?;
    Ok(File::from(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_that_were_closed_can_be_deleted_and_links_lead_nowhere() {
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

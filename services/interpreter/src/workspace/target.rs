//! Resolves the symbolic links of a path.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{PathError, RelativePath, Workspace, hidden, open_beneath, path_error};

/// Maximum number of symbolic links that are followed at the end of a path.
const MAX_LINKS: usize = 16;

impl Workspace {
    /// The target of `path` without symbolic links, relative to the root. For a missing file it is
    /// the path where the file would be created. Unless `follow`, a link at the very end is not
    /// resolved.
    ///
    /// It reflects the current tree, which is good for policy decisions but not for opening
    /// anything.
    pub(crate) fn resolve_links(
        &self,
        path: &RelativePath,
        follow: bool,
    ) -> Result<RelativePath, PathError> {
        let mut target = path.clone();
        let mut missing = PathBuf::new();
        let mut links = 0;
        loop {
            let Some((parent, name)) = target.split() else {
                return self.existing(&target, path).map(|found| join(&found, &missing));
            };
            if missing.as_os_str().is_empty() && !follow {
                missing = PathBuf::from(name);
                target = parent;
                continue;
            }
            match self.existing(&target, path) {
                Ok(found) => return Ok(join(&found, &missing)),
                Err(PathError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
            // It does not exist: it is a dangling link, or there is no such entry.
            match self.read_link(&parent, name.as_ref()) {
                Ok(link) if links < MAX_LINKS && !link.is_absolute() => {
                    links += 1;
                    target = parent.join(link.as_os_str());
                }
                Ok(_) => return Err(PathError::Outside { path: path.display() }),
                Err(_) => {
                    missing = if missing.as_os_str().is_empty() {
                        name.into()
                    } else {
                        Path::new(name).join(&missing)
                    };
                    target = parent;
                }
            }
        }
    }

    /// The path of an existing target.
    fn existing(
        &self,
        target: &RelativePath,
        requested: &RelativePath,
    ) -> Result<RelativePath, PathError> {
        let failed = |error| path_error(requested, error);
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let root = self.inner.directory.as_fd();
        let handle =
            open_beneath(root, target.as_path(), flags, Mode::empty(), ResolveFlags::empty())
                .map_err(failed)?;
        let found = hidden::current_path(handle.as_fd()).map_err(failed)?;
        let root = hidden::current_path(root).map_err(failed)?;
        match found.strip_prefix(root) {
            Ok(below) if below.as_os_str().is_empty() => Ok(RelativePath::root()),
            Ok(below) => Ok(RelativePath(below.to_owned())),
            Err(_) => Err(PathError::Outside { path: requested.display() }),
        }
    }

    fn read_link(&self, parent: &RelativePath, name: &Path) -> rustix::io::Result<PathBuf> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = self.inner.directory.as_fd();
        let directory =
            open_beneath(root, parent.as_path(), flags, Mode::empty(), ResolveFlags::empty())?;
        let link = rustix::fs::readlinkat(&directory, name, Vec::new())?;
        if link.as_bytes().is_empty() {
            return Err(Errno::NOENT);
        }
        Ok(PathBuf::from(OsString::from_vec(link.into_bytes())))
    }
}

fn join(found: &RelativePath, missing: &Path) -> RelativePath {
    if missing.as_os_str().is_empty() { found.clone() } else { found.join(missing.as_os_str()) }
}

//! Where a path leads.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{PathError, RelativePath, Workspace, beneath, hidden, path_error};

/// How many symbolic links at the end of a path are followed.
const MAX_LINKS: usize = 16;

impl Workspace {
    /// The path without symbolic links that `path` leads to, relative to the root. What does not
    /// exist yet is where it would be made. Unless `follow`, a link at the very end stands for
    /// itself.
    ///
    /// It is what the tree looks like now, good for a policy to look at and not for opening
    /// anything.
    pub(crate) fn leads_to(
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
            // It does not exist: it is a link to what does not, or nothing is called so.
            match self.read_link(&parent, name.as_ref()) {
                Ok(link) if links < MAX_LINKS && !link.is_absolute() => {
                    links += 1;
                    target = parent.join(link.as_os_str());
                }
                Ok(_) => return Err(PathError::Outside { path: path.shown() }),
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

    /// Where something that exists lies.
    fn existing(
        &self,
        target: &RelativePath,
        asked: &RelativePath,
    ) -> Result<RelativePath, PathError> {
        let failed = |error| path_error(asked, error);
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let root = self.inner.directory.as_fd();
        let handle = beneath(root, target.as_path(), flags, Mode::empty(), ResolveFlags::empty())
            .map_err(failed)?;
        let found = hidden::current_path(handle.as_fd()).map_err(failed)?;
        let root = hidden::current_path(root).map_err(failed)?;
        match found.strip_prefix(root) {
            Ok(below) if below.as_os_str().is_empty() => Ok(RelativePath::root()),
            Ok(below) => Ok(RelativePath(below.to_owned())),
            Err(_) => Err(PathError::Outside { path: asked.shown() }),
        }
    }

    fn read_link(&self, parent: &RelativePath, name: &Path) -> rustix::io::Result<PathBuf> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = self.inner.directory.as_fd();
        let directory =
            beneath(root, parent.as_path(), flags, Mode::empty(), ResolveFlags::empty())?;
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

//! Opens the workspaces of tasks, and binds tools to them.

mod cleanup;

use std::{
    fs::DirBuilder,
    io::ErrorKind,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, symlink},
    },
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{Mode, OFlags, ResolveFlags},
    io::Errno,
};
use uuid::Uuid;

use crate::{
    blocking::blocking,
    command::{CommandLimits, CommandSandbox},
    tools::{Egress, Policy, Toolbox},
    workspace::{
        HiddenPath, Identity, OpenError, Workspace, find_enclosing, hidden_below, open_beneath,
    },
};

/// File systems of the kernel: they expose other processes' memory and the machine's settings.
const KERNEL_DIRECTORIES: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Magic numbers of the kernel's file systems, wherever they are mounted: `proc` and `sysfs` (see
/// statfs(2)).
const KERNEL_FILE_SYSTEMS: [i64; 2] = [0x9fa0, 0x6265_6572];

/// Name of the entry that identifies a folder of tasks' own workspaces, wherever it is mounted. It
/// is a symbolic link to an id, because links are created atomically, even by concurrent processes.
const STORAGE_ID: &str = ".storage";

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The reason why a task gets no workspace.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the workspace {} does not exist or cannot be read on the interpreter's host", .0.display())]
    Missing(PathBuf, #[source] std::io::Error),
    #[error(
        "the workspace {} is outside of the directories that this interpreter may use; the operator grants them with \
         CONSTRUCT_INTERPRETER_WORKSPACE_ROOTS", .0.display()
    )]
    NotGranted(PathBuf),
    #[error(
        "the workspace {} is in a directory that is reserved for the service itself or for the kernel (/proc, /sys, \
         /dev)", .0.display()
    )]
    Reserved(PathBuf),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("failed to create the task's own workspace")]
    Create(#[source] std::io::Error),
    #[error("failed to hide {} from tasks", .0.display())]
    Hide(PathBuf, #[source] std::io::Error),
}

/// Opens workspaces: tasks' own directories, and directories that the operator grants.
#[derive(Debug)]
pub(crate) struct Workspaces {
    directories: Arc<AllowedDirectories>,
    /// Id of the storage of tasks' own directories; empty if it is unknown.
    storage: String,
    policy: Policy,
    egress: Egress,
    sandbox: CommandSandbox,
}

impl Workspaces {
    /// Allows `roots`, and `own`, which is in the service's data directory. The data directory and
    /// the hidden paths of the policy cannot be workspaces, and are hidden inside of workspaces.
    pub(crate) fn new(
        roots: &[PathBuf],
        own: PathBuf,
        policy: Policy,
        egress: Egress,
        sandbox: CommandSandbox,
    ) -> Result<Self, Error> {
        let directories =
            Arc::new(AllowedDirectories::new(roots, own, &policy.commands.hidden_paths)?);
        let storage = storage(&directories.own).unwrap_or_else(|error| {
            let folder = directories.own.display();
            tracing::warn!(%folder, %error, "failed to record the storage id: scripts may be resumed on another storage without their files");
            String::new()
        });
        Ok(Self { directories, storage, policy, egress, sandbox })
    }

    /// The storage id of a task's files, for journals: the same wherever the folder of tasks' own
    /// workspaces is mounted. Empty if it is unknown, and for a directory that the task named,
    /// whose storage is the operator's responsibility.
    pub(crate) fn storage(&self, workspace: &str) -> &str {
        if workspace.is_empty() { &self.storage } else { "" }
    }

    /// The tools of a task, bound to `workspace`, or to the task's own directory if that is empty.
    /// `limits` apply to its commands.
    pub(crate) async fn open(
        &self,
        workspace: &str,
        task: &str,
        limits: &CommandLimits,
    ) -> Result<Toolbox, Error> {
        let workspace = self.workspace(workspace, task).await?;
        let mut policy = self.policy.clone();
        policy.commands.limits = limits.clone();
        Ok(Toolbox::new(workspace, policy, self.egress.clone(), self.sandbox.clone()))
    }

    /// The workspace without tools.
    pub(crate) async fn workspace(&self, workspace: &str, task: &str) -> Result<Workspace, Error> {
        let directories = Arc::clone(&self.directories);
        let (workspace, task) = (PathBuf::from(workspace), task.to_owned());
        let opening = blocking(move || {
            if workspace.as_os_str().is_empty() {
                directories.own(&task)
            } else {
                directories.granted(&workspace)
            }
        });
        opening
            .await
            .ok_or_else(|| Error::Create(std::io::Error::other("the thread that opens it ended")))?
    }

    /// Describes the confinement of commands.
    pub(crate) fn commands(&self) -> String {
        self.sandbox.describe()
    }
}

/// A directory that the operator grants, with everything below it.
#[derive(Debug)]
struct Root {
    /// Without symbolic links.
    path: PathBuf,
    directory: OwnedFd,
}

/// The directories that may contain workspaces. Every decision is about open directories, so that
/// they cannot be swapped after it.
#[derive(Debug)]
struct AllowedDirectories {
    roots: Vec<Root>,
    /// The folder of tasks' own workspaces.
    own: PathBuf,
    /// Hidden paths from the configuration, and the files they referred to at start.
    hidden_paths: Vec<PathBuf>,
    hidden: Vec<Arc<HiddenPath>>,
    /// No workspace may be one of these or inside of one.
    reserved: Vec<Identity>,
}

impl AllowedDirectories {
    fn new(roots: &[PathBuf], own: PathBuf, hidden: &[PathBuf]) -> Result<Self, Error> {
        create_private(&own).map_err(Error::Create)?;
        let data =
            own.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let hidden_paths: Vec<PathBuf> =
            std::iter::once(data.to_owned()).chain(hidden.iter().cloned()).collect();
        let hidden = without_nested(hidden_paths.iter().map(PathBuf::as_path))?;
        let kernel =
            KERNEL_DIRECTORIES.iter().filter_map(|path| HiddenPath::open(Path::new(path)).ok());
        let reserved = kernel
            .map(|found| found.identity())
            .chain(hidden.iter().map(|one| one.identity()))
            .collect();
        let mut directories = Self { roots: Vec::new(), own, hidden_paths, hidden, reserved };
        for root in roots {
            let missing = |error| Error::Missing(root.clone(), error);
            let path = root.canonicalize().map_err(missing)?;
            let directory =
                rustix::fs::open(&path, DIRECTORY, Mode::empty()).map_err(|e| missing(e.into()))?;
            directories.reject_reserved(&path, &directory)?;
            directories.roots.push(Root { path, directory });
        }
        Ok(directories)
    }

    /// A directory that the operator grants.
    fn granted(&self, named: &Path) -> Result<Workspace, Error> {
        let missing = |error| Error::Missing(named.to_owned(), error);
        let path = named.canonicalize().map_err(missing)?;
        let below = |root: &Root| path.strip_prefix(&root.path).map(Path::to_owned).ok();
        let Some((root, below)) = self.roots.iter().find_map(|root| Some((root, below(root)?)))
        else {
            return Err(Error::NotGranted(path));
        };
        let below = if below.as_os_str().is_empty() { Path::new(".") } else { &below };
        // The path has no symbolic links now; new ones are not followed.
        let directory = open_beneath(
            root.directory.as_fd(),
            below,
            DIRECTORY,
            Mode::empty(),
            ResolveFlags::NO_SYMLINKS,
        )
        .map_err(|e| missing(e.into()))?;
        self.reject_reserved(&path, &directory)?;
        let hidden = hidden_below(directory.as_fd(), &self.current_hidden())
            .map_err(|e| missing(e.into()))?;
        Ok(Workspace::from_directory(named, directory, hidden)?)
    }

    /// The hidden paths, including those created or replaced since the start: rotating a key
    /// replaces its file.
    fn current_hidden(&self) -> Vec<Arc<HiddenPath>> {
        let mut hidden = self.hidden.clone();
        for found in self.hidden_paths.iter().filter_map(|path| HiddenPath::open(path).ok()) {
            let known: Vec<Identity> = hidden.iter().map(|one| one.identity()).collect();
            if !known.contains(&found.identity()) && !found.is_inside(&known).unwrap_or(false) {
                hidden.push(Arc::new(found));
            }
        }
        hidden
    }

    /// The task's own directory, created if it is missing.
    fn own(&self, task: &str) -> Result<Workspace, Error> {
        let name = Path::new(task);
        if !matches!(name.components().collect::<Vec<_>>()[..], [Component::Normal(_)]) {
            return Err(Error::Create(ErrorKind::InvalidInput.into()));
        }
        create_private(&self.own).map_err(Error::Create)?;
        let directory = rustix::fs::open(&self.own, DIRECTORY, Mode::empty())
            .and_then(|own| {
                match rustix::fs::mkdirat(&own, name, Mode::RWXU) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => return Err(error),
                }
                open_beneath(own.as_fd(), name, DIRECTORY, Mode::empty(), ResolveFlags::NO_SYMLINKS)
            })
            .map_err(|e| Error::Create(e.into()))?;
        Ok(Workspace::from_directory(&self.own.join(name), directory, Vec::new())?)
    }

    fn reject_reserved(&self, path: &Path, directory: &OwnedFd) -> Result<(), Error> {
        let missing = |error: Errno| Error::Missing(path.to_owned(), error.into());
        let kind = rustix::fs::fstatfs(directory).map_err(missing)?.f_type;
        let reserved =
            find_enclosing(directory.as_fd(), &self.reserved).map_err(missing)?.is_some();
        if reserved || KERNEL_FILE_SYSTEMS.contains(&kind) {
            return Err(Error::Reserved(path.to_owned()));
        }
        Ok(())
    }
}

/// Creates a directory that only the service's user may enter.
fn create_private(path: &Path) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// The storage id of a folder, created by the first process that needs it.
fn storage(folder: &Path) -> std::io::Result<String> {
    let link = folder.join(STORAGE_ID);
    let id = match std::fs::read_link(&link) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            match symlink(Uuid::now_v7().to_string(), &link) {
                Ok(()) => {}
                // Another process was faster; its id is used.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
            std::fs::read_link(&link)?
        }
        read => read?,
    };
    Ok(id.to_string_lossy().into_owned())
}

/// Opens the paths to hide, without those inside of other hidden paths.
fn without_nested<'a>(
    paths: impl Iterator<Item = &'a Path>,
) -> Result<Vec<Arc<HiddenPath>>, Error> {
    let mut all: Vec<(PathBuf, HiddenPath)> = Vec::new();
    for path in paths {
        match HiddenPath::open(path) {
            Ok(found) if all.iter().any(|(_, known)| known.identity() == found.identity()) => {}
            Ok(found) => all.push((path.to_owned(), found)),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), "a path to hide does not exist; tasks that start before it is created may see it");
            }
            Err(error) => return Err(Error::Hide(path.to_owned(), error)),
        }
    }
    let identities: Vec<Identity> = all.iter().map(|(_, found)| found.identity()).collect();
    let mut outermost = Vec::new();
    for (path, found) in all {
        let others: Vec<Identity> =
            identities.iter().copied().filter(|one| *one != found.identity()).collect();
        if !found.is_inside(&others).map_err(|e| Error::Hide(path, e.into()))? {
            outermost.push(Arc::new(found));
        }
    }
    Ok(outermost)
}

#[cfg(test)]
mod tests;

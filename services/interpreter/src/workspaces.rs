//! Which directories tasks may work in, and the tools bound to each.

mod gone;

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
    workspace::{Hidden, Identity, OpenError, Workspace, beneath, enclosing, hidden_below},
};

/// Where the kernel shows itself: files there are other processes' memory and the machine's
/// settings.
const KERNEL: [&str; 3] = ["/proc", "/sys", "/dev"];

/// File systems of the kernel, wherever they are mounted: `proc` and `sysfs` (see statfs(2)).
const KERNEL_FILE_SYSTEMS: [i64; 2] = [0x9fa0, 0x6265_6572];

/// Where a folder of tasks' own workspaces says which it is, wherever it is mounted: a symbolic
/// link to an id, because a link is made whole or not at all, also by two processes at once.
const STORAGE: &str = ".storage";

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Why a task gets no workspace.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the workspace {} does not exist or cannot be read on the interpreter's machine", .0.display())]
    Missing(PathBuf, #[source] std::io::Error),
    #[error(
        "the workspace {} lies outside of the directories this interpreter may use; its operator grants them with \
         CONSTRUCT_INTERPRETER_WORKSPACE_ROOTS", .0.display()
    )]
    NotGranted(PathBuf),
    #[error(
        "the workspace {} is or lies in a directory of the service itself or of the kernel (/proc, /sys, /dev), where \
         no task may work", .0.display()
    )]
    Reserved(PathBuf),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("the task's own workspace cannot be made")]
    Make(#[source] std::io::Error),
    #[error("{}, which no task may see, cannot be found out about", .0.display())]
    Hide(PathBuf, #[source] std::io::Error),
}

/// Opens workspaces. Nothing but tasks' own directories can be opened unless the operator grants
/// it.
#[derive(Debug)]
pub(crate) struct Workspaces {
    places: Arc<Places>,
    /// Which storage tasks' own directories lie on; empty when that is not known.
    storage: String,
    policy: Policy,
    egress: Egress,
    sandbox: CommandSandbox,
}

impl Workspaces {
    /// Tasks may work in `roots`, and in `own`, which lies in the service's data directory. That
    /// directory and the hidden paths of the policy are no workspaces, and not seen in one.
    pub(crate) fn new(
        roots: &[PathBuf],
        own: PathBuf,
        policy: Policy,
        egress: Egress,
        sandbox: CommandSandbox,
    ) -> Result<Self, Error> {
        let places = Arc::new(Places::new(roots, own, &policy.commands.hidden_paths)?);
        let storage = storage(&places.own).unwrap_or_else(|error| {
            let folder = places.own.display();
            tracing::warn!(%folder, %error, "it cannot be kept which storage this is: scripts may go on where their files are not");
            String::new()
        });
        Ok(Self { places, storage, policy, egress, sandbox })
    }

    /// Which storage a task has its files on, as journals keep it: the same wherever the folder of
    /// tasks' own workspaces is mounted. Empty when that is not known, and for a directory that the
    /// task named: what lies there is its operator's business.
    pub(crate) fn storage(&self, workspace: &str) -> &str {
        if workspace.is_empty() { &self.storage } else { "" }
    }

    /// The tools of a task, bound to `workspace`, or to a directory of the task's own when that is
    /// empty. Its commands may use what `limits` says.
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

    /// The workspace alone.
    pub(crate) async fn workspace(&self, workspace: &str, task: &str) -> Result<Workspace, Error> {
        let places = Arc::clone(&self.places);
        let (workspace, task) = (PathBuf::from(workspace), task.to_owned());
        let opening = blocking(move || {
            if workspace.as_os_str().is_empty() {
                places.own(&task)
            } else {
                places.granted(&workspace)
            }
        });
        opening
            .await
            .ok_or_else(|| Error::Make(std::io::Error::other("the thread that opens it ended")))?
    }

    /// How commands are confined, in words.
    pub(crate) fn commands(&self) -> String {
        self.sandbox.describe()
    }
}

/// A directory the operator grants, with everything below it.
#[derive(Debug)]
struct Root {
    /// Without symbolic links.
    path: PathBuf,
    directory: OwnedFd,
}

/// Where workspaces may lie. Every decision is about open directories, so that nobody can swap one
/// after it.
#[derive(Debug)]
struct Places {
    roots: Vec<Root>,
    /// Where tasks without a workspace get one of their own.
    own: PathBuf,
    /// What is hidden, by the names it had at the start, and those found under them then.
    hidden_paths: Vec<PathBuf>,
    hidden: Vec<Arc<Hidden>>,
    /// No workspace is one of these or lies in one.
    reserved: Vec<Identity>,
}

impl Places {
    fn new(roots: &[PathBuf], own: PathBuf, hidden: &[PathBuf]) -> Result<Self, Error> {
        make_private(&own).map_err(Error::Make)?;
        let data =
            own.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let hidden_paths: Vec<PathBuf> =
            std::iter::once(data.to_owned()).chain(hidden.iter().cloned()).collect();
        let hidden = without_nested(hidden_paths.iter().map(PathBuf::as_path))?;
        let kernel = KERNEL.iter().filter_map(|path| Hidden::open(Path::new(path)).ok());
        let reserved = kernel
            .map(|found| found.identity())
            .chain(hidden.iter().map(|one| one.identity()))
            .collect();
        let mut places = Self { roots: Vec::new(), own, hidden_paths, hidden, reserved };
        for root in roots {
            let missing = |error| Error::Missing(root.clone(), error);
            let path = root.canonicalize().map_err(missing)?;
            let directory =
                rustix::fs::open(&path, DIRECTORY, Mode::empty()).map_err(|e| missing(e.into()))?;
            places.refuse_reserved(&path, &directory)?;
            places.roots.push(Root { path, directory });
        }
        Ok(places)
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
        // The path has no symbolic links now; one that appears in it meanwhile is not followed.
        let directory = beneath(
            root.directory.as_fd(),
            below,
            DIRECTORY,
            Mode::empty(),
            ResolveFlags::NO_SYMLINKS,
        )
        .map_err(|e| missing(e.into()))?;
        self.refuse_reserved(&path, &directory)?;
        let hidden =
            hidden_below(directory.as_fd(), &self.hidden_now()).map_err(|e| missing(e.into()))?;
        Ok(Workspace::of(named, directory, hidden)?)
    }

    /// What is hidden, with what was made or replaced since the start: a key file is replaced when
    /// its key is.
    fn hidden_now(&self) -> Vec<Arc<Hidden>> {
        let mut hidden = self.hidden.clone();
        for found in self.hidden_paths.iter().filter_map(|path| Hidden::open(path).ok()) {
            let known: Vec<Identity> = hidden.iter().map(|one| one.identity()).collect();
            if !known.contains(&found.identity()) && !found.lies_in(&known).unwrap_or(false) {
                hidden.push(Arc::new(found));
            }
        }
        hidden
    }

    /// The task's own directory, made when it is missing.
    fn own(&self, task: &str) -> Result<Workspace, Error> {
        let name = Path::new(task);
        if !matches!(name.components().collect::<Vec<_>>()[..], [Component::Normal(_)]) {
            return Err(Error::Make(ErrorKind::InvalidInput.into()));
        }
        make_private(&self.own).map_err(Error::Make)?;
        let directory = rustix::fs::open(&self.own, DIRECTORY, Mode::empty())
            .and_then(|own| {
                match rustix::fs::mkdirat(&own, name, Mode::RWXU) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => return Err(error),
                }
                beneath(own.as_fd(), name, DIRECTORY, Mode::empty(), ResolveFlags::NO_SYMLINKS)
            })
            .map_err(|e| Error::Make(e.into()))?;
        Ok(Workspace::of(&self.own.join(name), directory, Vec::new())?)
    }

    fn refuse_reserved(&self, path: &Path, directory: &OwnedFd) -> Result<(), Error> {
        let missing = |error: Errno| Error::Missing(path.to_owned(), error.into());
        let kind = rustix::fs::fstatfs(directory).map_err(missing)?.f_type;
        let reserved = enclosing(directory.as_fd(), &self.reserved).map_err(missing)?.is_some();
        if reserved || KERNEL_FILE_SYSTEMS.contains(&kind) {
            return Err(Error::Reserved(path.to_owned()));
        }
        Ok(())
    }
}

/// Makes a directory that only the service's user may enter.
fn make_private(path: &Path) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Which storage a folder lies on: an id that whoever comes first leaves there.
fn storage(folder: &Path) -> std::io::Result<String> {
    let link = folder.join(STORAGE);
    let id = match std::fs::read_link(&link) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            match symlink(Uuid::now_v7().to_string(), &link) {
                Ok(()) => {}
                // Another process was faster, and it is its id that holds.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
            std::fs::read_link(&link)?
        }
        read => read?,
    };
    Ok(id.to_string_lossy().into_owned())
}

/// Takes hold of what is to be hidden, without what lies in something that is hidden anyway.
fn without_nested<'a>(paths: impl Iterator<Item = &'a Path>) -> Result<Vec<Arc<Hidden>>, Error> {
    let mut all: Vec<(PathBuf, Hidden)> = Vec::new();
    for path in paths {
        match Hidden::open(path) {
            Ok(found) if all.iter().any(|(_, known)| known.identity() == found.identity()) => {}
            Ok(found) => all.push((path.to_owned(), found)),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), "this path does not exist; tasks that start before it does may see it");
            }
            Err(error) => return Err(Error::Hide(path.to_owned(), error)),
        }
    }
    let identities: Vec<Identity> = all.iter().map(|(_, found)| found.identity()).collect();
    let mut outermost = Vec::new();
    for (path, found) in all {
        let others: Vec<Identity> =
            identities.iter().copied().filter(|one| *one != found.identity()).collect();
        if !found.lies_in(&others).map_err(|e| Error::Hide(path, e.into()))? {
            outermost.push(Arc::new(found));
        }
    }
    Ok(outermost)
}

#[cfg(test)]
mod tests;

//! Which directories tasks may work in, and the tools bound to each.

use std::path::{Path, PathBuf};

use crate::{
    command::CommandSandbox,
    tools::{Egress, Policy, Toolbox},
    workspace::{OpenError, Workspace},
};

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
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("the task's own workspace cannot be made")]
    Make(#[source] std::io::Error),
}

/// Opens workspaces. Nothing but tasks' own directories can be opened unless the operator grants it.
#[derive(Debug)]
pub(crate) struct Workspaces {
    /// Granted directories, with symbolic links resolved.
    roots: Vec<PathBuf>,
    /// Where tasks without a workspace get one of their own.
    own: PathBuf,
    policy: Policy,
    egress: Egress,
    sandbox: CommandSandbox,
}

impl Workspaces {
    pub(crate) fn new(
        roots: &[PathBuf],
        own: PathBuf,
        policy: Policy,
        egress: Egress,
        sandbox: CommandSandbox,
    ) -> std::io::Result<Self> {
        let roots = roots.iter().map(|root| root.canonicalize()).collect::<Result<_, _>>()?;
        Ok(Self { roots, own, policy, egress, sandbox })
    }

    /// The tools of a task, bound to `workspace`, or to a directory of the task's own when that is empty.
    pub(crate) async fn open(&self, workspace: &str, task: &str) -> Result<Toolbox, Error> {
        let path = self.locate(workspace, task).await?;
        let workspace = Workspace::open(&path)?;
        Ok(Toolbox::new(workspace, self.policy.clone(), self.egress.clone(), self.sandbox.clone()))
    }

    /// Where the workspace lies, if it may be used.
    pub(crate) async fn locate(&self, workspace: &str, task: &str) -> Result<PathBuf, Error> {
        if workspace.is_empty() {
            let path = self.own.join(task);
            tokio::fs::create_dir_all(&path).await.map_err(Error::Make)?;
            return Ok(path);
        }
        let named = Path::new(workspace);
        let path = tokio::fs::canonicalize(named).await.map_err(|error| Error::Missing(named.to_owned(), error))?;
        if self.roots.iter().any(|root| path.starts_with(root)) { Ok(path) } else { Err(Error::NotGranted(path)) }
    }

    /// How commands are confined, in words.
    pub(crate) fn commands(&self) -> String {
        self.sandbox.describe()
    }
}

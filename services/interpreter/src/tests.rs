//! Hostile and random scripts against the sandbox with the product's own tools, commands and files.

mod data;
pub(crate) mod fuzz;
mod hostile;
mod limits;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use construct_bus::files::{self, Sha256};
use construct_domain::{FileId, OrganizationId};
use construct_proto::mesh::v1::AttachedFile;
use futures::future::BoxFuture;
use serde_json::Value;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::command::{CommandPolicy, CommandSandbox};
use crate::modules;
use crate::sandbox::{
    self, Engine, EngineConfig, Host, HostCall, IMPORT, Limits, Outcome, ToolTable,
};
use crate::tools::{Attachments, CallContext, Egress, Policy, Toolbox};
use crate::workspace::Workspace;

/// The content of files that no script may read.
const CANARY: &str = "canary-5f1d0c";

/// The content of the file attached to every workspace here.
const ATTACHED: &str = "attached text";

/// Stores a content where `files::Store` finds it in this folder.
pub(crate) fn store_file(
    folder: &Path,
    organization: OrganizationId,
    name: &str,
    content: &[u8],
) -> AttachedFile {
    let sha256 = Sha256::digest(content).to_string();
    let (first, rest) = sha256.split_at(2);
    let path = folder.join("files").join(organization.to_string()).join(first);
    std::fs::create_dir_all(&path).expect("created");
    std::fs::write(path.join(rest), content).expect("written");
    let size = i64::try_from(content.len()).expect("small");
    let id = FileId::from_uuid(Uuid::now_v7()).to_string();
    AttachedFile { id, name: name.to_owned(), media_type: "text/plain".to_owned(), sha256, size }
}

/// The engine of all tests. It has few instances, so that the memory they keep is small compared to
/// a leak.
fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| {
        let executable = std::env::current_exe().expect("the path of this executable");
        let target = executable.ancestors().nth(3).expect("cargo's target directory");
        let config = EngineConfig { instances: 12, ..EngineConfig::default() };
        Engine::new(&target.join("tmp").join("sandbox-cache"), config).expect("an engine")
    })
}

/// A workspace with the product's tools, and a directory beside it that scripts must not reach.
struct Bench {
    directory: TempDir,
    toolbox: Toolbox,
    /// The file that its scripts may save.
    attached: AttachedFile,
    table: ToolTable,
    limits: Limits,
}

impl Bench {
    fn new(policy: Policy, egress: Egress, commands: CommandSandbox) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        for name in ["work", "outside"] {
            std::fs::create_dir(directory.path().join(name)).expect("created");
        }
        let workspace = Workspace::open(directory.path().join("work")).expect("a workspace");
        let blobs = directory.path().join("blobs");
        let attached = store_file(&blobs, OrganizationId::LOCAL, "a.txt", ATTACHED.as_bytes());
        let store = files::Store::open(&blobs).expect("a folder");
        let attachments =
            Attachments::new(store, OrganizationId::LOCAL, std::slice::from_ref(&attached));
        let toolbox =
            Toolbox::new(workspace, policy, egress, commands).with_attachments(attachments);
        let limits = Limits {
            cpu: Duration::from_secs(10),
            wall: Duration::from_secs(60),
            ..Limits::default()
        };
        let bench = Self { directory, toolbox, attached, table: crate::tool_table(), limits };
        std::fs::write(bench.outside("secret"), CANARY).expect("written");
        std::fs::write(bench.work("inside.txt"), "inside").expect("written");
        bench
    }

    /// A bench whose tools can only work on files.
    fn with_files() -> Self {
        let egress = Egress::new(&[]).expect("an HTTP client");
        Self::new(Policy::default(), egress, CommandSandbox::unavailable("a test"))
    }

    /// A bench with confined commands; `None` if the machine offers no confinement.
    async fn with_commands(policy: CommandPolicy) -> Option<Self> {
        let commands = crate::command::tests::sandbox().await;
        if !commands.is_available() {
            return None;
        }
        let policy = Policy { commands: policy, ..Policy::default() };
        Some(Self::new(policy, Egress::new(&[]).expect("an HTTP client"), commands))
    }

    fn work(&self, name: &str) -> PathBuf {
        self.directory.path().join("work").join(name)
    }

    fn outside(&self, name: &str) -> PathBuf {
        self.directory.path().join("outside").join(name)
    }

    async fn run(&self, script: &str) -> Outcome {
        self.run_within(script, &self.limits).await
    }

    async fn run_within(&self, script: &str, limits: &Limits) -> Outcome {
        engine().run(script, self, limits, CancellationToken::new()).await
    }

    async fn answer(&self, call: HostCall) -> Result<Value, sandbox::ToolError> {
        if call.name == IMPORT {
            return modules::read(&self.toolbox, &call.args).await;
        }
        let result = self.toolbox.call(&call.name, call.args, &CallContext::default()).await;
        result.map_err(|error| sandbox::ToolError {
            details: error.details,
            ..sandbox::ToolError::new(error.name, error.message)
        })
    }
}

impl Host for Bench {
    fn declare(&self) -> &ToolTable {
        &self.table
    }

    fn call<'a>(&'a self, call: HostCall) -> BoxFuture<'a, Result<Value, sandbox::ToolError>> {
        Box::pin(self.answer(call))
    }

    fn now(&self) -> jiff::Timestamp {
        jiff::Timestamp::UNIX_EPOCH
    }

    fn seed(&self) -> [u8; 32] {
        [7; 32]
    }
}

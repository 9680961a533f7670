//! An interpreter process that can be killed within a test.

use std::{
    path::Path,
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use construct_bus::{Bus, ConnectOptions};
use construct_proto::mesh::v1::CodeExecute;
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
};

use super::{Surroundings, executor, network_and_commands_policy, tiers, wait_for};
use crate::execution::{ExecutionEnd, Executor};

/// Time limit of a script.
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(600);
/// Maximum time until nothing of a killed process is left.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);

/// An executor with everything that is specific to a process: threads, tasks, connection. When it
/// is killed, each task ends at its next wait, nothing more is sent, and its commands are killed.
/// Work that other threads or servers have started (a file being written, a request that was sent)
/// may still happen. That looks like a process that was only believed dead.
pub(super) struct Process {
    runtime: Option<Runtime>,
    executor: Arc<OnceLock<Arc<Executor>>>,
    run: JoinHandle<ExecutionEnd>,
}

impl Process {
    /// Starts a process that executes a command.
    pub(super) fn start(
        surroundings: &Arc<Surroundings>,
        folder: &Path,
        command: CodeExecute,
        delivery: u32,
    ) -> Self {
        let runtime =
            Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let slot = Arc::new(OnceLock::new());
        let (surroundings, folder, set_up) =
            (Arc::clone(surroundings), folder.to_owned(), Arc::clone(&slot));
        let run = runtime.spawn(async move {
            let options = ConnectOptions::new("trial").blobs(&surroundings.blobs);
            let bus = Bus::connect(&surroundings.url, options).await.expect("the server is there");
            let (egress, sandbox) = (surroundings.egress.clone(), surroundings.sandbox.clone());
            let mut executor =
                executor(bus, &folder, network_and_commands_policy(), egress, sandbox);
            // A script that hit a limit continues if its result is lost, and then reports something
            // else. That is not the subject here, however slow the machine is.
            executor.tiers = tiers(SCRIPT_TIMEOUT);
            let executor = set_up.get_or_init(|| Arc::new(executor));
            executor.run(&command, delivery).await
        });
        Self { runtime: Some(runtime), executor: slot, run }
    }

    /// Waits until the process is connected and takes commands.
    pub(super) async fn wait_until_ready(&self) -> Arc<Executor> {
        wait_for("a process to be ready", || self.executor.get().cloned()).await
    }

    /// Waits for the end of the execution.
    pub(super) async fn end(&mut self) -> ExecutionEnd {
        (&mut self.run).await.expect("an execution does not panic")
    }

    /// Kills the process. The thread ends when nothing of it is left.
    pub(super) fn kill(mut self) -> thread::JoinHandle<()> {
        let runtime = self.runtime.take();
        thread::spawn(move || {
            if let Some(runtime) = runtime {
                runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
            }
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The trial failed. A runtime must not be awaited within another one.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

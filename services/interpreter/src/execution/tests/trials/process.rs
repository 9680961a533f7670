//! A process of the interpreter that can be killed within a test.

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

use super::{Surroundings, executor, granting, tiers, until};
use crate::execution::{End, Executor};

/// How long a script may take.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long what was killed may take to be gone.
const GONE: Duration = Duration::from_secs(20);

/// An executor with everything of a process that changes: its threads, its tasks, its connection.
/// Killed, each task ends where it waits next, nothing more is sent, and its commands are killed.
/// What had begun in another thread (a file that is written) and at others (a request that was
/// sent) may still happen, and then looks like a process that was only believed dead.
pub(super) struct Process {
    runtime: Option<Runtime>,
    executor: Arc<OnceLock<Arc<Executor>>>,
    run: JoinHandle<End>,
}

impl Process {
    /// Starts one that carries a command out.
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
            let mut executor = executor(bus, &folder, granting(), egress, sandbox);
            // A script that a limit has ended goes on when its result is lost, and then says
            // something else. However slow the machine is, that is not what is tried here.
            executor.tiers = tiers(PATIENCE);
            let executor = set_up.get_or_init(|| Arc::new(executor));
            executor.run(&command, delivery).await
        });
        Self { runtime: Some(runtime), executor: slot, run }
    }

    /// Waits until it is connected and takes commands.
    pub(super) async fn is_set_up(&self) -> Arc<Executor> {
        until("a process to be set up", || self.executor.get().cloned()).await
    }

    /// Waits for its end.
    pub(super) async fn end(&mut self) -> End {
        (&mut self.run).await.expect("an execution does not panic")
    }

    /// Kills it. The thread ends when nothing of it is left.
    pub(super) fn kill(mut self) -> thread::JoinHandle<()> {
        let runtime = self.runtime.take();
        thread::spawn(move || {
            if let Some(runtime) = runtime {
                runtime.shutdown_timeout(GONE);
            }
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A trial that failed. A runtime must not be waited for within another one.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

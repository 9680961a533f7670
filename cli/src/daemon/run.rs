//! `construct daemon run`: runs the mesh from start to stop with commands of the `dev` script.

use std::{env, process::Stdio};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    process::Command,
    signal::unix::{Signal as SignalStream, SignalKind, signal},
};

use super::{lock, notify};
use crate::{
    failure::{Exit, Failure},
    mesh::{self, HOME_VARIABLE, MeshPaths},
};

/// Runs the mesh until this process gets a stop signal, or until a process of the mesh exits. The
/// latter is a failure, so that the service manager restarts the mesh. In both cases, everything is
/// stopped.
///
/// # Errors
/// When the mesh cannot be started, or one of its processes has exited.
pub(crate) async fn run(paths: &MeshPaths) -> Result<Exit, Failure> {
    let lock = lock::acquire(&paths.home)?;
    let mut signals = StopSignals::new()?;
    let result = start_and_watch(paths, &mut signals).await;
    notify::notify("STOPPING=1\nSTATUS=The mesh is stopping.");
    // Further signals are ignored: stopping takes a bounded time, and an interrupted stop would
    // leave processes behind.
    let mut command = dev(paths, &["down"]);
    let stopped =
        command.spawn().map_err(|error| mesh::unusable(&paths.script, &error))?.wait().await?;
    drop(lock);
    result?;
    if stopped.success() { Ok(Exit::Completed) } else { Err(failed(paths, "down", stopped)) }
}

async fn start_and_watch(paths: &MeshPaths, signals: &mut StopSignals) -> Result<(), Failure> {
    let mut up = dev(paths, &["up", "--built"]);
    // The sockets themselves are inherited: the service manager left them open.
    up.env("DEV_LISTEN_FDS", passed_sockets().to_string());
    if run_to_end(paths, "up", up, signals).await? {
        notify::notify("READY=1\nSTATUS=The mesh is up.");
        run_to_end(paths, "watch", dev(paths, &["watch"]), signals).await?;
    }
    Ok(())
}

/// Runs the command to its end, or terminates it at a stop signal. Returns whether it ended by
/// itself.
async fn run_to_end(
    paths: &MeshPaths,
    name: &str,
    mut command: Command,
    signals: &mut StopSignals,
) -> Result<bool, Failure> {
    let mut child = command.spawn().map_err(|error| mesh::unusable(&paths.script, &error))?;
    let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    tokio::select! {
        status = child.wait() => {
            let status = status?;
            if status.success() { Ok(true) } else { Err(failed(paths, name, status)) }
        }
        () = signals.recv() => {
            // The whole group: the script handles signals only after its child has exited.
            if let Some(group) = group {
                _ = kill_process_group(group, Signal::TERM);
            }
            child.wait().await?;
            Ok(false)
        }
    }
}

/// A command of the script, in its own process group: a Ctrl-C in the terminal goes to this process
/// only.
fn dev(paths: &MeshPaths, arguments: &[&str]) -> Command {
    let mut command = Command::new(&paths.script);
    command
        .args(arguments)
        .env(HOME_VARIABLE, &paths.home)
        // Tells the script that the holder of the lock runs it.
        .env("DEV_DAEMON", "1")
        .env_remove(notify::SOCKET_VARIABLE)
        .env_remove("LISTEN_PID")
        .env_remove("LISTEN_FDS")
        .env_remove("LISTEN_FDNAMES")
        .stdin(Stdio::null())
        .process_group(0)
        .kill_on_drop(true);
    command
}

fn failed(paths: &MeshPaths, name: &str, status: std::process::ExitStatus) -> Failure {
    Failure::failed(format!("{} {name}: {status}", paths.script.display()))
}

/// The number of sockets passed to this process (`sd_listen_fds(3)`).
fn passed_sockets() -> u32 {
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    number("LISTEN_FDS")
        .filter(|_| number("LISTEN_PID") == Some(std::process::id()))
        .unwrap_or_default()
}

/// The signals that stop this process.
struct StopSignals([SignalStream; 3]);

impl StopSignals {
    fn new() -> Result<Self, Failure> {
        let [terminate, interrupt, hang_up] =
            [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
        Ok(Self([terminate?, interrupt?, hang_up?]))
    }

    async fn recv(&mut self) {
        let [terminate, interrupt, hang_up] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hang_up.recv() => {}
        }
    }
}

//! The service: the mesh from its start to its end. What the mesh is, the `dev` script knows; here
//! is when which of its commands is run.

use std::{env, process::Stdio};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    process::Command,
    signal::unix::{Signal as Signals, SignalKind, signal},
};

use super::{lock, notify};
use crate::{
    failure::{Exit, Failure},
    mesh::{self, HOME, Place},
};

/// Runs the mesh until this process is told to stop, or until something of it ends: that is a
/// failure, so that the service manager starts it anew. Nothing is left running either way.
///
/// # Errors
/// When it cannot be started, or something of it has ended.
pub(crate) async fn run(place: &Place) -> Result<Exit, Failure> {
    let lock = lock::take(&place.home)?;
    let mut told = Told::new()?;
    let outcome = from_start_to_end(place, &mut told).await;
    notify::say("STOPPING=1\nSTATUS=The mesh is stopping.");
    // Further signals change nothing: it takes a bounded time, and what was cut short would be left
    // behind.
    let mut command = dev(place, &["down"]);
    let stopped =
        command.spawn().map_err(|error| mesh::unusable(&place.script, &error))?.wait().await?;
    drop(lock);
    outcome?;
    if stopped.success() { Ok(Exit::Completed) } else { Err(failed(place, "down", stopped)) }
}

async fn from_start_to_end(place: &Place, told: &mut Told) -> Result<(), Failure> {
    let mut up = dev(place, &["up", "--built"]);
    // The sockets themselves are inherited: whoever passed them has left them open for that.
    up.env("DEV_LISTEN_FDS", passed().to_string());
    if finished(place, "up", up, told).await? {
        notify::say("READY=1\nSTATUS=The mesh is up.");
        finished(place, "watch", dev(place, &["watch"]), told).await?;
    }
    Ok(())
}

/// Runs the command to its end, or ends it when this process is told to stop. Whether it came to
/// its end by itself.
async fn finished(
    place: &Place,
    name: &str,
    mut command: Command,
    told: &mut Told,
) -> Result<bool, Failure> {
    let mut child = command.spawn().map_err(|error| mesh::unusable(&place.script, &error))?;
    let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    tokio::select! {
        status = child.wait() => {
            let status = status?;
            if status.success() { Ok(true) } else { Err(failed(place, name, status)) }
        }
        () = told.stop() => {
            // With what the script waits for: it looks at signals only when that has ended.
            if let Some(group) = group {
                _ = kill_process_group(group, Signal::TERM);
            }
            child.wait().await?;
            Ok(false)
        }
    }
}

/// A command of the script, in a group of its own: a Ctrl-C in the terminal is for this process
/// alone.
fn dev(place: &Place, arguments: &[&str]) -> Command {
    let mut command = Command::new(&place.script);
    command
        .args(arguments)
        .env(HOME, &place.home)
        // By this the script knows that it works for the one who has the lock.
        .env("DEV_DAEMON", "1")
        .env_remove(notify::SOCKET)
        .env_remove("LISTEN_PID")
        .env_remove("LISTEN_FDS")
        .env_remove("LISTEN_FDNAMES")
        .stdin(Stdio::null())
        .process_group(0)
        .kill_on_drop(true);
    command
}

fn failed(place: &Place, name: &str, status: std::process::ExitStatus) -> Failure {
    Failure::failed(format!("{} {name}: {status}", place.script.display()))
}

/// How many sockets were passed to this process (`sd_listen_fds(3)`).
fn passed() -> u32 {
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    number("LISTEN_FDS")
        .filter(|_| number("LISTEN_PID") == Some(std::process::id()))
        .unwrap_or_default()
}

/// The signals that end this process.
struct Told([Signals; 3]);

impl Told {
    fn new() -> Result<Self, Failure> {
        let [terminate, interrupt, hang_up] =
            [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
        Ok(Self([terminate?, interrupt?, hang_up?]))
    }

    async fn stop(&mut self) {
        let [terminate, interrupt, hang_up] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hang_up.recv() => {}
        }
    }
}

//! `construct daemon`: the mesh on this machine as a user service.
//!
//! `construct daemon run` is the service. It starts the mesh with the checkout's `dev` script,
//! waits until one of its processes exits or a stop is requested, and stops the rest with the
//! script. `construct daemon install` makes systemd listen on the gateway's socket from log-in on,
//! and run the service at the first connection. launchd runs it from log-in on (`docs/daemon.md`).

mod launchd;
mod lock;
mod notify;
mod run;
mod systemd;
mod units;

use std::{
    env, fs,
    io::ErrorKind,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
    slice,
    time::Duration,
};

use clap::{Args, Subcommand};
use rustix::{
    io::Errno,
    process::{Pid, Signal, kill_process},
};
use tokio::time::{Instant, sleep};

use self::{
    launchd::Launchd,
    systemd::{SERVICE, SOCKET, Systemd},
    units::{Settings, State, Unit},
};
use crate::{
    failure::{Exit, Failure},
    mesh::{self, MeshPaths},
    output,
};

/// The timeout of a stop: the script's grace period for its processes, and some time for itself.
const STOP_TIMEOUT: Duration = Duration::from_secs(90);
/// The time between checks whether the mesh has stopped.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The command, and the service manager.
#[derive(Debug, Args)]
pub(crate) struct DaemonArgs {
    #[command(subcommand)]
    command: DaemonCommand,
    /// Use launchd instead of systemd. The default on macOS; elsewhere only to show its file
    /// (install --print --launchd).
    #[arg(long, global = true)]
    launchd: bool,
}

/// The commands for the service.
#[derive(Debug, Subcommand)]
enum DaemonCommand {
    /// Install the service: systemd listens, and starts the mesh at the first request. On macOS,
    /// launchd starts it now and at each log-in.
    Install(Install),
    /// Uninstall the service. The data stays.
    Uninstall(Uninstall),
    /// Run the built mesh in the foreground until SIGTERM or Ctrl-C. The service runs this.
    Run,
    /// Stop the mesh. With systemd, the next request starts it again; on macOS, the next log-in.
    Stop,
    /// Show the state of the service (exit code 0: the mesh runs, 3: it does not).
    Status,
}

/// Options of `install`.
#[derive(Debug, Args)]
struct Install {
    /// Only print the files.
    #[arg(long, conflicts_with_all = ["no_start", "force"])]
    print: bool,
    /// Only write the files: do not build, and do not call systemd or launchd.
    #[arg(long)]
    no_start: bool,
    /// Also replace files that this command did not write.
    #[arg(long)]
    force: bool,
}

/// Options of `uninstall`.
#[derive(Debug, Args)]
struct Uninstall {
    /// Also remove files that `install` did not write.
    #[arg(long)]
    force: bool,
}

impl DaemonArgs {
    /// # Errors
    /// When the command fails.
    pub(crate) async fn run(self) -> Result<Exit, Failure> {
        let launchd = self.launchd || cfg!(target_os = "macos");
        let completed = |()| Exit::Completed;
        match self.command {
            DaemonCommand::Install(args) if launchd => args.run_launchd().map(completed),
            DaemonCommand::Install(args) => args.run_systemd().map(completed),
            DaemonCommand::Uninstall(args) if launchd => args.run_launchd().map(completed),
            DaemonCommand::Uninstall(args) => args.run_systemd().map(completed),
            DaemonCommand::Run => run::run(&MeshPaths::find()?).await,
            DaemonCommand::Stop if launchd => stop_launchd().await.map(completed),
            DaemonCommand::Stop => stop_systemd().await.map(completed),
            DaemonCommand::Status => status(launchd),
        }
    }
}

/// The path of the gateway's socket. None without a runtime directory.
pub(crate) fn socket_path() -> Option<PathBuf> {
    let runtime =
        env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute())?;
    Some(runtime.join("construct").join("gateway.socket"))
}

/// The address of the gateway's socket, if it exists.
pub(crate) fn address() -> Option<String> {
    let path = socket_path()?;
    let metadata = fs::symlink_metadata(&path).ok()?;
    metadata.file_type().is_socket().then(|| format!("unix:{}", path.display()))
}

impl Install {
    /// Installs the units of systemd.
    fn run_systemd(&self) -> Result<(), Failure> {
        let settings = Settings::find()?;
        let folder = units::folder()?;
        let units = settings.units()?;
        if self.print {
            let texts = units
                .iter()
                .map(|unit| format!("# {}\n{}", folder.join(unit.name).display(), unit.text));
            return output::print(&texts.collect::<Vec<_>>().join("\n"));
        }
        let systemd = if self.no_start { None } else { Some(Systemd::find()?) };
        let replaced = self.write_files(&folder, &units)?;
        let Some(systemd) = systemd else {
            return output::print(
                "to start it: systemctl --user daemon-reload && systemctl --user enable --now construct.socket\n",
            );
        };
        systemd.run(&["daemon-reload"])?;
        systemd.run(&["enable", "--now", SOCKET])?;
        let address =
            socket_path().map_or_else(String::new, |path| format!(" unix:{}", path.display()));
        output::print(&format!(
            "systemd listens at{address}; the first request starts the mesh\n"
        ))?;
        if replaced && systemd.is_running(SERVICE)? {
            output::print(
                "the running mesh is out of date; update it with: systemctl --user restart construct.service\n",
            )?;
        }
        Ok(())
    }

    /// Installs the agent of launchd.
    fn run_launchd(&self) -> Result<(), Failure> {
        let settings = Settings::find()?;
        let agent = launchd::agent(&settings)?;
        if self.print {
            return output::print(&agent.text);
        }
        let (folder, path) = (launchd::folder()?, launchd::path()?);
        let launchd = if self.no_start { None } else { Some(Launchd::find()?) };
        let home = launchd::data(&path).unwrap_or_else(|| settings.paths.home.clone());
        let replaced = self.write_files(&folder, slice::from_ref(&agent))?;
        let Some(launchd) = launchd else {
            return output::print(&format!(
                "to start it: launchctl bootstrap gui/$(id -u) {}; or the next log-in does\n",
                path.display()
            ));
        };
        if launchd.is_loaded()? {
            if lock::holder(&home)?.is_some() {
                let text = if replaced {
                    "the running mesh is out of date; update it with: construct daemon stop && construct daemon install\n"
                } else {
                    "the mesh runs, and launchd starts it at each log-in\n"
                };
                return output::print(text);
            }
            // It is stopping or waits for its next attempt, perhaps with an old file.
            launchd.unload()?;
        }
        launchd.load(&path)?;
        output::print("launchd starts the mesh, now and at each log-in\n")
    }

    /// Builds the mesh unless `--no-start` is given, and writes the files that are out of date.
    /// Returns whether one of them existed.
    fn write_files(&self, folder: &Path, units: &[Unit]) -> Result<bool, Failure> {
        // Foreign files are detected before anything is changed.
        let states: Vec<_> = units.iter().map(|unit| unit.state(folder)).collect();
        for (unit, state) in units.iter().zip(&states) {
            if matches!(state, State::Foreign) && !self.force {
                return Err(foreign_file(&folder.join(unit.name), "replaces"));
            }
        }
        if !self.no_start {
            mesh::dev("build")?;
        }
        let mut replaced = false;
        for (unit, state) in units.iter().zip(states) {
            let path = folder.join(unit.name);
            let action = match state {
                State::Same => "unchanged",
                State::Absent => "written",
                State::Ours | State::Foreign => {
                    replaced = true;
                    "replaced"
                }
            };
            if !matches!(state, State::Same) {
                unit.write(folder)?;
            }
            output::print(&format!("{action:<10} {}\n", path.display()))?;
        }
        Ok(replaced)
    }
}

impl Uninstall {
    /// Removes the units of systemd.
    fn run_systemd(&self) -> Result<(), Failure> {
        let folder = units::folder()?;
        let mut installed = Vec::new();
        for path in units::NAMES.map(|name| folder.join(name)) {
            match units::state(&path, units::MARK) {
                State::Absent => {}
                State::Foreign if !self.force => return Err(foreign_file(&path, "removes")),
                State::Same | State::Ours | State::Foreign => installed.push(path),
            }
        }
        if installed.is_empty() {
            return output::print("nothing is installed\n");
        }
        let data = units::data(&folder);
        let systemd = Systemd::find();
        match &systemd {
            Ok(systemd) => {
                // The socket first, or the next request would start the service again. systemd does
                // not know a unit without its file.
                if installed.iter().any(|path| path.ends_with(SOCKET)) {
                    systemd.run(&["disable", "--now", SOCKET])?;
                }
                systemd.run(&["stop", SERVICE])?;
            }
            Err(failure) => {
                eprintln!("warning: {}, so only the files are removed", failure.message())
            }
        }
        for path in installed {
            remove_file(&path)?;
        }
        if let Ok(systemd) = systemd {
            systemd.run(&["daemon-reload"])?;
        }
        match data {
            Some(data) => output::print(&format!("the data stays in {data}\n")),
            None => Ok(()),
        }
    }

    /// Removes the agent of launchd.
    fn run_launchd(&self) -> Result<(), Failure> {
        let path = launchd::path()?;
        match units::state(&path, launchd::MARK) {
            State::Absent => return output::print("nothing is installed\n"),
            State::Foreign if !self.force => return Err(foreign_file(&path, "removes")),
            State::Same | State::Ours | State::Foreign => {}
        }
        let data = launchd::data(&path);
        match Launchd::find() {
            Ok(launchd) => {
                if launchd.is_loaded()? {
                    launchd.unload()?;
                }
            }
            Err(failure) => {
                eprintln!("warning: {}, so only the file is removed", failure.message())
            }
        }
        remove_file(&path)?;
        match data {
            Some(data) => output::print(&format!("the data stays in {}\n", data.display())),
            None => Ok(()),
        }
    }
}

fn remove_file(path: &Path) -> Result<(), Failure> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
        _ => output::print(&format!("removed    {}\n", path.display())),
    }
}

fn foreign_file(path: &Path, action: &str) -> Failure {
    let failure = Failure::failed(format!(
        "{} exists, and was not written by construct daemon install",
        path.display()
    ));
    failure.hint(format!("check its content; --force {action} it"))
}

/// Stops the mesh. If systemd runs it, systemd must stop it: otherwise it would report a failure or
/// restart it.
async fn stop_systemd() -> Result<(), Failure> {
    if let Ok(systemd) = Systemd::find()
        && systemd.is_running(SERVICE)?
    {
        systemd.run(&["stop", SERVICE])?;
        let suffix =
            if systemd.is_running(SOCKET)? { "; the next request starts it again" } else { "" };
        return output::print(&format!("the mesh has stopped{suffix}\n"));
    }
    let home = MeshPaths::find()?.home;
    let Some(pid) = lock::holder(&home)? else {
        return output::print("the daemon does not run\n");
    };
    terminate(&home, pid).await?;
    output::print("the mesh has stopped\n")
}

/// Stops the mesh, which launchd may run. launchd must unload it first: otherwise it would restart
/// it after a failure.
async fn stop_launchd() -> Result<(), Failure> {
    let home = match launchd::data(&launchd::path()?) {
        Some(home) => home,
        None => MeshPaths::find()?.home,
    };
    let holder = lock::holder(&home)?;
    let mut suffix = "";
    if let Ok(launchd) = Launchd::find()
        && launchd.is_loaded()?
    {
        launchd.unload()?;
        suffix = "; construct daemon install starts it again, and the next log-in does";
    }
    let Some(pid) = holder else {
        return output::print(&format!("the daemon does not run{suffix}\n"));
    };
    // It may have been started by hand.
    if lock::holder(&home)? == Some(pid) {
        terminate(&home, pid).await?;
    }
    output::print(&format!("the mesh has stopped{suffix}\n"))
}

/// Terminates the daemon, and waits for its exit.
async fn terminate(home: &Path, pid: i32) -> Result<(), Failure> {
    let target = Pid::from_raw(pid)
        .ok_or_else(|| Failure::failed("the daemon runs, but its process id is unknown"))?;
    match kill_process(target, Signal::TERM) {
        // It has just exited.
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => {
            return Err(Failure::failed(format!(
                "the daemon (process {pid}) cannot be stopped: {error}"
            )));
        }
    }
    let deadline = Instant::now() + STOP_TIMEOUT;
    while lock::holder(home)? == Some(pid) {
        if Instant::now() >= deadline {
            return Err(Failure::failed(format!(
                "the daemon (process {pid}) has not stopped within {} s",
                STOP_TIMEOUT.as_secs()
            )));
        }
        sleep(STOP_POLL_INTERVAL).await;
    }
    Ok(())
}

fn status(launchd: bool) -> Result<Exit, Failure> {
    let (mut runs, installed) = if launchd {
        print_agent_status()?;
        (false, launchd::data(&launchd::path()?))
    } else {
        (print_unit_status()?, None)
    };
    // Without a checkout, only the installed service can run.
    if let Some(home) = installed.or_else(|| MeshPaths::find().ok().map(|paths| paths.home)) {
        let holder = lock::holder(&home)?;
        let state =
            holder.map_or_else(|| "does not run".to_owned(), |pid| format!("runs (process {pid})"));
        output::print(&format!("daemon   {state}, data in {}\n", home.display()))?;
        runs |= holder.is_some();
    }
    Ok(if runs { Exit::Completed } else { Exit::Unreachable })
}

/// Prints the state in launchd. Only the lock shows whether the mesh runs.
fn print_agent_status() -> Result<(), Failure> {
    match Launchd::find() {
        Ok(launchd) => {
            let state = if launchd.is_loaded()? { "loaded" } else { "not loaded" };
            output::print(&format!("agent    {state}\n"))
        }
        Err(failure) => output::print(&format!("launchd  {}\n", failure.message())),
    }
}

/// Prints the state in systemd. Returns whether the service runs.
fn print_unit_status() -> Result<bool, Failure> {
    match Systemd::find() {
        Ok(systemd) => {
            let enabled = systemd.state("is-enabled", SOCKET)?;
            let address =
                address().map_or_else(|| "no socket".to_owned(), |address| format!("at {address}"));
            output::print(&format!(
                "socket   {} ({enabled}), {address}\n",
                systemd.state("is-active", SOCKET)?
            ))?;
            let service = systemd.state("is-active", SERVICE)?;
            output::print(&format!("service  {service}\n"))?;
            Ok(service == "active")
        }
        Err(failure) => {
            output::print(&format!("systemd  {}\n", failure.message()))?;
            Ok(false)
        }
    }
}

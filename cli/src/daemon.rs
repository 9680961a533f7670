//! The mesh on this machine as a service of the person who uses it.
//!
//! `construct daemon run` is the service: it has the checkout's `dev` script start the mesh, waits
//! until a process of it ends or somebody says stop, and has the script stop the rest. `construct
//! daemon install` has systemd listen on the gateway's socket from log-in on, and run that at the
//! first connection; launchd runs it from log-in on (`docs/daemon.md`).

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
    mesh::{self, Place},
    output,
};

/// How long the mesh may take to stop: what the script grants its processes, and a little for
/// itself.
const STOP: Duration = Duration::from_secs(90);
/// How often is looked whether it has.
const LOOK: Duration = Duration::from_millis(50);

/// What is done with the service, and whose it is.
#[derive(Debug, Args)]
pub(crate) struct DaemonArgs {
    #[command(subcommand)]
    command: DaemonCommand,
    /// As on macOS, where launchd runs services and not systemd; elsewhere to look at its file
    /// (install --print --launchd).
    #[arg(long, global = true)]
    launchd: bool,
}

/// What can be done with the service.
#[derive(Debug, Subcommand)]
enum DaemonCommand {
    /// Have systemd listen for you, and start the mesh at the first request. On macOS: have launchd
    /// start it, now and at each log-in.
    Install(Install),
    /// Undo that. The data stays.
    Uninstall(Uninstall),
    /// Run the mesh here, as it was built, until SIGTERM or Ctrl-C. The service does this.
    Run,
    /// Stop the mesh. Where systemd listens, the next request starts it again; on macOS, the next
    /// log-in does.
    Stop,
    /// Say what listens and what runs (exit 0: the mesh runs, 3: not).
    Status,
}

/// How to install.
#[derive(Debug, Args)]
struct Install {
    /// Only show the files.
    #[arg(long, conflicts_with_all = ["no_start", "force"])]
    print: bool,
    /// Only write the files; build nothing, and do not tell systemd, or launchd.
    #[arg(long)]
    no_start: bool,
    /// Also replace files that this command has not written.
    #[arg(long)]
    force: bool,
}

/// How to uninstall.
#[derive(Debug, Args)]
struct Uninstall {
    /// Also remove files that `install` has not written.
    #[arg(long)]
    force: bool,
}

impl DaemonArgs {
    /// # Errors
    /// When it can't be done.
    pub(crate) async fn run(self) -> Result<Exit, Failure> {
        let launchd = self.launchd || cfg!(target_os = "macos");
        let done = |()| Exit::Completed;
        match self.command {
            DaemonCommand::Install(args) if launchd => args.agent().map(done),
            DaemonCommand::Install(args) => args.units().map(done),
            DaemonCommand::Uninstall(args) if launchd => args.agent().map(done),
            DaemonCommand::Uninstall(args) => args.units().map(done),
            DaemonCommand::Run => run::run(&Place::find()?).await,
            DaemonCommand::Stop if launchd => stop_agent().await.map(done),
            DaemonCommand::Stop => stop().await.map(done),
            DaemonCommand::Status => status(launchd),
        }
    }
}

/// Where systemd listens for the gateway, where there are folders for such things.
pub(crate) fn socket() -> Option<PathBuf> {
    let runtime =
        env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute())?;
    Some(runtime.join("construct").join("gateway.socket"))
}

/// The address of that socket, while it is there.
pub(crate) fn address() -> Option<String> {
    let path = socket()?;
    let found = fs::symlink_metadata(&path).ok()?;
    found.file_type().is_socket().then(|| format!("unix:{}", path.display()))
}

impl Install {
    /// For systemd.
    fn units(&self) -> Result<(), Failure> {
        let settings = Settings::find()?;
        let folder = units::folder()?;
        let units = settings.units()?;
        if self.print {
            let shown = units
                .iter()
                .map(|unit| format!("# {}\n{}", folder.join(unit.name).display(), unit.text));
            return output::print(&shown.collect::<Vec<_>>().join("\n"));
        }
        let systemd = if self.no_start { None } else { Some(Systemd::find()?) };
        let replaced = self.put(&folder, &units)?;
        let Some(systemd) = systemd else {
            return output::print(
                "to start it: systemctl --user daemon-reload && systemctl --user enable --now construct.socket\n",
            );
        };
        systemd.run(&["daemon-reload"])?;
        systemd.run(&["enable", "--now", SOCKET])?;
        let place = socket().map_or_else(String::new, |path| format!(" unix:{}", path.display()));
        output::print(&format!("systemd listens at{place}; the first request starts the mesh\n"))?;
        if replaced && systemd.runs(SERVICE)? {
            output::print(
                "what runs was started as it was before: systemctl --user restart construct.service brings it up to date\n",
            )?;
        }
        Ok(())
    }

    /// For launchd.
    fn agent(&self) -> Result<(), Failure> {
        let settings = Settings::find()?;
        let agent = launchd::agent(&settings)?;
        if self.print {
            return output::print(&agent.text);
        }
        let (folder, path) = (launchd::folder()?, launchd::path()?);
        let launchd = if self.no_start { None } else { Some(Launchd::find()?) };
        let home = launchd::data(&path).unwrap_or_else(|| settings.place.home.clone());
        let replaced = self.put(&folder, slice::from_ref(&agent))?;
        let Some(launchd) = launchd else {
            return output::print(&format!(
                "to start it: launchctl bootstrap gui/$(id -u) {}; or the next log-in does\n",
                path.display()
            ));
        };
        if launchd.has()? {
            if lock::holder(&home)?.is_some() {
                let words = if replaced {
                    "what runs was started as it was before: construct daemon stop, and install once more, brings it up to date\n"
                } else {
                    "the mesh runs, and launchd starts it at each log-in\n"
                };
                return output::print(words);
            }
            // It was told to end, or waits before it tries once more, and maybe knows another file.
            launchd.remove()?;
        }
        launchd.add(&path)?;
        output::print("launchd starts the mesh, now and at each log-in\n")
    }

    /// Builds what is run, unless nothing is to be started, and writes the files that are out of
    /// date. Whether one of them was there.
    fn put(&self, folder: &Path, units: &[Unit]) -> Result<bool, Failure> {
        // Whatever is in the way is found before anything is changed.
        let found: Vec<_> = units.iter().map(|unit| unit.state(folder)).collect();
        for (unit, state) in units.iter().zip(&found) {
            if matches!(state, State::Foreign) && !self.force {
                return Err(foreign(&folder.join(unit.name), "replaces"));
            }
        }
        if !self.no_start {
            mesh::dev("build")?;
        }
        let mut replaced = false;
        for (unit, state) in units.iter().zip(found) {
            let path = folder.join(unit.name);
            let word = match state {
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
            output::print(&format!("{word:<10} {}\n", path.display()))?;
        }
        Ok(replaced)
    }
}

impl Uninstall {
    /// For systemd.
    fn units(&self) -> Result<(), Failure> {
        let folder = units::folder()?;
        let mut there = Vec::new();
        for path in units::NAMES.map(|name| folder.join(name)) {
            match units::state(&path, units::MARK) {
                State::Absent => {}
                State::Foreign if !self.force => return Err(foreign(&path, "removes")),
                State::Same | State::Ours | State::Foreign => there.push(path),
            }
        }
        if there.is_empty() {
            return output::print("nothing is installed\n");
        }
        let data = units::data(&folder);
        let systemd = Systemd::find();
        match &systemd {
            Ok(systemd) => {
                // The socket first, or the next request would start the service again. Of a unit
                // without its file systemd knows nothing.
                if there.iter().any(|path| path.ends_with(SOCKET)) {
                    systemd.run(&["disable", "--now", SOCKET])?;
                }
                systemd.run(&["stop", SERVICE])?;
            }
            Err(failure) => {
                eprintln!("warning: {}, so only the files are removed", failure.message())
            }
        }
        for path in there {
            remove(&path)?;
        }
        if let Ok(systemd) = systemd {
            systemd.run(&["daemon-reload"])?;
        }
        match data {
            Some(data) => output::print(&format!("the data stays in {data}\n")),
            None => Ok(()),
        }
    }

    /// For launchd.
    fn agent(&self) -> Result<(), Failure> {
        let path = launchd::path()?;
        match units::state(&path, launchd::MARK) {
            State::Absent => return output::print("nothing is installed\n"),
            State::Foreign if !self.force => return Err(foreign(&path, "removes")),
            State::Same | State::Ours | State::Foreign => {}
        }
        let data = launchd::data(&path);
        match Launchd::find() {
            Ok(launchd) => {
                if launchd.has()? {
                    launchd.remove()?;
                }
            }
            Err(failure) => {
                eprintln!("warning: {}, so only the file is removed", failure.message())
            }
        }
        remove(&path)?;
        match data {
            Some(data) => output::print(&format!("the data stays in {}\n", data.display())),
            None => Ok(()),
        }
    }
}

fn remove(path: &Path) -> Result<(), Failure> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
        _ => output::print(&format!("removed    {}\n", path.display())),
    }
}

fn foreign(path: &Path, does: &str) -> Failure {
    let failure = Failure::failed(format!(
        "{} is there, and was not written by construct daemon install",
        path.display()
    ));
    failure.hint(format!("look at it; --force {does} it"))
}

/// Stops what runs: by systemd, which would otherwise take it for a failure or start it anew, or by
/// itself.
async fn stop() -> Result<(), Failure> {
    if let Ok(systemd) = Systemd::find()
        && systemd.runs(SERVICE)?
    {
        systemd.run(&["stop", SERVICE])?;
        let listens = if systemd.runs(SOCKET)? { "; the next request starts it again" } else { "" };
        return output::print(&format!("the mesh has stopped{listens}\n"));
    }
    let home = Place::find()?.home;
    let Some(pid) = lock::holder(&home)? else {
        return output::print("the daemon does not run\n");
    };
    end(&home, pid).await?;
    output::print("the mesh has stopped\n")
}

/// The same where launchd may have started it, which would start what ends with a failure anew.
async fn stop_agent() -> Result<(), Failure> {
    let home = match launchd::data(&launchd::path()?) {
        Some(home) => home,
        None => Place::find()?.home,
    };
    let holder = lock::holder(&home)?;
    let mut again = "";
    if let Ok(launchd) = Launchd::find()
        && launchd.has()?
    {
        launchd.remove()?;
        again = "; construct daemon install starts it again, and the next log-in does";
    }
    let Some(pid) = holder else {
        return output::print(&format!("the daemon does not run{again}\n"));
    };
    // Also one that was started by hand.
    if lock::holder(&home)? == Some(pid) {
        end(&home, pid).await?;
    }
    output::print(&format!("the mesh has stopped{again}\n"))
}

/// Tells the daemon to stop, and waits until it has.
async fn end(home: &Path, pid: i32) -> Result<(), Failure> {
    let target = Pid::from_raw(pid)
        .ok_or_else(|| Failure::failed("the daemon runs, and does not say as which process"))?;
    match kill_process(target, Signal::TERM) {
        // It has ended just now.
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => {
            return Err(Failure::failed(format!(
                "the daemon (process {pid}) cannot be told to stop: {error}"
            )));
        }
    }
    let deadline = Instant::now() + STOP;
    while lock::holder(home)? == Some(pid) {
        if Instant::now() >= deadline {
            return Err(Failure::failed(format!(
                "the daemon (process {pid}) has not stopped within {} s",
                STOP.as_secs()
            )));
        }
        sleep(LOOK).await;
    }
    Ok(())
}

fn status(launchd: bool) -> Result<Exit, Failure> {
    let (mut runs, installed) = if launchd {
        status_of_agent()?;
        (false, launchd::data(&launchd::path()?))
    } else {
        (status_of_units()?, None)
    };
    // Where there is no checkout, nothing runs but what was installed.
    if let Some(home) = installed.or_else(|| Place::find().ok().map(|place| place.home)) {
        let holder = lock::holder(&home)?;
        let state =
            holder.map_or_else(|| "does not run".to_owned(), |pid| format!("runs (process {pid})"));
        output::print(&format!("daemon   {state}, data in {}\n", home.display()))?;
        runs |= holder.is_some();
    }
    Ok(if runs { Exit::Completed } else { Exit::Unreachable })
}

/// Says what launchd knows. Whether anything runs, only the lock tells for certain.
fn status_of_agent() -> Result<(), Failure> {
    match Launchd::find() {
        Ok(launchd) => {
            let state = if launchd.has()? { "loaded" } else { "not loaded" };
            output::print(&format!("agent    {state}\n"))
        }
        Err(failure) => output::print(&format!("launchd  {}\n", failure.message())),
    }
}

/// Says what systemd knows. Whether the service runs.
fn status_of_units() -> Result<bool, Failure> {
    match Systemd::find() {
        Ok(systemd) => {
            let enabled = systemd.state("is-enabled", SOCKET)?;
            let address =
                address().map_or_else(|| "nowhere".to_owned(), |address| format!("at {address}"));
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

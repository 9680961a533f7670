//! The mesh on this machine as a service of the person who uses it.
//!
//! `construct daemon run` is the service: it has the checkout's `dev` script start the mesh, waits until a process of it ends or somebody
//! says stop, and has the script stop the rest. `construct daemon install` has systemd listen on the gateway's socket from log-in on, and run
//! that at the first connection (`docs/daemon.md`).

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
    time::Duration,
};

use clap::{Args, Subcommand};
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::{Instant, sleep};

use self::{
    systemd::{SERVICE, SOCKET, Systemd},
    units::{Settings, State},
};
use crate::{
    failure::{Exit, Failure},
    mesh::{self, Place},
    output,
};

/// How long the mesh may take to stop: what the script grants its processes, and a little for itself.
const STOP: Duration = Duration::from_secs(90);
/// How often is looked whether it has.
const LOOK: Duration = Duration::from_millis(50);

/// What can be done with the service.
#[derive(Debug, Subcommand)]
pub(crate) enum DaemonCommand {
    /// Have systemd listen for you, and start the mesh at the first request.
    Install(Install),
    /// Undo that. The data stays.
    Uninstall(Uninstall),
    /// Run the mesh here, as it was built, until SIGTERM or Ctrl-C. The service does this.
    Run,
    /// Stop the mesh. Where systemd listens, the next request starts it again.
    Stop,
    /// Say what listens and what runs (exit 0: the mesh runs, 3: not).
    Status,
}

/// How to install.
#[derive(Debug, Args)]
pub(crate) struct Install {
    /// Only show the files.
    #[arg(long, conflicts_with_all = ["no_start", "force"])]
    print: bool,
    /// Only write the files; build nothing, and do not tell systemd.
    #[arg(long)]
    no_start: bool,
    /// Also replace files that this command has not written.
    #[arg(long)]
    force: bool,
}

/// How to uninstall.
#[derive(Debug, Args)]
pub(crate) struct Uninstall {
    /// Also remove files that `install` has not written.
    #[arg(long)]
    force: bool,
}

impl DaemonCommand {
    /// # Errors
    /// When it can't be done.
    pub(crate) async fn run(self) -> Result<Exit, Failure> {
        match self {
            Self::Install(args) => args.run().map(|()| Exit::Completed),
            Self::Uninstall(args) => args.run().map(|()| Exit::Completed),
            Self::Run => run::run(&Place::find()?).await,
            Self::Stop => stop().await.map(|()| Exit::Completed),
            Self::Status => status(),
        }
    }
}

/// Where systemd listens for the gateway, where there are folders for such things.
pub(crate) fn socket() -> Option<PathBuf> {
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute())?;
    Some(runtime.join("construct").join("gateway.socket"))
}

/// The address of that socket, while it is there.
pub(crate) fn address() -> Option<String> {
    let path = socket()?;
    let found = fs::symlink_metadata(&path).ok()?;
    found.file_type().is_socket().then(|| format!("unix:{}", path.display()))
}

impl Install {
    fn run(&self) -> Result<(), Failure> {
        let settings = Settings::find()?;
        let folder = units::folder()?;
        let units = settings.units()?;
        if self.print {
            let shown = units.iter().map(|unit| format!("# {}\n{}", folder.join(unit.name).display(), unit.text));
            return output::print(&shown.collect::<Vec<_>>().join("\n"));
        }
        // Whatever is in the way is found before anything is changed.
        let systemd = if self.no_start { None } else { Some(Systemd::find()?) };
        let found = units.each_ref().map(|unit| unit.state(&folder));
        for (unit, state) in units.iter().zip(&found) {
            if matches!(state, State::Foreign) && !self.force {
                return Err(foreign(&folder.join(unit.name), "replaces"));
            }
        }
        if systemd.is_some() {
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
                unit.write(&folder)?;
            }
            output::print(&format!("{word:<10} {}\n", path.display()))?;
        }
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
}

impl Uninstall {
    fn run(&self) -> Result<(), Failure> {
        let folder = units::folder()?;
        let mut there = Vec::new();
        for path in units::NAMES.map(|name| folder.join(name)) {
            match units::state(&path) {
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
                // The socket first, or the next request would start the service again. Of a unit without its file systemd knows nothing.
                if there.iter().any(|path| path.ends_with(SOCKET)) {
                    systemd.run(&["disable", "--now", SOCKET])?;
                }
                systemd.run(&["stop", SERVICE])?;
            }
            Err(failure) => eprintln!("warning: {}, so only the files are removed", failure.message()),
        }
        for path in there {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
                _ => output::print(&format!("removed    {}\n", path.display()))?,
            }
        }
        if let Ok(systemd) = systemd {
            systemd.run(&["daemon-reload"])?;
        }
        match data {
            Some(data) => output::print(&format!("the data stays in {data}\n")),
            None => Ok(()),
        }
    }
}

fn foreign(path: &Path, does: &str) -> Failure {
    let failure =
        Failure::failed(format!("{} is there, and was not written by construct daemon install", path.display()));
    failure.hint(format!("look at it; --force {does} it"))
}

/// Stops what runs: by systemd, which would otherwise take it for a failure or start it anew, or by itself.
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
    let target =
        Pid::from_raw(pid).ok_or_else(|| Failure::failed("the daemon runs, and does not say as which process"))?;
    kill_process(target, Signal::TERM)
        .map_err(|error| Failure::failed(format!("the daemon (process {pid}) cannot be told to stop: {error}")))?;
    let deadline = Instant::now() + STOP;
    while lock::holder(&home)? == Some(pid) {
        if Instant::now() >= deadline {
            return Err(Failure::failed(format!(
                "the daemon (process {pid}) has not stopped within {} s",
                STOP.as_secs()
            )));
        }
        sleep(LOOK).await;
    }
    output::print("the mesh has stopped\n")
}

fn status() -> Result<Exit, Failure> {
    let mut runs = false;
    match Systemd::find() {
        Ok(systemd) => {
            let enabled = systemd.state("is-enabled", SOCKET)?;
            let address = address().map_or_else(|| "nowhere".to_owned(), |address| format!("at {address}"));
            output::print(&format!("socket   {} ({enabled}), {address}\n", systemd.state("is-active", SOCKET)?))?;
            let service = systemd.state("is-active", SERVICE)?;
            output::print(&format!("service  {service}\n"))?;
            runs = service == "active";
        }
        Err(failure) => output::print(&format!("systemd  {}\n", failure.message()))?,
    }
    // Where there is no checkout, nothing runs but what systemd started.
    if let Ok(Place { home, .. }) = Place::find() {
        let holder = lock::holder(&home)?;
        let state = holder.map_or_else(|| "does not run".to_owned(), |pid| format!("runs (process {pid})"));
        output::print(&format!("daemon   {state}, data in {}\n", home.display()))?;
        runs |= holder.is_some();
    }
    Ok(if runs { Exit::Completed } else { Exit::Unreachable })
}

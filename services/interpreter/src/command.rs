//! Running a shell command for a script: confined, bounded, and gone when it is over.
//!
//! A command runs under bubblewrap in namespaces of its own (see `command/bubblewrap.rs`). Where
//! the host cannot do that, the operator's policy decides: refuse, or run it as a plain process
//! group. What holds in both cases: the environment is not inherited, output is bounded, and at the
//! end, by whatever cause, every process of the command is killed.

mod bubblewrap;
mod capture;
mod limits;
mod processes;
mod seccomp;
mod spawn;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use capture::Capture;
pub(crate) use capture::Captured;
pub use limits::CommandLimits;
use processes::Limit;

use crate::confine;
use crate::scrub::Scrubber;
use crate::workspace::{PathError, RelativePath, Workspace};

/// How long the pipes of a killed command are read to their end; a process that escaped may hold
/// them open.
const DRAIN: Duration = Duration::from_secs(2);

/// How many commands of all tasks together run at the same time; more wait.
const MAX_RUNNING: usize = 64;

/// What bubblewrap says when it could not set up the sandbox, before anything ran.
const SANDBOX_FAILURE: &str = "bwrap: ";

/// Where programs are looked for when the policy adds nothing.
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What to do where no operating-system sandbox works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Confinement {
    /// Refuse commands.
    #[default]
    RequireSandbox,
    /// The operator accepts that commands then run with the rights of the service: its files, its
    /// network. Only the environment is cleared, and time, output, processes and memory are
    /// bounded.
    AllowUnconfined,
}

/// What commands of a task may do. The default grants nothing beyond the workspace and the system's
/// programs.
#[derive(Clone, Debug, Default)]
pub struct CommandPolicy {
    /// What to do where no sandbox works.
    pub confinement: Confinement,
    /// Commands share the network of the service, its loopback included. Off by default.
    pub network: bool,
    /// Commands without the network may use TCP among themselves. Off by default; makes a
    /// difference where Landlock is used.
    pub loopback: bool,
    /// Files and directories of the service itself: its cache where that is not in its data
    /// directory (which is always hidden), the files with its keys. No workspace may lie in them.
    /// Where they lie in a workspace, neither tools nor confined commands see them. What is made or
    /// replaced later is hidden from workspaces opened after that.
    pub hidden_paths: Vec<PathBuf>,
    /// Further host paths commands may read, for example a tool chain. Absolute; missing ones are
    /// skipped.
    pub read_only_paths: Vec<PathBuf>,
    /// Directories searched for programs before the system's own.
    pub search_path: Vec<PathBuf>,
    /// What one command may use.
    pub limits: CommandLimits,
}

/// Whether and how this host confines commands. Found out once at start; cloning is cheap.
#[derive(Clone, Debug)]
pub struct CommandSandbox {
    kind: Arc<Kind>,
    /// Bounds the commands of all tasks together.
    running: Arc<Semaphore>,
}

#[derive(Debug)]
enum Kind {
    Bubblewrap(bubblewrap::Bubblewrap),
    Unavailable(String),
}

/// A command to run.
pub(crate) struct Request {
    /// Shell script text.
    pub(crate) script: String,
    /// Where it starts.
    pub(crate) directory: RelativePath,
    /// Variables beside the fixed ones.
    pub(crate) environment: BTreeMap<String, String>,
    /// What it reads; nothing when empty.
    pub(crate) stdin: Vec<u8>,
    /// Wall time after which it is killed.
    pub(crate) timeout: Duration,
    /// Takes the secrets out of what it prints.
    pub(crate) scrubber: Arc<Scrubber>,
}

/// Without the values of the environment, which may be secret.
impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("script", &self.script)
            .field("directory", &self.directory)
            .finish_non_exhaustive()
    }
}

/// How a command ended that did start.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Exit status in the shell's convention, 128 + n for signal n; none when the service killed
    /// it.
    pub(crate) exit_code: Option<i32>,
    /// The signal that ended it, by name.
    pub(crate) signal: Option<&'static str>,
    /// It ran into its timeout.
    pub(crate) timed_out: bool,
    /// It was killed for using too much of this.
    pub(crate) limit_exceeded: Option<&'static str>,
    /// What it wrote to standard output.
    pub(crate) stdout: Captured,
    /// What it wrote to standard error.
    pub(crate) stderr: Captured,
    /// How long it ran.
    pub(crate) duration: Duration,
}

/// Why a command did not run, or was not let finish.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    /// There is no sandbox, and the policy wants one. Nothing ran.
    #[error("commands are refused because no operating-system sandbox works here: {reason}")]
    NoSandbox {
        /// What was found out at start.
        reason: String,
    },
    /// The directory cannot be used. Nothing ran.
    #[error(transparent)]
    Directory(#[from] PathError),
    /// The process could not be started. Nothing ran.
    #[error("the command could not be started")]
    Start(#[source] io::Error),
    /// The sandbox could not be set up. Nothing ran.
    #[error("the sandbox could not be set up, and the command did not run: {message}")]
    Setup {
        /// What bubblewrap said.
        message: String,
    },
    /// The call was cancelled; whatever ran was killed.
    #[error("the command was cancelled and killed")]
    Cancelled,
}

impl CommandSandbox {
    /// Finds out, by running them, whether bubblewrap works on this host, and Landlock inside.
    /// `program` is the interpreter's own, which does the latter (see [`crate::confine`]).
    pub async fn detect(program: &Path) -> Self {
        if rustix::process::geteuid().is_root() {
            tracing::warn!(
                "the interpreter runs as root, and so do confined commands as far as the kernel is concerned: they can \
                 change the mode of /dev/null and its like; run it as a user of its own"
            );
        }
        Self::new(match bubblewrap::Bubblewrap::detect(program).await {
            Ok(found) => Kind::Bubblewrap(found),
            Err(reason) => Kind::Unavailable(reason),
        })
    }

    /// A host without a sandbox, for the reason given.
    #[must_use]
    pub fn unavailable(reason: impl Into<String>) -> Self {
        Self::new(Kind::Unavailable(reason.into()))
    }

    fn new(kind: Kind) -> Self {
        Self { kind: Arc::new(kind), running: Arc::new(Semaphore::new(MAX_RUNNING)) }
    }

    /// Whether commands can be confined.
    #[must_use]
    pub fn is_available(&self) -> bool {
        matches!(*self.kind, Kind::Bubblewrap(_))
    }

    /// One sentence for the log at start.
    #[must_use]
    pub fn describe(&self) -> String {
        match &*self.kind {
            Kind::Bubblewrap(found) => format!("commands are confined by {found}"),
            Kind::Unavailable(reason) => format!("commands cannot be confined: {reason}"),
        }
    }

    /// Runs a command to its end, its timeout, a limit, or cancellation.
    pub(crate) async fn run(
        &self,
        workspace: &Workspace,
        policy: &CommandPolicy,
        request: Request,
        cancel: &CancellationToken,
    ) -> Result<Outcome, CommandError> {
        let _permit = tokio::select! {
            permit = self.running.acquire() => permit.map_err(|_| CommandError::Cancelled)?,
            () = cancel.cancelled() => return Err(CommandError::Cancelled),
        };
        let Prepared { command, mark } = self.prepare(workspace, policy, &request)?;
        let sandboxed = mark.is_none();
        if cancel.is_cancelled() {
            return Err(CommandError::Cancelled);
        }
        let started = Instant::now();
        let (spawned_group, spawned) =
            spawn::spawn(command, mark).await.map_err(CommandError::Start)?;
        // In this order, so that the group is dropped first: it finds what the child has started
        // while the child lives.
        let (mut child, group) = (spawned, spawned_group);
        let stdout = Capture::start(child.stdout.take(), Arc::clone(&request.scrubber));
        let stderr = Capture::start(child.stderr.take(), Arc::clone(&request.scrubber));
        let feeding = feed(&mut child, request.stdin);

        let ended = tokio::select! {
            status = child.wait() => Ended::Exited(status.map_err(CommandError::Start)?),
            () = tokio::time::sleep(request.timeout) => Ended::TimedOut,
            limit = group.watch(&policy.limits) => Ended::Limit(limit),
            () = cancel.cancelled() => Ended::Cancelled,
        };
        let duration = started.elapsed();
        if sandboxed && matches!(ended, Ended::Exited(_)) {
            // The namespace ends with its first process, and everything in it.
            group.is_gone();
        } else {
            // Also after a normal end: what the command left in the background ends with it.
            group.kill().await;
        }
        feeding.abort();
        if !matches!(ended, Ended::Exited(_)) {
            // Reaps the killed process; if the kernel cannot end it in time, the runtime reaps it
            // later.
            drop(tokio::time::timeout(DRAIN, child.wait()).await);
        }
        if matches!(ended, Ended::Cancelled) {
            return Err(CommandError::Cancelled);
        }
        let (stdout, stderr) = tokio::join!(stdout.finish(DRAIN), stderr.finish(DRAIN));
        let mut outcome = Outcome {
            exit_code: None,
            signal: None,
            timed_out: matches!(ended, Ended::TimedOut),
            limit_exceeded: None,
            stdout,
            stderr,
            duration,
        };
        match ended {
            Ended::Exited(status) => {
                let code = exit_code(status);
                if sandboxed
                    && is_setup_failure(code, &outcome.stderr.text)
                    && outcome.stdout.is_empty()
                {
                    return Err(CommandError::Setup {
                        message: outcome.stderr.text.trim().to_owned(),
                    });
                }
                outcome.exit_code = Some(code);
                outcome.signal = signal_name(code - 128);
            }
            Ended::Limit(limit) => {
                outcome.limit_exceeded = Some(limit.name());
                outcome.signal = Some("SIGKILL");
            }
            Ended::TimedOut | Ended::Cancelled => outcome.signal = Some("SIGKILL"),
        }
        Ok(outcome)
    }

    fn prepare(
        &self,
        workspace: &Workspace,
        policy: &CommandPolicy,
        request: &Request,
    ) -> Result<Prepared, CommandError> {
        // Opening it says in good words what is wrong, and pins the directory for a command without
        // a sandbox.
        let directory = workspace.open_directory(&request.directory)?;
        let mut environment = environment(policy, &request.environment);
        match &*self.kind {
            Kind::Bubblewrap(found) => {
                let place = bubblewrap::Place { workspace, start: &request.directory };
                let command = found
                    .command(Some(&place), policy, &environment, &request.script)
                    .map_err(CommandError::Start)?;
                Ok(Prepared { command, mark: None })
            }
            Kind::Unavailable(reason) => match policy.confinement {
                Confinement::RequireSandbox => {
                    Err(CommandError::NoSandbox { reason: reason.clone() })
                }
                Confinement::AllowUnconfined => {
                    let mark = uuid::Uuid::now_v7().simple().to_string();
                    environment.insert(processes::MARK.to_owned(), mark.clone());
                    let command = unconfined(directory, policy, &environment, &request.script);
                    Ok(Prepared { command, mark: Some(mark) })
                }
            },
        }
    }
}

/// A command ready to start.
struct Prepared {
    command: Command,
    /// The value of [`processes::MARK`], when there is no sandbox.
    mark: Option<String>,
}

enum Ended {
    Exited(ExitStatus),
    TimedOut,
    Limit(Limit),
    Cancelled,
}

/// The whole environment of a command: nothing is inherited from the service, whose environment
/// holds keys.
pub(crate) fn environment(
    policy: &CommandPolicy,
    wanted: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let mut path: Vec<String> =
        policy.search_path.iter().map(|entry| entry.to_string_lossy().into_owned()).collect();
    path.push(SYSTEM_PATH.to_owned());
    let fixed = [
        ("PATH", path.join(":")),
        ("HOME", "/tmp".to_owned()),
        ("TMPDIR", "/tmp".to_owned()),
        ("LANG", "C.UTF-8".to_owned()),
        ("TERM", "dumb".to_owned()),
        ("PAGER", "cat".to_owned()),
        ("GIT_TERMINAL_PROMPT", "0".to_owned()),
    ];
    let mut environment: BTreeMap<String, String> =
        fixed.map(|(name, value)| (name.to_owned(), value)).into();
    environment.extend(wanted.iter().map(|(name, value)| (name.clone(), value.clone())));
    environment
}

/// The shell: bash where there is one, because models write for it.
fn shell() -> &'static str {
    if Path::new("/bin/bash").exists() { "/bin/bash" } else { "/bin/sh" }
}

fn unconfined(
    directory: OwnedFd,
    policy: &CommandPolicy,
    environment: &BTreeMap<String, String>,
    script: &str,
) -> Command {
    let mut command = Command::new(shell());
    command.arg("-c").arg(script).env_clear().envs(environment);
    spawn::isolate(&mut command, &policy.limits, Vec::new(), Some(directory));
    command
}

fn piped(command: &mut Command) {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
}

fn feed(child: &mut Child, input: Vec<u8>) -> tokio::task::JoinHandle<()> {
    let stdin = child.stdin.take();
    tokio::spawn(async move {
        if let Some(mut stdin) = stdin {
            // A command that does not read all of its input is no failure.
            drop(stdin.write_all(&input).await);
        }
    })
}

/// Whether bubblewrap, or what it runs in front of the command, says that the command was not
/// begun.
fn is_setup_failure(code: i32, said: &str) -> bool {
    (code == 1 && said.starts_with(SANDBOX_FAILURE))
        || (code == i32::from(confine::FAILURE_STATUS) && said.starts_with(confine::FAILURE))
}

fn exit_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// The name of a signal that ends processes.
fn signal_name(number: i32) -> Option<&'static str> {
    Some(match number {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        5 => "SIGTRAP",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        10 => "SIGUSR1",
        11 => "SIGSEGV",
        12 => "SIGUSR2",
        13 => "SIGPIPE",
        14 => "SIGALRM",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        31 => "SIGSYS",
        _ => return None,
    })
}

#[cfg(test)]
pub(crate) mod tests;

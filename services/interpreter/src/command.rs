//! Running shell commands for scripts, confined and bounded.
//!
//! A command runs under bubblewrap in its own namespaces (see `command/bubblewrap.rs`). If the host
//! does not support that, the operator's policy decides: refuse the command, or run it as a plain
//! process group. In both cases the environment is not inherited, output is bounded, and every
//! process of the command is killed at the end, whatever its cause.

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
pub(crate) use capture::{CapturedOutput, HALF_BYTES as OUTPUT_HALF_BYTES};
pub use limits::CommandLimits;
use processes::Limit;

use crate::confine;
use crate::scrub::Scrubber;
use crate::workspace::{PathError, RelativePath, Workspace};

/// Time limit for reading the rest of the pipes of a command; a process that escaped may hold them
/// open.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum concurrent commands of all tasks; more wait.
const MAX_CONCURRENT_COMMANDS: usize = 64;

/// The prefix of bubblewrap's errors when it failed to set up the sandbox and nothing ran.
const SANDBOX_FAILURE: &str = "bwrap: ";

/// The search path for programs when the policy adds nothing.
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What to do on a host without a working operating-system sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Confinement {
    /// Refuse commands.
    #[default]
    RequireSandbox,
    /// Run commands with the rights of the service: its files, its network. Only the environment is
    /// cleared, and time, output, processes and memory are bounded.
    AllowUnconfined,
}

/// Permissions of a task's commands. The default grants nothing beyond the workspace and the
/// system's programs.
#[derive(Clone, Debug, Default)]
pub struct CommandPolicy {
    /// What to do without a working sandbox.
    pub confinement: Confinement,
    /// Commands share the network of the service, including its loopback. Off by default.
    pub network: bool,
    /// Commands without network access may use TCP on their own loopback. Off by default; only
    /// relevant with Landlock.
    pub loopback: bool,
    /// Files and directories of the service itself: its cache if that is not in its data directory
    /// (which is always hidden), and its key files. No workspace may be inside of them. If they are
    /// inside of a workspace, neither tools nor confined commands see them. Files that are created
    /// or replaced later are hidden from workspaces opened after that.
    pub hidden_paths: Vec<PathBuf>,
    /// Additional host paths that commands may read, for example a tool chain. They are absolute;
    /// missing ones are skipped.
    pub read_only_paths: Vec<PathBuf>,
    /// Directories that are searched for programs before the system's.
    pub search_path: Vec<PathBuf>,
    /// Resource limits of one command.
    pub limits: CommandLimits,
}

/// Whether and how this host confines commands. Detected once at start; cloning is cheap.
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
    /// Working directory.
    pub(crate) directory: RelativePath,
    /// Variables in addition to the fixed ones.
    pub(crate) environment: BTreeMap<String, String>,
    /// Standard input.
    pub(crate) stdin: Vec<u8>,
    /// Wall time after which it is killed.
    pub(crate) timeout: Duration,
    /// Removes the secrets it receives from its output.
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

/// The outcome of a command that was started.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Exit status in the shell's convention, 128 + n for signal n; `None` if the service killed
    /// it.
    pub(crate) exit_code: Option<i32>,
    /// The signal that ended it, by name.
    pub(crate) signal: Option<&'static str>,
    /// Whether it reached its timeout.
    pub(crate) timed_out: bool,
    /// The limit that it exceeded and was killed for.
    pub(crate) limit_exceeded: Option<&'static str>,
    /// Its standard output.
    pub(crate) stdout: CapturedOutput,
    /// Its standard error.
    pub(crate) stderr: CapturedOutput,
    /// How long it ran.
    pub(crate) duration: Duration,
}

/// The reason why a command did not run or did not finish.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    /// There is no sandbox, but the policy requires one. Nothing ran.
    #[error("commands are not available: no working operating-system sandbox: {reason}")]
    NoSandbox {
        /// The reason from the detection at start.
        reason: String,
    },
    /// The directory cannot be used. Nothing ran.
    #[error(transparent)]
    Directory(#[from] PathError),
    /// The process could not be started. Nothing ran.
    #[error("failed to start the command")]
    Start(#[source] io::Error),
    /// The sandbox could not be set up. Nothing ran.
    #[error("failed to set up the sandbox, the command did not run: {message}")]
    Setup {
        /// The error message of bubblewrap.
        message: String,
    },
    /// The call was canceled; the command was killed.
    #[error("the command was canceled and killed")]
    Cancelled,
}

impl CommandSandbox {
    /// Detects whether bubblewrap works on this host, and Landlock inside of it, by running them.
    /// `program` is the interpreter's own executable, which applies Landlock (see
    /// [`crate::confine`]).
    pub async fn detect(program: &Path) -> Self {
        if rustix::process::geteuid().is_root() {
            tracing::warn!(
                "the interpreter runs as root, and so do confined commands from the kernel's point of view: they can \
                 change the mode of shared devices such as /dev/null; run it as a separate user"
            );
        }
        Self::new(match bubblewrap::Bubblewrap::detect(program).await {
            Ok(bubblewrap) => Kind::Bubblewrap(bubblewrap),
            Err(reason) => Kind::Unavailable(reason),
        })
    }

    /// A host without a sandbox, with the reason.
    #[must_use]
    pub fn unavailable(reason: impl Into<String>) -> Self {
        Self::new(Kind::Unavailable(reason.into()))
    }

    fn new(kind: Kind) -> Self {
        Self { kind: Arc::new(kind), running: Arc::new(Semaphore::new(MAX_CONCURRENT_COMMANDS)) }
    }

    /// Whether commands can be confined.
    #[must_use]
    pub fn is_available(&self) -> bool {
        matches!(*self.kind, Kind::Bubblewrap(_))
    }

    /// Describes the sandbox, for the log at start.
    #[must_use]
    pub fn describe(&self) -> String {
        match &*self.kind {
            Kind::Bubblewrap(bubblewrap) => format!("commands are confined by {bubblewrap}"),
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
        let PreparedCommand { command, mark } = self.prepare(workspace, policy, &request)?;
        let sandboxed = mark.is_none();
        if cancel.is_cancelled() {
            return Err(CommandError::Cancelled);
        }
        let started = Instant::now();
        let (spawned_group, spawned) =
            spawn::spawn(command, mark).await.map_err(CommandError::Start)?;
        // In this order, so that the group is dropped before the child: it can only find the
        // child's descendants while the child lives.
        let (mut child, group) = (spawned, spawned_group);
        let stdout = Capture::start(child.stdout.take(), Arc::clone(&request.scrubber));
        let stderr = Capture::start(child.stderr.take(), Arc::clone(&request.scrubber));
        let feeding = feed(&mut child, request.stdin);

        let ended = tokio::select! {
            status = child.wait() => EndCause::Exited(status.map_err(CommandError::Start)?),
            () = tokio::time::sleep(request.timeout) => EndCause::TimedOut,
            limit = group.watch(&policy.limits) => EndCause::Limit(limit),
            () = cancel.cancelled() => EndCause::Cancelled,
        };
        let duration = started.elapsed();
        if sandboxed && matches!(ended, EndCause::Exited(_)) {
            // The namespace ends with its first process, and so does everything in it.
            group.mark_dead();
        } else {
            // Also after a normal end, to kill the command's background processes.
            group.kill().await;
        }
        feeding.abort();
        if !matches!(ended, EndCause::Exited(_)) {
            // Reaps the killed process; if the kernel is slow to end it, the runtime reaps it
            // later.
            drop(tokio::time::timeout(DRAIN_TIMEOUT, child.wait()).await);
        }
        if matches!(ended, EndCause::Cancelled) {
            return Err(CommandError::Cancelled);
        }
        // A command ended from outside may have been in the middle of its output.
        let complete = matches!(&ended, EndCause::Exited(status) if signal_name(exit_code(*status) - 128).is_none());
        let (stdout, stderr) = tokio::join!(
            stdout.finish(DRAIN_TIMEOUT, complete),
            stderr.finish(DRAIN_TIMEOUT, complete)
        );
        let mut outcome = Outcome {
            exit_code: None,
            signal: None,
            timed_out: matches!(ended, EndCause::TimedOut),
            limit_exceeded: None,
            stdout,
            stderr,
            duration,
        };
        match ended {
            EndCause::Exited(status) => {
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
            EndCause::Limit(limit) => {
                outcome.limit_exceeded = Some(limit.name());
                outcome.signal = Some("SIGKILL");
            }
            EndCause::TimedOut | EndCause::Cancelled => outcome.signal = Some("SIGKILL"),
        }
        Ok(outcome)
    }

    fn prepare(
        &self,
        workspace: &Workspace,
        policy: &CommandPolicy,
        request: &Request,
    ) -> Result<PreparedCommand, CommandError> {
        // Opening the directory gives a good error message, and pins it for a command without a
        // sandbox.
        let directory = workspace.open_directory(&request.directory)?;
        let mut environment = environment(policy, &request.environment);
        match &*self.kind {
            Kind::Bubblewrap(bubblewrap) => {
                let location =
                    bubblewrap::WorkingDirectory { workspace, start: &request.directory };
                let command = bubblewrap
                    .command(Some(&location), policy, &environment, &request.script)
                    .map_err(CommandError::Start)?;
                Ok(PreparedCommand { command, mark: None })
            }
            Kind::Unavailable(reason) => match policy.confinement {
                Confinement::RequireSandbox => {
                    Err(CommandError::NoSandbox { reason: reason.clone() })
                }
                Confinement::AllowUnconfined => {
                    let mark = uuid::Uuid::now_v7().simple().to_string();
                    environment.insert(processes::MARK.to_owned(), mark.clone());
                    let command = unconfined(directory, policy, &environment, &request.script);
                    Ok(PreparedCommand { command, mark: Some(mark) })
                }
            },
        }
    }
}

/// A command ready to start.
struct PreparedCommand {
    command: Command,
    /// The value of [`processes::MARK`] for a command without a sandbox.
    mark: Option<String>,
}

enum EndCause {
    Exited(ExitStatus),
    TimedOut,
    Limit(Limit),
    Cancelled,
}

/// The environment of a command. Nothing is inherited from the service, whose environment contains
/// keys.
pub(crate) fn environment(
    policy: &CommandPolicy,
    additional: &BTreeMap<String, String>,
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
    environment.extend(additional.iter().map(|(name, value)| (name.clone(), value.clone())));
    environment
}

/// The shell: bash if it is installed, because models write for it.
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
            // A command may end without reading all of its input.
            drop(stdin.write_all(&input).await);
        }
    })
}

/// Whether bubblewrap, or the program that applies Landlock, reports that the command was not
/// started.
fn is_setup_failure(code: i32, stderr: &str) -> bool {
    (code == 1 && stderr.starts_with(SANDBOX_FAILURE))
        || (code == i32::from(confine::FAILURE_STATUS) && stderr.starts_with(confine::FAILURE))
}

fn exit_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// The name of a signal that terminates processes.
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

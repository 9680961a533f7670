//! `execute_command`: a shell command as a tool.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use construct_domain::secret;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::environment::{self, Environment};
use super::error::{OUTSIDE, ToolError, path_error};
use super::kind::{Kind, Parameter, optional, required};
use super::output::{Output, field};
use super::secrets::{self, NOT_ALLOWED, Secrets};
use super::subject::PolicySubject;
use crate::command::{CommandError, CommandPolicy, CommandSandbox, Request};
use crate::workspace::{RelativePath, Workspace};

pub(super) const DEFINITION: Definition = Definition {
    name: "execute_command",
    aliases: &["bash"],
    summary: "Runs a shell command in the workspace and waits for its end.",
    description: "A non-zero exit code is a result, not an error: look at exit_code.\nOnly the workspace and a private /tmp \
        are writable, and there is no network unless it was granted. Processes left in the background are killed at the end. \
        Of each output the first and the last 128 KiB are kept.",
    parameters: &[
        required("command", Kind::Text { min_bytes: 1, max_bytes: MAX_SCRIPT }, "Shell script."),
        optional("options", OPTIONS, "{}", "Options."),
    ],
    output: EXECUTED,
    like: None,
    example: "execute_command(\"cargo test\", { timeout_seconds: 300 })",
    errors: &[
        UNAVAILABLE,
        NOT_STARTED,
        NOT_ALLOWED,
        secrets::NOT_FOUND,
        secrets::UNAVAILABLE,
        OUTSIDE,
        NO_DIRECTORY,
        NOT_A_DIRECTORY,
    ],
    effect: Effect::External,
    permission: Permission::Commands,
    subject: |args| PolicySubject::Command(args["command"].as_str().unwrap_or_default().to_owned()),
    provider: Provider::Host,
    limits: limits(620, 512),
};

/// Longest shell script, in bytes: the kernel takes no argument over 128 KiB.
pub(super) const MAX_SCRIPT: usize = 100_000;

/// What every tool that runs a program can be told.
pub(super) const OPTIONS: Kind = Kind::Object(&[
    optional(
        "timeout_seconds",
        Kind::Integer { min: 1, max: 600 },
        "120",
        "After this time everything it started is killed.",
    ),
    optional(
        "cwd",
        Kind::Path,
        "the workspace",
        "Directory to start in, relative to the workspace.",
    ),
    optional("env", Kind::TextMap, "{}", "Environment variables to set, for this call."),
    STDIN,
]);

const STDIN: Parameter = optional(
    "stdin",
    Kind::Text { min_bytes: 0, max_bytes: 1 << 20 },
    "empty",
    "Its standard input.",
);

/// What every tool that runs a program returns.
pub(super) const EXECUTED: Output = Output::Object(&[
    field(
        "exit_code",
        Output::Nullable(&Output::Integer),
        "128 + n where signal n ended it, null where it was killed.",
    ),
    field("stdout", Output::Text, "What it wrote to standard output."),
    field("stderr", Output::Text, "What it wrote to standard error."),
    field("timed_out", Output::Boolean, "Whether it was killed because its time was over."),
    field(
        "signal",
        Output::Nullable(&Output::Text),
        "The signal that ended it, for example SIGKILL.",
    ),
    field("truncated", Output::Boolean, "Whether parts of its output were left out."),
    field(
        "limit_exceeded",
        Output::Nullable(&Output::OneOf(&["processes", "memory", "cpu"])),
        "What it used too much of, and was killed for.",
    ),
    field("duration_ms", Output::Integer, "How long it ran."),
]);

const UNAVAILABLE: (&str, &str) =
    ("CommandsUnavailable", "when this host cannot confine commands; nothing ran.");

const NOT_STARTED: (&str, &str) =
    ("CommandNotStarted", "when its process or sandbox could not be made; nothing ran.");

const NO_DIRECTORY: (&str, &str) = ("FileNotFound", "when there is no directory `cwd`.");

const NOT_A_DIRECTORY: (&str, &str) = ("NotADirectory", "when `cwd` is a file.");

const TOOL: &str = DEFINITION.name;

/// Seconds after which a command is killed when nothing else is asked for.
const DEFAULT_TIMEOUT: u64 = 120;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    command: String,
    #[serde(default)]
    options: Options,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Options {
    timeout_seconds: Option<u64>,
    cwd: Option<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    pub(super) stdin: Option<String>,
}

#[derive(Serialize)]
pub(super) struct Executed {
    pub(super) exit_code: Option<i32>,
    pub(super) stdout: String,
    pub(super) stderr: String,
    timed_out: bool,
    signal: Option<&'static str>,
    truncated: bool,
    limit_exceeded: Option<&'static str>,
    duration_ms: u64,
}

/// What a command runs with.
#[derive(Clone, Copy)]
pub(super) struct Host<'a> {
    pub(super) sandbox: &'a CommandSandbox,
    pub(super) workspace: &'a Workspace,
    pub(super) policy: &'a CommandPolicy,
    /// What scripts had set when they made the call.
    pub(super) variables: &'a Environment,
    pub(super) secrets: &'a Secrets,
    pub(super) cancel: &'a CancellationToken,
}

pub(super) async fn run(host: Host<'_>, arguments: Arguments) -> Result<Executed, ToolError> {
    let Arguments { command, options } = arguments;
    let program = secret::program(&command).map(str::to_owned);
    host.run(TOOL, program.as_deref(), command, options).await
}

impl Host<'_> {
    /// Runs a shell script for a tool. `program` is what secrets that the script gets have to be
    /// bound to.
    pub(super) async fn run(
        self,
        tool: &'static str,
        program: Option<&str>,
        script: String,
        options: Options,
    ) -> Result<Executed, ToolError> {
        let Self { sandbox, workspace, policy, variables, secrets, cancel } = self;
        if script.contains('\0') {
            return Err(ToolError::invalid(format!(
                "{tool}: there is a NUL character in it, which no command can take."
            )));
        }
        secrets::refuse(tool, "the command", &script)?;
        secrets::refuse(tool, "the standard input", options.stdin.as_deref().unwrap_or_default())?;
        let environment = secrets.in_environment(
            tool,
            program,
            environment::with(variables, tool, options.env)?,
        )?;
        let directory = match &options.cwd {
            Some(path) => workspace.locate(path).map_err(|e| path_error(workspace, &e))?,
            None => RelativePath::root(),
        };
        let request = Request {
            script,
            directory,
            environment,
            stdin: options.stdin.unwrap_or_default().into_bytes(),
            timeout: Duration::from_secs(options.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT)),
            scrubber: Arc::clone(secrets.scrubber()),
        };
        let outcome = sandbox
            .run(workspace, policy, request, cancel)
            .await
            .map_err(|e| refused(tool, workspace, &e))?;
        Ok(Executed {
            exit_code: outcome.exit_code,
            truncated: outcome.stdout.truncated || outcome.stderr.truncated,
            stdout: outcome.stdout.text,
            stderr: outcome.stderr.text,
            timed_out: outcome.timed_out,
            signal: outcome.signal,
            limit_exceeded: outcome.limit_exceeded,
            duration_ms: u64::try_from(outcome.duration.as_millis()).unwrap_or(u64::MAX),
        })
    }
}

fn refused(tool: &str, workspace: &Workspace, error: &CommandError) -> ToolError {
    match error {
        CommandError::NoSandbox { reason } => ToolError::new(
            UNAVAILABLE.0,
            format!(
                "Commands are refused on this host, and nothing ran: there is no working operating-system sandbox \
                 ({reason}). The operator can install bubblewrap and permit user namespaces, or accept commands \
                 without confinement. Do what you can with the other tools."
            ),
        ),
        CommandError::Directory(error) => path_error(workspace, error),
        CommandError::Start(source) => ToolError::new(
            NOT_STARTED.0,
            format!("The command did not run: it could not be started ({source})."),
        ),
        CommandError::Setup { message } => ToolError::new(
            NOT_STARTED.0,
            format!("The command did not run: its sandbox could not be set up ({message})."),
        ),
        CommandError::Cancelled => ToolError::cancelled(tool),
    }
}

//! `execute_command`: a shell command as a tool.

use std::collections::BTreeMap;
use std::time::Duration;

use construct_domain::secret;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::definition::{Definition, Effect, Permission, Provider, wall_limit};
use super::environment::{self, Environment};
use super::error::{OUTSIDE, ToolError, path_error};
use super::kind::{Kind, Parameter, optional, required};
use super::note;
use super::output::{Output, field, optional_field};
use super::secrets::{self, NOT_ALLOWED, Secrets};
use super::size::json_size;
use super::subject::PolicySubject;
use crate::command::{CommandError, CommandPolicy, CommandSandbox, OUTPUT_HALF_BYTES, Request};
use crate::workspace::{RelativePath, Workspace};

pub(super) const DEFINITION: Definition = Definition {
    name: "execute_command",
    aliases: &["bash"],
    summary: "Runs a shell command in the workspace and waits for it to end.",
    description: "A non-zero exit code is a result, not an error: check exit_code.\nOnly the workspace and a private /tmp \
        are writable; there is no network access unless it was granted. Background processes are killed when the command ends.",
    parameters: &[
        required("command", Kind::Text { min_bytes: 1, max_bytes: MAX_SCRIPT }, "Shell script."),
        optional("options", OPTIONS, "{}", "Options."),
    ],
    output: COMMAND_OUTPUT,
    base_tool: None,
    example: "execute_command(\"cargo test\", { timeout_seconds: 300 })",
    errors: &[
        OUTPUT_TOO_LARGE,
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
    limits: wall_limit(620),
};

/// Longest shell script, in bytes: the kernel limits an argument to 128 KiB.
pub(super) const MAX_SCRIPT: usize = 100_000;

/// Options of every tool that runs a program.
pub(super) const OPTIONS: Kind = Kind::Object(&[
    optional(
        "timeout_seconds",
        Kind::Integer { min: 1, max: 600 },
        "120",
        "The command and all its processes are killed after this time.",
    ),
    optional(
        "cwd",
        Kind::Path,
        "the workspace",
        "Directory to start in, relative to the workspace.",
    ),
    optional("env", Kind::TextMap, "{}", "Environment variables for this call."),
    STDIN,
]);

const STDIN: Parameter = optional(
    "stdin",
    Kind::Text { min_bytes: 0, max_bytes: 1 << 20 },
    "empty",
    "Its standard input.",
);

/// The result of every tool that runs a program.
pub(super) const COMMAND_OUTPUT: Output = Output::Object(&[
    field(
        "exit_code",
        Output::Nullable(&Output::Integer),
        "128 + n if signal n ended it, null if it was killed.",
    ),
    field("stdout", Output::Text, "Its standard output."),
    field("stderr", Output::Text, "Its standard error."),
    field("timed_out", Output::Boolean, "Whether it was killed after its timeout."),
    field(
        "signal",
        Output::Nullable(&Output::Text),
        "The signal that ended it, for example SIGKILL.",
    ),
    field(
        "limit_exceeded",
        Output::Nullable(&Output::OneOf(&["processes", "memory", "cpu"])),
        "The limit it exceeded and was killed for.",
    ),
    field("duration_ms", Output::Integer, "How long it ran."),
    optional_field("note", Output::Text, "How stdout and stderr differ from what it wrote."),
]);

const OUTPUT_TOO_LARGE: (&str, &str) = (
    "OutputTooLarge",
    "when it ran but wrote more than 2 MiB; details has the exit code and the beginning and end of each output.",
);

const UNAVAILABLE: (&str, &str) =
    ("CommandsUnavailable", "when this host cannot sandbox commands; nothing ran.");

const NOT_STARTED: (&str, &str) =
    ("CommandNotStarted", "when its process or sandbox could not be created; nothing ran.");

const NO_DIRECTORY: (&str, &str) = ("FileNotFound", "when there is no directory `cwd`.");

const NOT_A_DIRECTORY: (&str, &str) = ("NotADirectory", "when `cwd` is a file.");

const TOOL: &str = DEFINITION.name;

/// Default timeout of a command, in seconds.
const DEFAULT_TIMEOUT_SECONDS: u64 = 120;

/// How much of the beginning and of the end of an oversized output an error shows, in bytes.
const EXCERPT_BYTES: usize = 8 * 1024;

/// Size of a result as JSON without its outputs, in bytes.
const RESULT_OVERHEAD_BYTES: usize = 1024;

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
pub(super) struct CommandResult {
    pub(super) exit_code: Option<i32>,
    pub(super) stdout: String,
    pub(super) stderr: String,
    timed_out: bool,
    signal: Option<&'static str>,
    limit_exceeded: Option<&'static str>,
    duration_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<&'static str>,
}

/// The environment that a command runs in.
#[derive(Clone, Copy)]
pub(super) struct Host<'a> {
    pub(super) sandbox: &'a CommandSandbox,
    pub(super) workspace: &'a Workspace,
    pub(super) policy: &'a CommandPolicy,
    /// The variables that scripts had set when they made the call.
    pub(super) variables: &'a Environment,
    pub(super) secrets: &'a Secrets,
    /// Largest result, in bytes of JSON.
    pub(super) result_bytes: usize,
    pub(super) cancel: &'a CancellationToken,
}

pub(super) async fn run(host: Host<'_>, arguments: Arguments) -> Result<CommandResult, ToolError> {
    let Arguments { command, options } = arguments;
    let program = secret::program(&command).map(str::to_owned);
    host.run(TOOL, program.as_deref(), command, options).await
}

impl Host<'_> {
    /// Runs a shell script for a tool. Secrets in its environment must be bound to `program`.
    pub(super) async fn run(
        self,
        tool: &'static str,
        program: Option<&str>,
        script: String,
        options: Options,
    ) -> Result<CommandResult, ToolError> {
        let Self { sandbox, workspace, policy, variables, secrets, result_bytes, cancel } = self;
        if script.contains('\0') {
            return Err(ToolError::invalid(format!(
                "{tool}: the command contains a NUL character, which is not allowed."
            )));
        }
        secrets::refuse(tool, "the command", &script)?;
        secrets::refuse(tool, "the standard input", options.stdin.as_deref().unwrap_or_default())?;
        let variables = environment::merge(variables, tool, options.env)?;
        let (environment, sent) = secrets.in_environment(tool, program, variables)?;
        let directory = match &options.cwd {
            Some(path) => workspace.locate(path).map_err(|e| path_error(workspace, &e))?,
            None => RelativePath::root(),
        };
        let request = Request {
            script,
            directory,
            environment,
            stdin: options.stdin.unwrap_or_default().into_bytes(),
            timeout: Duration::from_secs(
                options.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS),
            ),
            scrubber: secrets.scrubber(&sent),
        };
        let outcome = sandbox
            .run(workspace, policy, request, cancel)
            .await
            .map_err(|e| command_error(tool, workspace, &e))?;
        let is_truncated = outcome.stdout.truncated || outcome.stderr.truncated;
        let is_replaced = outcome.stdout.is_replaced || outcome.stderr.is_replaced;
        let is_withheld = outcome.stdout.is_withheld || outcome.stderr.is_withheld;
        let executed = CommandResult {
            exit_code: outcome.exit_code,
            stdout: outcome.stdout.text,
            stderr: outcome.stderr.text,
            timed_out: outcome.timed_out,
            signal: outcome.signal,
            limit_exceeded: outcome.limit_exceeded,
            duration_ms: u64::try_from(outcome.duration.as_millis()).unwrap_or(u64::MAX),
            note: if is_withheld {
                Some(note::WITHHELD)
            } else {
                is_replaced.then_some(note::NOT_UTF8)
            },
        };
        if is_truncated
            || json_size(&executed.stdout) + json_size(&executed.stderr) + RESULT_OVERHEAD_BYTES
                > result_bytes
        {
            return Err(output_too_large(tool, executed, result_bytes));
        }
        Ok(executed)
    }
}

/// The error for a command that ran and wrote more than a script can receive. A script gets all of
/// the output or none; the error shows the beginning and the end.
fn output_too_large(tool: &str, executed: CommandResult, result_bytes: usize) -> ToolError {
    let ended = match (executed.exit_code, executed.timed_out) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, true) => "was killed after its timeout".to_owned(),
        (None, false) => "was killed".to_owned(),
    };
    let message = format!(
        "{tool}: the command ran and {ended}; its effects remain, but its output is too large. Each output may have {} \
         bytes, both together {result_bytes} bytes as JSON. The details have the beginning and end of each. To get all \
         of it, write it to a file (`> out.txt 2>&1`) and read that in pieces; otherwise shorten it with head, tail or \
         grep.",
        2 * OUTPUT_HALF_BYTES
    );
    let (stdout, stderr) = (excerpt(&executed.stdout), excerpt(&executed.stderr));
    ToolError::new(OUTPUT_TOO_LARGE.0, message).with(json!(CommandResult {
        stdout,
        stderr,
        ..executed
    }))
}

/// The beginning and the end of a text, with a mark for the omitted middle.
fn excerpt(text: &str) -> String {
    if text.len() <= 2 * EXCERPT_BYTES {
        return text.to_owned();
    }
    let (first, last) = (
        text.floor_char_boundary(EXCERPT_BYTES),
        text.ceil_char_boundary(text.len() - EXCERPT_BYTES),
    );
    format!("{}\n[… omitted …]\n{}", &text[..first], &text[last..])
}

fn command_error(tool: &str, workspace: &Workspace, error: &CommandError) -> ToolError {
    match error {
        CommandError::NoSandbox { reason } => ToolError::new(
            UNAVAILABLE.0,
            format!(
                "Commands are not available on this host, and nothing ran: there is no working operating-system \
                 sandbox ({reason}). The operator can install bubblewrap and permit user namespaces, or allow commands \
                 without a sandbox. Use the other tools instead."
            ),
        ),
        CommandError::Directory(error) => path_error(workspace, error),
        CommandError::Start(source) => ToolError::new(
            NOT_STARTED.0,
            format!("The command did not run: failed to start it ({source})."),
        ),
        CommandError::Setup { message } => ToolError::new(
            NOT_STARTED.0,
            format!("The command did not run: failed to set up its sandbox ({message})."),
        ),
        CommandError::Cancelled => ToolError::cancelled(tool),
    }
}

//! `execute_command`: a shell command as a tool.

use std::collections::BTreeMap;
use std::time::Duration;

use construct_domain::secret;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::definition::{Definition, Effect, Permission, Provider, whole};
use super::environment::{self, Environment};
use super::error::{OUTSIDE, ToolError, path_error};
use super::kind::{Kind, Parameter, optional, required};
use super::note;
use super::output::{Output, field, optional_field};
use super::secrets::{self, NOT_ALLOWED, Secrets};
use super::size::written;
use super::subject::PolicySubject;
use crate::command::{CommandError, CommandPolicy, CommandSandbox, OUTPUT_HALF, Request};
use crate::workspace::{RelativePath, Workspace};

pub(super) const DEFINITION: Definition = Definition {
    name: "execute_command",
    aliases: &["bash"],
    summary: "Runs a shell command in the workspace and waits for its end.",
    description: "A non-zero exit code is a result, not an error: look at exit_code.\nOnly the workspace and a private /tmp \
        are writable, and there is no network unless it was granted. Processes left in the background are killed at the end.",
    parameters: &[
        required("command", Kind::Text { min_bytes: 1, max_bytes: MAX_SCRIPT }, "Shell script."),
        optional("options", OPTIONS, "{}", "Options."),
    ],
    output: EXECUTED,
    like: None,
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
    limits: whole(620),
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
    field(
        "limit_exceeded",
        Output::Nullable(&Output::OneOf(&["processes", "memory", "cpu"])),
        "What it used too much of, and was killed for.",
    ),
    field("duration_ms", Output::Integer, "How long it ran."),
    optional_field("note", Output::Text, "How its output differs from what it wrote."),
]);

const OUTPUT_TOO_LARGE: (&str, &str) = (
    "OutputTooLarge",
    "when it has run, but wrote more than 2 MiB; details has the exit code and the ends of each output.",
);

const UNAVAILABLE: (&str, &str) =
    ("CommandsUnavailable", "when this host cannot confine commands; nothing ran.");

const NOT_STARTED: (&str, &str) =
    ("CommandNotStarted", "when its process or sandbox could not be made; nothing ran.");

const NO_DIRECTORY: (&str, &str) = ("FileNotFound", "when there is no directory `cwd`.");

const NOT_A_DIRECTORY: (&str, &str) = ("NotADirectory", "when `cwd` is a file.");

const TOOL: &str = DEFINITION.name;

/// Seconds after which a command is killed when nothing else is asked for.
const DEFAULT_TIMEOUT: u64 = 120;

/// How much an error shows of each end of an output that is too large, in bytes.
const END: usize = 8 * 1024;

/// What a result takes as JSON beside its outputs.
const AROUND: usize = 1024;

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
    limit_exceeded: Option<&'static str>,
    duration_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<&'static str>,
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
    /// How large a result may be as JSON.
    pub(super) result_bytes: usize,
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
        let Self { sandbox, workspace, policy, variables, secrets, result_bytes, cancel } = self;
        if script.contains('\0') {
            return Err(ToolError::invalid(format!(
                "{tool}: there is a NUL character in it, which no command can take."
            )));
        }
        secrets::refuse(tool, "the command", &script)?;
        secrets::refuse(tool, "the standard input", options.stdin.as_deref().unwrap_or_default())?;
        let variables = environment::with(variables, tool, options.env)?;
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
            timeout: Duration::from_secs(options.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT)),
            scrubber: secrets.scrubber(&sent),
        };
        let outcome = sandbox
            .run(workspace, policy, request, cancel)
            .await
            .map_err(|e| refused(tool, workspace, &e))?;
        let is_cut = outcome.stdout.truncated || outcome.stderr.truncated;
        let is_replaced = outcome.stdout.is_replaced || outcome.stderr.is_replaced;
        let is_withheld = outcome.stdout.is_withheld || outcome.stderr.is_withheld;
        let executed = Executed {
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
                is_replaced.then_some(note::REPLACED)
            },
        };
        if is_cut || written(&executed.stdout) + written(&executed.stderr) + AROUND > result_bytes {
            return Err(output_too_large(tool, executed, result_bytes));
        }
        Ok(executed)
    }
}

/// The command ran, and wrote more than a script can get. What a script gets is all of it or
/// nothing; the error shows the ends.
fn output_too_large(tool: &str, executed: Executed, result_bytes: usize) -> ToolError {
    let ended = match (executed.exit_code, executed.timed_out) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, true) => "was killed because its time was over".to_owned(),
        (None, false) => "was killed".to_owned(),
    };
    let message = format!(
        "{tool}: the command ran and {ended}, and what it did stands; only its output is too large: an output may have {} bytes, both \
         together {result_bytes}, as JSON. The ends of each are in the details. Where all of it is needed, let the command write it to a \
         file (`> out.txt 2>&1`) and read that in pieces; otherwise shorten it there, with head, tail or grep.",
        2 * OUTPUT_HALF
    );
    let (stdout, stderr) = (ends(&executed.stdout), ends(&executed.stderr));
    ToolError::new(OUTPUT_TOO_LARGE.0, message).with(json!(Executed { stdout, stderr, ..executed }))
}

/// The beginning and the end of a text, with what is left out between them, for a reader.
fn ends(text: &str) -> String {
    if text.len() <= 2 * END {
        return text.to_owned();
    }
    let (first, last) = (text.floor_char_boundary(END), text.ceil_char_boundary(text.len() - END));
    format!("{}\n[… left out here …]\n{}", &text[..first], &text[last..])
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

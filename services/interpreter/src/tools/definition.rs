//! What is known about a tool, and the forms it is shown in.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::Value;

use super::argument;
use super::error::ToolError;
use super::kind::{Parameter, object_schema};
use super::output::Output;
use super::subject::PolicySubject;
use super::table;

/// The namespace whose functions always give a promise, as the sandbox offers it.
const PROMISES: &str = "tools";

/// The parameter that tools which are alike share.
const OPTIONS: &str = "options";

/// Errors of every tool of the toolbox, which its definition need not name.
pub(super) const ERRORS_OF_ALL: [&str; 3] = ["InvalidArguments", "Cancelled", "InternalError"];

/// Errors of every tool that takes a path. The last four are named where they are to be expected;
/// they come also where something else changes what is there meanwhile.
pub(super) const ERRORS_OF_PATHS: [&str; 9] = [
    "OutsideWorkspace",
    "InvalidPath",
    "PermissionDenied",
    "NotARegularFile",
    "IoError",
    "FileNotFound",
    "IsADirectory",
    "NotADirectory",
    "FileChanged",
];

/// Errors of every tool that does nothing but work on files, where it has nothing to show when its
/// time is over.
pub(super) const ERRORS_OF_FILES: [&str; 1] = ["Timeout"];

/// Errors of every tool that reaches other tasks. Like the others above they stand on the page and
/// not in each definition, which a prompt would pay for every time.
pub(super) const ERRORS_OF_TASKS: [&str; 2] = ["TaskOver", "TasksUnavailable"];

/// Words of JavaScript that cannot be called as a function; a tool of that name is a member of
/// `tools` only.
const RESERVED: [&str; 1] = ["delete"];

/// One tool.
#[derive(Debug)]
pub struct Definition {
    /// Its name: that of the global function in scripts, or with one dot that of a function in a
    /// namespace.
    pub name: &'static str,
    /// Other names by which scripts may call it. One that JavaScript reserves can be called as a
    /// member of `tools` only.
    pub aliases: &'static [&'static str],
    /// What it does, in one line.
    pub summary: &'static str,
    /// What else the model must know to use it; may be empty, may have several lines.
    pub description: &'static str,
    /// Its parameters, in positional order: required ones first.
    pub parameters: &'static [Parameter],
    /// What it returns.
    pub output: Output,
    /// A tool with the same `options` and result, told of before it: the signature refers to that
    /// one's instead of repeating them, which a prompt would pay for every time.
    pub like: Option<&'static str>,
    /// A call, for the declarations and for error messages.
    pub example: &'static str,
    /// Names of the errors that are particular to it, with their meaning; those of a tool that it
    /// is like come on top.
    pub errors: &'static [(&'static str, &'static str)],
    /// What a call changes.
    pub effect: Effect,
    /// What a policy calls it.
    pub permission: Permission,
    /// What of a call's canonical arguments a policy decides on.
    pub subject: fn(&Value) -> PolicySubject,
    /// Who carries it out.
    pub provider: Provider,
    /// How much a call may use.
    pub limits: Limits,
}

/// What a call changes, and so whether it may be repeated when nobody knows whether it was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing: repeating it is safe.
    Read,
    /// Files of the workspace, or what the toolbox remembers.
    Write,
    /// Anything, also outside: a command or a request.
    External,
}

/// The classes of what tools do, of which a policy speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Permission {
    /// Reaches nothing; there is nothing to decide.
    Pure,
    /// Reads files of the workspace, or their names.
    FilesRead,
    /// Makes or changes files.
    FilesWrite,
    /// Deletes files.
    FilesDelete,
    /// Runs programs.
    Commands,
    /// Makes requests.
    Network,
    /// Asks models.
    Models,
    /// Reads or sets the variables of the task's commands.
    Environment,
    /// Begins other tasks, writes to them and waits for them.
    Tasks,
}

/// Who carries a tool out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// The toolbox.
    Host,
    /// The sandbox itself; the toolbox refuses it.
    Sandbox,
}

/// How much a call may use. What the arguments ask for is bounded by the parameters themselves.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest wall time of a call from when it has its turn, including what its arguments ask for;
    /// none where only the script's own time bounds it.
    pub wall: Option<Duration>,
    /// Largest result, in bytes of text, approximately: the tool cuts its result and says so.
    pub result_bytes: usize,
}

pub(super) const fn limits(wall_seconds: u64, result_kib: usize) -> Limits {
    Limits { wall: Some(Duration::from_secs(wall_seconds)), result_bytes: result_kib << 10 }
}

/// Limits of a call that is made again until there is an answer.
pub(super) const fn unlimited(result_kib: usize) -> Limits {
    Limits { wall: None, result_bytes: result_kib << 10 }
}

impl Effect {
    /// The word for it in documentation.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::External => "external",
        }
    }
}

impl Permission {
    /// Every class.
    pub const ALL: [Self; 9] = [
        Self::Pure,
        Self::FilesRead,
        Self::FilesWrite,
        Self::FilesDelete,
        Self::Commands,
        Self::Network,
        Self::Models,
        Self::Environment,
        Self::Tasks,
    ];

    /// The word for it in policies.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pure => "pure",
            Self::FilesRead => "files.read",
            Self::FilesWrite => "files.write",
            Self::FilesDelete => "files.delete",
            Self::Commands => "commands",
            Self::Network => "network",
            Self::Models => "models",
            Self::Environment => "environment",
            Self::Tasks => "tasks",
        }
    }
}

impl Definition {
    /// Whether a call may be made again when nobody knows whether it was made. True of reads, and
    /// of what changes only the toolbox, which is lost together with the process that died; and of
    /// what is done about other tasks, where the same call makes the same once.
    #[must_use]
    pub fn is_repeatable(&self) -> bool {
        self.effect == Effect::Read
            || matches!(self.permission, Permission::Environment | Permission::Tasks)
    }

    /// Whether it is called so.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        self.name == name || self.aliases.contains(&name)
    }

    /// The arguments in their one canonical form: checked, by name, without those that were not
    /// given, keys sorted, paths without `.`, `..` and doubled slashes where that can be told from
    /// the text. Calls that mean the same have the same form, whatever way they were written; it is
    /// what is approved and hashed.
    ///
    /// A toolbox also makes absolute paths relative, see [`super::Toolbox::canonical`].
    ///
    /// # Errors
    /// When the arguments do not fit; the call itself would fail with the same error.
    pub fn canonical(&self, args: &Value) -> Result<Value, ToolError> {
        argument::check(self, args.clone(), &argument::lexical)
    }

    /// The errors that are particular to it and to the tool that it is like.
    pub(super) fn all_errors(&self) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        let like = self.like.and_then(table::definition).map_or(&[][..], |tool| tool.errors);
        self.errors.iter().chain(like)
    }

    /// Whether a call may fail with an error of this name, as this definition and the page about
    /// the tools have it.
    #[must_use]
    pub fn can_fail_with(&self, error: &str) -> bool {
        self.all_errors().any(|(name, _)| *name == error)
            || ERRORS_OF_ALL.contains(&error)
            || match self.permission {
                Permission::FilesRead | Permission::FilesWrite | Permission::FilesDelete => {
                    ERRORS_OF_FILES.contains(&error)
                }
                Permission::Tasks => ERRORS_OF_TASKS.contains(&error),
                _ => false,
            }
            || (ERRORS_OF_PATHS.contains(&error)
                && self.parameters.iter().any(|parameter| parameter.kind.has_path()))
    }

    /// What a policy decides on, taken from canonical arguments.
    #[must_use]
    pub fn subject(&self, canonical: &Value) -> PolicySubject {
        (self.subject)(canonical)
    }

    /// Its TypeScript signature without documentation, for example `read_file(path: string):
    /// string`.
    #[must_use]
    pub fn signature(&self) -> String {
        self.signed(self.name)
    }

    fn signed(&self, name: &str) -> String {
        let parameter = |parameter: &Parameter| match self.like {
            Some(tool) if parameter.name == OPTIONS => {
                format!("{OPTIONS}?: Parameters<typeof {tool}>[1]")
            }
            _ => parameter.typescript(),
        };
        let parameters: Vec<String> = self.parameters.iter().map(parameter).collect();
        let output = self
            .like
            .map_or_else(|| self.output.typescript(), |tool| format!("ReturnType<typeof {tool}>"));
        let output =
            if self.namespace() == Some(PROMISES) { format!("Promise<{output}>") } else { output };
        format!("{name}({}): {output}", parameters.join(", "))
    }

    fn namespace(&self) -> Option<&'static str> {
        self.name.rsplit_once('.').map(|(namespace, _)| namespace)
    }

    /// Its TypeScript declaration with a doc comment.
    #[must_use]
    pub fn declaration(&self) -> String {
        let mut text = format!("/**\n * {}\n", self.summary);
        for line in self.description.lines() {
            let _ = writeln!(text, " * {line}");
        }
        if !self.aliases.is_empty() {
            let _ = writeln!(text, " * Other names: {}.", self.callable_aliases().join(", "));
        }
        let told_elsewhere =
            |parameter: &&Parameter| self.like.is_some() && parameter.name == OPTIONS;
        for parameter in self.parameters.iter().filter(|parameter| !told_elsewhere(parameter)) {
            document(&mut text, "", parameter);
        }
        for (name, meaning) in self.errors {
            let _ = writeln!(text, " * @throws {name} {meaning}");
        }
        let _ = writeln!(text, " * @example {}", self.example);
        let _ = match self.name.rsplit_once('.') {
            Some((namespace, name)) => {
                let signature = self.signed(name);
                writeln!(text, " */\ndeclare namespace {namespace} {{ function {signature}; }}")
            }
            None => writeln!(text, " */\ndeclare function {};", self.signature()),
        };
        text
    }

    /// The other names, as a script writes them.
    pub(crate) fn callable_aliases(&self) -> Vec<String> {
        let callable = |name: &&str| {
            if RESERVED.contains(name) { format!("{PROMISES}.{name}") } else { (*name).to_owned() }
        };
        self.aliases.iter().map(callable).collect()
    }

    /// The JSON schema of its arguments by name.
    #[must_use]
    pub fn input_schema(&self) -> Value {
        object_schema(self.parameters)
    }

    /// The JSON schema of what it returns.
    #[must_use]
    pub fn output_schema(&self) -> Value {
        self.output.schema()
    }
}

fn document(text: &mut String, prefix: &str, parameter: &Parameter) {
    let path = format!("{prefix}{}", parameter.name);
    let _ = writeln!(text, " * @param {path} {}", parameter.explanation());
    let (below, properties) = parameter.kind.properties();
    properties.iter().for_each(|p| document(text, &format!("{path}{below}"), p));
}

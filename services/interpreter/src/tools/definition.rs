//! Definitions of tools, and the forms in which they are presented.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::Value;

use super::argument;
use super::error::ToolError;
use super::kind::{Parameter, object_schema};
use super::output::Output;
use super::subject::PolicySubject;
use super::table;

/// The sandbox's namespace whose functions always return a promise.
const ASYNC_NAMESPACE: &str = "tools";

/// The parameter that a tool shares with its base tool.
const OPTIONS: &str = "options";

/// Name of the last argument in signatures: the object with the arguments given by name only.
const NAMED_ARGUMENTS: &str = "named";

/// The property of a result that says what is missing from it.
const NOTE: &str = "note";

/// Errors of every tool of the toolbox; definitions do not repeat them.
pub(super) const COMMON_ERRORS: [&str; 3] = ["InvalidArguments", "Cancelled", "InternalError"];

/// Errors of every tool that takes a path. Definitions list the last four where they are expected;
/// they also occur when the files change concurrently.
pub(super) const PATH_ERRORS: [&str; 9] = [
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

/// Errors of every tool that only works on files, when it times out without a partial result.
pub(super) const FILE_ERRORS: [&str; 1] = ["Timeout"];

/// Errors of every tool that reaches other tasks. Like the others above they are in the
/// documentation and not in each definition, where they would cost prompt tokens each time.
pub(super) const TASK_ERRORS: [&str; 2] = ["TaskOver", "TasksUnavailable"];

/// Reserved words of JavaScript, which cannot name a function; a tool of such a name is only a
/// member of `tools`.
const RESERVED: [&str; 1] = ["delete"];

/// One tool.
#[derive(Debug)]
pub struct Definition {
    /// Name of the global function in scripts, or with one dot, of a function in a namespace.
    pub name: &'static str,
    /// Other names by which scripts may call it. A reserved word can only be called as a member of
    /// `tools`.
    pub aliases: &'static [&'static str],
    /// What it does, in one line.
    pub summary: &'static str,
    /// Further instructions for the model; may be empty or have several lines.
    pub description: &'static str,
    /// Its parameters in positional order: required, optional, then those given by name only.
    pub parameters: &'static [Parameter],
    /// What it returns.
    pub output: Output,
    /// A tool with the same `options` and result that is declared earlier. The signature refers to
    /// it instead of repeating them, which saves prompt tokens.
    pub base_tool: Option<&'static str>,
    /// An example call, for declarations and error messages.
    pub example: &'static str,
    /// Names and meanings of its specific errors; those of its base tool apply too.
    pub errors: &'static [(&'static str, &'static str)],
    /// What a call changes.
    pub effect: Effect,
    /// What a policy calls it.
    pub permission: Permission,
    /// The part of a call's canonical arguments that a policy decides on.
    pub subject: fn(&Value) -> PolicySubject,
    /// Where it is executed.
    pub provider: Provider,
    /// Resource limits of a call.
    pub limits: Limits,
}

/// What a call changes. It determines whether a call with an unknown outcome may be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing: repeating it is safe.
    Read,
    /// Files of the workspace, or the state of the toolbox.
    Write,
    /// Anything, also outside the workspace: a command or a request.
    External,
}

/// The permission classes of tools, which policies name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Permission {
    /// Has no access to anything; there is nothing to decide.
    Pure,
    /// Reads files in the workspace, or their names.
    FilesRead,
    /// Creates or changes files.
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
    /// Creates other tasks, sends them messages and waits for them.
    Tasks,
}

/// Where a tool is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// In the toolbox.
    Host,
    /// In the sandbox itself; the toolbox rejects it.
    Sandbox,
}

/// Resource limits of a call. The parameters bound what the arguments ask for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest wall time of a call after it was admitted, including what its arguments ask for.
    /// `None` if only the script's own time bounds it.
    pub wall: Option<Duration>,
    /// Largest result, in bytes of text, approximately. `None` if the result may be as large as a
    /// script can receive.
    pub result_bytes: Option<usize>,
}

pub(super) const fn limits(wall_seconds: u64, result_kib: usize) -> Limits {
    Limits { wall: Some(Duration::from_secs(wall_seconds)), result_bytes: Some(result_kib << 10) }
}

/// Limits of a call whose result may be as large as a script can receive.
pub(super) const fn wall_limit(wall_seconds: u64) -> Limits {
    Limits { wall: Some(Duration::from_secs(wall_seconds)), result_bytes: None }
}

/// Limits of a call that is repeated until there is an answer.
pub(super) const fn result_limit(result_kib: usize) -> Limits {
    Limits { wall: None, result_bytes: Some(result_kib << 10) }
}

impl Effect {
    /// Its name in the documentation.
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

    /// Its name in policies.
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
    /// Whether a call with an unknown outcome may be repeated. True for reads; for calls that only
    /// change the toolbox, whose state is lost with the process; and for calls on other tasks,
    /// which are idempotent.
    #[must_use]
    pub fn is_repeatable(&self) -> bool {
        self.effect == Effect::Read
            || matches!(self.permission, Permission::Environment | Permission::Tasks)
    }

    /// Whether this is its name or one of its aliases.
    #[must_use]
    pub fn has_name(&self, name: &str) -> bool {
        self.name == name || self.aliases.contains(&name)
    }

    /// The arguments in their canonical form: checked, by name, without absent ones, keys sorted,
    /// paths without `.`, repeated slashes, and `..` where the text alone resolves it. Equivalent
    /// calls have the same form, however they were written. Approvals and hashes use this form.
    ///
    /// A toolbox also makes absolute paths relative: see [`super::Toolbox::canonical`].
    ///
    /// # Errors
    /// When the arguments do not fit; the call itself would fail with the same error.
    pub fn canonical(&self, args: &Value) -> Result<Value, ToolError> {
        argument::check(self, args.clone(), &argument::normalize_lexically)
    }

    /// The parameters that have a position, in order.
    pub(crate) fn positional(&self) -> impl Iterator<Item = &'static Parameter> {
        self.parameters.iter().filter(|parameter| parameter.positional)
    }

    /// The notes of a result, for the model: what is missing from it although the call did not ask
    /// for less.
    pub(crate) fn notes<'a>(&self, result: &'a Value) -> impl Iterator<Item = &'a str> {
        // A tool that may return anything can have such a property with another meaning.
        let (_, fields) = self.output.fields();
        let has_notes = fields.iter().any(|field| field.name == NOTE);
        let results = match result {
            _ if !has_notes => &[],
            Value::Array(results) => results.as_slice(),
            result => std::slice::from_ref(result),
        };
        results.iter().filter_map(|result| result[NOTE].as_str())
    }

    /// Its specific errors and those of its base tool.
    pub(super) fn all_errors(&self) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        let inherited =
            self.base_tool.and_then(table::definition).map_or(&[][..], |tool| tool.errors);
        self.errors.iter().chain(inherited)
    }

    /// Whether a call may fail with an error of this name, according to this definition and the
    /// common errors.
    #[must_use]
    pub fn can_fail_with(&self, error: &str) -> bool {
        self.all_errors().any(|(name, _)| *name == error)
            || COMMON_ERRORS.contains(&error)
            || match self.permission {
                Permission::FilesRead | Permission::FilesWrite | Permission::FilesDelete => {
                    FILE_ERRORS.contains(&error)
                }
                Permission::Tasks => TASK_ERRORS.contains(&error),
                _ => false,
            }
            || (PATH_ERRORS.contains(&error)
                && self.parameters.iter().any(|parameter| parameter.kind.has_path()))
    }

    /// The subject of policy decisions, from canonical arguments.
    #[must_use]
    pub fn subject(&self, canonical: &Value) -> PolicySubject {
        (self.subject)(canonical)
    }

    /// Its TypeScript signature without documentation, for example `read_file(path: string):
    /// string`.
    #[must_use]
    pub fn signature(&self) -> String {
        self.signature_as(self.name)
    }

    fn signature_as(&self, name: &str) -> String {
        let parameter = |parameter: &Parameter| match self.base_tool {
            Some(tool) if parameter.name == OPTIONS => {
                format!("{OPTIONS}?: Parameters<typeof {tool}>[1]")
            }
            _ => parameter.typescript(),
        };
        let mut parameters: Vec<String> = self.positional().map(parameter).collect();
        let named: Vec<String> = self
            .parameters
            .iter()
            .filter(|parameter| !parameter.positional)
            .map(Parameter::typescript)
            .collect();
        if !named.is_empty() {
            parameters.push(format!("{NAMED_ARGUMENTS}?: {{ {} }}", named.join("; ")));
        }
        let output = self
            .base_tool
            .map_or_else(|| self.output.typescript(), |tool| format!("ReturnType<typeof {tool}>"));
        let output = if self.namespace() == Some(ASYNC_NAMESPACE) {
            format!("Promise<{output}>")
        } else {
            output
        };
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
        let is_inherited =
            |parameter: &&Parameter| self.base_tool.is_some() && parameter.name == OPTIONS;
        for parameter in self.parameters.iter().filter(|parameter| !is_inherited(parameter)) {
            document_parameter(&mut text, "", parameter);
        }
        for (name, meaning) in self.errors {
            let _ = writeln!(text, " * @throws {name} {meaning}");
        }
        let _ = writeln!(text, " * @example {}", self.example);
        let _ = match self.name.rsplit_once('.') {
            Some((namespace, name)) => {
                let signature = self.signature_as(name);
                writeln!(text, " */\ndeclare namespace {namespace} {{ function {signature}; }}")
            }
            None => writeln!(text, " */\ndeclare function {};", self.signature()),
        };
        text
    }

    /// Its aliases, as a script writes them.
    pub(crate) fn callable_aliases(&self) -> Vec<String> {
        let callable = |name: &&str| {
            if RESERVED.contains(name) {
                format!("{ASYNC_NAMESPACE}.{name}")
            } else {
                (*name).to_owned()
            }
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

fn document_parameter(text: &mut String, prefix: &str, parameter: &Parameter) {
    let prefix = if parameter.positional {
        prefix.to_owned()
    } else {
        format!("{prefix}{NAMED_ARGUMENTS}.")
    };
    let path = format!("{prefix}{}", parameter.name);
    let _ = writeln!(text, " * @param {path} {}", parameter.explanation());
    let (below, properties) = parameter.kind.properties();
    properties.iter().for_each(|p| document_parameter(text, &format!("{path}{below}"), p));
}

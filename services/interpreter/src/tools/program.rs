//! `node`, `python`, `git` and `npm`: one program with its arguments as a list, so that nothing has
//! to be quoted.
//!
//! They run as `execute_command` does, by a line of shell that is put together here.

use serde::Deserialize;
use serde_json::{Value, json};

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::error::ToolError;
use super::execute::{self, EXECUTED, Executed, Host, MAX_SCRIPT, OPTIONS, Options};
use super::kind::{Kind, Parameter, optional, required};
use super::subject::PolicySubject;

/// What the line of shell says when there is no such program, on standard error and with nothing
/// else there.
const MISSING: &str = "construct: the program is not installed";

/// The exit status with it, the shell's own for a command that is not found.
const MISSING_STATUS: i32 = 127;

/// Longest code, in bytes; it goes through standard input.
const MAX_CODE: usize = 1 << 20;

const NOT_INSTALLED: (&str, &str) =
    ("ProgramNotFound", "when it is not installed where commands run; nothing ran.");

/// A program that a tool runs.
struct Program {
    /// The tool's name.
    tool: &'static str,
    /// Its names, best first.
    names: &'static [&'static str],
    /// What to do without it.
    instead: &'static str,
}

const PROGRAMS: [Program; 4] = [
    Program {
        tool: NODE.name,
        names: &["node", "nodejs"],
        instead: "JavaScript also runs in the script itself, without node's modules.",
    },
    Program {
        tool: PYTHON.name,
        names: &["python3", "python"],
        instead: "What is to be computed can be computed in JavaScript, in the script itself.",
    },
    Program {
        tool: GIT.name,
        names: &["git"],
        instead: "The files in .git can be read, for example read_file(\".git/HEAD\").",
    },
    Program {
        tool: NPM.name,
        names: &["npm"],
        instead: "read_file(\"package.json\") says what npm would do.",
    },
];

const fn definition(
    name: &'static str,
    summary: &'static str,
    description: &'static str,
    parameters: &'static [Parameter],
    subject: fn(&Value) -> PolicySubject,
    example: &'static str,
) -> Definition {
    Definition {
        name,
        aliases: &[],
        summary,
        description,
        parameters,
        output: EXECUTED,
        like: Some(execute::DEFINITION.name),
        example,
        errors: &[NOT_INSTALLED],
        effect: Effect::External,
        permission: Permission::Commands,
        subject,
        provider: Provider::Host,
        limits: limits(620, 512),
    }
}

/// What programs take that are given their arguments and nothing else.
const ARGUMENTS: &[Parameter] = &[
    required("args", Kind::Arguments, "Arguments, one text for each."),
    optional("options", OPTIONS, "{}", "Options."),
];

const CODE: Kind = Kind::CodeOrArguments { max_bytes: MAX_CODE };

pub(super) const NODE: Definition = definition(
    "node",
    "Runs Node.js with arguments as a list, or a text as its program.",
    "Otherwise as execute_command.",
    &[
        required("program", CODE, "Code, or arguments: [\"build.js\", \"--watch\"]."),
        optional("options", OPTIONS, "{}", "Options."),
    ],
    |args| command_line(NODE.name, args),
    "node(\"console.log(process.version)\")",
);

pub(super) const PYTHON: Definition = definition(
    "python",
    "Runs Python 3 with arguments as a list, or a text as its program.",
    "Otherwise as execute_command.",
    &[
        required("program", CODE, "Code, or arguments: [\"-m\", \"pytest\", \"tests\"]."),
        optional("options", OPTIONS, "{}", "Options."),
    ],
    |args| command_line(PYTHON.name, args),
    "python(\"import sys; print(sys.version)\")",
);

pub(super) const GIT: Definition = definition(
    "git",
    "Runs git, for version control, with arguments as a list.",
    "Otherwise as execute_command.",
    ARGUMENTS,
    |args| command_line(GIT.name, args),
    "git([\"commit\", \"-m\", \"It's done\"])",
);

pub(super) const NPM: Definition = definition(
    "npm",
    "Runs npm, which manages packages of Node.js, with arguments as a list.",
    "Otherwise as execute_command. Without network it installs nothing, but runs scripts.",
    ARGUMENTS,
    |args| command_line(NPM.name, args),
    "npm([\"run\", \"build\"])",
);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    #[serde(alias = "args")]
    program: Input,
    #[serde(default)]
    options: Options,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Input {
    Code(String),
    Arguments(Vec<String>),
}

pub(super) async fn run(
    tool: &'static str,
    host: Host<'_>,
    arguments: Arguments,
) -> Result<Executed, ToolError> {
    let Arguments { program: input, mut options } = arguments;
    let Some(program) = PROGRAMS.iter().find(|program| program.tool == tool) else {
        return Err(ToolError::internal(tool, "it is not in the table of programs"));
    };
    let words = match input {
        Input::Arguments(words) => words,
        Input::Code(_) if options.stdin.is_some() => {
            return Err(ToolError::invalid(format!(
                "{tool}: code is passed through standard input, so there can be no options.stdin beside it. Write the code \
                 to a file with create_file and run it: {tool}([\"file\"], {{ stdin: … }})."
            )));
        }
        Input::Code(code) => {
            options.stdin = Some(code);
            vec!["-".to_owned()]
        }
    };
    let script = program.script(&words);
    if script.len() > MAX_SCRIPT {
        return Err(ToolError::invalid(format!(
            "{tool}: the arguments have {} bytes, quotes included, and at most {MAX_SCRIPT} can be passed. Pass data in a \
             file or through options.stdin.",
            script.len()
        )));
    }
    let executed = host.run(tool, Some(tool), script, options).await?;
    if executed.exit_code == Some(MISSING_STATUS)
        && executed.stdout.is_empty()
        && executed.stderr == MISSING
    {
        let Program { names, instead, .. } = program;
        let message = format!(
            "{tool}: {} is not installed where commands run, and nothing ran. {instead}",
            names.join(" (or ") + if names.len() > 1 { ")" } else { "" }
        );
        return Err(ToolError::new("ProgramNotFound", message).with(json!({"searched": names})));
    }
    Ok(executed)
}

impl Program {
    /// The line of shell that becomes the program, or says that there is none.
    fn script(&self, words: &[String]) -> String {
        let words: Vec<String> = words.iter().map(|word| quoted(word)).collect();
        format!(
            "for program in {}; do command -v \"$program\" >/dev/null 2>&1 && exec \"$program\" {}; done\n\
             printf %s {} >&2; exit {MISSING_STATUS}",
            self.names.join(" "),
            words.join(" "),
            quoted(MISSING)
        )
    }
}

/// The command line as a person would write it, for a policy to look at.
fn command_line(tool: &str, args: &Value) -> PolicySubject {
    let given = &args[if args["args"].is_null() { "program" } else { "args" }];
    let words = match given {
        Value::Array(words) => words.iter().filter_map(Value::as_str).map(quoted).collect(),
        _ => vec!["-".to_owned()],
    };
    let line: Vec<String> = std::iter::once(tool.to_owned()).chain(words).collect();
    PolicySubject::Command(line.join(" "))
}

/// A word as a shell takes it, in quotes where it needs them.
pub(super) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

//! `node`, `python`, `git` and `npm`: one program with its arguments as a list, without quoting.
//!
//! They run like `execute_command`, with a shell command line that is built here.

use serde::Deserialize;
use serde_json::{Value, json};

use super::definition::{Definition, Effect, Permission, Provider, wall_limit};
use super::error::ToolError;
use super::execute::{self, COMMAND_OUTPUT, CommandResult, Host, MAX_SCRIPT, OPTIONS, Options};
use super::kind::{Kind, Parameter, optional, required};
use super::subject::PolicySubject;

/// What the shell command prints to standard error when the program is not installed, without any
/// other output.
const NOT_INSTALLED_OUTPUT: &str = "construct: the program is not installed";

/// The exit status in that case, the shell's own for a command that is not found.
const NOT_INSTALLED_STATUS: i32 = 127;

/// Longest code, in bytes; it is passed through standard input.
const MAX_CODE_BYTES: usize = 1 << 20;

const NOT_INSTALLED: (&str, &str) =
    ("ProgramNotFound", "when the program is not installed where commands run; nothing ran.");

/// The program of a tool.
struct Program {
    /// The tool's name.
    tool: &'static str,
    /// Names of the program, preferred first.
    names: &'static [&'static str],
    /// Advice when it is not installed.
    alternative: &'static str,
}

const PROGRAMS: [Program; 4] = [
    Program {
        tool: NODE.name,
        names: &["node", "nodejs"],
        alternative: "JavaScript also runs in the script itself, without Node's modules.",
    },
    Program {
        tool: PYTHON.name,
        names: &["python3", "python"],
        alternative: "Computations can be done in JavaScript, in the script itself.",
    },
    Program {
        tool: GIT.name,
        names: &["git"],
        alternative: "The files in .git can be read, for example read_file(\".git/HEAD\").",
    },
    Program {
        tool: NPM.name,
        names: &["npm"],
        alternative: "read_file(\"package.json\") shows what npm would run.",
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
        output: COMMAND_OUTPUT,
        base_tool: Some(execute::DEFINITION.name),
        example,
        errors: &[NOT_INSTALLED],
        effect: Effect::External,
        permission: Permission::Commands,
        subject,
        provider: Provider::Host,
        limits: wall_limit(620),
    }
}

/// Parameters of programs that only take arguments.
const ARGUMENTS: &[Parameter] = &[
    required("args", Kind::Arguments, "Arguments, one string each."),
    optional("options", OPTIONS, "{}", "Options."),
];

const CODE: Kind = Kind::CodeOrArguments { max_bytes: MAX_CODE_BYTES };

pub(super) const NODE: Definition = definition(
    "node",
    "Runs Node.js with a list of arguments, or with a string as its program.",
    "Otherwise like execute_command.",
    &[
        required("program", CODE, "Code, or arguments: [\"build.js\", \"--watch\"]."),
        optional("options", OPTIONS, "{}", "Options."),
    ],
    |args| command_line(NODE.name, args),
    "node(\"console.log(process.version)\")",
);

pub(super) const PYTHON: Definition = definition(
    "python",
    "Runs Python 3 with a list of arguments, or with a string as its program.",
    "Otherwise like execute_command.",
    &[
        required("program", CODE, "Code, or arguments: [\"-m\", \"pytest\", \"tests\"]."),
        optional("options", OPTIONS, "{}", "Options."),
    ],
    |args| command_line(PYTHON.name, args),
    "python(\"import sys; print(sys.version)\")",
);

pub(super) const GIT: Definition = definition(
    "git",
    "Runs git, for version control, with a list of arguments.",
    "Otherwise like execute_command.",
    ARGUMENTS,
    |args| command_line(GIT.name, args),
    "git([\"commit\", \"-m\", \"It's done\"])",
);

pub(super) const NPM: Definition = definition(
    "npm",
    "Runs npm, which manages packages of Node.js, with a list of arguments.",
    "Otherwise like execute_command. Without network access it cannot install packages, but it can run scripts.",
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
) -> Result<CommandResult, ToolError> {
    let Arguments { program: input, mut options } = arguments;
    let Some(program) = PROGRAMS.iter().find(|program| program.tool == tool) else {
        return Err(ToolError::internal(tool, "it is not in the table of programs"));
    };
    let words = match input {
        Input::Arguments(words) => words,
        Input::Code(_) if options.stdin.is_some() => {
            return Err(ToolError::invalid(format!(
                "{tool}: code is passed through standard input, so options.stdin cannot be used with it. Write the code \
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
            "{tool}: the arguments have {} bytes, quotes included; the limit is {MAX_SCRIPT}. Pass data in a file or \
             through options.stdin.",
            script.len()
        )));
    }
    let executed = host.run(tool, Some(tool), script, options).await?;
    if executed.exit_code == Some(NOT_INSTALLED_STATUS)
        && executed.stdout.is_empty()
        && executed.stderr == NOT_INSTALLED_OUTPUT
    {
        let Program { names, alternative, .. } = program;
        let message = format!(
            "{tool}: {} is not installed where commands run, and nothing ran. {alternative}",
            names.join(" (or ") + if names.len() > 1 { ")" } else { "" }
        );
        return Err(ToolError::new("ProgramNotFound", message).with(json!({"searched": names})));
    }
    Ok(executed)
}

impl Program {
    /// The shell command that executes the program, or prints that it is not installed.
    fn script(&self, words: &[String]) -> String {
        let words: Vec<String> = words.iter().map(|word| shell_quote(word)).collect();
        format!(
            "for program in {}; do command -v \"$program\" >/dev/null 2>&1 && exec \"$program\" {}; done\n\
             printf %s {} >&2; exit {NOT_INSTALLED_STATUS}",
            self.names.join(" "),
            words.join(" "),
            shell_quote(NOT_INSTALLED_OUTPUT)
        )
    }
}

/// The command line as a person would write it, for policy decisions.
fn command_line(tool: &str, args: &Value) -> PolicySubject {
    let given = &args[if args["args"].is_null() { "program" } else { "args" }];
    let words = match given {
        Value::Array(words) => words.iter().filter_map(Value::as_str).map(shell_quote).collect(),
        _ => vec!["-".to_owned()],
    };
    let line: Vec<String> = std::iter::once(tool.to_owned()).chain(words).collect();
    PolicySubject::Command(line.join(" "))
}

/// Quotes a word for a shell if necessary.
pub(super) fn shell_quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

//! The reference page of the tools, `docs/tools.md`.

use std::fmt::Write as _;

use super::definition::{Definition, Permission};
use super::kind::Parameter;
use super::output::Field;
use super::table::definitions;

const INTRODUCTION: &str = "\
# Tools

The tools that scripts can call. This page is generated from the definitions in
`services/interpreter/src/tools`. The TypeScript declarations for models, the check of the arguments
and the JSON schemas come from the same definitions. A test compares the page with them;
`UPDATE_DOCS=1 cargo test -p construct-interpreter tools_page_matches_definitions` regenerates it.

Every tool is a global function that returns its result directly, and a member of `tools` that
returns a promise of it; calls of the second form run concurrently. Arguments are given by position,
by name in one object, or both.

Errors have a `name`, a `message` that says what to do, and often `details`. In addition to the errors
listed below, every tool can throw `InvalidArguments`, `Cancelled` and `InternalError`. Tools that take
a path can throw `OutsideWorkspace`, `InvalidPath`, `PermissionDenied`, `NotARegularFile` and `IoError`,
and, when files change concurrently, `FileNotFound`, `IsADirectory`, `NotADirectory` and `FileChanged`.
Tools that only work on files throw `Timeout` when they time out without a partial result. The tools
`tasks.…` throw `TaskOver` when the script's own turn was ended, and `TasksUnavailable` when scripts have
no access to other tasks.

A call of any tool can also be rejected before it is made, by `PolicyDenied` (a rule denies it),
`ApprovalRejected` (a person was asked and did not approve it), `ApprovalTooLarge` (it needs an approval,
but is too large to be shown to a person) or `HandedOff` (after `tasks.hand_off`). An unknown name throws
`UnknownTool`. Exceeding a limit has its own errors, see
[the interpreter's limits](interpreter.md#limits).

The time limit of a tool begins when the call is admitted, since the number of concurrent calls is
limited; without one, only the script's own time bounds the call. A result is also bounded by what a
script may receive from one call.

A call with the effect *read* changes nothing and may be repeated. Any other call is journaled before
it begins, and reported as `OutcomeUnknown` if its outcome is unknown; but calls on tasks are idempotent.
The permission is the class that policies use. Effect and permission are in the event of a call
(`tool.called`), with its canonical arguments.
";

/// The reference page of the tools, in Markdown.
#[must_use]
pub fn documentation() -> String {
    let mut text = String::from(INTRODUCTION);
    text.push_str(
        "\n| tool | other names | what it does | effect | permission |\n|---|---|---|---|---|\n",
    );
    for tool in definitions() {
        let Definition { name, summary, .. } = tool;
        let aliases: Vec<String> =
            tool.callable_aliases().iter().map(|alias| format!("`{alias}`")).collect();
        let (aliases, effect, permission) =
            (aliases.join(", "), tool.effect.name(), tool.permission.name());
        let anchor = name.replace('.', "");
        let _ = writeln!(
            text,
            "| [`{name}`](#{anchor}) | {aliases} | {} | {effect} | {permission} |",
            in_cell(summary)
        );
    }
    text.push_str("\n| permission | what a policy decides on |\n|---|---|\n");
    for permission in Permission::ALL {
        let _ = writeln!(text, "| {} | {} |", permission.name(), subject(permission));
    }
    definitions().iter().for_each(|tool| section(&mut text, tool));
    text
}

fn subject(permission: Permission) -> &'static str {
    match permission {
        Permission::Pure => "nothing: it has no access to anything",
        Permission::FilesRead | Permission::FilesWrite | Permission::FilesDelete => {
            "the path in the workspace, and its target through symbolic links"
        }
        Permission::Commands => "the command line",
        Permission::Network => "method, host and path",
        Permission::Models => "the name of the model, empty for the agent's own",
        Permission::Environment => "the name of the variable",
        Permission::Tasks => {
            "the agent's name in `tasks.spawn` and `tasks.hand_off`; nothing else for the other tools"
        }
    }
}

fn section(text: &mut String, tool: &Definition) {
    let _ = writeln!(text, "\n## {}\n\n{}", tool.name, tool.summary);
    if !tool.description.is_empty() {
        let _ = writeln!(text, "{}", tool.description);
    }
    let _ = writeln!(text, "\n```ts\n{}\n```", tool.signature());
    if !tool.parameters.is_empty() {
        text.push_str("\n| parameter | type | meaning |\n|---|---|---|\n");
        tool.parameters.iter().for_each(|one| parameter(text, "", one));
    }
    let (below, fields) = tool.output.fields();
    if !fields.is_empty() {
        text.push_str("\n| result | type | meaning |\n|---|---|---|\n");
        let prefix = below.strip_prefix('.').unwrap_or(&below).to_owned();
        fields.iter().for_each(|one| field(text, &prefix, one));
    }
    if tool.all_errors().next().is_some() {
        text.push_str("\n| error | |\n|---|---|\n");
        for (name, meaning) in tool.all_errors() {
            let _ = writeln!(text, "| `{name}` | {} |", in_cell(meaning));
        }
    }
    let time = tool
        .limits
        .wall
        .map_or("no time limit of its own".to_owned(), |wall| format!("{} s", wall.as_secs()));
    let size = match tool.limits.result_bytes {
        Some(bytes) => format!("a result of about {} KiB", bytes >> 10),
        None => "a result as large as a script may receive".to_owned(),
    };
    let _ = writeln!(text, "\nLimits: {time}, {size}. Example: `{}`", tool.example);
}

fn parameter(text: &mut String, prefix: &str, one: &Parameter) {
    let path = format!("{prefix}{}", one.name);
    let (below, properties) = one.kind.properties();
    // The properties of an object have their own rows.
    let kind = match below {
        "" => one.kind.typescript(),
        "." => "object".to_owned(),
        _ => "object[]".to_owned(),
    };
    let mark = if one.required { "" } else { "?" };
    let by_name = if one.positional { "" } else { " By name only." };
    let meaning = in_cell(&one.explanation());
    let _ = writeln!(text, "| `{path}{mark}` | `{}` | {meaning}{by_name} |", in_cell(&kind));
    properties.iter().for_each(|p| parameter(text, &format!("{path}{below}"), p));
}

fn field(text: &mut String, prefix: &str, one: &Field) {
    let path = format!("{prefix}{}", one.name);
    let (below, fields) = one.output.fields();
    let kind = match below.as_str() {
        "" => one.output.typescript(),
        "." => "object".to_owned(),
        _ => "object[]".to_owned(),
    };
    let mark = if one.optional { "?" } else { "" };
    let _ =
        writeln!(text, "| `{path}{mark}` | `{}` | {} |", in_cell(&kind), in_cell(one.description));
    fields.iter().for_each(|f| field(text, &format!("{path}{below}"), f));
}

fn in_cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

//! The reference page of the tools, `docs/tools.md`.

use std::fmt::Write as _;

use super::definition::{Definition, Permission};
use super::kind::Parameter;
use super::output::Field;
use super::table::definitions;

const INTRODUCTION: &str = "\
# Tools

What scripts can call. This page is made from the definitions in `services/interpreter/src/tools`, from which also come the
TypeScript that models are shown, the check of the arguments and the JSON schemas. A test compares it with them;
`UPDATE_DOCS=1 cargo test -p construct-interpreter the_page_about_the_tools_is_current` writes it anew.

Every tool is a global function that gives its result at once, and a member of `tools` that gives a promise of it; calls of
the second form run concurrently. Arguments go by position, by name in one object, or both.

Errors have a `name`, a `message` that says how to go on, and often `details`. Beside those listed below, every tool can throw
`InvalidArguments`, `Cancelled` and `InternalError`, and those that take a path `OutsideWorkspace`, `InvalidPath`, `PermissionDenied`, `NotARegularFile` and
`IoError`, and where something else changes what is there meanwhile also `FileNotFound`, `IsADirectory`, `NotADirectory` and `FileChanged`.
Tools that do nothing but work on files throw `Timeout` where they have nothing to show when their time is over, and `tasks.…` throw `TaskOver` when the script's own
turn was ended meanwhile, and `TasksUnavailable` where scripts reach no other tasks.
A call of any tool can also be refused before it is made, by `PolicyDenied` (a rule forbids it), `ApprovalRejected` (a person was asked and did not approve), `ApprovalTooLarge` (a person would have to be asked about more than can be shown) or
`HandedOff` (after `tasks.hand_off`). A name that no tool has throws `UnknownTool`. What exceeds a limit has an error of its own, see
[the interpreter's limits](interpreter.md#limits).

The time among a tool's limits begins when the call has its turn, since only so many run at the same time; where there is none, only the script's own time
bounds the call. A result is also bounded by what the script may get of one call.

An effect of *read* changes nothing and may be repeated. A call with another effect is journaled before it begins, and reported
as `OutcomeUnknown` when nobody knows whether it was done; but what is done about tasks is done once, however often the call is made. The permission is what policies call it.
Both are in the event that tells of a call (`tool.called`), with its canonical arguments.
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

//! `list_files`: what is in a directory.

use std::ops::ControlFlow;

use serde::{Deserialize, Serialize};

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::error::{NOT_FOUND, OUTSIDE, ToolError, path_error};
use super::kind::{Kind, optional};
use super::note;
use super::output::{Output, field};
use super::stop::{Stop, Stopped};
use super::subject;
use crate::workspace::{EntryKind, RelativePath, Walk, WalkEnd, Workspace};

pub(super) const DEFINITION: Definition = Definition {
    name: "list_files",
    aliases: &["listdir"],
    summary: "Lists a directory, sorted by name.",
    description: "Recursive listings leave out what .gitignore and .ignore name, and .git. Symbolic links are listed and \
        not followed.\nAt most 2000 entries; if there are more, the last entry has the type \"note\" and says so in `path`.",
    parameters: &[
        optional("path", Kind::Path, "the workspace", "Directory, relative to the workspace."),
        optional("recursive", Kind::Boolean, "false", "Also list what is in its directories."),
        optional(
            "options",
            Kind::Object(&[optional(
                "include_ignored",
                Kind::Boolean,
                "false",
                "Also list what ignore files name, when recursive.",
            )]),
            "{}",
            "Options.",
        ),
    ],
    output: Output::List(&Output::Object(&[
        field(
            "path",
            Output::Text,
            "Relative to the workspace. Bytes that are not UTF-8 are shown as U+FFFD.",
        ),
        field(
            "type",
            Output::OneOf(&["file", "directory", "symlink", "other", "note"]),
            "What it is.",
        ),
        field("size", Output::Integer, "Of a file, in bytes; 0 of everything else."),
    ])),
    like: None,
    example: "list_files(\"src\", true)",
    errors: &[NOT_FOUND, OUTSIDE, ("NotADirectory", "when the path is a file.")],
    effect: Effect::Read,
    permission: Permission::FilesRead,
    subject: subject::perhaps_tree,
    provider: Provider::Host,
    limits: limits(60, 1024),
};

const TOOL: &str = DEFINITION.name;

/// Most entries returned.
const MAX_ENTRIES: usize = 2_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    path: Option<String>,
    #[serde(default)]
    recursive: bool,
    #[serde(default)]
    options: Options,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    #[serde(default)]
    include_ignored: bool,
}

#[derive(Serialize)]
pub(super) struct Listed {
    path: String,
    r#type: &'static str,
    size: u64,
}

pub(super) fn run(
    workspace: &Workspace,
    arguments: Arguments,
    stop: &Stop,
) -> Result<Vec<Listed>, ToolError> {
    let Arguments { path, recursive, options } = arguments;
    let base = match path {
        Some(path) => workspace.locate(&path).map_err(|e| path_error(workspace, &e))?,
        None => RelativePath::root(),
    };
    // Whoever lists one directory wants to see all of it.
    let walk = Walk { recursive, include_ignored: options.include_ignored || !recursive };
    let mut listed = Vec::new();
    let mut stopped = None;
    let end = workspace.walk(&base, walk, &mut |entry| {
        stopped = stop.check().err();
        if stopped.is_some() || listed.len() >= MAX_ENTRIES {
            return ControlFlow::Break(());
        }
        let kind = match entry.kind {
            EntryKind::File => "file",
            EntryKind::Directory => "directory",
            EntryKind::Symlink => "symlink",
            EntryKind::Other => "other",
        };
        let size = if entry.kind == EntryKind::File { entry.size() } else { 0 };
        listed.push(Listed { path: entry.path.to_string_lossy().into_owned(), r#type: kind, size });
        ControlFlow::Continue(())
    });
    let end = end.map_err(|e| path_error(workspace, &e))?;
    if stopped == Some(Stopped::Cancelled) {
        return Err(Stopped::Cancelled.into_error(TOOL));
    }
    if end != WalkEnd::Complete {
        let enough = || format!("no more than {MAX_ENTRIES} entries are listed");
        let why = note::incomplete(end, stopped).unwrap_or_else(enough);
        let path = format!(
            "[there is more after these {}: {why}; list a directory below, or use find_file]",
            listed.len()
        );
        listed.push(Listed { path, r#type: "note", size: 0 });
    }
    Ok(listed)
}

//! `list_files`: what is in a directory.

use std::ops::ControlFlow;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::definition::{Definition, Effect, Permission, Provider, whole};
use super::error::{NOT_FOUND, OUTSIDE, ToolError, path_error};
use super::kind::{Kind, optional};
use super::note;
use super::output::{Output, field};
use super::size::written;
use super::stop::Stop;
use super::subject;
use crate::workspace::{EntryKind, RelativePath, Walk, WalkEnd, Workspace};

pub(super) const DEFINITION: Definition = Definition {
    name: "list_files",
    aliases: &["listdir"],
    summary: "Lists a directory, sorted by name.",
    description: "Recursive listings leave out what .gitignore and .ignore name, and .git. Symbolic links are listed and \
        not followed.",
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
        field("type", Output::OneOf(&["file", "directory", "symlink", "other"]), "What it is."),
        field("size", Output::Integer, "Of a file, in bytes; 0 of everything else."),
    ])),
    like: None,
    example: "list_files(\"src\", true)",
    errors: &[
        NOT_FOUND,
        OUTSIDE,
        ("NotADirectory", "when the path is a file."),
        ("TooManyEntries", "when a call cannot return them all."),
    ],
    effect: Effect::Read,
    permission: Permission::FilesRead,
    subject: subject::perhaps_tree,
    provider: Provider::Host,
    limits: whole(60),
};

const TOOL: &str = DEFINITION.name;

/// What an entry takes as JSON beside its path: the names of the properties, a type and a size.
const AROUND: usize = 64;

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

/// All entries, which take at most so many bytes as JSON.
pub(super) fn run(
    workspace: &Workspace,
    arguments: Arguments,
    stop: &Stop,
    result_bytes: usize,
) -> Result<Vec<Listed>, ToolError> {
    let Arguments { path, recursive, options } = arguments;
    let base = match path {
        Some(path) => workspace.locate(&path).map_err(|e| path_error(workspace, &e))?,
        None => RelativePath::root(),
    };
    // Whoever lists one directory wants to see all of it.
    let walk = Walk { recursive, include_ignored: options.include_ignored || !recursive };
    let mut listed = Vec::new();
    let mut size = 0;
    let mut stopped = None;
    let end = workspace.walk(&base, walk, &mut |entry| {
        let path = entry.path.to_string_lossy().into_owned();
        size += written(&path) + AROUND;
        stopped = stop.check().err();
        if stopped.is_some() || size > result_bytes {
            return ControlFlow::Break(());
        }
        let kind = match entry.kind {
            EntryKind::File => "file",
            EntryKind::Directory => "directory",
            EntryKind::Symlink => "symlink",
            EntryKind::Other => "other",
        };
        let size = if entry.kind == EntryKind::File { entry.size() } else { 0 };
        listed.push(Listed { path, r#type: kind, size });
        ControlFlow::Continue(())
    });
    let end = end.map_err(|e| path_error(workspace, &e))?;
    if let Some(stopped) = stopped {
        return Err(stopped.into_error(TOOL));
    }
    if end == WalkEnd::Complete {
        return Ok(listed);
    }
    let (path, entries) = (base.shown(), listed.len());
    let why = note::incomplete(end, stopped).unwrap_or_else(|| {
        format!("one call may return {result_bytes} bytes, as JSON, in which {entries} entries fit")
    });
    let message = format!(
        "list_files: there are too many entries in {path:?}: {why}. List the directories in it one by one, or look for \
         names with find_file."
    );
    Err(ToolError::new("TooManyEntries", message).with(json!({"path": path, "entries": entries})))
}

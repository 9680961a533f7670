//! `list_files`: the content of a directory.

use std::ops::ControlFlow;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::definition::{Definition, Effect, Permission, Provider, wall_limit};
use super::error::{NOT_FOUND, OUTSIDE, ToolError, path_error};
use super::kind::{Kind, optional};
use super::note;
use super::output::{Output, field};
use super::size::json_size;
use super::stop::Stop;
use super::subject;
use crate::workspace::{EntryKind, RelativePath, Walk, WalkEnd, Workspace};

pub(super) const DEFINITION: Definition = Definition {
    name: "list_files",
    aliases: &["listdir"],
    summary: "Lists a directory, sorted by name.",
    description: "Recursive listings omit .git and files that .gitignore or .ignore exclude. Symbolic links are listed \
     but not followed.",
    parameters: &[
        optional("path", Kind::Path, "the workspace", "Directory, relative to the workspace."),
        optional("recursive", Kind::Boolean, "false", "Also list subdirectories."),
        optional(
            "options",
            Kind::Object(&[optional(
                "include_ignored",
                Kind::Boolean,
                "false",
                "Also list ignored files, when recursive.",
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
            Output::OneOf(&["file", "directory", "symlink", "other"]),
            "Type of the entry.",
        ),
        field("size", Output::Integer, "Size of a file in bytes; 0 for anything else."),
    ])),
    base_tool: None,
    example: "list_files(\"src\", true)",
    errors: &[
        NOT_FOUND,
        OUTSIDE,
        ("NotADirectory", "when the path is a file."),
        ("TooManyEntries", "when there are more entries than a call can return."),
    ],
    effect: Effect::Read,
    permission: Permission::FilesRead,
    subject: subject::path_or_tree,
    provider: Provider::Host,
    limits: wall_limit(60),
};

const TOOL: &str = DEFINITION.name;

/// Size of an entry as JSON without its path, in bytes: the names of the properties, a type and a
/// size.
const ENTRY_OVERHEAD_BYTES: usize = 64;

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
pub(super) struct ListEntry {
    path: String,
    r#type: &'static str,
    size: u64,
}

/// Returns all entries, in at most `result_bytes` bytes of JSON.
pub(super) fn run(
    workspace: &Workspace,
    arguments: Arguments,
    stop: &Stop,
    result_bytes: usize,
) -> Result<Vec<ListEntry>, ToolError> {
    let Arguments { path, recursive, options } = arguments;
    let base = match path {
        Some(path) => workspace.locate(&path).map_err(|e| path_error(workspace, &e))?,
        None => RelativePath::root(),
    };
    // A listing of one directory includes ignored files.
    let walk = Walk { recursive, include_ignored: options.include_ignored || !recursive };
    let mut entries = Vec::new();
    let mut size = 0;
    let mut stopped = None;
    let end = workspace.walk(&base, walk, &mut |entry| {
        let path = entry.path.to_string_lossy().into_owned();
        size += json_size(&path) + ENTRY_OVERHEAD_BYTES;
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
        entries.push(ListEntry { path, r#type: kind, size });
        ControlFlow::Continue(())
    });
    let end = end.map_err(|e| path_error(workspace, &e))?;
    if let Some(stopped) = stopped {
        return Err(stopped.into_error(TOOL));
    }
    if end == WalkEnd::Complete {
        return Ok(entries);
    }
    let (path, entries) = (base.display(), entries.len());
    let why = note::incomplete(end, stopped).unwrap_or_else(|| {
        format!("one call may return {result_bytes} bytes as JSON, which is enough for {entries} entries")
    });
    let message = format!(
        "list_files: {path:?} has too many entries: {why}. List its directories one by one, or search for names with \
         find_file."
    );
    Err(ToolError::new("TooManyEntries", message).with(json!({"path": path, "entries": entries})))
}

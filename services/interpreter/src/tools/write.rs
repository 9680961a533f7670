//! `create_file`: writes a whole file.

use serde::{Deserialize, Serialize};

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::encoding::{ENCODING, Encoding};
use super::error::{OUTSIDE, ToolError, path_error};
use super::kind::{Kind, required};
use super::output::{Output, field};
use super::stop::Stop;
use super::subject;
use crate::workspace::{Expected, Workspace, WriteOutcome};

pub(super) const DEFINITION: Definition = Definition {
    name: "create_file",
    aliases: &["write"],
    summary: "Writes a whole file, replacing it if it exists. Creates missing directories.",
    description: "Use edit_file to change a part of a file. A replaced file keeps its mode.",
    parameters: &[
        required("path", Kind::File, "File, relative to the workspace."),
        required("content", CONTENT, "The whole new content."),
        ENCODING,
    ],
    output: Output::Object(&[
        field("path", Output::Text, "The file, relative to the workspace."),
        field("bytes", Output::Integer, "Size of the new content."),
        field("status", Output::OneOf(&["created", "overwritten"]), "Whether the file was new."),
    ]),
    base_tool: None,
    example: "create_file(\"notes/todo.md\", \"# To do\\n\")",
    errors: &[
        OUTSIDE,
        ("IsADirectory", "when the path is a directory."),
        ("NotADirectory", "when a parent of the path is a file."),
    ],
    effect: Effect::Write,
    permission: Permission::FilesWrite,
    subject: subject::path,
    provider: Provider::Host,
    limits: limits(60, 8),
};

/// Longest content of a file, and longest text of an edit: 16 MiB.
pub(super) const CONTENT: Kind = Kind::Text { min_bytes: 0, max_bytes: 16 << 20 };

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    path: String,
    content: String,
    #[serde(default)]
    encoding: Encoding,
}

#[derive(Serialize)]
pub(super) struct CreateResult {
    path: String,
    bytes: usize,
    status: &'static str,
}

pub(super) fn run(
    workspace: &Workspace,
    arguments: Arguments,
    stop: &Stop,
) -> Result<CreateResult, ToolError> {
    let Arguments { path, content, encoding } = arguments;
    let content = encoding.encode(content).map_err(|missing| {
        ToolError::invalid(format!(
            "create_file: the content contains {missing:?} (U+{:04X}), which {} cannot encode. Nothing was written.",
            u32::from(missing),
            encoding.name()
        ))
    })?;
    let refused = |e| path_error(workspace, &e);
    let located = workspace.locate(&path).map_err(refused)?;
    let _writing = workspace.lock_for_writing();
    stop.check().map_err(|stopped| stopped.into_error(DEFINITION.name))?;
    let written = workspace.replace(&located, &content, Expected::Anything).map_err(refused)?;
    let status = match written {
        WriteOutcome::Created => "created",
        WriteOutcome::Overwritten => "overwritten",
    };
    Ok(CreateResult { path: located.display(), bytes: content.len(), status })
}

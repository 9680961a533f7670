//! `create_file`: writes a file as a whole.

use serde::{Deserialize, Serialize};

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::error::{OUTSIDE, ToolError, path_error};
use super::kind::{Kind, required};
use super::output::{Output, field};
use super::stop::Stop;
use super::subject;
use crate::workspace::{Expected, Workspace, Written};

pub(super) const DEFINITION: Definition = Definition {
    name: "create_file",
    aliases: &["write"],
    summary: "Writes a file as a whole, replacing it if it exists. Missing directories are made.",
    description: "To change a part of a file use edit_file. A file that is replaced keeps its mode.",
    parameters: &[
        required("path", Kind::File, "File, relative to the workspace."),
        required("content", CONTENT, "The whole new content."),
    ],
    output: Output::Object(&[
        field("path", Output::Text, "The file, relative to the workspace."),
        field("bytes", Output::Integer, "Size of the new content."),
        field(
            "status",
            Output::OneOf(&["created", "overwritten"]),
            "Whether there was such a file before.",
        ),
    ]),
    like: None,
    example: "create_file(\"notes/todo.md\", \"# To do\\n\")",
    errors: &[
        OUTSIDE,
        ("IsADirectory", "when the path is a directory."),
        ("NotADirectory", "when a part of the path is a file."),
    ],
    effect: Effect::Write,
    permission: Permission::FilesWrite,
    subject: subject::path,
    provider: Provider::Host,
    limits: limits(60, 8),
};

/// Longest content of a file that a tool writes, and longest text of an edit: 16 MiB.
pub(super) const CONTENT: Kind = Kind::Text { min_bytes: 0, max_bytes: 16 << 20 };

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    path: String,
    content: String,
}

#[derive(Serialize)]
pub(super) struct Created {
    path: String,
    bytes: usize,
    status: &'static str,
}

pub(super) fn run(
    workspace: &Workspace,
    arguments: Arguments,
    stop: &Stop,
) -> Result<Created, ToolError> {
    let Arguments { path, content } = arguments;
    let refused = |e| path_error(workspace, &e);
    let located = workspace.locate(&path).map_err(refused)?;
    let _writing = workspace.lock_for_writing();
    stop.check().map_err(|stopped| stopped.into_error(DEFINITION.name))?;
    let written =
        workspace.replace(&located, content.as_bytes(), Expected::Anything).map_err(refused)?;
    let status = match written {
        Written::Created => "created",
        Written::Overwritten => "overwritten",
    };
    Ok(Created { path: located.shown(), bytes: content.len(), status })
}

//! `delete_file`: deletes a file, or a directory with its content.

use serde::{Deserialize, Serialize};

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::error::{NOT_FOUND, OUTSIDE, ToolError, path_error};
use super::kind::{Kind, optional, required};
use super::output::{Output, field};
use super::stop::Stop;
use super::subject;
use crate::workspace::{RemoveError, Workspace};

pub(super) const DEFINITION: Definition = Definition {
    name: "delete_file",
    aliases: &["delete"],
    summary: "Deletes (removes) a file, or a directory with everything in it.",
    description: "Deletes a symbolic link itself, not its target. The workspace itself cannot be deleted.",
    parameters: &[
        required("path", Kind::Path, "File or directory, relative to the workspace."),
        optional("recursive", Kind::Boolean, "false", "Must be true to delete a directory."),
    ],
    output: Output::Object(&[
        field("path", Output::Text, "What was deleted, relative to the workspace."),
        field("deleted", Output::Integer, "Number of deleted files and directories."),
    ]),
    base_tool: None,
    example: "delete_file(\"old/notes.md\")",
    errors: &[
        NOT_FOUND,
        OUTSIDE,
        (
            "IsADirectory",
            "when the path is a directory and `recursive` is not true; nothing was deleted.",
        ),
        ("DeletedInPart", "when it failed midway; the message says how much was deleted and why."),
    ],
    effect: Effect::Write,
    permission: Permission::FilesDelete,
    subject: subject::path_or_tree,
    provider: Provider::Host,
    limits: limits(60, 8),
};

const TOOL: &str = DEFINITION.name;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    path: String,
    #[serde(default)]
    recursive: bool,
}

#[derive(Serialize)]
pub(super) struct Deleted {
    path: String,
    deleted: usize,
}

pub(super) fn run(
    workspace: &Workspace,
    arguments: Arguments,
    stop: &Stop,
) -> Result<Deleted, ToolError> {
    let Arguments { path, recursive } = arguments;
    let located = workspace.locate(&path).map_err(|e| path_error(workspace, &e))?;
    if located.is_root() {
        return Err(ToolError::invalid(
            "delete_file: the path is the workspace itself, which cannot be deleted. Give the path of something in it; \
             list_files() lists its content.",
        ));
    }
    let _writing = workspace.lock_for_writing();
    let mut stopped = None;
    let mut proceed = || {
        stopped = stop.check().err();
        stopped.is_none()
    };
    let removed = workspace.remove(&located, recursive, &mut proceed);
    let (deleted, why) = match removed {
        Ok(deleted) => return Ok(Deleted { path: located.display(), deleted }),
        Err(RemoveError::Directory) => {
            let message = format!(
                "{path:?} is a directory; nothing was deleted. To delete it with everything in it: delete_file({path:?}, true)."
            );
            return Err(
                ToolError::new("IsADirectory", message).with(serde_json::json!({"path": path}))
            );
        }
        Err(RemoveError::Path { removed, source }) => (removed, path_error(workspace, &source)),
        Err(RemoveError::Stopped { removed }) => {
            let stopped = stopped.map(|stopped| stopped.into_error(TOOL));
            (removed, stopped.unwrap_or_else(|| ToolError::cancelled(TOOL)))
        }
    };
    if deleted == 0 {
        return Err(why);
    }
    let message = format!(
        "{path:?} was partially deleted: {deleted} files and directories in it were removed, then the call failed: {}",
        why.message
    );
    Err(ToolError::new("DeletedInPart", message)
        .with(serde_json::json!({"path": path, "deleted": deleted})))
}

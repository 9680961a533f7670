//! Errors of tools, as scripts see them.

use std::error::Error as _;

use serde_json::{Value, json};

use super::table;
use crate::workspace::{PathError, RelativePath, Workspace};

/// Errors of most tools that take a path, for definitions.
pub(super) const OUTSIDE: (&str, &str) =
    ("OutsideWorkspace", "when the path leads outside of the workspace.");
pub(super) const NOT_FOUND: (&str, &str) =
    ("FileNotFound", "when there is no such file; the message lists similar names.");

/// Why a call failed. The script can catch it; uncaught, the model reads it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name}: {message}")]
pub struct ToolError {
    /// Stable name of the failure, the `name` of the JavaScript error, for example `FileNotFound`.
    pub name: &'static str,
    /// What happened and what to do, for a model.
    pub message: String,
    /// Structured details for the script.
    pub details: Option<Value>,
}

impl ToolError {
    pub(super) fn new(name: &'static str, message: impl Into<String>) -> Self {
        Self { name, message: message.into(), details: None }
    }

    pub(super) fn with(mut self, details: Value) -> Self {
        self.details = Some(details);
        self
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new("InvalidArguments", message)
    }

    pub(super) fn cancelled(tool: &str) -> Self {
        Self::new("Cancelled", format!("{tool} was canceled."))
    }

    pub(super) fn internal(tool: &str, what: &str) -> Self {
        Self::new(
            "InternalError",
            format!("internal error of {tool}, not caused by its arguments: {what}"),
        )
    }
}

/// The error for an unknown tool.
pub(super) fn unknown_tool(name: &str) -> ToolError {
    let names: Vec<&str> = table::definitions().iter().map(|tool| tool.name).collect();
    let aliases = table::definitions().iter().flat_map(|tool| tool.aliases.iter().copied());
    let all: Vec<&str> = names.iter().copied().chain(aliases).collect();
    let shown: String = name.chars().take(100).collect();
    let near = similar::get_close_matches(shown.as_str(), &all, 1, 0.5);
    let hint = near.first().map(|near| format!(" Did you mean {near}?")).unwrap_or_default();
    let message = format!(
        "There is no tool {shown:?}.{hint} The tools are: {}. Use tools.search to find tools by what they do.",
        names.join(", ")
    );
    ToolError::new("UnknownTool", message).with(json!({"name": shown, "similar": near}))
}

/// Turns a path error into an error that says what to do.
pub(super) fn path_error(workspace: &Workspace, error: &PathError) -> ToolError {
    match error {
        PathError::Outside { path } => ToolError::new(
            "OutsideWorkspace",
            format!(
                "{path:?} leads outside of the workspace, directly or through a symbolic link. Only paths inside {} \
                 can be used; write them relative to it, for example \"src/main.rs\".",
                workspace.root().display()
            ),
        )
        .with(json!({"path": path})),
        PathError::NotFound { path } => {
            if path.contains('\u{fffd}') {
                let message = format!(
                    "{path:?} does not exist. If it comes from a listing, its name is not UTF-8 and U+FFFD replaces \
                     the other bytes; only commands can access it, for example with a glob: execute_command(\"mv caf* new-name\")."
                );
                return ToolError::new("FileNotFound", message).with(json!({"path": path, "similar": []}));
            }
            let near = workspace.locate(path).map(|path| workspace.similar_names(&path, 3)).unwrap_or_default();
            let hint = if near.is_empty() {
                " Use list_files or find_file to see which files exist.".to_owned()
            } else {
                format!(" Similar names: {}.", near.join(", "))
            };
            ToolError::new("FileNotFound", format!("{path:?} does not exist.{hint}"))
                .with(json!({"path": path, "similar": near}))
        }
        PathError::IsDirectory { path } => ToolError::new(
            "IsADirectory",
            format!("{path:?} is a directory. Use list_files({path:?}) to list it."),
        )
        .with(json!({"path": path})),
        PathError::NotDirectory { path } => {
            ToolError::new("NotADirectory", format!("{path:?} is not a directory, or a parent of it is a file."))
                .with(json!({"path": path}))
        }
        PathError::Special { path, kind } => ToolError::new(
            "NotARegularFile",
            format!("{path:?} is a {kind}; only regular files can be read and written."),
        )
        .with(json!({"path": path})),
        PathError::Reserved { path } => ToolError::new(
            "PermissionDenied",
            format!(
                "{path:?} is reserved for the service that runs the tools. No tool can read or change it; continue without it."
            ),
        )
        .with(json!({"path": path})),
        PathError::Denied { path } => {
            ToolError::new("PermissionDenied", format!("The operating system denied access to {path:?}."))
                .with(json!({"path": path}))
        }
        PathError::Invalid { path, why } => {
            ToolError::new("InvalidPath", format!("{path:?} is not a valid path: {why}.")).with(json!({"path": path}))
        }
        PathError::Changed { path } => ToolError::new(
            "FileChanged",
            format!("{path:?} was changed by something else during the call; nothing was written. Read it and try again."),
        )
        .with(json!({"path": path})),
        PathError::Io { path, .. } => {
            let cause = error.source().map(ToString::to_string).unwrap_or_default();
            ToolError::new("IoError", format!("{error}: {cause}.")).with(json!({"path": path}))
        }
    }
}

/// The error for a failed read or write of an open file.
pub(super) fn io_error(path: &RelativePath, error: &std::io::Error) -> ToolError {
    ToolError::new("IoError", format!("Reading or writing {:?} failed: {error}.", path.display()))
        .with(json!({"path": path.display()}))
}

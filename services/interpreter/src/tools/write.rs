//! `create_file`: writes a file as a whole.

use serde::{Deserialize, Serialize};

use super::error::{ToolError, path_error};
use super::stop::Stop;
use crate::workspace::{Expected, Workspace, Written};

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

pub(super) fn run(workspace: &Workspace, arguments: Arguments, stop: &Stop) -> Result<Created, ToolError> {
    let Arguments { path, content } = arguments;
    if path.ends_with('/') {
        return Err(ToolError::invalid(format!("create_file: {path:?} ends with a slash; give the path of a file.")));
    }
    let refused = |e| path_error(workspace, &e);
    let located = workspace.locate(&path).map_err(refused)?;
    let _writing = workspace.lock_for_writing();
    stop.check().map_err(|stopped| stopped.into_error("create_file"))?;
    let written = workspace.replace(&located, content.as_bytes(), Expected::Anything).map_err(refused)?;
    let status = match written {
        Written::Created => "created",
        Written::Overwritten => "overwritten",
    };
    Ok(Created { path: located.shown(), bytes: content.len(), status })
}

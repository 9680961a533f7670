//! `find_file`: files and directories by a glob. `grep` uses the same globs.

use std::ops::ControlFlow;
use std::path::Path;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use serde::{Deserialize, Serialize};

use super::definition::{Definition, Effect, Permission, Provider, wall_limit};
use super::error::{NOT_FOUND, OUTSIDE, ToolError, path_error};
use super::kind::{Kind, optional, required};
use super::note;
use super::output::{Output, field, optional_field};
use super::size::json_size;
use super::stop::{Stop, StopReason};
use super::subject;
use crate::workspace::{RelativePath, Walk, WalkEnd, Workspace, is_bounded_glob};

pub(super) const DEFINITION: Definition = Definition {
    name: "find_file",
    aliases: &["find", "glob"],
    summary: "Finds files and directories by a glob.",
    description: "A glob without a slash matches names, others match paths below `path` (`**` crosses \
     directories).\nOmits .git and files that .gitignore or .ignore exclude. Symbolic links are listed but not \
     followed.",
    parameters: &[
        required(
            "pattern",
            Kind::Text { min_bytes: 1, max_bytes: 1024 },
            "Glob, for example \"*.toml\" or \"src/**/test_*.py\".",
        ),
        optional("path", Kind::Path, "the workspace", "Directory to search."),
    ],
    output: Output::Object(&[
        field("paths", Output::List(&Output::Text), "Sorted, relative to the workspace."),
        field("truncated", Output::Boolean, "Whether there may be more."),
        optional_field("note", Output::Text, "What was omitted, and why."),
    ]),
    base_tool: None,
    example: "find_file(\"*.toml\")",
    errors: &[NOT_FOUND, OUTSIDE, ("NotADirectory", "when `path` is a file.")],
    effect: Effect::Read,
    permission: Permission::FilesRead,
    subject: subject::tree,
    provider: Provider::Host,
    limits: wall_limit(60),
};

const TOOL: &str = DEFINITION.name;

/// Reserve for the rest of the result, including the note, in bytes of JSON.
const RESULT_OVERHEAD_BYTES: usize = 1024;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    pattern: String,
    path: Option<String>,
}

#[derive(Serialize)]
pub(super) struct FindResult {
    paths: Vec<String>,
    truncated: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

/// Returns all paths, up to `result_bytes` bytes of JSON.
pub(super) fn run(
    workspace: &Workspace,
    arguments: Arguments,
    stop: &Stop,
    result_bytes: usize,
) -> Result<FindResult, ToolError> {
    let Arguments { pattern, path } = arguments;
    let mut room = result_bytes.saturating_sub(RESULT_OVERHEAD_BYTES);
    let globs = globs(TOOL, "pattern", std::slice::from_ref(&pattern))?;
    let base = match path {
        Some(path) => workspace.locate(&path).map_err(|e| path_error(workspace, &e))?,
        None => RelativePath::root(),
    };
    let mut paths = Vec::new();
    let mut stopped = None;
    let walk = Walk { recursive: true, include_ignored: false };
    let end = workspace.walk(&base, walk, &mut |entry| {
        stopped = stop.check().err();
        if stopped.is_some() {
            return ControlFlow::Break(());
        }
        if is_match(&globs, entry.path, &base) {
            let path = entry.path.to_string_lossy().into_owned();
            match room.checked_sub(json_size(&path) + 1) {
                Some(left) => room = left,
                None => return ControlFlow::Break(()),
            }
            paths.push(path);
        }
        ControlFlow::Continue(())
    });
    let end = end.map_err(|e| path_error(workspace, &e))?;
    if stopped == Some(StopReason::Cancelled) {
        return Err(StopReason::Cancelled.into_error(TOOL));
    }
    paths.sort_unstable();
    let truncated = end != WalkEnd::Complete;
    let enough = || {
        format!("only the first {} are included, the most that one call may return", paths.len())
    };
    let why = note::incomplete(end, stopped).or_else(|| truncated.then(enough));
    let note = why.map(|why| {
        format!("The list is incomplete: {why}. Give a directory to search with `path`.")
    });
    Ok(FindResult { paths, truncated, note })
}

/// Compiles globs. A glob without a slash matches names in any directory.
pub(super) fn globs(
    tool: &str,
    parameter: &str,
    patterns: &[String],
) -> Result<GlobSet, ToolError> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        if !is_bounded_glob(pattern) {
            let shown: String = pattern.chars().take(100).collect();
            return Err(ToolError::invalid(format!(
                "{tool}: the glob that begins with {shown:?} is too long or has too many braces; use several shorter globs."
            )));
        }
        let trimmed = pattern.trim_start_matches("./").trim_start_matches('/');
        let mut glob = if trimmed.trim_end_matches('/').contains('/') {
            trimmed.to_owned()
        } else {
            format!("**/{trimmed}")
        };
        if glob.ends_with('/') {
            glob.push_str("**");
        }
        let glob = GlobBuilder::new(&glob)
            .literal_separator(true)
            .build()
            .map_err(|e| invalid(tool, pattern, &e))?;
        set.add(glob);
    }
    set.build().map_err(|e| invalid(tool, parameter, &e))
}

/// Whether a path matches, relative to the workspace or to the searched directory.
pub(super) fn is_match(globs: &GlobSet, path: &Path, base: &RelativePath) -> bool {
    globs.is_match(path)
        || path.strip_prefix(base.as_path()).is_ok_and(|below| globs.is_match(below))
}

fn invalid(tool: &str, pattern: &str, error: &globset::Error) -> ToolError {
    let shown: String = pattern.chars().take(200).collect();
    ToolError::invalid(format!(
        "{tool}: {shown:?} is not a valid glob: {}. Examples: \"*.rs\", \"src/**/*.ts\", \"{{a,b}}.txt\".",
        error.kind()
    ))
}

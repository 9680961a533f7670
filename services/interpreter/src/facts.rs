//! What a model is told about the machine and the project it works on, beside the tools.

use std::{fmt::Write as _, io::Read as _, path::Path};

use construct_proto::mesh::v1::{ToolCatalogue, ToolCatalogueRequest};
use sha2::{Digest as _, Sha256};

use crate::{tools, workspace::Workspace, workspaces::Workspaces};

/// Notes for agents that a project may keep at its top, by the names in use; the first that exists is taken.
const NOTES: [&str; 3] = ["AGENTS.md", "CLAUDE.md", ".construct/instructions.md"];
/// How much of them is taken, in bytes.
const NOTES_BYTES: usize = 16 * 1024;
/// Entries of the top directory that are named.
const ENTRIES: usize = 60;

/// The tools, and what is to be known about a workspace.
pub(crate) async fn catalogue(workspaces: &Workspaces, request: ToolCatalogueRequest) -> ToolCatalogue {
    let declarations = tools::declarations();
    let version = Sha256::digest(declarations.as_bytes()).iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    });
    let mut facts = format!("Machine: {} {}. ", std::env::consts::OS, std::env::consts::ARCH);
    let _ = writeln!(facts, "Commands: {}", workspaces.commands());
    if !request.workspace.is_empty()
        && let Ok(path) = workspaces.locate(&request.workspace, "").await
    {
        let project = tokio::task::spawn_blocking(move || project(&path)).await;
        facts.push_str(&project.unwrap_or_default());
    }
    ToolCatalogue { declarations, version, facts }
}

/// The top of the project: its entries, and what it wants agents to know.
fn project(path: &Path) -> String {
    let mut names: Vec<String> = std::fs::read_dir(path)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| {
            let slash = if entry.file_type().is_ok_and(|kind| kind.is_dir()) { "/" } else { "" };
            format!("{}{slash}", entry.file_name().to_string_lossy())
        })
        .collect();
    names.sort();
    let more = names.len().saturating_sub(ENTRIES);
    names.truncate(ENTRIES);
    let mut text = format!("Top of the workspace: {}", names.join(" "));
    if more > 0 {
        let _ = write!(text, " … and {more} more");
    }
    text.push('\n');
    // Read through the confinement, so that a link cannot show the model a file from elsewhere.
    let Ok(workspace) = Workspace::open(path) else { return text };
    if let Some((name, notes)) = NOTES.iter().find_map(|name| Some((name, read_start(&workspace, name)?))) {
        let _ = write!(text, "\nThe project's notes for agents ({name}):\n\n{notes}\n");
    }
    text
}

/// The beginning of a file of the workspace, if there is such a file and it is text.
fn read_start(workspace: &Workspace, name: &str) -> Option<String> {
    let file = workspace.open_file(&workspace.locate(name).ok()?).ok()?;
    let mut bytes = Vec::new();
    file.take(NOTES_BYTES as u64).read_to_end(&mut bytes).ok()?;
    // Where the limit cut a character in two, its first part goes too.
    let whole = bytes.utf8_chunks().next().map_or(0, |chunk| chunk.valid().len());
    bytes.truncate(whole);
    String::from_utf8(bytes).ok().filter(|text| !text.trim().is_empty())
}

//! Facts about the machine and the project that a prompt has beside the tools.

use std::{fmt::Write as _, io::Read as _};

use construct_proto::mesh::v1::{ToolCatalog, ToolCatalogRequest};
use sha2::{Digest as _, Sha256};

use crate::{tiers::Tier, tools, workspace::Workspace, workspaces::Workspaces};

/// Files with a project's notes for agents, at the top of its workspace. The first that exists is
/// used.
const NOTES_FILES: [&str; 3] = ["AGENTS.md", "CLAUDE.md", ".construct/instructions.md"];
/// Only the first bytes of the notes are used.
const MAX_NOTES_BYTES: usize = 16 * 1024;

/// Maximum size of the tools' declarations in a prompt. Today's fit. Tools beyond it are listed
/// with their signatures only; a script looks up the rest when it needs them.
const MAX_DECLARATIONS_BYTES: usize = 25 * 1024;

/// The tool catalog, with the facts about a workspace.
pub(crate) async fn catalog(
    workspaces: &Workspaces,
    tier: &Tier,
    request: ToolCatalogRequest,
) -> ToolCatalog {
    let declarations = tools::declarations(MAX_DECLARATIONS_BYTES);
    let version =
        Sha256::digest(declarations.as_bytes()).iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        });
    let mut facts = format!("Machine: {} {}. ", std::env::consts::OS, std::env::consts::ARCH);
    let _ = writeln!(facts, "Commands: {}", workspaces.commands());
    let Tier { script, commands, .. } = tier;
    let _ = writeln!(
        facts,
        "Limits: a script has {:?} of CPU time and {} MiB of memory, a command {} processors and {} MiB.",
        script.cpu,
        script.memory_bytes >> 20,
        commands.cores,
        commands.memory_bytes >> 20,
    );
    if !request.workspace.is_empty()
        && let Ok(workspace) = workspaces.workspace(&request.workspace, "").await
    {
        let notes = tokio::task::spawn_blocking(move || notes(&workspace)).await;
        facts.push_str(&notes.unwrap_or_default());
    }
    ToolCatalog { declarations, version, facts }
}

/// The project's notes for agents. They are not scrubbed: a prompt that depended on secrets would
/// reveal them to a script by way of the model (docs/adr/0012-secrets.md). The facts have no list
/// of files: it changes with every file, and the vendor reads a changed prompt again at the full
/// price.
fn notes(workspace: &Workspace) -> String {
    let found = NOTES_FILES.iter().find_map(|name| Some((name, read_start(workspace, name)?)));
    found
        .map(|(name, notes)| format!("\nThe project's notes for agents ({name}):\n\n{notes}\n"))
        .unwrap_or_default()
}

/// The beginning of a file of the workspace, if the file exists and is text.
fn read_start(workspace: &Workspace, name: &str) -> Option<String> {
    let file = workspace.open_file(&workspace.locate(name).ok()?).ok()?;
    let mut bytes = Vec::new();
    file.take(MAX_NOTES_BYTES as u64).read_to_end(&mut bytes).ok()?;
    // Drops a character that the limit cut in two.
    let valid_bytes = bytes.utf8_chunks().next().map_or(0, |chunk| chunk.valid().len());
    bytes.truncate(valid_bytes);
    String::from_utf8(bytes).ok().filter(|text| !text.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        command::CommandSandbox,
        tools::{Egress, Policy},
    };

    #[tokio::test]
    async fn facts_have_notes_and_ignore_other_files() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let project = directory.path().join("project");
        std::fs::create_dir(&project).expect("made");
        std::fs::write(project.join("CLAUDE.md"), "Be kind.").expect("written");
        let workspaces = Workspaces::new(
            std::slice::from_ref(&project),
            directory.path().join("data/workspaces"),
            Policy::default(),
            Egress::new(&[]).expect("an HTTP client"),
            CommandSandbox::unavailable("a test"),
        )
        .expect("workspaces");
        let workspace = project.to_str().expect("UTF-8").to_owned();
        let request = || ToolCatalogRequest { workspace: workspace.clone() };
        let tier = Tier::for_pool("cpu-4");
        let before = catalog(&workspaces, &tier, request()).await;
        assert!(before.facts.contains("(CLAUDE.md):\n\nBe kind."), "{}", before.facts);
        assert!(
            before.facts.contains("Commands: commands cannot be confined: a test"),
            "{}",
            before.facts
        );
        std::fs::write(project.join("another"), "").expect("written");
        assert!(
            before.facts.contains("a script has 20s of CPU time and 128 MiB"),
            "{}",
            before.facts
        );
        assert_eq!(catalog(&workspaces, &tier, request()).await.facts, before.facts);
    }
}

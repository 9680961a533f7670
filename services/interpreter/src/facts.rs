//! What a model is told about the machine and the project it works on, beside the tools.

use std::{fmt::Write as _, io::Read as _};

use construct_proto::mesh::v1::{ToolCatalog, ToolCatalogRequest};
use sha2::{Digest as _, Sha256};

use crate::{tiers::Tier, tools, workspace::Workspace, workspaces::Workspaces};

/// Notes for agents that a project may keep at its top, by the names in use; the first that exists
/// is taken.
const NOTES: [&str; 3] = ["AGENTS.md", "CLAUDE.md", ".construct/instructions.md"];
/// How much of them is taken, in bytes.
const NOTES_BYTES: usize = 16 * 1024;

/// How much the declarations of the tools may take of a prompt, in bytes. Today's fit; tools that
/// come later are named with their signatures, and a script finds out more when it needs them.
const DECLARATIONS_BYTES: usize = 24 * 1024;

/// The tools, and what is to be known about a workspace.
pub(crate) async fn catalog(
    workspaces: &Workspaces,
    tier: &Tier,
    request: ToolCatalogRequest,
) -> ToolCatalog {
    let declarations = tools::declarations(DECLARATIONS_BYTES);
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

/// What the project wants agents to know. Not what lies in it: that changes with every file, and a
/// prompt that changes is read anew at the full price by the vendor.
fn notes(workspace: &Workspace) -> String {
    let found = NOTES.iter().find_map(|name| Some((name, read_start(workspace, name)?)));
    found
        .map(|(name, notes)| format!("\nThe project's notes for agents ({name}):\n\n{notes}\n"))
        .unwrap_or_default()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        command::CommandSandbox,
        tools::{Egress, Policy},
    };

    #[tokio::test]
    async fn facts_have_the_notes_and_do_not_change_with_the_files() {
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
        let tier = Tier::of("cpu-4");
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

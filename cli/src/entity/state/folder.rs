//! Export and import of documents as JSON files in a folder, such as an operator's data folder.

use std::{
    ffi::OsString,
    fs::{self, OpenOptions},
    io::{ErrorKind, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use clap::Args;
use construct_proto::v1::{PutStateRequest, State};
use serde::de::IgnoredAny;

use super::{ScopeArgs, get, list};
use crate::{
    entity::read_text,
    failure::Failure,
    gateway::{self, Gateway, call},
    output::OutputArgs,
    page::Page,
    text::printable,
};

/// The names of the documents.
const NAMES: [&str; 8] = [
    "storage",
    "settings",
    "pinned",
    "designs",
    "project-settings",
    "skill-states",
    "hook-states",
    "mcp-states",
];
/// The subfolder of an operator's conversations.
const SESSIONS: &str = "sessions";
/// The gateway's limit for a document.
const MAX_BYTES: usize = 1024 * 1024;

#[derive(Debug, Args)]
pub(crate) struct Export {
    /// The folder; created if missing.
    folder: PathBuf,
    /// Replace existing files.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    scope: ScopeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Import {
    /// The folder.
    folder: PathBuf,
    /// Replace documents with different content.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    scope: ScopeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// The path of a document's file.
fn document_path(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.json"))
}

impl Export {
    pub(super) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let listed = list(gateway, self.scope).await?;
        let paths = listed.iter().map(|state| document_path(&self.folder, &state.name));
        let existing: Vec<_> =
            paths.filter(|path| path.exists()).map(|path| path.display().to_string()).collect();
        if !existing.is_empty() && !self.force {
            return Err(Failure::usage(format!(
                "these files already exist: {}",
                existing.join(", ")
            ))
            .hint("--force replaces them"));
        }
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
        for state in &listed {
            let document = get(gateway, self.scope, &state.name, state.version).await?;
            write_private(&document_path(&self.folder, &state.name), &document.json)?;
        }
        self.output.list(&Page { items: listed, next_page_token: String::new() })
    }
}

/// Writes a file atomically, never readable for others: documents may contain keys.
fn write_private(path: &Path, text: &str) -> Result<(), Failure> {
    let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
    let written = file
        .write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&unfinished, path));
    if written.is_err() {
        _ = fs::remove_file(&unfinished);
    }
    Ok(written?)
}

/// A document in the folder: its name and text.
type Document = (&'static str, String);

/// A document to store.
struct ChangedDocument {
    name: &'static str,
    json: String,
    /// The version that it replaces; 0: none.
    version: i64,
}

impl Import {
    pub(super) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        // Everything is read and compared before anything is stored.
        let (documents, notes) = self.read()?;
        for note in notes {
            eprintln!("{note}");
        }
        let (mut changed, mut same, mut replaced) = (Vec::new(), Vec::new(), Vec::new());
        let present = list(gateway, self.scope).await?;
        for (name, json) in documents {
            let version = match present.iter().find(|state| state.name == name) {
                None => 0,
                Some(state) => {
                    if get(gateway, self.scope, name, state.version).await?.json == json {
                        same.push(name);
                        continue;
                    }
                    replaced.push(format!(
                        "{name} (version {}, by {})",
                        state.version, state.updated_by
                    ));
                    state.version
                }
            };
            changed.push(ChangedDocument { name, json, version });
        }
        if !replaced.is_empty() && !self.force {
            let message = format!(
                "nothing was imported, because this would replace: {}",
                replaced.join(", ")
            );
            return Err(Failure::usage(message)
                .hint("--force replaces them; the previous versions are kept"));
        }
        for name in same {
            eprintln!("{name} is unchanged");
        }
        let mut stored = Vec::new();
        for document in changed {
            stored.push(document.store(gateway, self.scope).await?);
        }
        self.output.list(&Page { items: stored, next_page_token: String::new() })
    }

    /// Reads the documents in the folder. Also returns a note for every other entry.
    fn read(&self) -> Result<(Vec<Document>, Vec<String>), Failure> {
        let unreadable =
            |error| Failure::usage(format!("{} cannot be read: {error}", self.folder.display()));
        let entries = fs::read_dir(&self.folder).map_err(unreadable)?;
        let mut files: Vec<OsString> = entries
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect::<Result<_, _>>()
            .map_err(unreadable)?;
        files.sort();
        let (mut documents, mut notes) = (Vec::new(), Vec::new());
        for name in NAMES {
            let path = document_path(&self.folder, name);
            match fs::metadata(&path) {
                Ok(_) => documents.push((name, read_document(&path)?)),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(Failure::usage(format!(
                        "{} cannot be read: {error}",
                        path.display()
                    )));
                }
            }
        }
        for file in files.iter().map(|file| file.to_string_lossy()) {
            if file == SESSIONS {
                notes.push(
                    "sessions is skipped: conversations are tasks and cannot be imported"
                        .to_owned(),
                );
            } else if !NAMES.iter().any(|name| file.strip_suffix(".json") == Some(*name)) {
                notes.push(printable(&format!("{file} is skipped: it is not a document")));
            }
        }
        if documents.is_empty() {
            let names: Vec<_> = NAMES.iter().map(|name| format!("{name}.json")).collect();
            let message = format!("{} has none of {}", self.folder.display(), names.join(", "));
            return Err(Failure::usage(message));
        }
        Ok((documents, notes))
    }
}

/// Reads a document, and checks it as the gateway does.
fn read_document(path: &Path) -> Result<String, Failure> {
    let text = read_text(path)?;
    let invalid = |reason: String| Failure::usage(format!("{} {reason}", path.display()));
    if text.len() > MAX_BYTES {
        return Err(invalid("has more than 1 MiB".to_owned()));
    }
    // Unreadable content is not quoted: it may be a key.
    serde_json::from_str::<IgnoredAny>(&text).map_err(|error| {
        invalid(format!("is not JSON: line {}, column {}", error.line(), error.column()))
    })?;
    if !text.trim_start().starts_with('{') {
        return Err(invalid("is not a JSON object".to_owned()));
    }
    Ok(text)
}

impl ChangedDocument {
    /// Stores the document, unless it was changed since it was compared.
    async fn store(self, gateway: &Gateway, scope: ScopeArgs) -> Result<State, Failure> {
        let request = PutStateRequest {
            state: self.name.to_owned(),
            shared: scope.shared,
            json: self.json,
            expected_version: Some(self.version),
            idempotency_key: gateway::idempotency_key(),
            ..PutStateRequest::default()
        };
        call(gateway.states().put_state(request)).await
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use uuid::Uuid;

    use super::*;

    #[test]
    fn exported_files_are_private_and_other_files_are_reported() {
        let folder = std::env::temp_dir().join(format!("construct-cli-state-{}", Uuid::now_v7()));
        fs::create_dir(&folder).unwrap();
        let path = document_path(&folder, "settings");
        for text in ["{\"a\": 1}", "{}\n"] {
            write_private(&path, text).unwrap();
            assert_eq!(read_document(&path).unwrap(), text);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        for (text, reason) in
            [("[]", "is not a JSON object"), ("{sk-hunter2}", "is not JSON: line 1, column 2")]
        {
            fs::write(&path, text).unwrap();
            let refused = read_document(&path).unwrap_err().to_string();
            assert!(refused.contains(reason) && !refused.contains("hunter2"), "{refused}");
        }
        fs::write(&path, "{}").unwrap();
        fs::write(folder.join("notes.txt"), "").unwrap();
        fs::create_dir(folder.join("sessions")).unwrap();
        let import = Import {
            folder: folder.clone(),
            force: false,
            scope: ScopeArgs { shared: false },
            output: output(),
        };
        let (documents, notes) = import.read().unwrap();
        assert_eq!(documents, [("settings", "{}".to_owned())]);
        assert_eq!(notes.len(), 2);
        assert!(
            notes[0].starts_with("notes.txt is skipped")
                && notes[1].starts_with("sessions is skipped")
        );
        fs::remove_file(&path).unwrap();
        assert!(import.read().unwrap_err().to_string().contains("has none of storage.json"));
        fs::remove_dir_all(folder).unwrap();
    }

    fn output() -> OutputArgs {
        #[derive(clap::Parser)]
        struct OutputOnly {
            #[command(flatten)]
            output: OutputArgs,
        }
        <OutputOnly as clap::Parser>::parse_from(["x"]).output
    }
}

//! Documents as files of a folder: `settings.json` and the like, as operators keep them.

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
    page::Listed,
    words::printable,
};

/// What documents there are.
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
/// Where operators keep conversations.
const SESSIONS: &str = "sessions";
/// The gateway refuses what is larger.
const MAX_BYTES: usize = 1024 * 1024;

#[derive(Debug, Args)]
pub(crate) struct Export {
    /// The folder; made when it is not there.
    folder: PathBuf,
    /// Replace files that are there.
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
    /// Replace documents that say something else.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    scope: ScopeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// The file of a document.
fn file(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.json"))
}

impl Export {
    pub(super) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let listed = list(gateway, self.scope).await?;
        let paths = listed.iter().map(|state| file(&self.folder, &state.name));
        let there: Vec<_> =
            paths.filter(|path| path.exists()).map(|path| path.display().to_string()).collect();
        if !there.is_empty() && !self.force {
            return Err(Failure::usage(format!(
                "these files are there already: {}",
                there.join(", ")
            ))
            .hint("--force replaces them"));
        }
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
        for state in &listed {
            let whole = get(gateway, self.scope, &state.name, state.version).await?;
            write(&file(&self.folder, &state.name), &whole.json)?;
        }
        self.output.list(&Listed { items: listed, next_page_token: String::new() })
    }
}

/// A file whole or not at all, and never readable for others: documents may hold keys.
fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
    let done = file
        .write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&unfinished, path));
    if done.is_err() {
        _ = fs::remove_file(&unfinished);
    }
    Ok(done?)
}

/// A document of the folder: its name and its text.
type Document = (&'static str, String);

/// A document to put.
struct Found {
    name: &'static str,
    json: String,
    /// The version that it takes the place of; 0: there is none.
    version: i64,
}

impl Import {
    pub(super) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        // Everything is read and looked at before anything is put.
        let (documents, others) = self.read()?;
        for other in others {
            eprintln!("{other}");
        }
        let (mut changed, mut same, mut taken) = (Vec::new(), Vec::new(), Vec::new());
        let present = list(gateway, self.scope).await?;
        for (name, json) in documents {
            let version = match present.iter().find(|state| state.name == name) {
                None => 0,
                Some(state) => {
                    if get(gateway, self.scope, name, state.version).await?.json == json {
                        same.push(name);
                        continue;
                    }
                    taken.push(format!(
                        "{name} (version {}, by {})",
                        state.version, state.updated_by
                    ));
                    state.version
                }
            };
            changed.push(Found { name, json, version });
        }
        if !taken.is_empty() && !self.force {
            let words = format!(
                "nothing was imported, because this would be replaced: {}",
                taken.join(", ")
            );
            return Err(Failure::usage(words)
                .hint("--force replaces it; what was there before is kept as a version"));
        }
        for name in same {
            eprintln!("{name} is the same already");
        }
        let mut put = Vec::new();
        for found in changed {
            put.push(found.put(gateway, self.scope).await?);
        }
        self.output.list(&Listed { items: put, next_page_token: String::new() })
    }

    /// The documents in the folder, and what is to be said of everything else that is there.
    fn read(&self) -> Result<(Vec<Document>, Vec<String>), Failure> {
        let unreadable =
            |error| Failure::usage(format!("{} cannot be read: {error}", self.folder.display()));
        let entries = fs::read_dir(&self.folder).map_err(unreadable)?;
        let mut files: Vec<OsString> = entries
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect::<Result<_, _>>()
            .map_err(unreadable)?;
        files.sort();
        let (mut documents, mut others) = (Vec::new(), Vec::new());
        for name in NAMES {
            let path = file(&self.folder, name);
            match fs::metadata(&path) {
                Ok(_) => documents.push((name, document(&path)?)),
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
                others.push(
                    "sessions is left out: conversations are tasks here, and not taken over"
                        .to_owned(),
                );
            } else if !NAMES.iter().any(|name| file.strip_suffix(".json") == Some(*name)) {
                others.push(printable(&format!("{file} is left out: it is none of the documents")));
            }
        }
        if documents.is_empty() {
            let names: Vec<_> = NAMES.iter().map(|name| format!("{name}.json")).collect();
            let words = format!("{} has none of {}", self.folder.display(), names.join(", "));
            return Err(Failure::usage(words));
        }
        Ok((documents, others))
    }
}

/// The text of a file that the gateway will take.
fn document(path: &Path) -> Result<String, Failure> {
    let text = read_text(path)?;
    let wrong = |why: String| Failure::usage(format!("{} {why}", path.display()));
    if text.len() > MAX_BYTES {
        return Err(wrong("has more than 1 MiB".to_owned()));
    }
    // What cannot be read is not quoted: it may be a key.
    serde_json::from_str::<IgnoredAny>(&text).map_err(|error| {
        wrong(format!("is not JSON, as line {}, column {} shows", error.line(), error.column()))
    })?;
    if !text.trim_start().starts_with('{') {
        return Err(wrong("is not a JSON object".to_owned()));
    }
    Ok(text)
}

impl Found {
    /// Puts it, unless somebody has changed the document since it was looked at.
    async fn put(self, gateway: &Gateway, scope: ScopeArgs) -> Result<State, Failure> {
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
    fn a_file_is_whole_and_for_nobody_else_and_what_is_no_document_is_named() {
        let folder = std::env::temp_dir().join(format!("construct-cli-state-{}", Uuid::now_v7()));
        fs::create_dir(&folder).unwrap();
        let path = file(&folder, "settings");
        for text in ["{\"a\": 1}", "{}\n"] {
            write(&path, text).unwrap();
            assert_eq!(document(&path).unwrap(), text);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        for (text, why) in [
            ("[]", "is not a JSON object"),
            ("{sk-hunter2}", "is not JSON, as line 1, column 2 shows"),
        ] {
            fs::write(&path, text).unwrap();
            let refused = document(&path).unwrap_err().to_string();
            assert!(refused.contains(why) && !refused.contains("hunter2"), "{refused}");
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
        let (documents, others) = import.read().unwrap();
        assert_eq!(documents, [("settings", "{}".to_owned())]);
        assert_eq!(others.len(), 2);
        assert!(
            others[0].starts_with("notes.txt is left out")
                && others[1].starts_with("sessions is left out")
        );
        fs::remove_file(&path).unwrap();
        assert!(import.read().unwrap_err().to_string().contains("has none of storage.json"));
        fs::remove_dir_all(folder).unwrap();
    }

    fn output() -> OutputArgs {
        #[derive(clap::Parser)]
        struct Only {
            #[command(flatten)]
            output: OutputArgs,
        }
        <Only as clap::Parser>::parse_from(["x"]).output
    }
}

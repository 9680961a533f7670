//! `save_file`: saves a file that a person attached to the conversation in the workspace.
//!
//! The command lists the attached files; no other file can be named, not even by its hash. The
//! content comes in chunks from the shared storage. The file appears only when the content is
//! complete and its hash is correct.

use std::{fs::File, io::Write as _, sync::Arc};

use bytes::Bytes;
use construct_bus::files::{self, Sha256};
use construct_domain::OrganizationId;
use construct_proto::mesh::v1::AttachedFile;
use futures::{StreamExt as _, stream::BoxStream};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::Digest as _;
use tokio::sync::mpsc;

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::error::{OUTSIDE, ToolError, io_error, path_error};
use super::kind::{Kind, required};
use super::output::{Output, field};
use super::stop::Stop;
use super::subject;
use crate::workspace::{PathError, RelativePath, Workspace, WriteOutcome};

/// How many files an error lists at most.
const MAX_LISTED: usize = 20;

pub(super) const DEFINITION: Definition = Definition {
    name: "save_file",
    aliases: &[],
    summary: "Saves a file that people attached to (uploaded into) this conversation in the workspace.",
    description: "Replaces an existing file and creates missing directories.",
    parameters: &[
        required(
            "file",
            Kind::Text { min_bytes: 1, max_bytes: 128 },
            "The file's id, or its hash as \"sha256:…\".",
        ),
        required("path", Kind::File, "Target file, relative to the workspace."),
    ],
    output: Output::Object(&[
        field("path", Output::Text, "The saved file, relative to the workspace."),
        field("bytes", Output::Integer, "Its size."),
        field("status", Output::OneOf(&["created", "overwritten"]), "Whether the file was new."),
    ]),
    base_tool: None,
    example: "save_file(\"file_01890a5d-…\", \"data/report.csv\")",
    errors: &[
        NOT_ATTACHED,
        ("FileUnavailable", "when the file was deleted or cannot be read now."),
        ("FileTooLarge", "when it is larger than the limit for files of the workspace."),
        OUTSIDE,
        ("IsADirectory", "when the path is a directory."),
        ("NotADirectory", "when a parent of the path is a file."),
    ],
    effect: Effect::Write,
    permission: Permission::FilesWrite,
    subject: subject::path,
    provider: Provider::Host,
    limits: limits(300, 8),
};

const NOT_ATTACHED: (&str, &str) =
    ("FileNotAttached", "when no such file is attached; the message lists the attached files.");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    file: String,
    path: String,
}

#[derive(Serialize)]
pub(super) struct SaveResult {
    path: String,
    bytes: u64,
    status: &'static str,
}

/// The files attached to the conversation of one task. The default is none.
#[derive(Clone, Debug, Default)]
pub struct Attachments {
    /// Storage of their content, and the owner.
    source: Option<(files::Store, OrganizationId)>,
    list: Arc<[AttachedFile]>,
}

/// The chunks of a file's content.
type Chunks = BoxStream<'static, Result<Bytes, files::Error>>;

/// Expected hash and size of a file's content.
pub(super) struct Content {
    sha256: Sha256,
    size: u64,
}

impl Attachments {
    /// The attached files of a command.
    #[must_use]
    pub fn new(store: files::Store, organization: OrganizationId, list: &[AttachedFile]) -> Self {
        Self { source: Some((store, organization)), list: list.into() }
    }

    /// Begins to read the requested file, unless it has more than `most` bytes.
    pub(super) async fn read(
        &self,
        Arguments { file: wanted, .. }: &Arguments,
        most: u64,
    ) -> Result<(Chunks, Content), ToolError> {
        let is_requested = |file: &&AttachedFile| {
            file.id == *wanted || wanted.strip_prefix("sha256:") == Some(file.sha256.as_str())
        };
        let found = self
            .list
            .iter()
            .find(is_requested)
            .and_then(|file| Some((file, file.sha256.parse::<Sha256>().ok()?)));
        let (Some((store, organization)), Some((file, sha256))) = (&self.source, found) else {
            return Err(self.not_attached(wanted));
        };
        let size = u64::try_from(file.size).unwrap_or_default();
        if size > most {
            let message = format!(
                "{} has {size} bytes; the limit for files of the workspace is {most}. Nothing was saved; continue without it.",
                file.id
            );
            let details = json!({"file": file.id, "bytes": size, "most": most});
            return Err(ToolError::new("FileTooLarge", message).with(details));
        }
        let chunks = store
            .read(*organization, &sha256, None)
            .await
            .map_err(|error| unavailable(wanted, &error))?;
        Ok((chunks.boxed(), Content { sha256, size }))
    }

    fn not_attached(&self, wanted: &str) -> ToolError {
        let named =
            |file: &AttachedFile| format!("{} ({:?}, {} bytes)", file.id, file.name, file.size);
        let mut names: Vec<String> = self.list.iter().take(MAX_LISTED).map(named).collect();
        if self.list.len() > MAX_LISTED {
            names.push(format!("and {} older ones", self.list.len() - MAX_LISTED));
        }
        let list = match names.is_empty() {
            true => "No file is attached. Files of the workspace can be read directly.".to_owned(),
            false => format!("The attached files are: {}.", names.join(", ")),
        };
        let ids: Vec<&str> =
            self.list.iter().take(MAX_LISTED).map(|file| file.id.as_str()).collect();
        ToolError::new(
            NOT_ATTACHED.0,
            format!("No file {wanted:?} is attached to this conversation. {list}"),
        )
        .with(json!({"file": wanted, "files": ids}))
    }
}

/// Forwards chunks to the writing thread, with backpressure.
pub(super) async fn forward(mut chunks: Chunks, to: mpsc::Sender<Result<Bytes, files::Error>>) {
    while let Some(chunk) = chunks.next().await {
        if to.send(chunk).await.is_err() {
            return;
        }
    }
}

/// The reason why nothing was saved.
enum SaveError {
    Path(PathError),
    Tool(ToolError),
}

impl From<PathError> for SaveError {
    fn from(error: PathError) -> Self {
        Self::Path(error)
    }
}

/// Writes the received chunks, on a thread that may block.
pub(super) fn write(
    workspace: &Workspace,
    Arguments { file, path }: &Arguments,
    content: &Content,
    mut chunks: mpsc::Receiver<Result<Bytes, files::Error>>,
    stop: &Stop,
) -> Result<SaveResult, ToolError> {
    let located = workspace.locate(path).map_err(|error| path_error(workspace, &error))?;
    let filling = |target: &mut File| {
        fill(target, &located, file, content, &mut chunks, stop).map_err(SaveError::Tool)
    };
    let written = workspace.replace_with(&located, filling).map_err(|failed| match failed {
        SaveError::Path(error) => path_error(workspace, &error),
        SaveError::Tool(error) => error,
    })?;
    let status = match written {
        WriteOutcome::Created => "created",
        WriteOutcome::Overwritten => "overwritten",
    };
    Ok(SaveResult { path: located.display(), bytes: content.size, status })
}

fn fill(
    target: &mut File,
    path: &RelativePath,
    file: &str,
    content: &Content,
    chunks: &mut mpsc::Receiver<Result<Bytes, files::Error>>,
    stop: &Stop,
) -> Result<(), ToolError> {
    let mut hasher = sha2::Sha256::new();
    let mut size = 0;
    while let Some(chunk) = chunks.blocking_recv() {
        stop.check().map_err(|stopped| stopped.into_error(DEFINITION.name))?;
        let chunk = chunk.map_err(|error| unavailable(file, &error))?;
        size += chunk.len() as u64;
        if size > content.size {
            break;
        }
        hasher.update(&chunk);
        target.write_all(&chunk).map_err(|error| io_error(path, &error))?;
    }
    // This also fails if the caller gave up, and no more chunks came.
    if size != content.size || Sha256::from_bytes(hasher.finalize().into()) != content.sha256 {
        return Err(unavailable(file, &files::Error::Corrupt));
    }
    Ok(())
}

fn unavailable(file: &str, error: &files::Error) -> ToolError {
    let message = match error {
        files::Error::Missing => {
            format!("{file} was deleted after it was attached. Continue without it, or ask for it.")
        }
        files::Error::Corrupt | files::Error::TooLarge(_) => {
            format!(
                "the stored content of {file} is damaged, and it was not saved. Tell the user, and continue without it."
            )
        }
        files::Error::Folder(_) | files::Error::Storage(_) | files::Error::Interrupted(_) => {
            tracing::warn!(
                error = error as &dyn std::error::Error,
                "failed to read an attached file"
            );
            format!("{file} cannot be read at the moment, and was not saved. Try again later.")
        }
    };
    ToolError::new("FileUnavailable", message).with(json!({"file": file}))
}

//! `save_file`: puts a file that a person attached to the conversation into the workspace.
//!
//! A command says which files those are; no other can be named, also not by its hash. The content
//! comes in pieces from where all services have it, and takes its place only when all of it is
//! there and is what its name says.

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
use crate::workspace::{PathError, RelativePath, Workspace, Written};

/// How many files an error names at most.
const NAMED: usize = 20;

pub(super) const DEFINITION: Definition = Definition {
    name: "save_file",
    aliases: &[],
    summary: "Saves a file that people attached to (uploaded into) this conversation as a file of the workspace.",
    description: "What is there is replaced, missing directories are made.",
    parameters: &[
        required(
            "file",
            Kind::Text { min_bytes: 1, max_bytes: 128 },
            "The file's id, or its hash as \"sha256:…\".",
        ),
        required("path", Kind::File, "Where to, relative to the workspace."),
    ],
    output: Output::Object(&[
        field("path", Output::Text, "The file in the workspace, relative to that."),
        field("bytes", Output::Integer, "Its size."),
        field(
            "status",
            Output::OneOf(&["created", "overwritten"]),
            "Whether there was such a file before.",
        ),
    ]),
    like: None,
    example: "save_file(\"file_01890a5d-…\", \"data/report.csv\")",
    errors: &[
        NOT_ATTACHED,
        ("FileUnavailable", "when it was deleted, or cannot be read now."),
        ("FileTooLarge", "when it is larger than files of the workspace may be."),
        OUTSIDE,
        ("IsADirectory", "when the path is a directory."),
        ("NotADirectory", "when a part of the path is a file."),
    ],
    effect: Effect::Write,
    permission: Permission::FilesWrite,
    subject: subject::path,
    provider: Provider::Host,
    limits: limits(300, 8),
};

const NOT_ATTACHED: (&str, &str) =
    ("FileNotAttached", "when there is no such file; the message names those that there are.");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    file: String,
    path: String,
}

#[derive(Serialize)]
pub(super) struct Saved {
    path: String,
    bytes: u64,
    status: &'static str,
}

/// What people attached to the conversation of one task. The default is nothing.
#[derive(Clone, Debug, Default)]
pub struct Attachments {
    /// Where their content is, and whose it is.
    place: Option<(files::Store, OrganizationId)>,
    list: Arc<[AttachedFile]>,
}

/// A content as it comes.
type Pieces = BoxStream<'static, Result<Bytes, files::Error>>;

/// What a content must be.
pub(super) struct Content {
    sha256: Sha256,
    size: u64,
}

impl Attachments {
    /// Those of a command.
    #[must_use]
    pub fn new(store: files::Store, organization: OrganizationId, list: &[AttachedFile]) -> Self {
        Self { place: Some((store, organization)), list: list.into() }
    }

    /// Begins to read the file that is meant, unless it has more than `most` bytes.
    pub(super) async fn read(
        &self,
        Arguments { file: wanted, .. }: &Arguments,
        most: u64,
    ) -> Result<(Pieces, Content), ToolError> {
        let is_meant = |file: &&AttachedFile| {
            file.id == *wanted || wanted.strip_prefix("sha256:") == Some(file.sha256.as_str())
        };
        let found = self
            .list
            .iter()
            .find(is_meant)
            .and_then(|file| Some((file, file.sha256.parse::<Sha256>().ok()?)));
        let (Some((store, organization)), Some((file, sha256))) = (&self.place, found) else {
            return Err(self.not_attached(wanted));
        };
        let size = u64::try_from(file.size).unwrap_or_default();
        if size > most {
            let message = format!(
                "{} has {size} bytes, and a file of the workspace may have {most}. Nothing was saved; go on without it.",
                file.id
            );
            let details = json!({"file": file.id, "bytes": size, "most": most});
            return Err(ToolError::new("FileTooLarge", message).with(details));
        }
        let pieces = store
            .read(*organization, &sha256, None)
            .await
            .map_err(|error| unavailable(wanted, &error))?;
        Ok((pieces.boxed(), Content { sha256, size }))
    }

    fn not_attached(&self, wanted: &str) -> ToolError {
        let named =
            |file: &AttachedFile| format!("{} ({:?}, {} bytes)", file.id, file.name, file.size);
        let mut names: Vec<String> = self.list.iter().take(NAMED).map(named).collect();
        if self.list.len() > NAMED {
            names.push(format!("and {} older ones", self.list.len() - NAMED));
        }
        let there_are = match names.is_empty() {
            true => "No file is attached; files of the workspace are read without this.".to_owned(),
            false => format!("There are: {}.", names.join(", ")),
        };
        let ids: Vec<&str> = self.list.iter().take(NAMED).map(|file| file.id.as_str()).collect();
        ToolError::new(
            NOT_ATTACHED.0,
            format!("No file {wanted:?} is attached to this conversation. {there_are}"),
        )
        .with(json!({"file": wanted, "files": ids}))
    }
}

/// Passes pieces on to whoever writes them, as fast as that goes.
pub(super) async fn pass(mut pieces: Pieces, to: mpsc::Sender<Result<Bytes, files::Error>>) {
    while let Some(piece) = pieces.next().await {
        if to.send(piece).await.is_err() {
            return;
        }
    }
}

/// Why nothing was saved.
enum Failed {
    Path(PathError),
    Tool(ToolError),
}

impl From<PathError> for Failed {
    fn from(error: PathError) -> Self {
        Self::Path(error)
    }
}

/// Writes the pieces that come, on a thread that may block.
pub(super) fn write(
    workspace: &Workspace,
    Arguments { file, path }: &Arguments,
    content: &Content,
    mut pieces: mpsc::Receiver<Result<Bytes, files::Error>>,
    stop: &Stop,
) -> Result<Saved, ToolError> {
    let located = workspace.locate(path).map_err(|error| path_error(workspace, &error))?;
    let filling = |target: &mut File| {
        fill(target, &located, file, content, &mut pieces, stop).map_err(Failed::Tool)
    };
    let written = workspace.replace_with(&located, filling).map_err(|failed| match failed {
        Failed::Path(error) => path_error(workspace, &error),
        Failed::Tool(error) => error,
    })?;
    let status = match written {
        Written::Created => "created",
        Written::Overwritten => "overwritten",
    };
    Ok(Saved { path: located.shown(), bytes: content.size, status })
}

fn fill(
    target: &mut File,
    path: &RelativePath,
    file: &str,
    content: &Content,
    pieces: &mut mpsc::Receiver<Result<Bytes, files::Error>>,
    stop: &Stop,
) -> Result<(), ToolError> {
    let mut hasher = sha2::Sha256::new();
    let mut size = 0;
    while let Some(piece) = pieces.blocking_recv() {
        stop.check().map_err(|stopped| stopped.into_error(DEFINITION.name))?;
        let piece = piece.map_err(|error| unavailable(file, &error))?;
        size += piece.len() as u64;
        if size > content.size {
            break;
        }
        hasher.update(&piece);
        target.write_all(&piece).map_err(|error| io_error(path, &error))?;
    }
    // Also where whoever called does not wait any more, and no further piece came.
    if size != content.size || Sha256::from_bytes(hasher.finalize().into()) != content.sha256 {
        return Err(unavailable(file, &files::Error::Corrupt));
    }
    Ok(())
}

fn unavailable(file: &str, error: &files::Error) -> ToolError {
    let message = match error {
        files::Error::Missing => {
            format!("{file} was deleted after it was attached. Go on without it, or ask for it.")
        }
        files::Error::Corrupt | files::Error::TooLarge(_) => {
            format!(
                "{file} is damaged where it is kept, and was not saved. Say so, and go on without it."
            )
        }
        files::Error::Folder(_) | files::Error::Storage(_) | files::Error::Interrupted(_) => {
            tracing::warn!(
                error = error as &dyn std::error::Error,
                "an attached file cannot be read"
            );
            format!("{file} cannot be read at the moment, and was not saved. Try it again later.")
        }
    };
    ToolError::new("FileUnavailable", message).with(json!({"file": file}))
}

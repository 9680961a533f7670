//! `construct file`: uploaded files, for messages and scripts.

pub(crate) mod upload;

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use clap::{Args, Subcommand};
use construct_proto::v1::{
    DeleteFileRequest, DownloadFileRequest, File, FileState, GetFileRequest, ListFilesRequest,
    UpdateFileRequest, list_files_request::Filter,
};
use jiff::Timestamp;

use super::{ChangeArgs, WriteArgs, age, id, metadata_details};
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    output::{Entity, OutputArgs},
    page::ListArgs,
    text::{printable, thousands},
    time,
};

#[derive(Debug, Subcommand)]
pub(crate) enum FileCommand {
    /// Upload a file. Running the command again resumes an interrupted upload.
    Upload(upload::Upload),
    /// Download a file.
    Download(Download),
    /// List files.
    List(List),
    /// Show the metadata of a file.
    Get {
        /// The id of the file.
        file: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Rename a file.
    Update(Update),
    /// Delete a file, or cancel its upload.
    Delete {
        /// The id of the file.
        file: String,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Download {
    /// The id of the file.
    file: String,
    /// The destination; `-` is standard output. Default: its name in the current directory.
    destination: Option<PathBuf>,
    /// Replace an existing file.
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only files with this name.
    #[arg(long, default_value = "", hide_default_value = true)]
    name: String,
    /// Only files of this type, e.g. `application/pdf` or `image/*`.
    #[arg(long, value_name = "TYPE", default_value = "", hide_default_value = true)]
    media_type: String,
    /// Only files with this SHA-256.
    #[arg(long, value_name = "HASH", default_value = "", hide_default_value = true)]
    sha256: String,
    /// Only files in this state.
    #[arg(long, value_enum)]
    state: Option<State>,
    #[command(flatten)]
    list: ListArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// The state of a file.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum State {
    Uploading,
    Checking,
    Ready,
    Refused,
}

#[derive(Debug, Args)]
pub(crate) struct Update {
    /// The id of the file.
    file: String,
    /// The new name.
    #[arg(long)]
    name: Option<String>,
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl FileCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Upload(args) => args.run(gateway).await,
            Self::Download(args) => args.run(gateway).await,
            Self::List(args) => args.run(gateway).await,
            Self::Get { file, output } => output.entity(&get(gateway, &file).await?),
            Self::Update(args) => {
                let request = UpdateFileRequest {
                    file: args.file,
                    name: args.name,
                    revision: args.change.revision,
                    idempotency_key: args.change.write.key(),
                };
                args.output.entity(&call(gateway.files().update_file(request)).await?)
            }
            Self::Delete { file, write, output } => {
                let request =
                    DeleteFileRequest { file: file.clone(), idempotency_key: write.key() };
                call(gateway.files().delete_file(request)).await?;
                output.deleted("file", &file)
            }
        }
    }
}

async fn get(gateway: &Gateway, file: &str) -> Result<File, Failure> {
    call(gateway.files().get_file(GetFileRequest { file: file.to_owned() })).await
}

impl List {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let state = match self.state {
            None => FileState::Unspecified,
            Some(State::Uploading) => FileState::Uploading,
            Some(State::Checking) => FileState::Checking,
            Some(State::Ready) => FileState::Ready,
            Some(State::Refused) => FileState::Refused,
        };
        let filter = Filter {
            name: self.name,
            media_type: self.media_type,
            sha256: self.sha256,
            state: state.into(),
        };
        let listed = self
            .list
            .collect(|page| {
                let request = ListFilesRequest { page: Some(page), filter: Some(filter.clone()) };
                async move {
                    let response = call(gateway.files().list_files(request)).await?;
                    Ok((response.files, response.page))
                }
            })
            .await?;
        self.output.list(&listed)
    }
}

impl Download {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        if self.destination.as_deref() == Some(Path::new("-")) {
            return self.copy(gateway, &mut io::stdout().lock()).await.map(drop);
        }
        let file = get(gateway, &self.file).await?;
        let spec = file.spec.unwrap_or_default();
        // The uploader chose the name; the gateway refuses names with a directory.
        let destination = self.destination.clone().unwrap_or_else(|| PathBuf::from(&spec.name));
        if destination.exists() && !self.force {
            return Err(Failure::usage(format!(
                "{} already exists; --force replaces it",
                destination.display()
            )));
        }
        // Renamed when the download is complete.
        let part = PathBuf::from(format!("{}.part", destination.display()));
        let failed = |error: io::Error| Failure::failed(format!("{}: {error}", part.display()));
        let mut new = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&part)
            .map_err(failed)?;
        let copied = self.copy(gateway, &mut new).await;
        let written = match copied {
            Ok(bytes) if bytes == spec.size => {
                fs::rename(&part, &destination).map_err(failed).map(|()| bytes)
            }
            Ok(bytes) => Err(Failure::failed(format!(
                "received only {} of {} bytes",
                thousands(bytes),
                thousands(spec.size)
            ))),
            Err(failure) => Err(failure),
        };
        if written.is_err() {
            // A remaining partial file is recognizable by its name.
            _ = fs::remove_file(&part);
        }
        eprintln!(
            "{}: {} bytes",
            printable(&destination.display().to_string()),
            thousands(written?)
        );
        Ok(())
    }

    async fn copy(&self, gateway: &Gateway, writer: &mut impl Write) -> Result<i64, Failure> {
        let request = DownloadFileRequest { file: self.file.clone(), offset: 0, length: 0 };
        let mut chunks = gateway.files().download_file(request).await?.into_inner();
        let mut bytes = 0;
        while let Some(chunk) = chunks.message().await? {
            writer.write_all(&chunk.data).map_err(|error| {
                Failure::failed(format!("the destination cannot be written: {error}"))
            })?;
            bytes += i64::try_from(chunk.data.len()).unwrap_or(i64::MAX);
        }
        writer.flush().map_err(|error| {
            Failure::failed(format!("the destination cannot be written: {error}"))
        })?;
        Ok(bytes)
    }
}

/// The state of a file for people.
fn describe_state(file: &File) -> String {
    let (spec, status) =
        (file.spec.clone().unwrap_or_default(), file.status.clone().unwrap_or_default());
    match status.state() {
        FileState::Uploading => {
            format!("{}% uploaded", status.received.saturating_mul(100) / spec.size.max(1))
        }
        FileState::Checking => "checking".to_owned(),
        FileState::Ready => "ready".to_owned(),
        FileState::Refused => format!("refused: {}", status.reason),
        FileState::Unspecified => String::new(),
    }
}

impl Entity for File {
    const NAME: &'static str = "construct.v1.File";
    const PLURAL: &'static str = "files";
    const COLUMNS: &'static [&'static str] = &["ID", "NAME", "TYPE", "BYTES", "STATE", "AGE"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let spec = self.spec.clone().unwrap_or_default();
        vec![
            id(self.metadata.as_ref()),
            spec.name,
            spec.media_type,
            thousands(spec.size),
            describe_state(self),
            age(self.metadata.as_ref(), now),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let (spec, status) =
            (self.spec.clone().unwrap_or_default(), self.status.clone().unwrap_or_default());
        let at = |at| format!("{} ({})", time::local(at), time::relative(at, now));
        let sha256 = if status.sha256.is_empty() { spec.sha256 } else { status.sha256.clone() };
        let mut details = vec![
            ("name", spec.name),
            ("id", id(self.metadata.as_ref())),
            ("type", spec.media_type),
            ("bytes", thousands(spec.size)),
            ("sha256", sha256),
            ("state", describe_state(self)),
            ("created by", status.created_by),
            ("expires", time::read(status.expires_at.as_ref()).map(at).unwrap_or_default()),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details
    }
}

//! Files: what people upload, for messages and for scripts.

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
    time,
    words::{printable, thousands},
};

#[derive(Debug, Subcommand)]
pub(crate) enum FileCommand {
    /// Upload one. An upload that was cut goes on where it was, when the same command is given
    /// again.
    Upload(upload::Upload),
    /// Write what one says to a file, or to standard output.
    Download(Download),
    /// List them.
    List(List),
    /// Show what is known of one.
    Get {
        /// Its id.
        file: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Give one another name.
    Update(Update),
    /// Delete one, or end its upload.
    Delete {
        /// Its id.
        file: String,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Download {
    /// Its id.
    file: String,
    /// Where to; `-` is standard output. Without it: its own name, in the present folder.
    to: Option<PathBuf>,
    /// Replace what is there.
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only those with this name.
    #[arg(long, default_value = "", hide_default_value = true)]
    name: String,
    /// Only those of this type, as `application/pdf` or `image/*`.
    #[arg(long, value_name = "TYPE", default_value = "", hide_default_value = true)]
    media_type: String,
    /// Only those with this SHA-256.
    #[arg(long, value_name = "HASH", default_value = "", hide_default_value = true)]
    sha256: String,
    /// Only those in this state.
    #[arg(long, value_enum)]
    state: Option<State>,
    #[command(flatten)]
    list: ListArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// What becomes of a file.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum State {
    Uploading,
    Checking,
    Ready,
    Refused,
}

#[derive(Debug, Args)]
pub(crate) struct Update {
    /// Its id.
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
    /// What the gateway fails with.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Upload(args) => args.run(gateway).await,
            Self::Download(args) => args.run(gateway).await,
            Self::List(args) => args.run(gateway).await,
            Self::Get { file, output } => output.one(&get(gateway, &file).await?),
            Self::Update(args) => {
                let request = UpdateFileRequest {
                    file: args.file,
                    name: args.name,
                    revision: args.change.revision,
                    idempotency_key: args.change.write.key(),
                };
                args.output.one(&call(gateway.files().update_file(request)).await?)
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
        if self.to.as_deref() == Some(Path::new("-")) {
            return self.copy(gateway, &mut io::stdout().lock()).await.map(drop);
        }
        let file = get(gateway, &self.file).await?;
        let spec = file.spec.unwrap_or_default();
        // Whoever uploaded it chose the name; the gateway refuses those with a folder.
        let to = self.to.clone().unwrap_or_else(|| PathBuf::from(&spec.name));
        if to.exists() && !self.force {
            return Err(Failure::usage(format!(
                "{} is there already; --force replaces it",
                to.display()
            )));
        }
        // It has its name when all of it is there.
        let part = PathBuf::from(format!("{}.part", to.display()));
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
                fs::rename(&part, &to).map_err(failed).map(|()| bytes)
            }
            Ok(bytes) => Err(Failure::failed(format!(
                "{} of {} bytes came",
                thousands(bytes),
                thousands(spec.size)
            ))),
            Err(failure) => Err(failure),
        };
        if written.is_err() {
            // What stays is of no use, and says so by its name.
            _ = fs::remove_file(&part);
        }
        eprintln!("{}: {} bytes", printable(&to.display().to_string()), thousands(written?));
        Ok(())
    }

    async fn copy(&self, gateway: &Gateway, to: &mut impl Write) -> Result<i64, Failure> {
        let request = DownloadFileRequest { file: self.file.clone(), offset: 0, length: 0 };
        let mut pieces = gateway.files().download_file(request).await?.into_inner();
        let mut bytes = 0;
        while let Some(piece) = pieces.message().await? {
            to.write_all(&piece.data)
                .map_err(|error| Failure::failed(format!("it cannot be written: {error}")))?;
            bytes += i64::try_from(piece.data.len()).unwrap_or(i64::MAX);
        }
        to.flush().map_err(|error| Failure::failed(format!("it cannot be written: {error}")))?;
        Ok(bytes)
    }
}

/// What became of a file, in words.
fn state(file: &File) -> String {
    let (spec, status) =
        (file.spec.clone().unwrap_or_default(), file.status.clone().unwrap_or_default());
    match status.state() {
        FileState::Uploading => {
            format!("{}% uploaded", status.received.saturating_mul(100) / spec.size.max(1))
        }
        FileState::Checking => "looked at".to_owned(),
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
            state(self),
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
            ("state", state(self)),
            ("by", status.created_by),
            ("removed", time::read(status.expires_at.as_ref()).map(at).unwrap_or_default()),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details
    }
}

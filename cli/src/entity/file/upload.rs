//! Uploads a file in parts, and resumes an interrupted upload.

use std::{
    fs,
    io::{Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use construct_bus::files::Sha256;
use construct_proto::v1::{
    CreateFileRequest, File, FileSpec, FileState, GetFileRequest, ListFilesRequest, PageRequest,
    UploadPartRequest, list_files_request::Filter,
};
use tonic::Code;

use super::id;
use crate::{
    entity::WriteArgs,
    failure::Failure,
    gateway::{Gateway, call, call_with_retry, retry},
    output::OutputArgs,
};

/// The bytes of a part.
const PART_BYTES: usize = 1024 * 1024;
/// How long to retry a request when the gateway is away.
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);
/// The time between requests for a file that is being checked.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Debug, Args)]
pub(crate) struct Upload {
    /// The path of the file.
    path: PathBuf,
    /// The name of the uploaded file. Default: its own name.
    #[arg(long)]
    name: Option<String>,
    /// The media type, e.g. `application/pdf`. Default: detected from the content.
    #[arg(long, value_name = "TYPE", default_value = "", hide_default_value = true)]
    media_type: String,
    /// Do not resume an interrupted upload of the same file.
    #[arg(long)]
    new: bool,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Upload {
    pub(super) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let name = self.name.unwrap_or_else(|| file_name(&self.path));
        let source =
            FileUpload { path: &self.path, name, media_type: self.media_type, new: self.new };
        self.output.entity(&upload(gateway, source, self.write.key()).await?)
    }
}

/// A file to upload.
pub(crate) struct FileUpload<'a> {
    pub(crate) path: &'a Path,
    pub(crate) name: String,
    /// Empty: detected from the content.
    pub(crate) media_type: String,
    /// Do not resume an interrupted upload of the same file.
    pub(crate) new: bool,
}

/// The file name of a path.
pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Uploads a file, and waits until the gateway has checked it.
///
/// # Errors
/// When the file cannot be read, or the gateway refuses it or stays away.
pub(crate) async fn upload(
    gateway: &Gateway,
    source: FileUpload<'_>,
    idempotency_key: String,
) -> Result<File, Failure> {
    let FileUpload { path, name, media_type, new } = source;
    let failed = |error: std::io::Error| Failure::usage(format!("{}: {error}", path.display()));
    let mut reader = fs::File::open(path).map_err(failed)?;
    let (sha256, size) = Sha256::read(&mut reader).map_err(failed)?;
    let size = i64::try_from(size).unwrap_or(i64::MAX);
    let spec = FileSpec { name, media_type, size, sha256: sha256.to_string() };
    let unfinished = if new { None } else { find_unfinished(gateway, &spec).await? };
    let mut file = match unfinished {
        Some(file) => file,
        None => {
            let request = CreateFileRequest { spec: Some(spec), idempotency_key };
            call(gateway.files().create_file(request)).await?
        }
    };
    while state(&file) == FileState::Uploading {
        let offset = received(&file);
        reader.seek(SeekFrom::Start(offset.unsigned_abs())).map_err(failed)?;
        let mut data = Vec::with_capacity(PART_BYTES);
        (&reader).take(PART_BYTES as u64).read_to_end(&mut data).map_err(failed)?;
        if data.is_empty() {
            return Err(Failure::failed(format!(
                "{} was truncated during the upload",
                path.display()
            )));
        }
        file = send_part(gateway, file, offset, data).await?;
    }
    while state(&file) == FileState::Checking {
        tokio::time::sleep(POLL_INTERVAL).await;
        file = get(gateway, &id(file.metadata.as_ref())).await?;
    }
    if state(&file) == FileState::Refused {
        let reason = file.status.unwrap_or_default().reason;
        return Err(Failure::failed(format!("{} was refused: {reason}", path.display())));
    }
    Ok(file)
}

/// Finds the interrupted upload of the same file with the most received bytes.
async fn find_unfinished(gateway: &Gateway, spec: &FileSpec) -> Result<Option<File>, Failure> {
    let filter = Filter {
        name: spec.name.clone(),
        sha256: spec.sha256.clone(),
        state: FileState::Uploading.into(),
        ..Filter::default()
    };
    let page = PageRequest { page_size: 100, ..PageRequest::default() };
    let request = ListFilesRequest { page: Some(page), filter: Some(filter) };
    let files = call(gateway.files().list_files(request)).await?.files.into_iter();
    let same = |file: &File| {
        let other = file.spec.clone().unwrap_or_default();
        other.size == spec.size && other.media_type == spec.media_type
    };
    Ok(files.filter(same).max_by_key(received))
}

/// Sends a part with retries. Returns the file afterwards.
async fn send_part(
    gateway: &Gateway,
    file: File,
    offset: i64,
    data: Vec<u8>,
) -> Result<File, Failure> {
    let file = id(file.metadata.as_ref());
    let send = || async {
        let request = UploadPartRequest { file: file.clone(), offset, data: data.clone() };
        match gateway.files().upload_part(request).await {
            // Another client uploads the same file and is ahead, or the response to an earlier
            // attempt was lost.
            Err(status) if matches!(status.code(), Code::Aborted | Code::FailedPrecondition) => {
                Ok(Err(status))
            }
            result => result.map(|response| Ok(response.into_inner())),
        }
    };
    match retry(RETRY_TIMEOUT, send).await? {
        Ok(file) => Ok(file),
        Err(status) => match get(gateway, &file).await? {
            file if status.code() == Code::FailedPrecondition
                && state(&file) == FileState::Uploading =>
            {
                Err(status.into())
            }
            file => Ok(file),
        },
    }
}

/// Gets the current file.
async fn get(gateway: &Gateway, file: &str) -> Result<File, Failure> {
    call_with_retry(RETRY_TIMEOUT, || async {
        gateway.files().get_file(GetFileRequest { file: file.to_owned() }).await
    })
    .await
}

fn state(file: &File) -> FileState {
    file.status.as_ref().map_or(FileState::Unspecified, |status| status.state())
}

fn received(file: &File) -> i64 {
    file.status.as_ref().map_or(0, |status| status.received)
}

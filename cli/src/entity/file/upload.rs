//! An upload, part by part, that goes on where it was cut.

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
    gateway::{Gateway, call, patiently, persistently},
    output::OutputArgs,
};

/// Bytes that are sent at once.
const PART: usize = 1024 * 1024;
/// How long the gateway may be away between two answers.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at a file that is being checked.
const PAUSE: Duration = Duration::from_millis(500);

#[derive(Debug, Args)]
pub(crate) struct Upload {
    /// The file.
    path: PathBuf,
    /// What it will be called; the name it has, unless given.
    #[arg(long)]
    name: Option<String>,
    /// What it is, as `application/pdf`; told from its content unless given.
    #[arg(long, value_name = "TYPE", default_value = "", hide_default_value = true)]
    media_type: String,
    /// Begin anew, though there is an unfinished upload of the same.
    #[arg(long)]
    new: bool,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Upload {
    pub(super) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let name = self.name.unwrap_or_else(|| name(&self.path));
        let wanted = Wanted { path: &self.path, name, media_type: self.media_type, new: self.new };
        self.output.one(&upload(gateway, wanted, self.write.key()).await?)
    }
}

/// A file to upload.
pub(crate) struct Wanted<'a> {
    pub(crate) path: &'a Path,
    pub(crate) name: String,
    /// Empty: it is told from the content.
    pub(crate) media_type: String,
    /// Begin anew, though there is an unfinished upload of the same.
    pub(crate) new: bool,
}

/// What a file is called where it lies.
pub(crate) fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Uploads a file, and waits until it has been looked at.
///
/// # Errors
/// When it cannot be read, the gateway does not take it, or stays away.
pub(crate) async fn upload(
    gateway: &Gateway,
    wanted: Wanted<'_>,
    idempotency_key: String,
) -> Result<File, Failure> {
    let Wanted { path, name, media_type, new } = wanted;
    let failed = |error: std::io::Error| Failure::usage(format!("{}: {error}", path.display()));
    let mut source = fs::File::open(path).map_err(failed)?;
    let (sha256, size) = Sha256::read(&mut source).map_err(failed)?;
    let size = i64::try_from(size).unwrap_or(i64::MAX);
    let spec = FileSpec { name, media_type, size, sha256: sha256.to_string() };
    let begun = if new { None } else { unfinished(gateway, &spec).await? };
    let mut file = match begun {
        Some(begun) => begun,
        None => {
            let request = CreateFileRequest { spec: Some(spec), idempotency_key };
            call(gateway.files().create_file(request)).await?
        }
    };
    while state(&file) == FileState::Uploading {
        let offset = received(&file);
        source.seek(SeekFrom::Start(offset.unsigned_abs())).map_err(failed)?;
        let mut data = Vec::with_capacity(PART);
        (&source).take(PART as u64).read_to_end(&mut data).map_err(failed)?;
        if data.is_empty() {
            return Err(Failure::failed(format!("{} has become shorter", path.display())));
        }
        file = send(gateway, file, offset, data).await?;
    }
    while state(&file) == FileState::Checking {
        tokio::time::sleep(PAUSE).await;
        file = look(gateway, &id(file.metadata.as_ref())).await?;
    }
    if state(&file) == FileState::Refused {
        let reason = file.status.unwrap_or_default().reason;
        return Err(Failure::failed(format!("{} was refused: {reason}", path.display())));
    }
    Ok(file)
}

/// An upload of the same that was cut, the one that is farthest.
async fn unfinished(gateway: &Gateway, spec: &FileSpec) -> Result<Option<File>, Failure> {
    let filter = Filter {
        name: spec.name.clone(),
        sha256: spec.sha256.clone(),
        state: FileState::Uploading.into(),
        ..Filter::default()
    };
    let page = PageRequest { page_size: 100, ..PageRequest::default() };
    let request = ListFilesRequest { page: Some(page), filter: Some(filter) };
    let found = call(gateway.files().list_files(request)).await?.files.into_iter();
    let same = |file: &File| {
        let known = file.spec.clone().unwrap_or_default();
        known.size == spec.size && known.media_type == spec.media_type
    };
    Ok(found.filter(same).max_by_key(received))
}

/// Sends a part until it is known what became of it.
async fn send(gateway: &Gateway, file: File, offset: i64, data: Vec<u8>) -> Result<File, Failure> {
    let file = id(file.metadata.as_ref());
    let send = || async {
        let request = UploadPartRequest { file: file.clone(), offset, data: data.clone() };
        match gateway.files().upload_part(request).await {
            // Somebody else uploads it as well, and is farther; or the answer to this part was
            // lost, perhaps to the last.
            Err(status) if matches!(status.code(), Code::Aborted | Code::FailedPrecondition) => {
                Ok(Err(status))
            }
            sent => sent.map(|sent| Ok(sent.into_inner())),
        }
    };
    match persistently(PATIENCE, send).await? {
        Ok(file) => Ok(file),
        Err(status) => match look(gateway, &file).await? {
            file if status.code() == Code::FailedPrecondition
                && state(&file) == FileState::Uploading =>
            {
                Err(status.into())
            }
            file => Ok(file),
        },
    }
}

/// What there is of a file by now.
async fn look(gateway: &Gateway, file: &str) -> Result<File, Failure> {
    patiently(PATIENCE, || async {
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

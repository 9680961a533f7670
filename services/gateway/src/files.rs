//! `FileService`: files that people upload. Rows have the metadata, the folder of blobs has the
//! content (docs/adr/0038-files.md).

mod check;
pub(crate) mod work;

use construct_bus::files::{Error as FolderError, PartName, Sha256};
use construct_domain::FileId;
use construct_proto::v1::{
    self, CreateFileRequest, DeleteFileRequest, DeleteFileResponse, DownloadFileRequest,
    DownloadFileResponse, GetFileRequest, ListFilesRequest, ListFilesResponse, UpdateFileRequest,
    UploadPartRequest, file_service_server::FileService,
};
use construct_store::{Error, File, FileState, NewFile, NewPart, PartOutcome};
use futures::{StreamExt as _, TryStreamExt as _, stream::BoxStream};
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{
    api::{Api, CallerContext, ReferenceResolver, no_wake},
    convert,
    organizations::response_output,
    page::Column,
    quotas::QuotaRequest,
    status,
    validate::{self, requests},
};

#[tonic::async_trait]
impl FileService for Api {
    type DownloadFileStream = BoxStream<'static, Result<DownloadFileResponse, Status>>;

    async fn create_file(
        &self,
        request: Request<CreateFileRequest>,
    ) -> Result<Response<v1::File>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        let expected = requests::create_file(&request, context.backend.files.limits())?;
        let write = context.write("CreateFile", &mut request);
        let spec = request.spec.unwrap_or_default();
        self.check_quotas(&context, Some(&write), QuotaRequest::storage(spec.size)).await?;
        let is_stored = match &expected {
            Some(expected) => is_stored(&context, expected, spec.size).await?,
            None => false,
        };
        let new = NewFile {
            id: FileId::from_uuid(Uuid::now_v7()),
            name: spec.name,
            media_type: spec.media_type,
            size: spec.size,
            expected_sha256: expected.map(|expected| *expected.as_bytes()),
            created_by: context.name(),
            is_stored,
        };
        let id = new.id;
        let created =
            context.store().file_create(&write, new, |file| response_output(&to_proto(file))).await;
        let created = created.map_err(status::from_store)?;
        let answer = context.answer(created, no_wake, to_proto).await?;
        // An empty file has all its parts.
        if answer.get_ref().metadata.as_ref().is_some_and(|metadata| metadata.id == id.to_string())
            && answer
                .get_ref()
                .status
                .as_ref()
                .is_some_and(|it| it.state() == v1::FileState::Checking)
        {
            context.backend.files.finish_soon(self.lifecycle(), id).await;
            let file = context
                .store()
                .file_get(context.organization(), id)
                .await
                .map_err(status::from_store)?;
            return Ok(Response::new(to_proto(&file)));
        }
        Ok(answer)
    }

    async fn upload_part(
        &self,
        request: Request<UploadPartRequest>,
    ) -> Result<Response<v1::File>, Status> {
        let (context, request) = self.begin_request(request)?;
        let id = validate::id(&request.file)?;
        let about = |error| status::for_reference(&request.file, error);
        let file = context.store().file_get(context.organization(), id).await.map_err(about)?;
        let size = i64::try_from(request.data.len()).unwrap_or(i64::MAX);
        let end = request.offset.saturating_add(size);
        if file.state == FileState::Ready
            && end == file.size
            && is_end(&context, &file, &request).await?
        {
            return Ok(Response::new(to_proto(&file)));
        }
        if let Some(refusal) = refusal(&file, request.offset, end) {
            return Err(refusal);
        }
        let folder = context.backend.files.folder();
        let sha256 = *Sha256::digest(&request.data).as_bytes();
        let put = folder.put_part(context.organization(), id, request.data.into()).await;
        let name = put.map_err(|error| folder_error(&error))?;
        let part = NewPart { position: request.offset, size, part: name.uuid(), sha256 };
        let added = context
            .store()
            .file_part_add(&context.plain_write(), id, part, |file| {
                response_output(&to_proto(file))
            })
            .await;
        let file = match added {
            Ok(PartOutcome::Accepted(file)) => file,
            Ok(PartOutcome::Duplicate(file)) => {
                remove_unreferenced_part(&context, id, name).await;
                file
            }
            Err(error) => {
                // A part that may have been accepted stays.
                if !matches!(error, Error::Unavailable(_) | Error::Internal(_)) {
                    remove_unreferenced_part(&context, id, name).await;
                }
                return Err(about(error));
            }
        };
        if file.state != FileState::Checking {
            return Ok(Response::new(to_proto(&file)));
        }
        context.backend.files.finish_soon(self.lifecycle(), id).await;
        let file = context.store().file_get(context.organization(), id).await.map_err(about)?;
        Ok(Response::new(to_proto(&file)))
    }

    async fn get_file(
        &self,
        request: Request<GetFileRequest>,
    ) -> Result<Response<v1::File>, Status> {
        let (context, request) = self.begin_request(request)?;
        let id = validate::id(&request.file)?;
        let found = context.store().file_get(context.organization(), id).await;
        found
            .map(|file| Response::new(to_proto(&file)))
            .map_err(|error| status::for_reference(&request.file, error))
    }

    async fn list_files(
        &self,
        request: Request<ListFilesRequest>,
    ) -> Result<Response<ListFilesResponse>, Status> {
        let (context, request, page) = self.begin_list_request(request, &Column::TIMES)?;
        let filter = requests::file_filter(request.filter.unwrap_or_default());
        let found = context.store().file_list(context.organization(), &filter, &page.query()).await;
        let found = found.map_err(status::from_store)?;
        let (files, info) = page.cut(&found, to_proto, |file| file.cursor(page.key()));
        Ok(Response::new(ListFilesResponse { files, page: Some(info) }))
    }

    async fn update_file(
        &self,
        request: Request<UpdateFileRequest>,
    ) -> Result<Response<v1::File>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let id = validate::id(&request.file)?;
        let write = context.write("UpdateFile", &mut request);
        let expected = (request.revision != 0).then_some(request.revision);
        let render = |file: &_| response_output(&to_proto(file));
        let updated = context
            .store()
            .file_update(&write, id, expected, request.name.as_deref(), render)
            .await;
        context
            .answer(
                updated.map_err(|error| status::for_reference(&request.file, error))?,
                no_wake,
                to_proto,
            )
            .await
    }

    async fn delete_file(
        &self,
        request: Request<DeleteFileRequest>,
    ) -> Result<Response<DeleteFileResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let id = validate::id(&request.file)?;
        let write = context.write("DeleteFile", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let found = context.store().file_get(context.organization(), id).await.map(|file| file.id);
        let id = resolver.resolve(&request.file, found, FileId::from_uuid)?;
        let deleted = resolver
            .finish(context.store().file_delete(&write, id, |_| response_output(&())).await)?;
        context.backend.files.remove_soon(self.lifecycle());
        context.answer(deleted, no_wake, |_| DeleteFileResponse {}).await
    }

    async fn download_file(
        &self,
        request: Request<DownloadFileRequest>,
    ) -> Result<Response<Self::DownloadFileStream>, Status> {
        let (context, request) = self.begin_request(request)?;
        let id = validate::id(&request.file)?;
        let found = context.store().file_get(context.organization(), id).await;
        let file = found.map_err(|error| status::for_reference(&request.file, error))?;
        let sha256 = ready_hash(&file)?;
        if request.offset > file.size {
            return Err(Status::out_of_range(format!("offset: the file has {} bytes", file.size)));
        }
        let begin = request.offset.unsigned_abs();
        let end = match request.length {
            0 => file.size.unsigned_abs(),
            length => begin.saturating_add(length.unsigned_abs()),
        };
        let permit = context.backend.files.acquire_download(context.organization())?;
        let pieces = context
            .backend
            .files
            .folder()
            .read(context.organization(), &sha256, Some(begin..end))
            .await;
        let pieces =
            pieces.map_err(|error| folder_error(&error))?.map_err(|error| folder_error(&error));
        let mut offset = request.offset;
        let answers = pieces.map_ok(move |data| {
            // Held until the last piece is sent.
            let _permit = &permit;
            let answer = DownloadFileResponse { offset, data: data.into() };
            offset = offset.saturating_add(i64::try_from(answer.data.len()).unwrap_or(i64::MAX));
            answer
        });
        Ok(Response::new(answers.boxed()))
    }
}

/// Returns the hash of a file that can be read.
fn ready_hash(file: &File) -> Result<Sha256, Status> {
    match (file.state, file.sha256) {
        (FileState::Ready, Some(sha256)) => Ok(Sha256::from_bytes(sha256)),
        (FileState::Refused, _) => Err(status::precondition(
            "REFUSED",
            "file",
            format!("the file was refused: {}", file.reason),
        )),
        _ => Err(status::precondition("NOT_READY", "file", "the file is not ready yet")),
    }
}

/// Why a part is refused before it is stored.
fn refusal(file: &File, offset: i64, end: i64) -> Option<Status> {
    match file.state {
        FileState::Uploading if offset == file.received && end > file.size => {
            Some(status::from_store(Error::TooLong { size: file.size }))
        }
        FileState::Uploading | FileState::Checking
            if offset == file.received || end == file.received =>
        {
            None
        }
        FileState::Uploading => {
            Some(status::from_store(Error::WrongOffset { offset: file.received }))
        }
        FileState::Refused => ready_hash(file).err(),
        FileState::Checking | FileState::Ready => Some(status::from_store(Error::NotUploading)),
    }
}

/// Whether a ready file ends with this part: a client without the response sends the last part
/// again.
async fn is_end(
    context: &CallerContext,
    file: &File,
    request: &UploadPartRequest,
) -> Result<bool, Status> {
    let (sha256, begin) = (ready_hash(file)?, request.offset.unsigned_abs());
    let range = begin..begin.saturating_add(request.data.len() as u64);
    let pieces =
        context.backend.files.folder().read(context.organization(), &sha256, Some(range)).await;
    let pieces = pieces.map_err(|error| folder_error(&error))?;
    let stored: Vec<_> = pieces.try_collect().await.map_err(|error| folder_error(&error))?;
    Ok(stored.concat() == request.data)
}

/// Whether the folder has the content. Missing or damaged content is uploaded again.
async fn is_stored(context: &CallerContext, sha256: &Sha256, size: i64) -> Result<bool, Status> {
    let known =
        context.store().file_content_exists(context.organization(), sha256.as_bytes(), size).await;
    if !known.map_err(status::from_store)? {
        return Ok(false);
    }
    let found = context.backend.files.folder().head(context.organization(), sha256).await;
    Ok(found.map_err(|error| folder_error(&error))? == Some(size.unsigned_abs()))
}

/// Removes a part that no row refers to. If that fails, it is removed with its upload.
async fn remove_unreferenced_part(context: &CallerContext, file: FileId, part: PartName) {
    if let Err(error) =
        context.backend.files.folder().remove_part(context.organization(), file, part).await
    {
        tracing::debug!(
            error = status::chain(&error),
            "an unreferenced part of a file could not be removed"
        );
    }
}

fn folder_error(error: &FolderError) -> Status {
    match error {
        FolderError::Missing | FolderError::Corrupt | FolderError::TooLarge(_) => {
            status::internal("the content of a file does not match its row", error)
        }
        error => {
            tracing::warn!(error = status::chain(error), "the folder of files is unavailable");
            status::unavailable("the folder of files is unavailable at the moment")
        }
    }
}

/// Converts a file for clients.
fn to_proto(file: &File) -> v1::File {
    let digits = |hash: Option<[u8; 32]>| {
        hash.map(|hash| Sha256::from_bytes(hash).to_string()).unwrap_or_default()
    };
    let state = match file.state {
        FileState::Uploading => v1::FileState::Uploading,
        FileState::Checking => v1::FileState::Checking,
        FileState::Ready => v1::FileState::Ready,
        FileState::Refused => v1::FileState::Refused,
    };
    v1::File {
        metadata: Some(v1::Metadata {
            id: file.id.to_string(),
            organization_id: file.organization.to_string(),
            created_at: Some(convert::time(file.created_at)),
            updated_at: Some(convert::time(file.updated_at)),
            revision: file.revision,
        }),
        spec: Some(v1::FileSpec {
            name: file.name.clone(),
            media_type: file.media_type.clone(),
            size: file.size,
            sha256: digits(file.expected_sha256),
        }),
        status: Some(v1::FileStatus {
            state: state.into(),
            received: file.received,
            sha256: digits(file.sha256),
            reason: file.reason.clone(),
            expires_at: file.expires_at.map(convert::time),
            created_by: file.created_by.clone(),
        }),
    }
}

//! The content of files over HTTP: `/v1/files/{file}/content` with ranges and conditions
//! ([`content`]), and resumable uploads by tus 1.0.0 under `/v1/files/uploads` ([`tus`]). Like
//! every protocol, both call `FileService`.

mod content;
mod tus;

use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use construct_proto::v1;
use prost::Message as _;
use tonic::{
    Status,
    body::Body,
    codegen::http::{Method as Verb, Request, Response, StatusCode, request::Parts},
};

use crate::{
    deadline::Deadline,
    protocols::{
        Inner, TIMEOUT,
        call::{self, Call},
        errors,
        methods::{Method, Methods},
    },
    status,
};

const UPLOADS: &str = "/v1/files/uploads";

/// The methods that the resources call.
pub(super) struct Files {
    create: Method,
    upload: Method,
    get: Method,
    delete: Method,
    download: Method,
    /// Maximum size of a file, in bytes.
    max_bytes: u64,
}

/// The resource of a path.
enum Resource<'p> {
    /// The content of a file, by id.
    Content(&'p str),
    /// The collection of uploads.
    Uploads,
    /// The upload of a file, by id.
    Upload(&'p str),
}

impl<'p> Resource<'p> {
    fn parse(path: &'p str) -> Option<Self> {
        if let Some(rest) = path.strip_prefix(UPLOADS) {
            return match rest.strip_prefix('/') {
                None if rest.is_empty() => Some(Self::Uploads),
                Some(file) if !file.is_empty() && !file.contains('/') => Some(Self::Upload(file)),
                _ => None,
            };
        }
        let file = path.strip_prefix("/v1/files/")?.strip_suffix("/content")?;
        (!file.is_empty() && !file.contains('/')).then_some(Self::Content(file))
    }
}

/// Whether a path is served here.
pub(super) fn is_for(path: &str) -> bool {
    Resource::parse(path).is_some()
}

impl Files {
    pub(super) fn new(methods: &Methods, max_bytes: u64) -> anyhow::Result<Self> {
        let method = |name: &str| {
            let method = methods.get(&format!("/construct.v1.FileService/{name}"));
            method.cloned().ok_or_else(|| anyhow::anyhow!("{name} is not a method"))
        };
        Ok(Self {
            create: method("CreateFile")?,
            upload: method("UploadPart")?,
            get: method("GetFile")?,
            delete: method("DeleteFile")?,
            download: method("DownloadFile")?,
            max_bytes,
        })
    }

    /// The method of a request, for authorization.
    pub(super) fn method(&self, request: &Request<Body>) -> Option<&Method> {
        match (Resource::parse(request.uri().path())?, tus::verb(request)) {
            (Resource::Content(_), Verb::GET | Verb::HEAD) => Some(&self.download),
            (Resource::Uploads, Verb::POST) => Some(&self.create),
            (Resource::Upload(_), Verb::HEAD) => Some(&self.get),
            (Resource::Upload(_), Verb::PATCH) => Some(&self.upload),
            (Resource::Upload(_), Verb::DELETE) => Some(&self.delete),
            _ => None,
        }
    }

    pub(super) async fn serve(&self, inner: Inner, request: Request<Body>) -> Response<Body> {
        let verb = tus::verb(&request);
        let (head, body) = request.into_parts();
        let path = head.uri.path().to_owned();
        let work = FileRequest { files: self, inner: Mutex::new(inner), head: &head };
        match Resource::parse(&path) {
            Some(Resource::Content(file)) => match verb {
                Verb::GET | Verb::HEAD => work.content(file, verb == Verb::HEAD).await,
                _ => super::not_allowed(&[Verb::GET, Verb::HEAD]),
            },
            Some(Resource::Uploads) => work.uploads(&verb, body).await,
            Some(Resource::Upload(file)) => work.upload(&verb, file, body).await,
            None => errors::problem_with_status(
                StatusCode::NOT_FOUND,
                &Status::not_found("unknown resource"),
            ),
        }
    }
}

/// A request in progress.
struct FileRequest<'a> {
    files: &'a Files,
    /// The services; each call uses a clone.
    inner: Mutex<Inner>,
    head: &'a Parts,
}

impl FileRequest<'_> {
    /// Calls a method that answers with a file.
    async fn call(
        &self,
        method: &Method,
        message: &impl prost::Message,
    ) -> Result<v1::File, Status> {
        let answer = self.unary(method, message).await?;
        v1::File::decode(answer)
            .map_err(|error| status::internal("an answer cannot be read", &error))
    }

    async fn unary(&self, method: &Method, message: &impl prost::Message) -> Result<Bytes, Status> {
        let call = Call { method, head: self.head };
        let message = message.encode_to_vec();
        let _permit = call::acquire_request_permit(&self.head.extensions)?;
        Ok(Deadline::new(None, TIMEOUT).begin(call.unary(self.inner(), &message)).await?.message)
    }

    fn inner(&self) -> Inner {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn get(&self, file: &str) -> Result<v1::File, Status> {
        self.call(&self.files.get, &v1::GetFileRequest { file: file.to_owned() }).await
    }
}

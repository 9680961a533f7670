//! Uploads by tus 1.0.0 (<https://tus.io/protocols/resumable-upload>) with its extensions creation,
//! creation-with-upload, expiration and termination. A body is passed on in parts as it arrives. So
//! of an interrupted body, all parts but the last are stored.

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::{Bytes, BytesMut};
use construct_proto::v1;
use http_body_util::BodyExt as _;
use jiff::{Timestamp, tz::TimeZone};
use tokio::time::Instant;
use tonic::{
    Code, Status,
    body::Body,
    codegen::http::{
        HeaderMap, HeaderName, HeaderValue, Method as Verb, Request, Response, StatusCode, header,
    },
};
use tonic_types::StatusExt as _;

use super::{FileRequest, UPLOADS};
use crate::{
    limit::Account,
    protocols::{call, codec::invalid, content_type, errors},
    validate::requests::PART_BYTES,
};

const VERSION: HeaderValue = HeaderValue::from_static("1.0.0");
const EXTENSIONS: HeaderValue =
    HeaderValue::from_static("creation,creation-with-upload,expiration,termination");
const BODY: &str = "application/offset+octet-stream";

const RESUMABLE: HeaderName = HeaderName::from_static("tus-resumable");
const VERSIONS: HeaderName = HeaderName::from_static("tus-version");
const EXTENSION: HeaderName = HeaderName::from_static("tus-extension");
const MAX_SIZE: HeaderName = HeaderName::from_static("tus-max-size");
const OFFSET: HeaderName = HeaderName::from_static("upload-offset");
const LENGTH: HeaderName = HeaderName::from_static("upload-length");
const METADATA: HeaderName = HeaderName::from_static("upload-metadata");
const EXPIRES: HeaderName = HeaderName::from_static("upload-expires");
const METHOD_OVERRIDE: HeaderName = HeaderName::from_static("x-http-method-override");

/// Time after which a body is read no further, and the response reports the progress. A server must
/// respond within some time, and the client continues from there.
const READ_TIMEOUT: Duration = Duration::from_secs(12);

/// The verb of a request. Some clients can only send POST, and put the verb in a header.
pub(super) fn verb(request: &Request<Body>) -> Verb {
    let instead = request.headers().get(METHOD_OVERRIDE).filter(|_| request.method() == Verb::POST);
    instead
        .and_then(|verb| Verb::from_bytes(verb.as_bytes()).ok())
        .unwrap_or_else(|| request.method().clone())
}

impl FileRequest<'_> {
    /// Serves the collection of uploads.
    pub(super) async fn uploads(&self, verb: &Verb, body: Body) -> Response<Body> {
        let answer = match *verb {
            Verb::OPTIONS => Ok(self.options()),
            Verb::POST => self.create(body).await,
            _ => Ok(super::super::not_allowed(&[Verb::OPTIONS, Verb::POST])),
        };
        with_version(answer)
    }

    /// Serves one upload.
    pub(super) async fn upload(&self, verb: &Verb, file: &str, body: Body) -> Response<Body> {
        let answer = match *verb {
            Verb::OPTIONS => Ok(self.options()),
            Verb::HEAD => self.head(file).await,
            Verb::PATCH => self.patch(file, body).await,
            Verb::DELETE => self.end(file).await,
            _ => Ok(super::super::not_allowed(&[
                Verb::OPTIONS,
                Verb::HEAD,
                Verb::PATCH,
                Verb::DELETE,
            ])),
        };
        with_version(answer)
    }

    fn options(&self) -> Response<Body> {
        let mut response = empty(StatusCode::NO_CONTENT);
        let headers = response.headers_mut();
        headers.insert(VERSIONS, VERSION);
        headers.insert(EXTENSION, EXTENSIONS);
        headers.insert(MAX_SIZE, HeaderValue::from(self.files.max_bytes));
        response
    }

    async fn create(&self, body: Body) -> Result<Response<Body>, Response<Body>> {
        self.version()?;
        let headers = &self.head.headers;
        let size = number(headers, &LENGTH)?;
        let mut spec = v1::FileSpec { size, ..v1::FileSpec::default() };
        for (key, value) in metadata(headers)? {
            match key.as_str() {
                "filename" | "name" => spec.name = value,
                "filetype" | "type" => spec.media_type = value,
                "sha256" => spec.sha256 = value,
                // Other metadata of the client is ignored.
                _ => {}
            }
        }
        if spec.name.is_empty() {
            spec.name = "upload".to_owned();
        }
        let key =
            headers.get("idempotency-key").and_then(|key| key.to_str().ok()).unwrap_or_default();
        let request = v1::CreateFileRequest { spec: Some(spec), idempotency_key: key.to_owned() };
        let file = self
            .call(&self.files.create, &request)
            .await
            .map_err(|status| refused_response(&status))?;
        let id = file.metadata.as_ref().map(|metadata| metadata.id.clone()).unwrap_or_default();
        let is_missing =
            file.status.as_ref().is_some_and(|it| it.state() == v1::FileState::Uploading);
        let file = if content_type(headers) == BODY && is_missing {
            // Bytes that are missing now are sent later.
            self.parts(file, body).await?
        } else {
            file
        };
        let mut response = state(StatusCode::CREATED, &file);
        if let Ok(location) = HeaderValue::try_from(format!("{UPLOADS}/{id}")) {
            response.headers_mut().insert(header::LOCATION, location);
        }
        Ok(response)
    }

    async fn head(&self, file: &str) -> Result<Response<Body>, Response<Body>> {
        self.version()?;
        let file = self.get(file).await.map_err(|status| refused_response(&status))?;
        ensure_not_refused(&file)?;
        let mut response = state(StatusCode::OK, &file);
        let spec = file.spec.unwrap_or_default();
        let headers = response.headers_mut();
        headers.insert(LENGTH, HeaderValue::from(spec.size));
        // The stored part of the client's metadata.
        let metadata =
            [("filename", &spec.name), ("filetype", &spec.media_type), ("sha256", &spec.sha256)];
        let encoded = metadata.iter().filter(|(_, value)| !value.is_empty());
        let encoded: Vec<_> =
            encoded.map(|(key, value)| format!("{key} {}", STANDARD.encode(value))).collect();
        if let Ok(encoded) = HeaderValue::try_from(encoded.join(",")) {
            headers.insert(METADATA, encoded);
        }
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        Ok(response)
    }

    async fn patch(&self, file: &str, body: Body) -> Result<Response<Body>, Response<Body>> {
        self.version()?;
        let headers = &self.head.headers;
        if content_type(headers) != BODY {
            let message = Status::invalid_argument(format!("the body must be {BODY}"));
            return Err(errors::problem_with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE, &message));
        }
        let offset = number(headers, &OFFSET)?;
        let file = self.get(file).await.map_err(|status| refused_response(&status))?;
        ensure_not_refused(&file)?;
        let received = received(&file);
        if offset != received {
            let message =
                Status::aborted(format!("wrong offset: continue the upload at {received}"));
            let mut response = errors::problem_with_status(StatusCode::CONFLICT, &message);
            response.headers_mut().insert(OFFSET, HeaderValue::from(received));
            return Err(response);
        }
        let file = self.parts(file, body).await?;
        ensure_not_refused(&file)?;
        Ok(state(StatusCode::NO_CONTENT, &file))
    }

    async fn end(&self, file: &str) -> Result<Response<Body>, Response<Body>> {
        self.version()?;
        let request =
            v1::DeleteFileRequest { file: file.to_owned(), ..v1::DeleteFileRequest::default() };
        self.unary(&self.files.delete, &request)
            .await
            .map_err(|status| refused_response(&status))?;
        Ok(empty(StatusCode::NO_CONTENT))
    }

    /// Uploads a body in parts, and returns the file with its progress. Of an interrupted body, the
    /// received part is uploaded.
    async fn parts(&self, mut file: v1::File, mut body: Body) -> Result<v1::File, Response<Body>> {
        let until = Instant::now() + READ_TIMEOUT;
        let mut part = BytesMut::new();
        let mut cut = None;
        loop {
            let next = tokio::time::timeout_at(until, body.frame()).await;
            let is_last = match next {
                Ok(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        part.extend_from_slice(&data);
                    }
                    false
                }
                Ok(Some(Err(error))) => {
                    cut = Some(call::interrupted(error));
                    true
                }
                Ok(None) | Err(_) => true,
            };
            while part.len() >= PART_BYTES || is_last && !part.is_empty() {
                let data = part.split_to(part.len().min(PART_BYTES)).freeze();
                file = self.part(&file, data).await?;
            }
            if is_last {
                return cut.map_or(Ok(file), |status| Err(refused_response(&status)));
            }
        }
    }

    async fn part(&self, file: &v1::File, data: Bytes) -> Result<v1::File, Response<Body>> {
        let id = file.metadata.as_ref().map(|metadata| metadata.id.clone()).unwrap_or_default();
        let size = data.len();
        let request = v1::UploadPartRequest { file: id, offset: received(file), data: data.into() };
        let file = self
            .call(&self.files.upload, &request)
            .await
            .map_err(|status| refused_response(&status));
        if let Some(account) = self.head.extensions.get::<Account>() {
            account.consume(size);
        }
        file
    }

    /// # Errors
    /// `412` when the client uses another version.
    fn version(&self) -> Result<(), Response<Body>> {
        if self.head.headers.get(RESUMABLE) == Some(&VERSION) {
            return Ok(());
        }
        let message = Status::failed_precondition(
            "uploads use tus 1.0.0: set the header `Tus-Resumable: 1.0.0`",
        );
        let mut response = errors::problem_with_status(StatusCode::PRECONDITION_FAILED, &message);
        response.headers_mut().insert(VERSIONS, VERSION);
        Err(response)
    }
}

/// Adds the tus version to a response.
fn with_version(answer: Result<Response<Body>, Response<Body>>) -> Response<Body> {
    let mut response = answer.unwrap_or_else(|refusal| refusal);
    response.headers_mut().insert(RESUMABLE, VERSION);
    response
}

fn empty(code: StatusCode) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = code;
    response
}

fn received(file: &v1::File) -> i64 {
    file.status.as_ref().map_or(0, |status| status.received)
}

/// The progress of a file, and its expiry time.
fn state(code: StatusCode, file: &v1::File) -> Response<Body> {
    let mut response = empty(code);
    response.headers_mut().insert(OFFSET, HeaderValue::from(received(file)));
    let expires = file.status.as_ref().and_then(|status| status.expires_at.as_ref());
    let expires = expires.and_then(|at| Timestamp::from_second(at.seconds).ok());
    let date = expires
        .map(|at| at.to_zoned(TimeZone::UTC).strftime("%a, %d %b %Y %H:%M:%S GMT").to_string());
    if let Some(Ok(date)) = date.map(HeaderValue::try_from) {
        response.headers_mut().insert(EXPIRES, date);
    }
    response
}

/// # Errors
/// `422` when the file was refused: a retry is useless.
fn ensure_not_refused(file: &v1::File) -> Result<(), Response<Body>> {
    match &file.status {
        Some(status) if status.state() == v1::FileState::Refused => {
            let message =
                Status::failed_precondition(format!("the file was refused: {}", status.reason));
            Err(errors::problem_with_status(StatusCode::UNPROCESSABLE_ENTITY, &message))
        }
        _ => Ok(()),
    }
}

fn refused_response(status: &Status) -> Response<Body> {
    let details = status.get_error_details();
    let is_size = details
        .bad_request()
        .is_some_and(|wrong| wrong.field_violations.iter().any(|it| it.field == "spec.size"));
    match status.code() {
        Code::InvalidArgument if is_size => {
            errors::problem_with_status(StatusCode::PAYLOAD_TOO_LARGE, status)
        }
        _ => errors::problem(status),
    }
}

/// A number in a header.
fn number(headers: &HeaderMap, name: &HeaderName) -> Result<i64, Response<Body>> {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    let digits = value.filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    digits
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| errors::problem(&invalid(name.as_str(), "must be a number of bytes")))
}

/// `filename cmVwb3J0LnBkZg==,is_draft`
fn metadata(headers: &HeaderMap) -> Result<Vec<(String, String)>, Response<Body>> {
    let wrong = || {
        errors::problem(&invalid(METADATA.as_str(), "must be keys with values in base64 of UTF-8"))
    };
    let Some(value) = headers.get(METADATA) else { return Ok(Vec::new()) };
    let pairs = value
        .to_str()
        .map_err(|_| wrong())?
        .split(',')
        .map(str::trim)
        .filter(|pair| !pair.is_empty());
    let read = |pair: &str| {
        let (key, value) = pair.split_once(' ').unwrap_or((pair, ""));
        let value =
            STANDARD.decode(value.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        value.map(|value| (key.to_owned(), value)).ok_or_else(wrong)
    };
    pairs.map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upload_metadata_is_parsed_or_refused() {
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(METADATA, HeaderValue::try_from(text).expect("a header"));
            metadata(&headers).map_err(|response| response.status().as_u16())
        };
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(
            read("filename w5xiZXIudHh0,is_draft"),
            Ok(vec![pair("filename", "Über.txt"), pair("is_draft", "")])
        );
        assert_eq!(read("filename w5x!"), Err(400));
        assert_eq!(read("filename /w=="), Err(400));
    }
}

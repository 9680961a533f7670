//! A call of the gRPC services from within the process.

use bytes::Bytes;
use http_body::Body as _;
use http_body_util::{BodyExt as _, Full};
use tonic::{
    Code, Status,
    body::Body,
    codegen::http::{
        Extensions, HeaderMap, HeaderName, HeaderValue, Request, StatusCode, Version, header,
        request::Parts,
    },
};
use tower::ServiceExt as _;

use super::{
    Inner,
    envelope::{Envelope, Envelopes},
    methods::Method,
};
use crate::{
    api::Repeated,
    limit::{Account, Share},
    quotas::Metered,
    server::MAX_REQUEST,
    status,
};

/// Bytes of an answer at most. Nothing the services send comes near it: it is a bound, not a limit
/// anybody meets.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// Headers that belong to a connection, or to the form of the body, and so not to the call.
const OF_THE_FACE: [HeaderName; 14] = [
    header::ACCEPT,
    header::ACCEPT_ENCODING,
    header::CONNECTION,
    header::CONTENT_ENCODING,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::EXPECT,
    header::HOST,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// What is called, by whom.
pub(super) struct Call<'a> {
    pub(super) method: &'a Method,
    /// Of the request as it came in: who calls stands in its headers and extensions.
    pub(super) head: &'a Parts,
}

/// The answer to a call with one answer.
pub(super) struct Reply {
    pub(super) metadata: HeaderMap,
    /// The same as it stands in the metadata, for a protocol that has no headers.
    pub(super) metered: Metered,
    /// Whether it was given before, to a request with the same idempotency key.
    pub(super) repeated: bool,
    pub(super) message: Bytes,
    pub(super) trailers: HeaderMap,
}

impl Call<'_> {
    /// Calls a method with one message that has one answer.
    pub(super) async fn unary(self, inner: Inner, message: &[u8]) -> Result<Reply, Status> {
        let mut answers = self.open(inner, one(message)).await?;
        let message =
            answers.next().await?.ok_or_else(|| Status::internal("the call had no answer"))?;
        if answers.next().await?.is_some() {
            return Err(Status::internal("the call had more than one answer"));
        }
        let Answers { metadata, metered, repeated, trailers, .. } = answers;
        Ok(Reply { metadata, metered, repeated, message, trailers })
    }

    /// Calls a method with the messages of `body`.
    pub(super) async fn open(self, inner: Inner, body: Body) -> Result<Answers, Status> {
        let response = inner.oneshot(self.request(body)).await.map_err(Status::from_error)?;
        let (mut head, body) = response.into_parts();
        let metered: Metered = head.extensions.remove().unwrap_or_default();
        let repeated = head.extensions.remove::<Repeated>().is_some();
        // A call that ends before it has an answer says so in its headers.
        let mut trailers = HeaderMap::new();
        match Status::from_header_map(&head.headers) {
            Some(status) if status.code() != Code::Ok => return Err(status),
            Some(_) => trailers = head.headers.clone(),
            None => {}
        }
        if head.status != StatusCode::OK {
            return Err(of_http(head.status));
        }
        let envelopes = Envelopes::new(MAX_ANSWER);
        Ok(Answers { metadata: theirs(head.headers), metered, repeated, trailers, body, envelopes })
    }

    fn request(self, body: Body) -> Request<Body> {
        let mut request = Request::new(body);
        *request.method_mut() = tonic::codegen::http::Method::POST;
        *request.uri_mut() = self.method.path.clone().into();
        *request.version_mut() = Version::HTTP_2;
        *request.extensions_mut() = self.head.extensions.clone();
        let headers = request.headers_mut();
        for (name, value) in &self.head.headers {
            let ours = ["grpc-", "connect-"].iter().any(|prefix| name.as_str().starts_with(prefix));
            if !ours && !OF_THE_FACE.contains(name) {
                headers.append(name.clone(), value.clone());
            }
        }
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        let span = tracing::Span::current();
        span.record("rpc.service", self.method.descriptor.parent_service().full_name());
        span.record("rpc.method", self.method.descriptor.name());
        request
    }
}

/// A body with one message.
pub(super) fn one(message: &[u8]) -> Body {
    Body::new(Full::new(Envelope::encode(0, message)))
}

/// The answers of a call.
pub(super) struct Answers {
    pub(super) metadata: HeaderMap,
    /// What the call was counted against, where it was.
    pub(super) metered: Metered,
    /// Whether they were given before, to a request with the same idempotency key.
    repeated: bool,
    /// Known when the last answer has come.
    pub(super) trailers: HeaderMap,
    body: Body,
    envelopes: Envelopes,
}

impl Answers {
    #[cfg(test)]
    pub(super) fn of(body: Body) -> Self {
        let envelopes = Envelopes::new(MAX_ANSWER);
        let metered = Metered::default();
        Self {
            metadata: HeaderMap::new(),
            metered,
            repeated: false,
            trailers: HeaderMap::new(),
            body,
            envelopes,
        }
    }

    /// The next answer; none at the end of a call that went well.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if let Some(envelope) = self.envelopes.next()? {
                return Ok(Some(envelope.message));
            }
            let Some(frame) = self.body.frame().await else {
                // A gRPC service always says how a call ended.
                return if self.trailers.is_empty() {
                    Err(Status::unknown("the call ended halfway"))
                } else {
                    Ok(None)
                };
            };
            match frame?.into_data() {
                Ok(data) => self.envelopes.push(&data),
                Err(frame) => {
                    let Ok(trailers) = frame.into_trailers() else { continue };
                    match Status::from_header_map(&trailers) {
                        Some(status) if status.code() != Code::Ok => return Err(status),
                        _ => self.trailers = trailers,
                    }
                }
            }
        }
    }
}

/// What an answer's headers say besides gRPC's own.
pub(super) fn theirs(headers: HeaderMap) -> HeaderMap {
    let mut name = None;
    let mut kept = HeaderMap::new();
    for (next, value) in headers {
        // Only the first of several values of one name comes with it.
        name = next.or(name);
        if let Some(name) = &name
            && !name.as_str().starts_with("grpc-")
            && !OF_THE_FACE.contains(name)
        {
            kept.append(name.clone(), value);
        }
    }
    kept
}

/// All of a body.
///
/// # Errors
/// `RESOURCE_EXHAUSTED` when it is too large, which is known as soon as it says so, or the limit is
/// reached.
pub(super) async fn whole(mut body: Body) -> Result<Bytes, Status> {
    let announced = body.size_hint().lower();
    if announced > MAX_REQUEST as u64 {
        return Err(status::too_large(MAX_REQUEST));
    }
    let mut all = bytes::BytesMut::with_capacity(usize::try_from(announced).unwrap_or_default());
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(cut_off)?.into_data() else { continue };
        if all.len() + data.len() > MAX_REQUEST {
            return Err(status::too_large(MAX_REQUEST));
        }
        all.extend_from_slice(&data);
    }
    Ok(all.freeze())
}

/// Why a body has no end: it was refused, or the client's connection ended, or broke its rules,
/// within the request.
pub(super) fn cut_off(error: Status) -> Status {
    if matches!(
        error.code(),
        Code::ResourceExhausted | Code::DeadlineExceeded | Code::InvalidArgument
    ) {
        return error;
    }
    tracing::debug!(%error, "a request's body ended halfway");
    Status::cancelled("the request ended halfway")
}

/// A place for a request whose body is there, to be kept until it is answered.
///
/// # Errors
/// `RESOURCE_EXHAUSTED` when there are too many.
pub(super) fn place(extensions: &Extensions) -> Result<Option<Share>, Status> {
    extensions.get::<Account>().map_or(Ok(None), Account::transcode)
}

/// An answer that isn't gRPC's, of what stands before the services.
fn of_http(status: StatusCode) -> Status {
    let code = match status.as_u16() {
        400 => Code::Internal,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::Unimplemented,
        429 | 502 | 503 | 504 => Code::Unavailable,
        _ => Code::Unknown,
    };
    Status::new(code, status.to_string())
}

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
    api::RepeatedResponse,
    limit::{Account, Permit},
    quotas::QuotaStates,
    server::MAX_REQUEST,
    status,
};

/// Maximum size of a response, in bytes. No response of the services comes near it.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// Headers that belong to a connection or to the format of the body, not to the call.
const CONNECTION_HEADERS: [HeaderName; 14] = [
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

/// A call: the method and its caller.
pub(super) struct Call<'a> {
    pub(super) method: &'a Method,
    /// The head of the original request. Its headers and extensions identify the caller.
    pub(super) head: &'a Parts,
}

/// The response to a unary call.
pub(super) struct Reply {
    pub(super) metadata: HeaderMap,
    /// The quotas in the metadata, for a protocol without headers.
    pub(super) metered: QuotaStates,
    /// Whether it is the stored response to an earlier request with the same idempotency key.
    pub(super) repeated: bool,
    pub(super) message: Bytes,
    pub(super) trailers: HeaderMap,
}

impl Call<'_> {
    /// Makes a unary call.
    pub(super) async fn unary(self, inner: Inner, message: &[u8]) -> Result<Reply, Status> {
        let mut answers = self.open(inner, unary_body(message)).await?;
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
        let metered: QuotaStates = head.extensions.remove().unwrap_or_default();
        let repeated = head.extensions.remove::<RepeatedResponse>().is_some();
        // A call that fails before its first message has its status in the headers.
        let mut trailers = HeaderMap::new();
        match Status::from_header_map(&head.headers) {
            Some(status) if status.code() != Code::Ok => return Err(status),
            Some(_) => trailers = head.headers.clone(),
            None => {}
        }
        if head.status != StatusCode::OK {
            return Err(status_from_http(head.status));
        }
        let envelopes = Envelopes::new(MAX_ANSWER);
        Ok(Answers {
            metadata: application_metadata(head.headers),
            metered,
            repeated,
            trailers,
            body,
            envelopes,
        })
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
            if !ours && !CONNECTION_HEADERS.contains(name) {
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
pub(super) fn unary_body(message: &[u8]) -> Body {
    Body::new(Full::new(Envelope::encode(0, message)))
}

/// The response messages of a call.
pub(super) struct Answers {
    pub(super) metadata: HeaderMap,
    /// The quotas that the call was counted against, if any.
    pub(super) metered: QuotaStates,
    /// Whether this is the stored response to an earlier request with the same idempotency key.
    repeated: bool,
    /// Complete after the last message.
    pub(super) trailers: HeaderMap,
    body: Body,
    envelopes: Envelopes,
}

impl Answers {
    #[cfg(test)]
    pub(super) fn new(body: Body) -> Self {
        let envelopes = Envelopes::new(MAX_ANSWER);
        let metered = QuotaStates::default();
        Self {
            metadata: HeaderMap::new(),
            metered,
            repeated: false,
            trailers: HeaderMap::new(),
            body,
            envelopes,
        }
    }

    /// The next message; `None` at the end of a successful call.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if let Some(envelope) = self.envelopes.next()? {
                return Ok(Some(envelope.message));
            }
            let Some(frame) = self.body.frame().await else {
                // A gRPC service always ends a call with a status.
                return if self.trailers.is_empty() {
                    Err(Status::unknown("the call ended without a status"))
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

/// The headers of a response without those of gRPC and of the connection.
pub(super) fn application_metadata(headers: HeaderMap) -> HeaderMap {
    let mut name = None;
    let mut metadata = HeaderMap::new();
    for (next, value) in headers {
        // The iterator yields the name with the first of several values only.
        name = next.or(name);
        if let Some(name) = &name
            && !name.as_str().starts_with("grpc-")
            && !CONNECTION_HEADERS.contains(name)
        {
            metadata.append(name.clone(), value);
        }
    }
    metadata
}

/// Reads a whole body.
///
/// # Errors
/// `RESOURCE_EXHAUSTED` as soon as its declared or actual size exceeds the limit.
pub(super) async fn read_body(mut body: Body) -> Result<Bytes, Status> {
    let announced = body.size_hint().lower();
    if announced > MAX_REQUEST as u64 {
        return Err(status::too_large(MAX_REQUEST));
    }
    let mut all = bytes::BytesMut::with_capacity(usize::try_from(announced).unwrap_or_default());
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(interrupted)?.into_data() else { continue };
        if all.len() + data.len() > MAX_REQUEST {
            return Err(status::too_large(MAX_REQUEST));
        }
        all.extend_from_slice(&data);
    }
    Ok(all.freeze())
}

/// The status of an interrupted body: it was refused, or the client closed the connection or broke
/// the protocol within the request.
pub(super) fn interrupted(error: Status) -> Status {
    if matches!(
        error.code(),
        Code::ResourceExhausted | Code::DeadlineExceeded | Code::InvalidArgument
    ) {
        return error;
    }
    tracing::debug!(%error, "the body of a request was interrupted");
    Status::cancelled("the request was interrupted")
}

/// Acquires the permit of a request whose body has been read. It is held until the response.
///
/// # Errors
/// `RESOURCE_EXHAUSTED` when there are too many.
pub(super) fn acquire_request_permit(extensions: &Extensions) -> Result<Option<Permit>, Status> {
    extensions.get::<Account>().map_or(Ok(None), Account::transcode)
}

/// The status for an HTTP response of a layer in front of the services.
fn status_from_http(status: StatusCode) -> Status {
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

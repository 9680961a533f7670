//! The Connect protocol (<https://connectrpc.com/docs/protocol>): calls that `curl` and browsers can make.
//!
//! A unary method is a plain POST with JSON or protobuf and, if it only reads, a GET as well.
//! Streams are messages in envelopes; the last envelope has the status of the stream.

mod get;
mod stream;

use std::time::Duration;

use tonic::{
    Code, Status,
    body::Body,
    codegen::http::{
        HeaderMap, HeaderName, HeaderValue, Method as Verb, Request, Response, StatusCode, header,
    },
};

use super::{
    Inner,
    call::{self, Call, Reply},
    codec::{Codec, Encoding, invalid},
    content_type, errors,
    methods::{Method, Methods},
};
use crate::deadline::Deadline;

const VERSION: HeaderName = HeaderName::from_static("connect-protocol-version");
const TIMEOUT_MS: HeaderName = HeaderName::from_static("connect-timeout-ms");

/// Answers a request whose path looks like a method. The request carries the deadline as well.
pub(super) async fn serve(
    inner: Inner,
    methods: &Methods,
    deadline: Deadline,
    request: Request<Body>,
) -> Response<Body> {
    let Some(method) = methods.get(request.uri().path()) else {
        let mut response =
            errors::connect_response(&Status::unimplemented("unknown method"), methods.pool());
        *response.status_mut() = StatusCode::NOT_FOUND;
        return response;
    };
    let verb = request.method().clone();
    if verb == Verb::GET && method.is_read_only {
        return unary(inner, methods, method, deadline, request, None).await;
    }
    if verb != Verb::POST {
        let mut response = refused(
            StatusCode::METHOD_NOT_ALLOWED,
            "the method does not accept this HTTP verb",
            methods,
        );
        let allow =
            HeaderValue::from_static(if method.is_read_only { "GET, POST" } else { "POST" });
        response.headers_mut().insert(header::ALLOW, allow);
        return response;
    }
    match (content_type(request.headers()), method.streams()) {
        ("application/json", false) => {
            unary(inner, methods, method, deadline, request, Some(Codec::Json)).await
        }
        ("application/proto", false) => {
            unary(inner, methods, method, deadline, request, Some(Codec::Proto)).await
        }
        ("application/connect+json", true) => {
            stream::serve(inner, methods, method, deadline, request, Codec::Json).await
        }
        ("application/connect+proto", true) => {
            stream::serve(inner, methods, method, deadline, request, Codec::Proto).await
        }
        (_, streams) => {
            let types = if streams {
                "application/connect+json, application/connect+proto"
            } else {
                "application/json, application/proto"
            };
            let message = format!("the method accepts these content types: {types}");
            let mut response = refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, &message, methods);
            response.headers_mut().insert("accept-post", HeaderValue::from_static(types));
            response
        }
    }
}

/// The response to an unauthorized caller, before the request is read. For a stream it is the
/// stream's last envelope.
pub(super) fn refusal(
    methods: &Methods,
    request: &Request<Body>,
    status: &Status,
) -> Response<Body> {
    let codec = match content_type(request.headers()) {
        "application/connect+json" => Codec::Json,
        "application/connect+proto" => Codec::Proto,
        _ => return errors::connect_response(status, methods.pool()),
    };
    stream::refusal(codec, status, methods)
}

/// The response to a request that is not a call.
fn refused(http: StatusCode, message: &str, methods: &Methods) -> Response<Body> {
    let mut response =
        errors::connect_response(&Status::new(Code::Unknown, message), methods.pool());
    *response.status_mut() = http;
    response
}

/// A unary call. Without a codec it is a GET with the message in its query.
async fn unary(
    inner: Inner,
    methods: &Methods,
    method: &Method,
    deadline: Deadline,
    request: Request<Body>,
    codec: Option<Codec>,
) -> Response<Body> {
    let accepted = Encoding::accepted_by(request.headers(), &header::ACCEPT_ENCODING);
    let answered = answer(inner, method, deadline, request, codec).await;
    let (codec, reply) = match answered {
        Ok(answered) => answered,
        Err(status) => return errors::connect_response(&status, methods.pool()),
    };
    let content_type = match codec {
        Codec::Json => "application/json",
        Codec::Proto => "application/proto",
    };
    let packed = accepted.compress(&reply.message);
    let compressed = packed.is_some();
    let mut response =
        errors::response(StatusCode::OK, content_type, packed.unwrap_or(reply.message));
    let headers = response.headers_mut();
    errors::append(headers, reply.metadata);
    for (name, value) in &call::application_metadata(reply.trailers) {
        if let Ok(name) = HeaderName::try_from(format!("trailer-{name}")) {
            headers.append(name, value.clone());
        }
    }
    if compressed {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    // Shared caches must not store it: callers see different data, and data changes.
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.append(header::VARY, HeaderValue::from_static("accept-encoding"));
    response
}

async fn answer(
    inner: Inner,
    method: &Method,
    deadline: Deadline,
    request: Request<Body>,
    codec: Option<Codec>,
) -> Result<(Codec, Reply), Status> {
    let (head, body) = request.into_parts();
    check(&head.headers)?;
    deadline
        .begin(async {
            let (codec, message) = match codec {
                Some(codec) => {
                    let encoding = Encoding::from_header(&head.headers, &header::CONTENT_ENCODING)?;
                    (codec, encoding.decompress(call::read_body(body).await?)?)
                }
                None => get::message(head.uri.query().unwrap_or_default())?,
            };
            let _permit = call::acquire_request_permit(&head.extensions)?;
            let message = codec.request(&method.descriptor.input(), message)?;
            let mut reply = Call { method, head: &head }.unary(inner, &message).await?;
            reply.message = codec.response(&method.descriptor.output(), reply.message)?;
            Ok((codec, reply))
        })
        .await
}

/// Checks the protocol version, which is optional for clients such as `curl`, and the timeout.
fn check(headers: &HeaderMap) -> Result<(), Status> {
    match headers.get(VERSION) {
        Some(version) if version != "1" => Err(invalid(VERSION.as_str(), "must be 1")),
        _ => timeout(headers).map(drop),
    }
}

/// The timeout that the client set.
///
/// # Errors
/// `INVALID_ARGUMENT`.
pub(super) fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, Status> {
    let Some(value) = headers.get(TIMEOUT_MS) else { return Ok(None) };
    let digits = value
        .to_str()
        .ok()
        .filter(|text| text.len() <= 10 && text.bytes().all(|byte| byte.is_ascii_digit()));
    match digits.and_then(|digits| digits.parse().ok()) {
        Some(millis) => Ok(Some(Duration::from_millis(millis))),
        None => Err(invalid(
            TIMEOUT_MS.as_str(),
            "must be a number of milliseconds with at most ten digits",
        )),
    }
}

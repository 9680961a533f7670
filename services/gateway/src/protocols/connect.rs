//! The Connect protocol (<https://connectrpc.com/docs/protocol>): calls that `curl` and browsers can make.
//!
//! A method with one request and one answer is a plain POST with JSON or protobuf, and, if it only
//! reads, a GET as well. Streams are messages in envelopes; how a stream ended stands in its last
//! one.

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

/// Answers a request whose path looks like a method's. The deadline goes with the request as well.
pub(super) async fn serve(
    inner: Inner,
    methods: &Methods,
    deadline: Deadline,
    request: Request<Body>,
) -> Response<Body> {
    let Some(method) = methods.get(request.uri().path()) else {
        let mut response = errors::connect_response(
            &Status::unimplemented("there is no such method"),
            methods.pool(),
        );
        *response.status_mut() = StatusCode::NOT_FOUND;
        return response;
    };
    let verb = request.method().clone();
    if verb == Verb::GET && method.reads {
        return unary(inner, methods, method, deadline, request, None).await;
    }
    if verb != Verb::POST {
        let mut response = refused(
            StatusCode::METHOD_NOT_ALLOWED,
            "this method cannot be called with this verb",
            methods,
        );
        let allow = HeaderValue::from_static(if method.reads { "GET, POST" } else { "POST" });
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
            let words = format!("this method takes one of these content types: {types}");
            let mut response = refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, &words, methods);
            response.headers_mut().insert("accept-post", HeaderValue::from_static(types));
            response
        }
    }
}

/// What is said to whoever may not call, before their request is read: with streams it stands in
/// the stream's end.
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

/// A request that is no call at all.
fn refused(http: StatusCode, words: &str, methods: &Methods) -> Response<Body> {
    let mut response = errors::connect_response(&Status::new(Code::Unknown, words), methods.pool());
    *response.status_mut() = http;
    response
}

/// A call with one request and one answer. Without a codec it stands in the parameters of a GET.
async fn unary(
    inner: Inner,
    methods: &Methods,
    method: &Method,
    deadline: Deadline,
    request: Request<Body>,
    codec: Option<Codec>,
) -> Response<Body> {
    let accepted = Encoding::accepted(request.headers(), &header::ACCEPT_ENCODING);
    let answered = answer(inner, method, deadline, request, codec).await;
    let (codec, reply) = match answered {
        Ok(answered) => answered,
        Err(status) => return errors::connect_response(&status, methods.pool()),
    };
    let content_type = match codec {
        Codec::Json => "application/json",
        Codec::Proto => "application/proto",
    };
    let packed = accepted.pack(&reply.message);
    let compressed = packed.is_some();
    let mut response =
        errors::response(StatusCode::OK, content_type, packed.unwrap_or(reply.message));
    let headers = response.headers_mut();
    errors::append(headers, reply.metadata);
    for (name, value) in &call::theirs(reply.trailers) {
        if let Ok(name) = HeaderName::try_from(format!("trailer-{name}")) {
            headers.append(name, value.clone());
        }
    }
    if compressed {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    // What one caller may see must not be shown to another, nor what was true once.
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
                    let encoding = Encoding::of(&head.headers, &header::CONTENT_ENCODING)?;
                    (codec, encoding.unpack(call::whole(body).await?)?)
                }
                None => get::message(head.uri.query().unwrap_or_default())?,
            };
            let _place = call::place(&head.extensions)?;
            let message = codec.request(&method.descriptor.input(), message)?;
            let mut reply = Call { method, head: &head }.unary(inner, &message).await?;
            reply.message = codec.response(&method.descriptor.output(), reply.message)?;
            Ok((codec, reply))
        })
        .await
}

/// A client that says which version it speaks speaks the one there is; `curl` need not say it. How
/// long it waits must be readable.
fn check(headers: &HeaderMap) -> Result<(), Status> {
    match headers.get(VERSION) {
        Some(version) if version != "1" => {
            Err(invalid(VERSION.as_str(), "there is only version 1"))
        }
        _ => timeout(headers).map(drop),
    }
}

/// How long the client waits.
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
        None => Err(invalid(TIMEOUT_MS.as_str(), "must be milliseconds, of at most ten digits")),
    }
}

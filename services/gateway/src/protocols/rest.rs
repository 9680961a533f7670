//! REST: the gRPC methods as resources, by the contract's options ([`routes`]).
//!
//! Bodies are proto3's JSON. Errors are problems (RFC 9457) with gRPC's code and the invalid
//! fields. A stream of events is served as server-sent events, any other stream as lines of JSON.

mod conditional;
mod document;
mod files;
mod lines;
mod login;
mod request;
pub(crate) mod routes;
mod sse;

use std::collections::BTreeMap;

use bytes::Bytes;
use http_body::Body as _;
use tonic::{
    Code, Status,
    body::Body,
    codegen::http::{
        HeaderMap, HeaderValue, Method as Verb, Request, Response, StatusCode, header,
    },
};

use self::{
    files::Files,
    login::Login,
    routes::{Content, ROUTES, Route},
};
use super::{
    Inner, TIMEOUT,
    call::{self, Call},
    codec::{Codec, Encoding},
    errors,
    methods::{Method, Methods},
};
use crate::{Config, deadline::Deadline};

/// The resources.
pub(super) struct Rest {
    /// By path, with positions instead of names, which may differ between verbs.
    paths: matchit::Router<Vec<Row>>,
    /// The content of files and uploads, which are not JSON.
    files: Files,
    document: Bytes,
    /// How people log in, if an issuer is configured.
    login: Option<Login>,
}

struct Row {
    route: &'static Route,
    method: Method,
}

impl Rest {
    pub(super) fn new(methods: &Methods, config: &Config) -> anyhow::Result<Self> {
        let mut rows: BTreeMap<String, Vec<Row>> = BTreeMap::new();
        for route in ROUTES.iter() {
            let method = methods.get(&format!("/construct.v1.{}", route.method));
            let method =
                method.ok_or_else(|| anyhow::anyhow!("{} is not a method", route.method))?.clone();
            rows.entry(positions(route.path)).or_default().push(Row { route, method });
        }
        let mut paths = matchit::Router::new();
        let all = rows.values().flatten().map(|row| (row.route, &row.method.descriptor));
        let document = serde_json::to_vec(&document::build(all))?.into();
        for (path, rows) in rows {
            paths.insert(path, rows)?;
        }
        let files = Files::new(methods, config.gateway_files_max_bytes)?;
        Ok(Self { paths, files, document, login: Login::new(config) })
    }

    /// The method that a request calls, if any.
    pub(super) fn method(&self, request: &Request<Body>) -> Option<&Method> {
        if files::is_for(request.uri().path()) {
            return self.files.method(request);
        }
        let rows = self.paths.at(request.uri().path()).ok()?.value;
        find_row(rows, request.method()).map(|row| &row.method)
    }

    /// Whether a method's responses are served as server-sent events.
    pub(super) fn streams_events(method: &Method) -> bool {
        method.streams() && sse::is_for(&method.descriptor.output())
    }

    /// The challenge for missing or invalid credentials (RFC 6750), with the address of the login
    /// metadata (RFC 9728).
    pub(super) fn challenge(&self, request: &Request<Body>) -> Option<HeaderValue> {
        let mut parameters = Vec::new();
        if request.headers().contains_key(header::AUTHORIZATION) {
            parameters.push("error=\"invalid_token\"".to_owned());
        }
        if let Some(login) = &self.login {
            parameters.push(format!(
                "resource_metadata=\"{}{}\"",
                login.resource(request),
                login::PATH
            ));
        }
        HeaderValue::try_from(format!("Bearer {}", parameters.join(", ")).trim_end()).ok()
    }

    /// Answers a request that is for no other protocol.
    pub(super) async fn serve(&self, inner: Inner, mut request: Request<Body>) -> Response<Body> {
        if *request.method() == Verb::HEAD && !files::is_for(request.uri().path()) {
            // HEAD is allowed wherever GET is (RFC 9110, 9.3.2).
            *request.method_mut() = Verb::GET;
            return without_body(self.get(inner, request).await);
        }
        self.get(inner, request).await
    }

    async fn get(&self, inner: Inner, request: Request<Body>) -> Response<Body> {
        let path = request.uri().path().to_owned();
        if path == "/openapi.json" {
            return match *request.method() {
                Verb::GET => {
                    errors::response(StatusCode::OK, "application/json", self.document.clone())
                }
                _ => not_allowed(&[Verb::GET]),
            };
        }
        if path == login::PATH {
            return match (&self.login, request.method()) {
                (Some(login), &Verb::GET) => login.response(&request),
                (Some(_), _) => not_allowed(&[Verb::GET]),
                (None, _) => {
                    let message =
                        "no issuer is configured (gateway_oidc_issuer): log in with an API key";
                    errors::problem_with_status(StatusCode::NOT_FOUND, &Status::not_found(message))
                }
            };
        }
        if files::is_for(&path) {
            return self.files.serve(inner, request).await;
        }
        let Ok(matched) = self.paths.at(&path) else {
            let message = "unknown resource; /openapi.json lists the resources";
            return errors::problem_with_status(StatusCode::NOT_FOUND, &Status::not_found(message));
        };
        let Some(row) = find_row(matched.value, request.method()) else {
            let verbs: Vec<_> = matched.value.iter().map(|row| row.route.verb.clone()).collect();
            return not_allowed(&verbs);
        };
        let values = matched.params.iter().map(|(_, value)| value.to_owned()).collect();
        row.serve(inner, request, values).await
    }
}

/// A response without its body, but with the body's length.
fn without_body(response: Response<Body>) -> Response<Body> {
    let length = response.body().size_hint().exact();
    let (mut head, _) = response.into_parts();
    if let Some(length) = length {
        head.headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    }
    Response::from_parts(head, Body::empty())
}

/// The row of a verb.
fn find_row<'a>(rows: &'a [Row], verb: &Verb) -> Option<&'a Row> {
    rows.iter()
        .find(|row| row.route.verb == *verb || *verb == Verb::HEAD && row.route.verb == Verb::GET)
}

/// `/v1/tasks/{task}` as `/v1/tasks/{0}`.
fn positions(path: &str) -> String {
    let mut number = 0;
    let part = |part: &str| {
        if !part.starts_with('{') {
            return part.to_owned();
        }
        number += 1;
        format!("{{{}}}", number - 1)
    };
    path.split('/').map(part).collect::<Vec<_>>().join("/")
}

impl Route {
    /// The fields in the path.
    fn fields(&self) -> impl Iterator<Item = &'static str> {
        self.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
    }
}

impl Row {
    /// Serves a request. `values` are the values in the path.
    async fn serve(
        &self,
        inner: Inner,
        request: Request<Body>,
        values: Vec<String>,
    ) -> Response<Body> {
        let method = &self.method;
        let accepted = Encoding::accepted_by(request.headers(), &header::ACCEPT_ENCODING);
        let (head, body) = request.into_parts();
        let deadline = Deadline::from_extensions(&head.extensions)
            .unwrap_or_else(|| Deadline::new(None, TIMEOUT));
        let body = match self.route.body {
            Content::None => Ok(Bytes::new()),
            Content::All(_) | Content::Field(..) => deadline.begin(call::read_body(body)).await,
        };
        let message = body
            .and_then(|body| Ok((body, call::acquire_request_permit(&head.extensions)?)))
            .map_err(request::RequestError::from);
        let message = message.and_then(|(body, permit)| {
            let fields = self.route.fields().zip(values);
            Ok((
                request::message(self.route, &method.descriptor.input(), &head, fields, body)?,
                permit,
            ))
        });
        let (message, _place) = match message {
            Ok(message) => message,
            Err(request::RequestError::UnsupportedMedia) => {
                let message =
                    Status::new(Code::InvalidArgument, "the body must be application/json");
                let mut response =
                    errors::problem_with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE, &message);
                response
                    .headers_mut()
                    .insert(header::ACCEPT, HeaderValue::from_static("application/json"));
                return response;
            }
            Err(request::RequestError::Status(status)) => return errors::problem(&status),
        };
        let call = Call { method, head: &head };
        if method.streams() {
            return match deadline.begin(call.open(inner, call::unary_body(&message))).await {
                Ok(answers) if Rest::streams_events(method) => {
                    sse::response(answers, method.descriptor.output())
                }
                Ok(answers) => lines::response(answers, method.descriptor.output()),
                Err(status) => errors::problem(&status),
            };
        }
        let reply = deadline.begin(call.unary(inner, &message)).await;
        let reply = reply.and_then(|mut reply| {
            let version = conditional::response_version(&method.descriptor, &reply.message);
            reply.message = Codec::Json.response(&method.descriptor.output(), reply.message)?;
            Ok((reply, version))
        });
        match reply {
            Ok((reply, Some(version)))
                if conditional::is_current(self.route, &head.headers, version) =>
            {
                let mut response = Response::new(Body::empty());
                *response.status_mut() = StatusCode::NOT_MODIFIED;
                let tag = conditional::tag(version, accepted.compresses(&reply.message));
                with_response_headers(response, reply.metadata, tag)
            }
            Ok((reply, version)) => self.response(reply, version, accepted),
            Err(status)
                if conditional::is_condition_failure(
                    &head.headers,
                    &method.descriptor.input(),
                    &status,
                ) =>
            {
                errors::problem_with_status(StatusCode::PRECONDITION_FAILED, &status)
            }
            Err(status) => errors::problem(&status),
        }
    }

    /// `version` is the version of the response's entity, if it has one.
    fn response(
        &self,
        reply: call::Reply,
        version: Option<i64>,
        accepted: Encoding,
    ) -> Response<Body> {
        let status = success(self.route, &self.method.descriptor);
        let mut tag = version.and_then(|version| conditional::tag(version, false));
        let response = if status == StatusCode::NO_CONTENT {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = status;
            response
        } else {
            let packed = accepted.compress(&reply.message);
            let compressed = packed.is_some();
            let mut response =
                errors::response(status, "application/json", packed.unwrap_or(reply.message));
            if compressed {
                // After a PUT the tag is that of the document, not of this response.
                if self.route.verb == Verb::GET {
                    tag = version.and_then(|version| conditional::tag(version, true));
                }
                response
                    .headers_mut()
                    .insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            }
            response
        };
        with_response_headers(response, reply.metadata, tag)
    }
}

/// Adds headers to a response.
fn with_response_headers(
    mut response: Response<Body>,
    metadata: HeaderMap,
    tag: Option<HeaderValue>,
) -> Response<Body> {
    let headers = response.headers_mut();
    errors::append(headers, metadata);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.append(header::VARY, HeaderValue::from_static("accept-encoding"));
    if let Some(tag) = tag {
        headers.insert(header::ETAG, tag);
    }
    response
}

/// The HTTP status of a successful call.
fn success(route: &Route, method: &prost_reflect::MethodDescriptor) -> StatusCode {
    if method.output().fields().len() == 0 {
        StatusCode::NO_CONTENT
    } else if method.name().starts_with("Create") && route.verb == Verb::POST {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    }
}

fn not_allowed(verbs: &[Verb]) -> Response<Body> {
    let message = Status::unimplemented("the resource does not accept this HTTP verb");
    let mut response = errors::problem_with_status(StatusCode::METHOD_NOT_ALLOWED, &message);
    let mut verbs: Vec<_> = verbs.iter().map(Verb::as_str).collect();
    if verbs.contains(&"GET") && !verbs.contains(&"HEAD") {
        verbs.push("HEAD");
    }
    let verbs = verbs.join(", ");
    if let Ok(verbs) = HeaderValue::try_from(verbs) {
        response.headers_mut().insert(header::ALLOW, verbs);
    }
    response
}

//! Error responses: one gRPC status in the format of each protocol.

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use bytes::Bytes;
use http_body_util::Full;
use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage};
use serde_json::{Value, json};
use tonic::{
    Code, Status,
    body::Body,
    codegen::http::{HeaderMap, HeaderValue, Response, StatusCode, header},
};
use tonic_types::StatusExt as _;

use super::{Kind, call};
use crate::quotas::seconds;

/// A response with a complete body.
pub(super) fn response(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Body> {
    let mut response = Response::new(Body::new(Full::new(body.into())));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// The HTTP status for a gRPC code, as Connect's specification defines it. REST uses the same.
pub(super) fn http_status(code: Code) -> StatusCode {
    let number = match code {
        Code::Ok => 200,
        Code::Cancelled => 499,
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => 400,
        Code::DeadlineExceeded => 504,
        Code::NotFound => 404,
        Code::AlreadyExists | Code::Aborted => 409,
        Code::PermissionDenied => 403,
        Code::ResourceExhausted => 429,
        Code::Unimplemented => 501,
        Code::Unavailable => 503,
        Code::Unauthenticated => 401,
        Code::Unknown | Code::Internal | Code::DataLoss => 500,
    };
    StatusCode::from_u16(number).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// The name of a code in snake case, as Connect writes it.
pub(super) fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "ok",
        Code::Cancelled => "canceled",
        Code::Unknown => "unknown",
        Code::InvalidArgument => "invalid_argument",
        Code::DeadlineExceeded => "deadline_exceeded",
        Code::NotFound => "not_found",
        Code::AlreadyExists => "already_exists",
        Code::PermissionDenied => "permission_denied",
        Code::ResourceExhausted => "resource_exhausted",
        Code::FailedPrecondition => "failed_precondition",
        Code::Aborted => "aborted",
        Code::OutOfRange => "out_of_range",
        Code::Unimplemented => "unimplemented",
        Code::Internal => "internal",
        Code::Unavailable => "unavailable",
        Code::DataLoss => "data_loss",
        Code::Unauthenticated => "unauthenticated",
    }
}

/// Connect's error object: code, message, and details as protobuf and, for people, as JSON.
pub(super) fn connect(status: &Status, pool: &DescriptorPool) -> Value {
    let mut error = json!({"code": name(status.code())});
    if !status.message().is_empty() {
        error["message"] = status.message().into();
    }
    let details = tonic_types::Status::decode(status.details()).unwrap_or_default().details;
    if !details.is_empty() {
        let detail = |any: &prost_types::Any| {
            let kind = any.type_url.rsplit('/').next().unwrap_or_default();
            let mut detail = json!({"type": kind, "value": STANDARD_NO_PAD.encode(&any.value)});
            if let Some(kind) = pool.get_message_by_name(kind)
                && let Ok(message) = DynamicMessage::decode(kind, any.value.as_slice())
                && let Ok(debug) = serde_json::to_value(&message)
            {
                detail["debug"] = debug;
            }
            detail
        };
        error["details"] = details.iter().map(detail).collect();
    }
    error
}

/// The error response to a unary Connect call.
pub(super) fn connect_response(status: &Status, pool: &DescriptorPool) -> Response<Body> {
    let body = connect(status, pool).to_string();
    with_response_headers(status, response(http_status(status.code()), "application/json", body))
}

/// The response to a refused request, in the format of its protocol.
pub(super) fn refused(kind: Kind, status: &Status) -> Response<Body> {
    match kind {
        Kind::Grpc | Kind::GrpcWeb => status.clone().into_http(),
        Kind::Connect => {
            let body = json!({"code": name(status.code()), "message": status.message()});
            response(http_status(status.code()), "application/json", body.to_string())
        }
        Kind::Rest => problem(status),
    }
}

/// A problem response (RFC 9457).
pub(super) fn problem(status: &Status) -> Response<Body> {
    let http = match crate::status::reason(status).as_deref() {
        Some(crate::status::TOO_LARGE) => StatusCode::PAYLOAD_TOO_LARGE,
        Some(crate::status::TOO_SLOW) => StatusCode::REQUEST_TIMEOUT,
        _ => http_status(status.code()),
    };
    problem_with_status(http, status)
}

/// A problem response with a more exact HTTP status than the code's.
pub(super) fn problem_with_status(http: StatusCode, status: &Status) -> Response<Body> {
    with_response_headers(
        status,
        response(http, "application/problem+json", problem_json(http, status).to_string()),
    )
}

/// The members of a problem: those of RFC 9457, the code, the invalid fields, and the subject of
/// the problem.
pub(super) fn problem_json(http: StatusCode, status: &Status) -> Value {
    let mut problem = json!({
        "title": http.canonical_reason().unwrap_or("Client Closed Request"),
        "status": http.as_u16(),
        "detail": status.message(),
        "code": name(status.code()).to_uppercase(),
    });
    let details = status.get_error_details();
    if let Some(request) = details.bad_request() {
        let violation = |violation: &tonic_types::FieldViolation| json!({"field": violation.field, "description": violation.description});
        problem["violations"] = request.field_violations.iter().map(violation).collect();
    }
    if let Some(failure) = details.precondition_failure() {
        let violation = |violation: &tonic_types::PreconditionViolation| json!({"type": violation.r#type, "subject": violation.subject, "description": violation.description});
        problem["preconditions"] = failure.violations.iter().map(violation).collect();
    }
    if let Some(failure) = details.quota_failure() {
        let violation = |violation: &tonic_types::QuotaViolation| json!({"quota": violation.quota_id, "subject": violation.subject, "limit": violation.quota_value.to_string(), "description": violation.description});
        problem["quotas"] = failure.violations.iter().map(violation).collect();
    }
    if let Some(resource) = details.resource_info() {
        problem["resource"] =
            json!({"type": resource.resource_type, "name": resource.resource_name});
    }
    problem
}

/// The code of a call that never reached the services. A request that is not a call is the client's
/// error.
pub(super) fn code(response: &Response<Body>) -> Code {
    match response.extensions().get() {
        None | Some(Code::Unknown) => Code::InvalidArgument,
        Some(code) => *code,
    }
}

/// Adds the retry delay and the metadata of a status to a response, and the code for the metrics.
fn with_response_headers(status: &Status, mut response: Response<Body>) -> Response<Body> {
    response.extensions_mut().insert(status.code());
    let headers = response.headers_mut();
    if let Some(delay) = status.get_error_details().retry_info().and_then(|info| info.retry_delay) {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds(delay).max(1)));
    }
    append(headers, call::application_metadata(status.metadata().clone().into_headers()));
    response
}

/// Appends headers.
pub(super) fn append(headers: &mut HeaderMap, more: HeaderMap) {
    let mut name = None;
    for (next, value) in more {
        name = next.or(name);
        if let Some(name) = &name {
            headers.append(name.clone(), value);
        }
    }
}

//! Classifies the vendor's errors.

use construct_proto::mesh::v1::FailureClass;
use serde_json::Value;

use crate::{
    failure::{Failure, class_from_status},
    http::{class_from_message, describe_body},
};

/// Classifies a status other than 2xx, or a body that is not a stream.
pub(crate) fn failure_from_body(status: u16, body: &[u8]) -> Failure {
    match serde_json::from_slice::<Value>(body) {
        // Some servers send the error without the wrapper, some in a list.
        Ok(Value::Object(body)) if body.get("error").is_some_and(|error| !error.is_null()) => {
            failure_from_error(Some(status), &body["error"])
        }
        Ok(Value::Array(list))
            if list.first().is_some_and(|first| first.get("error").is_some()) =>
        {
            failure_from_error(Some(status), &list[0]["error"])
        }
        Ok(body) if body["message"].is_string() => failure_from_error(Some(status), &body),
        Ok(_) | Err(_) => Failure::new(class_from_status(status), describe_body(status, body)),
    }
}

/// Phrases that classify an error whose status only says that the request is invalid.
const INVALID_REQUEST_PHRASES: &[(FailureClass, &[&str])] = &[
    (
        FailureClass::ContextTooLong,
        &[
            "maximum context length",
            "context length",
            "context window",
            "prompt is too long",
            "maximum prompt length",
        ],
    ),
    (FailureClass::ContentRefused, REFUSAL_PHRASES),
    // xAI sends it with status 400, in some places percent-encoded.
    (
        FailureClass::Authentication,
        &["incorrect api key", "incorrect%20api%20key", "invalid api key"],
    ),
    (FailureClass::RateLimited, &["rate limit"]),
];
/// Phrases of these vendors for refused content. OpenRouter and xAI send it with status 403, which
/// otherwise means a key without permission.
const REFUSAL_PHRASES: &[&str] = &[
    "content policy",
    "content management policy",
    "flagged as",
    "input was flagged",
    "prompt was flagged",
    "requires moderation",
    "violates usage guidelines",
    "content exists risk",
];
/// Phrases for an exhausted account at xAI, which is not transient.
const QUOTA_PHRASES: &[(FailureClass, &[&str])] =
    &[(FailureClass::Authentication, &["used all available credits", "monthly spending limit"])];

/// Classifies the vendor's error: `code` and `type` are its own names, or (OpenRouter) the status
/// of the vendor behind it.
pub(crate) fn failure_from_error(status: Option<u16>, error: &Value) -> Failure {
    let text = |key: &str| error[key].as_str().unwrap_or_default();
    let message = match error {
        Value::String(message) => message.as_str(),
        _ => text("message"),
    };
    let behind = error["code"]
        .as_u64()
        .and_then(|code| u16::try_from(code).ok())
        .filter(|code| *code >= 400);
    let class = match (text("code"), text("type")) {
        ("context_length_exceeded" | "string_above_max_length", _)
        | (_, "exceed_context_size_error") => Some(FailureClass::ContextTooLong),
        ("content_policy_violation" | "content_filter", _) => Some(FailureClass::ContentRefused),
        // OpenRouter's moderation uses the status of a key without permission.
        _ if ["reasons", "flagged_input"].iter().any(|name| !error["metadata"][name].is_null()) => {
            Some(FailureClass::ContentRefused)
        }
        // Retries don't help against an empty account.
        ("insufficient_quota" | "billing_hard_limit_reached" | "invalid_api_key", _)
        | (_, "insufficient_quota") => Some(FailureClass::Authentication),
        ("rate_limit_exceeded", _) => Some(FailureClass::RateLimited),
        ("server_error", _) | (_, "server_error" | "internal_server_error") => {
            Some(FailureClass::Transient)
        }
        (_, "overloaded_error") => Some(FailureClass::Overloaded),
        _ => None,
    };
    let status = status.filter(|status| *status >= 400).or(behind);
    let by_status = status.map(class_from_status);
    let class = class
        .or_else(|| match (status, by_status) {
            (_, None | Some(FailureClass::InvalidRequest)) => {
                class_from_message(message, INVALID_REQUEST_PHRASES)
            }
            (Some(403), _) => {
                class_from_message(message, &[(FailureClass::ContentRefused, REFUSAL_PHRASES)])
            }
            (Some(429), _) => class_from_message(message, QUOTA_PHRASES),
            _ => None,
        })
        .or(by_status)
        // An unknown error within a stream is the vendor's fault.
        .unwrap_or(FailureClass::Transient);
    Failure::new(
        class,
        if message.is_empty() { "the vendor reported an error without a reason" } else { message },
    )
}

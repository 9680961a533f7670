//! What the vendor's errors mean.

use construct_proto::mesh::v1::FailureClass;
use serde_json::Value;

use crate::{
    failure::{Failure, class_from_status},
    http::{class_from_message, describe_body},
};

/// What a status other than 2xx, or a body that is not a stream, means.
pub(crate) fn failure_from_body(status: u16, body: &[u8]) -> Failure {
    match serde_json::from_slice::<Value>(body) {
        // Some servers send the error bare, some in a list.
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

/// By its words: what a request is said to have wrong, where its status says no more than that.
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
    // xAI says so with status 400, in some places with its text escaped as in an address.
    (
        FailureClass::Authentication,
        &["incorrect api key", "incorrect%20api%20key", "invalid api key"],
    ),
    (FailureClass::RateLimited, &["rate limit"]),
];
/// How these vendors say that content is refused. OpenRouter and xAI do so with status 403, which
/// is else that of a key that may not.
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
/// What is too much and does not pass: xAI's account is empty.
const QUOTA_PHRASES: &[(FailureClass, &[&str])] =
    &[(FailureClass::Authentication, &["used all available credits", "monthly spending limit"])];

/// Classifies the vendor's error: `code` and `type` are its own words, or (OpenRouter) the status
/// of the vendor behind.
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
        // OpenRouter's moderation says so with the status of a key that may not.
        _ if ["reasons", "flagged_input"].iter().any(|name| !error["metadata"][name].is_null()) => {
            Some(FailureClass::ContentRefused)
        }
        // No pause helps against an empty account.
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
            (_, None | Some(FailureClass::InvalidRequest)) => class_from_message(message, INVALID_REQUEST_PHRASES),
            (Some(403), _) => class_from_message(message, &[(FailureClass::ContentRefused, REFUSAL_PHRASES)]),
            (Some(429), _) => class_from_message(message, QUOTA_PHRASES),
            _ => None,
        })
        .or(by_status)
        // An error of a kind we don't know inside a stream that had begun well is the vendor's.
        .unwrap_or(FailureClass::Transient);
    Failure::new(
        class,
        if message.is_empty() { "the vendor reported an error without a reason" } else { message },
    )
}

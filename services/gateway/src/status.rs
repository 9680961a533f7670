//! Error responses: the mapping of store errors to gRPC codes. Internal details never leak: a
//! defect is logged once, and the client sees only the incident number of the log entry.

use std::{collections::HashMap, error::Error as StdError, time::Duration};

use construct_runtime::telemetry::Chain;
use construct_store::Error;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};
use uuid::Uuid;

/// Machine-readable reasons of [`too_large`] and [`too_slow`].
pub(crate) const TOO_LARGE: &str = "REQUEST_TOO_LARGE";
pub(crate) const TOO_SLOW: &str = "REQUEST_TOO_SLOW";

/// Retry delay when a dependency is unavailable.
const SHORT_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Retry delay when a limit is reached.
const LONG_RETRY_DELAY: Duration = Duration::from_secs(10);

/// The status for an error of the store.
pub(crate) fn from_store(error: Error) -> Status {
    let message = error.to_string();
    match error {
        Error::NotFound { what } => {
            let details = ErrorDetails::with_resource_info(what, "", "", &message);
            Status::with_error_details(Code::NotFound, message, details)
        }
        Error::AlreadyExists { what, .. } => {
            let details = ErrorDetails::with_resource_info(what, "", "", &message);
            Status::with_error_details(Code::AlreadyExists, message, details)
        }
        Error::InUse { what, by } => {
            let details = ErrorDetails::with_precondition_failure_violation(
                "IN_USE",
                what,
                format!("delete or change the {by} first"),
            );
            Status::with_error_details(Code::FailedPrecondition, message, details)
        }
        Error::NotQueued => {
            let description = "only a queued message can be changed or deleted";
            let details = ErrorDetails::with_precondition_failure_violation(
                "NOT_QUEUED",
                "message",
                description,
            );
            Status::with_error_details(Code::FailedPrecondition, message, details)
        }
        Error::NotUploading => precondition("NOT_UPLOADING", "file", message),
        Error::TooLong { .. } => {
            let details = ErrorDetails::with_bad_request_violation("data", &message);
            Status::with_error_details(Code::InvalidArgument, message, details)
        }
        Error::WrongOffset { offset } => {
            let details = ErrorDetails::with_precondition_failure_violation(
                "OFFSET",
                "file",
                offset.to_string(),
            );
            Status::with_error_details(Code::Aborted, message, details)
        }
        Error::TooManyParts { .. } => precondition("PARTS", "file", message),
        Error::NotInTranscript => {
            let description = "only a message that is not superseded or compacted can be rewound to, edited or forked from";
            let details = ErrorDetails::with_precondition_failure_violation(
                "NOT_IN_TRANSCRIPT",
                "message",
                description,
            );
            Status::with_error_details(Code::FailedPrecondition, message, details)
        }
        Error::ApprovalClosed { .. } => {
            let details =
                ErrorDetails::with_precondition_failure_violation("DECIDED", "approval", &message);
            Status::with_error_details(Code::FailedPrecondition, message, details)
        }
        // No method of the API reserves money; tasks report this error.
        Error::Exhausted(_) => {
            let details = ErrorDetails::with_precondition_failure_violation(
                "BUDGET_EXHAUSTED",
                "budget",
                &message,
            );
            Status::with_error_details(Code::FailedPrecondition, message, details)
        }
        Error::LastOwner | Error::PermanentOrganization => {
            let details = ErrorDetails::with_precondition_failure_violation(
                "OWNED",
                "organization",
                &message,
            );
            Status::with_error_details(Code::FailedPrecondition, message, details)
        }
        Error::HandedOver => {
            let details = ErrorDetails::with_precondition_failure_violation(
                "HANDED_OVER",
                "candidate",
                &message,
            );
            Status::with_error_details(Code::FailedPrecondition, message, details)
        }
        Error::NotAccepted => {
            let description = "accept it first, or leave it out";
            let details = ErrorDetails::with_precondition_failure_violation(
                "NOT_ACCEPTED",
                "candidate",
                description,
            );
            Status::with_error_details(Code::FailedPrecondition, message, details)
        }
        Error::InsufficientRole => Status::permission_denied(message),
        Error::Conflict => {
            Status::aborted("revision conflict: read the entity again, then repeat the change")
        }
        Error::VersionMismatch { current } => {
            let details = ErrorDetails::with_precondition_failure_violation(
                "VERSION",
                "state",
                current.to_string(),
            );
            Status::with_error_details(
                Code::Aborted,
                format!("{message}: read it again, then repeat the change"),
                details,
            )
        }
        Error::IdempotencyMismatch => {
            let description =
                "was already used for a different request; use a new key for a new request";
            let details = ErrorDetails::with_bad_request_violation("idempotency_key", description);
            Status::with_error_details(
                Code::InvalidArgument,
                format!("idempotency_key: {description}"),
                details,
            )
        }
        Error::QueueFull { .. }
        | Error::TooManyScans { .. }
        | Error::TooManyUploads { .. }
        | Error::TooManyOrganizations { .. } => exhausted(message),
        Error::Unavailable(source) => {
            tracing::debug!(error = chain(&*source), "the database is not available");
            unavailable("the database is not available")
        }
        Error::Internal(_) => internal("the store failed", &error),
    }
}

/// The status for an error of the store about `reference`, as the client named it.
pub(crate) fn for_reference(reference: &str, error: Error) -> Status {
    match error {
        Error::NotFound { what } => {
            let message = format!("{what} `{reference}` not found");
            let details = ErrorDetails::with_resource_info(what, reference, "", &message);
            Status::with_error_details(Code::NotFound, message, details)
        }
        other => from_store(other),
    }
}

/// A failed precondition, as text and as a code.
pub(crate) fn precondition(kind: &str, subject: &str, message: impl Into<String>) -> Status {
    let message = message.into();
    let details = ErrorDetails::with_precondition_failure_violation(kind, subject, &message);
    Status::with_error_details(Code::FailedPrecondition, message, details)
}

/// A dependency is unavailable; the client may retry soon.
pub(crate) fn unavailable(message: impl Into<String>) -> Status {
    Status::with_error_details(
        Code::Unavailable,
        message,
        ErrorDetails::with_retry_info(Some(SHORT_RETRY_DELAY)),
    )
}

/// A limit is reached; the client may retry later.
pub(crate) fn exhausted(message: impl Into<String>) -> Status {
    Status::with_error_details(
        Code::ResourceExhausted,
        message,
        ErrorDetails::with_retry_info(Some(LONG_RETRY_DELAY)),
    )
}

/// A request is too large. REST responds with 413.
pub(crate) fn too_large(limit: usize) -> Status {
    too_large_with_message(&format!("a request has at most {limit} bytes"))
}

/// [`too_large`] with another message.
pub(crate) fn too_large_with_message(message: &str) -> Status {
    let details = ErrorDetails::with_error_info(TOO_LARGE, "construct", HashMap::new());
    Status::with_error_details(Code::ResourceExhausted, message, details)
}

/// A request body arrives too slowly. REST responds with 408.
pub(crate) fn too_slow() -> Status {
    let details = ErrorDetails::with_error_info(TOO_SLOW, "construct", HashMap::new());
    Status::with_error_details(
        Code::DeadlineExceeded,
        "the request body arrives too slowly",
        details,
    )
}

/// The machine-readable reason of a status, if any.
pub(crate) fn reason(status: &Status) -> Option<String> {
    status.get_error_details().error_info().map(|info| info.reason.clone())
}

/// A defect of this service.
pub(crate) fn internal(what: &str, error: &(dyn StdError + 'static)) -> Status {
    let incident = Uuid::now_v7();
    tracing::error!(%incident, error = chain(error), "{what}");
    Status::internal(format!("internal error; see incident {incident} in the log"))
}

/// An error with its causes.
pub(crate) fn chain(error: &(dyn StdError + 'static)) -> String {
    Chain(error).to_string()
}

#[cfg(test)]
mod tests {
    use construct_domain::approval::ApprovalState;

    use super::*;

    #[test]
    fn store_errors_have_their_codes() {
        for (error, code) in [
            (Error::NotFound { what: "agent" }, Code::NotFound),
            (Error::AlreadyExists { what: "agent", field: "name" }, Code::AlreadyExists),
            (Error::InUse { what: "model", by: "agent" }, Code::FailedPrecondition),
            (Error::NotQueued, Code::FailedPrecondition),
            (
                Error::ApprovalClosed {
                    state: ApprovalState::Rejected,
                    by: "ada".into(),
                    at: None,
                },
                Code::FailedPrecondition,
            ),
            (Error::Conflict, Code::Aborted),
            (Error::VersionMismatch { current: 3 }, Code::Aborted),
            (Error::NotUploading, Code::FailedPrecondition),
            (Error::TooManyParts { limit: 1 }, Code::FailedPrecondition),
            (Error::TooManyUploads { limit: 1 }, Code::ResourceExhausted),
            (Error::TooManyOrganizations { limit: 1 }, Code::ResourceExhausted),
            (Error::TooLong { size: 1 }, Code::InvalidArgument),
            (Error::WrongOffset { offset: 1 }, Code::Aborted),
            (Error::IdempotencyMismatch, Code::InvalidArgument),
            (Error::QueueFull { limit: 1000 }, Code::ResourceExhausted),
            (Error::Unavailable("connection refused".into()), Code::Unavailable),
            (Error::Internal("column \"x\" does not exist".into()), Code::Internal),
        ] {
            let description = error.to_string();
            assert_eq!(from_store(error).code(), code, "{description}");
        }
    }

    #[test]
    fn internal_details_never_leak() {
        for error in
            [Error::Internal("secret detail".into()), Error::Unavailable("secret detail".into())]
        {
            let status = from_store(error);
            assert!(!format!("{status:?}").contains("secret"), "{status:?}");
        }
    }

    #[test]
    fn retryable_status_has_a_retry_delay() {
        for error in [Error::Unavailable("away".into()), Error::QueueFull { limit: 1 }] {
            let details = from_store(error).get_error_details();
            assert!(details.retry_info().and_then(|info| info.retry_delay).is_some());
        }
    }

    #[test]
    fn missing_entity_is_named() {
        let status = for_reference("ada", Error::NotFound { what: "agent" });
        assert_eq!(status.message(), "agent `ada` not found");
        let details = status.get_error_details();
        let resource = details.resource_info().expect("the resource is named");
        assert_eq!(
            (resource.resource_type.as_str(), resource.resource_name.as_str()),
            ("agent", "ada")
        );
    }
}

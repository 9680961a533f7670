//! Errors of calls that were not made or whose outcome is unknown, with messages that a model can
//! act on.

use construct_proto::mesh::v1::ApprovalDecision;
use serde_json::json;

use super::ResultQuota;
use crate::sandbox::ToolError;

/// The name of the error of a call with an unknown outcome.
pub(super) const OUTCOME_UNKNOWN: &str = "OutcomeUnknown";
/// The name of the error of a call whose result does not fit into the journal.
const JOURNAL_LIMIT: &str = "JournalLimitExceeded";
/// Longest canonical arguments of a call that a person can approve, in bytes of JSON. Longer ones
/// could only be shown in part, and nobody can approve what they have not seen.
pub(super) const MAX_APPROVAL_BYTES: usize = 64 * 1024;

/// The policy denies the call.
pub(super) fn denied(tool: &str, reason: &str) -> ToolError {
    let because = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let message = format!("the policy denies this call of {tool}{because}. Continue without it.");
    ToolError::new("PolicyDenied", message)
}

/// A person rejected the call, or nobody decided in time.
pub(super) fn rejected(tool: &str, decision: &ApprovalDecision) -> ToolError {
    let comment =
        if decision.comment.is_empty() { String::new() } else { format!(": {}", decision.comment) };
    let message = if decision.decided_by.is_empty() {
        format!(
            "this call of {tool} needs a person's approval and did not get it{comment}. It was not made."
        )
    } else {
        format!("a person rejected this call of {tool}{comment}. It was not made.")
    };
    ToolError::new("ApprovalRejected", message)
}

/// The call is too large to be shown to a person completely.
pub(super) fn too_large_to_ask(tool: &str, size: usize) -> ToolError {
    let message = format!(
        "this call of {tool} needs a person's approval, but its arguments of {size} bytes exceed the {} KiB that can \
         be shown to a person. It was not made. Make several calls with shorter arguments; approval is requested for \
         each.",
        MAX_APPROVAL_BYTES >> 10
    );
    let details = Some(json!({"size": size, "limit": MAX_APPROVAL_BYTES}));
    ToolError { details, ..ToolError::new("ApprovalTooLarge", message) }
}

/// A process died during the call.
pub(super) fn outcome_unknown(tool: &str) -> ToolError {
    ToolError::new(
        OUTCOME_UNKNOWN,
        format!(
            "the service stopped during {tool}: the call may or may not have had its effect, and was not repeated. \
             Check the current state before you decide whether to repeat it."
        ),
    )
}

/// The error of a call after the conversation was handed over.
pub(super) fn handed_off(name: &str) -> ToolError {
    let message = "this conversation was handed over to another agent, so no more calls can be made: end the script";
    ToolError::new("HandedOff", format!("{name}: {message}"))
}

/// The error of a call when the journal is full.
pub(super) fn journal_full(name: &str, quota: &ResultQuota) -> ToolError {
    let message = format!(
        "{name} was not called: the results of these scripts' calls have reached the limit of {} MiB. End the script, \
         and continue in another message with calls that return less.",
        quota.limit() >> 20
    );
    ToolError::new(JOURNAL_LIMIT, message)
}

/// A call was made, but its result does not fit into the journal.
pub(super) fn result_dropped(name: &str, size: usize, quota: &ResultQuota) -> ToolError {
    let message = format!(
        "{name} was called, but its result of {size} bytes was dropped: the results of these scripts' calls together \
         would exceed the limit of {} MiB. The effects of the call remain; request less data, or continue in another \
         message.",
        quota.limit() >> 20
    );
    ToolError::new(JOURNAL_LIMIT, message)
}

//! How a call ends that was not made, or of which too little is known: in words that a model can
//! act on.

use construct_proto::mesh::v1::ApprovalDecision;
use serde_json::json;

use super::Kept;
use crate::sandbox::ToolError;

/// The name of the error that a call ends with of which nobody knows whether it was done.
pub(super) const OUTCOME_UNKNOWN: &str = "OutcomeUnknown";
/// The name of the error that a call ends with for which the journal has no room.
const JOURNAL_LIMIT: &str = "JournalLimitExceeded";
/// How long the canonical arguments of a call can be that a person is asked about, in bytes of
/// JSON. Longer ones can be shown in part only, and nobody can approve of what they have not seen.
pub(super) const ASKED: usize = 64 * 1024;

/// The policy says no.
pub(super) fn denied(tool: &str, reason: &str) -> ToolError {
    let because = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let message = format!(
        "the policy does not let scripts make this call of {tool}{because}. Go on without it."
    );
    ToolError::new("PolicyDenied", message)
}

/// People have said no, or nobody has said anything in time.
pub(super) fn rejected(tool: &str, decision: &ApprovalDecision) -> ToolError {
    let words =
        if decision.words.is_empty() { String::new() } else { format!(": {}", decision.words) };
    let message = if decision.decided_by.is_empty() {
        format!(
            "this call of {tool} needs a person's approval and did not get it{words}. Nothing of it happened."
        )
    } else {
        format!("a person did not approve this call of {tool}{words}. Nothing of it happened.")
    };
    ToolError::new("ApprovalRejected", message)
}

/// Nobody is asked about a call that cannot be shown whole.
pub(super) fn too_large_to_ask(tool: &str, size: usize) -> ToolError {
    let message = format!(
        "this call of {tool} needs a person's approval, and its arguments of {size} bytes are more than the {} KiB that a person can be shown, \
         so nobody was asked. Nothing of it happened. Make calls with shorter arguments, each of which is asked about.",
        ASKED >> 10
    );
    let details = Some(json!({"size": size, "limit": ASKED}));
    ToolError { details, ..ToolError::new("ApprovalTooLarge", message) }
}

/// A process died while the call was under way.
pub(super) fn outcome_unknown(tool: &str) -> ToolError {
    ToolError::new(
        OUTCOME_UNKNOWN,
        format!(
            "the service stopped while {tool} was under way: it may or may not have happened, and was not repeated. Look at \
             the state of things before you decide whether to do it again."
        ),
    )
}

/// What is called after the conversation was handed over.
pub(super) fn handed_off(name: &str) -> ToolError {
    let words = "this conversation has been handed to another agent, so nothing more can be called: end the script";
    ToolError::new("HandedOff", format!("{name}: {words}"))
}

/// What is called when the journal holds as much as it may.
pub(super) fn not_made(name: &str, kept: &Kept) -> ToolError {
    let message = format!(
        "{name} was not made: what the calls of these scripts have given comes to {} MiB, and no more is kept. End the script, and go \
         on in another message with calls that give less.",
        kept.limit() >> 20
    );
    ToolError::new(JOURNAL_LIMIT, message)
}

/// A call was made whose result no longer fits.
pub(super) fn left_out(name: &str, size: usize, kept: &Kept) -> ToolError {
    let message = format!(
        "{name} was made, but its result of {size} bytes is left out: together with what the calls of these scripts have given \
         before it is more than {} MiB. What the call did stands; of what only reads, ask for less, or go on in another message.",
        kept.limit() >> 20
    );
    ToolError::new(JOURNAL_LIMIT, message)
}

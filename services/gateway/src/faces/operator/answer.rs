//! What is answered: results, and what went wrong.

use construct_proto::v1;
use serde_json::{Map, Value, json};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::quotas::{Metered, seconds};

/// There was too much of something.
const RATE_LIMIT: &str = "RATE_LIMIT_EXCEEDED";
/// Something that the gateway needs is away.
const UNAVAILABLE: &str = "UNAVAILABLE";

/// How a request wants to be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// By results: each says all of it.
    Results,
    /// By events.
    Events,
}

/// What a client is told that went wrong.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) code: &'static str,
    pub(super) message: String,
    details: Value,
}

impl Failure {
    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self { code: "INVALID_REQUEST", message: message.into(), details: Value::Null }
    }

    /// Another try is welcome after some seconds.
    pub(super) fn too_many(message: impl Into<String>, after: u64) -> Self {
        Self { code: RATE_LIMIT, message: message.into(), details: json!({"retryAfter": after}) }
    }

    pub(super) fn too_large(message: impl Into<String>) -> Self {
        Self { code: "CONTEXT_TOO_LARGE", message: message.into(), details: Value::Null }
    }

    pub(super) fn missing(message: impl Into<String>) -> Self {
        Self { code: "SESSION_NOT_FOUND", message: message.into(), details: Value::Null }
    }

    pub(super) fn dropped(message: impl Into<String>) -> Self {
        Self { code: "SESSION_ERROR", message: message.into(), details: Value::Null }
    }

    pub(super) fn no_agent(message: impl Into<String>) -> Self {
        Self { code: "AGENT_NOT_FOUND", message: message.into(), details: Value::Null }
    }

    pub(super) fn no_tool(message: impl Into<String>) -> Self {
        Self { code: "TOOL_NOT_AVAILABLE", message: message.into(), details: Value::Null }
    }

    /// How a turn of the model failed.
    pub(super) fn of_turn(error: &v1::TaskError) -> Self {
        Self { code: "PROVIDER_ERROR", message: error.message.clone(), details: json!({"code": error.code}) }
    }

    /// As one line: of its own, or as a block of a result.
    pub(super) fn line(&self, form: Form, id: Option<&str>, session: Option<&str>) -> Value {
        let mut line = match form {
            Form::Results => json!({
                "sessionID": session.unwrap_or_default(),
                "agentID": "",
                "content": [self.block()],
                "turns": [],
                "usage": {"inputTokens": 0, "outputTokens": 0},
                "stopReason": "error",
            }),
            Form::Events => {
                let mut line = json!({"type": "error", "code": self.code, "message": self.message});
                if !self.details.is_null() {
                    line["details"] = self.details.clone();
                }
                if let Some(session) = session {
                    line["sessionID"] = session.into();
                }
                line
            }
        };
        named(&mut line, id);
        line
    }

    pub(super) fn block(&self) -> Value {
        let mut block = json!({"type": "error", "message": self.message, "code": self.code});
        if matches!(self.code, RATE_LIMIT | UNAVAILABLE) && !self.details.is_null() {
            block["details"] = self.details.clone();
        }
        block
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let details = status.get_error_details();
        let missing = details.resource_info().map(|resource| resource.resource_type.clone()).unwrap_or_default();
        let violations = details.bad_request().map(|request| request.field_violations.as_slice()).unwrap_or_default();
        let wrong = |name: &str| violations.iter().any(|it| it.field == name || it.field == format!("spec.{name}"));
        let code = match status.code() {
            // An id that cannot be one leads nowhere either.
            Code::NotFound if missing == "agent" => "AGENT_NOT_FOUND",
            Code::InvalidArgument if wrong("agent") => "AGENT_NOT_FOUND",
            Code::NotFound => "SESSION_NOT_FOUND",
            Code::InvalidArgument if wrong("task") => "SESSION_NOT_FOUND",
            Code::InvalidArgument | Code::Unimplemented => "INVALID_REQUEST",
            Code::OutOfRange => "CONTEXT_TOO_LARGE",
            Code::ResourceExhausted => RATE_LIMIT,
            Code::Unavailable => UNAVAILABLE,
            Code::FailedPrecondition | Code::Aborted | Code::AlreadyExists => "SESSION_ERROR",
            Code::Unauthenticated | Code::PermissionDenied => "UNAUTHORIZED",
            _ => "INTERNAL_ERROR",
        };
        Self { code, message: status.message().to_owned(), details: further(&details) }
    }
}

/// Which quota is used up, if it is one, and in how many seconds another try is welcome.
fn further(details: &ErrorDetails) -> Value {
    let mut further = Map::new();
    if let Some(violation) = details.quota_failure().and_then(|failure| failure.violations.first()) {
        further.insert("quota".to_owned(), violation.quota_id.clone().into());
        further.insert("limit".to_owned(), violation.quota_value.into());
    }
    if let Some(after) = details.retry_info().and_then(|info| info.retry_delay) {
        further.insert("retryAfter".to_owned(), seconds(after).max(1).into());
    }
    if further.is_empty() { Value::Null } else { further.into() }
}

/// Says what is left of the quotas that a request was counted against, by their names; nothing where nothing is limited.
pub(super) fn tell_left(line: &mut Value, metered: &Metered) {
    let mut quotas = Map::new();
    for left in &metered.0 {
        let (remaining, reset) = (left.remaining.max(0), seconds(left.reset));
        let mut quota = json!({"limit": left.limit, "remaining": remaining, "reset": reset});
        if let Some(window) = left.window {
            quota["window"] = window.as_secs().into();
        }
        quotas.insert(left.id.to_owned(), quota);
    }
    if !quotas.is_empty() {
        line["rateLimit"] = quotas.into();
    }
}

/// A `DispatchResult`.
pub(super) struct Outcome<'a> {
    pub(super) session: &'a str,
    pub(super) agent: &'a str,
    pub(super) content: Vec<Value>,
    pub(super) turns: Vec<Value>,
    pub(super) usage: (i64, i64),
    pub(super) stop: &'a str,
}

impl Outcome<'_> {
    pub(super) fn line(self, id: Option<&str>) -> Value {
        let mut line = json!({
            "sessionID": self.session,
            "agentID": self.agent,
            "content": self.content,
            "turns": self.turns,
            "usage": {"inputTokens": self.usage.0, "outputTokens": self.usage.1},
        });
        if !self.stop.is_empty() {
            line["stopReason"] = self.stop.into();
        }
        named(&mut line, id);
        line
    }
}

/// Says which request a line answers.
pub(super) fn named(line: &mut Value, id: Option<&str>) {
    if let Some(id) = id {
        line["id"] = id.into();
    }
}

/// What ended a turn.
pub(super) fn stop_reason(outcome: v1::TurnOutcome) -> &'static str {
    match outcome {
        v1::TurnOutcome::Completed | v1::TurnOutcome::Unspecified => "end_turn",
        v1::TurnOutcome::Failed => "error",
        v1::TurnOutcome::Cancelled => "cancelled",
        v1::TurnOutcome::MaxTurns => "max_turns",
        v1::TurnOutcome::Interrupted => "interrupted",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status;

    #[test]
    fn who_may_try_again_is_told_when_whatever_was_too_much_or_away() {
        for (status, code, after) in [
            (status::exhausted("full"), "RATE_LIMIT_EXCEEDED", json!({"retryAfter": 10})),
            (status::unavailable("away"), "UNAVAILABLE", json!({"retryAfter": 1})),
            (Status::internal("broken"), "INTERNAL_ERROR", Value::Null),
        ] {
            let failure = Failure::from(status);
            let events = failure.line(Form::Events, None, None);
            let block = failure.block();
            assert_eq!((&block["code"], &events["code"]), (&json!(code), &json!(code)));
            assert_eq!((&block["details"], &events["details"]), (&after, &after));
        }
    }
}

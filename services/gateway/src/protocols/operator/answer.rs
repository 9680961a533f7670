//! Responses: results and failures.

use construct_domain::task::{CONTEXT_TOO_LONG, OUTPUT_LIMIT};
use construct_proto::v1;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::{
    quotas::{QuotaStates, seconds},
    status,
};

/// A limit or quota was exceeded.
const RATE_LIMIT: &str = "RATE_LIMIT_EXCEEDED";
/// A dependency is unavailable, or did not respond in time.
const UNAVAILABLE: &str = "UNAVAILABLE";
/// The content is too large.
const TOO_LARGE: &str = "CONTEXT_TOO_LARGE";
/// Default retry delay, in seconds, when a dependency is unavailable.
const DEFAULT_RETRY_SECONDS: u64 = 1;

/// The form of a response.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Form {
    /// Results; each is complete.
    #[default]
    Results,
    /// Events.
    Events,
}

/// An error for the client.
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

    /// The client may retry after so many seconds.
    pub(super) fn too_many(message: impl Into<String>, after: u64) -> Self {
        Self { code: RATE_LIMIT, message: message.into(), details: json!({"retryAfter": after}) }
    }

    pub(super) fn too_large(message: impl Into<String>) -> Self {
        Self { code: TOO_LARGE, message: message.into(), details: Value::Null }
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

    /// The failure of a turn.
    pub(super) fn from_turn(error: &v1::TaskError) -> Self {
        let code = if error.code == CONTEXT_TOO_LONG { TOO_LARGE } else { "PROVIDER_ERROR" };
        Self { code, message: error.message.clone(), details: json!({"code": error.code}) }
    }

    /// As a line of its own, or as a block of a result.
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
        set_id(&mut line, id);
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
        let missing = details
            .resource_info()
            .map(|resource| resource.resource_type.clone())
            .unwrap_or_default();
        let violations = details
            .bad_request()
            .map(|request| request.field_violations.as_slice())
            .unwrap_or_default();
        let wrong = |name: &str| {
            violations.iter().any(|it| it.field == name || it.field == format!("spec.{name}"))
        };
        let code = match status.code() {
            // An invalid id does not exist either.
            Code::NotFound if missing == "agent" => "AGENT_NOT_FOUND",
            Code::InvalidArgument if wrong("agent") => "AGENT_NOT_FOUND",
            Code::NotFound => "SESSION_NOT_FOUND",
            Code::InvalidArgument if wrong("task") => "SESSION_NOT_FOUND",
            Code::InvalidArgument | Code::Unimplemented => "INVALID_REQUEST",
            Code::ResourceExhausted
                if status::reason(&status).as_deref() == Some(status::TOO_LARGE) =>
            {
                TOO_LARGE
            }
            Code::ResourceExhausted => RATE_LIMIT,
            // The protocol has no code for an exceeded deadline: the request may or may not have
            // been executed.
            Code::Unavailable | Code::DeadlineExceeded => UNAVAILABLE,
            Code::FailedPrecondition | Code::Aborted | Code::AlreadyExists => "SESSION_ERROR",
            Code::Unauthenticated | Code::PermissionDenied => "UNAUTHORIZED",
            _ => "INTERNAL_ERROR",
        };
        let mut details = retry_details(&details);
        // A request that exceeded its deadline may have been executed, so no retry is suggested.
        if status.code() == Code::Unavailable && details.is_null() {
            details = json!({"retryAfter": DEFAULT_RETRY_SECONDS});
        }
        Self { code, message: status.message().to_owned(), details }
    }
}

/// The exhausted quota, if any, and the retry delay in seconds.
fn retry_details(details: &ErrorDetails) -> Value {
    let mut retry_details = Map::new();
    if let Some(violation) = details.quota_failure().and_then(|failure| failure.violations.first())
    {
        retry_details.insert("quota".to_owned(), violation.quota_id.clone().into());
        retry_details.insert("limit".to_owned(), violation.quota_value.into());
    }
    if let Some(after) = details.retry_info().and_then(|info| info.retry_delay) {
        retry_details.insert("retryAfter".to_owned(), seconds(after).max(1).into());
    }
    if retry_details.is_empty() { Value::Null } else { retry_details.into() }
}

/// Adds the remaining quotas of a request to a line, by name. Adds nothing where nothing is
/// limited.
pub(super) fn add_quotas(line: &mut Value, metered: &QuotaStates) {
    let mut quotas = Map::new();
    for quota_state in &metered.0 {
        let (remaining, reset) = (quota_state.remaining.max(0), seconds(quota_state.reset));
        let mut quota = json!({"limit": quota_state.limit, "remaining": remaining, "reset": reset});
        if let Some(window) = quota_state.window {
            quota["window"] = window.as_secs().into();
        }
        quotas.insert(quota_state.id.to_owned(), quota);
    }
    if !quotas.is_empty() {
        line["rateLimit"] = quotas.into();
    }
}

/// A `DispatchResult`.
#[derive(Default)]
pub(super) struct Outcome<'a> {
    pub(super) session: &'a str,
    pub(super) agent: &'a str,
    pub(super) content: Vec<Value>,
    pub(super) turns: Vec<Value>,
    /// There are earlier turns.
    pub(super) is_cut: bool,
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
        if self.is_cut {
            line["turnsCut"] = true.into();
        }
        if !self.stop.is_empty() {
            line["stopReason"] = self.stop.into();
        }
        set_id(&mut line, id);
        line
    }
}

/// Adds the id of the request to a line.
pub(super) fn set_id(line: &mut Value, id: Option<&str>) {
    if let Some(id) = id {
        line["id"] = id.into();
    }
}

/// The reason for the end of a turn.
pub(super) fn stop_reason(turn: &v1::TurnCompleted) -> &'static str {
    match turn.outcome() {
        v1::TurnOutcome::Completed | v1::TurnOutcome::Unspecified => "end_turn",
        v1::TurnOutcome::Failed
            if turn.error.as_ref().is_some_and(|error| error.code == OUTPUT_LIMIT) =>
        {
            "max_tokens"
        }
        v1::TurnOutcome::Failed => "error",
        v1::TurnOutcome::Cancelled => "cancelled",
        v1::TurnOutcome::MaxTurns => "max_turns",
        v1::TurnOutcome::Interrupted => "interrupted",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deadline;

    #[test]
    fn retryable_failure_has_a_retry_delay() {
        for (status, code, after) in [
            (status::exhausted("full"), "RATE_LIMIT_EXCEEDED", json!({"retryAfter": 10})),
            (status::unavailable("away"), "UNAVAILABLE", json!({"retryAfter": 1})),
            (Status::unavailable("starting"), "UNAVAILABLE", json!({"retryAfter": 1})),
            (deadline::exceeded(), "UNAVAILABLE", Value::Null),
            (Status::internal("broken"), "INTERNAL_ERROR", Value::Null),
        ] {
            let failure = Failure::from(status);
            let events = failure.line(Form::Events, None, None);
            let block = failure.block();
            assert_eq!((&block["code"], &events["code"]), (&json!(code), &json!(code)));
            assert_eq!((&block["details"], &events["details"]), (&after, &after));
        }
    }

    #[test]
    fn turn_stopped_by_a_limit_has_its_stop_reason() {
        let ended = |outcome: v1::TurnOutcome, code: &str| {
            let error = v1::TaskError { code: code.into(), message: "words".into(), time: None };
            let turn = v1::TurnCompleted {
                outcome: outcome.into(),
                error: Some(error.clone()),
                ..Default::default()
            };
            (stop_reason(&turn), Failure::from_turn(&error).block()["code"].clone())
        };
        for (outcome, code, stop, reported) in [
            (v1::TurnOutcome::Failed, "OUTPUT_LIMIT", "max_tokens", "PROVIDER_ERROR"),
            (v1::TurnOutcome::Failed, "CONTEXT_TOO_LONG", "error", "CONTEXT_TOO_LARGE"),
            (v1::TurnOutcome::Failed, "AUTHENTICATION", "error", "PROVIDER_ERROR"),
            (v1::TurnOutcome::MaxTurns, "MAX_TURNS", "max_turns", "PROVIDER_ERROR"),
        ] {
            assert_eq!(ended(outcome, code), (stop, json!(reported)), "{code}");
        }
    }
}

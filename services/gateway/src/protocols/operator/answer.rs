//! What is answered: results, and what went wrong.

use construct_domain::task::{CONTEXT_TOO_LONG, OUTPUT_LIMIT};
use construct_proto::v1;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::{
    quotas::{Metered, seconds},
    status,
};

/// There was too much of something.
const RATE_LIMIT: &str = "RATE_LIMIT_EXCEEDED";
/// Something that the gateway needs is away, or did not answer in time.
const UNAVAILABLE: &str = "UNAVAILABLE";
/// Something has more in it than there is room for.
const TOO_LARGE: &str = "CONTEXT_TOO_LARGE";
/// After how many seconds another try is welcome, where something is away and nothing else is said.
const SOON: u64 = 1;

/// How a request wants to be answered.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Form {
    /// By results: each says all of it.
    #[default]
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

    /// How a turn of the model failed.
    pub(super) fn of_turn(error: &v1::TaskError) -> Self {
        let code = if error.code == CONTEXT_TOO_LONG { TOO_LARGE } else { "PROVIDER_ERROR" };
        Self { code, message: error.message.clone(), details: json!({"code": error.code}) }
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
            // An id that cannot be one leads nowhere either.
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
            // The protocol has no word for a deadline that has passed: what was asked for may have
            // been done, or not.
            Code::Unavailable | Code::DeadlineExceeded => UNAVAILABLE,
            Code::FailedPrecondition | Code::Aborted | Code::AlreadyExists => "SESSION_ERROR",
            Code::Unauthenticated | Code::PermissionDenied => "UNAUTHORIZED",
            _ => "INTERNAL_ERROR",
        };
        let mut details = further(&details);
        // What has passed its deadline may have been done: nobody is invited to have it done twice.
        if status.code() == Code::Unavailable && details.is_null() {
            details = json!({"retryAfter": SOON});
        }
        Self { code, message: status.message().to_owned(), details }
    }
}

/// Which quota is used up, if it is one, and in how many seconds another try is welcome.
fn further(details: &ErrorDetails) -> Value {
    let mut further = Map::new();
    if let Some(violation) = details.quota_failure().and_then(|failure| failure.violations.first())
    {
        further.insert("quota".to_owned(), violation.quota_id.clone().into());
        further.insert("limit".to_owned(), violation.quota_value.into());
    }
    if let Some(after) = details.retry_info().and_then(|info| info.retry_delay) {
        further.insert("retryAfter".to_owned(), seconds(after).max(1).into());
    }
    if further.is_empty() { Value::Null } else { further.into() }
}

/// Says what is left of the quotas that a request was counted against, by their names; nothing
/// where nothing is limited.
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
#[derive(Default)]
pub(super) struct Outcome<'a> {
    pub(super) session: &'a str,
    pub(super) agent: &'a str,
    pub(super) content: Vec<Value>,
    pub(super) turns: Vec<Value>,
    /// There are earlier turns than these.
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
    fn who_may_try_again_is_told_when_whatever_was_too_much_or_away() {
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
    fn turns_that_end_at_a_limit_say_which_one_in_the_protocols_words() {
        let ended = |outcome: v1::TurnOutcome, code: &str| {
            let error = v1::TaskError { code: code.into(), message: "words".into(), time: None };
            let turn = v1::TurnCompleted {
                outcome: outcome.into(),
                error: Some(error.clone()),
                ..Default::default()
            };
            (stop_reason(&turn), Failure::of_turn(&error).block()["code"].clone())
        };
        for (outcome, code, stop, told) in [
            (v1::TurnOutcome::Failed, "OUTPUT_LIMIT", "max_tokens", "PROVIDER_ERROR"),
            (v1::TurnOutcome::Failed, "CONTEXT_TOO_LONG", "error", "CONTEXT_TOO_LARGE"),
            (v1::TurnOutcome::Failed, "AUTHENTICATION", "error", "PROVIDER_ERROR"),
            (v1::TurnOutcome::MaxTurns, "MAX_TURNS", "max_turns", "PROVIDER_ERROR"),
        ] {
            assert_eq!(ended(outcome, code), (stop, json!(told)), "{code}");
        }
    }
}

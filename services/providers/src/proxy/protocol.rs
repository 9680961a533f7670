//! What the client protocols have in common.

use construct_domain::money::Usage;
use serde::Serialize;
use serde_json::Value;

use super::{
    client_request::ClientRequest,
    partial_answer::{PartialAnswer, PieceChange},
    refusal::Refusal,
};
use crate::vendor::Chunk;

/// A protocol of clients.
pub(crate) trait ClientProtocol: Send + Sync + 'static {
    /// The name of its calls in the ledger.
    const PURPOSE: &'static str;
    type Writer: Writer;

    /// Parses a request. Unknown harmless fields are ignored. A request for something unsupported
    /// that would change the answer is rejected.
    fn read(body: &[u8]) -> Result<ClientRequest, Refusal>;
    /// The body of a complete answer.
    fn answer_body(head: &AnswerHead, answer: &PartialAnswer) -> Value;
    /// The body of an error.
    fn error_body(refusal: &Refusal) -> Value;
    /// The HTTP status of an error.
    fn status(refusal: &Refusal) -> u16 {
        refusal.status()
    }
}

/// Writes one answer as server-sent events.
pub(crate) trait Writer: Send + 'static {
    fn new(head: AnswerHead) -> Self;
    /// A chunk arrived, and made `change` to the answer.
    fn push(
        &mut self,
        chunk: &Chunk,
        change: PieceChange,
        answer: &PartialAnswer,
        out: &mut String,
    );
    /// The answer is complete.
    fn end(&mut self, answer: &PartialAnswer, out: &mut String);
    /// The answer failed.
    fn fail(&mut self, refusal: &Refusal, out: &mut String);
    /// Keeps an idle connection alive.
    fn ping(&self, out: &mut String) {
        out.push_str(": ping\n\n");
    }
}

/// The metadata of an answer.
#[derive(Debug, Clone)]
pub(crate) struct AnswerHead {
    /// The unique id of the answer: 32 hexadecimal digits.
    pub(crate) id: String,
    /// As the client named it.
    pub(crate) model: String,
    /// Seconds since 1970.
    pub(crate) created: i64,
    pub(crate) include_usage: bool,
    /// The provider that the thinking comes from.
    pub(crate) provider_id: String,
}

/// Writes one event.
pub(crate) fn write_event(out: &mut String, name: Option<&str>, data: &impl Serialize) {
    if let Some(name) = name {
        out.push_str("event: ");
        out.push_str(name);
        out.push('\n');
    }
    out.push_str("data: ");
    out.push_str(&to_json(data));
    out.push_str("\n\n");
}

/// Serializes as JSON.
pub(crate) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("texts, numbers and values can be written as JSON")
}

/// All input tokens, cached ones included.
pub(crate) fn total_input_tokens(usage: &Usage) -> i64 {
    usage
        .input_tokens
        .saturating_add(usage.cache_read_tokens)
        .saturating_add(usage.cache_write_tokens)
}

/// The arguments of a call as an object; text when they are none.
pub(crate) fn arguments_value(arguments: &str) -> Value {
    if arguments.trim().is_empty() {
        return serde_json::json!({});
    }
    serde_json::from_str(arguments).unwrap_or_else(|_| Value::String(arguments.to_owned()))
}

/// Whether arguments are complete: those of several calls may arrive interleaved.
pub(crate) fn is_complete_json(arguments: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(arguments).is_ok()
}

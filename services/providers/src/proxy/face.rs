//! What the protocols of clients have in common.

use construct_domain::money::Usage;
use serde::Serialize;
use serde_json::Value;

use super::{
    asked::ClientRequest,
    gather::{PartialAnswer, PieceChange},
    refusal::Refusal,
};
use crate::vendor::Chunk;

/// A protocol that clients speak.
pub(crate) trait ClientProtocol: Send + Sync + 'static {
    /// What its calls are called in the ledger.
    const PURPOSE: &'static str;
    type Writer: Writer;

    /// Reads a request. What is unknown and harmless is ignored; what would change the answer and
    /// cannot be had is refused.
    fn read(body: &[u8]) -> Result<ClientRequest, Refusal>;
    /// A whole answer.
    fn answer_body(head: &AnswerHead, answer: &PartialAnswer) -> Value;
    /// The body that says why there is none.
    fn error_body(refusal: &Refusal) -> Value;
    /// The HTTP status of that.
    fn status(refusal: &Refusal) -> u16 {
        refusal.status()
    }
}

/// Writes one answer as server-sent events.
pub(crate) trait Writer: Send + 'static {
    fn new(head: AnswerHead) -> Self;
    /// A chunk came, and did `change` to the answer.
    fn push(&mut self, chunk: &Chunk, change: PieceChange, answer: &PartialAnswer, out: &mut String);
    /// The answer is whole.
    fn end(&mut self, answer: &PartialAnswer, out: &mut String);
    /// It breaks off.
    fn fail(&mut self, refusal: &Refusal, out: &mut String);
    /// Nothing happens, and the connection shall not be taken for dead.
    fn ping(&self, out: &mut String) {
        out.push_str(": ping\n\n");
    }
}

/// What an answer begins with.
#[derive(Debug, Clone)]
pub(crate) struct AnswerHead {
    /// Tells answers apart: 32 hexadecimal digits.
    pub(crate) id: String,
    /// As the client named it.
    pub(crate) model: String,
    /// Seconds since 1970.
    pub(crate) created: i64,
    pub(crate) include_usage: bool,
    /// Where thinking comes from.
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

/// As JSON.
pub(crate) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("texts, numbers and values can be written as JSON")
}

/// Everything the model read, whether it was in a cache or not.
pub(crate) fn total_input_tokens(usage: &Usage) -> i64 {
    usage
        .input_tokens
        .saturating_add(usage.cache_read_tokens)
        .saturating_add(usage.cache_write_tokens)
}

/// A call's arguments as the object they are; what is not one is left as text.
pub(crate) fn arguments_value(arguments: &str) -> Value {
    if arguments.trim().is_empty() {
        return serde_json::json!({});
    }
    serde_json::from_str(arguments).unwrap_or_else(|_| Value::String(arguments.to_owned()))
}

/// Whether the pieces before the newest are whole: arguments of several calls may come side by
/// side.
pub(crate) fn is_complete_json(arguments: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(arguments).is_ok()
}

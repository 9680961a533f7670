//! The events of a streamed answer.

use std::collections::VecDeque;

use construct_domain::money::Usage;
use construct_proto::mesh::v1::{FailureClass, model_completed::StopReason};
use serde::Deserialize;
use serde_json::Value;

use super::{LIMIT_HEADERS, details::Details, failure_from_body, failure_from_error, pico_usd};
use crate::{
    failure::Failure,
    framing::{self, ServerSentEvents},
    http::{Dialect, LimitHeaders},
    vendor::Chunk,
};

#[derive(Deserialize)]
struct Event {
    /// Strings, but servers differ.
    id: Option<Value>,
    model: Option<Value>,
    choices: Option<Vec<Choice>>,
    usage: Option<WireUsage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Option<Delta>,
    finish_reason: Option<String>,
}

#[derive(Deserialize, Default)]
struct Delta {
    content: Option<Value>,
    /// Visible thinking; servers differ in its name.
    reasoning_content: Option<Value>,
    reasoning: Option<Value>,
    reasoning_details: Option<Vec<Value>>,
    refusal: Option<String>,
    tool_calls: Option<Vec<ToolCall>>,
}

#[derive(Deserialize)]
struct ToolCall {
    index: Option<u32>,
    id: Option<String>,
    function: Option<Function>,
}

#[derive(Deserialize, Default)]
struct Function {
    name: Option<String>,
    /// A string of JSON; some servers send the object itself.
    arguments: Option<Value>,
}

#[derive(Deserialize)]
pub(super) struct WireUsage {
    prompt_tokens: Option<i64>,
    completion_tokens: Option<i64>,
    total_tokens: Option<i64>,
    prompt_tokens_details: Option<PromptDetails>,
    /// DeepSeek's name for the cached part.
    prompt_cache_hit_tokens: Option<i64>,
    completion_tokens_details: Option<CompletionDetails>,
    /// The charge in dollars; only some servers mean that by it.
    cost: Option<Value>,
}

#[derive(Deserialize)]
struct CompletionDetails {
    reasoning_tokens: Option<i64>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<i64>,
    cache_write_tokens: Option<i64>,
}

impl WireUsage {
    /// Converts to our terms, in which each token is counted once: the vendor's prompt includes
    /// cached tokens.
    pub(super) fn usage(&self, reports_cost: bool) -> Usage {
        let prompt = self.prompt_tokens.unwrap_or(0).max(0);
        let completion = self.completion_tokens.unwrap_or(0).max(0);
        let details = self.prompt_tokens_details.as_ref();
        let cached = details.and_then(|details| details.cached_tokens);
        let cached = cached.or(self.prompt_cache_hit_tokens).unwrap_or(0).clamp(0, prompt);
        let written = details
            .and_then(|details| details.cache_write_tokens)
            .unwrap_or(0)
            .clamp(0, prompt - cached);
        // xAI excludes reasoning from the completion, but not from the total nor from the bill.
        let beyond_prompt = self.total_tokens.map_or(0, |total| total.saturating_sub(prompt));
        let output = completion.max(beyond_prompt);
        let cost = self.cost.as_ref().filter(|_| reports_cost).and_then(Value::as_f64);
        let thinking =
            self.completion_tokens_details.as_ref().and_then(|details| details.reasoning_tokens);
        Usage {
            input_tokens: prompt - cached - written,
            output_tokens: output,
            cache_read_tokens: cached,
            cache_write_tokens: written,
            thinking_tokens: thinking.unwrap_or(0).clamp(0, output),
            cost_pico_usd: cost.map_or(0, pico_usd),
        }
    }
}

/// Reads one answer.
#[derive(Default)]
pub(super) struct Wire {
    reports_cost: bool,
    is_named: bool,
    /// The calls so far; the index of a call is its slot.
    calls: Vec<OpenCall>,
    details: Details,
    is_finished: bool,
    is_refused: bool,
    is_done: bool,
}

struct OpenCall {
    /// The vendor's index, where it sends one.
    index: Option<u32>,
    id: String,
}

impl Dialect for Wire {
    type Framing = ServerSentEvents;
    const LIMITS: LimitHeaders = LIMIT_HEADERS;

    fn read(
        &mut self,
        event: &framing::Event,
        chunks: &mut VecDeque<Chunk>,
    ) -> Result<(), Failure> {
        if event.data.trim() == "[DONE]" {
            self.is_done = true;
            return Ok(());
        }
        let event: Event = serde_json::from_str(&event.data).map_err(|error| {
            Failure::transient(format!("the stream holds an event that cannot be read: {error}"))
        })?;
        if let Some(error) = event.error.filter(|error| !error.is_null()) {
            return Err(failure_from_error(None, &error));
        }
        // Some events before the answer name nothing.
        if let (false, Some(Value::String(model))) = (self.is_named, event.model)
            && !model.is_empty()
        {
            self.is_named = true;
            let id = event.id.as_ref().and_then(Value::as_str).unwrap_or_default().to_owned();
            chunks.push_back(Chunk::Named { id, model });
        }
        // Only one choice is requested.
        if let Some(choice) = event.choices.into_iter().flatten().next() {
            self.read_choice(choice, chunks)?;
        }
        if let Some(usage) = event.usage {
            chunks.push_back(Chunk::Usage(usage.usage(self.reports_cost)));
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.is_done
    }

    fn end(&mut self, chunks: &mut VecDeque<Chunk>) -> Result<(), Failure> {
        // Some details follow the calls they belong to, so they are complete only now.
        chunks.extend(self.details.take().map(Chunk::ThinkingData));
        // Not every server sends both; either one completes the answer.
        if self.is_finished || self.is_done {
            return Ok(());
        }
        Err(Failure::transient("the vendor's stream ended before the answer was complete"))
    }

    fn response_failure(&self, status: u16, body: &[u8]) -> Failure {
        failure_from_body(status, body)
    }
}

impl Wire {
    /// `reports_cost`: the cost that the server reports is what it charges.
    pub(super) fn new(reports_cost: bool) -> Self {
        Self { reports_cost, ..Self::default() }
    }

    fn read_choice(&mut self, choice: Choice, chunks: &mut VecDeque<Chunk>) -> Result<(), Failure> {
        let delta = choice.delta.unwrap_or_default();
        let shown =
            delta.reasoning_details.map(|details| self.details.push(details)).unwrap_or_default();
        match delta.reasoning_content.or(delta.reasoning) {
            Some(Value::String(text)) if !text.is_empty() => {
                chunks.push_back(Chunk::Thinking(text))
            }
            // The list repeats the same text.
            _ if !shown.is_empty() => chunks.push_back(Chunk::Thinking(shown)),
            _ => {}
        }
        if let Some(Value::String(text)) = delta.content
            && !text.is_empty()
        {
            chunks.push_back(Chunk::Text(text));
        }
        if let Some(text) = delta.refusal
            && !text.is_empty()
        {
            self.is_refused = true;
            chunks.push_back(Chunk::Text(text));
        }
        for call in delta.tool_calls.unwrap_or_default() {
            self.read_call(call, chunks);
        }
        // Some servers send an empty reason with every piece.
        if let Some(reason) = choice.finish_reason.filter(|reason| !reason.is_empty()) {
            if let Some(class) = abort_class(&reason) {
                return Err(Failure::new(
                    class,
                    format!("the vendor broke the answer off ({reason})"),
                ));
            }
            self.is_finished = true;
            chunks.push_back(Chunk::Stop(if self.is_refused {
                StopReason::Refused
            } else {
                stop_reason(&reason)
            }));
        }
        Ok(())
    }

    fn read_call(&mut self, call: ToolCall, chunks: &mut VecDeque<Chunk>) {
        let function = call.function.unwrap_or_default();
        let id = call.id.unwrap_or_default();
        let slot = match self.slot_of(call.index, &id, function.name.as_deref()) {
            Some(slot) => slot,
            None => {
                self.calls.push(OpenCall { index: call.index, id: id.clone() });
                let slot = self.calls.len() - 1;
                chunks.push_back(Chunk::Call {
                    slot: slot_number(slot),
                    id,
                    name: function.name.unwrap_or_default(),
                });
                slot
            }
        };
        let json = match function.arguments {
            Some(Value::String(json)) => json,
            Some(Value::Null) | None => String::new(),
            Some(object) => object.to_string(),
        };
        if !json.is_empty() {
            chunks.push_back(Chunk::Arguments { slot: slot_number(slot), json });
        }
    }

    /// The call that a piece belongs to; none when it begins a new one. The index decides where
    /// there is one. Otherwise a new id, or a name without id, begins a call.
    fn slot_of(&self, index: Option<u32>, id: &str, name: Option<&str>) -> Option<usize> {
        if index.is_some() {
            let at = self.calls.iter().rposition(|call| call.index == index)?;
            // Some servers give every call the index 0 but an id of its own.
            return (id.is_empty() || self.calls[at].id.is_empty() || self.calls[at].id == id)
                .then_some(at);
        }
        if !id.is_empty() {
            return self.calls.iter().position(|call| call.id == id);
        }
        if name.is_some_and(|name| !name.is_empty()) {
            None
        } else {
            self.calls.len().checked_sub(1)
        }
    }
}

fn slot_number(slot: usize) -> u32 {
    u32::try_from(slot).unwrap_or(u32::MAX)
}

/// Finish reasons of an incomplete answer: DeepSeek's when it is overloaded, and OpenRouter's when
/// the vendor behind it failed.
fn abort_class(reason: &str) -> Option<FailureClass> {
    match reason {
        "insufficient_system_resource" => Some(FailureClass::Overloaded),
        "error" => Some(FailureClass::Transient),
        _ => None,
    }
}

fn stop_reason(reason: &str) -> StopReason {
    match reason {
        "tool_calls" | "function_call" => StopReason::ToolUse,
        "length" => StopReason::MaxTokens,
        "content_filter" => StopReason::Refused,
        _ => StopReason::EndTurn,
    }
}

//! OpenAI's Chat Completions, streaming, and the many servers that are compatible with it (Ollama, DeepSeek, xAI,
//! OpenRouter): what they leave out is tolerated. The wire format stands in this file and nowhere else.

use std::{collections::VecDeque, sync::Arc};

use construct_domain::money::Usage;
use construct_proto::mesh::v1::{FailureClass, model_completed::StopReason};
use futures::stream::BoxStream;
use reqwest::header::{ACCEPT, HeaderValue};
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    failure::{Failure, class_of_status},
    http::{Dialect, Endpoint, Http, class_by_words, plain_body},
    sse,
    transcript::{self, Part, Role, Turn},
    vendor::{Chunk, Request, Tool, Vendor},
};

/// An account with OpenAI, or with something that speaks its protocol.
pub(crate) struct OpenAi {
    http: Http,
    endpoint: Endpoint,
}

impl OpenAi {
    pub(crate) const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";

    pub(crate) fn new(http: Http, endpoint: Endpoint) -> Self {
        Self { http, endpoint }
    }

    /// Whether this is the vendor itself rather than something compatible.
    fn is_original(&self) -> bool {
        self.endpoint
            .base
            .host_str()
            .is_some_and(|host| host == "api.openai.com" || host.ends_with(".openai.azure.com"))
    }
}

impl Vendor for OpenAi {
    fn invoke(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        let post = self.http.post(self.endpoint.join("", "/chat/completions")).map(|post| {
            let post = post
                .header(ACCEPT, HeaderValue::from_static("text/event-stream"))
                .json(&Body::new(&request, self.is_original()));
            match &self.endpoint.key {
                Some(key) => post.bearer_auth(key.expose_secret()),
                None => post,
            }
        });
        self.http.stream(post, Wire::default())
    }
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    messages: Vec<Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Value>,
    stream: bool,
    stream_options: Value,
    /// The vendor's reasoning models refuse `max_tokens`; most compatible servers know nothing else.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_completion_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_k: Option<u32>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    stop: &'a [String],
}

impl<'a> Body<'a> {
    fn new(request: &'a Request, original: bool) -> Self {
        let parameters = &request.parameters;
        let mut messages = Vec::new();
        if !request.system.trim().is_empty() {
            messages.push(json!({"role": "system", "content": request.system}));
        }
        for turn in transcript::turns(&request.messages, !request.tools.is_empty()) {
            push(&mut messages, turn, request.tools.first());
        }
        Self {
            model: &request.model,
            messages,
            tools: request.tools.iter().map(tool).collect(),
            stream: true,
            stream_options: json!({"include_usage": true}),
            max_completion_tokens: original.then_some(request.max_tokens),
            max_tokens: (!original).then_some(request.max_tokens),
            temperature: parameters.temperature,
            top_p: parameters.top_p,
            // Unknown to the vendor itself, which refuses what it doesn't know.
            top_k: parameters.top_k.filter(|_| !original),
            stop: &parameters.stop_sequences,
        }
    }
}

fn tool(tool: &Tool) -> Value {
    json!({"type": "function", "function": {
        "name": tool.name, "description": tool.description, "parameters": tool.schema,
    }})
}

/// A turn becomes one message, or one for each result and one for the text.
fn push(messages: &mut Vec<Value>, turn: Turn, tool: Option<&Tool>) {
    let (name, argument) = tool.map_or(("code_interpreter", "code"), |tool| (&tool.name, &tool.argument));
    let mut texts = Vec::new();
    let mut calls = Vec::new();
    for part in turn.parts {
        match part {
            Part::Text(text) => texts.push(text),
            Part::Call { id, code } => calls.push(json!({"id": id, "type": "function", "function": {
                "name": name, "arguments": json!({argument: code}).to_string(),
            }})),
            Part::Result { id, output, failed } => {
                // The protocol has no mark for a result that is an error.
                let content = if failed { format!("[the script failed]\n{output}") } else { output };
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
            }
        }
    }
    let text = texts.join("\n\n");
    match turn.role {
        Role::User if text.is_empty() => {}
        Role::User => messages.push(json!({"role": "user", "content": text})),
        Role::Assistant if calls.is_empty() => messages.push(json!({"role": "assistant", "content": text})),
        Role::Assistant => {
            let content = if text.is_empty() { Value::Null } else { Value::String(text) };
            messages.push(json!({"role": "assistant", "content": content, "tool_calls": calls}));
        }
    }
}

#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
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
struct WireUsage {
    prompt_tokens: Option<i64>,
    completion_tokens: Option<i64>,
    total_tokens: Option<i64>,
    prompt_tokens_details: Option<PromptDetails>,
    /// DeepSeek's name for the cached part.
    prompt_cache_hit_tokens: Option<i64>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<i64>,
}

impl WireUsage {
    /// In our terms each token is counted once: the vendor's prompt includes what was cached.
    fn tokens(&self) -> Usage {
        let prompt = self.prompt_tokens.unwrap_or(0).max(0);
        let completion = self.completion_tokens.unwrap_or(0).max(0);
        let cached = self.prompt_tokens_details.as_ref().and_then(|details| details.cached_tokens);
        let cached = cached.or(self.prompt_cache_hit_tokens).unwrap_or(0).clamp(0, prompt);
        // xAI leaves reasoning out of the completion, but not out of the total nor out of the bill.
        let beyond_prompt = self.total_tokens.map_or(0, |total| total.saturating_sub(prompt));
        Usage {
            input_tokens: prompt - cached,
            output_tokens: completion.max(beyond_prompt),
            cache_read_tokens: cached,
            ..Usage::default()
        }
    }
}

#[derive(Default)]
struct Wire {
    /// The calls so far; a call's place here is its slot.
    calls: Vec<OpenCall>,
    finished: bool,
    refused: bool,
    done: bool,
}

struct OpenCall {
    /// The vendor's index, where it gives one.
    index: Option<u32>,
    id: String,
}

impl Dialect for Wire {
    fn read(&mut self, event: &sse::Event, chunks: &mut VecDeque<Chunk>) -> Result<(), Failure> {
        if event.data.trim() == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let event: Event = serde_json::from_str(&event.data)
            .map_err(|error| Failure::transient(format!("the stream holds an event that cannot be read: {error}")))?;
        if let Some(error) = event.error.filter(|error| !error.is_null()) {
            return Err(failure(None, &error));
        }
        // Only one answer is asked for.
        if let Some(choice) = event.choices.into_iter().next() {
            self.choice(choice, chunks);
        }
        if let Some(usage) = event.usage {
            chunks.push_back(Chunk::Usage(usage.tokens()));
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.done
    }

    fn end(&mut self, _chunks: &mut VecDeque<Chunk>) -> Result<(), Failure> {
        // Not every server says both; either makes an answer whole.
        if self.finished || self.done {
            return Ok(());
        }
        Err(Failure::transient("the vendor's stream ended before the answer was complete"))
    }

    fn refused(&self, status: u16, body: &[u8]) -> Failure {
        match serde_json::from_slice::<Value>(body) {
            // Some servers send the error bare, some in a list.
            Ok(Value::Object(body)) if body.contains_key("error") => failure(Some(status), &body["error"]),
            Ok(Value::Array(list)) if list.first().is_some_and(|first| first.get("error").is_some()) => {
                failure(Some(status), &list[0]["error"])
            }
            Ok(body) if body["message"].is_string() => failure(Some(status), &body),
            Ok(_) | Err(_) => Failure::new(class_of_status(status), plain_body(status, body)),
        }
    }
}

impl Wire {
    fn choice(&mut self, choice: Choice, chunks: &mut VecDeque<Chunk>) {
        let delta = choice.delta.unwrap_or_default();
        if let Some(Value::String(text)) = delta.content
            && !text.is_empty()
        {
            chunks.push_back(Chunk::Text(text));
        }
        if let Some(text) = delta.refusal
            && !text.is_empty()
        {
            self.refused = true;
            chunks.push_back(Chunk::Text(text));
        }
        for call in delta.tool_calls.unwrap_or_default() {
            self.call(call, chunks);
        }
        if let Some(reason) = choice.finish_reason {
            self.finished = true;
            chunks.push_back(Chunk::Stop(if self.refused { StopReason::Refused } else { stop_reason(&reason) }));
        }
    }

    fn call(&mut self, call: ToolCall, chunks: &mut VecDeque<Chunk>) {
        let function = call.function.unwrap_or_default();
        let id = call.id.unwrap_or_default();
        let slot = match self.slot_of(call.index, &id, function.name.as_deref()) {
            Some(slot) => slot,
            None => {
                self.calls.push(OpenCall { index: call.index, id: id.clone() });
                let slot = self.calls.len() - 1;
                chunks.push_back(Chunk::Call { slot: number(slot), id, name: function.name.unwrap_or_default() });
                slot
            }
        };
        let json = match function.arguments {
            Some(Value::String(json)) => json,
            Some(Value::Null) | None => String::new(),
            Some(object) => object.to_string(),
        };
        if !json.is_empty() {
            chunks.push_back(Chunk::Arguments { slot: number(slot), json });
        }
    }

    /// Which call a piece belongs to; none when it begins a new one. The index says it where there is one; else an
    /// id not seen yet, or a name without id, begins a call.
    fn slot_of(&self, index: Option<u32>, id: &str, name: Option<&str>) -> Option<usize> {
        if index.is_some() {
            let at = self.calls.iter().rposition(|call| call.index == index)?;
            // Some servers give every call the index 0 but an id of its own.
            return (id.is_empty() || self.calls[at].id.is_empty() || self.calls[at].id == id).then_some(at);
        }
        if !id.is_empty() {
            return self.calls.iter().position(|call| call.id == id);
        }
        if name.is_some_and(|name| !name.is_empty()) { None } else { self.calls.len().checked_sub(1) }
    }
}

fn number(slot: usize) -> u32 {
    u32::try_from(slot).unwrap_or(u32::MAX)
}

fn stop_reason(reason: &str) -> StopReason {
    match reason {
        "tool_calls" | "function_call" => StopReason::ToolUse,
        "length" => StopReason::MaxTokens,
        "content_filter" => StopReason::Refused,
        _ => StopReason::EndTurn,
    }
}

/// Classifies the vendor's error: `code` and `type` are its own words, or (OpenRouter) the status of the vendor behind.
fn failure(status: Option<u16>, error: &Value) -> Failure {
    let text = |key: &str| error[key].as_str().unwrap_or_default();
    let message = match error {
        Value::String(message) => message.as_str(),
        _ => text("message"),
    };
    let behind = error["code"].as_u64().and_then(|code| u16::try_from(code).ok()).filter(|code| *code >= 400);
    let class = match (text("code"), text("type")) {
        ("context_length_exceeded" | "string_above_max_length", _) => Some(FailureClass::ContextTooLong),
        ("content_policy_violation" | "content_filter", _) => Some(FailureClass::ContentRefused),
        // No pause helps against an empty account.
        ("insufficient_quota" | "billing_hard_limit_reached" | "invalid_api_key", _) | (_, "insufficient_quota") => {
            Some(FailureClass::Authentication)
        }
        ("rate_limit_exceeded", _) => Some(FailureClass::RateLimited),
        (_, "server_error" | "internal_server_error") => Some(FailureClass::Transient),
        (_, "overloaded_error") => Some(FailureClass::Overloaded),
        _ => None,
    };
    let status = status.filter(|status| *status >= 400).or(behind);
    let by_status = status.map(class_of_status);
    let class = class
        .or_else(|| match by_status {
            None | Some(FailureClass::InvalidRequest) => class_by_words(
                message,
                &[
                    (
                        FailureClass::ContextTooLong,
                        &["maximum context length", "context length", "context window", "prompt is too long"],
                    ),
                    (FailureClass::ContentRefused, &["content policy", "content management policy", "flagged as"]),
                    (FailureClass::RateLimited, &["rate limit"]),
                ],
            ),
            Some(_) => None,
        })
        .or(by_status)
        // An error of a kind we don't know inside a stream that had begun well is the vendor's.
        .unwrap_or(FailureClass::Transient);
    Failure::new(class, if message.is_empty() { "the vendor reported an error without a reason" } else { message })
}

#[cfg(test)]
mod tests;

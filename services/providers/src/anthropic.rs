//! Anthropic's Messages API, streaming. Its wire format stays in this file.

use std::{borrow::Cow, collections::VecDeque, sync::Arc};

use construct_domain::money::Usage;
use construct_proto::{
    mesh::v1::{FailureClass, model_completed::StopReason},
    v1::VendorModel,
};
use futures::{FutureExt as _, future::BoxFuture, stream::BoxStream};
use reqwest::header::{ACCEPT, HeaderValue};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    check,
    failure::{Failure, class_from_status},
    framing::{self, ServerSentEvents},
    http::{Dialect, Endpoint, Http, LimitHeaders, class_from_message, describe_body, key_header},
    transcript::{self, Media, Part, Role, Turn},
    vendor::{Chunk, Effort, Format, Request, Tool, ToolChoice, Vendor},
};

const VERSION: HeaderValue = HeaderValue::from_static("2023-06-01");

/// Of the four cache breakpoints of a request, the tools and the system prompt take two.
const CACHED_USER_TURNS: usize = 2;
/// The largest accepted image, in bytes of base64. For larger ones the vendor reports "image
/// exceeds 5 MB maximum".
const MAX_IMAGE_BASE64_BYTES: usize = 5 << 20;

/// Name prefixes of models that take a thinking budget, as compatible servers do. The list is
/// complete: the vendor dropped the budget.
const BUDGET_MODELS: [&str; 9] = [
    "claude-3",
    "claude-sonnet-4-0",
    "claude-sonnet-4-2",
    "claude-sonnet-4-5",
    "claude-opus-4-0",
    "claude-opus-4-1",
    "claude-opus-4-2",
    "claude-opus-4-5",
    "claude-haiku-4-5",
];
/// The smallest budget that the vendor accepts.
const MIN_BUDGET_TOKENS: u32 = 1_024;

/// The request fields that the vendor accepts in a token count.
const COUNT_FIELDS: [&str; 7] =
    ["model", "system", "tools", "tool_choice", "messages", "thinking", "output_config"];

/// An account at Anthropic, or a server that speaks its protocol.
pub(crate) struct Anthropic {
    http: Http,
    endpoint: Endpoint,
    key: Option<HeaderValue>,
}

impl Anthropic {
    pub(crate) const DEFAULT_BASE_URL: &str = "https://api.anthropic.com";

    pub(crate) fn new(http: Http, endpoint: Endpoint) -> Result<Self, Failure> {
        let key = key_header(endpoint.key.as_ref())?;
        Ok(Self { http, endpoint, key })
    }
}

impl Vendor for Anthropic {
    fn invoke(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        let post = self.http.post(self.endpoint.join("/v1", "/v1/messages")).map(|post| {
            let post = post
                .header("anthropic-version", VERSION)
                .header(ACCEPT, HeaderValue::from_static("text/event-stream"))
                .json(&Body::new(&request));
            match &self.key {
                Some(key) => post.header("x-api-key", key.clone()),
                None => post,
            }
        });
        self.http.stream(post, Wire::default())
    }

    fn count(&self, request: &Request) -> BoxFuture<'static, Result<Option<i64>, Failure>> {
        let mut body = json!(Body::new(request));
        if let Some(body) = body.as_object_mut() {
            body.retain(|name, _| COUNT_FIELDS.contains(&name.as_str()));
        }
        let post =
            self.http.post(self.endpoint.join("/v1", "/v1/messages/count_tokens")).map(|post| {
                let post = post.header("anthropic-version", VERSION).json(&body);
                match &self.key {
                    Some(key) => post.header("x-api-key", key.clone()),
                    None => post,
                }
            });
        let http = self.http.clone();
        async move {
            let answer = http
                .send_json(post, |status, body| Wire::default().response_failure(status, body))
                .await?;
            Ok(answer["input_tokens"].as_i64())
        }
        .boxed()
    }

    fn models(&self) -> BoxFuture<'static, Result<Vec<VendorModel>, Failure>> {
        let mut url = self.endpoint.join("/v1", "/v1/models");
        url.query_pairs_mut().append_pair("limit", "1000");
        let get = self.http.get(url).map(|get| {
            let get = get.header("anthropic-version", VERSION);
            match &self.key {
                Some(key) => get.header("x-api-key", key.clone()),
                None => get,
            }
        });
        let http = self.http.clone();
        async move {
            let answer = http
                .send_json(get, |status, body| Wire::default().response_failure(status, body))
                .await?;
            Ok(check::model_list(&answer["data"], |model| VendorModel {
                name: check::json_text(&model["id"]),
                display_name: check::json_text(&model["display_name"]),
                context_window: check::json_tokens(&model["max_input_tokens"]),
                max_output_tokens: check::json_tokens(&model["max_tokens"]),
            }))
        }
        .boxed()
    }
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    max_tokens: u32,
    stream: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    system: Vec<Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_choice: Option<Value>,
    messages: Vec<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_k: Option<u32>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    stop_sequences: &'a [String],
    #[serde(flatten)]
    thinking: Thinking,
}

/// How much the model should think, and whether that excludes sampling parameters.
#[derive(Serialize, Default)]
pub(crate) struct Thinking {
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_config: Option<Value>,
    /// The vendor rejects temperature and the like beside it.
    #[serde(skip)]
    pub(crate) excludes_sampling: bool,
}

impl Thinking {
    /// For `model`, with any prefix before the vendor's name of it, and this conversation.
    pub(crate) fn for_model(
        effort: Option<Effort>,
        model: &str,
        max_tokens: u32,
        turns: &[Turn],
    ) -> Self {
        let name = model.find("claude-").map_or(model, |at| &model[at..]);
        if !name.starts_with("claude-") || BUDGET_MODELS.iter().any(|known| name.starts_with(known))
        {
            // The budget is part of the answer's tokens, and must leave some for the answer.
            let budget = effort.map_or(0, Effort::budget_tokens).min(max_tokens / 2);
            // These models reject thinking after a call that no thinking precedes, e.g. one of
            // another vendor.
            let thinking = (budget >= MIN_BUDGET_TOKENS
                && !transcript::continues_call_without_thinking(turns))
            .then(|| json!({"type": "enabled", "budget_tokens": budget}));
            return Self { excludes_sampling: thinking.is_some(), thinking, output_config: None };
        }
        // The first models without a budget still accept sampling parameters, and always show their
        // thinking.
        let is_early = name.contains("-4-6");
        // The others reject a request without thinking; those that can do without don't think
        // unless asked.
        let thinking = effort.filter(|&effort| effort != Effort::Off).map(|_| {
            if is_early {
                json!({"type": "adaptive"})
            } else {
                json!({"type": "adaptive", "display": "summarized"})
            }
        });
        let word =
            effort.map(|effort| if effort == Effort::Off { Effort::Low } else { effort }.name());
        Self {
            excludes_sampling: !is_early || thinking.is_some(),
            thinking,
            output_config: word.map(|word| json!({"effort": word})),
        }
    }
}

impl<'a> Body<'a> {
    fn new(request: &'a Request) -> Self {
        let parameters = &request.parameters;
        let strict_format = strict_format(request);
        let prompt = if strict_format.is_some() {
            Cow::Borrowed(&*request.system)
        } else {
            request.system_with_format()
        };
        let mut system = Vec::new();
        if !prompt.trim().is_empty() {
            system.push(json!({"type": "text", "text": prompt}));
        }
        let mut tools: Vec<Value> = request.tools.iter().map(tool).collect();
        let turns = request.turns();
        let mut messages: Vec<Value> = turns.iter().map(message).collect();
        set_cache_breakpoint(system.last_mut());
        set_cache_breakpoint(tools.last_mut());
        messages
            .iter_mut()
            .rev()
            .filter(|message| message["role"] == "user")
            .take(CACHED_USER_TURNS)
            .for_each(|message| {
                set_cache_breakpoint(
                    message["content"].as_array_mut().and_then(|content| content.last_mut()),
                )
            });
        let mut thinking =
            Thinking::for_model(request.effort(), &request.model, request.max_tokens, &turns);
        if let Some(format) = strict_format {
            thinking.output_config.get_or_insert_with(|| json!({}))["format"] = format;
        }
        let allows_sampling = !thinking.excludes_sampling;
        let allows_top_p =
            allows_temperature_with_top_p(&request.model) || parameters.temperature.is_none();
        Self {
            model: &request.model,
            max_tokens: request.max_tokens,
            stream: true,
            system,
            tool_choice: (!tools.is_empty()).then(|| tool_choice(request)).flatten(),
            tools,
            messages,
            // Our scale ends at 2, this vendor's at 1.
            temperature: parameters
                .temperature
                .filter(|_| allows_sampling)
                .map(|temperature| temperature.min(1.0)),
            top_p: parameters.top_p.filter(|_| allows_sampling && allows_top_p),
            top_k: parameters.top_k.filter(|_| allows_sampling),
            stop_sequences: &parameters.stop_sequences,
            thinking,
        }
    }
}

/// Whether `model` accepts a temperature beside `top_p`. The vendor's current models don't, and it
/// recommends to set only the temperature.
pub(crate) fn allows_temperature_with_top_p(model: &str) -> bool {
    !model.contains("claude-")
}

/// Marks the end of a prefix that the vendor may cache.
fn set_cache_breakpoint(block: Option<&mut Value>) {
    if let Some(block) = block {
        block["cache_control"] = json!({"type": "ephemeral"});
    }
}

/// The format of the answer in the vendor's form, where it can be guaranteed. Only some models can,
/// for a subset of JSON Schema.
fn strict_format(request: &Request) -> Option<Value> {
    let Format::Schema { schema, strict: true, .. } = &request.format else { return None };
    let name = request.model.find("claude-").map(|at| &request.model[at..])?;
    let is_early = BUDGET_MODELS.iter().any(|known| name.starts_with(known));
    let can = !is_early || name.contains("-4-5") || name.contains("opus-4-1");
    can.then(|| json!({"type": "json_schema", "schema": schema}))
}

fn tool_choice(request: &Request) -> Option<Value> {
    let mut choice = match &request.choice {
        ToolChoice::Auto if request.one_call => json!({"type": "auto"}),
        ToolChoice::Auto => return None,
        ToolChoice::Never => return Some(json!({"type": "none"})),
        ToolChoice::Any => json!({"type": "any"}),
        ToolChoice::Named(name) => json!({"type": "tool", "name": name}),
    };
    if request.one_call {
        choice["disable_parallel_tool_use"] = json!(true);
    }
    Some(choice)
}

fn tool(tool: &Tool) -> Value {
    json!({"name": tool.name, "description": tool.description, "input_schema": tool.schema})
}

fn message(turn: &Turn) -> Value {
    let role = match turn.role {
        Role::User => "user",
        Role::Assistant => "assistant",
    };
    let last_output = turn.parts.iter().rposition(|part| !matches!(part, Part::Thinking { .. }));
    // Thinking must be followed by its output.
    let parts = &turn.parts[..last_output.map_or(0, |last| last + 1)];
    let content: Vec<Value> = parts.iter().map(block).collect();
    json!({"role": role, "content": content})
}

/// What a block of thinking contains besides its text.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ThinkingProof {
    Signature(String),
    /// Thinking that is not visible at all.
    Redacted(String),
}

fn block(part: &Part) -> Value {
    match part {
        Part::Text(text) => json!({"type": "text", "text": text}),
        Part::Media(media) => media_block(media),
        Part::Thinking { text, data } => match serde_json::from_str(data) {
            Ok(ThinkingProof::Redacted(data)) => json!({"type": "redacted_thinking", "data": data}),
            Ok(ThinkingProof::Signature(signature)) => {
                json!({"type": "thinking", "thinking": text, "signature": signature})
            }
            // Compatible servers don't sign thinking.
            Err(_) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        },
        Part::Call { id, name, arguments } => {
            json!({"type": "tool_use", "id": id, "name": name, "input": arguments})
        }
        Part::Result { id, output, failed, .. } => {
            let mut result = json!({"type": "tool_result", "tool_use_id": id, "content": output});
            if *failed {
                result["is_error"] = json!(true);
            }
            result
        }
    }
}

fn media_block(media: &Media) -> Value {
    if media.is_image() && media.base64.len() > MAX_IMAGE_BASE64_BYTES {
        return json!({"type": "text", "text": media.omission_notice()});
    }
    let source = json!({"type": "base64", "media_type": media.media_type, "data": media.base64});
    if media.is_image() {
        return json!({"type": "image", "source": source});
    }
    let mut document = json!({"type": "document", "source": source});
    if !media.name.is_empty() {
        document["title"] = json!(media.name);
    }
    document
}

/// The events of the stream. Unknown events, blocks and deltas are skipped, as the vendor asks.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event {
    MessageStart {
        message: MessageStart,
    },
    ContentBlockStart {
        index: u32,
        content_block: ContentBlock,
    },
    ContentBlockDelta {
        index: u32,
        delta: BlockDelta,
    },
    ContentBlockStop {
        index: u32,
    },
    MessageDelta {
        delta: MessageDelta,
        usage: Option<WireUsage>,
    },
    MessageStop,
    Error {
        error: WireError,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct MessageStart {
    id: Option<String>,
    model: Option<String>,
    usage: Option<WireUsage>,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ContentBlock {
    Text {
        #[serde(default)]
        text: String,
    },
    ToolUse {
        #[serde(default)]
        id: String,
        name: String,
        #[serde(default)]
        input: Value,
    },
    Thinking {
        #[serde(default)]
        thinking: String,
        #[serde(default)]
        signature: String,
    },
    RedactedThinking {
        data: String,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum BlockDelta {
    TextDelta {
        text: String,
    },
    InputJsonDelta {
        partial_json: String,
    },
    ThinkingDelta {
        thinking: String,
    },
    SignatureDelta {
        signature: String,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct MessageDelta {
    stop_reason: Option<String>,
}

#[derive(Deserialize)]
struct WireUsage {
    input_tokens: Option<i64>,
    output_tokens: Option<i64>,
    cache_read_input_tokens: Option<i64>,
    cache_creation_input_tokens: Option<i64>,
    output_tokens_details: Option<OutputDetails>,
}

#[derive(Deserialize)]
struct OutputDetails {
    thinking_tokens: Option<i64>,
}

#[derive(Deserialize)]
struct ErrorBody {
    error: WireError,
}

#[derive(Deserialize)]
struct WireError {
    #[serde(rename = "type", default)]
    kind: String,
    #[serde(default)]
    message: String,
}

#[derive(Default)]
struct Wire {
    usage: Usage,
    /// The indexes of blocks that are tool calls: server-side tools also send `input_json_delta`.
    calls: Vec<u32>,
    /// The open block of thinking, and its signature so far.
    thinking: Option<(u32, String)>,
    stopped: bool,
    complete: bool,
}

impl Dialect for Wire {
    type Framing = ServerSentEvents;
    const LIMITS: LimitHeaders = &[
        ("anthropic-ratelimit-requests-remaining", "anthropic-ratelimit-requests-reset"),
        ("anthropic-ratelimit-tokens-remaining", "anthropic-ratelimit-tokens-reset"),
        ("anthropic-ratelimit-input-tokens-remaining", "anthropic-ratelimit-input-tokens-reset"),
        ("anthropic-ratelimit-output-tokens-remaining", "anthropic-ratelimit-output-tokens-reset"),
    ];

    fn read(
        &mut self,
        event: &framing::Event,
        chunks: &mut VecDeque<Chunk>,
    ) -> Result<(), Failure> {
        let event: Event = serde_json::from_str(&event.data).map_err(|error| {
            Failure::transient(format!("the stream holds an event that cannot be read: {error}"))
        })?;
        match event {
            Event::MessageStart { message: MessageStart { id, model, usage } } => {
                chunks.push_back(Chunk::Named {
                    id: id.unwrap_or_default(),
                    model: model.unwrap_or_default(),
                });
                self.update_usage(usage, chunks);
            }
            Event::ContentBlockStart { index, content_block } => match content_block {
                ContentBlock::Text { text } if !text.is_empty() => {
                    chunks.push_back(Chunk::Text(text))
                }
                ContentBlock::ToolUse { id, name, input } => {
                    self.calls.push(index);
                    chunks.push_back(Chunk::Call { slot: index, id, name });
                    // The vendor sends `{}` here and the input in deltas; some compatible servers
                    // send the complete input here.
                    if input.as_object().is_some_and(|input| !input.is_empty()) {
                        chunks.push_back(Chunk::Arguments { slot: index, json: input.to_string() });
                    }
                }
                ContentBlock::Thinking { thinking, signature } => {
                    self.thinking = Some((index, signature));
                    if !thinking.is_empty() {
                        chunks.push_back(Chunk::Thinking(thinking));
                    }
                }
                ContentBlock::RedactedThinking { data } => {
                    chunks.push_back(Chunk::ThinkingData(encode_proof(&ThinkingProof::Redacted(
                        data,
                    ))));
                }
                ContentBlock::Text { .. } | ContentBlock::Other => {}
            },
            Event::ContentBlockDelta { index, delta } => match delta {
                BlockDelta::TextDelta { text } if !text.is_empty() => {
                    chunks.push_back(Chunk::Text(text))
                }
                BlockDelta::InputJsonDelta { partial_json }
                    if !partial_json.is_empty() && self.calls.contains(&index) =>
                {
                    chunks.push_back(Chunk::Arguments { slot: index, json: partial_json });
                }
                BlockDelta::ThinkingDelta { thinking } if !thinking.is_empty() => {
                    chunks.push_back(Chunk::Thinking(thinking));
                }
                BlockDelta::SignatureDelta { signature } => {
                    if let Some((_, whole)) =
                        self.thinking.as_mut().filter(|(open, _)| *open == index)
                    {
                        whole.push_str(&signature);
                    }
                }
                BlockDelta::TextDelta { .. }
                | BlockDelta::InputJsonDelta { .. }
                | BlockDelta::ThinkingDelta { .. }
                | BlockDelta::Other => {}
            },
            Event::ContentBlockStop { index } => {
                if let Some((_, signature)) = self.thinking.take_if(|(open, _)| *open == index)
                    && !signature.is_empty()
                {
                    chunks.push_back(Chunk::ThinkingData(encode_proof(&ThinkingProof::Signature(
                        signature,
                    ))));
                }
            }
            Event::MessageDelta { delta, usage } => {
                self.update_usage(usage, chunks);
                if let Some(reason) = delta.stop_reason {
                    self.stopped = true;
                    chunks.push_back(Chunk::Stop(stop_reason(&reason)));
                }
            }
            Event::MessageStop => self.complete = true,
            Event::Error { error } => return Err(failure(None, &error)),
            Event::Other => {}
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.complete
    }

    fn end(&mut self, _chunks: &mut VecDeque<Chunk>) -> Result<(), Failure> {
        // With the stop reason the answer is complete; `message_stop` adds nothing.
        if self.complete || self.stopped {
            return Ok(());
        }
        Err(Failure::transient("the vendor's stream ended before the answer was complete"))
    }

    fn response_failure(&self, status: u16, body: &[u8]) -> Failure {
        match serde_json::from_slice::<ErrorBody>(body) {
            Ok(body) => failure(Some(status), &body.error),
            Err(_) => Failure::new(class_from_status(status), describe_body(status, body)),
        }
    }
}

impl Wire {
    /// Later numbers replace earlier ones; missing ones stay.
    fn update_usage(&mut self, usage: Option<WireUsage>, chunks: &mut VecDeque<Chunk>) {
        let Some(usage) = usage else { return };
        let set =
            |counted: &mut i64, given: Option<i64>| *counted = given.unwrap_or(*counted).max(0);
        set(&mut self.usage.input_tokens, usage.input_tokens);
        set(&mut self.usage.output_tokens, usage.output_tokens);
        set(&mut self.usage.cache_read_tokens, usage.cache_read_input_tokens);
        set(&mut self.usage.cache_write_tokens, usage.cache_creation_input_tokens);
        set(
            &mut self.usage.thinking_tokens,
            usage.output_tokens_details.and_then(|details| details.thinking_tokens),
        );
        chunks.push_back(Chunk::Usage(self.usage));
    }
}

fn encode_proof(proof: &ThinkingProof) -> String {
    json!(proof).to_string()
}

fn stop_reason(reason: &str) -> StopReason {
    match reason {
        "tool_use" => StopReason::ToolUse,
        "max_tokens" | "model_context_window_exceeded" => StopReason::MaxTokens,
        "stop_sequence" => StopReason::StopSequence,
        "refusal" => StopReason::Refused,
        _ => StopReason::EndTurn,
    }
}

fn failure(status: Option<u16>, error: &WireError) -> Failure {
    let class = match error.kind.as_str() {
        "authentication_error" | "permission_error" | "billing_error" => {
            FailureClass::Authentication
        }
        "rate_limit_error" => FailureClass::RateLimited,
        "overloaded_error" => FailureClass::Overloaded,
        "api_error" | "timeout_error" => FailureClass::Transient,
        "request_too_large" => FailureClass::ContextTooLong,
        "invalid_request_error" | "not_found_error" => class_from_message(
            &error.message,
            &[
                (
                    FailureClass::ContextTooLong,
                    &["prompt is too long", "exceed context limit", "context window"],
                ),
                (FailureClass::Authentication, &["credit balance is too low"]),
                (FailureClass::ContentRefused, &["content filtering policy"]),
            ],
        )
        .unwrap_or(FailureClass::InvalidRequest),
        // An unknown error within a stream is the vendor's fault.
        _ => status.map_or(FailureClass::Transient, class_from_status),
    };
    let message = match (error.message.as_str(), error.kind.as_str()) {
        ("", "") => "the vendor reported an error without a reason",
        ("", kind) => kind,
        (message, _) => message,
    };
    Failure::new(class, message)
}

#[cfg(test)]
mod tests;

//! OpenAI's Chat Completions, streaming, and the many compatible servers. What these leave out is
//! tolerated, and where they differ there is a [`Flavor`]. The wire format stays in this module. It
//! is documented at
//! <https://platform.openai.com/docs/api-reference/chat/create>.

mod details;
mod errors;
mod events;

use std::{borrow::Cow, sync::Arc};

use construct_domain::money::Usage;
use construct_proto::v1::VendorModel;
use futures::{
    FutureExt as _,
    future::BoxFuture,
    stream::{self, BoxStream, StreamExt as _},
};
use reqwest::header::{ACCEPT, HeaderValue};
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub(crate) use self::errors::{failure_from_body, failure_from_error};
use self::events::Wire;
use crate::{
    check, embedding,
    failure::Failure,
    http::{Endpoint, Http, LimitHeaders},
    transcript::{Media, Part, Role, Turn},
    vendor::{Chunk, Effort, EmbedRequest, Format, Request, Tool, ToolChoice, Vendor},
};

/// Of the four breakpoints of a request, the tools and the system prompt take two.
const CACHED_USER_TURNS: usize = 2;

/// An account at OpenAI, or a server that speaks its protocol.
pub(crate) struct OpenAi {
    http: Http,
    endpoint: Endpoint,
    flavor: &'static Flavor,
}

impl OpenAi {
    pub(crate) const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";

    pub(crate) fn new(http: Http, endpoint: Endpoint, flavor: &'static Flavor) -> Self {
        Self { http, endpoint, flavor }
    }
}

impl Vendor for OpenAi {
    fn invoke(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        let post = self.http.post(self.endpoint.join("", "/chat/completions")).map(|post| {
            let post = post
                .header(ACCEPT, HeaderValue::from_static("text/event-stream"))
                .json(&Body::new(&request, self.flavor));
            match &self.endpoint.key {
                Some(key) => post.bearer_auth(key.expose_secret()),
                None => post,
            }
        });
        self.http.stream(post, Wire::new(self.flavor.reports_cost))
    }

    fn embed(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        embed(&self.http, &self.endpoint, &request, self.flavor.reports_cost)
    }

    fn models(&self) -> BoxFuture<'static, Result<Vec<VendorModel>, Failure>> {
        models(&self.http, &self.endpoint)
    }

    fn check(&self) -> BoxFuture<'static, Result<(), Failure>> {
        let asked = get_json(&self.http, &self.endpoint, self.flavor.check_path);
        async { asked.await.map(drop) }.boxed()
    }
}

/// Embeds texts: <https://platform.openai.com/docs/api-reference/embeddings/create>.
pub(crate) fn embed(
    http: &Http,
    endpoint: &Endpoint,
    request: &Request,
    reports_cost: bool,
) -> BoxStream<'static, Result<Chunk, Failure>> {
    let Some(EmbedRequest { texts, dimensions }) = &request.embed else {
        return stream::empty().boxed();
    };
    let wanted = texts.len();
    // Numbers and not base64: every server supports them.
    let mut body = json!({"model": request.model, "input": texts, "encoding_format": "float"});
    if let Some(dimensions) = dimensions {
        body["dimensions"] = json!(dimensions);
    }
    let post = http.post(endpoint.join("", "/embeddings")).map(|post| {
        let post = post.json(&body);
        match &endpoint.key {
            Some(key) => post.bearer_auth(key.expose_secret()),
            None => post,
        }
    });
    let http = http.clone();
    embedding::vector_chunks(async move {
        let mut answer: EmbedResponse =
            http.send_large_json(post, LIMIT_HEADERS, failure_from_body).await?;
        embedding::check_vector_count(wanted, answer.data.len())?;
        answer.data.sort_by_key(|embedding| embedding.index);
        let used = answer.usage.map(|usage| Usage {
            input_tokens: usage.prompt_tokens.max(0),
            cost_pico_usd: usage
                .cost
                .filter(|_| reports_cost)
                .and_then(|cost| cost.as_f64())
                .map_or(0, pico_usd),
            ..Usage::default()
        });
        let used = used.filter(|used| !used.is_zero());
        Ok((answer.data.into_iter().map(|embedding| embedding.embedding).collect(), used))
    })
}

#[derive(Deserialize)]
struct EmbedResponse {
    data: Vec<Embedding>,
    usage: Option<EmbedUsage>,
}

#[derive(Deserialize)]
struct Embedding {
    #[serde(default)]
    index: usize,
    embedding: Vec<f32>,
}

#[derive(Deserialize)]
struct EmbedUsage {
    #[serde(default)]
    prompt_tokens: i64,
    /// As in answers.
    cost: Option<Value>,
}

/// Lists the models. The vendor itself reports only names; compatible servers report more, each in
/// its own form.
pub(crate) fn models(
    http: &Http,
    endpoint: &Endpoint,
) -> BoxFuture<'static, Result<Vec<VendorModel>, Failure>> {
    let asked = get_json(http, endpoint, "/models");
    async {
        let answer = asked.await?;
        Ok(check::model_list(&answer["data"], |model| {
            let windows = ["context_length", "context_window", "max_model_len"]
                .map(|name| check::json_tokens(&model[name]));
            let longest =
                [&model["top_provider"]["max_completion_tokens"], &model["max_completion_tokens"]];
            VendorModel {
                name: check::json_text(&model["id"]),
                display_name: check::json_text(&model["name"]),
                context_window: windows.into_iter().max().unwrap_or_default(),
                max_output_tokens: longest
                    .map(check::json_tokens)
                    .into_iter()
                    .max()
                    .unwrap_or_default(),
            }
        }))
    }
    .boxed()
}

fn get_json(
    http: &Http,
    endpoint: &Endpoint,
    path: &str,
) -> impl Future<Output = Result<Value, Failure>> + Send + use<> {
    let get = http.get(endpoint.join("", path)).map(|get| match &endpoint.key {
        Some(key) => get.bearer_auth(key.expose_secret()),
        None => get,
    });
    let http = http.clone();
    async move { http.send_json(get, failure_from_body).await }
}

/// Converts a reported cost from dollars.
fn pico_usd(dollars: f64) -> i64 {
    // Whole dollars times 10^12 fit the type up to nine million. Beyond that, and for a value that
    // is no number, the cast saturates.
    (dollars.max(0.0) * 1e12).round() as i64
}

/// The limit headers of the vendor, and of many compatible servers.
pub(crate) const LIMIT_HEADERS: LimitHeaders = &[
    ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    ("x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
];

/// The differences between servers that speak this protocol.
pub(crate) struct Flavor {
    /// The field with the maximum of answer tokens. The vendor's own reasoning models reject
    /// `max_tokens`; many servers know nothing else.
    pub(crate) max_tokens_field: &'static str,
    /// Whether `top_k` is supported. The vendor itself rejects unknown fields.
    pub(crate) top_k: bool,
    pub(crate) images: bool,
    /// Whether PDF documents are supported.
    pub(crate) documents: bool,
    /// Whether JSON Schema is supported. Otherwise the schema becomes part of the prompt.
    pub(crate) json_schemas: bool,
    pub(crate) thinking_replay: ThinkingReplay,
    /// Whether the model behind a name needs explicit cache breakpoints.
    pub(crate) needs_breakpoints: fn(&str) -> bool,
    /// Whether the cost that it reports is what it charges.
    pub(crate) reports_cost: bool,
    /// Whether a request may have sampling parameters and stop sequences.
    pub(crate) allows_sampling: fn(&Request) -> bool,
    /// The fields that say how much to think.
    pub(crate) effort: fn(Effort, &str) -> Value,
    /// The path of the cheapest request that needs a valid key.
    pub(crate) check_path: &'static str,
}

/// The thinking that a server wants back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ThinkingReplay {
    /// None.
    Never,
    /// As `reasoning_content`, with the calls it led to.
    WithCalls,
    /// As `reasoning_content`, with every call: an empty one for a call of another vendor.
    WithEveryCall,
    /// As the list `reasoning_details`, unchanged.
    Details,
}

const OPENAI: Flavor = Flavor {
    max_tokens_field: "max_completion_tokens",
    top_k: false,
    images: true,
    documents: true,
    json_schemas: true,
    thinking_replay: ThinkingReplay::Never,
    needs_breakpoints: |_| false,
    reports_cost: false,
    allows_sampling: |request| !uses_reasoning(request),
    effort: |wanted, model| json!({"reasoning_effort": effort_name(wanted, model)}),
    check_path: "/models",
};

const COMPATIBLE: Flavor = Flavor {
    max_tokens_field: "max_tokens",
    top_k: true,
    images: true,
    documents: false,
    json_schemas: true,
    thinking_replay: ThinkingReplay::WithCalls,
    needs_breakpoints: |_| false,
    reports_cost: false,
    allows_sampling: |_| true,
    effort: |wanted, _| json!({"reasoning_effort": wanted.name()}),
    check_path: "/models",
};

/// The flavor of an address: OpenAI itself, or a compatible server.
pub(crate) fn flavor(endpoint: &Endpoint) -> &'static Flavor {
    let is_openai = |host: &str| host == "api.openai.com" || host.ends_with(".openai.azure.com");
    if endpoint.base.host_str().is_some_and(is_openai) { &OPENAI } else { &COMPATIBLE }
}

/// The vendor's name of an effort for `model`: that of the least effort has changed twice.
pub(crate) fn effort_name(effort: Effort, model: &str) -> &'static str {
    match effort {
        Effort::Off if model.starts_with('o') => "low",
        Effort::Off if model == "gpt-5" || model.starts_with("gpt-5-") => "minimal",
        effort => effort.name(),
    }
}

/// Whether the request uses reasoning: by the name of the model, or because it sets an effort.
pub(crate) fn uses_reasoning(request: &Request) -> bool {
    is_reasoning_model(&request.model) || request.effort().is_some()
}

/// Whether the vendor's `model` is a reasoning model, by its name.
pub(crate) fn is_reasoning_model(model: &str) -> bool {
    let numbered =
        model.strip_prefix('o').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    numbered
        || (model.starts_with("gpt-5") && !model.contains("-chat"))
        || model.starts_with("codex-")
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    messages: Vec<Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_choice: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parallel_tool_calls: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_format: Option<Value>,
    stream: bool,
    stream_options: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_k: Option<u32>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    stop: &'a [String],
    /// The maximum of answer tokens and the effort, whose field names differ.
    #[serde(flatten)]
    extra: Value,
}

impl<'a> Body<'a> {
    fn new(request: &'a Request, flavor: &Flavor) -> Self {
        let parameters = &request.parameters;
        let mut messages = Vec::new();
        let system = if flavor.json_schemas {
            Cow::Borrowed(&*request.system)
        } else {
            request.system_with_format()
        };
        if !system.trim().is_empty() {
            messages.push(json!({"role": "system", "content": system}));
        }
        let needs_breakpoints = (flavor.needs_breakpoints)(&request.model);
        let mut marked = Vec::new();
        if needs_breakpoints && !messages.is_empty() {
            marked.push(0);
        }
        let mut of_users = Vec::new();
        for turn in request.turns() {
            let (role, before) = (turn.role, messages.len());
            push_turn(&mut messages, turn, flavor);
            if needs_breakpoints && role == Role::User && messages.len() > before {
                of_users.push(messages.len() - 1);
            }
        }
        marked.extend(of_users.into_iter().rev().take(CACHED_USER_TURNS));
        marked.into_iter().for_each(|at| set_cache_breakpoint(&mut messages[at]));
        let mut tools: Vec<Value> = request.tools.iter().map(tool).collect();
        if let Some(last) = tools.last_mut().filter(|_| needs_breakpoints) {
            last["cache_control"] = breakpoint();
        }
        let allows_sampling = (flavor.allows_sampling)(request);
        let mut extra = request
            .effort()
            .map_or_else(|| json!({}), |effort| (flavor.effort)(effort, &request.model));
        extra[flavor.max_tokens_field] = json!(request.max_tokens);
        Self {
            model: &request.model,
            messages,
            tools,
            tool_choice: tool_choice(&request.choice).filter(|_| !request.tools.is_empty()),
            parallel_tool_calls: (request.one_call && !request.tools.is_empty()).then_some(false),
            response_format: response_format(&request.format, flavor),
            stream: true,
            stream_options: json!({"include_usage": true}),
            temperature: parameters.temperature.filter(|_| allows_sampling),
            top_p: parameters.top_p.filter(|_| allows_sampling),
            top_k: parameters.top_k.filter(|_| flavor.top_k && allows_sampling),
            stop: if allows_sampling { &parameters.stop_sequences } else { &[] },
            extra,
        }
    }
}

fn breakpoint() -> Value {
    json!({"type": "ephemeral"})
}

/// Marks the last text of this message as the end of a prefix that may be cached.
fn set_cache_breakpoint(message: &mut Value) {
    if let Value::String(text) = &mut message["content"] {
        let text = std::mem::take(text);
        message["content"] = json!([{"type": "text", "text": text}]);
    }
    let parts = message["content"].as_array_mut().into_iter().flatten();
    if let Some(text) = parts.rev().find(|part| part["type"] == "text") {
        text["cache_control"] = breakpoint();
    }
}

fn tool(tool: &Tool) -> Value {
    json!({"type": "function", "function": {
        "name": tool.name, "description": tool.description, "parameters": tool.schema,
    }})
}

fn tool_choice(choice: &ToolChoice) -> Option<Value> {
    Some(match choice {
        ToolChoice::Auto => return None,
        ToolChoice::Never => json!("none"),
        ToolChoice::Any => json!("required"),
        ToolChoice::Named(name) => json!({"type": "function", "function": {"name": name}}),
    })
}

fn response_format(format: &Format, flavor: &Flavor) -> Option<Value> {
    Some(match format {
        Format::Text => return None,
        Format::Schema { .. } if !flavor.json_schemas => json!({"type": "json_object"}),
        Format::Json => json!({"type": "json_object"}),
        Format::Schema { name, schema, strict } => {
            json!({"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": strict}})
        }
    })
}

/// A turn becomes one message, or one for each result and one for its text and media.
fn push_turn(messages: &mut Vec<Value>, turn: Turn, flavor: &Flavor) {
    let mut texts = Vec::new();
    let mut media = Vec::new();
    let mut calls = Vec::new();
    let mut thinking = TurnThinking::default();
    for part in turn.parts {
        match part {
            Part::Text(text) => texts.push(text),
            Part::Media(shown) => match media_part(&shown, flavor) {
                Some(content) => media.push(content),
                None => texts.push(shown.omission_notice()),
            },
            Part::Thinking { text, data } => thinking.add(text, &data),
            Part::Call { id, name, arguments } => {
                calls.push(json!({"id": id, "type": "function", "function": {
                    "name": name, "arguments": arguments.to_string(),
                }}))
            }
            Part::Result { id, output, failed, .. } => {
                // The protocol has no mark for failed results.
                let content =
                    if failed { format!("[the script failed]\n{output}") } else { output };
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
            }
        }
    }
    let text = texts.join("\n\n");
    match turn.role {
        Role::User if text.is_empty() && media.is_empty() => {}
        Role::User if media.is_empty() => messages.push(json!({"role": "user", "content": text})),
        Role::User => {
            if !text.is_empty() {
                media.push(json!({"type": "text", "text": text}));
            }
            messages.push(json!({"role": "user", "content": media}));
        }
        Role::Assistant => {
            let content = if text.is_empty() { Value::Null } else { Value::String(text) };
            let mut message = json!({"role": "assistant", "content": content});
            if !calls.is_empty() {
                message["tool_calls"] = json!(calls);
            }
            thinking.write(&mut message, flavor.thinking_replay);
            messages.push(message);
        }
    }
}

fn media_part(media: &Media, flavor: &Flavor) -> Option<Value> {
    if media.is_image() {
        return flavor
            .images
            .then(|| json!({"type": "image_url", "image_url": {"url": media.data_url()}}));
    }
    let name = if media.name.is_empty() { "file.pdf" } else { &media.name };
    let file = json!({"filename": name, "file_data": media.data_url()});
    (flavor.documents && media.is_pdf()).then(|| json!({"type": "file", "file": file}))
}

/// The thinking of an assistant's turn.
#[derive(Default)]
struct TurnThinking {
    text: String,
    details: Vec<Value>,
}

impl TurnThinking {
    fn add(&mut self, text: String, data: &str) {
        self.text.push_str(&text);
        if let Ok(Value::Array(details)) = serde_json::from_str(data) {
            self.details.extend(details);
        }
    }

    fn write(self, message: &mut Value, replay: ThinkingReplay) {
        let calls = message.get("tool_calls").is_some();
        match replay {
            ThinkingReplay::WithCalls if calls && !self.text.is_empty() => {
                message["reasoning_content"] = json!(self.text)
            }
            ThinkingReplay::WithEveryCall if calls => {
                message["reasoning_content"] = json!(self.text)
            }
            ThinkingReplay::Details if !self.details.is_empty() => {
                message["reasoning_details"] = json!(self.details)
            }
            ThinkingReplay::Never
            | ThinkingReplay::WithCalls
            | ThinkingReplay::WithEveryCall
            | ThinkingReplay::Details => {}
        }
    }
}

#[cfg(test)]
mod tests;

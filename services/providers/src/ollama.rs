//! Ollama's own API (`/api/chat`). Its wire format stays in this file. It is documented at
//! <https://docs.ollama.com/api/chat>.
//!
//! Its OpenAI-compatible API would do but for one thing: it cannot set the size of the context.
//! What exceeds the server's small default is silently dropped from the beginning of the
//! conversation.

use std::{collections::VecDeque, sync::Arc};

use construct_domain::money::Usage;
use construct_proto::{
    mesh::v1::{FailureClass, model_completed::StopReason},
    v1::VendorModel,
};
use futures::{
    FutureExt as _,
    future::{BoxFuture, ready},
    stream::{self, BoxStream, StreamExt as _},
};
use secrecy::ExposeSecret as _;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    answer, check, embedding,
    failure::{Failure, class_from_status},
    framing::{Event, Lines},
    http::{Dialect, Endpoint, Http, class_from_message, describe_body},
    transcript::{Part, Role, Turn},
    vendor::{Chunk, Effort, EmbedRequest, Format, Request, Tool, ToolChoice, Vendor},
};

/// The smallest requested context, in tokens.
const MIN_CONTEXT_TOKENS: u32 = 8_192;

/// A server.
pub(crate) struct Ollama {
    http: Http,
    endpoint: Endpoint,
}

impl Ollama {
    pub(crate) const DEFAULT_BASE_URL: &str = "http://localhost:11434";

    pub(crate) fn new(http: Http, endpoint: Endpoint) -> Self {
        Self { http, endpoint }
    }
}

impl Vendor for Ollama {
    fn invoke(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        if matches!(request.choice, ToolChoice::Any | ToolChoice::Named(_)) {
            let words = "this model's vendor cannot be told that a tool must be called";
            return stream::once(ready(Err(Failure::new(FailureClass::InvalidRequest, words))))
                .boxed();
        }
        // Users know the address of the OpenAI-compatible API.
        let post = self.http.post(self.endpoint.join("/v1", "/api/chat")).map(|post| {
            let post = post.json(&body(&request));
            match &self.endpoint.key {
                Some(key) => post.bearer_auth(key.expose_secret()),
                None => post,
            }
        });
        self.http.stream(post, Wire::default())
    }

    fn embed(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        let Some(EmbedRequest { texts, dimensions }) = &request.embed else {
            return stream::empty().boxed();
        };
        let wanted = texts.len();
        // A text that is too long is an error, as with every vendor, and not truncated.
        let mut body = json!({"model": request.model, "input": texts, "truncate": false});
        if let Some(dimensions) = dimensions {
            body["dimensions"] = json!(dimensions);
        }
        let post = self.http.post(self.endpoint.join("/v1", "/api/embed")).map(|post| {
            let post = post.json(&body);
            match &self.endpoint.key {
                Some(key) => post.bearer_auth(key.expose_secret()),
                None => post,
            }
        });
        let http = self.http.clone();
        embedding::vector_chunks(async move {
            let refused = |status, body: &[u8]| Wire::default().response_failure(status, body);
            let answer: EmbedResponse = http.send_large_json(post, Wire::LIMITS, refused).await?;
            embedding::check_vector_count(wanted, answer.embeddings.len())?;
            Ok((answer.embeddings, answer.prompt_eval_count.and_then(embedding::input_usage)))
        })
    }

    fn models(&self) -> BoxFuture<'static, Result<Vec<VendorModel>, Failure>> {
        let get = self.http.get(self.endpoint.join("/v1", "/api/tags")).map(|get| {
            match &self.endpoint.key {
                Some(key) => get.bearer_auth(key.expose_secret()),
                None => get,
            }
        });
        let http = self.http.clone();
        async move {
            let answer = http
                .send_json(get, |status, body| Wire::default().response_failure(status, body))
                .await?;
            // The context size would need one more request per model.
            Ok(check::model_list(&answer["models"], |model| VendorModel {
                name: check::json_text(&model["name"]),
                ..VendorModel::default()
            }))
        }
        .boxed()
    }
}

#[derive(Deserialize)]
struct EmbedResponse {
    embeddings: Vec<Vec<f32>>,
    prompt_eval_count: Option<i64>,
}

fn body(request: &Request) -> Value {
    let mut messages = Vec::new();
    if !request.system.trim().is_empty() {
        messages.push(json!({"role": "system", "content": request.system}));
    }
    for turn in request.turns() {
        push_turn(&mut messages, &turn);
    }
    let mut body = json!({"model": request.model, "messages": messages, "stream": true, "options": options(request)});
    // Calls of earlier turns need no definition here.
    if !request.tools.is_empty() && request.choice != ToolChoice::Never {
        body["tools"] = request.tools.iter().map(tool).collect();
    }
    match &request.format {
        Format::Text => {}
        Format::Json => body["format"] = json!("json"),
        Format::Schema { schema, .. } => body["format"] = schema.clone(),
    }
    if let Some(effort) = request.effort() {
        body["think"] = match effort {
            Effort::Off => json!(false),
            // Only this model has levels.
            effort if request.model.contains("gpt-oss") => json!(effort.name()),
            _ => json!(true),
        };
    }
    body
}

fn options(request: &Request) -> Value {
    let parameters = &request.parameters;
    let mut options = Map::new();
    options.insert("num_ctx".to_owned(), json!(context_tokens(request)));
    options.insert("num_predict".to_owned(), json!(request.max_tokens));
    for (name, value) in [
        ("temperature", parameters.temperature.map(Value::from)),
        ("top_p", parameters.top_p.map(Value::from)),
        ("top_k", parameters.top_k.map(Value::from)),
    ] {
        options.extend(value.map(|value| (name.to_owned(), value)));
    }
    if !parameters.stop_sequences.is_empty() {
        options.insert("stop".to_owned(), json!(parameters.stop_sequences));
    }
    Value::Object(options)
}

/// The size of the requested context: the conversation and its answer. Its memory is proportional,
/// and the server reloads the model whenever the size changes. So it is no larger than needed, and
/// grows by doubling.
fn context_tokens(request: &Request) -> u32 {
    // Tokens of scripts and of most languages are shorter than the rule of thumb says.
    let read = u32::try_from(answer::estimate_tokens(request.input_chars())).unwrap_or(u32::MAX);
    let needed =
        read.saturating_add(read / 2).saturating_add(request.max_tokens).max(MIN_CONTEXT_TOKENS);
    let room = needed.checked_next_power_of_two().unwrap_or(u32::MAX);
    if request.context_window == 0 { room } else { room.min(request.context_window) }
}

fn tool(tool: &Tool) -> Value {
    json!({"type": "function", "function": {
        "name": tool.name, "description": tool.description, "parameters": tool.schema,
    }})
}

/// A turn becomes one message, or one for each result and one for its text and images.
fn push_turn(messages: &mut Vec<Value>, turn: &Turn) {
    let (mut texts, mut images, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    let mut thoughts = String::new();
    for part in &turn.parts {
        match part {
            Part::Text(text) => texts.push(text.clone()),
            Part::Media(media) if media.is_image() => images.push(media.base64.clone()),
            Part::Media(media) => texts.push(media.omission_notice()),
            Part::Thinking { text, .. } => thoughts.push_str(text),
            Part::Call { name, arguments, .. } => {
                calls.push(json!({"function": {"name": name, "arguments": arguments}}));
            }
            Part::Result { name, output, failed, .. } => {
                // The protocol has no mark for failed results, and pairs calls with results by
                // their order.
                let content =
                    if *failed { format!("[the script failed]\n{output}") } else { output.clone() };
                messages.push(json!({"role": "tool", "tool_name": name, "content": content}));
            }
        }
    }
    if texts.is_empty() && images.is_empty() && calls.is_empty() {
        return;
    }
    let role = match turn.role {
        Role::User => "user",
        Role::Assistant => "assistant",
    };
    let mut message = json!({"role": role, "content": texts.join("\n\n")});
    for (field, values) in
        [("images", images.into_iter().map(Value::String).collect()), ("tool_calls", calls)]
    {
        let values: Vec<Value> = values;
        if !values.is_empty() {
            message[field] = Value::Array(values);
        }
    }
    if !thoughts.is_empty() {
        message["thinking"] = json!(thoughts);
    }
    messages.push(message);
}

#[derive(Deserialize)]
struct Line {
    model: Option<String>,
    message: Option<Message>,
    #[serde(default)]
    done: bool,
    done_reason: Option<String>,
    prompt_eval_count: Option<i64>,
    eval_count: Option<i64>,
    error: Option<String>,
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    content: String,
    thinking: Option<String>,
    tool_calls: Option<Vec<ToolCall>>,
}

#[derive(Deserialize)]
struct ToolCall {
    #[serde(default)]
    id: String,
    function: Function,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    #[serde(default)]
    arguments: Value,
}

#[derive(Default)]
struct Wire {
    is_named: bool,
    calls: u32,
    is_done: bool,
}

impl Dialect for Wire {
    type Framing = Lines;

    fn read(&mut self, event: &Event, chunks: &mut VecDeque<Chunk>) -> Result<(), Failure> {
        let line: Line = serde_json::from_str(&event.data).map_err(|error| {
            Failure::transient(format!("the stream holds a line that cannot be read: {error}"))
        })?;
        if let Some(error) = line.error {
            return Err(failure(None, &error));
        }
        if let Some(model) = line.model.filter(|_| !self.is_named) {
            self.is_named = true;
            chunks.push_back(Chunk::Named { id: String::new(), model });
        }
        if let Some(message) = line.message {
            chunks.extend(message.thinking.filter(|text| !text.is_empty()).map(Chunk::Thinking));
            if !message.content.is_empty() {
                chunks.push_back(Chunk::Text(message.content));
            }
            for call in message.tool_calls.into_iter().flatten() {
                let slot = self.calls;
                self.calls += 1;
                chunks.push_back(Chunk::Call { slot, id: call.id, name: call.function.name });
                let json = match call.function.arguments {
                    Value::Null => "{}".to_owned(),
                    arguments => arguments.to_string(),
                };
                chunks.push_back(Chunk::Arguments { slot, json });
            }
        }
        if line.done {
            self.is_done = true;
            if line.prompt_eval_count.is_some() || line.eval_count.is_some() {
                chunks.push_back(Chunk::Usage(Usage {
                    input_tokens: line.prompt_eval_count.unwrap_or(0).max(0),
                    output_tokens: line.eval_count.unwrap_or(0).max(0),
                    ..Usage::default()
                }));
            }
            let cut = line.done_reason.as_deref() == Some("length");
            chunks.push_back(Chunk::Stop(if cut {
                StopReason::MaxTokens
            } else {
                StopReason::EndTurn
            }));
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.is_done
    }

    fn end(&mut self, _chunks: &mut VecDeque<Chunk>) -> Result<(), Failure> {
        if self.is_done {
            return Ok(());
        }
        Err(Failure::transient("the server's stream ended before the answer was complete"))
    }

    fn response_failure(&self, status: u16, body: &[u8]) -> Failure {
        match serde_json::from_slice::<Line>(body).ok().and_then(|line| line.error) {
            Some(error) => failure(Some(status), &error),
            None => Failure::new(class_from_status(status), describe_body(status, body)),
        }
    }
}

fn failure(status: Option<u16>, error: &str) -> Failure {
    let by_status = status.filter(|status| *status >= 400).map(class_from_status);
    let class = match by_status {
        None | Some(FailureClass::InvalidRequest) => class_from_message(
            error,
            &[
                (
                    FailureClass::ContextTooLong,
                    &["context length", "context window", "prompt is too long"],
                ),
                (FailureClass::ContentRefused, &["content policy", "content filtering"]),
                (FailureClass::Overloaded, &["server busy", "maximum pending requests"]),
            ],
        ),
        Some(_) => None,
    };
    let class = class.or(by_status).unwrap_or(FailureClass::Transient);
    if error.contains("does not support tools") {
        // A frequent mistake with local models; the message names the fix.
        return Failure::new(
            class,
            format!("{error}: say so in the model (`tool_calling: false`)"),
        );
    }
    Failure::new(
        class,
        if error.is_empty() { "the server reported an error without a reason" } else { error },
    )
}

#[cfg(test)]
mod tests;

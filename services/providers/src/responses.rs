//! OpenAI's Responses API, streaming and without state at the vendor: thinking comes encrypted and
//! is sent back with the conversation. Its wire format stays in this file. It is documented at
//! <https://platform.openai.com/docs/api-reference/responses> and
//! <https://platform.openai.com/docs/guides/reasoning>.

use std::{collections::VecDeque, sync::Arc};

use construct_domain::money::Usage;
use construct_proto::{mesh::v1::model_completed::StopReason, v1::VendorModel};
use futures::{FutureExt as _, future::BoxFuture, stream::BoxStream};
use reqwest::header::{ACCEPT, HeaderValue};
use secrecy::ExposeSecret as _;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    check,
    failure::Failure,
    framing::{Event, ServerSentEvents},
    http::{Dialect, Endpoint, Http, LimitHeaders},
    openai,
    transcript::{Media, Part, Role, Turn},
    vendor::{Chunk, Format, Request, Tool, ToolChoice, Vendor},
};

/// The request fields that the vendor accepts in a token count.
const COUNT_FIELDS: [&str; 8] = [
    "model",
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning",
    "text",
];

/// An account at OpenAI, or a server that speaks this protocol.
pub(crate) struct Responses {
    http: Http,
    endpoint: Endpoint,
}

impl Responses {
    pub(crate) fn new(http: Http, endpoint: Endpoint) -> Self {
        Self { http, endpoint }
    }
}

impl Vendor for Responses {
    fn invoke(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        let post = self.http.post(self.endpoint.join("", "/responses")).map(|post| {
            let post = post
                .header(ACCEPT, HeaderValue::from_static("text/event-stream"))
                .json(&body(&request));
            match &self.endpoint.key {
                Some(key) => post.bearer_auth(key.expose_secret()),
                None => post,
            }
        });
        self.http.stream(post, Wire::default())
    }

    fn count(&self, request: &Request) -> BoxFuture<'static, Result<Option<i64>, Failure>> {
        let mut body = body(request);
        if let Some(body) = body.as_object_mut() {
            body.retain(|name, _| COUNT_FIELDS.contains(&name.as_str()));
        }
        let post = self.http.post(self.endpoint.join("", "/responses/input_tokens")).map(|post| {
            let post = post.json(&body);
            match &self.endpoint.key {
                Some(key) => post.bearer_auth(key.expose_secret()),
                None => post,
            }
        });
        let http = self.http.clone();
        async move {
            let answer = http.send_json(post, openai::failure_from_body).await?;
            Ok(answer["input_tokens"].as_i64())
        }
        .boxed()
    }

    fn embed(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        openai::embed(&self.http, &self.endpoint, &request, false)
    }

    fn models(&self) -> BoxFuture<'static, Result<Vec<VendorModel>, Failure>> {
        openai::models(&self.http, &self.endpoint)
    }
}

fn body(request: &Request) -> Value {
    let uses_reasoning = openai::uses_reasoning(request);
    let mut input = Vec::new();
    for mut turn in request.turns() {
        // The thinking may be that of another model of the account; a model without reasoning
        // rejects it.
        turn.parts.retain(|part| uses_reasoning || !matches!(part, Part::Thinking { .. }));
        push_turn(&mut input, &turn);
    }
    let mut body = json!({
        "model": request.model,
        "input": input,
        "stream": true,
        // The vendor stores nothing: the transcript is the source of truth.
        "store": false,
        "max_output_tokens": request.max_tokens,
    });
    if !request.system.trim().is_empty() {
        body["instructions"] = json!(request.system);
    }
    if !request.tools.is_empty() {
        body["tools"] = request.tools.iter().map(tool).collect();
        if request.one_call {
            body["parallel_tool_calls"] = json!(false);
        }
        match &request.choice {
            ToolChoice::Auto => {}
            ToolChoice::Never => body["tool_choice"] = json!("none"),
            ToolChoice::Any => body["tool_choice"] = json!("required"),
            ToolChoice::Named(name) => {
                body["tool_choice"] = json!({"type": "function", "name": name})
            }
        }
    }
    match &request.format {
        Format::Text => {}
        Format::Json => body["text"] = json!({"format": {"type": "json_object"}}),
        Format::Schema { name, schema, strict } => {
            body["text"] = json!({"format": {"type": "json_schema", "name": name, "schema": schema, "strict": strict}});
        }
    }
    if uses_reasoning {
        // Models without reasoning reject this, and reasoning models reject sampling parameters.
        body["include"] = json!(["reasoning.encrypted_content"]);
        if let Some(effort) = request.effort() {
            body["reasoning"] =
                json!({"effort": openai::effort_name(effort, &request.model), "summary": "auto"});
        }
    } else {
        let parameters = &request.parameters;
        for (name, value) in [("temperature", parameters.temperature), ("top_p", parameters.top_p)]
        {
            if let Some(value) = value {
                body[name] = json!(value);
            }
        }
    }
    body
}

fn tool(tool: &Tool) -> Value {
    json!({"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.schema,
        "strict": false})
}

/// A turn becomes one item for each call, result and piece of thinking, and one for the content
/// between them.
fn push_turn(input: &mut Vec<Value>, turn: &Turn) {
    // Thinking must be followed by its output.
    let last_output = turn.parts.iter().rposition(|part| !matches!(part, Part::Thinking { .. }));
    let mut shown: Vec<Value> = Vec::new();
    for part in &turn.parts[..last_output.map_or(0, |last| last + 1)] {
        match part {
            Part::Text(text) if turn.role == Role::User => shown.push(json!({"type": "input_text", "text": text})),
            Part::Text(text) => input.push(json!({"role": "assistant", "content": text})),
            Part::Media(media) => shown.push(media_part(media)),
            Part::Thinking { data, .. } => input.extend(serde_json::from_str::<Value>(data)),
            Part::Call { id, name, arguments } => input.push(json!({
                "type": "function_call", "call_id": id, "name": name, "arguments": arguments.to_string(),
            })),
            Part::Result { id, output, failed, .. } => {
                // The protocol has no mark for failed results.
                let output = if *failed { format!("[the script failed]\n{output}") } else { output.clone() };
                input.push(json!({"type": "function_call_output", "call_id": id, "output": output}));
            }
        }
    }
    if !shown.is_empty() {
        input.push(json!({"role": "user", "content": shown}));
    }
}

fn media_part(media: &Media) -> Value {
    if media.is_image() {
        return json!({"type": "input_image", "image_url": media.data_url()});
    }
    let name = if media.name.is_empty() { "file.pdf" } else { &media.name };
    json!({"type": "input_file", "filename": name, "file_data": media.data_url()})
}

/// The events of the stream; others are skipped.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum WireEvent {
    #[serde(rename = "response.created")]
    Created {
        /// All of its fields are optional, so none of them can be invalid.
        #[serde(default)]
        response: Value,
    },
    #[serde(rename = "response.output_item.added")]
    Added {
        #[serde(default)]
        output_index: u32,
        item: Item,
    },
    #[serde(rename = "response.output_item.done")]
    Done {
        #[serde(default)]
        output_index: u32,
        item: Value,
    },
    #[serde(rename = "response.output_text.delta")]
    Text {
        #[serde(default)]
        output_index: u32,
        delta: String,
    },
    #[serde(rename = "response.refusal.delta")]
    Refusal {
        #[serde(default)]
        output_index: u32,
        delta: String,
    },
    #[serde(rename = "response.function_call_arguments.delta")]
    Arguments {
        #[serde(default)]
        output_index: u32,
        delta: String,
    },
    #[serde(rename = "response.reasoning_summary_part.added")]
    SummaryPart {
        #[serde(default)]
        summary_index: u32,
    },
    #[serde(
        rename = "response.reasoning_summary_text.delta",
        alias = "response.reasoning_text.delta"
    )]
    Thought { delta: String },
    #[serde(rename = "response.completed")]
    Completed { response: Response },
    #[serde(rename = "response.incomplete")]
    Incomplete { response: Response },
    #[serde(rename = "response.failed")]
    Failed { response: Response },
    #[serde(rename = "error")]
    Error(Value),
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Item {
    FunctionCall {
        #[serde(default)]
        call_id: String,
        name: String,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Response {
    usage: Option<WireUsage>,
    error: Option<Value>,
    incomplete_details: Option<Incomplete>,
}

#[derive(Deserialize)]
struct Incomplete {
    #[serde(default)]
    reason: String,
}

#[derive(Deserialize)]
struct WireUsage {
    #[serde(default)]
    input_tokens: i64,
    #[serde(default)]
    output_tokens: i64,
    input_tokens_details: Option<InputDetails>,
    output_tokens_details: Option<OutputDetails>,
}

#[derive(Deserialize)]
struct OutputDetails {
    #[serde(default)]
    reasoning_tokens: i64,
}

#[derive(Deserialize)]
struct InputDetails {
    #[serde(default)]
    cached_tokens: i64,
}

impl WireUsage {
    /// Converts to our terms, in which each token is counted once: the vendor's input includes
    /// cached tokens.
    fn usage(&self) -> Usage {
        let (input, output) = (self.input_tokens.max(0), self.output_tokens.max(0));
        let cached = self
            .input_tokens_details
            .as_ref()
            .map_or(0, |details| details.cached_tokens.clamp(0, input));
        Usage {
            input_tokens: input - cached,
            output_tokens: output,
            cache_read_tokens: cached,
            thinking_tokens: self
                .output_tokens_details
                .as_ref()
                .map_or(0, |details| details.reasoning_tokens.clamp(0, output)),
            ..Usage::default()
        }
    }
}

#[derive(Default)]
struct Wire {
    /// Items whose text or arguments arrived in deltas; those of others are read when the item is
    /// done.
    streamed: Vec<u32>,
    is_refused: bool,
    is_complete: bool,
}

impl Dialect for Wire {
    type Framing = ServerSentEvents;
    const LIMITS: LimitHeaders = openai::LIMIT_HEADERS;

    fn read(&mut self, event: &Event, chunks: &mut VecDeque<Chunk>) -> Result<(), Failure> {
        if event.data.trim() == "[DONE]" {
            // Some compatible servers send it as well.
            return Ok(());
        }
        let event: WireEvent = serde_json::from_str(&event.data).map_err(|error| {
            Failure::transient(format!("the stream holds an event that cannot be read: {error}"))
        })?;
        match event {
            WireEvent::Created { response } => {
                let [id, model] = ["id", "model"].map(|name| check::json_text(&response[name]));
                chunks.push_back(Chunk::Named { id, model });
            }
            WireEvent::Added { output_index, item: Item::FunctionCall { call_id, name } } => {
                chunks.push_back(Chunk::Call { slot: output_index, id: call_id, name });
            }
            WireEvent::Done { output_index, item } => self.finish_item(output_index, &item, chunks),
            WireEvent::Text { output_index, delta } => self.push_text(output_index, delta, chunks),
            WireEvent::Refusal { output_index, delta } => {
                self.is_refused = true;
                self.push_text(output_index, delta, chunks);
            }
            WireEvent::Arguments { output_index, delta } => {
                self.mark_streamed(output_index);
                if !delta.is_empty() {
                    chunks.push_back(Chunk::Arguments { slot: output_index, json: delta });
                }
            }
            WireEvent::SummaryPart { summary_index } if summary_index > 0 => {
                chunks.push_back(Chunk::Thinking("\n\n".to_owned()));
            }
            WireEvent::Thought { delta } if !delta.is_empty() => {
                chunks.push_back(Chunk::Thinking(delta))
            }
            WireEvent::Completed { response } => {
                self.complete_with(&response, StopReason::EndTurn, chunks)
            }
            WireEvent::Incomplete { response } => {
                let reason =
                    response.incomplete_details.as_ref().map(|details| details.reason.as_str());
                let stop = if reason == Some("content_filter") {
                    StopReason::Refused
                } else {
                    StopReason::MaxTokens
                };
                self.complete_with(&response, stop, chunks);
            }
            WireEvent::Failed { response } => {
                if let Some(usage) = &response.usage {
                    chunks.push_back(Chunk::Usage(usage.usage()));
                }
                return Err(openai::failure_from_error(None, &response.error.unwrap_or_default()));
            }
            WireEvent::Error(error) => {
                let inner = if error["error"].is_object() { &error["error"] } else { &error };
                return Err(openai::failure_from_error(None, inner));
            }
            WireEvent::Added { item: Item::Other, .. }
            | WireEvent::SummaryPart { .. }
            | WireEvent::Thought { .. }
            | WireEvent::Other => {}
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.is_complete
    }

    fn end(&mut self, _chunks: &mut VecDeque<Chunk>) -> Result<(), Failure> {
        if self.is_complete {
            return Ok(());
        }
        Err(Failure::transient("the vendor's stream ended before the answer was complete"))
    }

    fn response_failure(&self, status: u16, body: &[u8]) -> Failure {
        openai::failure_from_body(status, body)
    }
}

impl Wire {
    fn push_text(&mut self, output_index: u32, text: String, chunks: &mut VecDeque<Chunk>) {
        self.mark_streamed(output_index);
        if !text.is_empty() {
            chunks.push_back(Chunk::Text(text));
        }
    }

    fn mark_streamed(&mut self, output_index: u32) {
        if !self.streamed.contains(&output_index) {
            self.streamed.push(output_index);
        }
    }

    /// An item is complete: reads what did not arrive in deltas.
    fn finish_item(&mut self, output_index: u32, item: &Value, chunks: &mut VecDeque<Chunk>) {
        let streamed = self.streamed.contains(&output_index);
        match item["type"].as_str() {
            Some("reasoning") if item["encrypted_content"].is_string() => {
                let kept = json!({
                    "type": "reasoning", "id": item["id"], "summary": item["summary"],
                    "encrypted_content": item["encrypted_content"],
                });
                chunks.push_back(Chunk::ThinkingData(kept.to_string()));
            }
            Some("function_call") if !streamed => {
                if let Some(arguments) = item["arguments"].as_str() {
                    chunks.push_back(Chunk::Arguments {
                        slot: output_index,
                        json: arguments.to_owned(),
                    });
                }
            }
            Some("message") if !streamed => {
                for part in item["content"].as_array().into_iter().flatten() {
                    let text =
                        part["text"].as_str().or(part["refusal"].as_str()).unwrap_or_default();
                    self.is_refused |= part["type"] == "refusal";
                    if !text.is_empty() {
                        chunks.push_back(Chunk::Text(text.to_owned()));
                    }
                }
            }
            _ => {}
        }
    }

    fn complete_with(
        &mut self,
        response: &Response,
        stop: StopReason,
        chunks: &mut VecDeque<Chunk>,
    ) {
        self.is_complete = true;
        if let Some(usage) = &response.usage {
            chunks.push_back(Chunk::Usage(usage.usage()));
        }
        chunks.push_back(Chunk::Stop(if self.is_refused { StopReason::Refused } else { stop }));
    }
}

#[cfg(test)]
mod tests;

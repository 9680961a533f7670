//! AWS Bedrock (`ConverseStream`): models of many vendors behind one API. Its wire format stays in
//! this file. It is documented at
//! <https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_ConverseStream.html>.

mod credentials;
mod signature;

use std::{collections::VecDeque, sync::Arc};

use construct_domain::money::Usage;
use construct_proto::{
    mesh::v1::{FailureClass, model_completed::StopReason},
    v1::VendorModel,
};
use futures::{FutureExt as _, future::BoxFuture, stream::BoxStream};
use jiff::Timestamp;
use reqwest::{
    RequestBuilder, Url,
    header::{ACCEPT, CONTENT_TYPE, HeaderValue},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use self::credentials::{Credentials, region};
use crate::{
    anthropic::{self, Thinking},
    check,
    failure::{Failure, class_from_status},
    framing::{Event, EventStream},
    http::{Dialect, Endpoint, Http, class_from_message, describe_body},
    transcript::{Media, Part, Role, Turn},
    vendor::{Chunk, Request, Tool, ToolChoice, Vendor},
};

/// Of the four cache points of a request, the tools and the system prompt take two.
const CACHED_USER_TURNS: usize = 2;
/// The largest accepted image and document, in bytes of base64: of 3.75 MB and 4.5 MB
/// (<https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_Message.html>).
const MAX_IMAGE_BASE64_BYTES: usize = 3_750_000 / 3 * 4;
const MAX_DOCUMENT_BASE64_BYTES: usize = 4_500_000 / 3 * 4;
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// An account at AWS, in one region.
pub(crate) struct Bedrock {
    http: Http,
    endpoint: Endpoint,
    region: String,
    credentials: Credentials,
}

impl Bedrock {
    pub(crate) fn new(http: Http, mut endpoint: Endpoint) -> Result<Self, Failure> {
        let region = region(&endpoint.base)?;
        let credentials = Credentials::parse(endpoint.key.as_ref())?;
        // The query may name the region, and is not part of the address of requests.
        endpoint.base.set_query(None);
        Ok(Self { http, endpoint, region, credentials })
    }

    fn converse_request(&self, request: &Request) -> Result<RequestBuilder, Failure> {
        if request.choice == ToolChoice::Never && !request.tools.is_empty() {
            let words = "this model's vendor cannot be told that no tool may be called: leave the tools out";
            return Err(Failure::new(FailureClass::InvalidRequest, words));
        }
        let accepted = HeaderValue::from_static("application/vnd.amazon.eventstream");
        Ok(self
            .signed_post(self.url(&request.model, "converse-stream"), &body(request))?
            .header(ACCEPT, accepted))
    }

    fn signed_post(&self, url: Url, body: &Value) -> Result<RequestBuilder, Failure> {
        // The signature covers exactly these bytes.
        let body = serde_json::to_vec(body).map_err(|error| {
            Failure::internal(format!("the request cannot be written: {error}"))
        })?;
        let headers =
            self.credentials.headers("POST", &url, &self.region, &body, Timestamp::now())?;
        Ok(self.http.post(url)?.header(CONTENT_TYPE, JSON).headers(headers).body(body))
    }

    /// Another host than the runtime lists the models.
    fn list_request(&self) -> Result<RequestBuilder, Failure> {
        let mut url = self.endpoint.join("", "/foundation-models");
        if let Some(host) = url.host_str().and_then(|host| host.strip_prefix("bedrock-runtime")) {
            let host = format!("bedrock{host}");
            url.set_host(Some(&host))
                .map_err(|error| Failure::configuration(format!("the base URL: {error}")))?;
        }
        let headers = self.credentials.headers("GET", &url, &self.region, b"", Timestamp::now())?;
        Ok(self.http.get(url)?.header(CONTENT_TYPE, JSON).headers(headers))
    }

    /// A model may have a path as its name (an ARN), whose separators must be escaped.
    fn url(&self, model: &str, what: &str) -> Url {
        self.endpoint.join("", &format!("/model/{}/{what}", signature::percent_encode(model)))
    }
}

impl Vendor for Bedrock {
    fn invoke(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        self.http.stream(self.converse_request(&request), Wire::default())
    }

    fn count(&self, request: &Request) -> BoxFuture<'static, Result<Option<i64>, Failure>> {
        let mut converse = body(request);
        if let Some(converse) = converse.as_object_mut() {
            converse.remove("inferenceConfig");
        }
        let body = json!({"input": {"converse": converse}});
        let (http, post) =
            (self.http.clone(), self.signed_post(self.url(&request.model, "count-tokens"), &body));
        async move {
            let answer = http
                .send_json(post, |status, body| Wire::default().response_failure(status, body))
                .await?;
            Ok(answer["inputTokens"].as_i64())
        }
        .boxed()
    }

    fn models(&self) -> BoxFuture<'static, Result<Vec<VendorModel>, Failure>> {
        let (http, get) = (self.http.clone(), self.list_request());
        async move {
            let answer = http
                .send_json(get, |status, body| Wire::default().response_failure(status, body))
                .await?;
            Ok(check::model_list(&answer["modelSummaries"], |model| {
                let modalities = model["outputModalities"].as_array();
                let writes = modalities
                    .is_none_or(|modalities| modalities.iter().any(|modality| modality == "TEXT"));
                VendorModel {
                    name: model["modelId"]
                        .as_str()
                        .filter(|_| writes)
                        .unwrap_or_default()
                        .to_owned(),
                    display_name: check::json_text(&model["modelName"]),
                    ..VendorModel::default()
                }
            }))
        }
        .boxed()
    }
}

/// What can be cached of a request depends on the model; a cache point elsewhere is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Caching {
    None,
    /// System prompt and messages.
    WithoutTools,
    Everything,
}

impl Caching {
    fn for_model(model: &str) -> Self {
        let early = [
            "claude-3-haiku",
            "claude-3-opus",
            "claude-3-sonnet",
            "claude-3-5-sonnet",
            "claude-v",
            "claude-instant",
        ];
        if model.contains("amazon.nova") {
            Self::WithoutTools
        } else if model.contains("anthropic.claude")
            && !early.iter().any(|name| model.contains(name))
        {
            Self::Everything
        } else {
            Self::None
        }
    }
}

fn body(request: &Request) -> Value {
    let caching = Caching::for_model(&request.model);
    let point = || json!({"cachePoint": {"type": "default"}});
    let turns = request.turns();
    let mut messages: Vec<Value> = turns.iter().map(message).collect();
    if caching != Caching::None {
        let users = messages.iter_mut().rev().filter(|message| message["role"] == "user");
        for content in
            users.take(CACHED_USER_TURNS).filter_map(|message| message["content"].as_array_mut())
        {
            content.push(point());
        }
    }
    let mut body = json!({"messages": messages});
    let system = request.system_with_format();
    if !system.trim().is_empty() {
        let mut system = vec![json!({"text": system})];
        system.extend((caching != Caching::None).then(point));
        body["system"] = json!(system);
    }
    if !request.tools.is_empty() {
        let mut tools: Vec<Value> = request.tools.iter().map(tool).collect();
        tools.extend((caching == Caching::Everything).then(point));
        body["toolConfig"] = json!({"tools": tools});
        match &request.choice {
            ToolChoice::Auto | ToolChoice::Never => {}
            ToolChoice::Any => body["toolConfig"]["toolChoice"] = json!({"any": {}}),
            ToolChoice::Named(name) => {
                body["toolConfig"]["toolChoice"] = json!({"tool": {"name": name}})
            }
        }
    }
    set_sampling(request, &turns, &mut body);
    body
}

fn set_sampling(request: &Request, turns: &[Turn], body: &mut Value) {
    let parameters = &request.parameters;
    let claude = request.model.contains("anthropic.claude");
    let thinking = if claude {
        Thinking::for_model(request.effort(), &request.model, request.max_tokens, turns)
    } else {
        Thinking::default()
    };
    let allows_sampling = !thinking.excludes_sampling;
    let mut config = Map::new();
    config.insert("maxTokens".to_owned(), json!(request.max_tokens));
    let allows_top_p = anthropic::allows_temperature_with_top_p(&request.model)
        || parameters.temperature.is_none();
    // Our scale ends at 2, that of most models here at 1.
    let temperature = parameters.temperature.map(|value| value.min(1.0));
    for (name, value) in
        [("temperature", temperature), ("topP", parameters.top_p.filter(|_| allows_top_p))]
    {
        config
            .extend(value.filter(|_| allows_sampling).map(|value| (name.to_owned(), json!(value))));
    }
    if !parameters.stop_sequences.is_empty() {
        config.insert("stopSequences".to_owned(), json!(parameters.stop_sequences));
    }
    body["inferenceConfig"] = Value::Object(config);
    // Parameters of single models bypass the common API, in the model's own form.
    let mut own = json!(thinking);
    if let Some(top_k) = parameters.top_k.filter(|_| claude && allows_sampling) {
        own["top_k"] = json!(top_k);
    }
    if own.as_object().is_some_and(|own| !own.is_empty()) {
        body["additionalModelRequestFields"] = own;
    }
}

fn tool(tool: &Tool) -> Value {
    json!({"toolSpec": {
        "name": tool.name, "description": tool.description, "inputSchema": {"json": tool.schema},
    }})
}

/// What a block of thinking contains besides its text.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ThinkingProof {
    Signature(String),
    /// Thinking that is not visible at all, in base64.
    Redacted(String),
}

fn message(turn: &Turn) -> Value {
    let role = match turn.role {
        Role::User => "user",
        Role::Assistant => "assistant",
    };
    let last_output = turn.parts.iter().rposition(|part| !matches!(part, Part::Thinking { .. }));
    // Thinking must be followed by its output.
    let parts = &turn.parts[..last_output.map_or(0, |last| last + 1)];
    let mut content: Vec<Value> = Vec::with_capacity(parts.len() + 1);
    for (at, part) in parts.iter().enumerate() {
        content.extend(block(part, at));
    }
    // A document needs a text beside it.
    let documents = content.iter().any(|block| block.get("document").is_some());
    if documents && content.iter().all(|block| block.get("text").is_none()) {
        content.push(json!({"text": "(a document)"}));
    }
    json!({"role": role, "content": content})
}

fn block(part: &Part, at: usize) -> Option<Value> {
    Some(match part {
        Part::Text(text) => json!({"text": text}),
        Part::Media(media) => media_block(media, at),
        Part::Thinking { text, data } => match serde_json::from_str(data).ok()? {
            ThinkingProof::Redacted(data) => json!({"reasoningContent": {"redactedContent": data}}),
            ThinkingProof::Signature(signature) => {
                json!({"reasoningContent": {"reasoningText": {"text": text, "signature": signature}}})
            }
        },
        Part::Call { id, name, arguments } => {
            json!({"toolUse": {"toolUseId": id, "name": name, "input": arguments}})
        }
        Part::Result { id, output, failed, .. } => {
            let status = if *failed { "error" } else { "success" };
            json!({"toolResult": {"toolUseId": id, "content": [{"text": output}], "status": status}})
        }
    })
}

fn media_block(media: &Media, at: usize) -> Value {
    let most = if media.is_image() { MAX_IMAGE_BASE64_BYTES } else { MAX_DOCUMENT_BASE64_BYTES };
    if media.base64.len() > most {
        return json!({"text": media.omission_notice()});
    }
    let source = json!({"bytes": media.base64});
    if let Some(format) = media.media_type.strip_prefix("image/") {
        return json!({"image": {"format": format, "source": source}});
    }
    // Names consist of letters, digits and little else, and differ within a message.
    let plain =
        |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '(' | ')') { c } else { ' ' };
    let name: String = media.name.trim_end_matches(".pdf").chars().map(plain).take(100).collect();
    let words: Vec<&str> = name.split_whitespace().collect();
    let name = if words.is_empty() {
        format!("document {at}")
    } else {
        format!("{} {at}", words.join(" "))
    };
    json!({"document": {"format": "pdf", "name": name, "source": source}})
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BlockStart {
    content_block_index: u32,
    start: Start,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Start {
    tool_use: Option<ToolUse>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ToolUse {
    tool_use_id: String,
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BlockDelta {
    content_block_index: u32,
    delta: Delta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Delta {
    text: Option<String>,
    tool_use: Option<ToolDelta>,
    reasoning_content: Option<ReasoningDelta>,
}

#[derive(Deserialize)]
struct ToolDelta {
    #[serde(default)]
    input: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReasoningDelta {
    text: Option<String>,
    signature: Option<String>,
    redacted_content: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BlockStop {
    content_block_index: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MessageStop {
    stop_reason: String,
}

#[derive(Deserialize)]
struct Metadata {
    usage: Option<WireUsage>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireUsage {
    #[serde(default)]
    input_tokens: i64,
    #[serde(default)]
    output_tokens: i64,
    #[serde(default)]
    cache_read_input_tokens: i64,
    #[serde(default)]
    cache_write_input_tokens: i64,
}

#[derive(Deserialize)]
struct ErrorBody {
    #[serde(alias = "Message")]
    message: String,
}

#[derive(Default)]
struct Wire {
    /// The open block of thinking, and its proof so far.
    thinking: Option<(u32, ThinkingProof)>,
    stopped: bool,
    complete: bool,
}

impl Dialect for Wire {
    type Framing = EventStream;

    fn read(&mut self, event: &Event, chunks: &mut VecDeque<Chunk>) -> Result<(), Failure> {
        match event.name.as_str() {
            "contentBlockStart" => {
                let BlockStart { content_block_index: slot, start } = parse(event)?;
                if let Some(ToolUse { tool_use_id, name }) = start.tool_use {
                    chunks.push_back(Chunk::Call { slot, id: tool_use_id, name });
                }
            }
            "contentBlockDelta" => self.apply_delta(parse(event)?, chunks),
            "contentBlockStop" => {
                let BlockStop { content_block_index } = parse(event)?;
                if let Some((_, proof)) =
                    self.thinking.take_if(|(open, _)| *open == content_block_index)
                {
                    chunks.push_back(Chunk::ThinkingData(json!(proof).to_string()));
                }
            }
            "messageStop" => {
                let MessageStop { stop_reason: reason } = parse(event)?;
                self.stopped = true;
                chunks.push_back(Chunk::Stop(stop_reason(&reason)?));
            }
            "metadata" => {
                let metadata: Metadata = parse(event)?;
                self.complete = self.stopped;
                chunks.extend(metadata.usage.map(|usage| {
                    Chunk::Usage(Usage {
                        input_tokens: usage.input_tokens.max(0),
                        output_tokens: usage.output_tokens.max(0),
                        cache_read_tokens: usage.cache_read_input_tokens.max(0),
                        cache_write_tokens: usage.cache_write_input_tokens.max(0),
                        ..Usage::default()
                    })
                }));
            }
            // Errors within a stream.
            name if name.ends_with("Exception") || name.ends_with("Error") => {
                let message = parse(event)
                    .map_or_else(|_| event.data.clone(), |body: ErrorBody| body.message);
                return Err(failure(name, &message));
            }
            _ => {}
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.complete
    }

    fn end(&mut self, _chunks: &mut VecDeque<Chunk>) -> Result<(), Failure> {
        // With the stop reason the answer is complete; only the usage is missing.
        if self.stopped {
            return Ok(());
        }
        Err(Failure::transient("the vendor's stream ended before the answer was complete"))
    }

    fn response_failure(&self, status: u16, body: &[u8]) -> Failure {
        let message = match serde_json::from_slice::<ErrorBody>(body) {
            Ok(body) if !body.message.is_empty() => body.message,
            Ok(_) | Err(_) => describe_body(status, body),
        };
        let class = match status {
            // An error of the model behind the API.
            424 => FailureClass::Transient,
            400 => validation_class(&message),
            status => class_from_status(status),
        };
        Failure::new(class, message)
    }
}

impl Wire {
    fn apply_delta(&mut self, block: BlockDelta, chunks: &mut VecDeque<Chunk>) {
        let BlockDelta { content_block_index: index, delta } = block;
        chunks.extend(delta.text.filter(|text| !text.is_empty()).map(Chunk::Text));
        if let Some(ToolDelta { input }) = delta.tool_use.filter(|delta| !delta.input.is_empty()) {
            chunks.push_back(Chunk::Arguments { slot: index, json: input });
        }
        let Some(reasoning) = delta.reasoning_content else { return };
        chunks.extend(reasoning.text.filter(|text| !text.is_empty()).map(Chunk::Thinking));
        let open = self.thinking.take().filter(|(open, _)| *open == index).map(|(_, proof)| proof);
        let proof = match (open, reasoning.signature, reasoning.redacted_content) {
            (Some(ThinkingProof::Signature(whole)), Some(more), _) => {
                Some(ThinkingProof::Signature(whole + &more))
            }
            (Some(ThinkingProof::Redacted(whole)), _, Some(more)) => {
                Some(ThinkingProof::Redacted(whole + &more))
            }
            (None, Some(signature), _) => Some(ThinkingProof::Signature(signature)),
            (None, None, Some(redacted)) => Some(ThinkingProof::Redacted(redacted)),
            (open, ..) => open,
        };
        self.thinking = proof.map(|proof| (index, proof));
    }
}

fn parse<T: for<'de> Deserialize<'de>>(event: &Event) -> Result<T, Failure> {
    serde_json::from_str(&event.data).map_err(|error| {
        Failure::transient(format!("the stream holds an event that cannot be read: {error}"))
    })
}

fn stop_reason(reason: &str) -> Result<StopReason, Failure> {
    Ok(match reason {
        "tool_use" => StopReason::ToolUse,
        "max_tokens" | "model_context_window_exceeded" => StopReason::MaxTokens,
        "stop_sequence" => StopReason::StopSequence,
        "content_filtered" | "guardrail_intervened" => StopReason::Refused,
        // The vendor cannot parse the output of its own model; the next attempt usually succeeds.
        "malformed_model_output" | "malformed_tool_use" => {
            return Err(Failure::transient(format!(
                "the model wrote what the vendor cannot read ({reason})"
            )));
        }
        _ => StopReason::EndTurn,
    })
}

fn failure(name: &str, message: &str) -> Failure {
    let class = match name {
        "throttlingException" | "ThrottlingException" => FailureClass::RateLimited,
        "serviceUnavailableException" | "ServiceUnavailableException" => FailureClass::Overloaded,
        "validationException" | "ValidationException" => validation_class(message),
        "accessDeniedException" | "AccessDeniedException" => FailureClass::Authentication,
        _ => FailureClass::Transient,
    };
    Failure::new(class, if message.is_empty() { name } else { message })
}

fn validation_class(message: &str) -> FailureClass {
    class_from_message(
        message,
        &[
            (
                FailureClass::ContextTooLong,
                &[
                    "input is too long",
                    "prompt is too long",
                    "too many input tokens",
                    "context window",
                    "context limit",
                ],
            ),
            (FailureClass::ContentRefused, &["content filtering policy", "content policy"]),
        ],
    )
    .unwrap_or(FailureClass::InvalidRequest)
}

#[cfg(test)]
mod tests;

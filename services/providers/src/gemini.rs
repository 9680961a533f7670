//! Google's Gemini API (`streamGenerateContent`). Its wire format stays in this file. It is
//! documented at <https://ai.google.dev/api/generate-content> and
//! <https://ai.google.dev/gemini-api/docs/thought-signatures>.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use construct_domain::money::Usage;
use construct_proto::{
    mesh::v1::{FailureClass, model_completed::StopReason},
    v1::VendorModel,
};
use construct_runtime::clock;
use futures::{
    FutureExt as _,
    future::BoxFuture,
    stream::{self, BoxStream, StreamExt as _},
};
use jiff::Timestamp;
use reqwest::{
    RequestBuilder,
    header::{ACCEPT, HeaderValue},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::{
    check, embedding,
    failure::{Failure, class_from_status},
    framing::{Event, ServerSentEvents},
    http::{Dialect, Endpoint, Http, class_from_message, describe_body, key_header},
    transcript::{Part, Role, Turn},
    vendor::{Chunk, Effort, EmbedRequest, Format, Request, Tool, ToolChoice, Vendor},
};

/// Texts that the vendor embeds per request.
const MAX_TEXTS_PER_REQUEST: usize = 100;

/// Stop sequences that the vendor accepts; more are rejected.
const MAX_STOP_SEQUENCES: usize = 5;

/// What the vendor accepts in place of the signature of a call by another vendor. It rejects the
/// conversation otherwise.
const SKIP_SIGNATURE: &str = "skip_thought_signature_validator";

/// An account at Google.
pub(crate) struct Gemini {
    http: Http,
    endpoint: Endpoint,
    key: Option<HeaderValue>,
}

impl Gemini {
    pub(crate) const DEFAULT_BASE_URL: &str = "https://generativelanguage.googleapis.com";

    pub(crate) fn new(http: Http, endpoint: Endpoint) -> Result<Self, Failure> {
        let key = key_header(endpoint.key.as_ref())?;
        Ok(Self { http, endpoint, key })
    }

    /// A request other than an answer.
    fn post(&self, model: &str, what: &str, body: &Value) -> Result<RequestBuilder, Failure> {
        let post = self
            .http
            .post(self.endpoint.join("/v1beta", &format!("/v1beta/models/{model}:{what}")))?;
        let post = post.json(body);
        Ok(match &self.key {
            Some(key) => post.header("x-goog-api-key", key.clone()),
            None => post,
        })
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EmbedResponse {
    #[serde(default)]
    embeddings: Vec<Embedding>,
    usage_metadata: Option<EmbedUsage>,
}

#[derive(Deserialize)]
struct Embedding {
    #[serde(default)]
    values: Vec<f32>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EmbedUsage {
    #[serde(default)]
    prompt_token_count: i64,
}

impl Vendor for Gemini {
    fn invoke(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        let model = request.model.trim_start_matches("models/");
        let mut url =
            self.endpoint.join("/v1beta", &format!("/v1beta/models/{model}:streamGenerateContent"));
        url.query_pairs_mut().append_pair("alt", "sse");
        let post = self.http.post(url).map(|post| {
            let post = post
                .header(ACCEPT, HeaderValue::from_static("text/event-stream"))
                .json(&body(&request));
            match &self.key {
                Some(key) => post.header("x-goog-api-key", key.clone()),
                None => post,
            }
        });
        self.http.stream(post, Wire::default())
    }

    fn count(&self, request: &Request) -> BoxFuture<'static, Result<Option<i64>, Failure>> {
        let model = request.model.trim_start_matches("models/");
        let mut body = body(request);
        body["model"] = json!(format!("models/{model}"));
        let post = self.post(model, "countTokens", &json!({"generateContentRequest": body}));
        let http = self.http.clone();
        async move {
            let answer = http
                .send_json(post, |status, body| Wire::default().response_failure(status, body))
                .await?;
            Ok(answer["totalTokens"].as_i64())
        }
        .boxed()
    }

    fn embed(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        let Some(EmbedRequest { texts, dimensions }) = &request.embed else {
            return stream::empty().boxed();
        };
        let model = request.model.trim_start_matches("models/");
        let item = |text: &String| {
            let mut item =
                json!({"model": format!("models/{model}"), "content": {"parts": [{"text": text}]}});
            if let Some(dimensions) = dimensions {
                item["outputDimensionality"] = json!(dimensions);
            }
            item
        };
        let batches: Vec<_> = texts
            .chunks(MAX_TEXTS_PER_REQUEST)
            .map(|texts| {
                let items: Vec<Value> = texts.iter().map(item).collect();
                (texts.len(), self.post(model, "batchEmbedContents", &json!({"requests": items})))
            })
            .collect();
        let http = self.http.clone();
        embedding::vector_chunks(async move {
            let (mut vectors, mut tokens) = (Vec::new(), 0);
            for (wanted, post) in batches {
                let refused = |status, body: &[u8]| Wire::default().response_failure(status, body);
                let answer: Result<EmbedResponse, Failure> =
                    http.send_large_json(post, Wire::LIMITS, refused).await;
                // Earlier batches are charged.
                let answer = answer.map_err(|failure| {
                    if vectors.is_empty() { failure } else { failure.after_success() }
                })?;
                embedding::check_vector_count(wanted, answer.embeddings.len())?;
                tokens += answer.usage_metadata.map_or(0, |usage| usage.prompt_token_count.max(0));
                vectors.extend(answer.embeddings.into_iter().map(|embedding| embedding.values));
            }
            Ok((vectors, embedding::input_usage(tokens)))
        })
    }

    fn models(&self) -> BoxFuture<'static, Result<Vec<VendorModel>, Failure>> {
        let mut url = self.endpoint.join("/v1beta", "/v1beta/models");
        url.query_pairs_mut().append_pair("pageSize", "1000");
        let get = self.http.get(url).map(|get| match &self.key {
            Some(key) => get.header("x-goog-api-key", key.clone()),
            None => get,
        });
        let http = self.http.clone();
        async move {
            let answer = http
                .send_json(get, |status, body| Wire::default().response_failure(status, body))
                .await?;
            Ok(check::model_list(&answer["models"], |model| {
                let methods = model["supportedGenerationMethods"].as_array();
                let generates = methods
                    .is_none_or(|methods| methods.iter().any(|method| method == "generateContent"));
                let name = model["name"].as_str().filter(|_| generates).unwrap_or_default();
                VendorModel {
                    name: name.trim_start_matches("models/").to_owned(),
                    display_name: check::json_text(&model["displayName"]),
                    context_window: check::json_tokens(&model["inputTokenLimit"]),
                    max_output_tokens: check::json_tokens(&model["outputTokenLimit"]),
                }
            }))
        }
        .boxed()
    }
}

fn body(request: &Request) -> Value {
    let signed = !["gemini-1", "gemini-2"].iter().any(|old| request.model.contains(old));
    let turns = request.turns();
    let contents: Vec<Value> = turns.iter().map(|turn| content_from_turn(turn, signed)).collect();
    let mut body = json!({"contents": contents, "generationConfig": generation_config(request)});
    if !request.system.trim().is_empty() {
        body["systemInstruction"] = json!({"parts": [{"text": request.system}]});
    }
    if !request.tools.is_empty() {
        let declarations: Vec<Value> = request.tools.iter().map(declaration).collect();
        body["tools"] = json!([{"functionDeclarations": declarations}]);
        let choice = match &request.choice {
            ToolChoice::Auto => None,
            ToolChoice::Never => Some(json!({"mode": "NONE"})),
            ToolChoice::Any => Some(json!({"mode": "ANY"})),
            ToolChoice::Named(name) => Some(json!({"mode": "ANY", "allowedFunctionNames": [name]})),
        };
        if let Some(choice) = choice {
            body["toolConfig"] = json!({"functionCallingConfig": choice});
        }
    }
    body
}

fn generation_config(request: &Request) -> Value {
    let parameters = &request.parameters;
    let mut config = Map::new();
    config.insert("maxOutputTokens".to_owned(), json!(request.max_tokens));
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            config.insert(name.to_owned(), value);
        }
    };
    set("temperature", parameters.temperature.map(Value::from));
    set("topP", parameters.top_p.map(Value::from));
    set("topK", parameters.top_k.map(Value::from));
    let stops: Vec<&String> = parameters.stop_sequences.iter().take(MAX_STOP_SEQUENCES).collect();
    set("stopSequences", (!stops.is_empty()).then(|| json!(stops)));
    set("responseMimeType", (request.format != Format::Text).then(|| json!("application/json")));
    if let Format::Schema { schema, .. } = &request.format {
        set("responseJsonSchema", Some(schema.clone()));
    }
    set("thinkingConfig", request.effort().map(|effort| thinking_config(effort, &request.model)));
    Value::Object(config)
}

/// Older models take a number of tokens, later ones a level.
fn thinking_config(effort: Effort, model: &str) -> Value {
    if model.contains("gemini-2") {
        // The minimum of the larger model.
        let least = if model.contains("pro") { 128 } else { 0 };
        let shown = effort != Effort::Off;
        return json!({"includeThoughts": shown, "thinkingBudget": effort.budget_tokens().max(least)});
    }
    let level = match effort {
        Effort::Off | Effort::Low => "low",
        Effort::Medium if model.contains("gemini-3-pro") => "high",
        Effort::Medium => "medium",
        Effort::High => "high",
    };
    json!({"includeThoughts": true, "thinkingLevel": level})
}

fn declaration(tool: &Tool) -> Value {
    json!({"name": tool.name, "description": tool.description, "parametersJsonSchema": tool.schema})
}

/// The stored data of thinking: a signature, and the part of the answer that carries it.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Signature {
    /// The next call.
    Call(String),
    /// The preceding text, or an empty one.
    Text(String),
}

fn content_from_turn(turn: &Turn, signed: bool) -> Value {
    let role = match turn.role {
        Role::User => "user",
        Role::Assistant => "model",
    };
    let mut parts: Vec<Value> = Vec::with_capacity(turn.parts.len());
    let mut signature = None;
    let mut calls = 0;
    for part in &turn.parts {
        match part {
            Part::Text(text) => parts.push(json!({"text": text})),
            Part::Media(media) => {
                parts.push(
                    json!({"inlineData": {"mimeType": media.media_type, "data": media.base64}}),
                );
            }
            Part::Thinking { data, .. } => match serde_json::from_str(data) {
                Ok(Signature::Call(of_call)) => signature = Some(of_call),
                Ok(Signature::Text(of_text)) => {
                    if parts.last().is_none_or(|last| last.get("text").is_none()) {
                        parts.push(json!({"text": ""}));
                    }
                    if let Some(last) = parts.last_mut() {
                        last["thoughtSignature"] = json!(of_text);
                    }
                }
                // Thinking without a signature is only shown to users.
                Err(_) => {}
            },
            Part::Call { id, name, arguments } => {
                let mut call = json!({"functionCall": {"id": id, "name": name, "args": arguments}});
                calls += 1;
                // Only the first of several calls carries one.
                let missing = (signed && calls == 1).then(|| SKIP_SIGNATURE.to_owned());
                if let Some(signature) = signature.take().or(missing) {
                    call["thoughtSignature"] = json!(signature);
                }
                parts.push(call);
            }
            Part::Result { id, name, output, failed } => {
                let key = if *failed { "error" } else { "output" };
                parts.push(json!({"functionResponse": {"id": id, "name": name, "response": {key: output}}}));
            }
        }
    }
    json!({"role": role, "parts": parts})
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    response_id: Option<String>,
    model_version: Option<String>,
    #[serde(default)]
    candidates: Vec<Candidate>,
    prompt_feedback: Option<Feedback>,
    usage_metadata: Option<WireUsage>,
    error: Option<WireError>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Candidate {
    content: Option<Content>,
    finish_reason: Option<String>,
    finish_message: Option<String>,
}

#[derive(Deserialize)]
struct Content {
    #[serde(default)]
    parts: Vec<WirePart>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WirePart {
    text: Option<String>,
    #[serde(default)]
    thought: bool,
    thought_signature: Option<String>,
    function_call: Option<FunctionCall>,
}

#[derive(Deserialize)]
struct FunctionCall {
    #[serde(default)]
    id: String,
    name: String,
    #[serde(default)]
    args: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Feedback {
    block_reason: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireUsage {
    #[serde(default)]
    prompt_token_count: i64,
    #[serde(default)]
    cached_content_token_count: i64,
    #[serde(default)]
    candidates_token_count: i64,
    #[serde(default)]
    thoughts_token_count: i64,
    #[serde(default)]
    tool_use_prompt_token_count: i64,
}

impl WireUsage {
    /// Converts to our terms, in which each token is counted once: the vendor's prompt includes
    /// cached tokens, and its candidates exclude thinking.
    fn usage(&self) -> Usage {
        let prompt = self.prompt_token_count.max(0);
        let cached = self.cached_content_token_count.clamp(0, prompt);
        Usage {
            input_tokens: prompt - cached + self.tool_use_prompt_token_count.max(0),
            output_tokens: self.candidates_token_count.max(0) + self.thoughts_token_count.max(0),
            cache_read_tokens: cached,
            thinking_tokens: self.thoughts_token_count.max(0),
            ..Usage::default()
        }
    }
}

#[derive(Deserialize)]
struct WireError {
    code: Option<u16>,
    #[serde(default)]
    message: String,
    #[serde(default)]
    status: String,
    #[serde(default)]
    details: Vec<Value>,
}

#[derive(Default)]
struct Wire {
    is_named: bool,
    calls: u32,
    is_finished: bool,
}

impl Dialect for Wire {
    type Framing = ServerSentEvents;

    fn read(&mut self, event: &Event, chunks: &mut VecDeque<Chunk>) -> Result<(), Failure> {
        let response: Response = serde_json::from_str(&event.data).map_err(|error| {
            Failure::transient(format!("the stream holds an event that cannot be read: {error}"))
        })?;
        if let Some(error) = response.error {
            return Err(failure(None, &error));
        }
        if let Some(reason) = response.prompt_feedback.and_then(|feedback| feedback.block_reason) {
            return Err(Failure::new(
                FailureClass::ContentRefused,
                format!("the vendor refused to read the conversation ({reason})"),
            ));
        }
        if !self.is_named && response.model_version.is_some() {
            self.is_named = true;
            let (id, model) = (
                response.response_id.unwrap_or_default(),
                response.model_version.unwrap_or_default(),
            );
            chunks.push_back(Chunk::Named { id, model });
        }
        if let Some(usage) = response.usage_metadata {
            chunks.push_back(Chunk::Usage(usage.usage()));
        }
        // Only one candidate is requested.
        let Some(candidate) = response.candidates.into_iter().next() else { return Ok(()) };
        for part in candidate.content.into_iter().flat_map(|content| content.parts) {
            self.read_part(part, chunks);
        }
        if let Some(reason) = candidate.finish_reason {
            self.is_finished = true;
            chunks
                .push_back(Chunk::Stop(stop_reason(&reason, candidate.finish_message.as_deref())?));
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        // The vendor says why it stopped, but not that the stream is complete: the usage may still
        // follow.
        false
    }

    fn end(&mut self, _chunks: &mut VecDeque<Chunk>) -> Result<(), Failure> {
        if self.is_finished {
            return Ok(());
        }
        Err(Failure::transient("the vendor's stream ended before the answer was complete"))
    }

    fn response_failure(&self, status: u16, body: &[u8]) -> Failure {
        let parsed = match serde_json::from_slice::<Value>(body) {
            // An error of the streaming method may come in a list.
            Ok(Value::Array(list)) => list.into_iter().next(),
            Ok(body) => Some(body),
            Err(_) => None,
        };
        let response = parsed.and_then(|body| serde_json::from_value::<Response>(body).ok());
        match response.and_then(|response| response.error) {
            Some(error) => failure(Some(status), &error),
            None => Failure::new(class_from_status(status), describe_body(status, body)),
        }
    }
}

impl Wire {
    fn read_part(&mut self, part: WirePart, chunks: &mut VecDeque<Chunk>) {
        let signature = part.thought_signature.filter(|signature| !signature.is_empty());
        let sealed = |signature: Signature| Chunk::ThinkingData(json!(signature).to_string());
        if let Some(call) = part.function_call {
            chunks.extend(signature.map(|signature| sealed(Signature::Call(signature))));
            let slot = self.calls;
            self.calls += 1;
            let args = if call.args.is_null() { json!({}) } else { call.args };
            chunks.push_back(Chunk::Call { slot, id: call.id, name: call.name });
            chunks.push_back(Chunk::Arguments { slot, json: args.to_string() });
            return;
        }
        let text = part.text.filter(|text| !text.is_empty());
        if part.thought {
            chunks.extend(text.map(Chunk::Thinking));
            return;
        }
        chunks.extend(text.map(Chunk::Text));
        chunks.extend(signature.map(|signature| sealed(Signature::Text(signature))));
    }
}

fn stop_reason(reason: &str, message: Option<&str>) -> Result<StopReason, Failure> {
    Ok(match reason {
        "MAX_TOKENS" => StopReason::MaxTokens,
        "SAFETY" | "RECITATION" | "BLOCKLIST" | "PROHIBITED_CONTENT" | "SPII" | "LANGUAGE"
        | "IMAGE_SAFETY" | "MODEL_ARMOR" => StopReason::Refused,
        // The vendor cannot parse the output of its own model; the next attempt usually succeeds.
        "MALFORMED_FUNCTION_CALL" | "UNEXPECTED_TOOL_CALL" | "MALFORMED_RESPONSE" => {
            let message = message.unwrap_or("the model wrote a call that the vendor cannot read");
            return Err(Failure::transient(format!("{message} ({reason})")));
        }
        _ => StopReason::EndTurn,
    })
}

fn failure(status: Option<u16>, error: &WireError) -> Failure {
    let reason = error.details.iter().find_map(|detail| detail["reason"].as_str());
    let by_status = status.or(error.code).filter(|status| *status >= 400).map(class_from_status);
    let class = match (error.status.as_str(), reason) {
        (_, Some("API_KEY_INVALID" | "API_KEY_SERVICE_BLOCKED"))
        | ("UNAUTHENTICATED" | "PERMISSION_DENIED", _) => FailureClass::Authentication,
        ("RESOURCE_EXHAUSTED", _) => FailureClass::RateLimited,
        ("UNAVAILABLE", _) => FailureClass::Overloaded,
        ("INTERNAL" | "DEADLINE_EXCEEDED" | "ABORTED" | "UNKNOWN" | "CANCELLED", _) => {
            FailureClass::Transient
        }
        ("INVALID_ARGUMENT" | "FAILED_PRECONDITION" | "NOT_FOUND" | "OUT_OF_RANGE", _) => {
            class_from_message(
                &error.message,
                &[
                    (
                        FailureClass::ContextTooLong,
                        &[
                            "exceeds the maximum number of tokens",
                            "token count",
                            "prompt is too long",
                        ],
                    ),
                    (FailureClass::Authentication, &["api key not valid", "api key expired"]),
                    (FailureClass::ContentRefused, &["content policy", "content filtering"]),
                ],
            )
            .unwrap_or(FailureClass::InvalidRequest)
        }
        _ => by_status.unwrap_or(FailureClass::Transient),
    };
    let message = match (error.message.as_str(), error.status.as_str()) {
        ("", "") => "the vendor reported an error without a reason",
        ("", status) => status,
        (message, _) => message,
    };
    Failure::new(class, message).with_retry_at(retry_at(&error.details, clock::now()))
}

/// The time of the next attempt: a `RetryInfo` contains it as `"retryDelay": "34s"`.
fn retry_at(details: &[Value], now: Timestamp) -> Option<Timestamp> {
    let delay = details.iter().find_map(|detail| detail["retryDelay"].as_str())?;
    let seconds: f64 = delay.strip_suffix('s')?.parse().ok()?;
    let delay = Duration::try_from_secs_f64(seconds).ok()?.min(Duration::from_secs(24 * 3600));
    now.checked_add(delay).ok()
}

#[cfg(test)]
mod tests;

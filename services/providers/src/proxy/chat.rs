//! OpenAI's Chat Completions for clients: <https://platform.openai.com/docs/api-reference/chat>.

use construct_domain::money::Usage;
use construct_proto::{
    mesh::v1::model_completed::StopReason,
    v1::{ModelParameters, ThinkingEffort},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    client_request::{self, ClientRequest, OneOrMany, is_set, reject_if},
    partial_answer::{PartialAnswer, Piece, PieceChange},
    protocol::{AnswerHead, ClientProtocol, Writer, to_json, total_input_tokens, write_event},
    refusal::{Kind, Refusal},
};
use crate::{
    transcript::{Part, Role},
    vendor::{Chunk, Format, ToolChoice},
};

/// The protocol.
pub(crate) struct Chat;

#[derive(Deserialize)]
struct Body {
    #[serde(default)]
    model: String,
    messages: Vec<Message>,
    #[serde(default)]
    stream: bool,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    stop: Option<OneOrMany>,
    tools: Option<Vec<ToolBody>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    response_format: Option<Value>,
    reasoning_effort: Option<String>,
    n: Option<u32>,
    logprobs: Option<Value>,
    logit_bias: Option<Value>,
    functions: Option<Value>,
    audio: Option<Value>,
    modalities: Option<Vec<String>>,
    web_search_options: Option<Value>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: Option<Content>,
    /// Thinking, as it was sent to the client.
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<Call>>,
    tool_call_id: Option<String>,
    function_call: Option<Value>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a text or a list of parts")]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ContentPart {
    Text {
        text: String,
    },
    Refusal {
        refusal: String,
    },
    ImageUrl {
        image_url: ImageUrl,
    },
    File {
        file: File,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct ImageUrl {
    url: String,
}

#[derive(Deserialize)]
struct File {
    file_data: Option<String>,
    #[serde(default)]
    filename: String,
}

#[derive(Deserialize)]
struct Call {
    #[serde(default)]
    id: String,
    function: Option<CallFunction>,
}

#[derive(Deserialize)]
struct CallFunction {
    name: String,
    #[serde(default)]
    arguments: String,
}

#[derive(Deserialize)]
struct ToolBody {
    #[serde(rename = "type", default)]
    kind: String,
    function: Option<FunctionBody>,
}

#[derive(Deserialize)]
struct FunctionBody {
    name: String,
    description: Option<String>,
    parameters: Option<Value>,
}

impl ClientProtocol for Chat {
    const PURPOSE: &'static str = "chat completions";
    type Writer = Stream;

    fn read(body: &[u8]) -> Result<ClientRequest, Refusal> {
        let body: Body = client_request::parse(body)?;
        reject_if(body.n.is_some_and(|n| n != 1), "`n` other than 1")?;
        reject_if(is_set(body.logprobs.as_ref()), "`logprobs`")?;
        reject_if(is_set(body.logit_bias.as_ref()), "`logit_bias`")?;
        reject_if(is_set(body.functions.as_ref()), "`functions` (use `tools`)")?;
        reject_if(is_set(body.audio.as_ref()), "`audio`")?;
        reject_if(body.web_search_options.is_some(), "`web_search_options`")?;
        reject_if(
            body.modalities.iter().flatten().any(|kind| kind != "text"),
            "a modality other than text",
        )?;
        let mut asked = ClientRequest {
            model: body.model,
            stream: body.stream,
            include_usage: body.stream_options.is_some_and(|options| options.include_usage),
            choice: tool_choice(body.tool_choice.as_ref())?,
            one_call: body.parallel_tool_calls == Some(false),
            format: answer_format(body.response_format.as_ref())?,
            parameters: ModelParameters {
                temperature: body.temperature,
                max_tokens: body.max_completion_tokens.or(body.max_tokens),
                top_p: body.top_p,
                stop_sequences: body.stop.map(OneOrMany::into_list).unwrap_or_default(),
                thinking: thinking_effort(body.reasoning_effort.as_deref())?.into(),
                ..ModelParameters::default()
            },
            ..ClientRequest::default()
        };
        for tool in body.tools.into_iter().flatten() {
            let function = tool.function.filter(|_| matches!(&*tool.kind, "function" | ""));
            let Some(function) = function else {
                return Err(Refusal::invalid(format!(
                    "tools of the type `{}` are not supported by this proxy",
                    tool.kind
                )));
            };
            asked.tools.push(client_request::tool(
                function.name,
                function.description,
                function.parameters,
            )?);
        }
        for message in body.messages {
            read_message(message, &mut asked)?;
        }
        asked.validate()
    }

    fn answer_body(head: &AnswerHead, answer: &PartialAnswer) -> Value {
        let text = answer.text();
        let calls: Vec<Value> = answer.pieces.iter().filter_map(call_body).collect();
        let content =
            if text.is_empty() && !calls.is_empty() { Value::Null } else { Value::String(text) };
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        let thought = answer.thinking();
        if !thought.is_empty() {
            message["reasoning_content"] = json!(thought);
        }
        if !calls.is_empty() {
            message["tool_calls"] = json!(calls);
        }
        json!({
            "id": format!("chatcmpl-{}", head.id),
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [{"index": 0, "message": message, "logprobs": null, "finish_reason": finish_reason(answer.stop())}],
            "usage": usage_body(&answer.usage(true)),
        })
    }

    fn error_body(refusal: &Refusal) -> Value {
        refusal_body(refusal)
    }
}

fn read_message(message: Message, asked: &mut ClientRequest) -> Result<(), Refusal> {
    reject_if(
        message.function_call.is_some_and(|call| !call.is_null()),
        "`function_call` (use `tool_calls`)",
    )?;
    match &*message.role {
        "system" | "developer" => asked.push_instruction(&read_text(message.content)?),
        "user" => {
            for part in read_parts(message.content)? {
                asked.push_part(Role::User, part);
            }
        }
        "assistant" => {
            if let Some(text) = message.reasoning_content.filter(|text| !text.trim().is_empty()) {
                asked.push_part(Role::Assistant, Part::Thinking { text, data: String::new() });
            }
            let text = read_text(message.content)?;
            if !text.trim().is_empty() {
                asked.push_part(Role::Assistant, Part::Text(text));
            }
            for call in message.tool_calls.into_iter().flatten() {
                let function = call
                    .function
                    .ok_or_else(|| Refusal::invalid("a tool call names no function"))?;
                let arguments = client_request::parse_arguments(&function.arguments)?;
                asked.push_part(
                    Role::Assistant,
                    Part::Call { id: call.id, name: function.name, arguments },
                );
            }
        }
        "tool" => {
            let id = message.tool_call_id.unwrap_or_default();
            let output = read_text(message.content)?;
            asked.push_part(
                Role::User,
                Part::Result { id, name: String::new(), output, failed: false },
            );
        }
        role => {
            return Err(Refusal::invalid(format!(
                "messages of the role `{role}` are not supported by this proxy"
            )));
        }
    }
    Ok(())
}

fn read_parts(content: Option<Content>) -> Result<Vec<Part>, Refusal> {
    let parts = match content {
        None => Vec::new(),
        Some(Content::Text(text)) => vec![ContentPart::Text { text }],
        Some(Content::Parts(parts)) => parts,
    };
    let mut read = Vec::with_capacity(parts.len());
    for part in parts {
        read.push(match part {
            ContentPart::Text { text } | ContentPart::Refusal { refusal: text }
                if text.trim().is_empty() =>
            {
                continue;
            }
            ContentPart::Text { text } | ContentPart::Refusal { refusal: text } => Part::Text(text),
            ContentPart::ImageUrl { image_url } => client_request::data_url(&image_url.url, "")?,
            ContentPart::File { file } => {
                let data = file
                    .file_data
                    .ok_or_else(|| Refusal::invalid("files are taken as `file_data` only"))?;
                client_request::data_url(&data, &file.filename)?
            }
            ContentPart::Other => {
                return Err(Refusal::invalid(
                    "a part of a message is of a type that this proxy does not support",
                ));
            }
        });
    }
    Ok(read)
}

/// Content where only text is allowed.
fn read_text(content: Option<Content>) -> Result<String, Refusal> {
    let mut whole = String::new();
    for part in read_parts(content)? {
        match part {
            Part::Text(text) => whole.push_str(&text),
            _ => {
                return Err(Refusal::invalid(
                    "images and files are supported in messages of the user only",
                ));
            }
        }
    }
    Ok(whole)
}

fn tool_choice(choice: Option<&Value>) -> Result<ToolChoice, Refusal> {
    Ok(match choice {
        None | Some(Value::Null) => ToolChoice::Auto,
        Some(Value::String(word)) if word == "auto" => ToolChoice::Auto,
        Some(Value::String(word)) if word == "none" => ToolChoice::Never,
        Some(Value::String(word)) if word == "required" => ToolChoice::Any,
        Some(choice) => match choice["function"]["name"].as_str() {
            Some(name) => ToolChoice::Named(name.to_owned()),
            None => {
                return Err(Refusal::invalid("this `tool_choice` is not supported by this proxy"));
            }
        },
    })
}

fn answer_format(format: Option<&Value>) -> Result<Format, Refusal> {
    let Some(format) = format.filter(|format| !format.is_null()) else { return Ok(Format::Text) };
    match format["type"].as_str() {
        Some("text") => Ok(Format::Text),
        Some("json_object") => Ok(Format::Json),
        Some("json_schema") => json_schema_format(&format["json_schema"]),
        _ => Err(Refusal::invalid("this `response_format` is not supported by this proxy")),
    }
}

/// A schema with its name, as in both of the vendor's protocols.
pub(crate) fn json_schema_format(value: &Value) -> Result<Format, Refusal> {
    if !value["schema"].is_object() {
        return Err(Refusal::invalid("the answer's format lacks its `schema`"));
    }
    Ok(Format::Schema {
        name: value["name"].as_str().unwrap_or("answer").to_owned(),
        schema: value["schema"].clone(),
        strict: value["strict"].as_bool().unwrap_or(false),
    })
}

/// An effort, by the names of both of the vendor's protocols.
pub(crate) fn thinking_effort(word: Option<&str>) -> Result<ThinkingEffort, Refusal> {
    Ok(match word {
        None => ThinkingEffort::Unspecified,
        Some("none" | "minimal") => ThinkingEffort::Off,
        Some("low") => ThinkingEffort::Low,
        Some("medium") => ThinkingEffort::Medium,
        Some("high" | "xhigh" | "max") => ThinkingEffort::High,
        Some(other) => {
            return Err(Refusal::invalid(format!("there is no reasoning effort `{other}`")));
        }
    })
}

fn call_body(piece: &Piece) -> Option<Value> {
    match piece {
        Piece::Call { id, name, arguments, .. } => {
            let arguments = if arguments.trim().is_empty() { "{}" } else { arguments };
            Some(
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}),
            )
        }
        Piece::Text(_) | Piece::Thinking { .. } => None,
    }
}

const fn finish_reason(stop: StopReason) -> &'static str {
    match stop {
        StopReason::ToolUse => "tool_calls",
        StopReason::MaxTokens => "length",
        StopReason::Refused => "content_filter",
        StopReason::EndTurn | StopReason::StopSequence | StopReason::Unspecified => "stop",
    }
}

fn usage_body(usage: &Usage) -> Value {
    let read = total_input_tokens(usage);
    json!({
        "prompt_tokens": read,
        "completion_tokens": usage.output_tokens,
        "total_tokens": read.saturating_add(usage.output_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cache_read_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
    })
}

/// The error body of both of the vendor's protocols.
pub(crate) fn refusal_body(refusal: &Refusal) -> Value {
    let (kind, code) = match refusal.kind {
        Kind::Invalid => ("invalid_request_error", None),
        Kind::TooLarge => ("invalid_request_error", Some("request_too_large")),
        Kind::TooLong => ("invalid_request_error", Some("context_length_exceeded")),
        Kind::Refused => ("invalid_request_error", Some("content_policy_violation")),
        Kind::Unauthenticated => ("authentication_error", Some("invalid_api_key")),
        Kind::NoModel => ("invalid_request_error", Some("model_not_found")),
        Kind::NoRoute => ("invalid_request_error", Some("unknown_url")),
        Kind::Budget => ("insufficient_quota", Some("insufficient_quota")),
        Kind::RateLimited => ("rate_limit_error", Some("rate_limit_exceeded")),
        Kind::Overloaded => ("server_error", Some("overloaded")),
        Kind::Timeout => ("server_error", Some("timeout")),
        Kind::Vendor => ("server_error", Some("bad_gateway")),
        Kind::Internal => ("server_error", None),
    };
    json!({"error": {"message": refusal.message, "type": kind, "param": null, "code": code}})
}

/// A streamed answer.
pub(crate) struct Stream {
    /// Everything of an event before the delta.
    prefix: String,
    include_usage: bool,
    has_begun: bool,
}

impl Stream {
    fn write_delta(&mut self, delta: &str, finish: Option<&str>, out: &mut String) {
        out.push_str(&self.prefix);
        out.push_str("\"choices\":[{\"index\":0,\"delta\":");
        out.push_str(delta);
        out.push_str(",\"logprobs\":null,\"finish_reason\":");
        match finish {
            Some(reason) => {
                out.push('"');
                out.push_str(reason);
                out.push('"');
            }
            None => out.push_str("null"),
        }
        out.push_str(if self.include_usage { "}],\"usage\":null}\n\n" } else { "}]}\n\n" });
    }

    fn begin(&mut self, out: &mut String) {
        if !self.has_begun {
            self.has_begun = true;
            self.write_delta("{\"role\":\"assistant\",\"content\":\"\"}", None, out);
        }
    }
}

impl Writer for Stream {
    fn new(head: AnswerHead) -> Self {
        let (id, model) = (to_json(&format!("chatcmpl-{}", head.id)), to_json(&head.model));
        let prefix = format!(
            "data: {{\"id\":{id},\"object\":\"chat.completion.chunk\",\"created\":{},\"model\":{model},",
            head.created
        );
        Self { prefix, include_usage: head.include_usage, has_begun: false }
    }

    fn push(
        &mut self,
        chunk: &Chunk,
        change: PieceChange,
        answer: &PartialAnswer,
        out: &mut String,
    ) {
        let number = |at: usize| {
            answer.pieces[..at].iter().filter(|piece| matches!(piece, Piece::Call { .. })).count()
        };
        match (chunk, change) {
            (Chunk::Text(text), _) => {
                self.begin(out);
                self.write_delta(&format!("{{\"content\":{}}}", to_json(text)), None, out);
            }
            (Chunk::Thinking(text), _) => {
                self.begin(out);
                self.write_delta(
                    &format!("{{\"reasoning_content\":{}}}", to_json(text)),
                    None,
                    out,
                );
            }
            (Chunk::Call { .. }, PieceChange::Started(at)) => {
                self.begin(out);
                let Piece::Call { id, name, .. } = &answer.pieces[at] else { return };
                let call = json!({"index": number(at), "id": id, "type": "function",
                    "function": {"name": name, "arguments": ""}});
                self.write_delta(&to_json(&json!({"tool_calls": [call]})), None, out);
            }
            (Chunk::Arguments { json: arguments, .. }, PieceChange::Extended(at)) => {
                let call = json!({"index": number(at), "function": {"arguments": arguments}});
                self.write_delta(&to_json(&json!({"tool_calls": [call]})), None, out);
            }
            _ => {}
        }
    }

    fn end(&mut self, answer: &PartialAnswer, out: &mut String) {
        self.begin(out);
        self.write_delta("{}", Some(finish_reason(answer.stop())), out);
        if self.include_usage {
            out.push_str(&self.prefix);
            out.push_str("\"choices\":[],\"usage\":");
            out.push_str(&to_json(&usage_body(&answer.usage(true))));
            out.push_str("}\n\n");
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn fail(&mut self, refusal: &Refusal, out: &mut String) {
        write_event(out, None, &refusal_body(refusal));
    }
}

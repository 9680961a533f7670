//! OpenAI's Chat Completions, as clients speak it: <https://platform.openai.com/docs/api-reference/chat>.

use construct_domain::money::Usage;
use construct_proto::{
    mesh::v1::model_completed::StopReason,
    v1::{ModelParameters, ThinkingEffort},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    asked::{self, Asked, OneOrMany, given, refuse},
    face::{Face, Head, Writer, event, json, read_tokens},
    gather::{Gathered, Grown, Piece},
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
    /// What was thought, as the client was shown it.
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

impl Face for Chat {
    const PURPOSE: &'static str = "chat completions";
    type Writer = Stream;

    fn read(body: &[u8]) -> Result<Asked, Refusal> {
        let body: Body = asked::parse(body)?;
        refuse(body.n.is_some_and(|n| n != 1), "`n` other than 1")?;
        refuse(given(body.logprobs.as_ref()), "`logprobs`")?;
        refuse(given(body.logit_bias.as_ref()), "`logit_bias`")?;
        refuse(given(body.functions.as_ref()), "`functions` (use `tools`)")?;
        refuse(given(body.audio.as_ref()), "`audio`")?;
        refuse(body.web_search_options.is_some(), "`web_search_options`")?;
        refuse(
            body.modalities.iter().flatten().any(|kind| kind != "text"),
            "a modality other than text",
        )?;
        let mut asked = Asked {
            model: body.model,
            stream: body.stream,
            include_usage: body.stream_options.is_some_and(|options| options.include_usage),
            choice: choice(body.tool_choice.as_ref())?,
            one_call: body.parallel_tool_calls == Some(false),
            format: format(body.response_format.as_ref())?,
            parameters: ModelParameters {
                temperature: body.temperature,
                max_tokens: body.max_completion_tokens.or(body.max_tokens),
                top_p: body.top_p,
                stop_sequences: body.stop.map(OneOrMany::into_list).unwrap_or_default(),
                thinking: effort(body.reasoning_effort.as_deref())?.into(),
                ..ModelParameters::default()
            },
            ..Asked::default()
        };
        for tool in body.tools.into_iter().flatten() {
            let function = tool.function.filter(|_| matches!(&*tool.kind, "function" | ""));
            let Some(function) = function else {
                return Err(Refusal::invalid(format!(
                    "tools of the type `{}` are not supported by this proxy",
                    tool.kind
                )));
            };
            asked.tools.push(asked::tool(
                function.name,
                function.description,
                function.parameters,
            )?);
        }
        for message in body.messages {
            read_message(message, &mut asked)?;
        }
        asked.checked()
    }

    fn whole(head: &Head, gathered: &Gathered) -> Value {
        let text = gathered.text();
        let calls: Vec<Value> = gathered.pieces.iter().filter_map(call).collect();
        let content =
            if text.is_empty() && !calls.is_empty() { Value::Null } else { Value::String(text) };
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        let thought = gathered.thought();
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
            "choices": [{"index": 0, "message": message, "logprobs": null, "finish_reason": reason(gathered.stop())}],
            "usage": usage(&gathered.usage(true)),
        })
    }

    fn refused(refusal: &Refusal) -> Value {
        error(refusal)
    }
}

fn read_message(message: Message, asked: &mut Asked) -> Result<(), Refusal> {
    refuse(
        message.function_call.is_some_and(|call| !call.is_null()),
        "`function_call` (use `tool_calls`)",
    )?;
    match &*message.role {
        "system" | "developer" => asked.instruct(&texts(message.content)?),
        "user" => {
            for part in parts(message.content)? {
                asked.say(Role::User, part);
            }
        }
        "assistant" => {
            if let Some(text) = message.reasoning_content.filter(|text| !text.trim().is_empty()) {
                asked.say(Role::Assistant, Part::Thinking { text, data: String::new() });
            }
            let text = texts(message.content)?;
            if !text.trim().is_empty() {
                asked.say(Role::Assistant, Part::Text(text));
            }
            for call in message.tool_calls.into_iter().flatten() {
                let function = call
                    .function
                    .ok_or_else(|| Refusal::invalid("a tool call names no function"))?;
                let arguments = asked::arguments(&function.arguments)?;
                asked.say(
                    Role::Assistant,
                    Part::Call { id: call.id, name: function.name, arguments },
                );
            }
        }
        "tool" => {
            let id = message.tool_call_id.unwrap_or_default();
            let output = texts(message.content)?;
            asked.say(Role::User, Part::Result { id, name: String::new(), output, failed: false });
        }
        role => {
            return Err(Refusal::invalid(format!(
                "messages of the role `{role}` are not supported by this proxy"
            )));
        }
    }
    Ok(())
}

fn parts(content: Option<Content>) -> Result<Vec<Part>, Refusal> {
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
            ContentPart::ImageUrl { image_url } => asked::data_url(&image_url.url, "")?,
            ContentPart::File { file } => {
                let data = file
                    .file_data
                    .ok_or_else(|| Refusal::invalid("files are taken as `file_data` only"))?;
                asked::data_url(&data, &file.filename)?
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

/// Content where only text has a meaning.
fn texts(content: Option<Content>) -> Result<String, Refusal> {
    let mut whole = String::new();
    for part in parts(content)? {
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

fn choice(choice: Option<&Value>) -> Result<ToolChoice, Refusal> {
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

fn format(format: Option<&Value>) -> Result<Format, Refusal> {
    let Some(format) = format.filter(|format| !format.is_null()) else { return Ok(Format::Text) };
    match format["type"].as_str() {
        Some("text") => Ok(Format::Text),
        Some("json_object") => Ok(Format::Json),
        Some("json_schema") => schema(&format["json_schema"]),
        _ => Err(Refusal::invalid("this `response_format` is not supported by this proxy")),
    }
}

/// A schema with its name, as both of the vendor's protocols have it.
pub(crate) fn schema(of: &Value) -> Result<Format, Refusal> {
    if !of["schema"].is_object() {
        return Err(Refusal::invalid("the answer's format lacks its `schema`"));
    }
    Ok(Format::Schema {
        name: of["name"].as_str().unwrap_or("answer").to_owned(),
        schema: of["schema"].clone(),
        strict: of["strict"].as_bool().unwrap_or(false),
    })
}

/// How much to think, in the words of both of the vendor's protocols.
pub(crate) fn effort(word: Option<&str>) -> Result<ThinkingEffort, Refusal> {
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

fn call(piece: &Piece) -> Option<Value> {
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

const fn reason(stop: StopReason) -> &'static str {
    match stop {
        StopReason::ToolUse => "tool_calls",
        StopReason::MaxTokens => "length",
        StopReason::Refused => "content_filter",
        StopReason::EndTurn | StopReason::StopSequence | StopReason::Unspecified => "stop",
    }
}

fn usage(usage: &Usage) -> Value {
    let read = read_tokens(usage);
    json!({
        "prompt_tokens": read,
        "completion_tokens": usage.output_tokens,
        "total_tokens": read.saturating_add(usage.output_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cache_read_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
    })
}

/// The body of an error, of both of the vendor's protocols.
pub(crate) fn error(refusal: &Refusal) -> Value {
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
    begun: bool,
}

impl Stream {
    fn delta(&mut self, delta: &str, finish: Option<&str>, out: &mut String) {
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
        if !self.begun {
            self.begun = true;
            self.delta("{\"role\":\"assistant\",\"content\":\"\"}", None, out);
        }
    }
}

impl Writer for Stream {
    fn new(head: Head) -> Self {
        let (id, model) = (json(&format!("chatcmpl-{}", head.id)), json(&head.model));
        let prefix = format!(
            "data: {{\"id\":{id},\"object\":\"chat.completion.chunk\",\"created\":{},\"model\":{model},",
            head.created
        );
        Self { prefix, include_usage: head.include_usage, begun: false }
    }

    fn push(&mut self, chunk: &Chunk, grown: Grown, gathered: &Gathered, out: &mut String) {
        let number = |at: usize| {
            gathered.pieces[..at].iter().filter(|piece| matches!(piece, Piece::Call { .. })).count()
        };
        match (chunk, grown) {
            (Chunk::Text(text), _) => {
                self.begin(out);
                self.delta(&format!("{{\"content\":{}}}", json(text)), None, out);
            }
            (Chunk::Thinking(text), _) => {
                self.begin(out);
                self.delta(&format!("{{\"reasoning_content\":{}}}", json(text)), None, out);
            }
            (Chunk::Call { .. }, Grown::Begun(at)) => {
                self.begin(out);
                let Piece::Call { id, name, .. } = &gathered.pieces[at] else { return };
                let call = json!({"index": number(at), "id": id, "type": "function",
                    "function": {"name": name, "arguments": ""}});
                self.delta(&json(&json!({"tool_calls": [call]})), None, out);
            }
            (Chunk::Arguments { json: arguments, .. }, Grown::On(at)) => {
                let call = json!({"index": number(at), "function": {"arguments": arguments}});
                self.delta(&json(&json!({"tool_calls": [call]})), None, out);
            }
            _ => {}
        }
    }

    fn end(&mut self, gathered: &Gathered, out: &mut String) {
        self.begin(out);
        self.delta("{}", Some(reason(gathered.stop())), out);
        if self.include_usage {
            out.push_str(&self.prefix);
            out.push_str("\"choices\":[],\"usage\":");
            out.push_str(&json(&usage(&gathered.usage(true))));
            out.push_str("}\n\n");
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn failed(&mut self, refusal: &Refusal, out: &mut String) {
        event(out, None, &error(refusal));
    }
}

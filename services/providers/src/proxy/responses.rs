//! OpenAI's Responses without state for clients:
//! <https://platform.openai.com/docs/api-reference/responses>.

use construct_domain::money::Usage;
use construct_proto::{mesh::v1::model_completed::StopReason, v1::ModelParameters};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    chat,
    client_request::{self, ClientRequest, is_set, reject_if},
    partial_answer::{PartialAnswer, Piece, PieceChange},
    protocol::{
        AnswerHead, ClientProtocol, Writer, is_complete_json, total_input_tokens, write_event,
    },
    refusal::Refusal,
    thinking,
};
use crate::{
    transcript::{Part, Role},
    vendor::{Chunk, Format, ToolChoice},
};

/// The protocol.
pub(crate) struct Responses;

#[derive(Deserialize)]
struct Body {
    #[serde(default)]
    model: String,
    input: Input,
    instructions: Option<String>,
    #[serde(default)]
    stream: Option<bool>,
    max_output_tokens: Option<u32>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    tools: Option<Vec<ToolBody>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    text: Option<Value>,
    reasoning: Option<Value>,
    previous_response_id: Option<Value>,
    conversation: Option<Value>,
    background: Option<Value>,
    prompt: Option<Value>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a text or a list of items")]
enum Input {
    Text(String),
    Items(Vec<Value>),
}

#[derive(Deserialize)]
struct ToolBody {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    name: String,
    description: Option<String>,
    parameters: Option<Value>,
}

impl ClientProtocol for Responses {
    const PURPOSE: &'static str = "responses";
    type Writer = Stream;

    fn read(body: &[u8]) -> Result<ClientRequest, Refusal> {
        let body: Body = client_request::parse(body)?;
        let stateful = "(nothing is kept here: send the conversation with every request)";
        reject_if(
            is_set(body.previous_response_id.as_ref()),
            &format!("`previous_response_id` {stateful}"),
        )?;
        reject_if(is_set(body.conversation.as_ref()), &format!("`conversation` {stateful}"))?;
        reject_if(is_set(body.background.as_ref()), "`background`")?;
        reject_if(is_set(body.prompt.as_ref()), "`prompt`")?;
        let reasoning = body.reasoning.unwrap_or_default();
        let mut asked = ClientRequest {
            model: body.model,
            stream: body.stream == Some(true),
            include_usage: true,
            system: body.instructions.unwrap_or_default(),
            choice: tool_choice(body.tool_choice.as_ref())?,
            one_call: body.parallel_tool_calls == Some(false),
            format: answer_format(body.text.as_ref())?,
            parameters: ModelParameters {
                temperature: body.temperature,
                max_tokens: body.max_output_tokens,
                top_p: body.top_p,
                thinking: chat::thinking_effort(reasoning["effort"].as_str())?.into(),
                ..ModelParameters::default()
            },
            ..ClientRequest::default()
        };
        for tool in body.tools.into_iter().flatten() {
            if tool.kind != "function" {
                let kind = tool.kind;
                return Err(Refusal::invalid(format!(
                    "tools of the type `{kind}` are not supported by this proxy"
                )));
            }
            asked.tools.push(client_request::tool(tool.name, tool.description, tool.parameters)?);
        }
        match body.input {
            Input::Text(text) => asked.push_part(Role::User, Part::Text(text)),
            Input::Items(items) => {
                for item in &items {
                    read_item(item, &mut asked)?;
                }
            }
        }
        asked.validate()
    }

    fn answer_body(head: &AnswerHead, answer: &PartialAnswer) -> Value {
        response(head, Some(answer))
    }

    fn error_body(refusal: &Refusal) -> Value {
        chat::refusal_body(refusal)
    }
}

fn read_item(item: &Value, asked: &mut ClientRequest) -> Result<(), Refusal> {
    let text = |key: &str| item[key].as_str().unwrap_or_default();
    match item["type"].as_str() {
        None | Some("message") => match text("role") {
            "system" | "developer" => {
                let texts: Vec<String> = content(&item["content"])?
                    .into_iter()
                    .filter_map(|part| if let Part::Text(text) = part { Some(text) } else { None })
                    .collect();
                asked.push_instruction(&texts.join("\n\n"));
            }
            role @ ("user" | "assistant") => {
                let role = if role == "user" { Role::User } else { Role::Assistant };
                for part in content(&item["content"])? {
                    asked.push_part(role, part);
                }
            }
            role => {
                return Err(Refusal::invalid(format!(
                    "messages of the role `{role}` are not supported by this proxy"
                )));
            }
        },
        Some("function_call") => {
            let arguments = client_request::parse_arguments(text("arguments"))?;
            let (id, name) = (text("call_id").to_owned(), text("name").to_owned());
            asked.push_part(Role::Assistant, Part::Call { id, name, arguments });
        }
        Some("function_call_output") => {
            let mut output = String::new();
            let mut shown = Vec::new();
            for part in content(&item["output"])? {
                match part {
                    Part::Text(text) => output.push_str(&text),
                    part => shown.push(part),
                }
            }
            let id = text("call_id").to_owned();
            asked.push_part(
                Role::User,
                Part::Result { id, name: String::new(), output, failed: false },
            );
            for part in shown {
                asked.push_part(Role::User, part);
            }
        }
        Some("reasoning") => {
            let summary = item["summary"].as_array().into_iter().flatten();
            let texts: Vec<&str> = summary.filter_map(|part| part["text"].as_str()).collect();
            let (text, data) = (texts.join("\n\n"), text("encrypted_content").to_owned());
            asked.push_part(Role::Assistant, Part::Thinking { text, data });
        }
        Some(kind) => {
            return Err(Refusal::invalid(format!(
                "input of the type `{kind}` is not supported by this proxy"
            )));
        }
    }
    Ok(())
}

fn content(content: &Value) -> Result<Vec<Part>, Refusal> {
    let list = match content {
        Value::String(text) if text.trim().is_empty() => return Ok(Vec::new()),
        Value::String(text) => return Ok(vec![Part::Text(text.clone())]),
        Value::Array(list) => list,
        Value::Null => return Ok(Vec::new()),
        _ => return Err(Refusal::invalid("the content of an item is neither a text nor a list")),
    };
    let mut parts = Vec::with_capacity(list.len());
    for part in list {
        let text = |key: &str| part[key].as_str().unwrap_or_default();
        parts.push(match part["type"].as_str().unwrap_or_default() {
            "input_text" | "output_text" | "text" if text("text").trim().is_empty() => continue,
            "input_text" | "output_text" | "text" => Part::Text(text("text").to_owned()),
            "refusal" => Part::Text(text("refusal").to_owned()),
            "input_image" => client_request::data_url(text("image_url"), "")?,
            "input_file" => client_request::data_url(text("file_data"), text("filename"))?,
            kind => {
                return Err(Refusal::invalid(format!(
                    "content of the type `{kind}` is not supported by this proxy"
                )));
            }
        });
    }
    Ok(parts)
}

fn tool_choice(choice: Option<&Value>) -> Result<ToolChoice, Refusal> {
    Ok(match choice {
        None | Some(Value::Null) => ToolChoice::Auto,
        Some(Value::String(word)) if word == "auto" => ToolChoice::Auto,
        Some(Value::String(word)) if word == "none" => ToolChoice::Never,
        Some(Value::String(word)) if word == "required" => ToolChoice::Any,
        Some(choice) if choice["type"] == "function" && choice["name"].is_string() => {
            ToolChoice::Named(choice["name"].as_str().unwrap_or_default().to_owned())
        }
        Some(_) => {
            return Err(Refusal::invalid("this `tool_choice` is not supported by this proxy"));
        }
    })
}

fn answer_format(text: Option<&Value>) -> Result<Format, Refusal> {
    let Some(format) = text.and_then(|text| text.get("format")).filter(|format| !format.is_null())
    else {
        return Ok(Format::Text);
    };
    match format["type"].as_str() {
        Some("text") => Ok(Format::Text),
        Some("json_object") => Ok(Format::Json),
        Some("json_schema") => chat::json_schema_format(format),
        _ => Err(Refusal::invalid("this format of the text is not supported by this proxy")),
    }
}

/// The response so far; without an answer, as it begins.
fn response(head: &AnswerHead, answer: Option<&PartialAnswer>) -> Value {
    let output: Vec<Value> = answer
        .into_iter()
        .flat_map(|answer| &answer.pieces)
        .enumerate()
        .map(|(at, piece)| item(head, at, piece, "completed"))
        .collect();
    let stop = answer.map(PartialAnswer::stop);
    let incomplete = match stop {
        Some(StopReason::MaxTokens) => Some("max_output_tokens"),
        Some(StopReason::Refused) => Some("content_filter"),
        _ => None,
    };
    let status = match (answer, incomplete) {
        (None, _) => "in_progress",
        (_, None) => "completed",
        (_, Some(_)) => "incomplete",
    };
    json!({
        "id": format!("resp_{}", head.id),
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": null,
        "incomplete_details": incomplete.map(|reason| json!({"reason": reason})),
        "instructions": null,
        "metadata": {},
        "model": head.model,
        "output": output,
        "parallel_tool_calls": true,
        "previous_response_id": null,
        "store": false,
        "temperature": null,
        "tool_choice": "auto",
        "tools": [],
        "top_p": null,
        "usage": answer.map(|answer| usage_body(&answer.usage(true))),
    })
}

fn usage_body(usage: &Usage) -> Value {
    let read = total_input_tokens(usage);
    json!({
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": usage.cache_read_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
        "total_tokens": read.saturating_add(usage.output_tokens),
    })
}

fn item_id(head: &AnswerHead, at: usize, piece: &Piece) -> String {
    let prefix = match piece {
        Piece::Text(_) => "msg",
        Piece::Thinking { .. } => "rs",
        Piece::Call { .. } => "fc",
    };
    format!("{prefix}_{}_{at}", head.id)
}

fn item(head: &AnswerHead, at: usize, piece: &Piece, status: &str) -> Value {
    let id = item_id(head, at, piece);
    match piece {
        Piece::Text(text) => {
            json!({"type": "message", "id": id, "status": status, "role": "assistant",
            "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]})
        }
        Piece::Thinking { text, data } => {
            let summary = if text.is_empty() {
                json!([])
            } else {
                json!([{"type": "summary_text", "text": text}])
            };
            json!({"type": "reasoning", "id": id, "summary": summary,
                "encrypted_content": thinking::seal(&head.provider_id, data)})
        }
        Piece::Call { id: call, name, arguments, .. } => {
            let arguments = if arguments.trim().is_empty() { "{}" } else { arguments };
            json!({"type": "function_call", "id": id, "call_id": call, "name": name, "arguments": arguments,
                "status": status})
        }
    }
}

/// A streamed answer.
pub(crate) struct Stream {
    head: AnswerHead,
    has_begun: bool,
    sequence: u64,
    /// Whether the item of each piece is open.
    open: Vec<bool>,
}

impl Stream {
    fn event(&mut self, name: &str, mut data: Value, out: &mut String) {
        data["type"] = json!(name);
        data["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        write_event(out, Some(name), &data);
    }

    fn begin(&mut self, out: &mut String) {
        if self.has_begun {
            return;
        }
        self.has_begun = true;
        let response = response(&self.head, None);
        self.event("response.created", json!({"response": response}), out);
        self.event("response.in_progress", json!({"response": response}), out);
    }

    fn start(&mut self, at: usize, answer: &PartialAnswer, out: &mut String) {
        let piece = &answer.pieces[at];
        let id = item_id(&self.head, at, piece);
        let mut empty = item(&self.head, at, piece, "in_progress");
        match piece {
            Piece::Text(_) => empty["content"] = json!([]),
            Piece::Thinking { .. } => empty["summary"] = json!([]),
            Piece::Call { .. } => empty["arguments"] = json!(""),
        }
        self.open.push(true);
        self.event("response.output_item.added", json!({"output_index": at, "item": empty}), out);
        match piece {
            Piece::Text(_) => {
                let part =
                    json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []});
                let data =
                    json!({"item_id": id, "output_index": at, "content_index": 0, "part": part});
                self.event("response.content_part.added", data, out);
            }
            Piece::Thinking { text, .. } if !text.is_empty() => {
                let part = json!({"type": "summary_text", "text": ""});
                let data =
                    json!({"item_id": id, "output_index": at, "summary_index": 0, "part": part});
                self.event("response.reasoning_summary_part.added", data, out);
            }
            Piece::Thinking { .. } | Piece::Call { .. } => {}
        }
    }

    /// Closes the complete items; at the `end` of the answer all of them.
    fn close(&mut self, answer: &PartialAnswer, end: bool, out: &mut String) {
        for at in 0..self.open.len() {
            let piece = &answer.pieces[at];
            let waits = matches!(piece, Piece::Call { arguments, .. } if !end && !is_complete_json(arguments));
            if !self.open[at] || waits {
                continue;
            }
            self.open[at] = false;
            let id = item_id(&self.head, at, piece);
            match piece {
                Piece::Text(text) => {
                    let place = json!({"item_id": id, "output_index": at, "content_index": 0});
                    let mut done = place.clone();
                    done["text"] = json!(text);
                    done["logprobs"] = json!([]);
                    self.event("response.output_text.done", done, out);
                    let mut done = place;
                    done["part"] = json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
                    self.event("response.content_part.done", done, out);
                }
                Piece::Thinking { text, .. } if !text.is_empty() => {
                    let place = json!({"item_id": id, "output_index": at, "summary_index": 0});
                    let mut done = place.clone();
                    done["text"] = json!(text);
                    self.event("response.reasoning_summary_text.done", done, out);
                    let mut done = place;
                    done["part"] = json!({"type": "summary_text", "text": text});
                    self.event("response.reasoning_summary_part.done", done, out);
                }
                Piece::Thinking { .. } => {}
                Piece::Call { name, arguments, .. } => {
                    let data = json!({"item_id": id, "output_index": at, "name": name, "arguments": arguments});
                    self.event("response.function_call_arguments.done", data, out);
                }
            }
            let item = item(&self.head, at, piece, "completed");
            self.event("response.output_item.done", json!({"output_index": at, "item": item}), out);
        }
    }
}

impl Writer for Stream {
    fn new(head: AnswerHead) -> Self {
        Self { head, has_begun: false, sequence: 0, open: Vec::new() }
    }

    fn push(
        &mut self,
        chunk: &Chunk,
        change: PieceChange,
        answer: &PartialAnswer,
        out: &mut String,
    ) {
        self.begin(out);
        if let PieceChange::Started(at) = change {
            self.close(answer, false, out);
            self.start(at, answer, out);
        }
        let (PieceChange::Started(at) | PieceChange::Extended(at)) = change else { return };
        let id = item_id(&self.head, at, &answer.pieces[at]);
        match chunk {
            Chunk::Text(text) => {
                let data = json!({"item_id": id, "output_index": at, "content_index": 0, "delta": text, "logprobs": []});
                self.event("response.output_text.delta", data, out);
            }
            Chunk::Thinking(text) => {
                let data =
                    json!({"item_id": id, "output_index": at, "summary_index": 0, "delta": text});
                self.event("response.reasoning_summary_text.delta", data, out);
            }
            Chunk::Arguments { json, .. } => {
                let data = json!({"item_id": id, "output_index": at, "delta": json});
                self.event("response.function_call_arguments.delta", data, out);
            }
            _ => {}
        }
    }

    fn end(&mut self, answer: &PartialAnswer, out: &mut String) {
        self.begin(out);
        self.close(answer, true, out);
        let response = response(&self.head, Some(answer));
        let name = if response["status"] == "incomplete" {
            "response.incomplete"
        } else {
            "response.completed"
        };
        self.event(name, json!({"response": response}), out);
    }

    fn fail(&mut self, refusal: &Refusal, out: &mut String) {
        self.begin(out);
        let mut failed = response(&self.head, None);
        let error = &chat::refusal_body(refusal)["error"];
        let code = if error["code"].is_null() { &error["type"] } else { &error["code"] };
        failed["status"] = json!("failed");
        failed["error"] = json!({"code": code, "message": error["message"]});
        self.event("response.failed", json!({"response": failed}), out);
    }
}

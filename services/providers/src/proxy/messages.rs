//! Anthropic's Messages for clients: <https://docs.claude.com/en/api/messages>.

use construct_domain::money::Usage;
use construct_proto::{
    mesh::v1::model_completed::StopReason,
    v1::{ModelParameters, ThinkingEffort},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    chat,
    client_request::{self, ClientRequest, is_set, reject_if},
    partial_answer::{PartialAnswer, Piece, PieceChange},
    protocol::{
        AnswerHead, ClientProtocol, Writer, arguments_value, is_complete_json, write_event,
    },
    refusal::{Kind, Refusal},
    thinking,
};
use crate::{
    transcript::{Part, Role},
    vendor::{Chunk, Format, ToolChoice},
};

/// The protocol.
pub(crate) struct Messages;

#[derive(Deserialize)]
struct Body {
    #[serde(default)]
    model: String,
    max_tokens: Option<u32>,
    messages: Vec<Message>,
    system: Option<Content>,
    #[serde(default)]
    stream: bool,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<u32>,
    #[serde(default)]
    stop_sequences: Option<Vec<String>>,
    tools: Option<Vec<ToolBody>>,
    tool_choice: Option<Choice>,
    thinking: Option<Thinking>,
    output_config: Option<Value>,
    output_format: Option<Value>,
    mcp_servers: Option<Value>,
    container: Option<Value>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: Content,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a text or a list of blocks")]
enum Content {
    Text(String),
    Blocks(Vec<Block>),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Text {
        text: String,
    },
    Image {
        source: Source,
    },
    Document {
        source: Source,
        title: Option<String>,
    },
    ToolUse {
        id: String,
        name: String,
        #[serde(default)]
        input: Value,
    },
    ToolResult {
        tool_use_id: String,
        content: Option<Content>,
        #[serde(default)]
        is_error: Option<bool>,
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
enum Source {
    Base64 {
        media_type: String,
        data: String,
    },
    Text {
        data: String,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct ToolBody {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: String,
    description: Option<String>,
    input_schema: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    #[serde(default)]
    disable_parallel_tool_use: bool,
}

#[derive(Deserialize)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
    budget_tokens: Option<u32>,
}

impl ClientProtocol for Messages {
    const PURPOSE: &'static str = "messages";
    type Writer = Stream;

    fn read(body: &[u8]) -> Result<ClientRequest, Refusal> {
        let body: Body = client_request::parse(body)?;
        reject_if(is_set(body.mcp_servers.as_ref()), "`mcp_servers`")?;
        reject_if(is_set(body.container.as_ref()), "`container`")?;
        let choice = body.tool_choice.as_ref();
        let output = body.output_config.unwrap_or_default();
        let effort = match body
            .thinking
            .map(|thinking| (thinking.kind, thinking.budget_tokens.unwrap_or(0)))
        {
            Some((kind, _)) if kind == "disabled" => ThinkingEffort::Off,
            Some((kind, budget)) if kind == "enabled" => match budget {
                0..=4_096 => ThinkingEffort::Low,
                4_097..=16_384 => ThinkingEffort::Medium,
                _ => ThinkingEffort::High,
            },
            Some((kind, _)) if kind == "adaptive" => {
                match chat::thinking_effort(output["effort"].as_str())? {
                    ThinkingEffort::Unspecified => ThinkingEffort::High,
                    effort => effort,
                }
            }
            Some((kind, _)) => {
                return Err(Refusal::invalid(format!("there is no thinking of the type `{kind}`")));
            }
            None => chat::thinking_effort(output["effort"].as_str())?,
        };
        let mut asked = ClientRequest {
            model: body.model,
            stream: body.stream,
            include_usage: true,
            choice: match choice.map(|choice| (&*choice.kind, choice.name.as_ref())) {
                None | Some(("auto", _)) => ToolChoice::Auto,
                Some(("none", _)) => ToolChoice::Never,
                Some(("any", _)) => ToolChoice::Any,
                Some(("tool", Some(name))) => ToolChoice::Named(name.clone()),
                Some((kind, _)) => {
                    return Err(Refusal::invalid(format!("there is no tool_choice `{kind}`")));
                }
            },
            one_call: choice.is_some_and(|choice| choice.disable_parallel_tool_use),
            format: answer_format(output.get("format").or(body.output_format.as_ref()))?,
            parameters: ModelParameters {
                temperature: body.temperature,
                max_tokens: body.max_tokens,
                top_p: body.top_p,
                top_k: body.top_k,
                stop_sequences: body.stop_sequences.unwrap_or_default(),
                thinking: effort.into(),
            },
            ..ClientRequest::default()
        };
        if let Some(system) = body.system {
            asked.system = read_system_text(system)?;
        }
        for tool in body.tools.into_iter().flatten() {
            if let Some(kind) = tool.kind.filter(|kind| kind != "custom") {
                return Err(Refusal::invalid(format!(
                    "tools of the type `{kind}` are not supported by this proxy"
                )));
            }
            asked.tools.push(client_request::tool(tool.name, tool.description, tool.input_schema)?);
        }
        for message in body.messages {
            let role = match &*message.role {
                "user" => Role::User,
                "assistant" => Role::Assistant,
                "system" => {
                    asked.push_instruction(&read_system_text(message.content)?);
                    continue;
                }
                role => return Err(Refusal::invalid(format!("there is no role `{role}`"))),
            };
            for part in read_parts(message.content)? {
                asked.push_part(role, part);
            }
        }
        if asked.turns.last().is_some_and(|last| last.role == Role::Assistant) {
            return Err(Refusal::invalid(
                "the conversation must end with a message of the user: answers that are begun for the model are not \
                 supported by this proxy",
            ));
        }
        asked.validate()
    }

    fn answer_body(head: &AnswerHead, answer: &PartialAnswer) -> Value {
        let content: Vec<Value> =
            answer.pieces.iter().filter_map(|piece| block_body(piece, &head.provider_id)).collect();
        json!({
            "id": format!("msg_{}", head.id),
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": content,
            "stop_reason": stop_reason(answer.stop()),
            "stop_sequence": null,
            "usage": usage_body(&answer.usage(true)),
        })
    }

    fn error_body(refusal: &Refusal) -> Value {
        refusal_body(refusal)
    }

    fn status(refusal: &Refusal) -> u16 {
        match refusal.kind {
            Kind::Overloaded => 529,
            _ => refusal.status(),
        }
    }
}

fn answer_format(format: Option<&Value>) -> Result<Format, Refusal> {
    match format.filter(|format| !format.is_null()) {
        None => Ok(Format::Text),
        Some(format) if format["type"] == "json_schema" && format["schema"].is_object() => {
            Ok(Format::Schema {
                name: "answer".to_owned(),
                schema: format["schema"].clone(),
                strict: true,
            })
        }
        Some(_) => Err(Refusal::invalid("this output format is not supported by this proxy")),
    }
}

fn read_system_text(content: Content) -> Result<String, Refusal> {
    let texts: Result<Vec<String>, Refusal> = read_parts(content)?
        .into_iter()
        .map(|part| match part {
            Part::Text(text) => Ok(text),
            _ => Err(Refusal::invalid("the system prompt can hold text only")),
        })
        .collect();
    Ok(texts?.join("\n\n"))
}

fn read_parts(content: Content) -> Result<Vec<Part>, Refusal> {
    let blocks = match content {
        Content::Text(text) => vec![Block::Text { text }],
        Content::Blocks(blocks) => blocks,
    };
    let mut all = Vec::with_capacity(blocks.len());
    for block in blocks {
        match block {
            Block::Text { text } if text.trim().is_empty() => {}
            Block::Text { text } => all.push(Part::Text(text)),
            Block::Image { source } => all.push(read_source(source, "")?),
            Block::Document { source, title } => {
                all.push(read_source(source, &title.unwrap_or_default())?)
            }
            Block::ToolUse { id, name, input } => {
                let arguments = if input.is_null() { json!({}) } else { input };
                all.push(Part::Call { id, name, arguments });
            }
            Block::ToolResult { tool_use_id: id, content, is_error } => {
                let mut output = Vec::new();
                let mut shown = Vec::new();
                for part in content.map(read_parts).transpose()?.unwrap_or_default() {
                    match part {
                        Part::Text(text) => output.push(text),
                        // Most vendors don't allow media within a result.
                        part @ Part::Media(_) => shown.push(part),
                        _ => {
                            return Err(Refusal::invalid(
                                "a tool's result can hold text, images and documents only",
                            ));
                        }
                    }
                }
                let (output, failed) = (output.join("\n"), is_error == Some(true));
                all.push(Part::Result { id, name: String::new(), output, failed });
                all.extend(shown);
            }
            Block::Thinking { thinking: text, signature: data } => {
                all.push(Part::Thinking { text, data })
            }
            Block::RedactedThinking { data } => {
                all.push(Part::Thinking { text: String::new(), data })
            }
            Block::Other => {
                return Err(Refusal::invalid(
                    "a block of a message is of a type that this proxy does not support",
                ));
            }
        }
    }
    Ok(all)
}

fn read_source(source: Source, name: &str) -> Result<Part, Refusal> {
    match source {
        Source::Base64 { media_type, data } => client_request::media(&media_type, name, &data),
        Source::Text { data } => Ok(client_request::text_file(name, "text/plain", &data)),
        Source::Other => Err(Refusal::invalid(
            "images and documents are taken as base64 or text only: the proxy fetches nothing on behalf of its clients",
        )),
    }
}

fn block_body(piece: &Piece, provider_id: &str) -> Option<Value> {
    Some(match piece {
        Piece::Text(text) => json!({"type": "text", "text": text}),
        Piece::Thinking { text, data } if text.is_empty() && data.is_empty() => return None,
        Piece::Thinking { text, data } if text.is_empty() => {
            json!({"type": "redacted_thinking", "data": thinking::seal(provider_id, data)})
        }
        Piece::Thinking { text, data } => {
            json!({"type": "thinking", "thinking": text, "signature": thinking::seal(provider_id, data)})
        }
        Piece::Call { id, name, arguments, .. } => {
            json!({"type": "tool_use", "id": id, "name": name, "input": arguments_value(arguments)})
        }
    })
}

const fn stop_reason(stop: StopReason) -> &'static str {
    match stop {
        StopReason::ToolUse => "tool_use",
        StopReason::MaxTokens => "max_tokens",
        StopReason::StopSequence => "stop_sequence",
        StopReason::Refused => "refusal",
        StopReason::EndTurn | StopReason::Unspecified => "end_turn",
    }
}

fn usage_body(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cache_read_input_tokens": usage.cache_read_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
    })
}

fn refusal_body(refusal: &Refusal) -> Value {
    let kind = match refusal.kind {
        Kind::Invalid | Kind::TooLong | Kind::Refused => "invalid_request_error",
        Kind::Unauthenticated => "authentication_error",
        Kind::NoModel | Kind::NoRoute => "not_found_error",
        Kind::TooLarge => "request_too_large",
        Kind::Budget => "billing_error",
        Kind::RateLimited => "rate_limit_error",
        Kind::Overloaded => "overloaded_error",
        Kind::Timeout => "timeout_error",
        Kind::Vendor | Kind::Internal => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": refusal.message}})
}

/// A streamed answer.
pub(crate) struct Stream {
    head: AnswerHead,
    has_begun: bool,
    /// The blocks by piece: their index, and whether they are open.
    blocks: Vec<BlockState>,
}

struct BlockState {
    index: usize,
    open: bool,
}

impl Stream {
    fn begin(&mut self, answer: &PartialAnswer, out: &mut String) {
        if self.has_begun {
            return;
        }
        self.has_begun = true;
        let known = Usage { output_tokens: 0, ..answer.usage(false) };
        let message = json!({"id": format!("msg_{}", self.head.id), "type": "message", "role": "assistant",
            "model": self.head.model, "content": [], "stop_reason": null, "stop_sequence": null, "usage": usage_body(&known)});
        write_event(
            out,
            Some("message_start"),
            &json!({"type": "message_start", "message": message}),
        );
    }

    fn start(&mut self, at: usize, block: &Value, out: &mut String) {
        // Every piece has a block; the index of the piece is that of the block.
        self.blocks.push(BlockState { index: at, open: true });
        write_event(
            out,
            Some("content_block_start"),
            &json!({"type": "content_block_start", "index": at, "content_block": block}),
        );
    }

    fn delta(at: usize, delta: &Value, out: &mut String) {
        write_event(
            out,
            Some("content_block_delta"),
            &json!({"type": "content_block_delta", "index": at, "delta": delta}),
        );
    }

    /// Closes the complete blocks; at the `end` of the answer all of them.
    fn close(&mut self, answer: &PartialAnswer, end: bool, out: &mut String) {
        for block in self.blocks.iter_mut().filter(|block| block.open) {
            match &answer.pieces[block.index] {
                Piece::Call { arguments, .. } if !end && !is_complete_json(arguments) => continue,
                Piece::Thinking { text, data } if !text.is_empty() => {
                    let signature = thinking::seal(&self.head.provider_id, data);
                    Self::delta(
                        block.index,
                        &json!({"type": "signature_delta", "signature": signature}),
                        out,
                    );
                }
                _ => {}
            }
            block.open = false;
            write_event(
                out,
                Some("content_block_stop"),
                &json!({"type": "content_block_stop", "index": block.index}),
            );
        }
    }
}

impl Writer for Stream {
    fn new(head: AnswerHead) -> Self {
        Self { head, has_begun: false, blocks: Vec::new() }
    }

    fn push(
        &mut self,
        chunk: &Chunk,
        change: PieceChange,
        answer: &PartialAnswer,
        out: &mut String,
    ) {
        self.begin(answer, out);
        if let PieceChange::Started(at) = change {
            self.close(answer, false, out);
            let block = match chunk {
                Chunk::Text(_) => json!({"type": "text", "text": ""}),
                Chunk::Thinking(_) => json!({"type": "thinking", "thinking": "", "signature": ""}),
                Chunk::ThinkingData(data) => {
                    json!({"type": "redacted_thinking", "data": thinking::seal(&self.head.provider_id, data)})
                }
                _ => match &answer.pieces[at] {
                    Piece::Call { id, name, .. } => {
                        json!({"type": "tool_use", "id": id, "name": name, "input": {}})
                    }
                    _ => return,
                },
            };
            self.start(at, &block, out);
        }
        let (PieceChange::Started(at) | PieceChange::Extended(at)) = change else { return };
        match chunk {
            Chunk::Text(text) => Self::delta(at, &json!({"type": "text_delta", "text": text}), out),
            Chunk::Thinking(text) => {
                Self::delta(at, &json!({"type": "thinking_delta", "thinking": text}), out)
            }
            Chunk::Arguments { json, .. } => {
                Self::delta(at, &json!({"type": "input_json_delta", "partial_json": json}), out);
            }
            _ => {}
        }
    }

    fn end(&mut self, answer: &PartialAnswer, out: &mut String) {
        self.begin(answer, out);
        self.close(answer, true, out);
        let delta = json!({"stop_reason": stop_reason(answer.stop()), "stop_sequence": null});
        let used = usage_body(&answer.usage(true));
        write_event(
            out,
            Some("message_delta"),
            &json!({"type": "message_delta", "delta": delta, "usage": used}),
        );
        write_event(out, Some("message_stop"), &json!({"type": "message_stop"}));
    }

    fn fail(&mut self, refusal: &Refusal, out: &mut String) {
        write_event(out, Some("error"), &refusal_body(refusal));
    }

    fn ping(&self, out: &mut String) {
        write_event(out, Some("ping"), &json!({"type": "ping"}));
    }
}

//! The answers of Anthropic's Messages API, in the form of its documentation.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::Reply;

/// An answer assembled block by block.
#[derive(Debug, Clone)]
pub struct Answer {
    blocks: Vec<Value>,
    stop_reason: String,
    input_tokens: u32,
    cache_read: u32,
    cache_write: u32,
    output_tokens: u32,
}

impl Answer {
    /// An answer that begins with text.
    pub fn text(text: &str) -> Self {
        Self::empty().and_text(text)
    }

    /// An answer without any block.
    pub fn empty() -> Self {
        Self {
            blocks: Vec::new(),
            stop_reason: "end_turn".to_owned(),
            input_tokens: 25,
            cache_read: 0,
            cache_write: 0,
            output_tokens: 15,
        }
    }

    /// With more text, as a block of its own.
    #[must_use]
    pub fn and_text(mut self, text: &str) -> Self {
        self.blocks.push(json!({"type": "text", "text": text}));
        self
    }

    /// With a thinking block.
    #[must_use]
    pub fn and_thinking(mut self, text: &str, signature: &str) -> Self {
        self.blocks.push(json!({"type": "thinking", "thinking": text, "signature": signature}));
        self
    }

    /// With a redacted thinking block.
    #[must_use]
    pub fn and_redacted(mut self, data: &str) -> Self {
        self.blocks.push(json!({"type": "redacted_thinking", "data": data}));
        self
    }

    /// With a call of `code_interpreter`.
    #[must_use]
    pub fn and_code(self, id: &str, code: &str) -> Self {
        self.and_call(id, "code_interpreter", &json!({"code": code}))
    }

    /// With a call of any tool.
    #[must_use]
    pub fn and_call(mut self, id: &str, name: &str, input: &Value) -> Self {
        self.blocks.push(json!({"type": "tool_use", "id": id, "name": name, "input": input}));
        self.stop_reason = "tool_use".to_owned();
        self
    }

    /// With another stop reason.
    #[must_use]
    pub fn with_stop_reason(mut self, reason: &str) -> Self {
        self.stop_reason = reason.to_owned();
        self
    }

    /// With this token usage.
    #[must_use]
    pub fn with_usage(
        mut self,
        input: u32,
        cache_read: u32,
        cache_write: u32,
        output: u32,
    ) -> Self {
        (self.input_tokens, self.cache_read, self.cache_write, self.output_tokens) =
            (input, cache_read, cache_write, output);
        self
    }

    /// The events in wire form.
    pub fn wire(&self) -> String {
        let mut wire = String::new();
        let mut event = |data: Value| {
            let name = data["type"].as_str().unwrap_or_default().to_owned();
            // Writing to a string cannot fail.
            let _ = write!(wire, "event: {name}\ndata: {data}\n\n");
        };
        event(json!({"type": "message_start", "message": {
            "id": "msg_01XFDUDYJgAACzvnptvVoYEL", "type": "message", "role": "assistant", "model": "claude-test",
            "content": [], "stop_reason": null, "stop_sequence": null,
            "usage": {
                "input_tokens": self.input_tokens, "cache_creation_input_tokens": self.cache_write,
                "cache_read_input_tokens": self.cache_read, "output_tokens": 1,
            },
        }}));
        event(json!({"type": "ping"}));
        for (index, block) in self.blocks.iter().enumerate() {
            let (mut start, kind, field) =
                (block.clone(), block["type"].as_str().unwrap_or_default(), field_of(block));
            let is_call = kind == "tool_use";
            if let Some(field) = field {
                start[field] = if is_call { json!({}) } else { json!("") };
            }
            if kind == "thinking" {
                start["signature"] = json!("");
            }
            event(json!({"type": "content_block_start", "index": index, "content_block": start}));
            let mut grow = |delta: Value| {
                event(json!({"type": "content_block_delta", "index": index, "delta": delta}));
            };
            let whole = match field.map(|field| &block[field]) {
                None => String::new(),
                Some(Value::String(text)) => text.clone(),
                Some(input) => input.to_string(),
            };
            if is_call {
                grow(json!({"type": "input_json_delta", "partial_json": ""}));
            }
            for piece in pieces(&whole) {
                grow(match kind {
                    "tool_use" => json!({"type": "input_json_delta", "partial_json": piece}),
                    "thinking" => json!({"type": "thinking_delta", "thinking": piece}),
                    _ => json!({"type": "text_delta", "text": piece}),
                });
            }
            if kind == "thinking" {
                grow(json!({"type": "signature_delta", "signature": block["signature"]}));
            }
            event(json!({"type": "content_block_stop", "index": index}));
        }
        event(json!({"type": "message_delta",
            "delta": {"stop_reason": self.stop_reason, "stop_sequence": null},
            "usage": {"output_tokens": self.output_tokens}}));
        event(json!({"type": "message_stop"}));
        wire
    }

    /// As a reply.
    pub fn reply(&self) -> Reply {
        Reply::stream(self.wire())
    }
}

/// The field of a block that is streamed in pieces.
fn field_of(block: &Value) -> Option<&'static str> {
    match block["type"].as_str()? {
        "tool_use" => Some("input"),
        "thinking" => Some("thinking"),
        "text" => Some("text"),
        _ => None,
    }
}

/// An error before the stream, e.g. `(529, "overloaded_error", "Overloaded")`.
pub fn error(status: u16, kind: &str, message: &str) -> Reply {
    Reply::json(status, &error_body(kind, message))
        .header("request-id", "req_018EeWyXxfu5pfWkrYcMdjWG")
}

/// An error within the stream, in wire form.
pub fn error_event(kind: &str, message: &str) -> String {
    format!("event: error\ndata: {}\n\n", error_body(kind, message))
}

fn error_body(kind: &str, message: &str) -> Value {
    json!({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_018EeWyXxfu5pfWkrYcMdjWG"})
}

/// A text after a thinking block, recorded from the documentation: with blocks, deltas and events
/// that an unaware reader must skip.
pub const RECORDED_THINKING: &str = include_str!("recorded/anthropic-thinking.sse");

/// The documentation's example of a streamed tool call: `get_weather` for San Francisco.
pub const RECORDED_TOOL_USE: &str = include_str!("recorded/anthropic-tool-use.sse");

/// Pieces of a few characters, as vendors stream them.
pub(super) fn pieces(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    chars.chunks(7).map(|piece| piece.iter().collect()).collect()
}

/// The answer of `/v1/messages/count_tokens`
/// (<https://docs.claude.com/en/api/messages-count-tokens>).
pub fn count(tokens: u32) -> Reply {
    Reply::json(200, &json!({"input_tokens": tokens}))
}

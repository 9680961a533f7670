//! The answers of OpenAI's Responses API, in the form of its reference
//! (<https://platform.openai.com/docs/api-reference/responses-streaming>).

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{Reply, anthropic::pieces};

/// An answer assembled item by item.
#[derive(Debug, Clone)]
pub struct Answer {
    items: Vec<Value>,
    incomplete: Option<String>,
    usage: Value,
}

impl Answer {
    /// An answer that begins with text.
    pub fn text(text: &str) -> Self {
        Self::empty().and_text(text)
    }

    /// An answer without any item.
    pub fn empty() -> Self {
        Self { items: Vec::new(), incomplete: None, usage: Value::Null }.with_usage(25, 0, 15)
    }

    /// With a message.
    #[must_use]
    pub fn and_text(mut self, text: &str) -> Self {
        let content = json!([{"type": "output_text", "text": text, "annotations": []}]);
        self.items.push(
            json!({"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": content}),
        );
        self
    }

    /// With a call of `code_interpreter`.
    #[must_use]
    pub fn and_code(mut self, id: &str, code: &str) -> Self {
        let arguments = json!({"code": code}).to_string();
        self.items.push(
            json!({"id": "fc_1", "type": "function_call", "status": "completed", "call_id": id,
            "name": "code_interpreter", "arguments": arguments}),
        );
        self
    }

    /// With reasoning of which only a summary is visible.
    #[must_use]
    pub fn and_reasoning(mut self, summary: &str, encrypted: &str) -> Self {
        self.items.push(json!({"id": "rs_1", "type": "reasoning", "encrypted_content": encrypted,
            "summary": [{"type": "summary_text", "text": summary}]}));
        self
    }

    /// With an incomplete end.
    #[must_use]
    pub fn incomplete(mut self, reason: &str) -> Self {
        self.incomplete = Some(reason.to_owned());
        self
    }

    /// With this token usage; cached tokens are part of the input.
    #[must_use]
    pub fn with_usage(mut self, input: u32, cached: u32, output: u32) -> Self {
        self.usage = json!({"input_tokens": input, "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": output, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": input + output});
        self
    }

    /// The events in wire form.
    pub fn wire(&self) -> String {
        let mut wire = String::new();
        let mut number = 0;
        let mut event = |name: &str, mut data: Value| {
            data["type"] = json!(name);
            data["sequence_number"] = json!(number);
            number += 1;
            // Writing to a string cannot fail.
            let _ = write!(wire, "event: {name}\ndata: {data}\n\n");
        };
        let response = |status: &str| {
            json!({"id": "resp_1", "object": "response", "status": status, "output": [],
            "error": null, "incomplete_details": null, "usage": null, "model": "gpt-test"})
        };
        event("response.created", json!({"response": response("in_progress")}));
        event("response.in_progress", json!({"response": response("in_progress")}));
        for (at, item) in self.items.iter().enumerate() {
            let kind = item["type"].as_str().unwrap_or_default();
            let mut begun = item.clone();
            match kind {
                "message" => begun["content"] = json!([]),
                "function_call" => begun["arguments"] = json!(""),
                _ => {
                    begun["summary"] = json!([]);
                    begun["encrypted_content"] = json!("");
                }
            }
            event("response.output_item.added", json!({"output_index": at, "item": begun}));
            let (delta, whole) = match kind {
                "message" => ("response.output_text.delta", &item["content"][0]["text"]),
                "function_call" => ("response.function_call_arguments.delta", &item["arguments"]),
                _ => {
                    event(
                        "response.reasoning_summary_part.added",
                        json!({"output_index": at, "summary_index": 0,
                        "item_id": item["id"], "part": {"type": "summary_text", "text": ""}}),
                    );
                    ("response.reasoning_summary_text.delta", &item["summary"][0]["text"])
                }
            };
            for piece in pieces(whole.as_str().unwrap_or_default()) {
                event(
                    delta,
                    json!({"output_index": at, "item_id": item["id"], "content_index": 0, "delta": piece}),
                );
            }
            event("response.output_item.done", json!({"output_index": at, "item": item}));
        }
        let mut end = response(if self.incomplete.is_some() { "incomplete" } else { "completed" });
        end["output"] = json!(self.items);
        end["usage"] = self.usage.clone();
        if let Some(reason) = &self.incomplete {
            end["incomplete_details"] = json!({"reason": reason});
        }
        let name =
            if self.incomplete.is_some() { "response.incomplete" } else { "response.completed" };
        event(name, json!({"response": end}));
        wire
    }

    /// As a reply.
    pub fn reply(&self) -> Reply {
        Reply::stream(self.wire())
    }
}

/// A failure within the stream, in wire form.
pub fn failed_event(code: &str, message: &str) -> String {
    let error = json!({"code": code, "message": message});
    let data = json!({"type": "response.failed", "sequence_number": 9,
        "response": {"id": "resp_1", "object": "response", "status": "failed", "error": error}});
    format!("event: response.failed\ndata: {data}\n\n")
}

/// The reference's example of a streamed text.
pub const RECORDED_TEXT: &str = include_str!("recorded/openai-responses-text.sse");

/// The guide's example of a streamed function call.
pub const RECORDED_CALL: &str = include_str!("recorded/openai-responses-call.sse");

/// The answer of `/responses/input_tokens`
/// (<https://platform.openai.com/docs/api-reference/responses/input-tokens>).
pub fn count(tokens: u32) -> Reply {
    Reply::json(200, &json!({"object": "response.input_tokens", "input_tokens": tokens}))
}

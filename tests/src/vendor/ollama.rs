//! The answers of Ollama to `/api/chat`, in the form of its reference
//! (<https://docs.ollama.com/api/chat>).

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{Reply, anthropic::pieces};

/// The content type of its streams.
pub const CONTENT_TYPE: &str = "application/x-ndjson";

/// An answer assembled piece by piece.
#[derive(Debug, Clone)]
pub struct Answer {
    messages: Vec<Value>,
    done_reason: String,
    usage: Option<(u32, u32)>,
}

impl Answer {
    /// An answer that begins with text; it may be empty.
    pub fn text(text: &str) -> Self {
        Self { messages: Vec::new(), done_reason: "stop".to_owned(), usage: Some((25, 15)) }
            .and_text(text)
    }

    /// With more text.
    #[must_use]
    pub fn and_text(mut self, text: &str) -> Self {
        self.messages.extend(
            pieces(text).into_iter().map(|piece| json!({"role": "assistant", "content": piece})),
        );
        self
    }

    /// With thinking.
    #[must_use]
    pub fn and_thinking(mut self, text: &str) -> Self {
        let thought = |piece| json!({"role": "assistant", "content": "", "thinking": piece});
        self.messages.extend(pieces(text).into_iter().map(thought));
        self
    }

    /// With a call of `code_interpreter`.
    #[must_use]
    pub fn and_code(mut self, code: &str) -> Self {
        self.messages.push(json!({"role": "assistant", "content": "", "tool_calls": [
            {"function": {"name": "code_interpreter", "arguments": {"code": code}}}]}));
        self
    }

    /// With another stop reason.
    #[must_use]
    pub fn with_stop_reason(mut self, reason: &str) -> Self {
        self.done_reason = reason.to_owned();
        self
    }

    /// With this token usage.
    #[must_use]
    pub fn with_usage(mut self, read: u32, written: u32) -> Self {
        self.usage = Some((read, written));
        self
    }

    /// The lines in wire form.
    pub fn wire(&self) -> String {
        let mut wire = String::new();
        let mut line = |line: Value| {
            // Writing to a string cannot fail.
            let _ = writeln!(wire, "{line}");
        };
        let at = "2026-01-01T08:52:19.385406455Z";
        for message in &self.messages {
            line(json!({"model": "qwen3", "created_at": at, "message": message, "done": false}));
        }
        let mut end = json!({"model": "qwen3", "created_at": at, "message": {"role": "assistant", "content": ""},
            "done": true, "done_reason": self.done_reason, "total_duration": 4_883_583_458_u64});
        if let Some((read, written)) = self.usage {
            end["prompt_eval_count"] = json!(read);
            end["eval_count"] = json!(written);
        }
        line(end);
        wire
    }

    /// As a reply.
    pub fn reply(&self) -> Reply {
        Reply::bytes(CONTENT_TYPE, self.wire())
    }
}

/// An error, before the stream or as a line within it.
pub fn error_body(message: &str) -> Value {
    json!({"error": message})
}

/// A thought and a call, from the reference and the guides to thinking and tool calling.
pub const RECORDED_CALL: &str = include_str!("recorded/ollama-chat.ndjson");

/// The answer of `/api/embed` (<https://docs.ollama.com/api/embed>).
pub fn vectors(vectors: &[Vec<f32>], tokens: u32) -> Reply {
    Reply::json(
        200,
        &json!({"model": "test-model", "embeddings": vectors, "total_duration": 14_143_917,
        "load_duration": 1_019_500, "prompt_eval_count": tokens}),
    )
}

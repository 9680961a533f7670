//! The answers of OpenAI's Chat Completions API, in the form of its documentation, and the variants
//! of compatible servers.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{Reply, anthropic::pieces};

/// An answer assembled piece by piece.
#[derive(Debug, Clone)]
pub struct Answer {
    thoughts: Vec<Value>,
    text: String,
    calls: Vec<(String, String, String)>,
    finish_reason: String,
    usage: Option<Value>,
    done: bool,
}

impl Answer {
    /// An answer with this text; it may be empty.
    pub fn text(text: &str) -> Self {
        Self {
            thoughts: Vec::new(),
            text: text.to_owned(),
            calls: Vec::new(),
            finish_reason: "stop".to_owned(),
            usage: Some(json!({"prompt_tokens": 19, "completion_tokens": 10, "total_tokens": 29,
                "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 0}})),
            done: true,
        }
    }

    /// With thinking before the text, e.g. `{"reasoning_content": "Hm."}`, in its own delta.
    #[must_use]
    pub fn thinking(mut self, delta: Value) -> Self {
        self.thoughts.push(delta);
        self
    }

    /// With a call of `code_interpreter`.
    #[must_use]
    pub fn and_code(self, id: &str, code: &str) -> Self {
        self.and_call(id, "code_interpreter", &json!({"code": code}).to_string())
    }

    /// With a call of any tool, its arguments in wire form.
    #[must_use]
    pub fn and_call(mut self, id: &str, name: &str, arguments: &str) -> Self {
        self.calls.push((id.to_owned(), name.to_owned(), arguments.to_owned()));
        self.finish_reason = "tool_calls".to_owned();
        self
    }

    /// With another finish reason.
    #[must_use]
    pub fn with_stop_reason(mut self, reason: &str) -> Self {
        self.finish_reason = reason.to_owned();
        self
    }

    /// With this usage; none: the server counts nothing.
    #[must_use]
    pub fn with_usage(mut self, usage: Option<Value>) -> Self {
        self.usage = usage;
        self
    }

    /// Without the final `[DONE]`.
    #[must_use]
    pub fn without_done(mut self) -> Self {
        self.done = false;
        self
    }

    /// The events in wire form.
    pub fn wire(&self) -> String {
        let mut wire = String::new();
        let mut event = |choices: Value, usage: Value| {
            let data = json!({"id": "chatcmpl-123", "object": "chat.completion.chunk", "created": 1_694_268_190,
                "model": "gpt-test", "system_fingerprint": "fp_44709d6fcb", "choices": choices, "usage": usage});
            // Writing to a string cannot fail.
            let _ = write!(wire, "data: {data}\n\n");
        };
        let delta = |delta: Value| json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": null}]);
        event(delta(json!({"role": "assistant", "content": "", "refusal": null})), Value::Null);
        for thought in &self.thoughts {
            event(delta(thought.clone()), Value::Null);
        }
        for piece in pieces(&self.text) {
            event(delta(json!({"content": piece})), Value::Null);
        }
        for (index, (id, name, arguments)) in self.calls.iter().enumerate() {
            event(
                delta(json!({"tool_calls": [{"index": index, "id": id, "type": "function",
                    "function": {"name": name, "arguments": ""}}]})),
                Value::Null,
            );
            for piece in pieces(arguments) {
                event(
                    delta(
                        json!({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}),
                    ),
                    Value::Null,
                );
            }
        }
        let finish = json!([{"index": 0, "delta": {}, "logprobs": null, "finish_reason": self.finish_reason}]);
        event(finish, Value::Null);
        if let Some(usage) = &self.usage {
            event(json!([]), usage.clone());
        }
        if self.done {
            wire.push_str("data: [DONE]\n\n");
        }
        wire
    }

    /// As a reply.
    pub fn reply(&self) -> Reply {
        Reply::stream(self.wire())
    }
}

/// An error before the stream, e.g. `(429, "rate_limit_exceeded", "requests", "Rate limit
/// reached")`.
pub fn error(status: u16, code: &str, kind: &str, message: &str) -> Reply {
    let code = if code.is_empty() { Value::Null } else { json!(code) };
    Reply::json(
        status,
        &json!({"error": {"message": message, "type": kind, "param": null, "code": code}}),
    )
}

/// The vendor's own example: a text and a call.
pub const RECORDED_CALL: &str = include_str!("recorded/openai-chat-call.sse");

/// An answer as xAI streams it: the usage so far with every event, a call in one piece, and
/// reasoning that counts toward the total only.
pub const RECORDED_XAI: &str = include_str!("recorded/xai-reasoning.sse");

/// A call as Ollama streams it: in one event, every call with the index 0.
pub const RECORDED_OLLAMA: &str = include_str!("recorded/ollama-tool-calls.sse");

/// A text as OpenRouter streams it: comments while it waits, the usage with the last choice.
pub const RECORDED_OPENROUTER: &str = include_str!("recorded/openrouter-text.sse");

/// An answer with its chain of thought as DeepSeek streams it.
pub const RECORDED_DEEPSEEK: &str = include_str!("recorded/deepseek-reasoning.sse");

/// A call after reasoning as OpenRouter streams it.
pub const RECORDED_OPENROUTER_REASONING: &str = include_str!("recorded/openrouter-reasoning.sse");

/// The answer of `/embeddings`
/// (<https://platform.openai.com/docs/api-reference/embeddings/create>), the last vector first: the
/// index gives their order.
pub fn vectors(vectors: &[Vec<f32>], tokens: u32) -> Reply {
    let items = vectors.iter().enumerate().rev();
    let data: Vec<Value> = items
        .map(|(index, embedding)| json!({"object": "embedding", "index": index, "embedding": embedding}))
        .collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    Reply::json(
        200,
        &json!({"object": "list", "data": data, "model": "test-model", "usage": usage}),
    )
}

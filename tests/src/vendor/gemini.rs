//! The answers of Google's Gemini API to `streamGenerateContent?alt=sse`, in the form of its
//! reference (<https://ai.google.dev/api/generate-content>).

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{Reply, anthropic::pieces};

/// An answer assembled part by part.
#[derive(Debug, Clone)]
pub struct Answer {
    parts: Vec<Value>,
    finish_reason: String,
    usage: Value,
}

impl Answer {
    /// An answer that begins with text.
    pub fn text(text: &str) -> Self {
        Self::empty().and_text(text)
    }

    /// An answer without any part.
    pub fn empty() -> Self {
        let usage =
            json!({"promptTokenCount": 25, "candidatesTokenCount": 15, "totalTokenCount": 40});
        Self { parts: Vec::new(), finish_reason: "STOP".to_owned(), usage }
    }

    /// With more text.
    #[must_use]
    pub fn and_text(mut self, text: &str) -> Self {
        self.parts.extend(pieces(text).into_iter().map(|piece| json!({"text": piece})));
        self
    }

    /// With a summary of its thoughts.
    #[must_use]
    pub fn and_thought(mut self, text: &str) -> Self {
        self.parts
            .extend(pieces(text).into_iter().map(|piece| json!({"text": piece, "thought": true})));
        self
    }

    /// With a call of `code_interpreter`; without a signature if it is empty.
    #[must_use]
    pub fn and_code(mut self, id: &str, code: &str, signature: &str) -> Self {
        let mut part =
            json!({"functionCall": {"id": id, "name": "code_interpreter", "args": {"code": code}}});
        if !signature.is_empty() {
            part["thoughtSignature"] = json!(signature);
        }
        self.parts.push(part);
        self
    }

    /// With an empty text that only carries a signature, as streamed answers without calls end.
    #[must_use]
    pub fn and_signature(mut self, signature: &str) -> Self {
        self.parts.push(json!({"text": "", "thoughtSignature": signature}));
        self
    }

    /// With another finish reason.
    #[must_use]
    pub fn with_stop_reason(mut self, reason: &str) -> Self {
        self.finish_reason = reason.to_owned();
        self
    }

    /// With this token usage; cached tokens are part of the prompt.
    #[must_use]
    pub fn with_usage(mut self, prompt: u32, cached: u32, candidates: u32, thoughts: u32) -> Self {
        self.usage = json!({
            "promptTokenCount": prompt, "cachedContentTokenCount": cached, "candidatesTokenCount": candidates,
            "thoughtsTokenCount": thoughts, "totalTokenCount": prompt + candidates + thoughts,
        });
        self
    }

    /// The events in wire form.
    pub fn wire(&self) -> String {
        let mut wire = String::new();
        let last = self.parts.len().saturating_sub(1);
        for (at, part) in self.parts.iter().enumerate() {
            let mut candidate = json!({"content": {"parts": [part], "role": "model"}, "index": 0});
            let mut usage = json!({"promptTokenCount": self.usage["promptTokenCount"]});
            if at == last {
                candidate["finishReason"] = json!(self.finish_reason);
                usage = self.usage.clone();
            }
            let data = json!({"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini-test",
                "responseId": "mUvHaPjPKOKJ1dkP0aYV"});
            // Writing to a string cannot fail.
            let _ = write!(wire, "data: {data}\r\n\r\n");
        }
        wire
    }

    /// As a reply.
    pub fn reply(&self) -> Reply {
        Reply::stream(self.wire())
    }
}

/// An error, e.g. `(429, "RESOURCE_EXHAUSTED", "Quota exceeded", [])`.
pub fn error(status: u16, name: &str, message: &str, details: &[Value]) -> Reply {
    Reply::json(status, &error_body(status, name, message, details))
}

/// An error within the stream, in wire form.
pub fn error_event(status: u16, name: &str, message: &str) -> String {
    format!("data: {}\r\n\r\n", error_body(status, name, message, &[]))
}

fn error_body(status: u16, name: &str, message: &str, details: &[Value]) -> Value {
    json!({"error": {"code": status, "message": message, "status": name, "details": details}})
}

/// Two parallel calls of which the first carries the signature, from the guide to thought
/// signatures.
pub const RECORDED_CALLS: &str = include_str!("recorded/gemini-function-calls.sse");

/// The answer of `countTokens` (<https://ai.google.dev/api/tokens>).
pub fn count(tokens: u32) -> Reply {
    let details = json!([{"modality": "TEXT", "tokenCount": tokens}]);
    Reply::json(200, &json!({"totalTokens": tokens, "promptTokensDetails": details}))
}

/// The answer of `batchEmbedContents` (<https://ai.google.dev/api/embeddings>).
pub fn vectors(vectors: &[Vec<f32>]) -> Reply {
    let embeddings: Vec<Value> = vectors.iter().map(|values| json!({"values": values})).collect();
    Reply::json(200, &json!({"embeddings": embeddings}))
}

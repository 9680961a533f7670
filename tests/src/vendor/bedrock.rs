//! The answers of AWS Bedrock to `ConverseStream`: events in the form of its reference
//! (<https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_ConverseStream.html>),
//! each in a message of the event stream encoding
//! (<https://smithy.io/2.0/aws/amazon-eventstream.html>).

use serde_json::{Value, json};

use super::{Reply, anthropic::pieces};

/// The content type of its streams.
pub const CONTENT_TYPE: &str = "application/vnd.amazon.eventstream";

/// A message with these encoded headers and this payload.
///
/// # Panics
/// When it is larger than four gibibytes.
pub fn message(headers: &[u8], payload: &[u8]) -> Vec<u8> {
    let length =
        |length: usize| u32::try_from(length).expect("no test sends that much").to_be_bytes();
    let mut message = Vec::new();
    message.extend(length(12 + headers.len() + payload.len() + 4));
    message.extend(length(headers.len()));
    message.extend(crc32fast::hash(&message).to_be_bytes());
    message.extend(headers);
    message.extend(payload);
    message.extend(crc32fast::hash(&message).to_be_bytes());
    message
}

fn headers(headers: &[(&str, &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in headers {
        bytes.push(u8::try_from(name.len()).expect("a header's name is short"));
        bytes.extend(name.as_bytes());
        bytes.push(7);
        bytes.extend(u16::try_from(value.len()).expect("a header's value is short").to_be_bytes());
        bytes.extend(value.as_bytes());
    }
    bytes
}

/// An event.
pub fn event(name: &str, payload: &str) -> Vec<u8> {
    let headers = headers(&[
        (":event-type", name),
        (":content-type", "application/json"),
        (":message-type", "event"),
    ]);
    message(&headers, payload.as_bytes())
}

/// A modeled error within the stream.
pub fn exception(name: &str, payload: &str) -> Vec<u8> {
    let headers = headers(&[
        (":exception-type", name),
        (":content-type", "application/json"),
        (":message-type", "exception"),
    ]);
    message(&headers, payload.as_bytes())
}

/// An unmodeled error within the stream.
pub fn error(code: &str, text: &str) -> Vec<u8> {
    message(
        &headers(&[(":message-type", "error"), (":error-code", code), (":error-message", text)]),
        b"",
    )
}

/// An error before the stream, e.g. `(429, "ThrottlingException", "Too many requests")`.
pub fn refusal(status: u16, kind: &str, message: &str) -> Reply {
    Reply::json(status, &json!({"message": message})).header("x-amzn-errortype", kind)
}

/// An answer assembled block by block.
#[derive(Debug, Clone)]
pub struct Answer {
    blocks: Vec<Value>,
    stop_reason: String,
    usage: Value,
}

impl Answer {
    /// An answer that begins with text.
    pub fn text(text: &str) -> Self {
        Self::empty().and_text(text)
    }

    /// An answer without any block.
    pub fn empty() -> Self {
        Self { blocks: Vec::new(), stop_reason: "end_turn".to_owned(), usage: Value::Null }
            .with_usage(25, 0, 0, 15)
    }

    /// With more text, as a block of its own.
    #[must_use]
    pub fn and_text(mut self, text: &str) -> Self {
        self.blocks.push(json!({"text": text}));
        self
    }

    /// With a call of `code_interpreter`.
    #[must_use]
    pub fn and_code(mut self, id: &str, code: &str) -> Self {
        self.blocks.push(json!({"toolUse": {"toolUseId": id, "name": "code_interpreter", "input": {"code": code}}}));
        self.stop_reason = "tool_use".to_owned();
        self
    }

    /// With a reasoning block.
    #[must_use]
    pub fn and_reasoning(mut self, text: &str, signature: &str) -> Self {
        self.blocks.push(json!({"reasoningContent": {"text": text, "signature": signature}}));
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
        self.usage = json!({"inputTokens": input, "outputTokens": output, "totalTokens": input + output,
            "cacheReadInputTokens": cache_read, "cacheWriteInputTokens": cache_write});
        self
    }

    /// The messages in wire form.
    pub fn wire(&self) -> Vec<u8> {
        let mut wire = event("messageStart", r#"{"p":"abcdefgh","role":"assistant"}"#);
        let mut say = |name: &str, payload: Value| wire.extend(event(name, &payload.to_string()));
        for (index, block) in self.blocks.iter().enumerate() {
            let grown =
                |delta: Value| json!({"contentBlockIndex": index, "delta": delta, "p": "abc"});
            if let Some(call) = block.get("toolUse") {
                let start =
                    json!({"toolUse": {"toolUseId": call["toolUseId"], "name": call["name"]}});
                say("contentBlockStart", json!({"contentBlockIndex": index, "start": start}));
                for piece in pieces(&call["input"].to_string()) {
                    say("contentBlockDelta", grown(json!({"toolUse": {"input": piece}})));
                }
            } else if let Some(reasoning) = block.get("reasoningContent") {
                for piece in pieces(reasoning["text"].as_str().unwrap_or_default()) {
                    say("contentBlockDelta", grown(json!({"reasoningContent": {"text": piece}})));
                }
                say(
                    "contentBlockDelta",
                    grown(json!({"reasoningContent": {"signature": reasoning["signature"]}})),
                );
            } else {
                for piece in pieces(block["text"].as_str().unwrap_or_default()) {
                    say("contentBlockDelta", grown(json!({"text": piece})));
                }
            }
            say("contentBlockStop", json!({"contentBlockIndex": index}));
        }
        say("messageStop", json!({"stopReason": self.stop_reason}));
        say("metadata", json!({"metrics": {"latencyMs": 551}, "usage": self.usage}));
        wire
    }

    /// As a reply.
    pub fn reply(&self) -> Reply {
        Reply::bytes(CONTENT_TYPE, self.wire())
    }
}

/// The encoded events of a recording: lines of a name and a payload, and comments that begin with
/// `#`.
///
/// # Panics
/// When a line has no payload.
pub fn recorded(lines: &str) -> Vec<u8> {
    let lines = lines.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .flat_map(|line| {
            line.split_once(' ').map(|(name, data)| event(name, data)).expect("a payload")
        })
        .collect()
}

/// A text and a call in the form of the user guide's examples.
pub const RECORDED_CALL: &str = include_str!("recorded/bedrock-converse-stream.txt");

/// The answer of `CountTokens`
/// (<https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_CountTokens.html>).
pub fn count(tokens: u32) -> Reply {
    Reply::json(200, &json!({"inputTokens": tokens}))
}

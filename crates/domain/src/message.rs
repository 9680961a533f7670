//! What a transcript is made of.

use serde::{Deserialize, Serialize};

/// Who a message is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A person or program.
    User,
    /// The model.
    Assistant,
    /// Construct itself: results of scripts, notices.
    System,
}

impl Source {
    /// As stored.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::System => "system",
        }
    }

    /// Reads what [`Source::as_str`] wrote.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::User, Self::Assistant, Self::System].into_iter().find(|source| source.as_str() == text)
    }
}

/// A message's content as stored: `{"blocks": [{"kind": …, "payload": …}]}` (seed 000, "Message Content Structure").
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Content {
    /// In order.
    pub blocks: Vec<Block>,
}

/// A piece of a message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "payload", rename_all = "snake_case")]
pub enum Block {
    /// Plain text.
    Text(String),
    /// A script the model wants to run.
    CodeInterpreterCall(CodeCall),
    /// What running it gave.
    CodeInterpreterResult(CodeResult),
    /// What the model thought before the blocks after it.
    Thinking(Thinking),
    /// An image or file from the user.
    Attachment(Attachment),
}

/// What a model thought. It goes back to the provider it came from, and to no other.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thinking {
    /// What the vendor shows of it; may be empty.
    pub text: String,
    /// Whose it is.
    pub vendor: String,
    /// The provider it came from.
    pub provider_id: String,
    /// What proves or holds it, in the vendor's own form; may be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub data: String,
}

/// An image or file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// E.g. `image/png`.
    pub media_type: String,
    /// E.g. `report.pdf`; may be empty.
    pub name: String,
    /// The content in base64, the form it has in JSON here and at every vendor.
    pub data: String,
}

/// A script the model wants to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeCall {
    /// The vendor's id of the call.
    pub id: String,
    /// JavaScript.
    pub code: String,
}

/// What the model is told about a script it ran.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeResult {
    /// The call's id.
    pub id: String,
    /// What was printed, then the value.
    pub output: String,
    /// Empty when the script completed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// The tool calls the script made, by number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_uses: Vec<ToolUse>,
}

/// One tool call of a script.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolUse {
    /// Number of the call in its script, from 1.
    pub number: u32,
    /// The tool.
    pub name: String,
    /// Whether it returned, rather than threw.
    pub succeeded: bool,
    /// How long it took, in microseconds.
    pub duration_micros: i64,
}

/// The scripts among `blocks`, in order.
pub fn code_calls(blocks: &[Block]) -> impl Iterator<Item = &CodeCall> {
    blocks.iter().filter_map(|block| match block {
        Block::CodeInterpreterCall(call) => Some(call),
        Block::Text(_) | Block::CodeInterpreterResult(_) | Block::Thinking(_) | Block::Attachment(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_stored_in_the_documented_form() {
        let content = Content {
            blocks: vec![
                Block::Text("Hello".into()),
                Block::CodeInterpreterCall(CodeCall { id: "call_1".into(), code: "1 + 1".into() }),
                Block::CodeInterpreterResult(CodeResult {
                    id: "call_1".into(),
                    output: "2".into(),
                    ..CodeResult::default()
                }),
                Block::Thinking(Thinking {
                    text: "Hm.".into(),
                    vendor: "v".into(),
                    provider_id: "p".into(),
                    data: String::new(),
                }),
                Block::Attachment(Attachment { media_type: "image/png".into(), name: "a".into(), data: "AA==".into() }),
            ],
        };
        let json = serde_json::json!({"blocks": [
            {"kind": "text", "payload": "Hello"},
            {"kind": "code_interpreter_call", "payload": {"id": "call_1", "code": "1 + 1"}},
            {"kind": "code_interpreter_result", "payload": {"id": "call_1", "output": "2"}},
            {"kind": "thinking", "payload": {"text": "Hm.", "vendor": "v", "provider_id": "p"}},
            {"kind": "attachment", "payload": {"media_type": "image/png", "name": "a", "data": "AA=="}},
        ]});
        assert_eq!(serde_json::to_value(&content).expect("content is JSON"), json);
        assert_eq!(serde_json::from_value::<Content>(json).expect("it reads back"), content);
    }
}

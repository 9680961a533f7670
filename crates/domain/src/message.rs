//! The messages of a transcript.

use serde::{Deserialize, Serialize};

use crate::FileId;

/// Maximum size of a file that is sent to a model as an image or a document. Few vendors accept
/// larger files.
pub const MAX_MEDIA_BYTES: u64 = 20 << 20;
/// Maximum size of a file that is sent to a model as text. More would fill most context windows.
pub const MAX_TEXT_BYTES: u64 = 256 << 10;

/// The author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A person or a program.
    User,
    /// The model.
    Assistant,
    /// Construct: results of scripts, notices.
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
        [Self::User, Self::Assistant, Self::System]
            .into_iter()
            .find(|source| source.as_str() == text)
    }
}

/// A message's content as stored: `{"blocks": [{"kind": …, "payload": …}]}` (seed 000, "Message
/// Content Structure").
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Content {
    /// The blocks, in order.
    pub blocks: Vec<Block>,
}

/// A part of a message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "payload", rename_all = "snake_case")]
pub enum Block {
    /// Plain text.
    Text(String),
    /// A script that the model wants to run.
    CodeInterpreterCall(CodeCall),
    /// The result of a script.
    CodeInterpreterResult(CodeResult),
    /// The model's reasoning before the blocks that follow.
    Thinking(Thinking),
    /// An image or file from the user.
    Attachment(Attachment),
}

/// A model's reasoning. It is only sent back to the provider it came from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thinking {
    /// The text that the vendor shows; may be empty.
    pub text: String,
    /// The vendor.
    pub vendor: String,
    /// The provider it came from.
    pub provider_id: String,
    /// The vendor's signature or encrypted form; may be empty.
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
    /// The content in base64, as in JSON here and at every vendor. Empty when `file` has the
    /// content.
    pub data: String,
    /// The file with the content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<AttachedFile>,
}

/// A file as it was when it was attached. It may have been deleted since.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachedFile {
    /// The file's id.
    pub id: FileId,
    /// SHA-256 of the content as 64 lowercase hexadecimal digits. The content is stored under this
    /// hash.
    pub sha256: String,
    /// Size in bytes.
    pub size: u64,
}

/// How a file is presented to a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presentation {
    /// As an image.
    Image,
    /// As a document, with its images.
    Document,
    /// As text.
    Text,
    /// By name only, because the model cannot process this type. A script can read the file.
    NameOnly,
    /// By name only, because the file is too large.
    TooLarge,
}

impl Presentation {
    /// The presentation of a file of this type and size.
    pub fn for_file(media_type: &str, size: u64) -> Self {
        let (shown, most) = match media_type {
            "image/png" | "image/jpeg" | "image/gif" | "image/webp" => {
                (Self::Image, MAX_MEDIA_BYTES)
            }
            "application/pdf" => (Self::Document, MAX_MEDIA_BYTES),
            "application/json" | "application/xml" | "application/yaml" => {
                (Self::Text, MAX_TEXT_BYTES)
            }
            other if other.starts_with("text/") => (Self::Text, MAX_TEXT_BYTES),
            _ => return Self::NameOnly,
        };
        if size > most { Self::TooLarge } else { shown }
    }
}

/// A script that the model wants to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeCall {
    /// The vendor's id of the call.
    pub id: String,
    /// JavaScript.
    pub code: String,
}

/// The result of a script, for the model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeResult {
    /// The id of the call.
    pub id: String,
    /// The printed output, then the value.
    pub output: String,
    /// The error; empty when the script completed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// The tool calls of the script, by number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_uses: Vec<ToolUse>,
}

/// One tool call of a script.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolUse {
    /// The number of the call in its script, from 1.
    pub number: u32,
    /// The tool's name.
    pub name: String,
    /// Whether it returned instead of throwing.
    pub succeeded: bool,
    /// Duration in microseconds.
    pub duration_micros: i64,
    /// The arguments as JSON, possibly truncated; empty when they were not kept.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub arguments: String,
    /// The returned value or thrown error, likewise.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub result: String,
}

/// The first position that is removed when a transcript is cut at the message with this position
/// and these blocks: the message's own, or the one after it when the message is kept (`keep`).
///
/// Scripts and their results, which have the next position, are not separated. They are kept with a
/// message that is kept, and removed with one that is removed.
pub fn cut_position(position: i64, blocks: &[Block], keep: bool) -> i64 {
    let is_result = |block: &Block| matches!(block, Block::CodeInterpreterResult(_));
    if keep {
        position + 1 + i64::from(code_calls(blocks).next().is_some())
    } else {
        position - i64::from(blocks.iter().any(is_result))
    }
}

/// The scripts in `blocks`, in order.
pub fn code_calls(blocks: &[Block]) -> impl Iterator<Item = &CodeCall> {
    blocks.iter().filter_map(|block| match block {
        Block::CodeInterpreterCall(call) => Some(call),
        Block::Text(_)
        | Block::CodeInterpreterResult(_)
        | Block::Thinking(_)
        | Block::Attachment(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "file_01890a5d-ac96-774b-bcce-b302099a8057";

    #[test]
    fn content_is_stored_in_the_documented_json_form() {
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
                Block::Attachment(Attachment {
                    media_type: "image/png".into(),
                    name: "a".into(),
                    data: "AA==".into(),
                    file: None,
                }),
                Block::Attachment(Attachment {
                    media_type: "text/csv".into(),
                    name: "t.csv".into(),
                    data: String::new(),
                    file: Some(AttachedFile {
                        id: FILE.parse().expect("an id"),
                        sha256: "0f".repeat(32),
                        size: 7,
                    }),
                }),
            ],
        };
        let json = serde_json::json!({"blocks": [
            {"kind": "text", "payload": "Hello"},
            {"kind": "code_interpreter_call", "payload": {"id": "call_1", "code": "1 + 1"}},
            {"kind": "code_interpreter_result", "payload": {"id": "call_1", "output": "2"}},
            {"kind": "thinking", "payload": {"text": "Hm.", "vendor": "v", "provider_id": "p"}},
            {"kind": "attachment", "payload": {"media_type": "image/png", "name": "a", "data": "AA=="}},
            // Earlier versions read it without the file.
            {"kind": "attachment", "payload": {"media_type": "text/csv", "name": "t.csv", "data": "",
                "file": {"id": FILE, "sha256": "0f".repeat(32), "size": 7}}},
        ]});
        assert_eq!(serde_json::to_value(&content).expect("content is JSON"), json);
        assert_eq!(serde_json::from_value::<Content>(json).expect("it reads back"), content);
    }

    #[test]
    fn files_are_presented_by_type_unless_too_large() {
        for (media_type, size, shown) in [
            ("image/png", MAX_MEDIA_BYTES, Presentation::Image),
            ("image/webp", MAX_MEDIA_BYTES + 1, Presentation::TooLarge),
            ("application/pdf", MAX_MEDIA_BYTES, Presentation::Document),
            ("text/csv", MAX_TEXT_BYTES, Presentation::Text),
            ("application/json", MAX_TEXT_BYTES + 1, Presentation::TooLarge),
            ("image/svg+xml", 1, Presentation::NameOnly),
            ("image/tiff", MAX_MEDIA_BYTES + 1, Presentation::NameOnly),
            ("application/zip", 1, Presentation::NameOnly),
            ("", 0, Presentation::NameOnly),
        ] {
            assert_eq!(Presentation::for_file(media_type, size), shown, "{media_type} {size}");
        }
    }
}

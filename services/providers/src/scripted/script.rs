//! The format of scripts (`docs/scripted.md`).

use construct_domain::money::Usage;
use construct_proto::mesh::v1::{FailureClass, model_completed::StopReason};
use serde::{Deserialize, Deserializer};

/// A complete script.
#[derive(Debug, Clone)]
pub(super) struct Script {
    conversations: Vec<Conversation>,
    /// Played when no conversation matches.
    default: Conversation,
    pub(super) defaults: Defaults,
}

/// A sequence of turns.
#[derive(Debug, Clone)]
pub(super) struct Conversation {
    /// Unique within the script.
    pub(super) name: String,
    matches: String,
    pub(super) count: Count,
    pub(super) title: Option<String>,
    /// The answer to a compaction.
    pub(super) summary: Option<Turn>,
    pub(super) turns: Vec<Turn>,
}

/// Which answers are counted to select the turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Count {
    /// All of the task.
    Total,
    /// Those after the user's last message.
    SinceUser,
}

/// One answer of the model.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Turn {
    #[serde(deserialize_with = "deserialize_lines")]
    pub(super) text: String,
    #[serde(deserialize_with = "deserialize_scripts")]
    pub(super) code: Vec<String>,
    pub(super) delay_ms: Option<u64>,
    pub(super) tokens_per_second: Option<f64>,
    pub(super) usage: Option<ScriptedUsage>,
    pub(super) stop_reason: Option<ScriptedStopReason>,
    pub(super) fault: Option<Fault>,
}

/// Defaults of the turns.
#[derive(Debug, Clone, Default)]
pub(super) struct Defaults {
    delay_ms: Option<u64>,
    tokens_per_second: Option<f64>,
    usage: Option<ScriptedUsage>,
}

/// The token usage that a turn reports.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ScriptedUsage {
    input: u32,
    output: u32,
    cache_read: u32,
    cache_write: u32,
}

/// Why a turn ends.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ScriptedStopReason {
    EndTurn,
    ToolUse,
    MaxTokens,
    StopSequence,
    Refused,
}

/// An injected fault.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fault {
    /// None: nothing fails, the turn only stalls.
    pub(super) class: Option<FaultClass>,
    #[serde(default)]
    pub(super) http_status: u16,
    pub(super) message: Option<String>,
    /// How many attempts fail before one succeeds; 0: every one.
    #[serde(default = "default_times")]
    pub(super) times: u32,
    pub(super) retry_after_ms: Option<u64>,
    /// Characters of the answer that are streamed before the fault.
    #[serde(default)]
    pub(super) after_chars: usize,
    /// How long the stream stalls before the fault.
    #[serde(default)]
    pub(super) stall_ms: u64,
}

/// The failure classes under the names of the script format.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FaultClass {
    Transient,
    RateLimited,
    Overloaded,
    Authentication,
    InvalidRequest,
    ContextTooLong,
    ContentRefused,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ScriptFile {
    /// For readers of the script.
    #[serde(default, rename = "description")]
    _description: String,
    title: Option<String>,
    summary: Option<Turn>,
    #[serde(default = "default_count")]
    count: Count,
    #[serde(default)]
    turns: Vec<Turn>,
    #[serde(default)]
    conversations: Vec<ConversationFile>,
    delay_ms: Option<u64>,
    tokens_per_second: Option<f64>,
    usage: Option<ScriptedUsage>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConversationFile {
    #[serde(rename = "match")]
    matches: String,
    title: Option<String>,
    summary: Option<Turn>,
    #[serde(default = "default_conversation_count")]
    count: Count,
    #[serde(default)]
    turns: Vec<Turn>,
}

/// A text, or its lines: JSON has no readable way to write several.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a text or a list of lines")]
enum Lines {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "a script, or a list of scripts of which each is a text or a list of lines"
)]
enum Scripts {
    One(String),
    Many(Vec<Lines>),
}

impl Script {
    /// Parses a script: an object, or only the list of its turns. An empty text is a script without
    /// turns.
    pub(super) fn parse(text: &str) -> Result<Self, serde_json::Error> {
        let text = text.trim_start_matches('\u{FEFF}');
        let file = match text.trim_start().chars().next() {
            None => serde_json::from_str("{}")?,
            Some('[') => {
                let turns = serde_json::from_str(text)?;
                ScriptFile { turns, ..serde_json::from_str("{}")? }
            }
            Some(_) => serde_json::from_str::<ScriptFile>(text)?,
        };
        let conversations =
            file.conversations.into_iter().enumerate().map(|(at, conversation)| Conversation {
                name: at.to_string(),
                matches: conversation.matches,
                count: conversation.count,
                title: conversation.title,
                summary: conversation.summary,
                turns: conversation.turns,
            });
        Ok(Self {
            conversations: conversations.collect(),
            default: Conversation {
                name: "turns".to_owned(),
                matches: String::new(),
                count: file.count,
                title: file.title,
                summary: file.summary,
                turns: file.turns,
            },
            defaults: Defaults {
                delay_ms: file.delay_ms,
                tokens_per_second: file.tokens_per_second,
                usage: file.usage,
            },
        })
    }

    /// The answer to a compaction: that of the conversation, or that of the script.
    pub(super) fn summary<'a>(&'a self, conversation: &'a Conversation) -> Option<&'a Turn> {
        conversation.summary.as_ref().or(self.default.summary.as_ref())
    }

    /// The first conversation whose text occurs in the user's last message.
    pub(super) fn conversation(&self, last_user_text: &str) -> &Conversation {
        let found = self
            .conversations
            .iter()
            .find(|conversation| last_user_text.contains(&conversation.matches));
        found.unwrap_or(&self.default)
    }
}

impl Turn {
    pub(super) fn from_text(text: String) -> Self {
        // Text of the user must not be expanded as a template.
        Self { text: text.replace("{{", "{ {"), ..Self::default() }
    }

    pub(super) fn inherit(&mut self, defaults: &Defaults) {
        self.delay_ms = self.delay_ms.or(defaults.delay_ms);
        self.tokens_per_second = self.tokens_per_second.or(defaults.tokens_per_second);
        self.usage = self.usage.or(defaults.usage);
    }
}

impl ScriptedUsage {
    pub(super) fn usage(self) -> Usage {
        Usage {
            input_tokens: self.input.into(),
            output_tokens: self.output.into(),
            cache_read_tokens: self.cache_read.into(),
            cache_write_tokens: self.cache_write.into(),
            ..Usage::default()
        }
    }
}

impl ScriptedStopReason {
    pub(super) fn reason(self) -> StopReason {
        match self {
            Self::EndTurn => StopReason::EndTurn,
            Self::ToolUse => StopReason::ToolUse,
            Self::MaxTokens => StopReason::MaxTokens,
            Self::StopSequence => StopReason::StopSequence,
            Self::Refused => StopReason::Refused,
        }
    }
}

impl FaultClass {
    pub(super) fn failure_class(self) -> FailureClass {
        match self {
            Self::Transient => FailureClass::Transient,
            Self::RateLimited => FailureClass::RateLimited,
            Self::Overloaded => FailureClass::Overloaded,
            Self::Authentication => FailureClass::Authentication,
            Self::InvalidRequest => FailureClass::InvalidRequest,
            Self::ContextTooLong => FailureClass::ContextTooLong,
            Self::ContentRefused => FailureClass::ContentRefused,
        }
    }
}

impl From<Lines> for String {
    fn from(lines: Lines) -> Self {
        match lines {
            Lines::One(text) => text,
            Lines::Many(lines) => lines.join("\n"),
        }
    }
}

fn deserialize_lines<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Lines::deserialize(deserializer).map(String::from)
}

fn deserialize_scripts<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<String>, D::Error> {
    Ok(match Scripts::deserialize(deserializer)? {
        Scripts::One(code) => vec![code],
        Scripts::Many(codes) => codes.into_iter().map(String::from).collect(),
    })
}

fn default_times() -> u32 {
    1
}

fn default_count() -> Count {
    Count::Total
}

fn default_conversation_count() -> Count {
    Count::SinceUser
}

//! What a line may ask for. Fields that are not known are passed over: clients of earlier systems send some.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use construct_proto::v1;
use serde::Deserialize;
use serde_json::Value;

/// One request.
#[derive(Debug, Deserialize)]
pub(super) struct Request {
    /// The client's name for it. Every answer to it has it; without one the gateway makes none up.
    #[serde(default)]
    pub(super) id: Option<String>,
    #[serde(flatten)]
    pub(super) wanted: Wanted,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Wanted {
    /// With which key everything after it is asked for.
    Auth {
        key: Key,
        #[serde(default, rename = "organizationID")]
        organization: Option<String>,
    },
    /// A new session for one question.
    SendContextRequest {
        context: Context,
        #[serde(default, rename = "agentID")]
        agent: Option<String>,
    },
    /// A question, answered when the turn is over.
    Query(Say),
    /// A question, answered at once with the session it is asked in.
    Dispatch(Say),
    /// What happens in a session.
    Stream {
        #[serde(rename = "sessionID")]
        session: String,
        /// Exactly where to go on: `cursor` of the last event seen.
        #[serde(default)]
        cursor: Option<String>,
        /// How many turns the client has already.
        #[serde(default, rename = "lastTurn")]
        turns: usize,
    },
    /// Ends the turn that runs in a session, or, with the id of another request, only that request.
    Cancel {
        #[serde(default, rename = "sessionID")]
        session: Option<String>,
        #[serde(default, rename = "requestID")]
        request: Option<String>,
    },
    ListSessions {
        #[serde(default, rename = "agentID")]
        agent: String,
        #[serde(default, rename = "pageSize")]
        page_size: i32,
        #[serde(default, rename = "pageToken")]
        page_token: String,
    },
    ExportSession {
        #[serde(rename = "sessionID")]
        session: String,
    },
    DeleteSession {
        #[serde(rename = "sessionID")]
        session: String,
    },
}

/// A key; it is shown nowhere.
#[derive(Deserialize)]
pub(super) struct Key(pub(super) String);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct Context {
    #[serde(default)]
    pub(super) project: Option<Project>,
    #[serde(default)]
    pub(super) tools: Option<Vec<String>>,
    #[serde(rename = "userMessage")]
    pub(super) message: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Project {
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) path: String,
}

/// Something is said, in a session or in a new one. With `content` it is answered by events, with `messages` by results.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Say {
    #[serde(default, rename = "sessionID")]
    pub(super) session: Option<String>,
    #[serde(default, rename = "agentID")]
    pub(super) agent: Option<String>,
    #[serde(default)]
    pub(super) messages: Vec<Said>,
    #[serde(default)]
    pub(super) content: Option<String>,
    /// Of the workspace; the agent is told their names.
    #[serde(default)]
    pub(super) files: Vec<String>,
    /// The client's own; it comes back with `turn-started`.
    #[serde(default)]
    pub(super) metadata: Option<Value>,
    /// All that the session's scripts may call.
    #[serde(default)]
    pub(super) tools: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Said {
    role: String,
    content: Vec<Block>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Text {
        text: String,
    },
    Image {
        url: String,
        #[serde(default, rename = "mimeType")]
        mime_type: String,
    },
    File {
        path: String,
    },
}

impl Say {
    /// The message's blocks.
    ///
    /// # Errors
    /// What is wrong with the request, in words.
    pub(super) fn blocks(&self) -> Result<Vec<v1::Block>, &'static str> {
        let mut blocks = Vec::new();
        blocks.extend(self.content.clone().map(text));
        for said in &self.messages {
            if said.role != "user" {
                return Err("messages have the role `user`: what the agent said is known to its session");
            }
            for block in &said.content {
                blocks.push(match block {
                    Block::Text { text: words } => text(words.clone()),
                    Block::Image { url, mime_type } => image(url, mime_type)?,
                    Block::File { path } => text(format!("File: {path}")),
                });
            }
        }
        blocks.extend(self.files.iter().map(|path| text(format!("File: {path}"))));
        if blocks.is_empty() {
            return Err("there is nothing to say: give `messages` or `content`");
        }
        Ok(blocks)
    }
}

pub(super) fn text(text: String) -> v1::Block {
    v1::Block { block: Some(v1::block::Block::Text(v1::Text { text })) }
}

/// An image that stands in its own address. The gateway fetches nothing from elsewhere.
fn image(url: &str, mime_type: &str) -> Result<v1::Block, &'static str> {
    const WORDS: &str = "an image's url has to be `data:<type>;base64,…`";
    let (kind, data) = url.strip_prefix("data:").and_then(|rest| rest.split_once(";base64,")).ok_or(WORDS)?;
    let media_type = if kind.is_empty() { mime_type } else { kind }.to_owned();
    let data = STANDARD.decode(data).map_err(|_| WORDS)?;
    let attachment = v1::Attachment { media_type, name: String::new(), data };
    Ok(v1::Block { block: Some(v1::block::Block::Attachment(attachment)) })
}

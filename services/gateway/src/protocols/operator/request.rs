//! The requests of the protocol. Unknown fields are ignored: clients of older systems send some.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use construct_domain::FileId;
use construct_proto::v1;
use serde::Deserialize;
use serde_json::Value;
use uuid::Uuid;

use super::answer::Form;

/// Maximum number of characters of a key: the services accept 128, and a suffix is appended.
const MAX_KEY_CHARS: usize = 120;

/// One request.
#[derive(Debug, Deserialize)]
pub(super) struct Request {
    /// The client's id of the request. Every response has it; the gateway generates none.
    #[serde(default)]
    pub(super) id: Option<String>,
    /// The idempotency key of the request, if the id is no UUID.
    #[serde(default, rename = "idempotencyKey")]
    key: Option<String>,
    #[serde(flatten)]
    pub(super) action: Action,
}

impl Request {
    /// The idempotency key of the request: its key, or an id that no other request has. `None`:
    /// each repetition is a new request.
    ///
    /// # Errors
    /// The error in the key.
    pub(super) fn key(&self) -> Result<Option<String>, &'static str> {
        let Some(key) = self.key.as_ref().filter(|key| !key.is_empty()) else {
            let id = self.id.as_ref().and_then(|id| Uuid::try_parse(id).ok());
            return Ok(id.filter(|id| !id.is_nil()).map(|id| id.to_string()));
        };
        // The services' errors about derived keys would name a field that the client doesn't know.
        if key.len() > MAX_KEY_CHARS || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("`idempotencyKey` has 1 to 120 visible ASCII characters");
        }
        Ok(Some(key.clone()))
    }
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Action {
    /// Sets the key of all later requests.
    Auth {
        key: Key,
        #[serde(default, rename = "organizationID")]
        organization: Option<String>,
    },
    /// Starts a session with one message.
    SendContextRequest {
        context: Context,
        #[serde(default, rename = "agentID")]
        agent: Option<String>,
    },
    /// A message; the answer follows when the turn is over.
    Query(Prompt),
    /// A message; the answer follows at once and names the session.
    Dispatch(Prompt),
    /// Streams a session.
    Stream {
        #[serde(rename = "sessionID")]
        session: String,
        /// The position to resume after: `cursor` of the last event received.
        #[serde(default)]
        cursor: Option<String>,
        /// Number of turns that the client already has.
        #[serde(default, rename = "lastTurn")]
        turns: usize,
        /// The form of the response.
        #[serde(default)]
        form: Form,
    },
    /// Cancels the running turn of a session or, with the id of another request, only that request.
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

impl Action {
    /// The form of its response.
    pub(super) fn form(&self) -> Form {
        match self {
            Self::Query(prompt) | Self::Dispatch(prompt) if prompt.content.is_some() => {
                Form::Events
            }
            Self::Stream { form, .. } => *form,
            _ => Form::Results,
        }
    }
}

/// A key; `Debug` does not show it.
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

/// A message to a session or a new one. With `content` it is answered by events, with `messages` by
/// results.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Prompt {
    #[serde(default, rename = "sessionID")]
    pub(super) session: Option<String>,
    #[serde(default, rename = "agentID")]
    pub(super) agent: Option<String>,
    #[serde(default)]
    pub(super) messages: Vec<PromptMessage>,
    #[serde(default)]
    pub(super) content: Option<String>,
    /// Files by id are attached. Others are in the workspace, and the agent gets their names.
    #[serde(default)]
    pub(super) files: Vec<String>,
    /// The client's own data; `turn-started` returns it.
    #[serde(default)]
    pub(super) metadata: Option<Value>,
    /// The only tools that the session's scripts may call.
    #[serde(default)]
    pub(super) tools: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct PromptMessage {
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

impl Prompt {
    /// The message's blocks.
    ///
    /// # Errors
    /// The error in the request.
    pub(super) fn blocks(&self) -> Result<Vec<v1::Block>, &'static str> {
        let mut blocks = Vec::new();
        blocks.extend(self.content.clone().map(text_block));
        for message in &self.messages {
            if message.role != "user" {
                return Err(
                    "messages must have the role `user`: the session already has the agent's messages",
                );
            }
            for block in &message.content {
                blocks.push(match block {
                    Block::Text { text } => text_block(text.clone()),
                    Block::Image { url, mime_type } => image_block(url, mime_type)?,
                    Block::File { path } => file_block(path),
                });
            }
        }
        blocks.extend(self.files.iter().map(|path| file_block(path)));
        if blocks.is_empty() {
            return Err("`messages` or `content` is required");
        }
        Ok(blocks)
    }
}

pub(super) fn text_block(text: String) -> v1::Block {
    v1::Block { block: Some(v1::block::Block::Text(v1::Text { text })) }
}

fn attachment_block(attachment: v1::Attachment) -> v1::Block {
    v1::Block { block: Some(v1::block::Block::Attachment(attachment)) }
}

/// An uploaded file by its id, alone or as the address of the file or of its content.
fn uploaded_file(text: &str) -> Option<v1::Block> {
    let id = text.strip_prefix("/v1/files/").unwrap_or(text);
    let id: FileId = id.strip_suffix("/content").unwrap_or(id).parse().ok()?;
    Some(attachment_block(v1::Attachment { file: id.to_string(), ..v1::Attachment::default() }))
}

/// An uploaded file, or one of the workspace.
fn file_block(path: &str) -> v1::Block {
    uploaded_file(path).unwrap_or_else(|| text_block(format!("File: {path}")))
}

/// An image as a data URL or an uploaded file. The gateway fetches nothing from elsewhere.
fn image_block(url: &str, mime_type: &str) -> Result<v1::Block, &'static str> {
    const IMAGE_URL_ERROR: &str =
        "an image's url must be `data:<type>;base64,…`, or `/v1/files/<id>` of an uploaded image";
    if let Some(uploaded_file) = uploaded_file(url) {
        return Ok(uploaded_file);
    }
    let (kind, data) = url
        .strip_prefix("data:")
        .and_then(|rest| rest.split_once(";base64,"))
        .ok_or(IMAGE_URL_ERROR)?;
    let media_type = if kind.is_empty() { mime_type } else { kind }.to_owned();
    let data = STANDARD.decode(data).map_err(|_| IMAGE_URL_ERROR)?;
    Ok(attachment_block(v1::Attachment { media_type, data, ..v1::Attachment::default() }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::{
        protocols::operator::line::{Line, Splitter},
        tests::fuzz::fuzz,
    };

    const SECRET: &str = "ct_that-nobody-is-to-see";

    #[test]
    fn request_is_identified_by_its_key_or_unique_id() {
        const ID: &str = "0b9f8c1e-5d3a-4c67-9a51-0d7c1a2b3c4d";
        let key = |fields: Value| {
            let mut line = json!({"type": "list_sessions"});
            line.as_object_mut()
                .expect("an object")
                .extend(fields.as_object().expect("an object").clone());
            serde_json::from_value::<Request>(line).expect("a request").key()
        };
        assert_eq!(key(json!({"id": ID})), Ok(Some(ID.to_owned())));
        assert_eq!(
            key(json!({"id": ID.to_uppercase(), "idempotencyKey": ""})),
            Ok(Some(ID.to_owned()))
        );
        assert_eq!(key(json!({"id": ID, "idempotencyKey": "k"})), Ok(Some("k".to_owned())));
        for none in [json!({}), json!({"id": "1"}), json!({"id": Uuid::nil().to_string()})] {
            assert_eq!(key(none), Ok(None));
        }
        assert!(key(json!({"idempotencyKey": "k".repeat(120)})).is_ok());
        for wrong in ["k".repeat(121), "a b".to_owned(), "ü".to_owned()] {
            assert!(key(json!({"idempotencyKey": wrong})).is_err());
        }
    }

    #[test]
    fn uploaded_files_are_attached_and_others_named() {
        const FILE: &str = "file_01890a5d-ac96-774b-bcce-b302099a8057";
        let prompt =
            |request: Value| serde_json::from_value::<Prompt>(request).expect("a request").blocks();
        let files =
            [FILE.to_owned(), format!("/v1/files/{FILE}"), format!("/v1/files/{FILE}/content")];
        for name in &files {
            let image = json!([{"role": "user", "content": [{"type": "image", "url": name}]}]);
            let shown =
                prompt(json!({"messages": image, "files": [name]})).expect("it is understood");
            let expected =
                attachment_block(v1::Attachment { file: FILE.into(), ..v1::Attachment::default() });
            assert_eq!(shown, [expected.clone(), expected], "{name}");
        }
        for name in
            ["src/main.rs", "file_1", "/v1/files/", &format!("https://elsewhere/v1/files/{FILE}")]
        {
            let shown =
                prompt(json!({"content": "look", "files": [name]})).expect("it is understood");
            assert_eq!(shown[1], text_block(format!("File: {name}")));
            let image = json!([{"role": "user", "content": [{"type": "image", "url": name}]}]);
            assert!(
                prompt(json!({"messages": image}))
                    .is_err_and(|error| error.contains("/v1/files/<id>")),
                "{name}"
            );
        }
    }

    /// Expected and unexpected values of requests.
    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,12}".prop_map(Value::from),
            Just(json!("data:image/png;base64,iVBORw0KGgo=")),
            Just(json!("user")),
            Just(json!("events")),
            Just(json!("/v1/files/file_01890a5d-ac96-774b-bcce-b302099a8057")),
            Just(json!({"type": "text", "text": "hi"})),
            Just(json!({"role": "user", "content": [{"type": "file", "path": "a"}]})),
        ];
        leaf.prop_recursive(6, 48, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((name(), inner), 0..6).prop_map(|fields| Value::from(
                    fields.into_iter().collect::<serde_json::Map<_, _>>()
                )),
            ]
        })
    }

    fn name() -> impl Strategy<Value = String> {
        const NAMES: [&str; 20] = [
            "id",
            "idempotencyKey",
            "type",
            "key",
            "organizationID",
            "context",
            "agentID",
            "sessionID",
            "messages",
            "content",
            "role",
            "files",
            "metadata",
            "tools",
            "cursor",
            "lastTurn",
            "form",
            "userMessage",
            "url",
            "mimeType",
        ];
        prop_oneof![9 => prop::sample::select(&NAMES[..]).prop_map(str::to_owned), 1 => ".{0,8}"]
    }

    fn kind() -> impl Strategy<Value = &'static str> {
        prop::sample::select(
            &[
                "auth",
                "send_context_request",
                "query",
                "dispatch",
                "stream",
                "cancel",
                "list_sessions",
                "export_session",
                "delete_session",
            ][..],
        )
    }

    /// A nearly valid request with a few bytes changed or not, or noise.
    fn line() -> impl Strategy<Value = Vec<u8>> {
        let request =
            (kind(), prop::collection::vec((name(), value()), 0..8)).prop_map(|(kind, fields)| {
                let mut request: serde_json::Map<_, _> = fields.into_iter().collect();
                request.insert("type".to_owned(), kind.into());
                if kind == "auth" {
                    request.insert("key".to_owned(), SECRET.into());
                }
                Value::from(request).to_string().into_bytes()
            });
        let changed =
            (request, prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3));
        let changed = changed.prop_map(|(mut bytes, changes)| {
            for (index, byte) in changes {
                let index = index.index(bytes.len());
                bytes[index] = byte;
            }
            bytes
        });
        // Nested brackets may be deeper than a parser's stack allows.
        let deep = (
            prop::sample::select(&["[", "{\"a\":", "{\"type\":\"query\",\"metadata\":["][..]),
            0_usize..5_000,
        )
            .prop_map(|(open, depth)| open.repeat(depth).into_bytes());
        prop_oneof![8 => changed, 1 => prop::collection::vec(any::<u8>(), 0..200), 1 => deep]
    }

    /// For any input, however it is cut: nothing panics, all lines are separated, a key is never
    /// shown, and a parsed request has blocks or an error.
    #[test]
    fn random_lines_are_parsed_or_refused() {
        let input = (
            prop::collection::vec(line(), 1..6),
            prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        );
        fuzz(&input, |(lines, cuts)| {
            let bytes = lines.join(&b'\n');
            let mut cuts: Vec<_> =
                cuts.iter().map(|cut| cut.index(bytes.len() + 1)).chain([0, bytes.len()]).collect();
            cuts.sort_unstable();
            let mut splitter = Splitter::new(64 * 1024);
            let mut lines = Vec::new();
            for pair in cuts.windows(2) {
                splitter.push(&bytes[pair[0]..pair[1]]);
                lines.extend(std::iter::from_fn(|| splitter.next()));
            }
            prop_assert!(lines.len() < bytes.split(|byte| *byte == b'\n').count());
            for line in lines {
                let Line::Text(text) = line else { continue };
                let Ok(request) = serde_json::from_str::<Request>(&text) else { continue };
                let shown = format!("{request:?}");
                if let Action::Auth { key, .. } = &request.action {
                    prop_assert!(key.0.len() < 8 || !shown.contains(&key.0), "{shown}");
                }
                if let Action::Query(prompt) | Action::Dispatch(prompt) = &request.action {
                    prop_assert!(prompt.blocks().map_or(true, |blocks| !blocks.is_empty()));
                }
            }
            Ok(())
        });
    }
}

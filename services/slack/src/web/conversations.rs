//! Reading threads.

use serde::Deserialize;
use serde_json::Value;

use super::{Body, Error, Token, Web, chat::EVENT_TYPE};

/// Messages per page; Slack's maximum.
const PAGE_SIZE: &str = "200";
/// Pages of a thread that are read at most. With 200 messages each, this exceeds any usable thread.
const MAX_PAGES: usize = 50;

/// The fields of a message that are needed here.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Message {
    pub(crate) ts: String,
    #[serde(default)]
    pub(crate) user: Option<String>,
    #[serde(default)]
    pub(crate) bot_id: Option<String>,
    #[serde(default)]
    pub(crate) username: Option<String>,
    #[serde(default)]
    pub(crate) text: String,
    #[serde(default)]
    pub(crate) files: Vec<File>,
    /// Content of other apps that is not in `text`.
    #[serde(default)]
    attachments: Vec<Attachment>,
    #[serde(default)]
    blocks: Vec<Value>,
    #[serde(default)]
    metadata: Option<Metadata>,
}

#[derive(Debug, Clone, Deserialize)]
struct Metadata {
    #[serde(default)]
    event_type: String,
    #[serde(default)]
    event_payload: Value,
}

/// An attachment of an app
/// (<https://docs.slack.dev/legacy/legacy-messaging/legacy-secondary-message-attachments>). Alerts
/// often consist of nothing else.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Attachment {
    pretext: Option<String>,
    title: Option<String>,
    title_link: Option<String>,
    text: Option<String>,
    fields: Vec<Field>,
    blocks: Vec<Value>,
    fallback: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Field {
    title: Option<String>,
    value: Option<String>,
}

/// A file of a message.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct File {
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) name: Option<String>,
    #[serde(default)]
    pub(crate) mimetype: Option<String>,
    #[serde(default)]
    pub(crate) size: Option<u64>,
    #[serde(default)]
    pub(crate) url_private_download: Option<String>,
}

impl Attachment {
    fn full_text(&self) -> String {
        let mut lines: Vec<String> = [&self.pretext, &self.title, &self.title_link, &self.text]
            .into_iter()
            .flatten()
            .cloned()
            .chain(self.fields.iter().map(|field| {
                let part = |text: &Option<String>| text.clone().unwrap_or_default();
                format!("{}: {}", part(&field.title), part(&field.value))
            }))
            .collect();
        self.blocks.iter().for_each(|block| collect_text(block, &mut lines));
        if lines.iter().all(|line| line.trim().is_empty()) {
            lines = self.fallback.iter().cloned().collect();
        }
        lines.join("\n")
    }
}

/// Collects the texts of a block (<https://docs.slack.dev/reference/block-kit/blocks>), however
/// deeply nested.
fn collect_text(block: &Value, lines: &mut Vec<String>) {
    match block {
        Value::Object(parts) => {
            if let Some(text) = parts.get("text").and_then(Value::as_str) {
                lines.push(text.to_owned());
            }
            // The address of a button or an image is not text.
            parts
                .values()
                .filter(|part| part.is_object() || part.is_array())
                .for_each(|part| collect_text(part, lines));
        }
        Value::Array(parts) => parts.iter().for_each(|part| collect_text(part, lines)),
        _ => {}
    }
}

impl Message {
    /// The text of the message and its attachments.
    pub(crate) fn full_text(&self) -> String {
        let mut lines = Vec::new();
        if self.text.trim().is_empty() {
            self.blocks.iter().for_each(|block| collect_text(block, &mut lines));
        } else {
            lines.push(self.text.clone());
        }
        lines.extend(self.attachments.iter().map(Attachment::full_text));
        lines.retain(|line| !line.trim().is_empty());
        lines.join("\n")
    }

    /// The key, if the app posted it.
    pub(crate) fn key(&self) -> Option<&str> {
        self.metadata.as_ref().filter(|metadata| metadata.event_type == EVENT_TYPE)?.event_payload["key"].as_str()
    }
}

#[derive(Debug, Deserialize)]
struct Replies {
    #[serde(default)]
    messages: Vec<Message>,
    #[serde(default)]
    response_metadata: Option<ResponseMetadata>,
}

#[derive(Debug, Deserialize)]
struct ResponseMetadata {
    #[serde(default)]
    next_cursor: String,
}

/// Reads a thread from the message `oldest` (its beginning when empty) to `latest` (its end when
/// empty), in order, and always its first message. Returns the first result of `visit`.
async fn search_thread<T>(
    web: &Web,
    token: &Token,
    (channel, thread): (&str, &str),
    (oldest, latest): (&str, &str),
    mut visit: impl FnMut(Vec<Message>) -> Option<T>,
) -> Result<Option<T>, Error> {
    let mut cursor = String::new();
    for _ in 0..MAX_PAGES {
        let mut fields = vec![
            ("channel", channel),
            ("ts", thread),
            ("limit", PAGE_SIZE),
            ("inclusive", "true"),
            ("include_all_metadata", "true"),
        ];
        for (name, value) in [("oldest", oldest), ("latest", latest), ("cursor", cursor.as_str())] {
            if !value.is_empty() {
                fields.push((name, value));
            }
        }
        let replies: Replies =
            web.call(token, "conversations.replies", Body::Form(&fields)).await?;
        if let Some(found) = visit(replies.messages) {
            return Ok(Some(found));
        }
        cursor = replies.response_metadata.map(|next| next.next_cursor).unwrap_or_default();
        if cursor.is_empty() {
            return Ok(None);
        }
    }
    Ok(None)
}

/// The last `count` messages of a thread between two of its messages (`oldest` empty: from its
/// beginning), and the first message of the thread if there is room.
pub(crate) async fn last_messages(
    web: &Web,
    token: &Token,
    channel: &str,
    thread: &str,
    (oldest, latest): (&str, &str),
    count: usize,
) -> Result<Vec<Message>, Error> {
    let mut last: Vec<Message> = Vec::new();
    search_thread(web, token, (channel, thread), (oldest, latest), |messages| {
        for message in messages {
            if !last.iter().any(|known| known.ts == message.ts) {
                last.push(message);
            }
        }
        last.drain(..last.len().saturating_sub(count));
        None::<()>
    })
    .await?;
    Ok(last)
}

/// Finds a recent message of the app in a channel, outside of threads, by its key.
pub(crate) async fn find_in_channel(
    web: &Web,
    token: &Token,
    channel: &str,
    key: &str,
) -> Result<Option<String>, Error> {
    let fields = [("channel", channel), ("limit", PAGE_SIZE), ("include_all_metadata", "true")];
    let history: Replies = web.call(token, "conversations.history", Body::Form(&fields)).await?;
    Ok(history
        .messages
        .into_iter()
        .find(|message| message.key() == Some(key))
        .map(|message| message.ts))
}

/// Finds a message of the app in a thread by its key, not before the message `oldest`.
pub(crate) async fn find_in_thread(
    web: &Web,
    token: &Token,
    (channel, thread): (&str, &str),
    oldest: &str,
    key: &str,
) -> Result<Option<String>, Error> {
    search_thread(web, token, (channel, thread), (oldest, ""), |messages| {
        messages.into_iter().find(|message| message.key() == Some(key)).map(|message| message.ts)
    })
    .await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text_of_attachments_and_blocks_is_read() {
        let said = |message: Value| {
            let message: Message = serde_json::from_value(message).expect("a message");
            message.full_text()
        };
        let alert = json!({"ts": "1.2", "text": "", "bot_id": "B1", "attachments": [{
            "fallback": "[FIRING] disk", "title": "Disk is full", "title_link": "https://alerts.example/7", "text": "*db-1* has 1 % left",
            "fields": [{"title": "Severity", "value": "page", "short": true}],
        }]});
        assert_eq!(
            said(alert),
            "Disk is full\nhttps://alerts.example/7\n*db-1* has 1 % left\nSeverity: page"
        );
        assert_eq!(
            said(json!({"ts": "1.2", "attachments": [{"fallback": "only this"}]})),
            "only this"
        );
        let blocks = json!([
            {"type": "header", "text": {"type": "plain_text", "text": "Build 7"}},
            {"type": "rich_text", "elements": [{"type": "rich_text_section", "elements": [{"type": "text", "text": "failed"}]}]},
            {"type": "image", "image_url": "https://e.example/x.png", "alt_text": "x"},
        ]);
        assert_eq!(said(json!({"ts": "1.2", "blocks": blocks})), "Build 7\nfailed");
        assert_eq!(
            said(json!({"ts": "1.2", "text": "as it stands", "blocks": blocks})),
            "as it stands"
        );
    }
}

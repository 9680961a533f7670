//! Reading threads.

use serde::Deserialize;
use serde_json::Value;

use super::{Body, Error, Token, Web, chat::EVENT_TYPE};

/// Messages read at once; Slack's most.
const PAGE: &str = "200";
/// Pages read of one thread at most: with 200 messages each more than any thread that people can use.
const PAGES: usize = 50;

/// A message of a thread, as much of it as we need.
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

/// A file that hangs on a message.
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

impl Message {
    /// By which key we have posted it, if we have.
    pub(crate) fn key(&self) -> Option<&str> {
        self.metadata.as_ref().filter(|metadata| metadata.event_type == EVENT_TYPE)?.event_payload["key"].as_str()
    }
}

#[derive(Debug, Deserialize)]
struct Replies {
    #[serde(default)]
    messages: Vec<Message>,
    #[serde(default)]
    response_metadata: Option<Next>,
}

#[derive(Debug, Deserialize)]
struct Next {
    #[serde(default)]
    next_cursor: String,
}

/// Looks through a thread from the message `oldest` on (its beginning when empty) to `latest` (its end when empty), in their order and
/// the first message of the thread always; gives what `look` finds first.
async fn read<T>(
    web: &Web,
    token: &Token,
    (channel, thread): (&str, &str),
    (oldest, latest): (&str, &str),
    mut look: impl FnMut(Vec<Message>) -> Option<T>,
) -> Result<Option<T>, Error> {
    let mut cursor = String::new();
    for _ in 0..PAGES {
        let mut fields = vec![
            ("channel", channel),
            ("ts", thread),
            ("limit", PAGE),
            ("inclusive", "true"),
            ("include_all_metadata", "true"),
        ];
        for (name, value) in [("oldest", oldest), ("latest", latest), ("cursor", cursor.as_str())] {
            if !value.is_empty() {
                fields.push((name, value));
            }
        }
        let replies: Replies = web.call(token, "conversations.replies", Body::Form(&fields)).await?;
        if let Some(found) = look(replies.messages) {
            return Ok(Some(found));
        }
        cursor = replies.response_metadata.map(|next| next.next_cursor).unwrap_or_default();
        if cursor.is_empty() {
            return Ok(None);
        }
    }
    Ok(None)
}

/// The last `count` messages of a thread up to one of them.
pub(crate) async fn last(
    web: &Web,
    token: &Token,
    channel: &str,
    thread: &str,
    latest: &str,
    count: usize,
) -> Result<Vec<Message>, Error> {
    let mut kept: Vec<Message> = Vec::new();
    read(web, token, (channel, thread), ("", latest), |messages| {
        for message in messages {
            if !kept.iter().any(|known| known.ts == message.ts) {
                kept.push(message);
            }
        }
        kept.drain(..kept.len().saturating_sub(count));
        None::<()>
    })
    .await?;
    Ok(kept)
}

/// The message that we have posted into a channel, outside of threads, by this key lately.
pub(crate) async fn find_in_channel(
    web: &Web,
    token: &Token,
    channel: &str,
    key: &str,
) -> Result<Option<String>, Error> {
    let fields = [("channel", channel), ("limit", PAGE), ("include_all_metadata", "true")];
    let history: Replies = web.call(token, "conversations.history", Body::Form(&fields)).await?;
    Ok(history.messages.into_iter().find(|message| message.key() == Some(key)).map(|message| message.ts))
}

/// The message that we have posted into a thread by this key, not before the message `oldest`.
pub(crate) async fn find(
    web: &Web,
    token: &Token,
    (channel, thread): (&str, &str),
    oldest: &str,
    key: &str,
) -> Result<Option<String>, Error> {
    read(web, token, (channel, thread), (oldest, ""), |messages| {
        messages.into_iter().find(|message| message.key() == Some(key)).map(|message| message.ts)
    })
    .await
}

//! Posting and changing messages.

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Body, Error, MayContinue, Token, Web};

/// The metadata type (`metadata.event_type`) of the app's messages.
pub(crate) const EVENT_TYPE: &str = "construct_post";

/// The content of a message.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Content {
    /// The text for notifications, and where blocks cannot be shown.
    pub(crate) text: String,
    /// The blocks; at most 50.
    pub(crate) blocks: Vec<Value>,
}

#[derive(Debug, Deserialize)]
struct PostResponse {
    ts: String,
}

#[derive(Debug, Deserialize)]
struct EmptyResponse {}

/// Posts into a thread, or into the channel when `thread` is empty. The message is found again by
/// its key. Returns its `ts`.
pub(crate) async fn post(
    web: &Web,
    token: &Token,
    (channel, thread): (&str, &str),
    key: &str,
    content: &Content,
    may_continue: MayContinue<'_>,
) -> Result<String, Error> {
    let mut body = json!({
        "channel": channel,
        "text": content.text,
        "blocks": content.blocks,
        "metadata": {"event_type": EVENT_TYPE, "event_payload": {"key": key}},
        "unfurl_links": false,
        "unfurl_media": false,
    });
    if !thread.is_empty() {
        body["thread_ts"] = thread.into();
    }
    let posted: PostResponse =
        web.call_while(token, "chat.postMessage", Body::Json(body), may_continue).await?;
    Ok(posted.ts)
}

/// Posts a message that only one user in a channel sees. It disappears when they reload Slack.
pub(crate) async fn post_ephemeral(
    web: &Web,
    token: &Token,
    channel: &str,
    user: &str,
    thread: Option<&str>,
    text: &str,
) -> Result<(), Error> {
    let mut body = json!({"channel": channel, "user": user, "text": text});
    if let Some(thread) = thread {
        body["thread_ts"] = thread.into();
    }
    web.call::<EmptyResponse>(token, "chat.postEphemeral", Body::Json(body)).await.map(drop)
}

/// Replaces the content of a message of the app.
pub(crate) async fn update(
    web: &Web,
    token: &Token,
    (channel, ts): (&str, &str),
    content: &Content,
    may_continue: MayContinue<'_>,
) -> Result<(), Error> {
    web.call_while::<EmptyResponse>(
        token,
        "chat.update",
        update_body(channel, ts, content),
        may_continue,
    )
    .await
    .map(drop)
}

/// Like [`update`], for optional updates.
pub(crate) async fn try_update(
    web: &Web,
    token: &Token,
    channel: &str,
    ts: &str,
    content: &Content,
) -> Result<(), Error> {
    web.call_once::<EmptyResponse>(token, "chat.update", update_body(channel, ts, content))
        .await
        .map(drop)
}

/// The body of an update. The message's metadata stays.
fn update_body(channel: &str, ts: &str, content: &Content) -> Body<'static> {
    Body::Json(
        json!({"channel": channel, "ts": ts, "text": content.text, "blocks": content.blocks}),
    )
}

/// Attaches previews to links in a message.
pub(crate) async fn unfurl(
    web: &Web,
    token: &Token,
    channel: &str,
    ts: &str,
    unfurls: Value,
) -> Result<(), Error> {
    let body = json!({"channel": channel, "ts": ts, "unfurls": unfurls});
    web.call::<EmptyResponse>(token, "chat.unfurl", Body::Json(body)).await.map(drop)
}

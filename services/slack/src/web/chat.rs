//! Posting and changing messages.

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Body, Error, Leave, Token, Web};

/// Under which name our messages carry what they are (`metadata.event_type`).
pub(crate) const EVENT_TYPE: &str = "construct_post";

/// A message to post or to put in the place of another.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Content {
    /// For notifications, and where blocks cannot be shown.
    pub(crate) text: String,
    /// What is shown; at most 50.
    pub(crate) blocks: Vec<Value>,
}

#[derive(Debug, Deserialize)]
struct Posted {
    ts: String,
}

#[derive(Debug, Deserialize)]
struct Done {}

/// Posts into a thread, or into the channel when that is empty, with a key by which the message is
/// found again. Gives its `ts`.
pub(crate) async fn post(
    web: &Web,
    token: &Token,
    (channel, thread): (&str, &str),
    key: &str,
    content: &Content,
    leave: Leave<'_>,
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
    let posted: Posted = web.call_while(token, "chat.postMessage", Body::Json(body), leave).await?;
    Ok(posted.ts)
}

/// Says something to one person in a channel. It is gone when they load Slack anew.
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
    web.call::<Done>(token, "chat.postEphemeral", Body::Json(body)).await.map(drop)
}

/// Puts something in the place of a message of ours.
pub(crate) async fn update(
    web: &Web,
    token: &Token,
    (channel, ts): (&str, &str),
    content: &Content,
    leave: Leave<'_>,
) -> Result<(), Error> {
    web.call_while::<Done>(token, "chat.update", changed(channel, ts, content), leave)
        .await
        .map(drop)
}

/// The same when it doesn't matter whether it is done.
pub(crate) async fn try_update(
    web: &Web,
    token: &Token,
    channel: &str,
    ts: &str,
    content: &Content,
) -> Result<(), Error> {
    web.call_once::<Done>(token, "chat.update", changed(channel, ts, content)).await.map(drop)
}

/// What the message is (its metadata) stays.
fn changed(channel: &str, ts: &str, content: &Content) -> Body<'static> {
    Body::Json(
        json!({"channel": channel, "ts": ts, "text": content.text, "blocks": content.blocks}),
    )
}

/// Shows what is behind links in a message.
pub(crate) async fn unfurl(
    web: &Web,
    token: &Token,
    channel: &str,
    ts: &str,
    unfurls: Value,
) -> Result<(), Error> {
    let body = json!({"channel": channel, "ts": ts, "unfurls": unfurls});
    web.call::<Done>(token, "chat.unfurl", Body::Json(body)).await.map(drop)
}

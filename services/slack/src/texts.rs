//! What is said to people.

use construct_store::slack::MentionKey;
use serde_json::{Value, json};

use crate::{
    mrkdwn::{self, escape},
    web::chat::Content,
};

/// Said at once.
pub(crate) const WORKING: &str = "Working on it…";
/// The button that asks for another try.
pub(crate) const RETRY_ACTION: &str = "construct_retry";
/// The buttons that decide about a call.
pub(crate) const APPROVE_ACTION: &str = "construct_approve";
/// See [`APPROVE`].
pub(crate) const REJECT_ACTION: &str = "construct_reject";

/// Who has not said who they are.
pub(crate) const NOT_LINKED: &str = "I do not know who you are in Construct. Make a code there (`construct key code slack --scope \
                                     tasks:write`), and tell it to me: `/construct link CODE`";
/// A code of another organization.
pub(crate) const OTHER_ORGANIZATION: &str =
    "That code is for another organization than this workspace's.";
/// Somebody's key is refused.
pub(crate) const KEY_REJECTED: &str =
    "Construct does not accept your key any more. Link yourself again with `/construct link`.";
/// Somebody's role is too small.
pub(crate) const ROLE_INSUFFICIENT: &str =
    "your role in Construct, or the key you have linked yourself with, does not allow it.";

/// Characters of a text for notifications.
const MAX_NOTIFICATION_CHARS: usize = 300;
/// Characters of a reason.
const MAX_REASON_CHARS: usize = 1_500;

/// A message that is one text.
pub(crate) fn plain_text(text: &str) -> Content {
    Content { text: text.to_owned(), blocks: vec![mrkdwn::section(&escape(text))] }
}

/// What stands where the answer will be.
pub(crate) fn working() -> Content {
    Content {
        text: WORKING.to_owned(),
        blocks: vec![mrkdwn::section(&format!(":hourglass_flowing_sand: {WORKING}"))],
    }
}

/// What stands there while nobody lets the task go on.
pub(crate) fn suspended() -> Content {
    let text = "Somebody has suspended this task. I go on when it is resumed.";
    Content {
        text: text.to_owned(),
        blocks: vec![mrkdwn::section(&format!(":double_vertical_bar: {text}"))],
    }
}

/// The beginning of a text, for notifications; escaped.
pub(crate) fn notification(markdown: &str) -> String {
    escape(&mrkdwn::truncate(markdown.trim(), MAX_NOTIFICATION_CHARS))
}

/// A failure, with a button for another try. `reason` is for people already.
pub(crate) fn failure(reason: &str, key: &MentionKey) -> Content {
    let reason = mrkdwn::truncate(reason.trim(), MAX_REASON_CHARS);
    let text = format!("I could not finish this: {reason}");
    let button = json!({
        "type": "actions",
        "elements": [{
            "type": "button",
            "action_id": RETRY_ACTION,
            "text": {"type": "plain_text", "text": "Try again"},
            "value": json!([key.ts, key.attempt]).to_string(),
        }],
    });
    let section = mrkdwn::section(&format!(":warning: {}", escape(&text)));
    Content { text: escape(&text), blocks: vec![section, button] }
}

/// In the place of a failure that somebody wants tried again.
pub(crate) fn retrying(user: &str) -> Content {
    let text = format!("I could not finish this. <@{}> asked me to try again.", user_id(user));
    Content {
        blocks: vec![mrkdwn::section(&text)],
        text: "I could not finish this, and try again.".to_owned(),
    }
}

/// Why the gateway refuses, for people. What it says to programs stands in the log.
pub(crate) fn gateway_error(status: &tonic::Status) -> String {
    match status.code() {
        tonic::Code::NotFound => {
            "the agent that answers here does not exist any more. Whoever runs Construct has to name another \
                                  one."
                .to_owned()
        }
        tonic::Code::PermissionDenied | tonic::Code::Unauthenticated => {
            "Construct does not accept me. Whoever runs it has to look at my key.".to_owned()
        }
        tonic::Code::InvalidArgument | tonic::Code::OutOfRange => {
            format!("Construct does not take the message ({}).", mrkdwn::truncate(status.message(), MAX_NOTIFICATION_CHARS))
        }
        _ => format!("Construct refuses ({}).", mrkdwn::truncate(status.message(), MAX_NOTIFICATION_CHARS)),
    }
}

/// Why an answer is not in the thread.
pub(crate) fn slack_error(error: &crate::web::Error) -> String {
    match error.code() {
        Some("not_in_channel" | "channel_not_found") => {
            "I am not in this channel. Invite me with `/invite`.".to_owned()
        }
        Some("missing_scope") => {
            "the app lacks a permission. Somebody has to install it again.".to_owned()
        }
        Some("expired_trigger_id" | "trigger_expired") => {
            "it took too long. Try it once more.".to_owned()
        }
        Some("is_archived") => "the channel is archived.".to_owned(),
        _ => "Slack does not let me.".to_owned(),
    }
}

/// The id of a user, of which nothing but letters and digits is kept: it stands where names are
/// called.
pub(crate) fn user_id(user: &str) -> String {
    user.chars().filter(char::is_ascii_alphanumeric).collect()
}

/// A section with fields of text.
pub(crate) fn header(text: &str) -> Value {
    json!({"type": "header", "text": {"type": "plain_text", "text": mrkdwn::truncate(text, 150)}})
}

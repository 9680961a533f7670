//! Texts for users.

use construct_store::slack::MentionKey;
use serde_json::{Value, json};

use crate::{
    mrkdwn::{self, escape},
    web::chat::Content,
};

/// The placeholder of an answer.
pub(crate) const WORKING: &str = "Working on it…";
/// The action of the retry button.
pub(crate) const RETRY_ACTION: &str = "construct_retry";
/// The action of the approve button.
pub(crate) const APPROVE_ACTION: &str = "construct_approve";
/// The action of the reject button.
pub(crate) const REJECT_ACTION: &str = "construct_reject";

/// For users who have not linked their account.
pub(crate) const NOT_LINKED: &str = "I do not know who you are in Construct. Create a code there (`construct key code slack --scope \
                                     tasks:write`), and send it to me: `/construct link CODE`";
/// For a code of another organization.
pub(crate) const OTHER_ORGANIZATION: &str =
    "That code is for another organization than this workspace's.";
/// For a user whose key is rejected.
pub(crate) const KEY_REJECTED: &str =
    "Construct no longer accepts your key. Link your account again with `/construct link`.";
/// For a user whose role or scopes do not suffice.
pub(crate) const ROLE_INSUFFICIENT: &str =
    "your role in Construct, or the key of your link, does not allow it.";

/// Characters of a notification at most.
const MAX_NOTIFICATION_CHARS: usize = 300;
/// Characters of a reason at most.
const MAX_REASON_CHARS: usize = 1_500;

/// A message of one text.
pub(crate) fn plain_text(text: &str) -> Content {
    Content { text: text.to_owned(), blocks: vec![mrkdwn::section(&escape(text))] }
}

/// The placeholder of the answer.
pub(crate) fn working() -> Content {
    Content {
        text: WORKING.to_owned(),
        blocks: vec![mrkdwn::section(&format!(":hourglass_flowing_sand: {WORKING}"))],
    }
}

/// The placeholder while the task is suspended.
pub(crate) fn suspended() -> Content {
    let text = "This task is suspended. I will continue when it is resumed.";
    Content {
        text: text.to_owned(),
        blocks: vec![mrkdwn::section(&format!(":double_vertical_bar: {text}"))],
    }
}

/// The escaped beginning of a text, for notifications.
pub(crate) fn notification(markdown: &str) -> String {
    escape(&mrkdwn::truncate(markdown.trim(), MAX_NOTIFICATION_CHARS))
}

/// A failure with a retry button. `reason` is a text for users.
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

/// Replaces a failure that a user retries.
pub(crate) fn retrying(user: &str) -> Content {
    let text = format!("I could not finish this. <@{}> asked me to try again.", user_id(user));
    Content {
        blocks: vec![mrkdwn::section(&text)],
        text: "I could not finish this. I am trying again.".to_owned(),
    }
}

/// A refusal of the gateway, for users. The log has the gateway's own message.
pub(crate) fn gateway_error(status: &tonic::Status) -> String {
    match status.code() {
        tonic::Code::NotFound => {
            "the agent that answers here no longer exists. Please ask your Construct operator to configure another \
                                  one."
                .to_owned()
        }
        tonic::Code::PermissionDenied | tonic::Code::Unauthenticated => {
            "Construct rejects my key. Please ask your Construct operator to check it.".to_owned()
        }
        tonic::Code::InvalidArgument | tonic::Code::OutOfRange => {
            format!("Construct rejected the message ({}).", mrkdwn::truncate(status.message(), MAX_NOTIFICATION_CHARS))
        }
        _ => format!("Construct refused the request ({}).", mrkdwn::truncate(status.message(), MAX_NOTIFICATION_CHARS)),
    }
}

/// A refusal of Slack, for users.
pub(crate) fn slack_error(error: &crate::web::Error) -> String {
    match error.code() {
        Some("not_in_channel" | "channel_not_found") => {
            "I am not in this channel. Invite me with `/invite`.".to_owned()
        }
        Some("missing_scope") => {
            "the app lacks a permission. Please ask an admin to install it again.".to_owned()
        }
        Some("expired_trigger_id" | "trigger_expired") => {
            "it took too long. Please try again.".to_owned()
        }
        Some("is_archived") => "the channel is archived.".to_owned(),
        _ => "Slack refused the message.".to_owned(),
    }
}

/// Strips everything but letters and digits from the id of a user, for use in mentions.
pub(crate) fn user_id(user: &str) -> String {
    user.chars().filter(char::is_ascii_alphanumeric).collect()
}

/// A header block.
pub(crate) fn header(text: &str) -> Value {
    json!({"type": "header", "text": {"type": "plain_text", "text": mrkdwn::truncate(text, 150)}})
}

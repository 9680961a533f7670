//! Tells one user that their command, button or form failed.

use reqwest::Url;
use serde_json::{Value, json};

use crate::{error::Error, mrkdwn::escape, shared::Shared, web::chat};

/// A user, and the ways to reach them.
struct Recipient<'a> {
    user: &'a str,
    channel: &'a str,
    thread: Option<&'a str>,
    /// Valid for half an hour, even where the app is in no channel.
    url: &'a str,
}

impl<'a> Recipient<'a> {
    /// The sender of a payload.
    fn from_payload(payload: &'a Value) -> Self {
        let text = |value: &'a Value| value.as_str().unwrap_or_default();
        let text_of_either = |first: &'a Value, second: &'a Value| {
            if first.is_string() { text(first) } else { text(second) }
        };
        Self {
            // Buttons and forms name users and channels in objects, commands do not. A form has no
            // channel but that of the command that opened it.
            user: text_of_either(&payload["user"]["id"], &payload["user_id"]),
            channel: match payload["channel"]["id"].as_str() {
                Some(channel) => channel,
                None => {
                    text_of_either(&payload["channel_id"], &payload["view"]["private_metadata"])
                }
            },
            thread: payload["message"]["thread_ts"].as_str(),
            url: text(&payload["response_url"]),
        }
    }
}

/// Reports a failure, if there is something to say and a way to say it.
pub(crate) async fn report_failure(shared: &Shared, team: &str, payload: &Value, failure: &Error) {
    let text = match failure {
        Error::Failed(reason) => format!("I could not do that: {}", escape(reason)),
        Error::Retryable { .. } => {
            "I could not do that after trying for an hour. Please ask your Construct operator for the reason."
                .to_owned()
        }
        Error::Silent(_) | Error::LeaseLost => return,
    };
    if let Err(error) = send_privately(shared, team, payload, &text).await {
        tracing::warn!(%error, "cannot report a failure to the user");
    }
}

/// Sends a text to the sender of a payload only.
async fn send_privately(
    shared: &Shared,
    team: &str,
    payload: &Value,
    text: &str,
) -> Result<(), Error> {
    let person = Recipient::from_payload(payload);
    if respond(shared, person.url, text).await? {
        return Ok(());
    }
    if person.channel.is_empty() || person.user.is_empty() {
        return Err(Error::Silent("the payload names no channel".to_owned()));
    }
    let team = shared.teams.team(team).await?;
    let Recipient { user, channel, thread, .. } = person;
    Ok(chat::post_ephemeral(&shared.web, &team.token, channel, user, thread, text).await?)
}

/// Posts to Slack's response address. Returns whether it was accepted.
pub(crate) async fn respond(shared: &Shared, url: &str, text: &str) -> Result<bool, Error> {
    let Some(url) = Url::parse(url).ok().filter(|url| shared.web.is_slack_url(url)) else {
        return Ok(false);
    };
    let body =
        json!({"response_type": "ephemeral", "replace_original": false, "text": text}).to_string();
    let request =
        shared.web.client().post(url).header("content-type", "application/json").body(body);
    match request.send().await {
        Ok(answer) => Ok(answer.status().is_success()),
        Err(error) => {
            Err(Error::Retryable { reason: error.without_url().to_string(), retry_after: None })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipient_is_read_from_command_button_and_form() {
        let command = json!({"user_id": "U1", "channel_id": "C1", "response_url": "https://hooks.slack.com/1"});
        let button =
            json!({"user": {"id": "U1"}, "channel": {"id": "C1"}, "message": {"thread_ts": "1.0"}});
        let form = json!({"user": {"id": "U1"}, "view": {"private_metadata": "C1"}});
        for payload in [&command, &button, &form] {
            let person = Recipient::from_payload(payload);
            assert_eq!((person.user, person.channel), ("U1", "C1"), "{payload}");
        }
        assert_eq!(
            (Recipient::from_payload(&command).url, Recipient::from_payload(&button).thread),
            ("https://hooks.slack.com/1", Some("1.0"))
        );
    }
}

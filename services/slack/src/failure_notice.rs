//! Telling one person that what they wanted with a command, a button or a form has come to nothing.

use reqwest::Url;
use serde_json::{Value, json};

use crate::{error::Error, mrkdwn::escape, shared::Shared, web::chat};

/// Whom, and the ways to reach them.
struct Recipient<'a> {
    user: &'a str,
    channel: &'a str,
    thread: Option<&'a str>,
    /// Good for half an hour, also where the app is in no channel.
    url: &'a str,
}

impl<'a> Recipient<'a> {
    /// Who has sent this.
    fn from_payload(payload: &'a Value) -> Self {
        let text = |value: &'a Value| value.as_str().unwrap_or_default();
        let either = |one: &'a Value, other: &'a Value| {
            if one.is_string() { text(one) } else { text(other) }
        };
        Self {
            // Buttons and forms name people and channels in objects, commands don't, and a form is
            // in no channel but of the command it was opened by.
            user: either(&payload["user"]["id"], &payload["user_id"]),
            channel: match payload["channel"]["id"].as_str() {
                Some(channel) => channel,
                None => either(&payload["channel_id"], &payload["view"]["private_metadata"]),
            },
            thread: payload["message"]["thread_ts"].as_str(),
            url: text(&payload["response_url"]),
        }
    }
}

/// Says why something has come to nothing, where there is something to say and a way to say it.
pub(crate) async fn report_failure(shared: &Shared, team: &str, payload: &Value, trouble: &Error) {
    let said = match trouble {
        Error::Failed(why) => format!("I could not do that: {}", escape(why)),
        Error::Retryable { .. } => {
            "I could not do that, although I have tried for an hour. Whoever runs Construct can find out why."
                .to_owned()
        }
        Error::Silent(_) | Error::LeaseLost => return,
    };
    if let Err(error) = send_privately(shared, team, payload, &said).await {
        tracing::warn!(%error, "somebody could not be told that something has come to nothing");
    }
}

/// Says something to whoever has sent this, and to nobody else.
async fn send_privately(
    shared: &Shared,
    team: &str,
    payload: &Value,
    said: &str,
) -> Result<(), Error> {
    let person = Recipient::from_payload(payload);
    if respond(shared, person.url, said).await? {
        return Ok(());
    }
    if person.channel.is_empty() || person.user.is_empty() {
        return Err(Error::Silent("there is no channel to say it in".to_owned()));
    }
    let team = shared.teams.team(team).await?;
    let Recipient { user, channel, thread, .. } = person;
    Ok(chat::post_ephemeral(&shared.web, &team.token, channel, user, thread, said).await?)
}

/// Answers where Slack wants an answer to be sent. Whether it was taken.
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
    fn whoever_has_sent_a_command_a_button_or_a_form_can_be_reached() {
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

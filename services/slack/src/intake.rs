//! Publishes Slack's deliveries to the work queue. A delivery is confirmed to Slack only after the
//! queue accepted it, for HTTP and Socket Mode alike.

use std::sync::Arc;

use construct_bus::{
    Bus, publish,
    subject::{Invalid, SlackDelivery, SlackKind},
};
use construct_proto::mesh::v1 as mesh;
use construct_store::{Keyring, SealError, SealedSecret};
use secrecy::ExposeSecret as _;
use serde_json::Value;

/// The time limit for publishing, so that Slack has its response within three seconds.
const PUBLISH_TIMEOUT: std::time::Duration = std::time::Duration::from_millis(2000);

/// Why a delivery was not accepted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// It is not valid JSON.
    #[error("the delivery lacks `{0}`")]
    Malformed(&'static str),
    /// The workspace's id is malformed.
    #[error("the workspace's id is malformed")]
    Team(#[source] Invalid),
    /// It cannot be encrypted. Slack may send it again.
    #[error("cannot seal the delivery")]
    Seal(#[source] SealError),
    /// The queue did not accept it. Slack may send it again.
    #[error("the work queue did not accept the delivery")]
    Queue(#[source] publish::Error),
}

/// Publishes deliveries. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Intake {
    bus: Bus,
    keyring: Arc<Keyring>,
}

impl Intake {
    pub(crate) const fn new(bus: Bus, keyring: Arc<Keyring>) -> Self {
        Self { bus, keyring }
    }

    /// Accepts the envelope of an event (`event_callback`). Irrelevant events are dropped.
    pub(crate) async fn event(&self, envelope: &Value) -> Result<(), Error> {
        let event = &envelope["event"];
        let Some(key) = deduplication_key(envelope) else {
            tracing::trace!(kind = event["type"].as_str(), "ignored an irrelevant event");
            return Ok(());
        };
        let team = event_team(envelope).ok_or(Error::Malformed("team_id"))?;
        self.publish(SlackKind::Event, team, key, envelope.to_string(), None).await
    }

    /// Accepts an interaction with a button or a form.
    pub(crate) async fn action(&self, payload: &Value) -> Result<(), Error> {
        let team = action_team(payload).ok_or(Error::Malformed("team.id"))?;
        let key = match payload["type"].as_str() {
            Some("block_actions") => {
                let action = &payload["actions"][0];
                let person = payload["user"]["id"].as_str().unwrap_or_default();
                format!(
                    "{}.{}.{person}",
                    text_or_empty(&action["action_ts"]),
                    text_or_empty(&action["action_id"])
                )
            }
            Some("view_submission") => {
                format!(
                    "{}.{}",
                    text_or_empty(&payload["view"]["id"]),
                    text_or_empty(&payload["view"]["hash"])
                )
            }
            // Closed forms, shortcuts and the like.
            _ => return Ok(()),
        };
        self.publish(SlackKind::Action, team, key, payload.to_string(), None).await
    }

    /// Accepts a slash command. It may hold a set-up code, mistyped or not, that works for anyone
    /// who reads it. Every command is therefore sealed against readers of the message bus.
    pub(crate) async fn command(&self, command: &Value) -> Result<(), Error> {
        let team = required_text(command, "team_id")?;
        let key = required_text(command, "trigger_id")?.to_owned();
        let sealed = self
            .keyring
            .seal(&seal_record(team, &key), command.to_string().as_bytes())
            .map_err(Error::Seal)?;
        self.publish(SlackKind::Command, team, key, String::new(), Some(sealed)).await
    }

    async fn publish(
        &self,
        kind: SlackKind,
        team: &str,
        key: String,
        payload: String,
        sealed: Option<SealedSecret>,
    ) -> Result<(), Error> {
        let address = SlackDelivery::new(kind, team).map_err(Error::Team)?;
        let sealed = sealed.map(|SealedSecret { key_id, nonce, ciphertext }| mesh::SealedSecret {
            key_id,
            nonce,
            ciphertext,
        });
        let delivery = mesh::SlackDelivery {
            team: team.to_owned(),
            kind: kind.to_string(),
            key,
            payload,
            sealed,
        };
        self.bus
            .publish_within(&address, &delivery, PUBLISH_TIMEOUT)
            .await
            .map(drop)
            .map_err(Error::Queue)
    }
}

/// The record that a command is sealed for.
fn seal_record(team: &str, key: &str) -> String {
    format!("slack_command.{team}.{key}")
}

/// Why the payload of a delivery cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PayloadError {
    /// It is sealed with a key that is not configured.
    #[error("cannot unseal the delivery")]
    Unseal(#[source] SealError),
    /// It is not valid JSON.
    #[error("the delivery is not valid JSON")]
    Json(#[source] serde_json::Error),
}

/// Returns the payload that Slack sent.
pub(crate) fn open_payload(
    keyring: &Keyring,
    delivery: &mesh::SlackDelivery,
) -> Result<Value, PayloadError> {
    let Some(mesh::SealedSecret { key_id, nonce, ciphertext }) = delivery.sealed.clone() else {
        return serde_json::from_str(&delivery.payload).map_err(PayloadError::Json);
    };
    let sealed = SealedSecret { key_id, nonce, ciphertext };
    let opened = keyring
        .open(&seal_record(&delivery.team, &delivery.key), &sealed)
        .map_err(PayloadError::Unseal)?;
    serde_json::from_slice(opened.expose_secret()).map_err(PayloadError::Json)
}

/// The workspace of an event. In a channel that several workspaces share, this is the one through
/// which the app sees the event, not the one in which it happened.
fn event_team(envelope: &Value) -> Option<&str> {
    let seen = envelope["authorizations"][0]["team_id"].as_str();
    seen.or_else(|| envelope["team_id"].as_str()).filter(|team| !team.is_empty())
}

/// The workspace of an interaction: the one in which the app is installed, whichever workspace the
/// user belongs to.
pub(crate) fn action_team(payload: &Value) -> Option<&str> {
    let places = [
        &payload["view"]["app_installed_team_id"],
        &payload["team"]["id"],
        &payload["user"]["team_id"],
    ];
    places.into_iter().find_map(Value::as_str)
}

/// The deduplication key: equal for two deliveries of the same event, none for irrelevant events.
/// For messages it is (channel, ts), because Slack sends a mention in a direct message as two
/// events, and repeats any event under another id.
fn deduplication_key(envelope: &Value) -> Option<String> {
    let event = &envelope["event"];
    match event["type"].as_str()? {
        "app_mention" | "message" => is_question(event).then(|| {
            format!("{}.{}", text_or_empty(&event["channel"]), text_or_empty(&event["ts"]))
        }),
        "app_home_opened" => (event["tab"].as_str() == Some("home"))
            .then(|| text_or_empty(&envelope["event_id"]).to_owned()),
        "link_shared" | "app_uninstalled" | "tokens_revoked" => {
            Some(text_or_empty(&envelope["event_id"]).to_owned())
        }
        _ => None,
    }
}

/// Whether a message may be a question: written by a person, either in a direct message or with a
/// mention of the app. Edits and deletions are no questions. Messages of bots are none either,
/// least of all our own.
pub(crate) fn is_question(event: &Value) -> bool {
    let subtype =
        matches!(event["subtype"].as_str(), None | Some("file_share" | "thread_broadcast"));
    let addressed = event["type"] == "app_mention" || event["channel_type"] == "im";
    let by_person =
        event["user"].is_string() && event["bot_id"].is_null() && event["bot_profile"].is_null();
    subtype && addressed && by_person && event["channel"].is_string() && event["ts"].is_string()
}

fn required_text<'a>(value: &'a Value, name: &'static str) -> Result<&'a str, Error> {
    value[name].as_str().filter(|text| !text.is_empty()).ok_or(Error::Malformed(name))
}

fn text_or_empty(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn mention_key_ignores_event_id_and_kind() {
        let event = |id: &str, kind: &str| {
            let event = json!({"type": kind, "channel": "D1", "channel_type": "im", "user": "U1", "ts": "1.2", "text": "hi"});
            json!({"event_id": id, "event": event})
        };
        assert_eq!(deduplication_key(&event("Ev1", "app_mention")).as_deref(), Some("D1.1.2"));
        assert_eq!(deduplication_key(&event("Ev2", "message")).as_deref(), Some("D1.1.2"));
    }

    #[test]
    fn shared_channel_event_belongs_to_installed_workspace() {
        let shared = json!({"team_id": "T0THEIRS", "authorizations": [{"enterprise_id": null, "team_id": "T0OURS"}]});
        assert_eq!(event_team(&shared), Some("T0OURS"));
        for alone in [
            json!({"team_id": "T0OURS"}),
            json!({"team_id": "T0OURS", "authorizations": [{"team_id": null}]}),
        ] {
            assert_eq!(event_team(&alone), Some("T0OURS"));
        }
        let form = json!({"team": {"id": "T0THEIRS"}, "view": {"app_installed_team_id": "T0OURS"}});
        assert_eq!(action_team(&form), Some("T0OURS"));
        assert_eq!(
            action_team(&json!({"team": {"id": "T0OURS"}, "user": {"team_id": "T0THEIRS"}})),
            Some("T0OURS")
        );
        assert_eq!(
            action_team(&json!({"team": null, "user": {"team_id": "T0OURS"}})),
            Some("T0OURS")
        );
    }

    #[test]
    fn bot_messages_edits_and_deletions_are_no_questions() {
        let base = json!({"type": "message", "channel": "D1", "channel_type": "im", "user": "U1", "ts": "1.2"});
        assert!(is_question(&base));
        for (name, value) in [
            ("bot_id", json!("B1")),
            ("subtype", json!("message_changed")),
            ("subtype", json!("message_deleted")),
            ("subtype", json!("bot_message")),
            ("channel_type", json!("channel")),
            ("user", json!(null)),
        ] {
            let mut other = base.clone();
            other[name] = value;
            assert!(!is_question(&other), "{other}");
        }
    }
}

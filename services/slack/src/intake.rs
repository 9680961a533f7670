//! What Slack sends, on its way into the work queue: whichever face it came by, it is confirmed to
//! Slack only after the queue has it.

use std::sync::Arc;

use construct_bus::{
    Bus, publish,
    subject::{Invalid, SlackDelivery, SlackKind},
};
use construct_proto::mesh::v1 as mesh;
use construct_store::{Keyring, SealError, SealedSecret};
use secrecy::ExposeSecret as _;
use serde_json::Value;

/// How long the queue may take to accept something, so that Slack has its answer within three
/// seconds.
const DEADLINE: std::time::Duration = std::time::Duration::from_millis(2000);

/// Why something was not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// It is not what Slack sends.
    #[error("the delivery lacks `{0}`")]
    Malformed(&'static str),
    /// Its workspace's id is none.
    #[error("the workspace's id is malformed")]
    Team(#[source] Invalid),
    /// It cannot be encrypted; Slack may send it again.
    #[error("the delivery cannot be sealed")]
    Sealed(#[source] SealError),
    /// The queue has not taken it; Slack may send it again.
    #[error("the work queue has not taken it")]
    Queue(#[source] publish::Error),
}

/// Puts deliveries into the queue. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Intake {
    bus: Bus,
    keyring: Arc<Keyring>,
}

impl Intake {
    pub(crate) const fn new(bus: Bus, keyring: Arc<Keyring>) -> Self {
        Self { bus, keyring }
    }

    /// Takes the envelope of an event (`event_callback`). What is nothing to us is taken and
    /// forgotten.
    pub(crate) async fn event(&self, envelope: &Value) -> Result<(), Error> {
        let event = &envelope["event"];
        let Some(key) = key_of(envelope) else {
            tracing::trace!(kind = event["type"].as_str(), "an event is of no interest");
            return Ok(());
        };
        let team = team_of_event(envelope).ok_or(Error::Malformed("team_id"))?;
        self.publish(SlackKind::Event, team, key, envelope.to_string(), None).await
    }

    /// Takes what somebody did with a button or a form.
    pub(crate) async fn action(&self, payload: &Value) -> Result<(), Error> {
        let team = team_of_action(payload).ok_or(Error::Malformed("team.id"))?;
        let key = match payload["type"].as_str() {
            Some("block_actions") => {
                let action = &payload["actions"][0];
                let person = payload["user"]["id"].as_str().unwrap_or_default();
                format!("{}.{}.{person}", word(&action["action_ts"]), word(&action["action_id"]))
            }
            Some("view_submission") => {
                format!("{}.{}", word(&payload["view"]["id"]), word(&payload["view"]["hash"]))
            }
            // Closed forms, shortcuts and the like.
            _ => return Ok(()),
        };
        self.publish(SlackKind::Action, team, key, payload.to_string(), None).await
    }

    /// Takes a slash command. It may hold a set-up code, mistyped or not, that is good for whoever
    /// has it: so that those who tap the mesh do not, every command is sealed.
    pub(crate) async fn command(&self, command: &Value) -> Result<(), Error> {
        let team = text(command, "team_id")?;
        let key = text(command, "trigger_id")?.to_owned();
        let sealed = self
            .keyring
            .seal(&record(team, &key), command.to_string().as_bytes())
            .map_err(Error::Sealed)?;
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
        self.bus.publish_within(&address, &delivery, DEADLINE).await.map(drop).map_err(Error::Queue)
    }
}

/// What a command is sealed for.
fn record(team: &str, key: &str) -> String {
    format!("slack_command.{team}.{key}")
}

/// Why what is in the queue cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unreadable {
    /// It is sealed with a key that is not there.
    #[error("a delivery cannot be opened")]
    Sealed(#[source] SealError),
    /// It is not what Slack sends.
    #[error("what Slack sent is no JSON")]
    Json(#[source] serde_json::Error),
}

/// What Slack sent.
pub(crate) fn payload(
    keyring: &Keyring,
    delivery: &mesh::SlackDelivery,
) -> Result<Value, Unreadable> {
    let Some(mesh::SealedSecret { key_id, nonce, ciphertext }) = delivery.sealed.clone() else {
        return serde_json::from_str(&delivery.payload).map_err(Unreadable::Json);
    };
    let sealed = SealedSecret { key_id, nonce, ciphertext };
    let opened = keyring
        .open(&record(&delivery.team, &delivery.key), &sealed)
        .map_err(Unreadable::Sealed)?;
    serde_json::from_slice(opened.expose_secret()).map_err(Unreadable::Json)
}

/// The workspace that an event is for: of a channel that several share, the one in which the app
/// sees it, and not the one where it happened.
fn team_of_event(envelope: &Value) -> Option<&str> {
    let seen = envelope["authorizations"][0]["team_id"].as_str();
    seen.or_else(|| envelope["team_id"].as_str()).filter(|team| !team.is_empty())
}

/// The workspace that a button or a form is of: the one the app is installed in, whoever it was
/// used by.
pub(crate) fn team_of_action(payload: &Value) -> Option<&str> {
    let places = [
        &payload["view"]["app_installed_team_id"],
        &payload["team"]["id"],
        &payload["user"]["team_id"],
    ];
    places.into_iter().find_map(Value::as_str)
}

/// What two deliveries of the same event have in common; none for what is of no interest. For
/// messages that is (channel, ts), because Slack sends a mention in a direct message as two events,
/// and any event again under another id.
fn key_of(envelope: &Value) -> Option<String> {
    let event = &envelope["event"];
    match event["type"].as_str()? {
        "app_mention" | "message" => is_question(event)
            .then(|| format!("{}.{}", word(&event["channel"]), word(&event["ts"]))),
        "app_home_opened" => {
            (event["tab"].as_str() == Some("home")).then(|| word(&envelope["event_id"]).to_owned())
        }
        "link_shared" | "app_uninstalled" | "tokens_revoked" => {
            Some(word(&envelope["event_id"]).to_owned())
        }
        _ => None,
    }
}

/// Whether a message may be somebody's question: one that a person has written, to us alone or with
/// our name in it. Changes and deletions of messages are no questions; nor is what a bot says,
/// least of all ourselves.
pub(crate) fn is_question(event: &Value) -> bool {
    let subtype =
        matches!(event["subtype"].as_str(), None | Some("file_share" | "thread_broadcast"));
    let addressed = event["type"] == "app_mention" || event["channel_type"] == "im";
    let by_person =
        event["user"].is_string() && event["bot_id"].is_null() && event["bot_profile"].is_null();
    subtype && addressed && by_person && event["channel"].is_string() && event["ts"].is_string()
}

fn text<'a>(value: &'a Value, name: &'static str) -> Result<&'a str, Error> {
    value[name].as_str().filter(|text| !text.is_empty()).ok_or(Error::Malformed(name))
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_mention_has_the_same_key_under_another_event_id_and_as_a_direct_message() {
        let event = |id: &str, kind: &str| {
            let event = json!({"type": kind, "channel": "D1", "channel_type": "im", "user": "U1", "ts": "1.2", "text": "hi"});
            json!({"event_id": id, "event": event})
        };
        assert_eq!(key_of(&event("Ev1", "app_mention")).as_deref(), Some("D1.1.2"));
        assert_eq!(key_of(&event("Ev2", "message")).as_deref(), Some("D1.1.2"));
    }

    #[test]
    fn in_a_shared_channel_the_workspace_is_the_one_the_app_is_installed_in() {
        let shared = json!({"team_id": "T0THEIRS", "authorizations": [{"enterprise_id": null, "team_id": "T0OURS"}]});
        assert_eq!(team_of_event(&shared), Some("T0OURS"));
        for alone in [
            json!({"team_id": "T0OURS"}),
            json!({"team_id": "T0OURS", "authorizations": [{"team_id": null}]}),
        ] {
            assert_eq!(team_of_event(&alone), Some("T0OURS"));
        }
        let form = json!({"team": {"id": "T0THEIRS"}, "view": {"app_installed_team_id": "T0OURS"}});
        assert_eq!(team_of_action(&form), Some("T0OURS"));
        assert_eq!(
            team_of_action(&json!({"team": {"id": "T0OURS"}, "user": {"team_id": "T0THEIRS"}})),
            Some("T0OURS")
        );
        assert_eq!(
            team_of_action(&json!({"team": null, "user": {"team_id": "T0OURS"}})),
            Some("T0OURS")
        );
    }

    #[test]
    fn what_bots_say_and_what_is_changed_or_deleted_is_no_question() {
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

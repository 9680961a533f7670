//! What is taken from the work queue: a question is written down and acknowledged, everything else
//! is dealt with at once.

use std::{sync::Arc, time::Duration};

use construct_bus::{Bus, ConsumeOptions, Delivery, subject::SlackKind};
use construct_proto::mesh::v1 as mesh;
use construct_runtime::{Lifecycle, clock, telemetry::Chain};
use construct_store::slack::{MentionKey, NewMention};
use jiff::Timestamp;
use serde_json::Value;

use crate::{
    Shared, actions, commands, home,
    intake::{self, Unreadable},
    mention::Trouble,
    tell, unfurl,
};

/// Deliveries worked on at the same time.
const IN_FLIGHT: usize = 32;
/// How soon a delivery that could not be dealt with is tried again; for what is no question it
/// doubles with each try.
const AGAIN: Duration = Duration::from_secs(2);
/// The longest such pause.
const AGAIN_MAX: Duration = Duration::from_secs(60);
/// How often something that is no question is tried: with these pauses for an hour, which outlasts
/// a restart of everything.
const TRIES: u32 = 64;

/// Takes deliveries.
pub(crate) struct Worker {
    shared: Arc<Shared>,
    bus: Bus,
}

impl Worker {
    pub(crate) const fn new(shared: Arc<Shared>, bus: Bus) -> Self {
        Self { shared, bus }
    }

    /// Takes deliveries until the service drains.
    pub(crate) async fn run(self, lifecycle: Lifecycle) -> anyhow::Result<()> {
        let mut deliveries =
            self.bus.consume_slack(ConsumeOptions::new(IN_FLIGHT, lifecycle.draining()));
        while let Some(delivery) = deliveries.next().await {
            let shared = Arc::clone(&self.shared);
            lifecycle.spawn_job("delivery", async move { take(&shared, delivery).await });
        }
        Ok(())
    }
}

async fn take(shared: &Shared, delivery: Delivery<mesh::SlackDelivery>) {
    let Delivery { message, delivery: tries, receipt, .. } = delivery;
    let alive = receipt.keep_alive();
    let is_event = message.kind == SlackKind::Event.as_str();
    let payload = intake::payload(&shared.keyring, &message);
    let done = match &payload {
        Ok(payload) => deal_with(shared, &message, payload).await,
        // Somebody may put the master key back.
        Err(error @ Unreadable::Sealed(_)) => {
            Err(Trouble::Later { what: Chain(error).to_string(), after: None })
        }
        Err(error @ Unreadable::Json(_)) => Err(Trouble::Mute(Chain(error).to_string())),
    };
    match done {
        Ok(()) => {
            drop(alive);
            receipt.ack().await;
        }
        // A question is never dropped.
        Err(Trouble::Later { what, after }) if is_event || tries < TRIES => {
            tracing::debug!(what, kind = message.kind, "a delivery is tried again");
            let pause = if is_event { AGAIN } else { pause(tries) };
            drop(alive);
            receipt.nak(pause.max(after.unwrap_or_default())).await;
        }
        Err(trouble) => {
            tracing::warn!(error = %Chain(&trouble), kind = message.kind, team = message.team, "a delivery came to nothing");
            if !is_event && let Ok(payload) = payload {
                tell::failed(shared, &message.team, &payload, &trouble).await;
            }
            drop(alive);
            receipt.ack().await;
        }
    }
}

/// The pause after so many tries.
fn pause(tries: u32) -> Duration {
    AGAIN.saturating_mul(1 << tries.clamp(1, 6) >> 1).min(AGAIN_MAX)
}

async fn deal_with(
    shared: &Shared,
    delivery: &mesh::SlackDelivery,
    payload: &Value,
) -> Result<(), Trouble> {
    let team = delivery.team.as_str();
    match delivery.kind.parse() {
        Ok(SlackKind::Event) => {
            let event = &payload["event"];
            match event["type"].as_str() {
                Some("app_mention" | "message") => question(shared, team, event).await,
                Some("app_uninstalled") => {
                    Ok(shared.teams.uninstall(team, happened(payload)).await?)
                }
                Some("tokens_revoked") => {
                    // Tokens of persons are none of ours.
                    let ours =
                        event["tokens"]["bot"].as_array().is_some_and(|bots| !bots.is_empty());
                    if ours {
                        Ok(shared.teams.uninstall(team, happened(payload)).await?)
                    } else {
                        Ok(())
                    }
                }
                Some("app_home_opened") => {
                    bounded(home::show(shared, team, event["user"].as_str()).await)
                }
                Some("link_shared") => bounded(unfurl::show(shared, team, event).await),
                _ => Ok(()),
            }
        }
        Ok(SlackKind::Action) => actions::take(shared, team, payload).await,
        Ok(SlackKind::Command) => commands::take(shared, team, &delivery.key, payload).await,
        Err(error) => Err(Trouble::Mute(error.to_string())),
    }
}

/// When an event happened, at the latest: Slack says the second.
fn happened(envelope: &Value) -> Timestamp {
    let second = envelope["event_time"].as_i64();
    second.and_then(|second| Timestamp::new(second, 999_999_999).ok()).unwrap_or_else(clock::now)
}

/// What is only shown is not tried again for ever.
fn bounded(done: Result<(), Trouble>) -> Result<(), Trouble> {
    done.map_err(|trouble| match trouble {
        Trouble::Later { what, .. } => Trouble::Mute(what),
        trouble => trouble,
    })
}

/// Writes a question down, unless it is known.
async fn question(shared: &Shared, team: &str, event: &Value) -> Result<(), Trouble> {
    let text = |name: &str| event[name].as_str().unwrap_or_default().to_owned();
    if !intake::is_question(event) {
        return Ok(());
    }
    let installation = match shared.store.slack_installation(team).await {
        Ok(installation) => installation,
        Err(construct_store::Error::NotFound { .. }) => {
            return Err(Trouble::Mute("the app is not installed in this workspace".to_owned()));
        }
        Err(error) => return Err(error.into()),
    };
    if event["user"] == installation.bot_user.as_str() {
        return Ok(());
    }
    let ts = text("ts");
    let thread = event["thread_ts"].as_str().unwrap_or(&ts).to_owned();
    let new = NewMention {
        key: MentionKey { team: team.to_owned(), channel: text("channel"), ts, attempt: 0 },
        organization: installation.organization,
        thread,
        user: text("user"),
        event: event.clone(),
    };
    if shared.store.slack_mention_put(&new, clock::now()).await? {
        shared.due.notify_one();
    } else {
        tracing::debug!(channel = new.key.channel, ts = new.key.ts, "a mention is known already");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_question_is_tried_for_an_hour_and_soon_at_first() {
        let pauses: Vec<u64> = (1..TRIES).map(|tries| pause(tries).as_secs()).collect();
        assert_eq!(pauses[..6], [2, 4, 8, 16, 32, 60]);
        assert!((3_500..3_700).contains(&pauses.iter().sum::<u64>()), "{pauses:?}");
    }

    #[test]
    fn an_event_happened_within_the_second_that_slack_says() {
        let at = |second| Timestamp::from_second(second).expect("it is a time");
        let happened = happened(&serde_json::json!({"event_time": 1_760_000_000}));
        assert!(happened >= at(1_760_000_000) && happened < at(1_760_000_001), "{happened}");
    }
}

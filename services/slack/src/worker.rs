//! What is taken from the work queue: a question is written down and acknowledged, everything else is dealt with at once.

use std::{sync::Arc, time::Duration};

use construct_bus::{Bus, ConsumeOptions, Delivery, subject::SlackKind};
use construct_proto::mesh::v1 as mesh;
use construct_runtime::{Lifecycle, telemetry::Chain};
use construct_store::slack::{MentionKey, NewMention};
use jiff::Timestamp;
use serde_json::Value;

use crate::{Shared, actions, commands, home, intake, mention::Trouble, unfurl};

/// Deliveries worked on at the same time.
const IN_FLIGHT: usize = 32;
/// How soon a delivery that could not be dealt with is tried again.
const AGAIN: Duration = Duration::from_secs(2);
/// How often something that is no question is tried: what it is about is over after a minute.
const TRIES: u32 = 20;

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
        let mut deliveries = self.bus.consume_slack(ConsumeOptions::new(IN_FLIGHT, lifecycle.draining()));
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
    let done = deal_with(shared, &message).await;
    drop(alive);
    match done {
        Ok(()) => receipt.ack().await,
        // A question is never dropped.
        Err(trouble @ Trouble::Later { .. }) if tries < TRIES || message.kind == SlackKind::Event.as_str() => {
            tracing::debug!(%trouble, kind = message.kind, "a delivery is tried again");
            receipt.nak(AGAIN).await;
        }
        Err(trouble) => {
            tracing::warn!(error = %Chain(&trouble), kind = message.kind, team = message.team, "a delivery came to nothing");
            receipt.ack().await;
        }
    }
}

async fn deal_with(shared: &Shared, delivery: &mesh::SlackDelivery) -> Result<(), Trouble> {
    let payload: Value = serde_json::from_str(&delivery.payload)
        .map_err(|error| Trouble::Mute(format!("what Slack sent is no JSON: {error}")))?;
    let team = delivery.team.as_str();
    match delivery.kind.parse() {
        Ok(SlackKind::Event) => {
            let event = &payload["event"];
            match event["type"].as_str() {
                Some("app_mention" | "message") => question(shared, team, event).await,
                Some("app_uninstalled") => Ok(shared.teams.uninstall(team).await?),
                Some("tokens_revoked") => {
                    // Tokens of persons are none of ours.
                    let ours = event["tokens"]["bot"].as_array().is_some_and(|bots| !bots.is_empty());
                    if ours { Ok(shared.teams.uninstall(team).await?) } else { Ok(()) }
                }
                Some("app_home_opened") => bounded(home::show(shared, team, event["user"].as_str()).await),
                Some("link_shared") => bounded(unfurl::show(shared, team, event).await),
                _ => Ok(()),
            }
        }
        Ok(SlackKind::Action) => actions::take(shared, team, &payload).await,
        Ok(SlackKind::Command) => commands::take(shared, team, &delivery.key, &payload).await,
        Err(error) => Err(Trouble::Mute(error.to_string())),
    }
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
    if shared.store.slack_mention_put(&new, Timestamp::now()).await? {
        shared.due.notify_one();
    } else {
        tracing::debug!(channel = new.key.channel, ts = new.key.ts, "a mention is known already");
    }
    Ok(())
}

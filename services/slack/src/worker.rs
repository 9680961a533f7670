//! Processes deliveries from the work queue. A mention is stored and acknowledged; everything else
//! is processed at once.

use std::{sync::Arc, time::Duration};

use construct_bus::{Bus, ConsumeOptions, Delivery, subject::SlackKind};
use construct_proto::mesh::v1 as mesh;
use construct_runtime::{Lifecycle, clock, telemetry::Chain};
use construct_store::slack::{MentionKey, NewMention};
use jiff::Timestamp;
use serde_json::Value;

use crate::{
    actions, commands,
    error::Error,
    failure_notice, home,
    intake::{self, PayloadError},
    shared::Shared,
    unfurl,
};

/// Deliveries that are processed at a time.
const MAX_IN_FLIGHT: usize = 32;
/// The delay before a failed delivery is retried. It doubles with each attempt, except for events.
const RETRY_DELAY: Duration = Duration::from_secs(2);
/// The longest retry delay.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// Attempts to process an action or a command. With these delays they span an hour, which outlasts
/// a restart of everything.
const MAX_ATTEMPTS: u32 = 64;

/// Processes deliveries.
pub(crate) struct Worker {
    shared: Arc<Shared>,
    bus: Bus,
}

impl Worker {
    pub(crate) const fn new(shared: Arc<Shared>, bus: Bus) -> Self {
        Self { shared, bus }
    }

    /// Processes deliveries until the service drains.
    pub(crate) async fn run(self, lifecycle: Lifecycle) -> anyhow::Result<()> {
        let mut deliveries =
            self.bus.consume_slack(ConsumeOptions::new(MAX_IN_FLIGHT, lifecycle.draining()));
        while let Some(delivery) = deliveries.next().await {
            let shared = Arc::clone(&self.shared);
            lifecycle
                .spawn_job("delivery", async move { process_delivery(&shared, delivery).await });
        }
        Ok(())
    }
}

async fn process_delivery(shared: &Shared, delivery: Delivery<mesh::SlackDelivery>) {
    let Delivery { message, delivery: attempts, receipt, .. } = delivery;
    let keep_alive = receipt.keep_alive();
    let is_event = message.kind == SlackKind::Event.as_str();
    let payload = intake::open_payload(&shared.keyring, &message);
    let result = match &payload {
        Ok(payload) => dispatch(shared, &message, payload).await,
        // The master key may be restored.
        Err(error @ PayloadError::Unseal(_)) => {
            Err(Error::Retryable { reason: Chain(error).to_string(), retry_after: None })
        }
        Err(error @ PayloadError::Json(_)) => Err(Error::Silent(Chain(error).to_string())),
    };
    match result {
        Ok(()) => {
            drop(keep_alive);
            receipt.ack().await;
        }
        // An event is never dropped.
        Err(Error::Retryable { reason, retry_after }) if is_event || attempts < MAX_ATTEMPTS => {
            tracing::debug!(reason, kind = message.kind, "a delivery is retried");
            let delay = if is_event { RETRY_DELAY } else { retry_delay(attempts) };
            drop(keep_alive);
            receipt.nak(delay.max(retry_after.unwrap_or_default())).await;
        }
        Err(error) => {
            tracing::warn!(error = %Chain(&error), kind = message.kind, team = message.team, "a delivery failed permanently");
            if !is_event && let Ok(payload) = payload {
                failure_notice::report_failure(shared, &message.team, &payload, &error).await;
            }
            drop(keep_alive);
            receipt.ack().await;
        }
    }
}

/// The retry delay after this number of attempts.
fn retry_delay(attempts: u32) -> Duration {
    RETRY_DELAY.saturating_mul(1 << attempts.clamp(1, 6) >> 1).min(MAX_RETRY_DELAY)
}

async fn dispatch(
    shared: &Shared,
    delivery: &mesh::SlackDelivery,
    payload: &Value,
) -> Result<(), Error> {
    let team = delivery.team.as_str();
    match delivery.kind.parse() {
        Ok(SlackKind::Event) => {
            let event = &payload["event"];
            match event["type"].as_str() {
                Some("app_mention" | "message") => record_mention(shared, team, event).await,
                Some("app_uninstalled") => {
                    Ok(shared.teams.uninstall(team, event_time(payload)).await?)
                }
                Some("tokens_revoked") => {
                    // Tokens of users are not used by this service.
                    let has_bot_tokens =
                        event["tokens"]["bot"].as_array().is_some_and(|bots| !bots.is_empty());
                    if has_bot_tokens {
                        Ok(shared.teams.uninstall(team, event_time(payload)).await?)
                    } else {
                        Ok(())
                    }
                }
                Some("app_home_opened") => {
                    without_retry(home::show(shared, team, event["user"].as_str()).await)
                }
                Some("link_shared") => without_retry(unfurl::show(shared, team, event).await),
                _ => Ok(()),
            }
        }
        Ok(SlackKind::Action) => actions::process(shared, team, payload).await,
        Ok(SlackKind::Command) => commands::process(shared, team, &delivery.key, payload).await,
        Err(error) => Err(Error::Silent(error.to_string())),
    }
}

/// The latest time at which an event can have happened. Slack's resolution is one second.
fn event_time(envelope: &Value) -> Timestamp {
    let second = envelope["event_time"].as_i64();
    second.and_then(|second| Timestamp::new(second, 999_999_999).ok()).unwrap_or_else(clock::now)
}

/// Makes an error permanent: what is only displayed is not retried forever.
fn without_retry(result: Result<(), Error>) -> Result<(), Error> {
    result.map_err(|error| match error {
        Error::Retryable { reason, .. } => Error::Silent(reason),
        error => error,
    })
}

/// Stores a mention, unless it is stored already.
async fn record_mention(shared: &Shared, team: &str, event: &Value) -> Result<(), Error> {
    let text = |name: &str| event[name].as_str().unwrap_or_default().to_owned();
    if !intake::is_question(event) {
        return Ok(());
    }
    let installation = match shared.store.slack_installation(team).await {
        Ok(installation) => installation,
        Err(construct_store::Error::NotFound { .. }) => {
            return Err(Error::Silent("the app is not installed in this workspace".to_owned()));
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
        tracing::debug!(channel = new.key.channel, ts = new.key.ts, "a mention is stored already");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_of_actions_span_an_hour_and_start_early() {
        let pauses: Vec<u64> =
            (1..MAX_ATTEMPTS).map(|attempts| retry_delay(attempts).as_secs()).collect();
        assert_eq!(pauses[..6], [2, 4, 8, 16, 32, 60]);
        assert!((3_500..3_700).contains(&pauses.iter().sum::<u64>()), "{pauses:?}");
    }

    #[test]
    fn event_time_is_the_end_of_the_reported_second() {
        let at = |second| Timestamp::from_second(second).expect("it is a time");
        let happened = event_time(&serde_json::json!({"event_time": 1_760_000_000}));
        assert!(happened >= at(1_760_000_000) && happened < at(1_760_000_001), "{happened}");
    }
}

//! Socket Mode: Slack's deliveries over a connection that this service opens, for installations
//! without a public address.
//!
//! Each delivery is confirmed after the work queue accepted it. Slack repeats unconfirmed
//! deliveries. Deliveries do not wait for each other: a stalled queue delays only what has to go
//! into the queue.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use construct_runtime::telemetry::Chain;
use futures::{SinkExt as _, StreamExt as _, stream::FuturesUnordered};
use reqwest::Url;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout, timeout_at},
};
use tokio_tungstenite::{connect_async, tungstenite::Message};
use tokio_util::sync::CancellationToken;

use crate::{
    commands,
    intake::{Error, Intake},
    shared::Shared,
    web::Body,
};

/// Slack pings more often than this. A connection that is silent for longer is lost.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(60);
/// The time limit for connecting, and for sending a confirmation.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Deliveries of one connection that are processed at a time. Further ones wait on the connection.
const MAX_IN_FLIGHT: usize = 64;
/// How long a replaced connection is still read. Slack closes it ten seconds after its warning.
const LINGER_TIMEOUT: Duration = Duration::from_secs(15);
/// The delay after the first failed connection. It doubles with each further failure.
const MIN_RECONNECT_DELAY: Duration = Duration::from_secs(1);
/// The longest delay between connections.
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(60);
/// A connection that lasted this long resets the delay.
const STABLE_AFTER: Duration = Duration::from_secs(30);

#[derive(Debug, Deserialize)]
struct ConnectionInfo {
    url: String,
}

/// How a connection ended (<https://docs.slack.dev/apis/events-api/using-socket-mode#disconnect>).
enum SessionEnd {
    /// Slack requested a replacement, which was started since.
    Replaced,
    /// Slack closed it.
    Closed,
    /// Socket Mode was turned off in the app's settings.
    Disabled,
}

/// Keeps a connection until the service drains, and two of them during a replacement.
pub(crate) async fn run(shared: Arc<Shared>, intake: Intake, draining: CancellationToken) {
    let (replace, mut replacements) = mpsc::channel(MAX_IN_FLIGHT);
    let connect = |delay: Duration| {
        let (shared, intake, replace) = (&shared, &intake, &replace);
        async move {
            tokio::time::sleep(delay).await;
            let began = Instant::now();
            (session(shared, intake, replace).await, began.elapsed())
        }
    };
    let mut sessions = FuturesUnordered::new();
    sessions.push(connect(Duration::ZERO));
    let mut next_delay = MIN_RECONNECT_DELAY;
    loop {
        let (ended, lasted) = tokio::select! {
            () = draining.cancelled() => return,
            Some(lasted) = replacements.recv() => {
                tracing::debug!("Slack requested a new connection");
                // At once, unless Slack rejected this connection quickly as well.
                sessions.push(connect(if lasted < MIN_RECONNECT_DELAY { MIN_RECONNECT_DELAY } else { Duration::ZERO }));
                continue;
            }
            Some(ended) = sessions.next() => ended,
        };
        let delay = match ended {
            Ok(SessionEnd::Replaced) => continue,
            Ok(SessionEnd::Disabled) => {
                tracing::error!(
                    "Socket Mode is turned off in the app's settings: no deliveries arrive"
                );
                MAX_RECONNECT_DELAY
            }
            ended => {
                if let Err(error) = ended {
                    tracing::warn!(error = format!("{error:#}"), "the connection to Slack failed");
                }
                if lasted > STABLE_AFTER {
                    next_delay = MIN_RECONNECT_DELAY;
                }
                let delay = next_delay;
                next_delay = (next_delay * 2).min(MAX_RECONNECT_DELAY);
                delay
            }
        };
        sessions.push(connect(delay));
    }
}

/// Runs one connection from its opening to its end.
///
/// When Slack requests a replacement, this sends the connection's age to `replace` and lingers for
/// a while. Confirmations and deliveries until the replacement is connected are not lost.
async fn session(
    shared: &Shared,
    intake: &Intake,
    replace: &mpsc::Sender<Duration>,
) -> anyhow::Result<SessionEnd> {
    let token = shared.config.slack_app_token.as_ref().context("slack_app_token is not set")?;
    let authorization = format!("Bearer {}", token.expose());
    let opened: ConnectionInfo = shared
        .web
        .call_with_authorization(&authorization, "apps.connections.open", Body::Form(&[]))
        .await?;
    let url = Url::parse(&opened.url)?;
    let mut checked = url.clone();
    let scheme = if url.scheme() == "wss" { "https" } else { "http" };
    // Slack names one of its own hosts. The address holds a ticket.
    if checked.set_scheme(scheme).is_err() || !shared.web.is_slack_url(&checked) {
        bail!("Slack named an address that is not its own");
    }
    let (socket, _) = timeout(CONNECT_TIMEOUT, connect_async(opened.url.as_str()))
        .await
        .context("no response")??;
    tracing::info!("connected to Slack over Socket Mode");
    let began = Instant::now();
    let (mut sink, mut stream) = socket.split();
    let mut processing = FuturesUnordered::new();
    // When it stops lingering after its successor was started.
    let mut lingers_until: Option<Instant> = None;
    loop {
        let silence = lingers_until.unwrap_or_else(|| Instant::now() + SILENCE_TIMEOUT);
        tokio::select! {
            Some(answer) = processing.next() => {
                if let Some(answer) = answer {
                    let sent = timeout(CONNECT_TIMEOUT, sink.send(Message::text(answer))).await;
                    match sent.context("Slack accepts no confirmation") {
                        Ok(Ok(())) => {}
                        _ if lingers_until.is_some() => return Ok(SessionEnd::Replaced),
                        failed => failed??,
                    }
                }
            }
            message = timeout_at(silence, stream.next()), if processing.len() < MAX_IN_FLIGHT => {
                let text = match message {
                    Ok(Some(Ok(Message::Text(text)))) => text,
                    // The library answers pings.
                    Ok(Some(Ok(message))) if !message.is_close() => continue,
                    _ if lingers_until.is_some() => return Ok(SessionEnd::Replaced),
                    Ok(Some(Ok(_))) => return Ok(SessionEnd::Closed),
                    Ok(Some(Err(error))) => return Err(error.into()),
                    Ok(None) => bail!("the connection ended"),
                    Err(_) => bail!("the connection timed out"),
                };
                let envelope: Value = match serde_json::from_str(&text) {
                    // The replacement is connected already, and receives what is not acknowledged
                    // here.
                    Err(_) if lingers_until.is_some() => return Ok(SessionEnd::Replaced),
                    envelope => envelope?,
                };
                if envelope["type"] != "disconnect" {
                    processing.push(process_envelope(shared, intake, envelope));
                } else if lingers_until.is_none() && envelope["reason"] == "link_disabled" {
                    return Ok(SessionEnd::Disabled);
                } else if lingers_until.is_none() {
                    lingers_until = Some(Instant::now() + LINGER_TIMEOUT);
                    replace.send(began.elapsed()).await?;
                }
            }
        }
    }
}

/// Processes an envelope. Returns the confirmation, if it was accepted.
async fn process_envelope(shared: &Shared, intake: &Intake, envelope: Value) -> Option<String> {
    let payload = &envelope["payload"];
    let answers = envelope["accepts_response_payload"] == true;
    let confirmed = |payload_value: Option<Value>| {
        let mut answer = json!({"envelope_id": envelope["envelope_id"]});
        if let Some(payload_value) = payload_value {
            answer["payload"] = payload_value;
        }
        Some(answer.to_string())
    };
    let accepted = match envelope["type"].as_str() {
        Some("events_api") => intake.event(payload).await,
        Some("interactive") if commands::is_suggestion(payload) => {
            return confirmed(Some(commands::suggest(shared, payload).await));
        }
        Some("interactive") => intake.action(payload).await,
        Some("slash_commands") if answers && commands::is_help(payload) => {
            return confirmed(Some(json!({"response_type": "ephemeral", "text": commands::HELP})));
        }
        Some("slash_commands") => intake.command(payload).await,
        // E.g. `hello`.
        _ => return None,
    };
    match accepted {
        Ok(()) | Err(Error::Malformed(_) | Error::Team(_)) => confirmed(None),
        Err(error) => {
            tracing::error!(error = %Chain(&error), "a Slack delivery was not accepted");
            None
        }
    }
}

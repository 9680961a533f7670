//! Socket Mode: Slack's deliveries over a connection that we open, where no public address is
//! there. Each is confirmed after the work queue has it; what is not confirmed, Slack sends again.
//! None waits for another: a queue that hangs keeps Slack waiting for what is for the queue only.

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
    Shared, commands,
    intake::{Error, Intake},
    web::Body,
};

/// Slack pings more often than this; a connection that is silent for longer is lost.
const SILENCE: Duration = Duration::from_secs(60);
/// How long making a connection may take, and sending a confirmation.
const CONNECT: Duration = Duration::from_secs(15);
/// Deliveries of one connection that are taken at the same time; the next ones wait on the
/// connection.
const IN_FLIGHT: usize = 64;
/// How long a connection is listened to after another one was begun in its place. Slack closes it
/// ten seconds after its warning.
const LINGER: Duration = Duration::from_secs(15);
/// The pause after the first connection that fails; it doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// A connection that lasted so long was none that failed.
const LASTED: Duration = Duration::from_secs(30);

#[derive(Debug, Deserialize)]
struct Opened {
    url: String,
}

/// How a connection has ended (<https://docs.slack.dev/apis/events-api/using-socket-mode#disconnect>).
enum Ended {
    /// Slack wanted another one in its place, which has been begun since.
    Replaced,
    /// Slack has closed it.
    Closed,
    /// Socket Mode was turned off in the app's settings.
    Disabled,
}

/// Keeps a connection until the service drains; while one takes another's place, both.
pub(crate) async fn run(shared: Arc<Shared>, intake: Intake, draining: CancellationToken) {
    let (replace, mut replaced) = mpsc::channel(IN_FLIGHT);
    let connect = |pause: Duration| {
        let (shared, intake, replace) = (&shared, &intake, &replace);
        async move {
            tokio::time::sleep(pause).await;
            let began = Instant::now();
            (session(shared, intake, replace).await, began.elapsed())
        }
    };
    let mut sessions = FuturesUnordered::new();
    sessions.push(connect(Duration::ZERO));
    let mut failed = PAUSE_MIN;
    loop {
        let (ended, lasted) = tokio::select! {
            () = draining.cancelled() => return,
            Some(lasted) = replaced.recv() => {
                tracing::debug!("Slack wants another connection");
                // At once, unless Slack has not wanted this one either.
                sessions.push(connect(if lasted < PAUSE_MIN { PAUSE_MIN } else { Duration::ZERO }));
                continue;
            }
            Some(ended) = sessions.next() => ended,
        };
        let pause = match ended {
            Ok(Ended::Replaced) => continue,
            Ok(Ended::Disabled) => {
                tracing::error!(
                    "Socket Mode is turned off in the app's settings: nothing of Slack is heard"
                );
                PAUSE_MAX
            }
            ended => {
                if let Err(error) = ended {
                    tracing::warn!(
                        error = format!("{error:#}"),
                        "the connection to Slack has failed"
                    );
                }
                if lasted > LASTED {
                    failed = PAUSE_MIN;
                }
                let pause = failed;
                failed = (failed * 2).min(PAUSE_MAX);
                pause
            }
        };
        sessions.push(connect(pause));
    }
}

/// One connection, from its opening to its end. It tells `replace` how long it has lasted when
/// another one is to take its place, and goes on for a while: what is confirmed and what comes
/// until the other is there is not lost with it.
async fn session(
    shared: &Shared,
    intake: &Intake,
    replace: &mpsc::Sender<Duration>,
) -> anyhow::Result<Ended> {
    let token = shared.config.slack_app_token.as_ref().context("slack_app_token is not set")?;
    let authorization = format!("Bearer {}", token.expose());
    let opened: Opened =
        shared.web.call_as(&authorization, "apps.connections.open", Body::Form(&[])).await?;
    let url = Url::parse(&opened.url)?;
    let mut asked = url.clone();
    let scheme = if url.scheme() == "wss" { "https" } else { "http" };
    // What Slack names is one of its own hosts; the address holds a ticket.
    if asked.set_scheme(scheme).is_err() || !shared.web.is_slacks(&asked) {
        bail!("Slack names an address that is none of its own");
    }
    let (socket, _) =
        timeout(CONNECT, connect_async(opened.url.as_str())).await.context("no answer")??;
    tracing::info!("connected to Slack over Socket Mode");
    let began = Instant::now();
    let (mut sink, mut stream) = socket.split();
    let mut taking = FuturesUnordered::new();
    // Until when it lingers after its successor was begun.
    let mut lingers: Option<Instant> = None;
    loop {
        let silence = lingers.unwrap_or_else(|| Instant::now() + SILENCE);
        tokio::select! {
            Some(answer) = taking.next() => {
                if let Some(answer) = answer {
                    let sent = timeout(CONNECT, sink.send(Message::text(answer))).await;
                    match sent.context("Slack takes no answer") {
                        Ok(Ok(())) => {}
                        _ if lingers.is_some() => return Ok(Ended::Replaced),
                        failed => failed??,
                    }
                }
            }
            message = timeout_at(silence, stream.next()), if taking.len() < IN_FLIGHT => {
                let text = match message {
                    Ok(Some(Ok(Message::Text(text)))) => text,
                    // Pings are answered by the library.
                    Ok(Some(Ok(message))) if !message.is_close() => continue,
                    _ if lingers.is_some() => return Ok(Ended::Replaced),
                    Ok(Some(Ok(_))) => return Ok(Ended::Closed),
                    Ok(Some(Err(error))) => return Err(error.into()),
                    Ok(None) => bail!("the connection has ended"),
                    Err(_) => bail!("Slack fell silent"),
                };
                let envelope: Value = match serde_json::from_str(&text) {
                    // The next connection is there already, and gets what is not acknowledged here.
                    Err(_) if lingers.is_some() => return Ok(Ended::Replaced),
                    envelope => envelope?,
                };
                if envelope["type"] != "disconnect" {
                    taking.push(take(shared, intake, envelope));
                } else if lingers.is_none() && envelope["reason"] == "link_disabled" {
                    return Ok(Ended::Disabled);
                } else if lingers.is_none() {
                    lingers = Some(Instant::now() + LINGER);
                    replace.send(began.elapsed()).await?;
                }
            }
        }
    }
}

/// Takes what Slack has sent; what to answer, if it was taken.
async fn take(shared: &Shared, intake: &Intake, envelope: Value) -> Option<String> {
    let payload = &envelope["payload"];
    let answers = envelope["accepts_response_payload"] == true;
    let confirmed = |said: Option<Value>| {
        let mut answer = json!({"envelope_id": envelope["envelope_id"]});
        if let Some(said) = said {
            answer["payload"] = said;
        }
        Some(answer.to_string())
    };
    let taken = match envelope["type"].as_str() {
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
    match taken {
        Ok(()) | Err(Error::Malformed(_) | Error::Team(_)) => confirmed(None),
        Err(error) => {
            tracing::error!(error = %Chain(&error), "a delivery of Slack was not taken");
            None
        }
    }
}

//! Socket Mode: Slack's deliveries over a connection that we open, where no public address is there. Each is confirmed after the work
//! queue has it; what is not confirmed, Slack sends again.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use construct_runtime::telemetry::Chain;
use futures::{SinkExt as _, StreamExt as _};
use reqwest::Url;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};
use tokio_tungstenite::{connect_async, tungstenite::Message};
use tokio_util::sync::CancellationToken;

use crate::{
    Shared,
    intake::{Error, Intake},
    web::Body,
};

/// Slack pings more often than this; a connection that is silent for longer is lost.
const SILENCE: Duration = Duration::from_secs(60);
/// How long making a connection may take.
const CONNECT: Duration = Duration::from_secs(15);
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

/// Keeps a connection until the service drains.
pub(crate) async fn run(shared: Arc<Shared>, intake: Intake, draining: CancellationToken) {
    let mut pause = PAUSE_MIN;
    loop {
        let began = Instant::now();
        tokio::select! {
            () = draining.cancelled() => return,
            ended = session(&shared, &intake) => match ended {
                Ok(()) => tracing::debug!("Slack wants another connection"),
                Err(error) => tracing::warn!(error = format!("{error:#}"), "the connection to Slack has failed"),
            }
        }
        pause = if began.elapsed() > LASTED { PAUSE_MIN } else { (pause * 2).min(PAUSE_MAX) };
        tokio::select! {
            () = draining.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// One connection, from its opening to its end.
async fn session(shared: &Shared, intake: &Intake) -> anyhow::Result<()> {
    let token = shared.config.slack_app_token.as_ref().context("slack_app_token is not set")?;
    let authorization = format!("Bearer {}", token.expose());
    let opened: Opened = shared.web.call_as(&authorization, "apps.connections.open", Body::Form(&[])).await?;
    let url = Url::parse(&opened.url)?;
    let mut asked = url.clone();
    let scheme = if url.scheme() == "wss" { "https" } else { "http" };
    // What Slack names is one of its own hosts; the address holds a ticket.
    if asked.set_scheme(scheme).is_err() || !shared.web.is_slacks(&asked) {
        bail!("Slack names an address that is none of its own");
    }
    let (mut socket, _) = timeout(CONNECT, connect_async(opened.url.as_str())).await.context("no answer")??;
    tracing::info!("connected to Slack over Socket Mode");
    loop {
        let message = timeout(SILENCE, socket.next()).await.context("Slack fell silent")?;
        let text = match message.context("the connection has ended")?? {
            Message::Text(text) => text,
            Message::Close(_) => return Ok(()),
            // Pings are answered by the library.
            _ => continue,
        };
        let envelope: Value = serde_json::from_str(&text)?;
        let taken = match envelope["type"].as_str() {
            Some("disconnect") => return Ok(()),
            Some("events_api") => intake.event(&envelope["payload"]).await,
            Some("interactive") => intake.action(&envelope["payload"]).await,
            Some("slash_commands") => intake.command(&envelope["payload"]).await,
            _ => continue,
        };
        match taken {
            Ok(()) | Err(Error::Malformed(_) | Error::Team(_)) => {
                let answer = json!({"envelope_id": envelope["envelope_id"]}).to_string();
                socket.send(Message::text(answer)).await?;
            }
            Err(error) => tracing::error!(error = %Chain(&error), "a delivery of Slack was not taken"),
        }
    }
}

//! The HTTP endpoints for Slack. Each request is verified over its raw body, queued, and answered.
//! Nothing else is done here, so that Slack has its response within three seconds. When the queue
//! stalls, Slack receives a 503 after two seconds and repeats the request.

use std::sync::Arc;

use axum::{
    Router,
    body::Bytes,
    extract::{DefaultBodyLimit, State},
    http::{HeaderMap, HeaderName, StatusCode},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use construct_runtime::{Lifecycle, clock, telemetry::Chain};
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;

use crate::{
    commands, install,
    intake::{Error, Intake},
    shared::Shared,
    signature::Verifier,
};

/// The largest request body; Slack's have some kilobytes.
const MAX_BODY_BYTES: usize = 2 * 1024 * 1024;
/// Tells Slack not to repeat a request.
const NO_RETRY_HEADER: HeaderName = HeaderName::from_static("x-slack-no-retry");
const RETRY_NUMBER_HEADER: &str = "x-slack-retry-num";
const RETRY_REASON_HEADER: &str = "x-slack-retry-reason";

struct HttpState {
    shared: Arc<Shared>,
    intake: Intake,
    verifier: Verifier,
}

/// Serves Slack's requests until the service drains.
pub(crate) fn spawn(
    shared: Arc<Shared>,
    intake: Intake,
    verifier: Verifier,
    listener: TcpListener,
    lifecycle: &Lifecycle,
) {
    let installation: Router = Router::new()
        .route("/slack/connect", get(install::connect).post(install::connect_with_code))
        .route("/slack/callback", get(install::callback))
        .with_state(Arc::clone(&shared));
    let state = Arc::new(HttpState { shared, intake, verifier });
    let router: Router = Router::new()
        .route("/slack/events", post(events))
        .route("/slack/interactivity", post(interactivity))
        .route("/slack/commands", post(slash_command))
        .with_state(state)
        .merge(installation)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES));
    let draining = lifecycle.draining();
    lifecycle.spawn("requests", async move {
        axum::serve(listener, router).with_graceful_shutdown(draining.cancelled_owned()).await
    });
}

async fn events(State(state): State<Arc<HttpState>>, headers: HeaderMap, body: Bytes) -> Response {
    if let Err(response) = state.check(&headers, &body) {
        return response;
    }
    let Ok(envelope) = serde_json::from_slice::<Value>(&body) else {
        return refuse("the body is not valid JSON");
    };
    match envelope["type"].as_str() {
        Some("url_verification") => {
            envelope["challenge"].as_str().unwrap_or_default().to_owned().into_response()
        }
        Some("event_callback") => answer(state.intake.event(&envelope).await, ""),
        // E.g. `app_rate_limited`: Slack omits events for a minute.
        other => {
            tracing::warn!(kind = other, "Slack sent an unexpected envelope");
            StatusCode::OK.into_response()
        }
    }
}

async fn interactivity(
    State(state): State<Arc<HttpState>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if let Err(response) = state.check(&headers, &body) {
        return response;
    }
    let payload = form_urlencoded::parse(&body).find(|(name, _)| name == "payload");
    match payload.map(|(_, payload)| serde_json::from_str::<Value>(&payload)) {
        Some(Ok(payload)) if commands::is_suggestion(&payload) => {
            axum::Json(commands::suggest(&state.shared, &payload).await).into_response()
        }
        Some(Ok(payload)) => answer(state.intake.action(&payload).await, ""),
        _ => refuse("the payload is missing"),
    }
}

async fn slash_command(
    State(state): State<Arc<HttpState>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if let Err(response) = state.check(&headers, &body) {
        return response;
    }
    let fields: Map<String, Value> = form_urlencoded::parse(&body)
        .map(|(name, value)| (name.into_owned(), value.into_owned().into()))
        .collect();
    let command = Value::Object(fields);
    if command["ssl_check"] == "1" {
        return StatusCode::OK.into_response();
    }
    if commands::is_help(&command) {
        return axum::Json(json!({"response_type": "ephemeral", "text": commands::HELP}))
            .into_response();
    }
    answer(state.intake.command(&command).await, "")
}

impl HttpState {
    fn check(&self, headers: &HeaderMap, body: &[u8]) -> Result<(), Response> {
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        if let Some(number) = header(RETRY_NUMBER_HEADER) {
            tracing::debug!(
                number,
                reason = header(RETRY_REASON_HEADER),
                "Slack repeats a request"
            );
        }
        let (timestamp, signature) =
            (header("x-slack-request-timestamp"), header("x-slack-signature"));
        self.verifier.check(timestamp, signature, body, clock::now()).map_err(|error| {
            tracing::warn!(%error, "rejected a request without a valid Slack signature");
            (StatusCode::UNAUTHORIZED, [(NO_RETRY_HEADER, "1")]).into_response()
        })
    }
}

/// Slack repeats what is answered with 503: at once, after a minute and after five
/// (<https://docs.slack.dev/apis/events-api/>).
fn answer(result: Result<(), Error>, text: &'static str) -> Response {
    match result {
        Ok(()) => text.into_response(),
        Err(error @ (Error::Queue(_) | Error::Seal(_))) => {
            tracing::error!(error = %Chain(&error), "a Slack delivery was not accepted");
            StatusCode::SERVICE_UNAVAILABLE.into_response()
        }
        Err(error) => refuse(&error.to_string()),
    }
}

fn refuse(reason: &str) -> Response {
    tracing::warn!(reason, "cannot read a request of Slack");
    (StatusCode::BAD_REQUEST, [(NO_RETRY_HEADER, "1")]).into_response()
}

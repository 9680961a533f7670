//! The server: routes requests to the Web API and plays faults.

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use axum::{
    body::{Body, to_bytes},
    extract::{Request, State},
    http::{StatusCode, header},
    response::{IntoResponse as _, Response},
};
use serde_json::{Map, Value, json};

use super::{Call, Fault, Slack, lock};

/// Larger requests are refused; no test sends one.
const MAX_REQUEST: usize = 64 * 1024 * 1024;

impl Slack {
    /// Records a call; returns its fault.
    fn record_call(&mut self, method: &str, arguments: &Value) -> Option<Fault> {
        self.calls.push(Call {
            method: method.to_owned(),
            arguments: arguments.clone(),
            at: Instant::now(),
        });
        let found = self.faults.iter().position(|(failing, _)| failing == method)?;
        self.faults.remove(found).map(|(_, fault)| fault)
    }
}

pub(super) async fn answer(State(shared): State<Arc<Mutex<Slack>>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, MAX_REQUEST).await.unwrap_or_default();
    let authorization = parts
        .headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let path = parts.uri.path().to_owned();
    let Some(method) = path.strip_prefix("/api/") else {
        let place = path.trim_start_matches('/').split('/').next().unwrap_or_default().to_owned();
        let fault = lock(&shared).record_call(&place, &json!({"path": path}));
        return match fault {
            Some(Fault::Status(status)) => StatusCode::from_u16(status)
                .unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
                .into_response(),
            Some(Fault::Hang) => std::future::pending().await,
            Some(Fault::DoneAndHang) => {
                drop(other(&shared, &path, authorization, &body));
                std::future::pending().await
            }
            _ => other(&shared, &path, authorization, &body),
        };
    };
    let kind = parts
        .headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let arguments = if kind.starts_with("application/json") {
        serde_json::from_slice(&body).unwrap_or_default()
    } else {
        let url = reqwest::Url::parse(&format!("http://x/?{}", String::from_utf8_lossy(&body)))
            .expect("an address");
        let fields: Map<String, Value> = url
            .query_pairs()
            .map(|(name, value)| (name.into_owned(), value.into_owned().into()))
            .collect();
        Value::Object(fields)
    };
    let (fault, done) = {
        let mut slack = lock(&shared);
        let fault = slack.record_call(method, &arguments);
        let skipped = matches!(
            fault,
            Some(Fault::Limited(_) | Fault::Status(_) | Fault::Refuse(_) | Fault::Hang)
        );
        let done =
            if skipped { Value::Null } else { slack.call(method, authorization, &arguments) };
        (fault, done)
    };
    match fault {
        Some(Fault::Limited(seconds)) => {
            let headers = [(header::RETRY_AFTER, seconds.to_string())];
            (
                StatusCode::TOO_MANY_REQUESTS,
                headers,
                json!({"ok": false, "error": "ratelimited"}).to_string(),
            )
                .into_response()
        }
        Some(Fault::Status(status) | Fault::DoneAnd(status)) => StatusCode::from_u16(status)
            .unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
            .into_response(),
        Some(Fault::Refuse(code)) => {
            axum::Json(json!({"ok": false, "error": code})).into_response()
        }
        Some(Fault::DoneAfter(pause)) => {
            tokio::time::sleep(pause).await;
            axum::Json(done).into_response()
        }
        Some(Fault::Hang | Fault::DoneAndHang) => {
            std::future::pending::<()>().await;
            Response::new(Body::empty())
        }
        None => axum::Json(done).into_response(),
    }
}

/// Requests outside of the Web API: files, and responses to commands.
fn other(shared: &Mutex<Slack>, path: &str, authorization: &str, body: &[u8]) -> Response {
    let mut slack = lock(shared);
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    match parts.as_slice() {
        ["response"] => {
            let said = serde_json::from_slice(body).unwrap_or_default();
            slack.responses.push(said);
            StatusCode::OK.into_response()
        }
        ["upload", file] => match slack.files.get_mut(*file) {
            Some(file) => {
                file.content = body.to_vec();
                StatusCode::OK.into_response()
            }
            None => StatusCode::NOT_FOUND.into_response(),
        },
        ["files-pri", file, ..] => {
            let known = slack.tokens.contains_key(authorization.trim_start_matches("Bearer "));
            match slack.files.get(*file) {
                Some(file) if known => file.content.clone().into_response(),
                // A page for people, as Slack does.
                _ => "<!DOCTYPE html><html>Sign in</html>".into_response(),
            }
        }
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

//! The proxy: models for scripts and programs that never hold a vendor's key (docs/proxy.md).
//!
//! It speaks the protocols of the vendors' SDKs. These work with another address and a token,
//! whichever vendor is behind a model. The owner of the token pays for every call.

mod access;
mod chat;
mod client_request;
mod count;
mod embeddings;
mod messages;
mod partial_answer;
mod protocol;
mod refusal;
mod responses;
mod routes;
mod serve;
mod spending;
#[cfg(test)]
mod tests;
mod thinking;
mod upstream;

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{Path, State},
    http::HeaderMap,
    response::{IntoResponse as _, Response},
    routing::{get, post},
    serve::ListenerExt as _,
};
use construct_bus::Bus;
use construct_runtime::{Lifecycle, MasterKeys, clock};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::sync::CancellationToken;

use self::{
    chat::Chat,
    messages::Messages,
    refusal::{Kind, Refusal},
    responses::Responses,
    routes::RouteCache,
    serve::{answer, refusal_response},
    spending::Spending,
};
use crate::{cancels::CancelRegistry, router::Router as Calls};

/// The dependencies of the proxy.
pub(crate) struct Parts {
    pub(crate) bus: Bus,
    /// Makes the calls.
    pub(crate) router: Calls,
    /// Verify tokens.
    pub(crate) keys: MasterKeys,
    /// Timeout of one call.
    pub(crate) timeout: Duration,
    /// Calls in flight at most; further ones are rejected.
    pub(crate) concurrency: usize,
    /// Ends the calls of canceled tasks.
    pub(crate) cancels: CancelRegistry,
}

/// What all requests share.
struct Shared {
    keys: MasterKeys,
    models: RouteCache,
    spending: Spending,
    router: Calls,
    timeout: Duration,
    cancels: CancelRegistry,
    calls: Arc<Semaphore>,
    /// Limits the bytes of request bodies in memory.
    bodies: Arc<Semaphore>,
}

/// Serves clients until the service drains. Then running answers finish, and the usage is reported.
pub(crate) fn spawn(parts: Parts, listener: TcpListener, lifecycle: &Lifecycle) {
    let spending = Spending::new(parts.bus.clone());
    let shared = Arc::new(Shared {
        keys: parts.keys,
        models: RouteCache::new(parts.bus),
        spending: spending.clone(),
        router: parts.router,
        timeout: parts.timeout,
        cancels: parts.cancels,
        calls: Arc::new(Semaphore::new(parts.concurrency)),
        bodies: Arc::new(Semaphore::new(serve::body_units(parts.concurrency))),
    });
    let served = CancellationToken::new();
    lifecycle.spawn("spending", {
        let served = served.clone();
        async move {
            spending.run(served).await;
            anyhow::Ok(())
        }
    });
    let draining = lifecycle.draining();
    lifecycle.spawn("proxy", async move {
        let _over = served.drop_guard();
        // Each event of a stream is sent at once.
        let listener = listener.tap_io(|connection| {
            let _ = connection.set_nodelay(true);
        });
        axum::serve(listener, router(shared))
            .with_graceful_shutdown(draining.cancelled_owned())
            .await
    });
}

fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(answer::<Chat>))
        .route("/v1/responses", post(answer::<Responses>))
        .route("/v1/messages", post(answer::<Messages>))
        .route("/v1/messages/count_tokens", post(count::answer))
        .route("/v1/embeddings", post(embeddings::answer))
        .route("/v1/models", get(list_models))
        .route("/v1/models/{model}", get(get_model))
        .fallback(async || {
            refusal_response::<Chat>(&Refusal::new(
                Kind::NoRoute,
                "there is nothing at this address",
            ))
        })
        .with_state(shared)
}

/// A model in the fields of both vendors' lists.
fn model_entry(name: &str) -> Value {
    json!({
        "id": name, "object": "model", "created": 0, "owned_by": "construct",
        "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z",
    })
}

async fn list_models(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    match access::verify_token(&headers, &shared.keys, clock::now()) {
        Ok(token) => {
            let data: Vec<Value> = token.models.iter().map(|name| model_entry(name)).collect();
            let (first, last) = (token.models.first(), token.models.last());
            Json(json!({"object": "list", "data": data, "has_more": false, "first_id": first, "last_id": last}))
                .into_response()
        }
        Err(refusal) => refusal_response::<Chat>(&refusal),
    }
}

async fn get_model(
    State(shared): State<Arc<Shared>>,
    Path(asked): Path<String>,
    headers: HeaderMap,
) -> Response {
    let token = access::verify_token(&headers, &shared.keys, clock::now());
    match token.and_then(|token| access::allowed_model(&token, &asked).map(model_entry)) {
        Ok(model) => Json(model).into_response(),
        Err(refusal) => refusal_response::<Chat>(&refusal),
    }
}

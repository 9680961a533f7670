//! Liveness, readiness and metrics of the process, for orchestrators and people.
//!
//! `/healthz` answers as long as the process can answer at all. It does not depend on NATS or
//! PostgreSQL, because restarting a service does not bring those back. `/readyz` answers 200 only
//! while every [`Latch`] is set and the process is not draining, and otherwise 503 with the unmet
//! conditions and reasons. `/metrics` is for Prometheus ([`metrics`]).

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use opentelemetry::{KeyValue, metrics::Meter};
use serde::Serialize;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

use crate::{Context, metrics};

/// The readiness conditions of the process. Clones share them.
#[derive(Clone)]
pub struct Readiness {
    latches: Arc<watch::Sender<Vec<Condition>>>,
    draining: CancellationToken,
}

/// One readiness condition. Clones share it; it keeps its state when all of them are dropped.
#[derive(Clone)]
pub struct Latch {
    latches: Arc<watch::Sender<Vec<Condition>>>,
    index: usize,
}

/// A condition, and why it is not met.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Condition {
    /// The name, such as `nats`.
    pub name: String,
    /// The reason as text. `None`: the latch is set. A [`Report`] omits such conditions.
    pub reason: Option<String>,
}

/// Whether the process is ready, and the reasons if not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// All conditions are met, and the process is not draining.
    pub ready: bool,
    /// The process is about to end and accepts no new work.
    pub draining: bool,
    /// The unmet conditions.
    pub waiting: Vec<Condition>,
}

impl Readiness {
    /// Ready as long as `draining` is not cancelled and all latches are set.
    pub fn new(draining: CancellationToken) -> Self {
        Self { latches: Arc::new(watch::Sender::new(Vec::new())), draining }
    }

    /// Registers a condition, initially unmet.
    pub fn register(&self, name: impl Into<String>) -> Latch {
        let mut index = 0;
        self.latches.send_modify(|latches| {
            index = latches.len();
            latches.push(Condition { name: name.into(), reason: Some("starting".to_owned()) });
        });
        Latch { latches: Arc::clone(&self.latches), index }
    }

    /// The current state.
    pub fn report(&self) -> Report {
        let waiting: Vec<_> =
            self.latches.borrow().iter().filter(|latch| latch.reason.is_some()).cloned().collect();
        let draining = self.draining.is_cancelled();
        Report { ready: waiting.is_empty() && !draining, draining, waiting }
    }

    /// Exports each condition as a metric.
    pub(crate) fn measure(&self, meter: &Meter) {
        let latches = Arc::clone(&self.latches);
        meter
            .u64_observable_gauge("construct.condition")
            .with_description("Whether a readiness condition is met: 1 or 0")
            .with_callback(move |gauge| {
                for latch in latches.borrow().iter() {
                    let name = KeyValue::new("construct.condition.name", latch.name.clone());
                    gauge.observe(u64::from(latch.reason.is_none()), &[name]);
                }
            })
            .build();
    }

    /// Subscribes to changes of the state.
    pub fn subscribe(&self) -> Changes {
        let mut changed = self.latches.subscribe();
        changed.mark_changed();
        Changes { readiness: self.clone(), changed, reported_draining: false }
    }

    /// Waits until the process is ready.
    pub async fn wait_ready(&self) {
        let mut changes = self.subscribe();
        while !changes.next().await.ready {}
    }
}

impl Latch {
    /// Marks the condition as met.
    pub fn set_ready(&self) {
        self.set(None);
    }

    /// Marks the condition as unmet. The reason is public: it must not contain secrets.
    pub fn set_not_ready(&self, reason: impl Into<String>) {
        self.set(Some(reason.into()));
    }

    fn set(&self, reason: Option<String>) {
        self.latches.send_if_modified(|latches| {
            let Some(latch) = latches.get_mut(self.index) else { return false };
            let changed = latch.reason != reason;
            latch.reason = reason;
            changed
        });
    }
}

/// A sequence of reports; see [`Readiness::subscribe`].
pub struct Changes {
    readiness: Readiness,
    changed: watch::Receiver<Vec<Condition>>,
    reported_draining: bool,
}

impl Changes {
    /// The state at the first call, afterwards the newest state after each change. Cancel-safe.
    pub async fn next(&mut self) -> Report {
        tokio::select! {
            // The sender lives in `self.readiness`, so this cannot fail.
            _ = self.changed.changed() => {}
            () = self.readiness.draining.cancelled(), if !self.reported_draining => {}
        }
        let report = self.readiness.report();
        self.reported_draining = report.draining;
        report
    }
}

/// Serves all endpoints for as long as it is polled, including during draining.
pub(crate) async fn serve(listener: TcpListener, context: Context) {
    let router = Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(page))
        .with_state(context);
    if let Err(error) = axum::serve(listener, router).await {
        tracing::error!(%error, "the health endpoints failed");
    }
}

async fn healthz(State(context): State<Context>) -> impl IntoResponse {
    Json(serde_json::json!({
        "status": "ok",
        "service": context.service(),
        "instance": context.instance_id(),
        "version": context.version(),
    }))
}

async fn readyz(State(context): State<Context>) -> impl IntoResponse {
    let report = context.readiness().report();
    let status = if report.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(report))
}

async fn page() -> Result<impl IntoResponse, (StatusCode, String)> {
    let none = (StatusCode::NOT_FOUND, "this process has no metrics".to_owned());
    let text = metrics::process().ok_or(none)?.text();
    let text = text.map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    Ok(([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text))
}

#[cfg(test)]
mod tests;

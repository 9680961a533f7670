//! The proxy over HTTP, with every client protocol and every vendor, on a real NATS server.

mod client;
mod exchange;
mod money;
mod others;

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use construct_bus::{Bus, subject, testing::NatsServer};
use construct_domain::OrganizationId;
use construct_proto::{mesh::v1 as mesh, v1};
use construct_runtime::{Lifecycle, ModelToken};
use construct_tests::vendor::VendorServer;
use futures::StreamExt as _;
use jiff::Timestamp;
use prost::Message as _;
use tokio::net::TcpListener;

use super::{Parts, spawn};
use crate::{
    breaker::Breakers,
    call::tests::NO_DELAY_POLICY,
    cancels::CancelRegistry,
    router::Router,
    sealed_key::tests::{keys, seal},
    tests::{
        TEST_TIMEOUT, until, vendors,
        wires::{KEY, Wire},
    },
};

/// The answers of a reconciler, and the requests it received.
#[derive(Debug, Default)]
struct Mesh {
    asked: Vec<mesh::ModelLookup>,
    reserved: Vec<mesh::BudgetReserve>,
    /// In 10⁻¹² dollars; none: every reservation is granted.
    budget: Option<i64>,
    reports: Vec<mesh::SpendingReport>,
}

/// A proxy on a mesh of its own; each vendor is a model of its name.
pub(super) struct Proxy {
    _nats: NatsServer,
    lifecycle: Lifecycle,
    address: SocketAddr,
    mesh: Arc<Mutex<Mesh>>,
    vendor: VendorServer,
    cancels: CancelRegistry,
    http: reqwest::Client,
}

/// The limits of a proxy.
struct Limits {
    concurrency: usize,
    timeout: Duration,
    prices: v1::Prices,
}

impl Default for Limits {
    fn default() -> Self {
        let prices = v1::Prices {
            input: 3_000_000,
            output: 15_000_000,
            cache_read: 300_000,
            cache_write: 3_750_000,
            ..v1::Prices::default()
        };
        Self { concurrency: 64, timeout: TEST_TIMEOUT, prices }
    }
}

impl Proxy {
    async fn start() -> Self {
        Self::with(Limits::default()).await
    }

    async fn with(limits: Limits) -> Self {
        let nats = NatsServer::start().await;
        let bus = nats.bus().await;
        let lifecycle = Lifecycle::new(Duration::from_secs(5));
        let vendor = VendorServer::start().await;
        let mesh = Arc::new(Mutex::new(Mesh::default()));
        answer(&bus, &lifecycle, &vendor.url(), limits.prices, &mesh).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let cancels = CancelRegistry::default();
        let parts = Parts {
            bus,
            router: Router::new(
                Arc::new(vendors(TEST_TIMEOUT)),
                keys(),
                NO_DELAY_POLICY,
                Breakers::new().0,
            ),
            keys: keys(),
            timeout: limits.timeout,
            concurrency: limits.concurrency,
            cancels: cancels.clone(),
        };
        spawn(parts, listener, &lifecycle);
        Self {
            _nats: nats,
            lifecycle,
            address,
            mesh,
            vendor,
            cancels,
            http: reqwest::Client::new(),
        }
    }

    /// A token for every model.
    fn token(&self) -> String {
        self.token_of(|_| {})
    }

    fn token_of(&self, change: impl FnOnce(&mut ModelToken)) -> String {
        let mut token = ModelToken {
            id: "token_1".into(),
            organization: OrganizationId::LOCAL.to_string(),
            task: "task_1".into(),
            key: "key_1".into(),
            models: Wire::ALL.map(name).into(),
            budget_pico_usd: 0,
            expires_at: Timestamp::now() + Duration::from_secs(3600),
        };
        change(&mut token);
        token.sign(&keys()).expose().to_owned()
    }

    fn post(&self, path: &str) -> reqwest::RequestBuilder {
        self.http.post(format!("http://{}{path}", self.address)).bearer_auth(self.token())
    }

    fn mesh<T>(&self, look: impl FnOnce(&mut Mesh) -> T) -> T {
        look(&mut self.mesh.lock().expect("no test panics while it holds the lock"))
    }

    /// Waits until this many reports have arrived.
    async fn reports(&self, count: usize) -> Vec<mesh::SpendingReport> {
        until("the reports", async || {
            let reports = self.mesh(|mesh| mesh.reports.clone());
            if reports.len() >= count { Ok(reports) } else { Err(reports) }
        })
        .await
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.lifecycle.stop("the test is over");
    }
}

/// The model name of a vendor.
fn name(wire: Wire) -> String {
    format!("{wire:?}").to_lowercase()
}

/// Answers requests as a reconciler would, and records them.
async fn answer(
    bus: &Bus,
    lifecycle: &Lifecycle,
    url: &str,
    prices: v1::Prices,
    mesh: &Arc<Mutex<Mesh>>,
) {
    let mut taps = bus.tap("construct.v1.cmd.spending.>").await.expect("the server is up");
    let (draining, kept) = (lifecycle.draining(), Arc::clone(mesh));
    tokio::spawn(async move {
        while let Some(message) = taps.next().await {
            let report = mesh::SpendingReport::decode(message.payload).expect("a report");
            kept.lock().expect("no panic").reports.push(report);
        }
    });
    let (models, kept, url) = (bus.clone(), Arc::clone(mesh), url.to_owned());
    let stop = draining.clone();
    tokio::spawn(async move {
        let found = |question: mesh::ModelLookup| {
            let found = found(&url, prices, &question.model);
            kept.lock().expect("no panic").asked.push(question);
            async { Some(found) }
        };
        models.answer(&subject::Models, stop, found).await.expect("the server is up");
    });
    let (budgets, kept) = (bus.clone(), Arc::clone(mesh));
    tokio::spawn(async move {
        let reserve = |question: mesh::BudgetReserve| {
            let mut mesh = kept.lock().expect("no panic");
            let granted = mesh.budget.is_none_or(|left| left >= question.amount_pico_usd);
            if granted {
                mesh.budget = mesh.budget.map(|left| left - question.amount_pico_usd);
            }
            mesh.reserved.push(question);
            let refused = if granted {
                String::new()
            } else {
                "the budget of the test is exhausted".to_owned()
            };
            async { Some(mesh::BudgetReserved { refusal: refused }) }
        };
        budgets.answer(&subject::Budgets, draining, reserve).await.expect("the server is up");
    });
    let ready = async || {
        let lookup = mesh::ModelLookup {
            organization_id: OrganizationId::LOCAL.to_string(),
            model: "ready".into(),
        };
        bus.ask(&subject::Models, &lookup, TEST_TIMEOUT)
            .await
            .map_err(|error| error.to_string())?;
        let reserve = mesh::BudgetReserve {
            organization_id: lookup.organization_id,
            ..mesh::BudgetReserve::default()
        };
        bus.ask(&subject::Budgets, &reserve, TEST_TIMEOUT).await.map_err(|error| error.to_string())
    };
    until("the answers", ready).await;
    let mut mesh = mesh.lock().expect("no panic");
    mesh.asked.clear();
    mesh.reserved.clear();
}

fn found(url: &str, prices: v1::Prices, model: &str) -> mesh::ResolvedModel {
    let Some(wire) = Wire::ALL.into_iter().find(|wire| name(*wire) == model) else {
        return mesh::ResolvedModel::default();
    };
    let id = format!("provider_{model}");
    // Only Bedrock reads it: a loopback address contains no region.
    let region = if wire == Wire::Bedrock { "/?region=us-east-1" } else { "" };
    mesh::ResolvedModel {
        provider: Some(mesh::Provider {
            r#type: wire.provider().into(),
            base_url: format!("{url}{region}"),
            api_key: Some(seal(&id, KEY)),
            id,
            ..mesh::Provider::default()
        }),
        model: Some(mesh::ModelTarget {
            id: format!("model_{model}"),
            // A known reasoning model, where that is decided by the name.
            vendor_model: if wire == Wire::Responses {
                "gpt-5.1".into()
            } else {
                "test-model".into()
            },
            context_window: 128_000,
            max_output_tokens: 4_096,
            prices: Some(prices),
            tool_calling: None,
        }),
        ..mesh::ResolvedModel::default()
    }
}

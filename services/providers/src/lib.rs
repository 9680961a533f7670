//! The providers: the only service that talks to model vendors.
//!
//! It takes `ModelInvoke` commands from the mesh and calls the vendor that the command names. It
//! streams what the model writes as progress of the step, and reports one `StepResult`. It holds no
//! durable state: when a process dies, its commands are delivered to another one. It never touches
//! PostgreSQL.
//!
//! The names and wire types of a vendor stay in the module of that vendor.

mod answer;
mod anthropic;
mod attachments;
mod bedrock;
mod breaker;
mod call;
mod cancels;
mod cassette;
mod check;
mod config;
mod deepseek;
mod delta;
mod embedding;
mod failure;
mod fenced_blocks;
mod framing;
mod gemini;
mod http;
mod keys;
mod local;
mod meter;
mod metrics;
mod ollama;
mod openai;
mod openrouter;
mod proxy;
mod responses;
mod retry;
mod router;
mod scripted;
mod sealed_key;
#[cfg(test)]
mod tests;
mod token_count;
mod trace;
mod transcript;
mod vendor;
mod worker;
mod xai;

use std::sync::Arc;

use anyhow::Context as _;
use construct_bus::{Bus, ConnectOptions, Tls, User};
use construct_runtime::{Context, clock};
use tokio_util::sync::CancellationToken;

pub use self::config::Config;
use self::{
    attachments::Attachments, breaker::Breakers, cancels::CancelRegistry, check::Checks,
    http::Http, local::LocalModels, router::Router, vendor::Vendors, worker::Worker,
};

/// Connects to the mesh and starts to take commands.
pub async fn run(config: Config, context: &Context) -> anyhow::Result<()> {
    install_crypto();
    let common = context.common();
    // First of all, so that an address in use is reported at once.
    let listener = match config.providers_proxy_listen {
        Some(address) => Some(construct_runtime::retry::listen(address).await?),
        None => None,
    };
    let latch = context.readiness().register("nats");
    let bus = context
        .connect_with_retry("nats", &latch, async || {
            let name = format!("providers {}", context.instance_id());
            let tls =
                Tls { ca: common.nats_ca_file.clone(), certificate: common.nats_certificate() };
            let options =
                ConnectOptions::new(name).blobs(common.blob_dir()).user(User::Providers).tls(tls);
            let bus = Bus::connect(common.nats_url.expose(), options).await?;
            bus.ensure_topology().await?;
            anyhow::Ok(bus)
        })
        .await?;
    let lifecycle = context.lifecycle();
    lifecycle.spawn_job("topology", bus.clone().maintain_topology(lifecycle.draining()));
    let listening =
        clock::sync_from_stream(bus.subscribe_time().await?, lifecycle.draining()).await;
    lifecycle.spawn_job("clock", listening);
    let (breakers, changed) = Breakers::new();
    let shared =
        breaker::peers::start(&bus, context.instance_id(), &breakers, changed, lifecycle).await;
    shared.context("cannot hear of breakers")?;
    let recorder = match &config.providers_record_dir {
        Some(folder) => {
            let recorder = cassette::Recorder::new(folder);
            let recorder = recorder
                .with_context(|| format!("nothing can be recorded in {}", folder.display()))?;
            tracing::warn!(folder = %folder.display(), "every call of a model is recorded, with what people and models say");
            Some(Arc::new(recorder))
        }
        None => None,
    };
    let vendors = Vendors {
        http: Http::new(config.timeouts()).with_recorder(recorder),
        scripted_attempts: Arc::default(),
        local: LocalModels::new(config.providers_models_dir.clone()),
    };
    let router = Router::new(Arc::new(vendors), common.master_keys()?, config.retries(), breakers);
    Checks { bus: bus.clone(), router: router.clone() }.start(lifecycle);
    let cancels = CancelRegistry::default();
    if let (Some(listener), Some(keys)) = (listener, common.token_keys()?) {
        let parts = proxy::Parts {
            bus: bus.clone(),
            router: router.clone(),
            keys,
            timeout: config.providers_proxy_timeout,
            concurrency: config.providers_proxy_concurrency,
            cancels: cancels.clone(),
        };
        proxy::spawn(parts, listener, lifecycle);
    }
    let attached = Attachments::open(common.blob_dir(), config.providers_attached_bytes);
    let worker = Worker {
        bus,
        router,
        attachments: attached.context("the files of messages cannot be opened")?,
        call_timeout: config.providers_call_timeout,
        cancels,
        hand_back: CancellationToken::new(),
    };
    worker
        .start(config.providers_concurrency, context)
        .await
        .context("cannot listen for cancels")?;
    Ok(())
}

/// Installs the TLS implementation of the process.
fn install_crypto() {
    // An error means that it was installed before, as in tests that run several services in one
    // process.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

//! The gateway: all external protocols. It validates requests, writes intents, and reads data.
//!
//! - gRPC is the direct path; every other protocol is a transcoder before it (`protocols.rs`).
//! - It decides nothing about a task: it writes intents (a message, a cancel) to PostgreSQL, and
//!   wakes the reconciler. What NATS loses is found by the reconciler's sweep and by the
//!   subscriptions' polling of the stream heads.
//! - Every request has a caller, who is authorized by rules (`identity`), and every access to data
//!   names the caller's organization.
//! - All fields of a request are validated against their documented limits first (`validate.rs`).
//! - Without PostgreSQL, calls fail with `UNAVAILABLE`, and the health service reports it. Without
//!   NATS after the start, writes are still accepted, and subscriptions continue from PostgreSQL, a
//!   few seconds late. So readiness doesn't depend on NATS.
//!
//! Deliberately absent: any decision about a task, and any call to another service.

mod agents;
mod api;
mod api_keys;
mod approvals;
mod attachments;
mod audit;
mod background_jobs;
mod budgets;
mod caller;
mod catalog;
mod config;
mod deadline;
mod diagnosis;
mod events;
mod explain;
mod files;
pub mod first_key;
mod identity;
mod limit;
mod location;
mod messages;
mod metrics;
pub mod migrate;
mod model_providers;
mod model_tokens;
mod models;
mod organizations;
mod page;
mod pool_monitor;
mod protocols;
mod providers_client;
mod publish;
mod quotas;
mod recovery;
pub mod rotation;
mod scans;
mod schedules;
mod secrets;
mod serve;
mod server;
mod socket;
mod states;
mod status;
mod subscribe;
mod tasks;
mod tls;
mod usage;
mod validate;
mod watch_stream;

use std::{os::fd::OwnedFd, sync::Arc};

use construct_bus::{Bus, ConnectOptions, User, blob};
use construct_runtime::{Context, MasterKeys, clock, retry};
use construct_store::{Keyring, PoolOptions, Store};
use construct_wire::convert;
use jiff::SignedDuration;
use tokio::net::TcpListener;

pub use config::{Config, Login};

use crate::{
    api::{Api, Backend},
    audit::writer::AuditWriter,
    files::work::Files,
    identity::authenticate::Authenticator,
    pool_monitor::PoolMonitor,
    protocols::operator,
    providers_client::ProvidersClient,
    publish::Publisher,
    subscribe::hub::Hub,
    tls::{Tls, accept},
};

#[cfg(test)]
mod tests;

/// Starts the gateway. It serves when this returns; until PostgreSQL and NATS are reached it
/// answers `UNAVAILABLE`.
///
/// # Errors
/// When the address cannot be bound, a master key is missing, or the process is told to stop.
pub async fn run(config: Config, context: &Context) -> anyhow::Result<()> {
    let listener = retry::listen(config.gateway_listen).await?;
    let operator = match config.gateway_operator_listen {
        Some(address) => Some(retry::listen(address).await?),
        None => None,
    };
    start(listener, operator, socket::passed_socket()?, &config, context).await
}

async fn start(
    listener: TcpListener,
    operator: Option<TcpListener>,
    passed: Option<OwnedFd>,
    config: &Config,
    context: &Context,
) -> anyhow::Result<()> {
    let lifecycle = context.lifecycle();
    let keyrings = Keyrings {
        providers: Arc::new(keyring(&context.common().master_keys()?)?),
        secrets: context.common().secrets_keys()?.as_ref().map(keyring).transpose()?.map(Arc::new),
        tokens: context.common().token_keys()?.map(Arc::new),
    };
    let api = Api::new(config, keyrings.clone(), Authenticator::new(config)?, lifecycle.clone());
    let socket = socket::open(passed, config.gateway_socket.as_deref())?;
    let (database, nats) =
        (context.readiness().register("postgresql"), context.readiness().register("nats"));
    let serving = context.readiness().register("requests");
    let tls = Tls::new(config).await?.map(|tls| (tls, accept::handshake_limit()));
    if let Some((tls, _)) = &tls {
        lifecycle.spawn_job("certificates", tls.clone().watch(lifecycle.draining()));
    }
    let protocols =
        server::spawn(api.clone(), listener, tls.clone(), socket, config, context).await?;
    if let Some(listener) = operator {
        operator::spawn(listener, tls, &protocols, config, lifecycle)?;
    }

    let url = context.common().database_url()?.clone();
    let store = context.connect_with_retry("postgresql", &database, || async {
        let options = PoolOptions {
            application_name: "construct-gateway".to_owned(),
            ..PoolOptions::default()
        };
        let store = Store::connect(url.expose(), options).await?;
        store.migrate().await?;
        store.tiers_set(&config.gateway_tiers, &config.gateway_tier).await?;
        clock::sync_once(|| store.clock()).await?;
        anyhow::Ok(store)
    });
    let bus = context.connect_with_retry("nats", &nats, || async {
        let tls = construct_bus::Tls {
            ca: context.common().nats_ca_file.clone(),
            certificate: context.common().nats_certificate(),
        };
        let options = ConnectOptions::new(context.instance_id())
            .blobs(context.common().blob_dir())
            .user(User::Gateway)
            .tls(tls);
        let bus = Bus::connect(context.common().nats_url.expose(), options).await?;
        bus.ensure_topology().await?;
        anyhow::Ok(bus)
    });
    let (store, bus) = tokio::try_join!(store, bus)?;
    lifecycle.spawn_job("topology", bus.clone().maintain_topology(lifecycle.draining()));
    let database_clock = store.clone();
    let ask = move || {
        let store = database_clock.clone();
        async move { store.clock().await }
    };
    lifecycle.spawn_job("clock", clock::keep_synced(ask, lifecycle.draining()));

    let hub = Hub::new(store.clone(), bus.clone(), lifecycle.clone());
    let (pools, providers) = (PoolMonitor::new(bus.clone()), ProvidersClient::new(bus.clone()));
    let blobs = blob::Store::open(context.common().blob_dir())?;
    let files = Files::new(store.clone(), context.common().blob_dir(), config)?;
    lifecycle.spawn_job(
        "erasure",
        background_jobs::erase_organizations(
            store.clone(),
            bus.clone(),
            files.clone(),
            lifecycle.draining(),
        ),
    );
    lifecycle.spawn_job("files", files.clone().sweep(lifecycle.draining()));
    let publisher = Publisher::new(bus);
    let backend =
        Arc::new(Backend { store: store.clone(), publisher, hub, pools, providers, blobs, files });
    api.open(Arc::clone(&backend));
    metrics::initialize();
    lifecycle.spawn_job(
        "audit trail",
        AuditWriter::run(api.clone(), store.clone(), lifecycle.draining()),
    );
    serving.set_ready();
    let (watching, names, draining) =
        (Arc::clone(&backend), config.gateway_pools.clone(), lifecycle.draining());
    lifecycle.spawn_job("pools", async move { watching.pools.watch(&names, &draining).await });
    let (watching, draining) = (Arc::clone(&backend), lifecycle.draining());
    lifecycle.spawn_job("providers", async move { watching.providers.watch(&draining).await });
    lifecycle.spawn_job("event heads", async move { backend.hub.poll_heads().await });
    lifecycle.spawn_job(
        "database health",
        background_jobs::watch_database(store.clone(), database, lifecycle.draining()),
    );
    let keep = SignedDuration::from_hours(24 * i64::from(config.gateway_audit_keep));
    lifecycle.spawn_job(
        "housekeeping",
        background_jobs::housekeeping(store, keyrings, keep, lifecycle.draining()),
    );
    Ok(())
}

/// The keys for encryption and signatures.
#[derive(Clone)]
struct Keyrings {
    /// API keys of model providers.
    providers: Arc<Keyring>,
    /// Secrets of scripts, if the operator has configured a key.
    secrets: Option<Arc<Keyring>>,
    /// Signs tokens for models.
    tokens: Option<Arc<MasterKeys>>,
}

fn keyring(keys: &MasterKeys) -> anyhow::Result<Keyring> {
    let active = keys.active().id();
    Ok(Keyring::new(active, keys.iter().map(|key| (key.id().to_owned(), *key.expose())))?)
}

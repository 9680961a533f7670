//! The Slack service: an agent in the channel.
//!
//! - A delivery of Slack is verified and published to the work queue (`intake.rs`). Only then is it
//!   confirmed to Slack. No heavier work stands between a mention and Slack's limit of three
//!   seconds.
//! - A mention becomes a row before it leaves the queue. Its key (team, channel, ts) also prevents
//!   a second answer (`worker.rs`).
//! - From then on the row is the state (`mention.rs`). Whoever holds its lease sends requests to
//!   the gateway under ids derived from the mention, and posts messages that can be found again in
//!   the thread (`posts.rs`).
//! - The service is a client of the gateway like any other, and writes only its own tables.
//!
//! Deliberately absent: decisions about tasks, tables of the mesh, and retries of anything that the
//! mesh retries.

mod access;
mod actions;
mod agents;
mod answer;
mod approvals;
mod commands;
mod compose;
mod config;
mod error;
mod failure_notice;
mod gateway;
mod home;
mod http;
mod install;
mod intake;
mod members;
mod mention;
mod metrics;
mod mrkdwn;
mod posts;
mod progress;
mod retention;
mod shared;
mod signature;
mod socket;
mod teams;
mod texts;
mod unfurl;
mod user_cache;
mod web;
mod worker;

use std::sync::{Arc, atomic::AtomicBool};

use anyhow::Context as _;
use construct_bus::{Bus, ConnectOptions, Tls, User};
use construct_runtime::{Context, MasterKeys, clock, retry};
use construct_store::{Keyring, PoolOptions, Store};
use secrecy::SecretString;
use tokio::sync::Notify;

pub use self::config::Config;
use self::{
    gateway::Gateway, intake::Intake, members::Members, metrics::Metrics, shared::Shared,
    signature::Verifier, teams::Teams, user_cache::UserCache, web::Web, worker::Worker,
};

/// Starts the service. It accepts deliveries from Slack when this returns.
///
/// # Errors
/// When an address cannot be bound, a key is missing, or the process is asked to stop.
pub async fn run(config: Config, context: &Context) -> anyhow::Result<()> {
    install_crypto();
    let (common, lifecycle) = (context.common(), context.lifecycle());
    let listener = match config.slack_listen {
        Some(address) => Some(retry::listen(address).await?),
        None => None,
    };
    let (database, nats) =
        (context.readiness().register("postgresql"), context.readiness().register("nats"));
    let url = common.database_url()?.clone();
    let store = context.connect_with_retry("postgresql", &database, || async {
        let options = PoolOptions {
            application_name: "construct-slack".to_owned(),
            ..PoolOptions::default()
        };
        let store = Store::connect(url.expose(), options).await?;
        store.migrate().await?;
        clock::sync_once(|| store.clock()).await?;
        anyhow::Ok(store)
    });
    let bus = context.connect_with_retry("nats", &nats, || async {
        let tls = Tls { ca: common.nats_ca_file.clone(), certificate: common.nats_certificate() };
        let options = ConnectOptions::new(context.instance_id())
            .blobs(common.blob_dir())
            .user(User::Slack)
            .tls(tls);
        let bus = Bus::connect(common.nats_url.expose(), options).await?;
        bus.ensure_topology().await?;
        anyhow::Ok(bus)
    });
    let (store, bus) = tokio::try_join!(store, bus)?;
    lifecycle.spawn_job("topology", bus.clone().maintain_topology(lifecycle.draining()));
    let database_clock = store.clone();
    let read_clock = move || {
        let store = database_clock.clone();
        async move { store.clock().await }
    };
    lifecycle.spawn_job("clock", clock::keep_synced(read_clock, lifecycle.draining()));

    let metrics = Metrics::new(&opentelemetry::global::meter("construct-slack"));
    let web = Web::new(&config.slack_api_url, metrics.clone())
        .context("cannot create the client of Slack's Web API")?;
    let keyring = Arc::new(keyring(&common.master_keys()?)?);
    let gateway = Gateway::new(&config)?;
    let app = install::basic_authentication(&config).map(SecretString::from);
    let shared = Arc::new(Shared {
        teams: Teams::new(store.clone(), web.clone(), Arc::clone(&keyring), app, lifecycle.clone()),
        people: UserCache::new(web.clone()),
        members: Members::new(store.clone(), gateway.clone(), Arc::clone(&keyring)),
        keyring,
        gateway,
        due: Notify::new(),
        crowded: AtomicBool::new(false),
        metrics,
        store,
        web,
        config,
    });
    shared.teams.reseal().await;
    shared.members.reseal().await;
    let intake = Intake::new(bus.clone(), Arc::clone(&shared.keyring));
    if let Some(listener) = listener {
        let secret = shared
            .config
            .slack_signing_secret
            .as_ref()
            .context("slack_signing_secret is not set")?;
        http::spawn(
            Arc::clone(&shared),
            intake.clone(),
            Verifier::new(secret.expose()),
            listener,
            lifecycle,
        );
    }
    lifecycle.spawn_job(
        "own workspace",
        install::install_own_workspace(Arc::clone(&shared), lifecycle.draining()),
    );
    if config::secret(shared.config.slack_app_token.as_ref()).is_some() {
        lifecycle.spawn_job(
            "socket mode",
            socket::run(Arc::clone(&shared), intake, lifecycle.draining()),
        );
    }
    lifecycle.spawn_job("retention", retention::run(Arc::clone(&shared), lifecycle.draining()));
    lifecycle.spawn("deliveries", Worker::new(Arc::clone(&shared), bus).run(lifecycle.clone()));
    lifecycle.spawn("mentions", mention::run(shared, lifecycle.clone()));
    Ok(())
}

fn keyring(keys: &MasterKeys) -> anyhow::Result<Keyring> {
    let active = keys.active().id();
    Ok(Keyring::new(active, keys.iter().map(|key| (key.id().to_owned(), *key.expose())))?)
}

/// Selects the TLS implementation of the process.
fn install_crypto() {
    // An error only means that an implementation was selected before, as when tests run several
    // services in one process.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

//! The Slack service: an agent in the channel.
//!
//! - What Slack sends is checked, put into a work queue, and only then confirmed to Slack
//!   (`intake.rs`); so nothing heavier than that stands between a mention and Slack's three
//!   seconds.
//! - A mention is a row before it leaves the queue, by (team, channel, ts), which is also what
//!   keeps it from being answered twice (`worker.rs`).
//! - From there on the row is what it is gone on from (`mention.rs`): whoever holds its lease asks
//!   the gateway under ids derived from the mention, and posts what can be found again in the
//!   thread (`posts.rs`).
//! - It is a client of the gateway like any other, and writes no table but its own.
//!
//! Deliberately absent: decisions about tasks, any table of the mesh, and a retry of anything that
//! the mesh retries.

mod access;
mod actions;
mod agents;
mod answer;
mod approvals;
mod commands;
mod compose;
mod config;
mod face;
mod forget;
mod gateway;
mod home;
mod install;
mod intake;
mod members;
mod mention;
mod metrics;
mod mrkdwn;
mod people;
mod posts;
mod progress;
mod signature;
mod socket;
mod teams;
mod tell;
mod unfurl;
mod web;
mod words;
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
    gateway::Gateway, intake::Intake, members::Members, metrics::Metrics, people::People,
    signature::Verifier, teams::Teams, web::Web, worker::Worker,
};

/// What all parts share.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) store: Store,
    pub(crate) web: Web,
    pub(crate) teams: Teams,
    pub(crate) people: People,
    pub(crate) members: Members,
    pub(crate) gateway: Gateway,
    /// The master keys.
    pub(crate) keyring: Arc<Keyring>,
    pub(crate) metrics: Metrics,
    /// There is a mention to look at.
    pub(crate) due: Notify,
    /// There are mentions to look at for which this process has no room.
    pub(crate) crowded: AtomicBool,
}

/// Starts the service. When this returns it takes what Slack sends.
///
/// # Errors
/// When an address cannot be bound, a key is missing, or the process is told to stop.
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
        clock::take(|| store.clock()).await?;
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
    lifecycle.spawn_job("topology", bus.clone().keep_topology(lifecycle.draining()));
    let database_clock = store.clone();
    let ask = move || {
        let store = database_clock.clone();
        async move { store.clock().await }
    };
    lifecycle.spawn_job("clock", clock::follow(ask, lifecycle.draining()));

    let metrics = Metrics::new(&opentelemetry::global::meter("construct-slack"));
    let web = Web::new(&config.slack_api_url, metrics.clone())
        .context("there can be no client of Slack's Web API")?;
    let keyring = Arc::new(keyring(&common.master_keys()?)?);
    let gateway = Gateway::new(&config)?;
    let app = install::basic_authentication(&config).map(SecretString::from);
    let shared = Arc::new(Shared {
        teams: Teams::new(store.clone(), web.clone(), Arc::clone(&keyring), app, lifecycle.clone()),
        people: People::new(web.clone()),
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
        face::spawn(
            Arc::clone(&shared),
            intake.clone(),
            Verifier::new(secret.expose()),
            listener,
            lifecycle,
        );
    }
    lifecycle.spawn_job("own workspace", install::own(Arc::clone(&shared), lifecycle.draining()));
    if config::secret(shared.config.slack_app_token.as_ref()).is_some() {
        lifecycle.spawn_job(
            "socket mode",
            socket::run(Arc::clone(&shared), intake, lifecycle.draining()),
        );
    }
    lifecycle.spawn_job("forgetting", forget::run(Arc::clone(&shared), lifecycle.draining()));
    lifecycle.spawn("deliveries", Worker::new(Arc::clone(&shared), bus).run(lifecycle.clone()));
    lifecycle.spawn("mentions", mention::run(shared, lifecycle.clone()));
    Ok(())
}

fn keyring(keys: &MasterKeys) -> anyhow::Result<Keyring> {
    let active = keys.active().id();
    Ok(Keyring::new(active, keys.iter().map(|key| (key.id().to_owned(), *key.expose())))?)
}

/// Chooses the implementation of TLS for the process.
fn install_crypto() {
    // An error only says that it has been chosen before, as when tests run several services in one
    // process.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

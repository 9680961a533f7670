//! What the service is made of, and how it takes up scans: by a command, or by the sweep when none
//! came.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::Context as _;
use construct_bus::{Bus, ConnectOptions, ConsumeOptions, Tls, User, blob};
use construct_runtime::{Context, Lifecycle, MasterKeys, clock, telemetry::Chain};
use construct_store::{Keyring, PoolOptions, Store};
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::MissedTickBehavior,
};

use crate::{
    OUTLINE, cleanup,
    config::Config,
    gateway::Gateway,
    hosts::Hosts,
    listing,
    metrics::Metrics,
    repository::{Outliner, OutlinerLimits, Reach},
    scan,
    shared::Shared,
};

/// How often scans are looked for of which nobody has said that they are there, or whose next look
/// has come.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// Scans whose tasks are looked at, or that are ended, at the same time. That takes two questions
/// to the gateway each, and none of the places for work, so that scans whose models take their time
/// keep nobody else's waiting. Further ones wait in PostgreSQL.
const MAX_TASK_CHECKS: usize = 16;
/// Commands that are taken at the same time; each only rings.
const MAX_COMMANDS: usize = 16;

/// Starts the service. When this returns it takes scans.
///
/// # Errors
/// When the folder cannot be used, a key is missing, or the process is told to stop.
pub async fn run(config: Config, context: &Context) -> anyhow::Result<()> {
    let (common, lifecycle) = (context.common(), context.lifecycle());
    let dir = config.scanner_dir.clone().context("scanner_dir is not set")?;
    std::fs::create_dir_all(&dir).with_context(|| format!("{} cannot be made", dir.display()))?;
    let (database, nats) =
        (context.readiness().register("postgresql"), context.readiness().register("nats"));
    let url = common.database_url()?.clone();
    let store = context.connect_with_retry("postgresql", &database, || async {
        let options = PoolOptions {
            application_name: "construct-scanner".to_owned(),
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
            .user(User::Scanner)
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

    let program = std::env::current_exe()
        .context("this program cannot be found, which lists symbols in a process of its own")?;
    let shared = Arc::new(Shared {
        dir,
        store,
        blobs: blob::Store::open(common.blob_dir())?,
        keyring: keyring(&common.master_keys()?)?,
        gateway: Gateway::new(&config.scanner_gateway_url)?,
        reach: Reach::new(config.scanner_trusted_hosts.iter().cloned())?,
        hosts: Hosts::default(),
        outliner: Outliner::new(program, vec![OUTLINE.into()], OutlinerLimits::default()),
        metrics: Metrics::new(
            &opentelemetry::global::meter("construct-scanner"),
            config.scanner_concurrency,
        ),
        work_slots: Arc::new(Semaphore::new(config.scanner_concurrency)),
        task_check_slots: Arc::new(Semaphore::new(MAX_TASK_CHECKS)),
        due: Notify::new(),
        recent: Mutex::default(),
        bus,
        config,
    });
    lifecycle.spawn_job("tidying", cleanup::run(Arc::clone(&shared), lifecycle.draining()));
    lifecycle.spawn_job("repositories", listing::run(Arc::clone(&shared), lifecycle.draining()));
    lifecycle.spawn("commands", receive_commands(Arc::clone(&shared), lifecycle.clone()));
    lifecycle.spawn("sweep", sweep(shared, lifecycle.clone()));
    Ok(())
}

fn keyring(keys: &MasterKeys) -> anyhow::Result<Keyring> {
    let active = keys.active().id();
    Ok(Keyring::new(active, keys.iter().map(|key| (key.id().to_owned(), *key.expose())))?)
}

/// Hears of scans until the service drains. A command only says that there is something to look at:
/// what that is stands in the row, and whose turn it is as well. So it is done with when it was
/// heard.
async fn receive_commands(shared: Arc<Shared>, lifecycle: Lifecycle) -> anyhow::Result<()> {
    let mut deliveries = shared.bus.consume_scans(ConsumeOptions::new(MAX_COMMANDS, lifecycle.draining()));
    while let Some(delivery) = deliveries.next().await {
        shared.due.notify_one();
        delivery.receipt.ack().await;
    }
    Ok(())
}

/// What a scan is taken for.
#[derive(Debug, Clone, Copy)]
enum ClaimKind {
    /// A look at its task, or its end.
    TaskCheck,
    /// Everything else.
    Work,
}

/// Takes scans that have to be looked at, until the service drains.
async fn sweep(shared: Arc<Shared>, lifecycle: Lifecycle) -> anyhow::Result<()> {
    let draining = lifecycle.draining();
    let mut ticks = tokio::time::interval(SWEEP_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = draining.cancelled() => return Ok(()),
            () = shared.due.notified() => {}
            _ = ticks.tick() => {}
        }
        for turn in [ClaimKind::TaskCheck, ClaimKind::Work] {
            if let Err(error) = claim_scans(&shared, turn, &lifecycle).await {
                tracing::warn!(error = %Chain(&error), "scans could not be looked for");
            }
        }
    }
}

/// Takes as many scans as there is room for.
async fn claim_scans(
    shared: &Arc<Shared>,
    turn: ClaimKind,
    lifecycle: &Lifecycle,
) -> Result<(), construct_store::Error> {
    let places = match turn {
        ClaimKind::TaskCheck => &shared.task_check_slots,
        ClaimKind::Work => &shared.work_slots,
    };
    let mut slots: Vec<OwnedSemaphorePermit> = Vec::new();
    while let Ok(slot) = Arc::clone(places).try_acquire_owned() {
        slots.push(slot);
    }
    if slots.is_empty() {
        return Ok(());
    }
    let (free, lease, now) =
        (i64::try_from(slots.len()).unwrap_or(i64::MAX), shared.config.scanner_lease, clock::now());
    let taken = match turn {
        ClaimKind::TaskCheck => shared.store.scans_claim_waiting(free, lease, now).await?,
        ClaimKind::Work => shared.store.scans_claim(free, &shared.recent_organizations(), lease, now).await?,
    };
    // There may be more, for which there is room when one of these has ended.
    let full = taken.len() == slots.len();
    for (scan, slot) in taken.into_iter().zip(slots) {
        if matches!(turn, ClaimKind::Work) {
            shared.mark_recent(scan.organization);
        }
        let (shared, draining) = (Arc::clone(shared), lifecycle.draining());
        lifecycle.spawn_job("scan", async move {
            let _running = matches!(turn, ClaimKind::Work).then(|| shared.metrics.track_running());
            let more = scan::work(&shared, scan, &draining).await;
            drop(slot);
            if more || full {
                shared.due.notify_one();
            }
        });
    }
    Ok(())
}

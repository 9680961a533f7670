//! Assembles the service, and claims scans: after a command, or in the sweep.

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
    hosts::HostClients,
    listing,
    metrics::Metrics,
    repository::{ForgeClients, Outliner, OutlinerLimits},
    scan,
    shared::Shared,
};

/// The interval of the query for due scans.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// Scans whose tasks are polled, or that are ended, at a time. Each needs two requests to the
/// gateway and no work slot. So scans with slow models do not block others. Further ones wait in
/// PostgreSQL.
const MAX_TASK_CHECKS: usize = 16;
/// Commands that are received at a time; each only wakes the sweep.
const MAX_COMMANDS: usize = 16;

/// Starts the service. It processes scans when this returns.
///
/// # Errors
/// When the folder cannot be used, a key is missing, or the process is asked to stop.
pub async fn run(config: Config, context: &Context) -> anyhow::Result<()> {
    let (common, lifecycle) = (context.common(), context.lifecycle());
    let dir = config.scanner_dir.clone().context("scanner_dir is not set")?;
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
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
        clock::sync_once(|| store.clock()).await?;
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
    lifecycle.spawn_job("topology", bus.clone().maintain_topology(lifecycle.draining()));
    let database_clock = store.clone();
    let read_clock = move || {
        let store = database_clock.clone();
        async move { store.clock().await }
    };
    lifecycle.spawn_job("clock", clock::keep_synced(read_clock, lifecycle.draining()));

    let program = std::env::current_exe()
        .context("cannot find the path of this program, which lists symbols in a child process")?;
    let shared = Arc::new(Shared {
        dir,
        store,
        blobs: blob::Store::open(common.blob_dir())?,
        keyring: keyring(&common.master_keys()?)?,
        gateway: Gateway::new(&config.scanner_gateway_url)?,
        forge_clients: ForgeClients::new(config.scanner_trusted_hosts.iter().cloned())?,
        hosts: HostClients::default(),
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
    lifecycle.spawn_job("cleanup", cleanup::run(Arc::clone(&shared), lifecycle.draining()));
    lifecycle.spawn_job("repositories", listing::run(Arc::clone(&shared), lifecycle.draining()));
    lifecycle.spawn("commands", receive_commands(Arc::clone(&shared), lifecycle.clone()));
    lifecycle.spawn("sweep", sweep(shared, lifecycle.clone()));
    Ok(())
}

fn keyring(keys: &MasterKeys) -> anyhow::Result<Keyring> {
    let active = keys.active().id();
    Ok(Keyring::new(active, keys.iter().map(|key| (key.id().to_owned(), *key.expose())))?)
}

/// Receives commands until the service drains. A command only says that a scan may be due. The row
/// says which one, and whose turn it is, so a command is acknowledged at once.
async fn receive_commands(shared: Arc<Shared>, lifecycle: Lifecycle) -> anyhow::Result<()> {
    let mut deliveries =
        shared.bus.consume_scans(ConsumeOptions::new(MAX_COMMANDS, lifecycle.draining()));
    while let Some(delivery) = deliveries.next().await {
        shared.due.notify_one();
        delivery.receipt.ack().await;
    }
    Ok(())
}

/// What a scan is claimed for.
#[derive(Debug, Clone, Copy)]
enum ClaimKind {
    /// Polling its task, or ending it.
    TaskCheck,
    /// Everything else.
    Work,
}

/// Claims due scans until the service drains.
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
        for kind in [ClaimKind::TaskCheck, ClaimKind::Work] {
            if let Err(error) = claim_scans(&shared, kind, &lifecycle).await {
                tracing::warn!(error = %Chain(&error), "cannot query due scans");
            }
        }
    }
}

/// Claims as many scans as there are free slots.
async fn claim_scans(
    shared: &Arc<Shared>,
    kind: ClaimKind,
    lifecycle: &Lifecycle,
) -> Result<(), construct_store::Error> {
    let pool = match kind {
        ClaimKind::TaskCheck => &shared.task_check_slots,
        ClaimKind::Work => &shared.work_slots,
    };
    let mut slots: Vec<OwnedSemaphorePermit> = Vec::new();
    while let Ok(slot) = Arc::clone(pool).try_acquire_owned() {
        slots.push(slot);
    }
    if slots.is_empty() {
        return Ok(());
    }
    let (free, lease, now) =
        (i64::try_from(slots.len()).unwrap_or(i64::MAX), shared.config.scanner_lease, clock::now());
    let claimed = match kind {
        ClaimKind::TaskCheck => shared.store.scans_claim_waiting(free, lease, now).await?,
        ClaimKind::Work => {
            shared.store.scans_claim(free, &shared.recent_organizations(), lease, now).await?
        }
    };
    // There may be more, which can be claimed when one of these has ended.
    let full = claimed.len() == slots.len();
    for (scan, slot) in claimed.into_iter().zip(slots) {
        if matches!(kind, ClaimKind::Work) {
            shared.mark_recent(scan.organization);
        }
        let (shared, draining) = (Arc::clone(shared), lifecycle.draining());
        lifecycle.spawn_job("scan", async move {
            let _running = matches!(kind, ClaimKind::Work).then(|| shared.metrics.track_running());
            let more = scan::process(&shared, scan, &draining).await;
            drop(slot);
            if more || full {
                shared.due.notify_one();
            }
        });
    }
    Ok(())
}

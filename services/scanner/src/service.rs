//! What the service is made of, and how it takes up scans: by a command, or by the sweep when none
//! came.

mod answer;
mod metrics;
pub(crate) mod tidy;

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Context as _;
use construct_bus::{Bus, ConnectOptions, ConsumeOptions, Tls, User, blob};
use construct_domain::OrganizationId;
use construct_runtime::{Context, Lifecycle, MasterKeys, clock, telemetry::Chain};
use construct_store::{Keyring, PoolOptions, Store};
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::MissedTickBehavior,
};

use crate::{
    OUTLINE,
    config::Config,
    explore::Gateway,
    repository::{Outliner, OutlinerLimits, Reach},
    scan::{self, hosts::Hosts},
};

pub(crate) use metrics::Metrics;

/// How often scans are looked for of which nobody has said that they are there, or whose next look
/// has come.
const SWEEP: Duration = Duration::from_secs(1);
/// Scans whose tasks are looked at, or that are ended, at the same time. That takes two questions
/// to the gateway each, and none of the places for work, so that scans whose models take their time
/// keep nobody else's waiting. Further ones wait in PostgreSQL.
const LOOKS: usize = 16;
/// Commands that are taken at the same time; each only rings.
const RINGS: usize = 16;
/// Organizations of which it is remembered when they had their turn.
const SERVED: usize = 256;

/// What all parts share.
pub(crate) struct Shared {
    pub(crate) config: Config,
    /// Where the files of scans lie.
    pub(crate) dir: PathBuf,
    pub(crate) store: Store,
    pub(crate) bus: Bus,
    pub(crate) blobs: blob::Store,
    pub(crate) keyring: Keyring,
    pub(crate) gateway: Gateway,
    pub(crate) reach: Reach,
    pub(crate) hosts: Hosts,
    pub(crate) outliner: Outliner,
    pub(crate) metrics: Metrics,
    /// Places for work.
    slots: Arc<Semaphore>,
    /// Places for looks at tasks that explore, and for ends.
    looks: Arc<Semaphore>,
    /// There may be something to take.
    due: Notify,
    served: Mutex<VecDeque<OrganizationId>>,
}

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
        slots: Arc::new(Semaphore::new(config.scanner_concurrency)),
        looks: Arc::new(Semaphore::new(LOOKS)),
        due: Notify::new(),
        served: Mutex::default(),
        bus,
        config,
    });
    lifecycle.spawn_job("tidying", tidy::run(Arc::clone(&shared), lifecycle.draining()));
    lifecycle.spawn_job("repositories", answer::run(Arc::clone(&shared), lifecycle.draining()));
    lifecycle.spawn("commands", commands(Arc::clone(&shared), lifecycle.clone()));
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
async fn commands(shared: Arc<Shared>, lifecycle: Lifecycle) -> anyhow::Result<()> {
    let mut deliveries = shared.bus.consume_scans(ConsumeOptions::new(RINGS, lifecycle.draining()));
    while let Some(delivery) = deliveries.next().await {
        shared.due.notify_one();
        delivery.receipt.ack().await;
    }
    Ok(())
}

/// What a scan is taken for.
#[derive(Debug, Clone, Copy)]
enum Turn {
    /// A look at its task, or its end.
    Look,
    /// Everything else.
    Work,
}

/// Takes scans that have to be looked at, until the service drains.
async fn sweep(shared: Arc<Shared>, lifecycle: Lifecycle) -> anyhow::Result<()> {
    let draining = lifecycle.draining();
    let mut ticks = tokio::time::interval(SWEEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = draining.cancelled() => return Ok(()),
            () = shared.due.notified() => {}
            _ = ticks.tick() => {}
        }
        for turn in [Turn::Look, Turn::Work] {
            if let Err(error) = take(&shared, turn, &lifecycle).await {
                tracing::warn!(error = %Chain(&error), "scans could not be looked for");
            }
        }
    }
}

/// Takes as many scans as there is room for.
async fn take(
    shared: &Arc<Shared>,
    turn: Turn,
    lifecycle: &Lifecycle,
) -> Result<(), construct_store::Error> {
    let places = match turn {
        Turn::Look => &shared.looks,
        Turn::Work => &shared.slots,
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
        Turn::Look => shared.store.scans_look(free, lease, now).await?,
        Turn::Work => shared.store.scans_take(free, &shared.served(), lease, now).await?,
    };
    // There may be more, for which there is room when one of these has ended.
    let full = taken.len() == slots.len();
    for (scan, slot) in taken.into_iter().zip(slots) {
        if matches!(turn, Turn::Work) {
            shared.serve(scan.organization);
        }
        let (shared, draining) = (Arc::clone(shared), lifecycle.draining());
        lifecycle.spawn_job("scan", async move {
            let _running = matches!(turn, Turn::Work).then(|| shared.metrics.running());
            let more = scan::work(&shared, scan, &draining).await;
            drop(slot);
            if more || full {
                shared.due.notify_one();
            }
        });
    }
    Ok(())
}

impl Shared {
    /// Organizations whose scans were worked on here, the last one at the end.
    fn served(&self) -> Vec<OrganizationId> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }

    /// An organization's scan is worked on. That others forget this with their process costs one
    /// turn and nothing else.
    fn serve(&self, organization: OrganizationId) {
        let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        served.retain(|other| *other != organization);
        served.push_back(organization);
        if served.len() > SERVED {
            served.pop_front();
        }
    }
}

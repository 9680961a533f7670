//! The reconciler: one actor per active task. Only it changes a task's state.
//!
//! A message on the mesh only asks for a reconcile. `construct_domain::decide` computes what
//! happens next from what PostgreSQL holds. The decision is committed under a version guard, and
//! then performed (D1 and D2 in ARCHITECTURE.md).

mod actor;
mod admission;
mod announce;
mod assignment;
mod catalog;
mod census;
mod cleanup;
mod command;
mod command_inputs;
mod compaction;
mod convert;
mod failures;
mod in_flight;
mod intake;
mod members;
mod metrics;
mod placement;
mod prompt;
mod quarantine;
mod reconcile;
mod record;
mod schedules;
mod slots;
mod spending;
mod step_location;
mod subtasks;
mod supervisor;
mod sweep;
mod trace;

use std::{num::NonZeroUsize, sync::Arc, time::Duration};

use anyhow::Context as _;
use construct_bus::{Bus, ConnectOptions, Tls, User, blob};
use construct_domain::subtask::Limits;
use construct_runtime::{Common, Context, Latch, ServiceConfig, clock, config};
use construct_store::{PoolOptions, Store};
use ractor::Actor as _;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    assignment::PartitionAssignment,
    catalog::Catalog,
    failures::FailingTasks,
    in_flight::{InFlightLimiter, InFlightLimits},
    reconcile::Reconciler,
    slots::Slots,
    supervisor::Supervisor,
};

/// The configuration.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Tasks that are reconciled (loaded, decided, committed) at the same time. A task whose model
    /// call or script is running needs none of these slots.
    pub reconciler_concurrency: usize,
    /// Interval at which tasks that were not woken are looked for.
    #[serde(with = "config::duration")]
    pub reconciler_sweep_interval: Duration,
    /// Model calls of one organization that this process has in their work queue at a time, running
    /// ones included. The rest waits here. 0: unlimited.
    pub reconciler_model_calls: usize,
    /// The same for scripts, in the queue of each pool.
    pub reconciler_scripts: usize,
    /// Messages of one partition in progress at the same time. The rest waits in JetStream.
    pub reconciler_partition_backlog: usize,
    /// Maximum number of connections to PostgreSQL.
    pub reconciler_database_connections: u32,
    /// Replicas of each stream in a NATS cluster: 1, 3 or 5. More than there are servers is
    /// rejected. 0: keeps the server's setting; the server creates streams with 1.
    pub reconciler_stream_replicas: usize,
    /// Maximum depth of a subtask below the root of its tree; 0: no subtasks.
    pub reconciler_subtask_depth: u32,
    /// Maximum number of subtasks that one task creates in its lifetime.
    pub reconciler_subtasks_per_task: u32,
    /// Maximum number of subtasks of one tree that run at the same time.
    pub reconciler_subtasks_at_work: u32,
}

impl Default for Config {
    fn default() -> Self {
        let Limits { depth, children, at_work } = Limits::default();
        Self {
            reconciler_concurrency: 50,
            reconciler_sweep_interval: Duration::from_secs(2),
            // Half of what one worker process runs at a time.
            reconciler_model_calls: 128,
            reconciler_scripts: 32,
            reconciler_partition_backlog: 64,
            reconciler_database_connections: 16,
            reconciler_stream_replicas: 0,
            reconciler_subtask_depth: depth,
            reconciler_subtasks_per_task: children,
            reconciler_subtasks_at_work: at_work,
        }
    }
}

impl ServiceConfig for Config {
    fn validate(&self, common: &Common) -> Result<(), config::Invalid> {
        common.database_url()?;
        common.token_keys()?;
        if ![0, 1, 3, 5].contains(&self.reconciler_stream_replicas) {
            return Err(config::Invalid::new("reconciler_stream_replicas", "must be 0, 1, 3 or 5"));
        }
        let at_least_one = [
            ("reconciler_concurrency", self.reconciler_concurrency),
            ("reconciler_partition_backlog", self.reconciler_partition_backlog),
            ("reconciler_database_connections", self.reconciler_database_connections as usize),
        ];
        match at_least_one.into_iter().find(|(_, value)| *value == 0) {
            Some((key, _)) => Err(config::Invalid::new(key, "must be at least 1")),
            None => Ok(()),
        }
    }
}

/// Starts the service; it runs until its lifecycle drains.
pub async fn run(config: Config, context: &Context) -> anyhow::Result<()> {
    let (database, nats) =
        (context.readiness().register("postgresql"), context.readiness().register("nats"));
    let common = context.common();
    let url = common.database_url()?.expose().to_owned();
    let store = context
        .connect_with_retry("postgresql", &database, async || {
            let options = PoolOptions {
                application_name: context.instance_id().to_owned(),
                max_connections: config.reconciler_database_connections,
                generic_plans: true,
                ..PoolOptions::default()
            };
            let store = Store::connect(&url, options).await?;
            store.migrate().await?;
            clock::sync_once(|| store.clock()).await?;
            Ok::<_, construct_store::Error>(store)
        })
        .await?;
    let bus = context
        .connect_with_retry("nats", &nats, async || {
            let tls =
                Tls { ca: common.nats_ca_file.clone(), certificate: common.nats_certificate() };
            let options = ConnectOptions::new(context.instance_id())
                .blobs(common.blob_dir())
                .user(User::Reconciler)
                .tls(tls)
                .replicas(NonZeroUsize::new(config.reconciler_stream_replicas));
            let bus = Bus::connect(common.nats_url.expose(), options).await?;
            bus.ensure_topology().await?;
            Ok::<_, anyhow::Error>(bus)
        })
        .await?;

    let lifecycle = context.lifecycle();
    metrics::init();
    let database = store.clone();
    let ask = move || {
        let store = database.clone();
        async move { store.clock().await }
    };
    lifecycle.spawn_job("clock", clock::keep_synced(ask, lifecycle.draining()));
    lifecycle.spawn_job("streams", track_stream_health(bus.clone(), nats, lifecycle.draining()));
    lifecycle.spawn_job("topology", bus.clone().maintain_topology(lifecycle.draining()));
    let (announcer, announcements) = announce::queue();
    let (assignments, assignment) = watch::channel(PartitionAssignment::EMPTY);
    let in_flight_limits = InFlightLimits {
        model_calls: config.reconciler_model_calls,
        scripts: config.reconciler_scripts,
    };
    let limiter = InFlightLimiter::new(in_flight_limits, assignment.clone());
    let failing_tasks = FailingTasks::default();
    let reconciler = Arc::new(Reconciler {
        store: store.clone(),
        bus: bus.clone(),
        catalog: Catalog::new(bus.clone()),
        announcer: announcer.clone(),
        limiter: limiter.clone(),
        failing_tasks: failing_tasks.clone(),
        lifecycle: lifecycle.clone(),
        token_keys: common.token_keys()?.map(Arc::new),
    });
    spending::spawn(&store, &bus, lifecycle);
    let schedules = schedules::ScheduleRunner {
        store: store.clone(),
        bus: bus.clone(),
        announcer: announcer.clone(),
    };
    lifecycle
        .spawn("schedules", schedules.run(config.reconciler_sweep_interval, lifecycle.draining()));
    let limits = Limits {
        depth: config.reconciler_subtask_depth,
        children: config.reconciler_subtasks_per_task,
        at_work: config.reconciler_subtasks_at_work,
    };
    let answering = subtasks::answer(
        store.clone(),
        bus.clone(),
        announcer.clone(),
        limits,
        lifecycle.draining(),
    );
    lifecycle.spawn("subtask requests", answering);
    lifecycle.spawn("census", census::answer(store.clone(), bus.clone(), lifecycle.draining()));
    lifecycle.spawn(
        "step locations",
        step_location::answer(limiter.clone(), failing_tasks, bus.clone(), lifecycle.draining()),
    );
    let (health, healthy) = watch::channel(true);
    let concurrency = config.reconciler_concurrency;
    let args = supervisor::Args {
        reconciler,
        slots: Slots::new(concurrency),
        max_concurrent: concurrency,
        assignment: assignment.clone(),
    };
    let (supervisor, supervising) = Supervisor::spawn(None, Supervisor, args)
        .await
        .context("the supervisor of the task actors does not start")?;

    lifecycle.spawn(
        "in-flight limiter",
        limiter.wake_ready_tasks(supervisor.clone(), lifecycle.draining()),
    );
    let finished = CancellationToken::new();
    lifecycle.spawn("announcements", announcements.run(bus.clone(), finished.clone()));
    let intake = intake::run(
        bus.clone(),
        supervisor.clone(),
        assignment.clone(),
        config.reconciler_partition_backlog,
        lifecycle.draining(),
    );
    let sweep = sweep::run(
        store,
        supervisor.clone(),
        assignment,
        health,
        config.reconciler_sweep_interval,
        lifecycle.draining(),
    );
    lifecycle.spawn("tasks", async move {
        let _finished = finished.drop_guard();
        // Intake ends when the service drains. Then the accepted messages are finished, actor by
        // actor.
        intake.await?;
        supervisor.cast(supervisor::Msg::Drain)?;
        supervising.await?;
        Ok::<_, anyhow::Error>(())
    });
    lifecycle.spawn("sweep", sweep);
    lifecycle.spawn(
        "cleanup",
        cleanup::run(bus.clone(), blob::Store::open(common.blob_dir())?, lifecycle.draining()),
    );
    let instance = context.instance_id().to_owned();
    lifecycle.spawn(
        "placement",
        placement::run(bus, instance, assignments, healthy, lifecycle.draining()),
    );
    Ok(())
}

/// Keeps the readiness latch of NATS accurate. A server with a full disk may keep its connections
/// while its streams do not answer.
async fn track_stream_health(bus: Bus, latch: Latch, stop: CancellationToken) {
    let mut trouble = bus.topology_error();
    loop {
        match &*trouble.borrow_and_update() {
            None => latch.set_ready(),
            Some(reason) => latch.set_not_ready(reason.clone()),
        }
        let Some(Ok(())) = stop.run_until_cancelled(trouble.changed()).await else { return };
    }
}

//! One trial.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use construct_bus::{Bus, RawMessage, subject};
use construct_domain::{
    OrganizationId,
    task::{Phase, Task},
};
use construct_proto::{mesh::v1::ReconcilerHeartbeat, v1};
use construct_store::StoredTask;
use construct_tests::{
    client::TURN_TIMEOUT,
    clocks,
    mesh::{Disk, Mesh, Service},
    postgres::PostgresServer,
    proxy::{Proxy, authority},
    random::Random,
    wait::until,
};
use futures::StreamExt as _;
use tokio::{
    task::AbortHandle,
    time::{Instant, sleep, sleep_until, timeout},
};

use crate::{
    check::{self, Report},
    clients::Clients,
    load::{self, Job},
    people::{self, Clock},
    plan::{Disturbance, Kind, Plan, Server, ZONES},
};

/// One of so many wakes and results is duplicated; the second copy is late.
const DUPLICATE_ONE_IN: u64 = 4;
/// The time limit of one attempt to explain why a conversation does not continue.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The services with two processes.
const REPLICATED: [Service; 3] = [Service::Reconciler, Service::Interpreter, Service::Providers];

/// A network: the proxies to the servers.
struct Zone {
    nats: Proxy,
    database: Proxy,
}

struct Trial {
    mesh: Mesh,
    /// Dropped after the mesh, whose database is dropped there.
    postgres: PostgresServer,
    zones: Vec<Zone>,
    random: Random,
    replicas: Vec<(Service, usize)>,
    lies: Vec<AbortHandle>,
}

/// Performs the plan while there is load, and checks the outcome.
pub(crate) async fn run(plan: &Plan) -> Report {
    let (mut trial, clients) = Box::pin(Trial::start(plan)).await;
    let jobs = load::begin(&trial.mesh).await;
    let clock = Clock::begin(&trial.mesh).await;
    let twice = duplicate(trial.mesh.bus().await, plan.seed);
    let over = AtomicBool::new(false);
    let disturbing = async {
        for (pause, disturbance) in &plan.disturbances {
            sleep(*pause).await;
            trial.disturb(disturbance).await;
            if let Some(said) = trial.mesh.nats.restart_if_ended().await {
                eprintln!("NATS had ended: it is started again; it said\n{said}");
            }
            check_explanations(&trial.mesh, &jobs).await;
            check_all_explained(&trial.mesh).await;
        }
        trial.repair().await;
        over.store(true, Ordering::Relaxed);
    };
    let served = async {
        if let Some(clients) = &clients {
            Box::pin(clients.work(&over)).await;
        }
    };
    let meddling = people::suspend_at_random(&jobs, Random::new(plan.seed.rotate_left(16)), &over);
    let ticking = clock.work(Random::new(plan.seed.rotate_left(48)), &over);
    let work = async {
        tokio::join!(
            load::run_conversations(&jobs, plan.seed, &over),
            meddling,
            ticking,
            served,
            disturbing
        )
    };
    Box::pin(people::approving(&jobs, work)).await;
    twice.abort();
    eprintln!("{} messages by the clock", clock.check().await);
    if let Some(clients) = &clients {
        eprintln!("{}", Box::pin(clients.check(&trial.mesh)).await);
    }
    people::approving(&jobs, check::check(&trial.mesh, &jobs)).await
}

/// Every conversation explains why it does not continue and when it is reconciled next, in
/// agreement with its row. The gateway or its dependencies may still be away: the request is
/// repeated until it is answered.
async fn check_explanations(mesh: &Mesh, jobs: &[Job]) {
    futures::future::join_all(jobs.iter().map(async |job| {
        let (row, why) = until("the gateway to explain", TURN_TIMEOUT, async || {
            explanation_and_row(mesh, job).await
        })
        .await;
        let Task { phase, suspend, .. } = row.state;
        let idle = phase == Phase::AwaitInput && row.queued_count == 0 && !suspend;
        let held = phase == Phase::Suspended && suspend;
        let said = format!("{why:?}\n{row:?}");
        assert!(
            !why.waiting_for.is_empty() && !why.released_by.is_empty() && why.since.is_some(),
            "no reason: {said}"
        );
        let phase = format!("TASK_PHASE_{}", phase.as_str().to_uppercase());
        assert_eq!(why.phase().as_str_name(), phase, "it is something else: {said}");
        let step = row.state.step.as_ref().map(|step| step.id.to_string());
        assert_eq!(why.step_id, step.unwrap_or_default(), "another step: {said}");
        assert_eq!(
            why.waiting_for.contains("a message from a user"),
            idle,
            "another reason: {said}"
        );
        assert!(idle || held || why.next_wake.is_some(), "no wake is planned for it: {said}");
    }))
    .await;
}

/// The explanation of a conversation and its row, if the row has not changed in between: only then
/// do they refer to the same state.
async fn explanation_and_row(
    mesh: &Mesh,
    job: &Job,
) -> Result<(StoredTask, v1::TaskExplanation), String> {
    let task = job.conversation.id().parse().unwrap();
    let row = async || {
        let row = mesh.database.store().task_get(OrganizationId::LOCAL, task).await;
        row.map_err(|error| format!("PostgreSQL: {error:?}"))
    };
    let asked = async {
        let before = row().await?;
        let why = job
            .conversation
            .explain()
            .await
            .map_err(|status| format!("the gateway: {status:?}"))?;
        Ok((before, why, row().await?))
    };
    let (before, why, after) =
        timeout(ANSWER_TIMEOUT, asked).await.unwrap_or_else(|_late| Err("no answer".to_owned()))?;
    let is_same = (before.revision, before.queued_count) == (after.revision, after.queued_count);
    if is_same { Ok((after, why)) } else { Err("it has changed meanwhile".to_owned()) }
}

/// The same for every task and subtask, also those that no client asks for: a check from outside,
/// past the disturbed networks. PostgreSQL itself may have been disturbed.
async fn check_all_explained(mesh: &Mesh) {
    let asked = timeout(Duration::from_millis(300), mesh.database.stuck_tasks()).await;
    if let Ok(Ok(forgotten)) = asked {
        assert!(forgotten.is_empty(), "no wake is planned for them: {forgotten:?}");
    }
}

impl Trial {
    async fn start(plan: &Plan) -> (Self, Option<Clients>) {
        let postgres = PostgresServer::start().await.unwrap();
        let database = postgres.database().await;
        let (mesh, clients) = if plan.kind == Kind::Clients {
            let mut mesh = Mesh::prepare_on(database).await.unwrap();
            let clients = Box::pin(Clients::prepare(&mut mesh)).await;
            (mesh, Some(clients))
        } else {
            (Mesh::with_disks_and_clocks(database).await.unwrap(), None)
        };
        let mut zones = Vec::new();
        for _ in 0..ZONES {
            let nats = Proxy::start_nats(&authority(mesh.nats.url())).await.unwrap();
            let database = Proxy::start(&authority(mesh.database.url())).await.unwrap();
            zones.push(Zone { nats, database });
        }
        let random = Random::new(!plan.seed);
        let mut trial =
            Self { mesh, postgres, zones, random, replicas: Vec::new(), lies: Vec::new() };
        trial.enter_zone(0);
        trial.mesh.start_services().await.unwrap();
        trial.enter_zone(1);
        for service in REPLICATED {
            let replica = trial.mesh.start_replica(service).await.unwrap();
            trial.replicas.push((service, replica));
        }
        if let Some(clients) = &clients {
            Box::pin(clients.begin(&mut trial.mesh)).await;
        }
        (trial, clients)
    }

    /// Services that start from now on use this network.
    fn enter_zone(&mut self, zone: usize) {
        let Zone { nats, database } = &self.zones[zone];
        let (nats, database) = (
            nats.proxied_url(self.mesh.nats.url()),
            database.proxied_url(self.mesh.database.url()),
        );
        self.mesh.set_env("CONSTRUCT_NATS_URL", nats);
        self.mesh.set_env("CONSTRUCT_DATABASE_URL", database);
    }

    fn enter_any_zone(&mut self) {
        let zone = self.random.next_below(ZONES as u64) as usize;
        self.enter_zone(zone);
    }

    async fn disturb(&mut self, disturbance: &Disturbance) {
        match *disturbance {
            Disturbance::Kill(service, away) => {
                self.mesh.kill(service).unwrap();
                sleep(away).await;
                self.enter_any_zone();
                self.mesh.spawn(service).unwrap();
            }
            Disturbance::KillReplica(service, away) => {
                let at = self.replicas.iter().position(|(of, _)| *of == service);
                if let Some(at) = at {
                    let (_, replica) = self.replicas.remove(at);
                    self.mesh.kill_replica(replica).unwrap();
                }
                sleep(away).await;
                self.enter_any_zone();
                let replica = self.mesh.spawn_replica(service).unwrap();
                self.replicas.push((service, replica));
            }
            Disturbance::Restart(service) => {
                // It may be cut off and unable to stop gracefully; it only has to end.
                let _ = self.mesh.stop(service).await;
                self.enter_any_zone();
                self.mesh.spawn(service).unwrap();
            }
            Disturbance::KillNats(away) => {
                self.mesh.nats.kill();
                sleep(away).await;
                self.mesh.nats.restart().await;
            }
            Disturbance::FreezeNats(length) => {
                self.mesh.nats.pause();
                sleep(length).await;
                self.mesh.nats.resume();
            }
            Disturbance::CrashPostgreSql => self.mesh.database.crash().await,
            Disturbance::KillPostgreSql(away) => {
                self.postgres.kill().unwrap();
                sleep(away).await;
                self.postgres.ensure_running().await.unwrap();
            }
            Disturbance::Cut(zone, server, length) => {
                let proxy = self.proxy(zone, server);
                proxy.cut();
                sleep(length).await;
                self.proxy(zone, server).restore();
            }
            Disturbance::Hold(zone, server, length) => {
                self.proxy(zone, server).hold();
                sleep(length).await;
                self.proxy(zone, server).restore();
            }
            Disturbance::Slow(zone, server, delay, length) => {
                self.proxy(zone, server).slow(delay);
                sleep(length).await;
                self.proxy(zone, server).restore();
            }
            Disturbance::Disorder(zone, seed, length) => {
                self.zones[zone].nats.disorder(seed);
                sleep(length).await;
                self.zones[zone].nats.restore();
            }
            Disturbance::FullDisk(disk, length) => {
                full(length, || self.mesh.fill(disk)).await;
                self.mesh.clear(disk).unwrap();
                if disk == Disk::Nats {
                    // Some of its streams may be stuck for good: an operator does this, and it does
                    // not end by itself.
                    self.mesh.nats.restart().await;
                }
            }
            Disturbance::FullPostgreSql(length) => {
                full(length, || self.postgres.fill()).await;
                if self.postgres.clear().await.unwrap() {
                    eprintln!("PostgreSQL had ended: it is started again");
                }
            }
            Disturbance::Jump(..) if clocks::are_disabled() => {
                eprintln!("LEFT OUT: no clock jumps, as CONSTRUCT_TEST_CLOCKS=off says");
            }
            Disturbance::Jump(service, further, seconds) => {
                self.mesh.jump(service, further, seconds).unwrap()
            }
            Disturbance::Lie(length) => {
                let bus = self.mesh.bus().await;
                self.lies.push(tokio::spawn(publish_false_departures(bus, length)).abort_handle());
            }
        }
    }

    fn proxy(&self, zone: usize, server: Server) -> &Proxy {
        match server {
            Server::Nats => &self.zones[zone].nats,
            Server::PostgreSql => &self.zones[zone].database,
        }
    }

    /// Ends all faults.
    async fn repair(&mut self) {
        for lie in self.lies.drain(..) {
            lie.abort();
        }
        self.mesh.start_services().await.unwrap();
        // Those that the trial has.
        for service in Service::CLIENTS {
            if self.mesh.pid(service).is_some() {
                self.mesh.wait_until_ready(service).await.unwrap();
            }
        }
    }
}

/// Keeps a disk full: space that servers free meanwhile is taken at once.
async fn full(length: Duration, fill: impl Fn() -> anyhow::Result<()>) {
    let end = Instant::now() + length;
    while Instant::now() < end {
        fill().unwrap();
        sleep(Duration::from_millis(20)).await;
    }
}

/// Reports to each reconciler that another one leaves, as soon as that one says that it is alive.
async fn publish_false_departures(bus: Bus, length: Duration) {
    let end = Instant::now() + length;
    let Ok(mut beats) = bus.subscribe_heartbeats().await else { return };
    loop {
        tokio::select! {
            () = sleep_until(end) => return,
            beat = beats.next() => {
                let Some(beat) = beat else { return };
                let address = subject::ReconcilerHeartbeat { instance: beat.instance.clone() };
                if !beat.leaving {
                    let _ = bus.publish_heartbeat(&address, &ReconcilerHeartbeat { leaving: true, ..beat }).await;
                }
            }
        }
    }
}

/// Duplicates some wakes and results, out of order.
fn duplicate(bus: Bus, seed: u64) -> AbortHandle {
    let mut random = Random::new(seed.rotate_left(32));
    let duplicating = async move {
        let Ok(mut messages) = bus.tap("construct.v1.cmd.task.>").await else { return };
        let mut done: Vec<RawMessage> = Vec::new();
        while let Some(message) = messages.next().await {
            // Messages that were published here are received here as well.
            if let Some(at) = done.iter().position(|sent| sent.payload == message.payload) {
                done.swap_remove(at);
                continue;
            }
            if random.next_below(DUPLICATE_ONE_IN) > 0 {
                continue;
            }
            let late = Duration::from_millis(random.next_below(2_000));
            done.push(message.clone());
            let bus = bus.clone();
            tokio::spawn(async move {
                sleep(late).await;
                let _ = bus.republish(&message).await;
            });
        }
    };
    tokio::spawn(duplicating).abort_handle()
}

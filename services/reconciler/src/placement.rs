//! Distributes the partitions among the reconcilers: sends heartbeats, receives those of the
//! others, and publishes this process's assignment.
//!
//! Placement is an optimization (D3 in ARCHITECTURE.md). If two processes both own a partition,
//! they share its messages, and the version guard rejects all but one of two commits. A partition
//! without an owner waits until a dead process is known to be dead. While no heartbeat is received,
//! not even the own one, everything stays as it is.

use std::time::Duration;

use construct_bus::{Bus, subject};
use construct_proto::mesh::v1::ReconcilerHeartbeat;
use construct_runtime::{clock, telemetry::Chain};
use construct_wire::convert;
use futures::{StreamExt as _, stream::BoxStream};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    assignment::PartitionAssignment,
    members::{BeatSource, Members},
};

/// Interval of heartbeats.
const BEAT_INTERVAL: Duration = Duration::from_millis(500);
/// Own heartbeats that return in shorter intervals were delayed somewhere, and do not count as
/// passed time.
const MIN_BEAT_SPACING: Duration = Duration::from_millis(300);
/// Time for the others to answer a new process.
const PEER_RESPONSE_TIMEOUT: Duration = Duration::from_millis(200);
/// A process that does not receive its own heartbeat for this long after its start takes all
/// partitions.
const SELF_BEAT_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay before the subscription is retried.
const RESUBSCRIBE_DELAY: Duration = Duration::from_millis(500);

/// Participates until stopped, and then announces that it leaves.
pub(crate) async fn run(
    bus: Bus,
    instance: String,
    assignment: watch::Sender<PartitionAssignment>,
    healthy: watch::Receiver<bool>,
    stop: CancellationToken,
) -> Result<(), std::convert::Infallible> {
    // Characters that are invalid in a subject must not keep the process from participating.
    let token = |c: char| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '-' };
    let instance: String = instance.chars().map(token).collect();
    let process = Uuid::now_v7().simple().to_string();
    let members = Members::new(instance.clone(), process.clone());
    let mut placement = Placement {
        bus,
        instance,
        process,
        members,
        assignment,
        healthy,
        last_counted: None,
        decide_at: None,
        has_assignment: false,
    };
    let Some(beats) = placement.subscribe(&stop).await else { return Ok(()) };
    placement.participate(beats, &stop).await;
    placement.send_beat(|beat| beat.leaving = true).await;
    Ok(())
}

struct Placement {
    bus: Bus,
    instance: String,
    process: String,
    members: Members,
    assignment: watch::Sender<PartitionAssignment>,
    /// Whether the process can read the database. While it cannot, it does not participate.
    healthy: watch::Receiver<bool>,
    /// When an own heartbeat was last counted.
    last_counted: Option<Instant>,
    /// When the first assignment is computed; `None` before the first own heartbeat.
    decide_at: Option<Instant>,
    /// Whether an assignment was computed.
    has_assignment: bool,
}

impl Placement {
    async fn subscribe(
        &self,
        stop: &CancellationToken,
    ) -> Option<BoxStream<'static, ReconcilerHeartbeat>> {
        let mut failed = false;
        loop {
            match self.bus.subscribe_heartbeats().await {
                Ok(beats) => return Some(beats),
                Err(error) if !std::mem::replace(&mut failed, true) => {
                    tracing::warn!(error = %Chain(&error), "cannot subscribe to the heartbeats of reconcilers; retrying");
                }
                Err(_) => {}
            }
            tokio::select! {
                () = stop.cancelled() => return None,
                () = sleep(RESUBSCRIBE_DELAY) => {}
            }
        }
    }

    async fn participate(
        &mut self,
        mut beats: BoxStream<'static, ReconcilerHeartbeat>,
        stop: &CancellationToken,
    ) {
        let began = Instant::now();
        let mut healthy = self.healthy.clone();
        let mut ticks = interval(BEAT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let decide_at = self.decide_at.unwrap_or(began + SELF_BEAT_TIMEOUT);
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {
                    let reply_requested = self.decide_at.is_none();
                    self.send_beat(|beat| beat.reply_requested = reply_requested).await;
                }
                () = sleep_until(decide_at), if !self.has_assignment => {
                    if self.decide_at.is_none() {
                        tracing::warn!("no heartbeats are received, not even own ones; taking all partitions until some are");
                    }
                    self.update_assignment();
                }
                Ok(()) = healthy.changed() => {
                    if *healthy.borrow_and_update() {
                        tracing::info!("the database can be read again; this reconciler participates again");
                        self.send_beat(|_| {}).await;
                    } else {
                        tracing::warn!("the database cannot be read; this reconciler leaves its partitions to others");
                        self.send_beat_unconditionally(|beat| beat.leaving = true).await;
                    }
                    if self.has_assignment {
                        self.update_assignment();
                    }
                }
                beat = beats.next() => match beat {
                    Some(beat) => self.handle_beat(&beat).await,
                    None => match self.subscribe(stop).await {
                        Some(again) => beats = again,
                        None => return,
                    },
                }
            }
        }
    }

    async fn handle_beat(&mut self, beat: &ReconcilerHeartbeat) {
        let now = Instant::now();
        match self.members.record_beat(beat) {
            BeatSource::Own => {
                self.decide_at.get_or_insert(now + PEER_RESPONSE_TIMEOUT);
                if self
                    .last_counted
                    .is_none_or(|counted| now.duration_since(counted) >= MIN_BEAT_SPACING)
                {
                    self.last_counted = Some(now);
                    self.members.count_own_beat();
                }
            }
            BeatSource::Peer if beat.reply_requested => self.send_beat(|_| {}).await,
            BeatSource::Peer => {}
        }
        if self.decide_at.is_some_and(|decide_at| decide_at <= now) {
            self.update_assignment();
        }
    }

    /// Computes the assignment from the live members.
    fn update_assignment(&mut self) {
        self.has_assignment = true;
        let new = if *self.healthy.borrow() {
            self.members.assignment()
        } else {
            PartitionAssignment::EMPTY
        };
        let old = *self.assignment.borrow();
        if old == new {
            return;
        }
        let live = self.members.live_instances();
        tracing::info!(
            replicas = live.len(),
            live = live.join(" "),
            partitions = %new,
            gained = %new.difference(old),
            lost = %old.difference(new),
            "the partition assignment has changed"
        );
        self.assignment.send_replace(new);
    }

    /// Sends a heartbeat, if the process is healthy.
    async fn send_beat(&self, what: impl FnOnce(&mut ReconcilerHeartbeat)) {
        if *self.healthy.borrow() {
            self.send_beat_unconditionally(what).await;
        }
    }

    /// Without a connection nothing is sent: it would all arrive at once later.
    async fn send_beat_unconditionally(&self, what: impl FnOnce(&mut ReconcilerHeartbeat)) {
        if !self.bus.is_connected() {
            return;
        }
        let mut beat = ReconcilerHeartbeat {
            instance: self.instance.clone(),
            process: self.process.clone(),
            time: Some(convert::time(clock::now())),
            partitions: self.assignment.borrow().partitions().map(u32::from).collect(),
            ..ReconcilerHeartbeat::default()
        };
        what(&mut beat);
        let address = subject::ReconcilerHeartbeat { instance: self.instance.clone() };
        if let Err(error) = self.bus.publish_heartbeat(&address, &beat).await {
            tracing::warn!(error = %Chain(&error), "a heartbeat could not be sent");
        }
    }
}

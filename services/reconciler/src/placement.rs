//! Shares the partitions with the other reconcilers: says that it lives, hears who else does, and
//! tells the rest of the process which partitions are its own.
//!
//! Placement is an optimization (D3 in ARCHITECTURE.md). Two processes that both take a partition
//! for their own take turns at its messages, and the version guard makes all but one of two commits
//! lose; a partition that nobody takes for its own waits until a dead process is known to be dead.
//! While nothing is heard, not even oneself, everything stays as it is.

use std::time::Duration;

use construct_bus::{Bus, subject};
use construct_proto::mesh::v1::ReconcilerBeat;
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

/// How often a process says that it lives.
const BEAT_INTERVAL: Duration = Duration::from_millis(500);
/// Own beats that come back within less than this of each other were held up somewhere, and don't
/// count as time that passed.
const MIN_BEAT_SPACING: Duration = Duration::from_millis(300);
/// How long the others have to say that they live, once a new process is heard.
const PEER_RESPONSE_TIMEOUT: Duration = Duration::from_millis(200);
/// A process that does not even hear itself for so long after its start takes everything.
const SELF_BEAT_TIMEOUT: Duration = Duration::from_secs(5);
/// Before the subscription is tried again.
const RESUBSCRIBE_DELAY: Duration = Duration::from_millis(500);

/// Takes part until told to stop, and says then that it leaves.
pub(crate) async fn run(
    bus: Bus,
    instance: String,
    assignment: watch::Sender<PartitionAssignment>,
    healthy: watch::Receiver<bool>,
    stop: CancellationToken,
) -> Result<(), std::convert::Infallible> {
    // What cannot stand in a subject must not keep the process from taking part.
    let token = |c: char| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '-' };
    let instance: String = instance.chars().map(token).collect();
    let process = Uuid::now_v7().simple().to_string();
    let members = Members::new(instance.clone(), process.clone());
    let mut placement = Placement {
        bus,
        instance,
        process,
        members,
        share: assignment,
        able: healthy,
        last_counted: None,
        decide_at: None,
        has_assignment: false,
    };
    let Some(beats) = placement.subscribe(&stop).await else { return Ok(()) };
    placement.participate(beats, &stop).await;
    placement.send_beat(|beat| beat.leaves = true).await;
    Ok(())
}

struct Placement {
    bus: Bus,
    instance: String,
    process: String,
    members: Members,
    share: watch::Sender<PartitionAssignment>,
    /// Whether the process can do anything for a task. While it cannot, it does not take part.
    able: watch::Receiver<bool>,
    /// When an own beat that came back was last counted.
    last_counted: Option<Instant>,
    /// From when on the share follows from who is heard; not known before it hears itself.
    decide_at: Option<Instant>,
    /// Whether there was a first share.
    has_assignment: bool,
}

impl Placement {
    async fn subscribe(
        &self,
        stop: &CancellationToken,
    ) -> Option<BoxStream<'static, ReconcilerBeat>> {
        let mut failed = false;
        loop {
            match self.bus.hear_beats().await {
                Ok(beats) => return Some(beats),
                Err(error) if !std::mem::replace(&mut failed, true) => {
                    tracing::warn!(error = %Chain(&error), "other reconcilers cannot be heard yet; trying again");
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
        mut beats: BoxStream<'static, ReconcilerBeat>,
        stop: &CancellationToken,
    ) {
        let began = Instant::now();
        let mut able = self.able.clone();
        let mut ticks = interval(BEAT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let decides = self.decide_at.unwrap_or(began + SELF_BEAT_TIMEOUT);
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {
                    let asks = self.decide_at.is_none();
                    self.send_beat(|beat| beat.asks = asks).await;
                }
                () = sleep_until(decides), if !self.has_assignment => {
                    if self.decide_at.is_none() {
                        tracing::warn!("no reconciler is heard, not even this one; it takes all partitions until one is");
                    }
                    self.update_assignment();
                }
                Ok(()) = able.changed() => {
                    if *able.borrow_and_update() {
                        tracing::info!("the database can be read again; this reconciler takes part again");
                        self.send_beat(|_| {}).await;
                    } else {
                        tracing::warn!("the database cannot be read; this reconciler leaves its partitions to others");
                        self.send_beat_unconditionally(|beat| beat.leaves = true).await;
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

    async fn handle_beat(&mut self, beat: &ReconcilerBeat) {
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
            BeatSource::Peer if beat.asks => self.send_beat(|_| {}).await,
            BeatSource::Peer => {}
        }
        if self.decide_at.is_some_and(|decides| decides <= now) {
            self.update_assignment();
        }
    }

    /// Makes the share what follows from who lives.
    fn update_assignment(&mut self) {
        self.has_assignment = true;
        let new = if *self.able.borrow() {
            self.members.assignment()
        } else {
            PartitionAssignment::EMPTY
        };
        let old = *self.share.borrow();
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
            "the partitions are shared anew"
        );
        self.share.send_replace(new);
    }

    /// Says that this process lives, if it can do anything.
    async fn send_beat(&self, what: impl FnOnce(&mut ReconcilerBeat)) {
        if *self.able.borrow() {
            self.send_beat_unconditionally(what).await;
        }
    }

    /// While there is no connection nothing is said: it would all be heard at once later.
    async fn send_beat_unconditionally(&self, what: impl FnOnce(&mut ReconcilerBeat)) {
        if !self.bus.is_connected() {
            return;
        }
        let mut beat = ReconcilerBeat {
            instance: self.instance.clone(),
            process: self.process.clone(),
            time: Some(convert::time(clock::now())),
            partitions: self.share.borrow().partitions().map(u32::from).collect(),
            ..ReconcilerBeat::default()
        };
        what(&mut beat);
        let address = subject::ReconcilerBeat { instance: self.instance.clone() };
        if let Err(error) = self.bus.tell_beat(&address, &beat).await {
            tracing::warn!(error = %Chain(&error), "the other reconcilers cannot be told that this one lives");
        }
    }
}

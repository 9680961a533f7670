//! Finds tasks that are due and were not woken. This makes every lost message a mere delay. Each
//! replica sweeps its own partitions.
//!
//! A partition that comes from another replica is swept at once, and further ahead than usual:
//! timers in the memory of the other replica are lost.

use std::time::Duration;

use construct_runtime::{clock, telemetry::Chain};
use construct_store::{DueTask, Store};
use jiff::Timestamp;
use opentelemetry::Context;
use ractor::ActorRef;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::{actor::MAX_TIMER_DELAY, assignment::PartitionAssignment, metrics, supervisor};

/// Number of tasks per query.
const BATCH_SIZE: u32 = 500;
/// Maximum number of queries of one sweep, so that it ends. The next sweep continues from there.
const MAX_BATCHES: usize = 20;
/// A due task is reconciled by its own actor. The sweep only wakes one that is overdue by this
/// time.
const DUE_GRACE_PERIOD: Duration = Duration::from_millis(500);
/// Delay before the sweep of a new partition is retried after a failure.
const TAKEOVER_RETRY_DELAY: Duration = Duration::from_millis(200);

/// Sweeps until stopped. `healthy` says whether the database can be read: a process that cannot
/// read it must not keep partitions from others that can.
pub(crate) async fn run(
    store: Store,
    supervisor: ActorRef<supervisor::Msg>,
    mut assignment: watch::Receiver<PartitionAssignment>,
    healthy: watch::Sender<bool>,
    interval: Duration,
    stop: CancellationToken,
) -> Result<(), std::convert::Infallible> {
    let mut sweep = Sweep { store, supervisor, healthy };
    let (mut own, mut taken_over) = (PartitionAssignment::EMPTY, PartitionAssignment::EMPTY);
    // Where the last sweep ended, so that tasks that stay due because their reconciles fail don't
    // hide those behind them.
    let mut after = None;
    let mut next = Instant::now();
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = sleep_until(next) => {}
            changed = assignment.changed() => if changed.is_err() { return Ok(()) },
        }
        let now = *assignment.borrow_and_update();
        taken_over = taken_over.union(now.difference(own)).intersection(now);
        own = now;
        if !taken_over.is_empty() {
            // To the end: no other process knows of these tasks.
            let ahead = clock::now() + MAX_TIMER_DELAY;
            let mut from = None;
            let complete = loop {
                match sweep.wake_due_tasks(ahead, from, taken_over).await {
                    Some(Some(last)) if !stop.is_cancelled() => from = Some(last),
                    Some(_) => break true,
                    None => break false,
                }
            };
            if !complete {
                next = Instant::now() + TAKEOVER_RETRY_DELAY;
                continue;
            }
            taken_over = PartitionAssignment::EMPTY;
        }
        if next <= Instant::now() {
            // Without partitions of its own, it only checks whether it could read the database.
            if !own.is_empty() || !*sweep.healthy.borrow() {
                after = sweep
                    .wake_due_tasks(clock::now() - DUE_GRACE_PERIOD, after, own)
                    .await
                    .flatten();
            } else {
                metrics::record_sweep(0, None);
            }
            next = Instant::now() + if after.is_some() { interval / 10 } else { interval };
        }
    }
}

struct Sweep {
    store: Store,
    supervisor: ActorRef<supervisor::Msg>,
    healthy: watch::Sender<bool>,
}

impl Sweep {
    /// Wakes the tasks that are due in `assignment`, after `after`. `None` when they cannot be
    /// read; otherwise where to continue, if there are more.
    async fn wake_due_tasks(
        &mut self,
        now: Timestamp,
        mut after: Option<DueTask>,
        assignment: PartitionAssignment,
    ) -> Option<Option<DueTask>> {
        let (mut woken, mut first) = (0, None);
        for _ in 0..MAX_BATCHES {
            let due = match self.store.sweep_due(now, after.as_ref(), BATCH_SIZE).await {
                Ok(due) => due,
                Err(error) => {
                    metrics::record_sweep_failure();
                    if self.set_healthy(false) {
                        tracing::warn!(error = %Chain(&error), "the sweep cannot read due tasks; retrying");
                    }
                    return None;
                }
            };
            if self.set_healthy(true) {
                tracing::info!("the sweep works again");
            }
            for &DueTask { organization, task, since } in
                due.iter().filter(|due| assignment.contains_task(due.task))
            {
                woken += 1;
                first.get_or_insert(since);
                // A task that is due for several reasons, or is being reconciled, is reconciled
                // once.
                let wake = supervisor::Msg::Wake {
                    task,
                    organization,
                    trace: Context::new(),
                    swept: true,
                };
                if self.supervisor.cast(wake).is_err() {
                    return Some(None);
                }
            }
            after = due.last().copied().filter(|_| due.len() == BATCH_SIZE as usize);
            if after.is_none() {
                break;
            }
        }
        metrics::record_sweep(woken, first);
        Some(after)
    }

    /// Publishes whether the database can be read. Returns whether that has changed. Receivers are
    /// only notified of changes.
    fn set_healthy(&self, healthy: bool) -> bool {
        self.healthy.send_if_modified(|was| std::mem::replace(was, healthy) != healthy)
    }
}

//! Finds tasks that nobody woke: what makes every lost message a delay and nothing more. Each
//! replica looks after its own partitions.
//!
//! A partition that comes from another replica is looked through at once, further ahead than usual:
//! the wakes that the other one had in its memory are gone with it.

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

/// Tasks read at a time.
const BATCH_SIZE: u32 = 500;
/// Times that are read in one look at most, lest it never end; the next one goes on from there.
const MAX_BATCHES: usize = 20;
/// A task that is due wakes itself where its actor lives; only one that did not is woken from here.
const DUE_GRACE_PERIOD: Duration = Duration::from_millis(500);
/// How soon a partition that was taken over is looked through again when that failed.
const TAKEOVER_RETRY_DELAY: Duration = Duration::from_millis(200);

/// Looks until told to stop. `able` says whether the database can be read: whoever cannot must not
/// keep partitions from others that can.
pub(crate) async fn run(
    store: Store,
    supervisor: ActorRef<supervisor::Msg>,
    mut share: watch::Receiver<PartitionAssignment>,
    healthy: watch::Sender<bool>,
    interval: Duration,
    stop: CancellationToken,
) -> Result<(), std::convert::Infallible> {
    let mut sweep = Sweep { store, supervisor, able: healthy };
    let (mut own, mut taken_over) = (PartitionAssignment::EMPTY, PartitionAssignment::EMPTY);
    // Where the last look ended, so that tasks which stay due, because looking at them fails, don't
    // hide those behind them.
    let mut after = None;
    let mut next = Instant::now();
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = sleep_until(next) => {}
            changed = share.changed() => if changed.is_err() { return Ok(()) },
        }
        let now = *share.borrow_and_update();
        taken_over = taken_over.union(now.difference(own)).intersection(now);
        own = now;
        if !taken_over.is_empty() {
            // To the end: nobody else knows of these tasks.
            let ahead = clock::now() + MAX_TIMER_DELAY;
            let mut from = None;
            let looked = loop {
                match sweep.wake_due_tasks(ahead, from, taken_over).await {
                    Some(Some(last)) if !stop.is_cancelled() => from = Some(last),
                    Some(_) => break true,
                    None => break false,
                }
            };
            if !looked {
                next = Instant::now() + TAKEOVER_RETRY_DELAY;
                continue;
            }
            taken_over = PartitionAssignment::EMPTY;
        }
        if next <= Instant::now() {
            // Without partitions of its own only whether it would be able to look after some.
            if !own.is_empty() || !*sweep.able.borrow() {
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
    able: watch::Sender<bool>,
}

impl Sweep {
    /// Hands over what is due in `share`, behind `after`. None when it cannot be read; else where
    /// to go on, if there is more.
    async fn wake_due_tasks(
        &mut self,
        now: Timestamp,
        mut after: Option<DueTask>,
        share: PartitionAssignment,
    ) -> Option<Option<DueTask>> {
        let (mut found, mut first) = (0, None);
        for _ in 0..MAX_BATCHES {
            let due = match self.store.sweep_due(now, after.as_ref(), BATCH_SIZE).await {
                Ok(due) => due,
                Err(error) => {
                    metrics::record_sweep_failure();
                    if self.set_healthy(false) {
                        tracing::warn!(error = %Chain(&error), "the sweep cannot read which tasks are due; it goes on trying");
                    }
                    return None;
                }
            };
            if self.set_healthy(true) {
                tracing::info!("the sweep works again");
            }
            for &DueTask { organization, task, since } in
                due.iter().filter(|due| share.contains_task(due.task))
            {
                found += 1;
                first.get_or_insert(since);
                // A task that is due for several reasons, or is looked at already, is looked at
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
        metrics::record_sweep(found, first);
        Some(after)
    }

    /// Says whether the database can be read; true when that is news. Whoever listens hears of
    /// changes only.
    fn set_healthy(&self, able: bool) -> bool {
        self.able.send_if_modified(|was| std::mem::replace(was, able) != able)
    }
}

//! Finds tasks that nobody woke: what makes every lost message a delay and nothing more.

use std::{collections::HashSet, time::Duration};

use construct_bus::{Bus, subject};
use construct_proto::mesh::v1::TaskWake;
use construct_store::{DueTask, Store};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

/// Tasks woken by one look at most; the rest is found by the next, which follows soon.
const BATCH: u32 = 500;
/// A task that is due wakes itself where its actor lives; only one that did not is woken from here.
const GRACE: Duration = Duration::from_millis(500);

/// Looks until told to stop.
pub(crate) async fn run(
    store: Store,
    bus: Bus,
    interval: Duration,
    stop: CancellationToken,
) -> Result<(), std::convert::Infallible> {
    let mut failing = false;
    // Where the last look ended, so that tasks which stay due, because looking at them fails, don't hide those behind them.
    let mut after: Option<DueTask> = None;
    loop {
        match store.sweep_due(Timestamp::now() - GRACE, after.as_ref(), BATCH).await {
            Ok(due) => {
                if std::mem::take(&mut failing) {
                    tracing::info!("the sweep works again");
                }
                wake(&bus, &due).await;
                after = due.last().copied().filter(|_| due.len() == BATCH as usize);
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "the sweep cannot read which tasks are due; it goes on trying");
                }
            }
        }
        let pause = if after.is_some() && !failing { interval / 10 } else { interval };
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// A wake that waits already says the same: under load a second one would only make the queue longer.
async fn wake(bus: &Bus, due: &[DueTask]) {
    let mut woken = HashSet::with_capacity(due.len());
    for DueTask { organization, task, .. } in due {
        // A task may be due for several reasons.
        if !woken.insert(*task) {
            continue;
        }
        let wake =
            TaskWake { organization_id: organization.to_string(), task_id: task.to_string(), reason: "due".to_owned() };
        if let Err(error) = bus.publish_unless_waiting(&subject::TaskWake::new(*task), &wake).await {
            tracing::debug!(%task, %error, "a due task could not be woken; a later sweep tries again");
            return;
        }
    }
}

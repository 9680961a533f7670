//! Finds tasks that nobody woke: what makes every lost message a delay and nothing more.

use std::time::Duration;

use construct_bus::{Bus, subject};
use construct_proto::mesh::v1::TaskWake;
use construct_store::Store;
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

/// Tasks woken by one look at most; the rest is found by the next, which follows at once.
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
    loop {
        let found = match store.sweep_due(Timestamp::now() - GRACE, BATCH).await {
            Ok(due) => {
                if std::mem::take(&mut failing) {
                    tracing::info!("the sweep works again");
                }
                for (organization, task) in &due {
                    let wake = TaskWake {
                        organization_id: organization.to_string(),
                        task_id: task.to_string(),
                        reason: "due".to_owned(),
                    };
                    if let Err(error) = bus.publish(&subject::TaskWake::new(*task), &wake).await {
                        tracing::debug!(%task, %error, "a due task could not be woken; the next sweep tries again");
                        break;
                    }
                }
                due.len()
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "the sweep cannot read which tasks are due; it goes on trying");
                }
                0
            }
        };
        let pause = if found == BATCH as usize { interval / 10 } else { interval };
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(pause) => {}
        }
    }
}

//! Makes the due runs of schedules.
//!
//! Every replica does it. A row that one replica processes is skipped by the others, and its row
//! records that a run was made. The wake that follows may be lost: then the sweep finds the
//! message.

use std::time::Duration;

use construct_bus::{Bus, subject};
use construct_proto::{mesh::v1::TaskWake, v1::event::Payload};
use construct_runtime::clock;
use construct_store::{FiredSchedule, NewEvent, RunEvents, Store, StoredMessage, StoredTask};
use construct_wire::{convert, record};
use tokio_util::sync::CancellationToken;

use crate::announce::Announcer;

/// Maximum number of schedules per pass. The next pass follows soon and continues where this one
/// ended.
const MAX_RUNS_PER_PASS: usize = 100;

/// Runs schedules.
#[derive(Debug)]
pub(crate) struct ScheduleRunner {
    pub(crate) store: Store,
    pub(crate) bus: Bus,
    pub(crate) announcer: Announcer,
}

fn task_created(task: &StoredTask) -> NewEvent {
    record::new("task.created", Payload::Task(Box::new(convert::task(task))), None)
}

fn message_created(message: &StoredMessage) -> NewEvent {
    record::new("message.created", Payload::Message(convert::message(message)), None)
}

impl ScheduleRunner {
    /// Runs until stopped.
    pub(crate) async fn run(
        self,
        interval: Duration,
        stop: CancellationToken,
    ) -> Result<(), std::convert::Infallible> {
        let (mut is_failing, mut after) = (false, None);
        loop {
            let (mut seen, mut failure) = (0, None);
            while seen < MAX_RUNS_PER_PASS && !stop.is_cancelled() {
                let (renderers, before) =
                    (RunEvents { task: task_created, message: message_created }, after);
                match self.store.schedule_fire(clock::now(), renderers, &mut after).await {
                    Ok(Some(fired)) => self.publish_run(fired).await,
                    Ok(None) => {
                        after = None;
                        break;
                    }
                    Err(error) => {
                        failure = Some(error);
                        // One failing schedule does not delay the others. Without the database, all
                        // fail.
                        if after == before {
                            after = None;
                            break;
                        }
                    }
                }
                seen += 1;
            }
            match failure {
                None if std::mem::take(&mut is_failing) => {
                    tracing::info!("schedules run again")
                }
                None => {}
                Some(error) if !std::mem::replace(&mut is_failing, true) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, "schedules cannot run; retrying");
                }
                Some(_) => {}
            }
            let pause = if seen == MAX_RUNS_PER_PASS { interval / 10 } else { interval };
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    async fn publish_run(&self, fired: FiredSchedule) {
        let schedule = fired.schedule;
        for reason in &fired.failures {
            tracing::warn!(schedule = %schedule.id, name = schedule.name, reason, "a run of a schedule failed");
        }
        self.announcer.announce(fired.events);
        for task in fired.tasks {
            let wake = TaskWake {
                organization_id: schedule.organization.to_string(),
                task_id: task.to_string(),
                reason: "scheduled".to_owned(),
            };
            if let Err(error) = self.bus.publish(&subject::TaskWake::new(task), &wake).await {
                tracing::debug!(%task, %error, "a wake of a scheduled message could not be published; the sweep finds it");
            }
        }
    }
}

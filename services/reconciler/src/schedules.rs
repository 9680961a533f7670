//! The clock: has the runs of schedules made that are due.
//!
//! Every replica looks; the row that one of them is at is passed by the others, and a run that was
//! made is known by its row. What is told of it afterwards may be lost: then the sweep finds the
//! message.

use std::time::Duration;

use construct_bus::{Bus, subject};
use construct_proto::{mesh::v1::TaskWake, v1::event::Payload};
use construct_runtime::clock;
use construct_store::{FiredSchedule, NewEvent, RunEvents, Store, StoredMessage, StoredTask};
use construct_wire::{convert, record};
use tokio_util::sync::CancellationToken;

use crate::announce::Announcer;

/// Schedules seen to in one look at most; the rest is seen to in the next, which follows soon and
/// goes on where this one ended.
const MAX_RUNS_PER_PASS: usize = 100;

/// What the clock works with.
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
    /// Looks until told to stop.
    pub(crate) async fn run(
        self,
        interval: Duration,
        stop: CancellationToken,
    ) -> Result<(), std::convert::Infallible> {
        let (mut failing, mut after) = (false, None);
        loop {
            let (mut seen, mut failure) = (0, None);
            while seen < MAX_RUNS_PER_PASS && !stop.is_cancelled() {
                let (told, before) =
                    (RunEvents { task: task_created, message: message_created }, after);
                match self.store.schedule_fire(clock::now(), told, &mut after).await {
                    Ok(Some(fired)) => self.publish_run(fired).await,
                    Ok(None) => {
                        after = None;
                        break;
                    }
                    Err(error) => {
                        failure = Some(error);
                        // The others are not kept waiting by one; without the database it is all of
                        // them.
                        if after == before {
                            after = None;
                            break;
                        }
                    }
                }
                seen += 1;
            }
            match failure {
                None if std::mem::take(&mut failing) => {
                    tracing::info!("schedules are seen to again")
                }
                None => {}
                Some(error) if !std::mem::replace(&mut failing, true) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, "schedules cannot be seen to; it is tried again");
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
        for words in &fired.failures {
            tracing::warn!(schedule = %schedule.id, name = schedule.name, reason = words, "a run of a schedule failed");
        }
        self.announcer.announce(fired.events);
        for task in fired.tasks {
            let wake = TaskWake {
                organization_id: schedule.organization.to_string(),
                task_id: task.to_string(),
                reason: "scheduled".to_owned(),
            };
            if let Err(error) = self.bus.publish(&subject::TaskWake::new(task), &wake).await {
                tracing::debug!(%task, %error, "a scheduled message could not be told of; the sweep finds it");
            }
        }
    }
}

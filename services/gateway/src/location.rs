//! The location of the command of a step in flight, and whether its task can be reconciled, for the
//! explanation of the task. No decision depends on it.

use std::time::Duration;

use construct_bus::{
    Bus, Pool, subject,
    topology::{self, ConsumerRow},
};
use construct_domain::task::{Stage, Step, StepState};
use construct_proto::mesh::v1::{ReconcileFailures, StepLocationQuery};
use construct_store::StoredTask;
use futures::future;

use crate::{deadline::Deadline, status::chain};

/// The timeout of the mesh, if the call has as much time. The explanation is given without it as
/// well.
const LOCATION_TIMEOUT: Duration = Duration::from_millis(200);

/// The location of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepLocation {
    /// It waits for a slot of its organization.
    WaitingForSlot {
        /// The organization's queued commands of the task's reconciler.
        queued: u32,
        /// The organization's commands that get a slot before it.
        ahead: u32,
    },
    /// In the queue; no worker has it.
    Queued,
    /// With a worker.
    WithWorker,
    /// Not in the queue: it is about to be sent, or its result is about to be handled.
    NotQueued,
}

/// What the mesh reports about a task within the timeout.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReconcilerReport {
    /// The location of its step's command.
    pub(crate) location: Option<StepLocation>,
    /// The consecutive reconcile failures of the task.
    pub(crate) failures: Option<ReconcileFailures>,
}

/// Asks the task's reconciler, and how far the queue was delivered.
pub(crate) async fn find(bus: &Bus, task: &StoredTask, deadline: Deadline) -> ReconcilerReport {
    let command = command(task);
    let mut question = StepLocationQuery {
        organization_id: task.state.organization.to_string(),
        task_id: task.state.id.to_string(),
        ..StepLocationQuery::default()
    };
    if let Some(Command { step, pool, .. }) = &command {
        question = StepLocationQuery {
            step_id: step.id.to_string(),
            round: step.round,
            pool: pool.as_ref().map(ToString::to_string).unwrap_or_default(),
            ..question
        };
    }
    let timeout = deadline.remaining(LOCATION_TIMEOUT);
    let report = bus.ask(&subject::StepLocation, &question, timeout);
    let reached = async {
        match &command {
            Some(command) => Some(bus.inspect_consumer(&command.queue).await),
            None => None,
        }
    };
    let Ok((report, reached)) = tokio::time::timeout(timeout, future::join(report, reached)).await
    else {
        return ReconcilerReport::default();
    };
    let report = match report {
        Ok(report) => report,
        Err(error) => {
            tracing::debug!(error = chain(&error), "the location of a step is unknown");
            return ReconcilerReport::default();
        }
    };
    let location = reached.and_then(|reached| {
        if report.waits_for_slot {
            return Some(StepLocation::WaitingForSlot {
                queued: report.in_flight,
                ahead: report.ahead,
            });
        }
        if report.sequence == 0 {
            return Some(StepLocation::NotQueued);
        }
        let queue = reached
            .inspect_err(|error| {
                tracing::debug!(error = chain(error), "a queue cannot be inspected")
            })
            .ok()?;
        let reached = queue.map_or(0, |queue| queue.reached);
        Some(if report.sequence > reached {
            StepLocation::Queued
        } else {
            StepLocation::WithWorker
        })
    });
    ReconcilerReport { location, failures: report.reconcile_failures }
}

/// The command of a step in flight.
struct Command<'a> {
    step: &'a Step,
    /// `None` for a model call.
    pool: Option<Pool>,
    queue: ConsumerRow,
}

fn command(task: &StoredTask) -> Option<Command<'_>> {
    let (turn, step) = (task.state.turn.as_ref()?, task.state.step.as_ref()?);
    if !matches!(step.state, StepState::InFlight { .. }) {
        return None;
    }
    Some(match turn.stage {
        Stage::Model | Stage::Compact { .. } => {
            Command { step, pool: None, queue: topology::model_consumer(&Pool::model_default()) }
        }
        Stage::Code { .. } => {
            let pool = Pool::new(&*task.compute).ok()?;
            Command { step, queue: topology::code_consumer(&pool), pool: Some(pool) }
        }
    })
}

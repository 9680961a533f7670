//! Where the command of a step in flight is, and whether its task can be looked at, for the
//! explanation of the task. Nothing is decided by it.

use std::time::Duration;

use construct_bus::{
    Bus, Pool, subject,
    topology::{self, ConsumerRow},
};
use construct_domain::task::{Stage, Step, StepState};
use construct_proto::mesh::v1::{FailedLooks, WhereaboutsQuestion};
use construct_store::StoredTask;
use futures::future;

use crate::{deadline::Deadline, status::chain};

/// How long the mesh has to say, if the call has as much time. Whoever asks what a task waits for
/// is answered without it, too.
const PATIENCE: Duration = Duration::from_millis(200);

/// Where a command is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whereabouts {
    /// Its organization has no place for it in the queue.
    Withheld {
        /// The organization's commands that the task's reconciler has there.
        standing: u32,
        /// The organization's commands that get a place before it.
        before: u32,
    },
    /// In the queue. No worker has had it.
    Queued,
    /// With a worker.
    Taken,
    /// Nowhere: it is about to be sent, or was carried out.
    Nowhere,
}

/// What the mesh says of a task, as far as it does so soon.
#[derive(Debug, Clone, Default)]
pub(crate) struct Found {
    /// Where its step's command is.
    pub(crate) command: Option<Whereabouts>,
    /// The reconciler's looks at it that have failed since the last one that went well.
    pub(crate) failed: Option<FailedLooks>,
}

/// Asks the reconciler that looks after the task, and the queue how far it was handed out.
pub(crate) async fn find(bus: &Bus, task: &StoredTask, deadline: Deadline) -> Found {
    let command = command(task);
    let mut question = WhereaboutsQuestion {
        organization_id: task.state.organization.to_string(),
        task_id: task.state.id.to_string(),
        ..WhereaboutsQuestion::default()
    };
    if let Some(Command { step, pool, .. }) = &command {
        question = WhereaboutsQuestion {
            step_id: step.id.to_string(),
            round: step.round,
            pool: pool.as_ref().map(ToString::to_string).unwrap_or_default(),
            ..question
        };
    }
    let patience = deadline.left(PATIENCE);
    let found = bus.ask(&subject::Whereabouts, &question, patience);
    let reached = async {
        match &command {
            Some(command) => Some(bus.inspect_consumer(&command.queue).await),
            None => None,
        }
    };
    let Ok((found, reached)) = tokio::time::timeout(patience, future::join(found, reached)).await
    else {
        return Found::default();
    };
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            tracing::debug!(error = chain(&error), "nobody says how a task stands");
            return Found::default();
        }
    };
    let place = reached.and_then(|reached| {
        if found.withheld {
            return Some(Whereabouts::Withheld { standing: found.standing, before: found.before });
        }
        if found.sequence == 0 {
            return Some(Whereabouts::Nowhere);
        }
        let queue = reached
            .inspect_err(|error| tracing::debug!(error = chain(error), "a queue cannot be asked"))
            .ok()?;
        let reached = queue.map_or(0, |queue| queue.reached);
        Some(if found.sequence > reached { Whereabouts::Queued } else { Whereabouts::Taken })
    });
    Found { command: place, failed: found.failed }
}

/// The command of a step in flight.
struct Command<'a> {
    step: &'a Step,
    /// None: it is a model call.
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

//! Where the command of a step in flight is, for the explanation of its task. Nothing is decided by it.

use std::time::Duration;

use construct_bus::{Bus, Pool, subject, topology};
use construct_domain::task::{Stage, StepState};
use construct_proto::mesh::v1::WhereaboutsQuestion;
use construct_store::StoredTask;
use futures::future;

use crate::{deadline::Deadline, status::chain};

/// How long the mesh has to say, if the call has as much time. Whoever asks what a task waits for is answered without it, too.
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

/// Asks the reconciler that looks after the task, and the queue how far it was handed out; none when that cannot be found out soon.
pub(crate) async fn find(bus: &Bus, task: &StoredTask, deadline: Deadline) -> Option<Whereabouts> {
    let (turn, step) = (task.state.turn.as_ref()?, task.state.step.as_ref()?);
    if !matches!(step.state, StepState::InFlight { .. }) {
        return None;
    }
    let (pool, queue) = match turn.stage {
        Stage::Model | Stage::Compact { .. } => (String::new(), topology::model_consumer(&Pool::model_default())),
        Stage::Code { .. } => (task.compute.clone(), topology::code_consumer(&Pool::new(&*task.compute).ok()?)),
    };
    let question = WhereaboutsQuestion {
        organization_id: task.state.organization.to_string(),
        task_id: task.state.id.to_string(),
        step_id: step.id.to_string(),
        round: step.round,
        pool,
    };
    let patience = deadline.left(PATIENCE);
    let found = bus.ask(&subject::Whereabouts, &question, patience);
    let asked = future::join(found, bus.inspect_consumer(&queue));
    let (found, queue) = tokio::time::timeout(patience, asked).await.ok()?;
    let found =
        found.inspect_err(|error| tracing::debug!(error = chain(error), "nobody says where a command is")).ok()?;
    if found.withheld {
        return Some(Whereabouts::Withheld { standing: found.standing, before: found.before });
    }
    if found.sequence == 0 {
        return Some(Whereabouts::Nowhere);
    }
    let queue = queue.inspect_err(|error| tracing::debug!(error = chain(error), "a queue cannot be asked")).ok()?;
    let reached = queue.map_or(0, |queue| queue.reached);
    Some(if found.sequence > reached { Whereabouts::Queued } else { Whereabouts::Taken })
}

//! Answers where the command of a step is, and whether its task can be reconciled, for diagnosis of
//! what a task waits for.

use construct_bus::{Bus, Pool, publish, subject, subscribe};
use construct_domain::{OrganizationId, StepId, TaskId};
use construct_proto::mesh::v1 as mesh;
use construct_runtime::telemetry::Chain;
use construct_wire::convert;
use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use crate::{
    failures::{FailingTasks, FailureStreak},
    in_flight::{CommandState, InFlightLimiter, Queue},
};

/// Answers until the service drains. Every reconciler is asked; the owner of the task's partition
/// answers.
pub(crate) async fn answer(
    limiter: InFlightLimiter,
    failing_tasks: FailingTasks,
    bus: Bus,
    stop: CancellationToken,
) -> Result<(), subscribe::Error> {
    let queries = bus.clone();
    let answer = move |question| {
        let (limiter, failing_tasks, bus) =
            (limiter.clone(), failing_tasks.clone(), queries.clone());
        Box::pin(async move { find_location(&limiter, &failing_tasks, &bus, question).await })
            as BoxFuture<'static, _>
    };
    bus.answer(&subject::StepLocation, stop, answer).await
}

/// Returns no answer when the location cannot be found out, or another process owns the task.
async fn find_location(
    limiter: &InFlightLimiter,
    failing_tasks: &FailingTasks,
    bus: &Bus,
    question: mesh::StepLocationQuery,
) -> Option<mesh::StepLocation> {
    let organization: OrganizationId = question.organization_id.parse().ok()?;
    let task: TaskId = question.task_id.parse().ok()?;
    if !limiter.is_assigned(task) {
        return None;
    }
    let location = mesh::StepLocation {
        reconcile_failures: failing_tasks.find(task).map(failure_streak),
        ..mesh::StepLocation::default()
    };
    if question.step_id.is_empty() {
        return Some(location);
    }
    let step: StepId = question.step_id.parse().ok()?;
    let queue = match question.pool.as_str() {
        "" => Queue::Model,
        pool => Queue::Code(Pool::new(pool).ok()?),
    };
    if let CommandState::Queued { in_flight, ahead } =
        limiter.command_state(organization, &queue, task, step)?
    {
        return Some(mesh::StepLocation {
            waits_for_slot: true,
            in_flight: saturating_u32(in_flight),
            ahead: saturating_u32(ahead),
            ..location
        });
    }
    match queue_position(bus, queue, task, step, question.round).await {
        Ok(sequence) => Some(mesh::StepLocation { sequence: sequence.unwrap_or(0), ..location }),
        Err(error) => {
            tracing::debug!(%task, error = %Chain(&error), "the location of a command cannot be found out");
            None
        }
    }
}

fn failure_streak(failed: FailureStreak) -> mesh::ReconcileFailures {
    let FailureStreak { since, count, error, next } = failed;
    mesh::ReconcileFailures {
        since: Some(convert::time(since)),
        count,
        error,
        next: Some(convert::time(next)),
    }
}

async fn queue_position(
    bus: &Bus,
    queue: Queue,
    task: TaskId,
    step: StepId,
    round: u32,
) -> Result<Option<u64>, publish::Error> {
    match queue {
        Queue::Model => {
            bus.queue_position(&subject::ModelInvoke::new(Pool::model_default(), task), step, round)
                .await
        }
        Queue::Code(pool) => {
            bus.queue_position(&subject::CodeExecute::new(pool, task), step, round).await
        }
    }
}

fn saturating_u32(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

//! Says where the command of a step is, and whether its task can be looked at, to people who ask
//! what the task waits for.

use construct_bus::{Bus, Pool, publish, subject, subscribe};
use construct_domain::{OrganizationId, StepId, TaskId};
use construct_proto::mesh::v1 as mesh;
use construct_runtime::telemetry::Chain;
use construct_wire::convert;
use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use crate::{
    failing::{FailedLooks, Failing},
    window::{Known, Queue, Window},
};

/// Answers until the service drains. Every reconciler is asked; the one that looks after the task
/// knows.
pub(crate) async fn answer(
    window: Window,
    failing: Failing,
    bus: Bus,
    stop: CancellationToken,
) -> Result<(), subscribe::Error> {
    let known = bus.clone();
    let answer = move |question| {
        let (window, failing, bus) = (window.clone(), failing.clone(), known.clone());
        Box::pin(async move { find(&window, &failing, &bus, question).await })
            as BoxFuture<'static, _>
    };
    bus.answer(&subject::Whereabouts, stop, answer).await
}

/// No answer when it cannot be found out, or is another process's to say.
async fn find(
    window: &Window,
    failing: &Failing,
    bus: &Bus,
    question: mesh::WhereaboutsQuestion,
) -> Option<mesh::Whereabouts> {
    let organization: OrganizationId = question.organization_id.parse().ok()?;
    let task: TaskId = question.task_id.parse().ok()?;
    if !window.is_ours(task) {
        return None;
    }
    let found =
        mesh::Whereabouts { failed: failing.find(task).map(told), ..mesh::Whereabouts::default() };
    if question.step_id.is_empty() {
        return Some(found);
    }
    let step: StepId = question.step_id.parse().ok()?;
    let queue = match question.pool.as_str() {
        "" => Queue::Model,
        pool => Queue::Code(Pool::new(pool).ok()?),
    };
    if let Known::Waits { held, before } = window.find(organization, &queue, task, step)? {
        return Some(mesh::Whereabouts {
            withheld: true,
            standing: count(held),
            before: count(before),
            ..found
        });
    }
    match queued_at(bus, queue, task, step, question.round).await {
        Ok(sequence) => Some(mesh::Whereabouts { sequence: sequence.unwrap_or(0), ..found }),
        Err(error) => {
            tracing::debug!(%task, error = %Chain(&error), "where a command is cannot be found out");
            None
        }
    }
}

fn told(failed: FailedLooks) -> mesh::FailedLooks {
    let FailedLooks { since, count, error, next } = failed;
    mesh::FailedLooks {
        since: Some(convert::time(since)),
        count,
        error,
        next: Some(convert::time(next)),
    }
}

async fn queued_at(
    bus: &Bus,
    queue: Queue,
    task: TaskId,
    step: StepId,
    round: u32,
) -> Result<Option<u64>, publish::Error> {
    match queue {
        Queue::Model => {
            bus.queued_at(&subject::ModelInvoke::new(Pool::model_default(), task), step, round)
                .await
        }
        Queue::Code(pool) => {
            bus.queued_at(&subject::CodeExecute::new(pool, task), step, round).await
        }
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

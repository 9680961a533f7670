//! Says where the command of a step is, to people who ask what its task waits for.

use construct_bus::{Bus, Pool, publish, subject, subscribe};
use construct_domain::{OrganizationId, StepId, TaskId};
use construct_proto::mesh::v1 as mesh;
use construct_runtime::telemetry::Chain;
use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use crate::window::{Known, Queue, Window};

/// Answers until the service drains. Every reconciler is asked; the one that looks after the task knows.
pub(crate) async fn answer(window: Window, bus: Bus, stop: CancellationToken) -> Result<(), subscribe::Error> {
    let known = bus.clone();
    let answer = move |question| {
        let (window, bus) = (window.clone(), known.clone());
        Box::pin(async move { find(&window, &bus, question).await }) as BoxFuture<'static, _>
    };
    bus.answer(&subject::Whereabouts, stop, answer).await
}

/// No answer when it cannot be found out, or is another process's to say.
async fn find(window: &Window, bus: &Bus, question: mesh::WhereaboutsQuestion) -> Option<mesh::Whereabouts> {
    let organization: OrganizationId = question.organization_id.parse().ok()?;
    let (task, step): (TaskId, StepId) = (question.task_id.parse().ok()?, question.step_id.parse().ok()?);
    let queue = match question.pool.as_str() {
        "" => Queue::Model,
        pool => Queue::Code(Pool::new(pool).ok()?),
    };
    if let Known::Waits { held, before } = window.find(organization, &queue, task, step)? {
        let (standing, before) = (count(held), count(before));
        return Some(mesh::Whereabouts { withheld: true, standing, before, sequence: 0 });
    }
    match queued_at(bus, queue, task, step, question.round).await {
        Ok(sequence) => Some(mesh::Whereabouts { sequence: sequence.unwrap_or(0), ..mesh::Whereabouts::default() }),
        Err(error) => {
            tracing::debug!(%task, error = %Chain(&error), "where a command is cannot be found out");
            None
        }
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
        Queue::Model => bus.queued_at(&subject::ModelInvoke::new(Pool::model_default(), task), step, round).await,
        Queue::Code(pool) => bus.queued_at(&subject::CodeExecute::new(pool, task), step, round).await,
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

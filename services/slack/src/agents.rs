//! Which agent is talked to: a task can be handed over to another one at any time, by its own
//! script or by somebody else, so that the gateway is asked. What is written down about a thread
//! says only who has begun with it.

use construct_proto::v1;
use construct_store::slack::{Place, Thread};
use jiff::Timestamp;

use crate::{
    Shared,
    gateway::{Caller, call},
    mention::Trouble,
    teams::Team,
};

/// The agent that answers in a thread: the one of its task, or of what has begun it, or the
/// workspace's.
pub(crate) async fn of_thread(
    shared: &Shared,
    team: &Team,
    place: &Place,
    event: &serde_json::Value,
) -> Result<String, Trouble> {
    match shared.store.slack_thread(place).await {
        Ok(thread) if thread.task.is_some() => return now(shared, &team.caller, &thread).await,
        Ok(_) | Err(construct_store::Error::NotFound { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(event["construct_agent"].as_str().unwrap_or(&team.installation.agent).to_owned())
}

/// The agent of a thread's task; where there is none any more, or not yet, the one that the next
/// task would have.
pub(crate) async fn now(
    shared: &Shared,
    caller: &Caller,
    thread: &Thread,
) -> Result<String, Trouble> {
    let found = match &thread.task {
        Some(task) => get(shared, caller, task).await?.map(agent),
        None => None,
    };
    Ok(found.unwrap_or_else(|| thread.agent.clone()))
}

/// Whose call waits for a decision.
pub(crate) struct Asking {
    /// The agent.
    pub(crate) agent: String,
    /// When the thread's task began the subtask that the call is below of; none when the call is
    /// the thread's task's own.
    pub(crate) begun: Option<Timestamp>,
}

/// Who asks in a task, if the task is the one of a thread or somewhere below it.
pub(crate) async fn within(
    shared: &Shared,
    caller: &Caller,
    task: &str,
    root: &str,
) -> Result<Option<Asking>, Trouble> {
    let (mut id, mut asks, mut begun) = (task.to_owned(), None, None);
    while !id.is_empty() {
        let Some(found) = get(shared, caller, &id).await? else { return Ok(None) };
        let parent = found.status.as_ref().map(|status| status.parent.clone()).unwrap_or_default();
        let made = found.metadata.as_ref().and_then(|metadata| metadata.created_at);
        let agent = asks.get_or_insert_with(|| agent(found)).clone();
        if id == root {
            return Ok(Some(Asking { agent, begun }));
        }
        begun = made.and_then(|at| Timestamp::new(at.seconds, at.nanos).ok());
        id = parent;
    }
    Ok(None)
}

/// Whether something below a task is not at rest. What somebody has suspended does nothing, perhaps
/// for ever.
pub(crate) async fn at_work_below(
    shared: &Shared,
    caller: &Caller,
    task: &str,
) -> Result<bool, Trouble> {
    let Some(found) = get(shared, caller, task).await? else { return Ok(false) };
    let status = found.status.unwrap_or_default();
    // A gateway that does not say so is of the version before, and soon replaced.
    Ok(!status.subtasks.is_empty() && status.below.is_none_or(|below| below.at_work > 0))
}

fn agent(task: v1::Task) -> String {
    task.spec.unwrap_or_default().agent
}

/// A task, unless it is deleted.
async fn get(shared: &Shared, caller: &Caller, task: &str) -> Result<Option<v1::Task>, Trouble> {
    let request = shared.gateway.request(caller, v1::GetTaskRequest { task: task.to_owned() });
    match call(shared.gateway.tasks().get_task(request)).await {
        Ok(found) => Ok(Some(found)),
        Err(status) if status.code() == tonic::Code::NotFound => Ok(None),
        Err(status) => Err(status.into()),
    }
}

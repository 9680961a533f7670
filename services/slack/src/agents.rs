//! Which agent answers in a thread. A task can be handed over to another agent at any time, by its
//! own script or by a user, so the gateway is asked. The row of a thread only records its first
//! agent.

use construct_proto::v1;
use construct_store::slack::{Thread, ThreadKey};
use jiff::Timestamp;

use crate::{
    error::Error,
    gateway::{Caller, call},
    shared::Shared,
    teams::Team,
};

/// The agent that answers in a thread: that of its task, or of the command that started it, or the
/// workspace's.
pub(crate) async fn agent_of_thread(
    shared: &Shared,
    team: &Team,
    thread_key: &ThreadKey,
    event: &serde_json::Value,
) -> Result<String, Error> {
    match shared.store.slack_thread(thread_key).await {
        Ok(thread) if thread.task.is_some() => {
            return current_agent(shared, &team.caller, &thread).await;
        }
        Ok(_) | Err(construct_store::Error::NotFound { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(event["construct_agent"].as_str().unwrap_or(&team.installation.agent).to_owned())
}

/// The agent of a thread's task. Without a task, the agent that the next task would have.
pub(crate) async fn current_agent(
    shared: &Shared,
    caller: &Caller,
    thread: &Thread,
) -> Result<String, Error> {
    let found = match &thread.task {
        Some(task) => get_task(shared, caller, task).await?.map(agent_name),
        None => None,
    };
    Ok(found.unwrap_or_else(|| thread.agent.clone()))
}

/// The origin of a call that waits for a decision.
pub(crate) struct ApprovalRequester {
    /// The agent of the calling task.
    pub(crate) agent: String,
    /// When the thread's task created the subtask that the call comes from; none when the thread's
    /// task made the call itself.
    pub(crate) subtask_created_at: Option<Timestamp>,
}

/// Finds the requester of a task that is the root task or one of its descendants.
pub(crate) async fn find_requester(
    shared: &Shared,
    caller: &Caller,
    task: &str,
    root: &str,
) -> Result<Option<ApprovalRequester>, Error> {
    let (mut id, mut asks, mut begun) = (task.to_owned(), None, None);
    while !id.is_empty() {
        let Some(found) = get_task(shared, caller, &id).await? else { return Ok(None) };
        let parent = found.status.as_ref().map(|status| status.parent.clone()).unwrap_or_default();
        let made = found.metadata.as_ref().and_then(|metadata| metadata.created_at);
        let agent = asks.get_or_insert_with(|| agent_name(found)).clone();
        if id == root {
            return Ok(Some(ApprovalRequester { agent, subtask_created_at: begun }));
        }
        begun = made.and_then(|at| Timestamp::new(at.seconds, at.nanos).ok());
        id = parent;
    }
    Ok(None)
}

/// Whether a task has active subtasks. Suspended subtasks do not count: they may do nothing
/// forever.
pub(crate) async fn has_active_subtasks(
    shared: &Shared,
    caller: &Caller,
    task: &str,
) -> Result<bool, Error> {
    let Some(found) = get_task(shared, caller, task).await? else { return Ok(false) };
    let status = found.status.unwrap_or_default();
    // An older gateway does not report this; it is replaced soon.
    Ok(!status.subtasks.is_empty() && status.subtask_totals.is_none_or(|totals| totals.active > 0))
}

fn agent_name(task: v1::Task) -> String {
    task.spec.unwrap_or_default().agent
}

/// Returns a task, unless it was deleted.
async fn get_task(shared: &Shared, caller: &Caller, task: &str) -> Result<Option<v1::Task>, Error> {
    let request = shared.gateway.request(caller, v1::GetTaskRequest { task: task.to_owned() });
    match call(shared.gateway.tasks().get_task(request)).await {
        Ok(found) => Ok(Some(found)),
        Err(status) if status.code() == tonic::Code::NotFound => Ok(None),
        Err(status) => Err(status.into()),
    }
}

//! Which agent is talked to: a task can be handed over to another one at any time, by its own script or by somebody else, so that the
//! gateway is asked. What is written down about a thread says only who has begun with it.

use construct_proto::v1::{self, TaskPhase, list_tasks_request};
use construct_store::slack::{Place, Thread};
use jiff::Timestamp;

use crate::{
    Shared,
    gateway::{Caller, call},
    mention::Trouble,
    teams::Team,
};

/// Subtasks that are looked at in one call.
const PAGE: i32 = 100;
/// Subtasks of a tree that are looked at, of those that a tree can have: what is not looked at is neither waited for nor summed up.
const TREE: usize = 2_000;

/// The agent that answers in a thread: the one of its task, or of what has begun it, or the workspace's.
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

/// The agent of a thread's task; where there is none any more, or not yet, the one that the next task would have.
pub(crate) async fn now(shared: &Shared, caller: &Caller, thread: &Thread) -> Result<String, Trouble> {
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
    /// When the thread's task began the subtask that the call is below of; none when the call is the thread's task's own.
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

/// Whether something below a task is not at rest.
pub(crate) async fn at_work_below(shared: &Shared, caller: &Caller, task: &str) -> Result<bool, Trouble> {
    let mut at_work = false;
    below(shared, caller, task, |status| {
        // One that somebody has suspended does nothing, perhaps for ever.
        let rests = matches!(status.phase(), TaskPhase::AwaitInput | TaskPhase::Suspended);
        at_work = !rests || status.phase() == TaskPhase::AwaitInput && status.queued_count > 0;
        !at_work
    })
    .await
    .map(|is_all| at_work || !is_all)
}

/// What everything below a task has cost, in 10^-12 dollars.
pub(crate) async fn cost_below(shared: &Shared, caller: &Caller, task: &str) -> Result<i64, Trouble> {
    let mut cost = 0_i64;
    below(shared, caller, task, |status| {
        cost = cost.saturating_add(status.usage.as_ref().map_or(0, |usage| usage.cost_pico_usd));
        true
    })
    .await?;
    Ok(cost)
}

/// Looks at everything below a task while it is wanted. False when there is more than is looked at.
async fn below(
    shared: &Shared,
    caller: &Caller,
    task: &str,
    mut look: impl FnMut(&v1::TaskStatus) -> bool + Send,
) -> Result<bool, Trouble> {
    let (mut parents, mut looked) = (vec![task.to_owned()], 0);
    while let Some(parent) = parents.pop() {
        let mut page_token = String::new();
        loop {
            let request = v1::ListTasksRequest {
                page: Some(v1::PageRequest { page_size: PAGE, page_token, ..v1::PageRequest::default() }),
                filter: Some(list_tasks_request::Filter { parent: parent.clone(), ..Default::default() }),
            };
            let request = shared.gateway.request(caller, request);
            let found = call(shared.gateway.tasks().list_tasks(request)).await?;
            for task in found.tasks {
                let status = task.status.unwrap_or_default();
                looked += 1;
                if !look(&status) {
                    return Ok(true);
                }
                if looked == TREE {
                    return Ok(false);
                }
                if !status.subtasks.is_empty() {
                    parents.push(task.metadata.unwrap_or_default().id);
                }
            }
            page_token = found.page.unwrap_or_default().next_page_token;
            if page_token.is_empty() {
                break;
            }
        }
    }
    Ok(true)
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

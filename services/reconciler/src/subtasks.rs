//! Subtasks: handles requests of scripts about tasks, and wakes parents and subtasks after commits.

use std::{sync::Arc, time::Duration};

use construct_bus::{Bus, subject, subscribe};
use construct_domain::{
    AgentId, MessageId, OrganizationId, TaskId,
    message::{Block, Content},
    subtask::{CallIds, Limits, MAX_WAIT, Refusal},
    task::TurnOutcome,
};
use construct_proto::{
    mesh::v1::{self as mesh, TaskWake, subtask_question::Ask},
    v1::{self, event::Payload},
};
use construct_runtime::{clock, telemetry::Chain};
use construct_store::{
    Error, LoadedTask, NewEvent, NewSubtask, ScriptCaller, Store, StoredMessage, StoredTask,
    SubtaskChange, SubtaskEvents, SubtaskState, SubtaskStatus,
};
use construct_wire::{convert, record};
use futures::future::BoxFuture;
use jiff::{SignedDuration, Timestamp};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_util::sync::CancellationToken;

use crate::{announce::Announcer, reconcile::Reconciler};

/// A wait with less than this remaining is over. The clocks of two reconcilers may differ by as
/// much, and a script that one has resumed must not be suspended again by the other.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_secs(1);
/// Maximum size of all answers in one reply: the limit of NATS, with room for the rest.
const MAX_ANSWERS_BYTES: usize = 512 * 1024;
/// Maximum size of one answer.
const MAX_ANSWER_BYTES: usize = 64 * 1024;
/// Subtasks per page of a list, as in the API.
const PAGE_SIZE: u32 = 100;
/// Maximum number of concurrent queries of whole trees, so that they leave database connections for
/// tasks that start and end. A request waits for [`TREE_QUERY_TIMEOUT`], and is then repeated.
const MAX_TREE_QUERIES: usize = 4;
/// Shorter than the timeout of the requester.
const TREE_QUERY_TIMEOUT: Duration = Duration::from_secs(1);

const EVENT_RENDERERS: SubtaskEvents = SubtaskEvents {
    task: task_created,
    spawned: subtask_spawned,
    changed: task_updated,
    message: message_created,
};

fn task_created(task: &StoredTask) -> NewEvent {
    record::new("task.created", Payload::Task(Box::new(convert::task(task))), None)
}

fn task_updated(task: &StoredTask) -> NewEvent {
    record::new("task.updated", Payload::Task(Box::new(convert::task(task))), None)
}

fn subtask_spawned(task: &StoredTask) -> NewEvent {
    let subtask = v1::Subtask {
        task: task.state.id.to_string(),
        agent: task.agent_name.clone(),
        title: task.title.clone(),
    };
    record::new("subtask.spawned", Payload::Subtask(subtask), None)
}

fn message_created(message: &StoredMessage) -> NewEvent {
    record::new("message.created", Payload::Message(convert::message(message)), None)
}

fn task_deleted(task: TaskId) -> NewEvent {
    record::new("task.deleted", Payload::Deleted(v1::Deleted { id: task.to_string() }), None)
}

/// Handles requests of scripts.
#[derive(Debug, Clone)]
struct SubtaskService {
    store: Store,
    bus: Bus,
    announcer: Announcer,
    limits: Limits,
    /// Limits tree queries, see [`MAX_TREE_QUERIES`].
    tree_queries: Arc<Semaphore>,
}

/// Answers until the service drains.
pub(crate) async fn answer(
    store: Store,
    bus: Bus,
    announcer: Announcer,
    limits: Limits,
    stop: CancellationToken,
) -> Result<(), subscribe::Error> {
    let service = Arc::new(SubtaskService {
        store,
        bus: bus.clone(),
        announcer,
        limits,
        tree_queries: Arc::new(Semaphore::new(MAX_TREE_QUERIES)),
    });
    let answer = move |question| {
        let service = Arc::clone(&service);
        Box::pin(async move { service.answer(question).await }) as BoxFuture<'static, _>
    };
    bus.answer(&subject::Subtasks, stop, answer).await
}

impl SubtaskService {
    /// Returns no answer when the request cannot be handled now. The requester repeats it, and a
    /// repeated call has the same effect once.
    async fn answer(&self, question: mesh::SubtaskQuestion) -> Option<mesh::SubtaskAnswer> {
        match self.handle(question).await {
            Ok(Ok(Some(answer))) => Some(answer),
            Ok(Ok(None)) => {
                tracing::warn!(
                    "a request about subtasks is not answered, because too many tree queries are running"
                );
                None
            }
            Ok(Err(refused)) => Some(refusal(refused.error_name(), refused.to_string())),
            Err(error @ Error::NotFound { .. }) => {
                Some(refusal("AgentNotFound", error.to_string()))
            }
            Err(error) if error.is_retryable() => {
                tracing::warn!(error = %Chain(&error), "a request about subtasks is not answered");
                None
            }
            Err(error) => {
                tracing::error!(error = %Chain(&error), "a request about subtasks failed");
                Some(refusal(
                    "InternalError",
                    "it failed inside Construct, not because of its arguments.".to_owned(),
                ))
            }
        }
    }

    async fn handle(
        &self,
        question: mesh::SubtaskQuestion,
    ) -> Result<Result<Option<mesh::SubtaskAnswer>, Refusal>, Error> {
        let ids =
            (question.organization_id.parse(), question.task_id.parse(), question.step_id.parse());
        // The consumer checks the ids.
        let (Ok(organization), Ok(task), Ok(step)) = ids else {
            return Ok(Err(Refusal::ScriptOver));
        };
        let caller = ScriptCaller { organization, task, step };
        let calls = CallIds::for_call(step, question.script, question.number);
        let now = clock::now();
        let changed = match question.ask {
            None => return Ok(Err(Refusal::ScriptOver)),
            Some(Ask::List(list)) => return self.list(caller, &list.after).await,
            Some(Ask::Await(wait)) => return self.wait(caller, wait, now).await,
            Some(Ask::Spawn(spawn)) => {
                let agent = match spawn.agent.as_str() {
                    "" => None,
                    agent => match self.resolve_agent(organization, agent).await? {
                        Ok(agent) => Some(agent),
                        Err(refused) => return Ok(Err(refused)),
                    },
                };
                let new = NewSubtask {
                    ids: calls,
                    agent,
                    content: text_content(spawn.message),
                    title: spawn.title,
                    budget: (spawn.budget_pico_usd > 0).then_some(spawn.budget_pico_usd),
                };
                self.store.subtask_spawn(caller, new, self.limits, EVENT_RENDERERS, now).await?
            }
            Some(Ask::Send(send)) => match send.task.parse() {
                Ok(child) => {
                    self.store
                        .subtask_send(
                            caller,
                            child,
                            calls.message,
                            text_content(send.message),
                            EVENT_RENDERERS,
                            now,
                        )
                        .await?
                }
                Err(_) => return Ok(Err(Refusal::NotASubtask(send.task))),
            },
            Some(Ask::ParentMessage(message)) => {
                self.send_to_parent(caller, calls.message, message, now).await?
            }
            Some(Ask::HandOffAgent(agent)) => {
                let agent_id = match self.resolve_agent(organization, &agent).await? {
                    Ok(agent_id) => agent_id,
                    Err(refused) => return Ok(Err(refused)),
                };
                let change =
                    self.store.task_hand_off(caller, agent_id, EVENT_RENDERERS, now).await?;
                return Ok(change.map(|change| {
                    self.announcer.announce(change.events);
                    Some(mesh::SubtaskAnswer { agent, ..mesh::SubtaskAnswer::default() })
                }));
            }
        };
        let SubtaskChange { task, events } = match changed {
            Ok(changed) => changed,
            Err(refused) => return Ok(Err(refused)),
        };
        self.announcer.announce(events);
        publish_wake(&self.bus, organization, task, "a script").await;
        Ok(Ok(Some(mesh::SubtaskAnswer {
            spawned: task.to_string(),
            ..mesh::SubtaskAnswer::default()
        })))
    }

    /// Resolves an agent by name. An id is rejected, because policies decide by the name in the
    /// call.
    async fn resolve_agent(
        &self,
        organization: OrganizationId,
        name: &str,
    ) -> Result<Result<AgentId, Refusal>, Error> {
        let unknown = || Refusal::UnknownAgent(name.to_owned());
        if name.parse::<AgentId>().is_ok() {
            return Ok(Err(unknown()));
        }
        match self.store.agent_resolve(organization, name).await {
            Ok(agent) => Ok(Ok(agent)),
            Err(Error::NotFound { .. }) => Ok(Err(unknown())),
            Err(error) => Err(error),
        }
    }

    async fn send_to_parent(
        &self,
        caller: ScriptCaller,
        id: MessageId,
        message: String,
        now: Timestamp,
    ) -> Result<Result<SubtaskChange, Refusal>, Error> {
        let content = |title: &str| {
            let title = if title.is_empty() { String::new() } else { format!(" ({title})") };
            text_content(format!("[Message of the subtask {}{title}]\n\n{message}", caller.task))
        };
        self.store.subtask_message_parent(caller, id, content, EVENT_RENDERERS, now).await
    }

    /// The states of subtasks, and whether the wait for them is over. While it is not, the states
    /// are omitted.
    async fn wait(
        &self,
        caller: ScriptCaller,
        wait: mesh::subtask_question::Await,
        now: Timestamp,
    ) -> Result<Result<Option<mesh::SubtaskAnswer>, Refusal>, Error> {
        let mut tasks = Vec::with_capacity(wait.tasks.len());
        for task in wait.tasks {
            match task.parse() {
                Ok(task) => tasks.push(task),
                Err(_) => return Ok(Err(Refusal::NotASubtask(task))),
            }
        }
        let until = wait.until.and_then(convert::to_time).unwrap_or(now + MAX_WAIT);
        let in_time = now + MAX_CLOCK_SKEW < until;
        if in_time && self.store.subtasks_at_work(caller.organization, caller.task, &tasks).await? {
            return Ok(Ok(Some(mesh::SubtaskAnswer::default())));
        }
        let Some(_permit) = self.start_tree_query().await else { return Ok(Ok(None)) };
        let states = match self.store.subtasks(caller.organization, caller.task, &tasks).await? {
            Ok(states) => states,
            Err(refused) => return Ok(Err(refused)),
        };
        // One may have received a message since.
        let at_work = |state: &SubtaskState| {
            matches!(state.status, SubtaskStatus::Running | SubtaskStatus::Suspended)
        };
        let over = !in_time || !states.iter().any(at_work);
        Ok(Ok(Some(mesh::SubtaskAnswer { over, ..subtasks_answer(states) })))
    }

    /// A page of the subtasks of a task, after this one.
    async fn list(
        &self,
        caller: ScriptCaller,
        after: &str,
    ) -> Result<Result<Option<mesh::SubtaskAnswer>, Refusal>, Error> {
        let after = match after {
            "" => None,
            after => match after.parse() {
                Ok(after) => Some(after),
                Err(_) => return Ok(Err(Refusal::NotASubtask(after.to_owned()))),
            },
        };
        let Some(_permit) = self.start_tree_query().await else { return Ok(Ok(None)) };
        let mut states =
            self.store.subtask_list(caller.organization, caller.task, after, PAGE_SIZE + 1).await?;
        let more = states.len() > PAGE_SIZE as usize;
        states.truncate(PAGE_SIZE as usize);
        Ok(Ok(Some(mesh::SubtaskAnswer { more, ..subtasks_answer(states) })))
    }

    /// Acquires a permit for a tree query; `None` when too many run for too long.
    async fn start_tree_query(&self) -> Option<SemaphorePermit<'_>> {
        tokio::time::timeout(TREE_QUERY_TIMEOUT, self.tree_queries.acquire()).await.ok()?.ok()
    }
}

fn subtasks_answer(states: Vec<SubtaskState>) -> mesh::SubtaskAnswer {
    let longest = (MAX_ANSWERS_BYTES / states.len().max(1)).min(MAX_ANSWER_BYTES);
    let tasks = states.into_iter().map(|task| subtask_state(task, longest)).collect();
    mesh::SubtaskAnswer { tasks, ..mesh::SubtaskAnswer::default() }
}

fn refusal(name: &str, message: String) -> mesh::SubtaskAnswer {
    let refused = mesh::subtask_answer::Refusal { name: name.to_owned(), message };
    mesh::SubtaskAnswer { refused: Some(refused), ..mesh::SubtaskAnswer::default() }
}

fn text_content(text: String) -> Content {
    Content { blocks: vec![Block::Text(text)] }
}

/// The state of a subtask for a script. Its answer has at most `longest` bytes.
fn subtask_state(state: SubtaskState, longest: usize) -> mesh::SubtaskState {
    let SubtaskState { task, agent, title, status, answer, error, cost_pico_usd } = state;
    let is_complete = status == SubtaskStatus::Ended(TurnOutcome::Completed);
    let texts = answer.blocks.iter().filter_map(|block| match block {
        Block::Text(text) => Some(text.as_str()),
        _ => None,
    });
    let mut answer = if is_complete { texts.collect::<Vec<_>>().join("\n") } else { String::new() };
    let end = answer.floor_char_boundary(longest);
    let answer_left_out = (answer.len() - end) as u64;
    answer.truncate(end);
    let failed = matches!(status, SubtaskStatus::Ended(_)) && !is_complete;
    let status = match status {
        SubtaskStatus::Running => "running",
        SubtaskStatus::Suspended => "suspended",
        SubtaskStatus::Ended(outcome) => outcome.as_str(),
        SubtaskStatus::Deleted => "deleted",
    };
    mesh::SubtaskState {
        task: task.to_string(),
        agent,
        title,
        status: status.to_owned(),
        answer,
        error: if failed { error } else { String::new() },
        cost_pico_usd,
        answer_left_out,
    }
}

/// Wakes a task. A lost wake is found by the sweep.
async fn publish_wake(bus: &Bus, organization: OrganizationId, task: TaskId, reason: &str) {
    let wake = TaskWake {
        organization_id: organization.to_string(),
        task_id: task.to_string(),
        reason: reason.to_owned(),
    };
    if let Err(error) = bus.publish(&subject::TaskWake::new(task), &wake).await {
        tracing::debug!(%task, %error, "a task could not be woken; the sweep finds it");
    }
}

impl Reconciler {
    /// Cancels the running subtasks of a canceled task. The cancel stays in the task's row until a
    /// later commit has ended the turn.
    pub(crate) async fn cancel_subtasks(
        &self,
        loaded: &LoadedTask,
        now: Timestamp,
    ) -> Result<(), Error> {
        let Some(reason) = &loaded.task.cancel else { return Ok(()) };
        let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        let reason = format!("its parent task was cancelled{reason}");
        for task in self.store.subtasks_cancel(loaded, &reason, now).await? {
            publish_wake(&self.bus, loaded.task.organization, task, "cancelled").await;
        }
        Ok(())
    }

    /// Wakes the parent, which may wait for this task.
    pub(crate) async fn wake_parent(&self, loaded: &LoadedTask) {
        if let Some(parent) = loaded.parent {
            publish_wake(&self.bus, loaded.task.organization, parent, "a subtask").await;
        }
    }

    /// Removes a deleted task, and deletes its subtasks.
    pub(crate) async fn purge_tree(&self, loaded: &LoadedTask) -> Result<(), Error> {
        let children = self.store.task_purge(loaded.task.id, task_deleted, clock::now()).await?;
        for child in children.unwrap_or_default() {
            publish_wake(&self.bus, loaded.task.organization, child, "deleted").await;
        }
        self.wake_parent(loaded).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use construct_domain::TaskId;
    use uuid::Uuid;

    use super::*;

    #[test]
    fn long_answer_is_cut_between_characters_and_the_rest_is_counted() {
        let ended = |answer: &str| SubtaskState {
            task: TaskId::from_uuid(Uuid::nil()),
            agent: String::new(),
            title: String::new(),
            status: SubtaskStatus::Ended(TurnOutcome::Completed),
            answer: text_content(answer.to_owned()),
            error: String::new(),
            cost_pico_usd: 0,
        };
        for (answer, told, left_out) in
            [("abcd", "abcd", 0), ("abcde", "abcd", 1), ("abc\u{20ac}d", "abc", 4)]
        {
            let state = subtask_state(ended(answer), 4);
            assert_eq!(
                (state.answer.as_str(), state.answer_left_out),
                (told, left_out),
                "{answer}"
            );
        }
    }
}

//! Progress while an agent works: one line, edited in place at most once a second. Edits are
//! skipped while Slack limits the rate.

use std::{collections::VecDeque, sync::atomic::Ordering, time::Duration};

use construct_proto::v1::{self, TaskPhase, event::Payload};
use construct_store::slack::Mention;
use futures::StreamExt as _;
use tokio::time::{Instant, MissedTickBehavior, sleep_until};
use tonic::Streaming;

use crate::{
    approvals,
    error::Error,
    gateway::{Caller, call},
    mrkdwn::{self, escape},
    posts::Posts,
    shared::Shared,
    texts,
    web::{chat, chat::Content},
};

/// The minimum time between two edits.
const EDIT_INTERVAL: Duration = Duration::from_secs(1);
/// Edits after which they become rarer, because all threads of a workspace share Slack's limit.
const QUICK_EDITS: u32 = 20;
/// The minimum time between later edits.
const SLOW_EDIT_INTERVAL: Duration = Duration::from_secs(4);
/// How often the message is read when its events say nothing.
const POLL_INTERVAL: Duration = Duration::from_secs(3);
/// How long a question is followed at least, even when others wait.
const MIN_FOLLOW_TIME: Duration = Duration::from_secs(30);
/// Calls that are shown at most.
const MAX_CALLS: usize = 4;
/// Characters of a call's arguments at most.
const MAX_ARGUMENT_CHARS: usize = 120;

/// The stored note of a mention whose task is suspended.
pub(crate) const SUSPENDED: &str = "its task is suspended";

/// Why following a question ended.
pub(crate) enum FollowOutcome {
    /// Its turn ended.
    TurnEnded(Box<v1::Message>),
    /// A person has to decide about a call, or to resume the task.
    AwaitsPerson {
        /// Whether a decision is needed.
        decision: bool,
    },
    /// It takes long, and other mentions wait for a slot.
    Yielded,
}

/// The state of a question.
enum QuestionState {
    /// Following it ended.
    Settled(FollowOutcome),
    /// The agent works on it.
    Running,
    /// The agent works on it, and subtasks exist that may request approvals.
    RunningWithSubtasks {
        /// Whether the task only waits for them.
        waiting: bool,
    },
}

/// The displayed progress.
#[derive(Debug, Default)]
struct ProgressView {
    calls: VecDeque<String>,
    count: u32,
    writing: bool,
    changed: bool,
    edits: u32,
}

/// Follows a question until its turn ends or waits for a person, or other mentions need the slot.
pub(crate) async fn follow(
    shared: &Shared,
    (posts, caller): (&Posts<'_>, &Caller),
    mention: &Mention,
    (task, message): (&str, &str),
    placeholder: &str,
) -> Result<FollowOutcome, Error> {
    let thread_key = mention.thread_key();
    let mut events = subscribe(shared, caller, task).await.ok();
    // The message still says that the task is suspended.
    let mut view = ProgressView { changed: is_suspended(mention), ..ProgressView::default() };
    let (mut polls, mut edits) =
        (tokio::time::interval(POLL_INTERVAL), tokio::time::interval(EDIT_INTERVAL));
    polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
    edits.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let began = Instant::now();
    let mut last_edit = began;
    loop {
        let poll_now = tokio::select! {
            biased;
            event = next_event(&mut events) => match event {
                Some(Ok(event)) => view.apply(&event, message),
                // Polling is enough until the next poll subscribes again.
                Some(Err(_)) | None => {
                    events = None;
                    false
                }
            },
            _ = polls.tick() => {
                if events.is_none() {
                    events = subscribe(shared, caller, task).await.ok();
                }
                true
            }
            _ = edits.tick() => {
                let pause = if view.edits < QUICK_EDITS { EDIT_INTERVAL } else { SLOW_EDIT_INTERVAL };
                if view.changed && last_edit.elapsed() >= pause {
                    view.changed = false;
                    view.edits += 1;
                    last_edit = Instant::now();
                    posts.lease.check()?;
                    let content = view.content();
                    let result = chat::try_update(posts.web, posts.token, &thread_key.channel, placeholder, &content).await;
                    if let Err(error) = result {
                        tracing::debug!(%error, "cannot show progress");
                        // It is worth showing when Slack is available again. What Slack refuses, it
                        // would refuse again.
                        view.changed = error.code().is_none();
                    }
                }
                false
            }
        };
        let now = if poll_now {
            question_state(shared, caller, (task, message)).await?
        } else {
            QuestionState::Running
        };
        let outcome = match now {
            QuestionState::Settled(followed) => Some(followed),
            QuestionState::Running => None,
            // Events of subtasks are not among the task's events. Their approvals are posted even
            // while the task does something else.
            QuestionState::RunningWithSubtasks { waiting: waits } => {
                let open = approvals::show(shared, (posts, caller), mention, task).await?;
                (waits && open > 0).then_some(FollowOutcome::AwaitsPerson { decision: true })
            }
        };
        if let Some(followed) = outcome {
            // The next step edits the message, too.
            if view.edits > 0 {
                sleep_until(last_edit + EDIT_INTERVAL).await;
            }
            return Ok(followed);
        }
        if shared.crowded.load(Ordering::Relaxed) && began.elapsed() > MIN_FOLLOW_TIME {
            return Ok(FollowOutcome::Yielded);
        }
    }
}

/// Reads the state of a question.
async fn question_state(
    shared: &Shared,
    caller: &Caller,
    (task, message): (&str, &str),
) -> Result<QuestionState, Error> {
    let request =
        shared.gateway.request(caller, v1::GetMessageRequest { message: message.to_owned() });
    let found = match call(shared.gateway.messages().get_message(request)).await {
        Ok(found) => found,
        Err(status) if status.code() == tonic::Code::NotFound => {
            return Err(Error::Failed("the task or the question was deleted.".to_owned()));
        }
        Err(status) => return Err(status.into()),
    };
    if found.status.as_ref().is_some_and(|status| status.processed_at.is_some()) {
        return Ok(QuestionState::Settled(FollowOutcome::TurnEnded(Box::new(found))));
    }
    let request = shared.gateway.request(caller, v1::GetTaskRequest { task: task.to_owned() });
    let found = call(shared.gateway.tasks().get_task(request)).await?;
    let status = found.status.unwrap_or_default();
    Ok(match status.phase() {
        TaskPhase::AwaitApproval => {
            QuestionState::Settled(FollowOutcome::AwaitsPerson { decision: true })
        }
        TaskPhase::Suspended => {
            QuestionState::Settled(FollowOutcome::AwaitsPerson { decision: false })
        }
        phase if !status.subtasks.is_empty() => {
            QuestionState::RunningWithSubtasks { waiting: phase == TaskPhase::AwaitSubtasks }
        }
        _ => QuestionState::Running,
    })
}

/// Whether the mention's task was suspended when it was read last.
pub(crate) fn is_suspended(mention: &Mention) -> bool {
    mention.error.as_deref() == Some(SUSPENDED)
}

async fn subscribe(
    shared: &Shared,
    caller: &Caller,
    task: &str,
) -> Result<Streaming<v1::Event>, tonic::Status> {
    let request = v1::SubscribeRequest { task: task.to_owned(), ..v1::SubscribeRequest::default() };
    call(shared.gateway.events().subscribe(shared.gateway.request(caller, request))).await
}

async fn next_event(
    events: &mut Option<Streaming<v1::Event>>,
) -> Option<Result<v1::Event, tonic::Status>> {
    match events {
        Some(events) => events.next().await,
        None => std::future::pending().await,
    }
}

impl ProgressView {
    /// Applies an event. Returns whether the question's state may have changed.
    fn apply(&mut self, event: &v1::Event, message: &str) -> bool {
        match &event.payload {
            Some(Payload::ToolCalled(called)) => {
                let arguments = mrkdwn::truncate(
                    &called.arguments.replace(['`', '\n'], " "),
                    MAX_ARGUMENT_CHARS,
                );
                self.calls.push_back(format!(
                    "`{}` {}",
                    escape(&called.name.replace('`', "")),
                    escape(&arguments)
                ));
                if self.calls.len() > MAX_CALLS {
                    self.calls.pop_front();
                }
                self.count += 1;
                (self.writing, self.changed) = (false, true);
                false
            }
            Some(Payload::MessageDelta(_)) => {
                self.changed |= !self.writing;
                self.writing = true;
                false
            }
            Some(Payload::TurnCompleted(turn)) => turn.message_id == message,
            Some(Payload::PhaseChanged(changed)) => {
                matches!(
                    changed.phase(),
                    TaskPhase::AwaitApproval | TaskPhase::Suspended | TaskPhase::AwaitInput
                )
            }
            Some(Payload::Approval(_)) => true,
            _ => false,
        }
    }

    fn content(&self) -> Content {
        if self.count == 0 && !self.writing {
            return texts::working();
        }
        let doing = if self.writing { "writing" } else { "using tools" };
        let steps = match self.count {
            0 => String::new(),
            1 => ", 1 call so far".to_owned(),
            count => format!(", {count} calls so far"),
        };
        let mut blocks = vec![mrkdwn::section(&format!(
            ":hourglass_flowing_sand: {} _{doing}{steps}_",
            texts::WORKING
        ))];
        if !self.calls.is_empty() {
            let calls: Vec<&str> = self.calls.iter().map(String::as_str).collect();
            blocks.push(mrkdwn::context(&calls.join("\n")));
        }
        Content { text: texts::WORKING.to_owned(), blocks }
    }
}

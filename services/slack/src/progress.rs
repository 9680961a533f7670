//! What people see while an agent works: one line of what it does, edited in place, at most once a
//! second, and left out when Slack wants to be left alone.

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

/// The shortest time between two edits.
const EDIT_INTERVAL: Duration = Duration::from_secs(1);
/// After so many edits they become rarer, because all threads of a workspace share Slack's limit.
const QUICK_EDITS: u32 = 20;
/// The time between the later ones.
const SLOW_EDIT_INTERVAL: Duration = Duration::from_secs(4);
/// How often the message is looked at when its events say nothing.
const POLL_INTERVAL: Duration = Duration::from_secs(3);
/// How long a question is followed at least, however many others wait.
const MIN_FOLLOW_TIME: Duration = Duration::from_secs(30);
/// Calls that are shown.
const MAX_CALLS: usize = 4;
/// Characters of a call's arguments.
const MAX_ARGUMENT_CHARS: usize = 120;

/// What is written down about a mention whose task is suspended.
pub(crate) const SUSPENDED: &str = "its task is suspended";

/// How a question came to rest.
pub(crate) enum FollowOutcome {
    /// Its turn is over.
    TurnEnded(Box<v1::Message>),
    /// Somebody has to decide about a call first, or to let the task go on.
    AwaitsPerson {
        /// Whether it is a decision.
        decision: bool,
    },
    /// It takes long, and others wait for their turn.
    Yielded,
}

/// What becomes of a question.
enum QuestionState {
    /// It has come to rest.
    Settled(FollowOutcome),
    /// It is worked on.
    Running,
    /// The same, and subtasks have been begun, of which people may be asked something.
    RunningWithSubtasks {
        /// Whether it is only waited for them.
        waiting: bool,
    },
}

/// What is shown.
#[derive(Debug, Default)]
struct ProgressView {
    calls: VecDeque<String>,
    count: u32,
    writing: bool,
    changed: bool,
    edits: u32,
}

/// Follows a question until its turn ends or waits for a person, or others have to be looked at.
pub(crate) async fn follow(
    shared: &Shared,
    (posts, caller): (&Posts<'_>, &Caller),
    mention: &Mention,
    (task, message): (&str, &str),
    placeholder: &str,
) -> Result<FollowOutcome, Error> {
    let place = mention.thread_key();
    let mut events = subscribe(shared, caller, task).await.ok();
    // That it is suspended stands there still.
    let mut shown = ProgressView { changed: is_suspended(mention), ..ProgressView::default() };
    let (mut looks, mut edits) =
        (tokio::time::interval(POLL_INTERVAL), tokio::time::interval(EDIT_INTERVAL));
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    edits.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let began = Instant::now();
    let mut last_edit = began;
    loop {
        let wanted = tokio::select! {
            biased;
            event = next_event(&mut events) => match event {
                Some(Ok(event)) => shown.apply(&event, message),
                // Looking is enough until the next look finds a new subscription.
                Some(Err(_)) | None => {
                    events = None;
                    false
                }
            },
            _ = looks.tick() => {
                if events.is_none() {
                    events = subscribe(shared, caller, task).await.ok();
                }
                true
            }
            _ = edits.tick() => {
                let pause = if shown.edits < QUICK_EDITS { EDIT_INTERVAL } else { SLOW_EDIT_INTERVAL };
                if shown.changed && last_edit.elapsed() >= pause {
                    shown.changed = false;
                    shown.edits += 1;
                    last_edit = Instant::now();
                    posts.lease.check()?;
                    let content = shown.content();
                    let done = chat::try_update(posts.web, posts.token, &place.channel, placeholder, &content).await;
                    if let Err(error) = done {
                        tracing::debug!(%error, "progress is not shown");
                        // It is worth showing when Slack can be spoken to again; what it refuses,
                        // it would refuse again.
                        shown.changed = error.code().is_none();
                    }
                }
                false
            }
        };
        let now = if wanted {
            question_state(shared, caller, (task, message)).await?
        } else {
            QuestionState::Running
        };
        let rests = match now {
            QuestionState::Settled(followed) => Some(followed),
            QuestionState::Running => None,
            // Subtasks are not among the task's events. What they ask is asked while it does
            // something else, too.
            QuestionState::RunningWithSubtasks { waiting: waits } => {
                let open = approvals::show(shared, (posts, caller), mention, task).await?;
                (waits && open > 0).then_some(FollowOutcome::AwaitsPerson { decision: true })
            }
        };
        if let Some(followed) = rests {
            // What comes next is an edit, too.
            if shown.edits > 0 {
                sleep_until(last_edit + EDIT_INTERVAL).await;
            }
            return Ok(followed);
        }
        if shared.crowded.load(Ordering::Relaxed) && began.elapsed() > MIN_FOLLOW_TIME {
            return Ok(FollowOutcome::Yielded);
        }
    }
}

/// What becomes of the question.
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
            return Err(Error::Failed("the task, or the question in it, was deleted.".to_owned()));
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

/// Whether a mention was found to wait for its task to be resumed, when it was looked at last.
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
    /// Takes an event in. Whether the question may have come to rest with it.
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

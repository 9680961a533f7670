//! From a mention that is written down to an answer in its thread.
//!
//! Each step can be begun again by another process: what is asked of the gateway has ids that
//! follow from the mention, and what is posted is known by its key ([`crate::posts`]). A process
//! holds a mention by its lease; when it loses that it stops, and posts nothing more.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use construct_proto::v1;
use construct_runtime::{Lifecycle, clock, telemetry::Chain};
use construct_store::slack::{Mention, MentionState};
use prost::Message as _;
use tokio::{
    sync::Semaphore,
    time::{Instant, MissedTickBehavior},
};

use crate::{
    Shared, access, agents, answer, approvals, compose,
    gateway::{Caller, call, is_transient},
    members,
    posts::{self, Posts, Right},
    progress,
    teams::{self, Team},
    web, words,
};

/// How often mentions are looked for that nobody has said are there.
const SWEEP: Duration = Duration::from_secs(2);
/// The pause after the first failure; it doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Failures in a row after which a mention is given up: with these pauses, about a day.
const FAILURES: i32 = 1_500;
/// How soon a mention whose task waits for a person is looked at again, when nothing is said about
/// it.
const PARKED: Duration = Duration::from_secs(15);
/// How soon an answered mention is looked at again whose task a later one is at.
const FOLLOWED: Duration = Duration::from_secs(60);
/// How soon a mention is looked at again that has made room for others.
const ASIDE: Duration = Duration::from_secs(5);
/// How soon others take what a process that drains hands back: what it was doing in Slack has come
/// to its end by then, and is found.
const HANDED_BACK: Duration = Duration::from_secs(5);

/// Why a mention cannot be gone on with now, or at all.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Trouble {
    /// Another try may help.
    #[error("{what}")]
    Later {
        /// What went wrong.
        what: String,
        /// Not before so much time has gone by.
        after: Option<Duration>,
    },
    /// It is over, and whoever asked is told these words.
    #[error("{0}")]
    Failed(String),
    /// It is over, and nobody can be told.
    #[error("{0}")]
    Mute(String),
    /// Somebody else is at it.
    #[error("somebody else is at it")]
    Lost,
}

impl From<construct_store::Error> for Trouble {
    fn from(error: construct_store::Error) -> Self {
        match error {
            construct_store::Error::Conflict => Self::Lost,
            error => Self::Later { what: Chain(&error).to_string(), after: None },
        }
    }
}

impl From<web::Error> for Trouble {
    fn from(error: web::Error) -> Self {
        match &error {
            web::Error::Stopped { .. } => Self::Lost,
            web::Error::Limited { after, .. } => {
                Self::Later { what: error.to_string(), after: Some(*after) }
            }
            error if error.is_transient() => Self::Later { what: error.to_string(), after: None },
            error if error.is_revoked() => Self::Mute(error.to_string()),
            error => match error.code() {
                Some(
                    "not_in_channel"
                    | "channel_not_found"
                    | "is_archived"
                    | "message_not_found"
                    | "thread_not_found"
                    | "cannot_reply_to_message"
                    | "restricted_action"
                    | "missing_scope",
                ) => Self::Mute(format!("{error}: {}", words::slack(error))),
                _ => Self::Failed(words::slack(error)),
            },
        }
    }
}

impl From<posts::Error> for Trouble {
    fn from(error: posts::Error) -> Self {
        match error {
            posts::Error::Slack(error) => error.into(),
            posts::Error::Store(error) => error.into(),
            posts::Error::Lost => Self::Lost,
        }
    }
}

impl From<teams::Error> for Trouble {
    fn from(error: teams::Error) -> Self {
        match error {
            teams::Error::Store(error) => error.into(),
            teams::Error::NotInstalled => Self::Mute(error.to_string()),
            // Somebody may put the key back, or install the app again.
            error => Self::Later { what: Chain(&error).to_string(), after: Some(teams::AGAIN) },
        }
    }
}

impl From<access::Error> for Trouble {
    fn from(error: access::Error) -> Self {
        match error {
            access::Error::Person(error) => match error.into() {
                Self::Failed(_) => Self::Mute("it cannot be found out who asks".to_owned()),
                trouble => trouble,
            },
            access::Error::Store(error) => error.into(),
        }
    }
}

impl From<tonic::Status> for Trouble {
    fn from(status: tonic::Status) -> Self {
        if is_transient(&status) {
            Self::Later { what: format!("the gateway: {}", status.message()), after: None }
        } else {
            Self::Failed(words::gateway(&status))
        }
    }
}

/// What became of a look at a mention.
enum Looked {
    /// It is over.
    Over(MentionState),
    /// Its task waits for a person, or others wait for their turn; when to look again.
    Parked(Duration),
    /// It is answered, and subtasks go on that may ask something; when to look again.
    Watched(Duration),
}

/// Takes mentions and goes on with them, until the service drains.
pub(crate) async fn run(shared: Arc<Shared>, lifecycle: Lifecycle) -> anyhow::Result<()> {
    let slots = Arc::new(Semaphore::new(shared.config.slack_concurrency));
    let draining = lifecycle.draining();
    let mut sweep = tokio::time::interval(SWEEP);
    sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = draining.cancelled() => return Ok(()),
            () = shared.due.notified() => {}
            _ = sweep.tick() => {}
        }
        let free = i64::try_from(slots.available_permits()).unwrap_or(i64::MAX).min(100);
        if free == 0 {
            // While the database does not answer, nobody has to make room.
            let crowded = shared.store.slack_mentions_due(clock::now()).await.unwrap_or(false);
            shared.crowded.store(crowded, Ordering::Relaxed);
            continue;
        }
        shared.crowded.store(false, Ordering::Relaxed);
        // The lease begins no later than the statement that takes it.
        let began = Instant::now();
        let taken = match shared
            .store
            .slack_mentions_take(free, shared.config.slack_lease, clock::now())
            .await
        {
            Ok(taken) => taken,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "mentions could not be looked for");
                continue;
            }
        };
        for mention in taken {
            let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else { break };
            let (shared, draining) = (Arc::clone(&shared), draining.clone());
            lifecycle.spawn_job("mention", async move {
                let end = began + shared.config.slack_lease;
                let (key, lease) = (mention.key.clone(), mention.lease);
                let stopped = tokio::select! {
                    biased;
                    () = draining.cancelled() => true,
                    () = hold(&shared, mention, end) => false,
                };
                // Others need not wait for the lease to end. What was under way is looked for
                // before it is done again.
                if stopped {
                    let until = clock::now() + HANDED_BACK;
                    if let Err(error) = shared.store.slack_mention_hold(&key, lease, until).await {
                        tracing::debug!(error = %Chain(&error), "a mention could not be handed back");
                    }
                }
                drop(slot);
                shared.due.notify_one();
            });
        }
    }
}

/// Goes on with a mention while its lease can be held.
async fn hold(shared: &Shared, mention: Mention, end: Instant) {
    let (key, lease) = (mention.key.clone(), mention.lease);
    let right = Right::until(end);
    let holding = async {
        let mut ticks = tokio::time::interval(shared.config.slack_lease / 4);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        loop {
            ticks.tick().await;
            let (began, until) = (Instant::now(), clock::now() + shared.config.slack_lease);
            match shared.store.slack_mention_hold(&key, lease, until).await {
                Ok(true) => right.extend(began + shared.config.slack_lease),
                Ok(false) => return,
                Err(error) => tracing::debug!(error = %Chain(&error), "a lease could not be held"),
            }
        }
    };
    tokio::select! {
        () = holding => tracing::warn!(channel = key.channel, ts = key.ts, "somebody else goes on with a mention"),
        () = look(shared, mention, right.clone()) => {}
    }
}

/// One look at a mention, and writing down what became of it.
async fn look(shared: &Shared, mut mention: Mention, right: Right) {
    let before = mention.state;
    let looked = go_on(shared, &mut mention, &right).await;
    let now = clock::now();
    match looked {
        Ok(Looked::Over(state)) => finish(&mut mention, state, None),
        Ok(Looked::Watched(pause)) => {
            finish(&mut mention, MentionState::Answered, None);
            (mention.failures, mention.next_look) = (0, Some(now + pause));
        }
        Ok(Looked::Parked(pause)) => {
            mention.failures = 0;
            mention.next_look = Some(now + pause);
        }
        Err(Trouble::Lost) => return,
        Err(Trouble::Later { what, after }) if mention.failures < FAILURES => {
            mention.failures += 1;
            let doubled =
                PAUSE_MIN.saturating_mul(1 << mention.failures.clamp(1, 7) >> 1).min(PAUSE_MAX);
            mention.next_look = Some(now + doubled.max(after.unwrap_or_default()));
            if mention.failures == 1 {
                tracing::warn!(
                    channel = mention.key.channel,
                    ts = mention.key.ts,
                    what,
                    "a mention has to wait"
                );
            }
            mention.error = Some(what);
        }
        // The answer stays as it is.
        Err(trouble) if before == MentionState::Answered => {
            tracing::warn!(error = %Chain(&trouble), ts = mention.key.ts, "what subtasks ask is not looked at any more");
            finish(&mut mention, MentionState::Answered, Some(trouble.to_string()));
        }
        Err(Trouble::Mute(what)) => {
            tracing::warn!(
                channel = mention.key.channel,
                ts = mention.key.ts,
                what,
                "a mention is given up"
            );
            finish(&mut mention, MentionState::Failed, Some(what));
        }
        Err(trouble @ (Trouble::Failed(_) | Trouble::Later { .. })) => {
            let what = match &trouble {
                Trouble::Later { .. } => {
                    "it has gone wrong too often. Whoever runs Construct can find out why."
                        .to_owned()
                }
                trouble => trouble.to_string(),
            };
            match say_failed(shared, &mention, &right, &what).await {
                Ok(()) => finish(&mut mention, MentionState::Failed, Some(trouble.to_string())),
                Err(Trouble::Lost) => return,
                Err(Trouble::Later { what, after }) if mention.failures < FAILURES => {
                    mention.failures += 1;
                    mention.next_look = Some(now + after.unwrap_or(PAUSE_MAX));
                    mention.error = Some(what);
                }
                Err(error) => {
                    finish(&mut mention, MentionState::Failed, Some(format!("{trouble}; {error}")))
                }
            }
        }
    }
    if let Err(error) = shared.store.slack_mention_save(&mention, true, now).await {
        tracing::warn!(error = %Chain(&error), ts = mention.key.ts, "what became of a mention could not be written down");
    } else if mention.state != before && mention.state != MentionState::Asked {
        shared.metrics.mention(mention.state);
    }
}

fn finish(mention: &mut Mention, state: MentionState, error: Option<String>) {
    mention.state = state;
    mention.next_look = None;
    mention.request = None;
    mention.error = error;
}

/// The key of the post that becomes the answer.
pub(crate) fn answer_key(mention: &Mention) -> String {
    format!("{}.{}.answer", mention.key.ts, mention.key.attempt)
}

async fn say_failed(
    shared: &Shared,
    mention: &Mention,
    right: &Right,
    what: &str,
) -> Result<(), Trouble> {
    let team = shared.teams.team(&mention.key.team).await?;
    let posts =
        Posts { web: &shared.web, store: &shared.store, token: &team.token, right: right.clone() };
    let (place, key) = (mention.place(), answer_key(mention));
    let content = words::failed(what, &mention.key);
    let ts = posts.once(&place, &key, &mention.key.ts, &content).await?;
    posts.replace(&place, (&key, &ts), &mention.key.ts, &content).await?;
    Ok(())
}

async fn go_on(shared: &Shared, mention: &mut Mention, right: &Right) -> Result<Looked, Trouble> {
    let team = shared.teams.team(&mention.key.team).await?;
    let posts =
        Posts { web: &shared.web, store: &shared.store, token: &team.token, right: right.clone() };
    if mention.organization != team.caller.organization {
        return Err(Trouble::Mute("its workspace is another organization's by now".to_owned()));
    }
    if mention.state == MentionState::Answered {
        return watch(shared, (&posts, &team.caller), mention).await;
    }
    let place = mention.place();
    let asked = match mention.state {
        MentionState::Received => {
            Some(agents::of_thread(shared, &team, &place, &mention.event).await?)
        }
        _ => None,
    };
    if mention.request.is_none()
        && let Some(agent) = &asked
        && let Err(refusal) =
            access::may_use(shared, &team, &place.channel, &mention.user, agent).await?
    {
        if refusal != access::Refusal::Bot {
            let key = format!("{}.refused", mention.key.ts);
            posts
                .once(&place, &key, &mention.key.ts, &words::plain(words::refusal(refusal)))
                .await?;
        }
        return Ok(Looked::Over(MentionState::Refused));
    }
    let key = answer_key(mention);
    let placeholder = posts.once(&place, &key, &mention.key.ts, &words::working()).await?;
    if let Some(agent) = &asked {
        ask(shared, &team, mention, agent).await?;
    }
    let (Some(task), Some(message)) = (mention.task.clone(), mention.message.clone()) else {
        return Err(Trouble::Failed("its record in the database makes no sense.".to_owned()));
    };
    let followed =
        progress::follow(shared, (&posts, &team.caller), mention, (&task, &message), &placeholder)
            .await?;
    let open = approvals::show(shared, (&posts, &team.caller), mention, &task).await?;
    let suspended = matches!(followed, progress::Followed::Waits { decision: false });
    if suspended != progress::is_suspended(mention) {
        if suspended {
            posts
                .replace(&place, (&key, &placeholder), &mention.key.ts, &words::suspended())
                .await?;
        }
        mention.error = suspended.then(|| progress::SUSPENDED.to_owned());
    }
    match followed {
        progress::Followed::Aside => Ok(Looked::Parked(ASIDE)),
        // What is decided is gone on with within a moment.
        progress::Followed::Waits { decision: true } if open == 0 => Ok(Looked::Parked(SWEEP / 2)),
        progress::Followed::Waits { .. } => Ok(Looked::Parked(PARKED)),
        progress::Followed::Ended(message) => {
            answer::give(shared, (&posts, &team.caller), mention, &message, &placeholder).await?;
            // The answer is given, whatever becomes of this.
            match agents::at_work_below(shared, &team.caller, &task).await {
                Ok(false) => Ok(Looked::Over(MentionState::Answered)),
                Ok(true) => Ok(Looked::Watched(SWEEP / 2)),
                Err(error) => {
                    tracing::debug!(error = %Chain(&error), "it cannot be found out whether subtasks are at work");
                    Ok(Looked::Watched(PARKED))
                }
            }
        }
    }
}

/// Looks after a question that is answered, and whose task has subtasks that go on: what they ask
/// is asked in the thread.
async fn watch(
    shared: &Shared,
    (posts, caller): (&Posts<'_>, &Caller),
    mention: &Mention,
) -> Result<Looked, Trouble> {
    let (Some(task), Some(message)) = (&mention.task, &mention.message) else {
        return Ok(Looked::Over(MentionState::Answered));
    };
    let open = approvals::show(shared, (posts, caller), mention, task).await?;
    // Who is at a later question of the task looks at all that it asks, and may fail: then this one
    // goes on.
    if shared.store.slack_mention_is_followed(task, message).await? {
        return Ok(Looked::Watched(FOLLOWED));
    }
    Ok(if open > 0 || agents::at_work_below(shared, caller, task).await? {
        Looked::Watched(PARKED)
    } else {
        Looked::Over(MentionState::Answered)
    })
}

/// Has the gateway take the question, once.
async fn ask(
    shared: &Shared,
    team: &Team,
    mention: &mut Mention,
    agent: &str,
) -> Result<(), Trouble> {
    let (place, organization, caller) = (mention.place(), mention.organization, &team.caller);
    let by = shared.members.authorization(&place.team, organization, &mention.user).await?;
    let refused = |status| members::refused(status, by.as_ref());
    let ids = format!("slack.{}.{}", place.team, place.channel);
    // The second time, the thread's task was deleted and is forgotten; a third time it would have
    // been deleted within milliseconds.
    for _ in 0..3 {
        if mention.request.is_none() {
            let thread = shared.store.slack_thread_open(&place, organization, agent).await?;
            if agents::now(shared, caller, &thread).await? != agent {
                // Another question has begun the thread's task meanwhile, or it was handed over:
                // whether this person may use its agent is looked at anew.
                return Err(Trouble::Later {
                    what: "the thread has got another agent".to_owned(),
                    after: None,
                });
            }
            let task = match thread.task {
                Some(task) => task,
                None => {
                    let spec = v1::TaskSpec { agent: thread.agent, ..v1::TaskSpec::default() };
                    let idempotency_key =
                        format!("{ids}.{}.task.{}", place.thread, thread.generation);
                    let request = v1::CreateTaskRequest { spec: Some(spec), idempotency_key };
                    let request = shared.gateway.request_by(caller, by.as_ref(), request);
                    let created =
                        call(shared.gateway.tasks().create_task(request)).await.map_err(refused)?;
                    let task = created.metadata.unwrap_or_default().id;
                    shared.store.slack_thread_task(&place, thread.generation, &task).await?;
                    task
                }
            };
            let blocks = compose::blocks(shared, team, mention).await?;
            let spec = v1::MessageSpec { task: task.clone(), blocks, ..v1::MessageSpec::default() };
            let idempotency_key =
                format!("{ids}.{}.{}.{task}", mention.key.ts, mention.key.attempt);
            let request = v1::CreateMessageRequest { spec: Some(spec), idempotency_key };
            mention.task = Some(task);
            // What stands in a thread changes; asking again must be the same request.
            mention.request = Some(request.encode_to_vec());
            shared.store.slack_mention_save(mention, false, clock::now()).await?;
        }
        let request =
            v1::CreateMessageRequest::decode(mention.request.as_deref().unwrap_or_default())
                .map_err(|error| {
                    Trouble::Failed(format!("its record in the database makes no sense ({error})."))
                })?;
        let request = shared.gateway.request_by(caller, by.as_ref(), request);
        match call(shared.gateway.messages().create_message(request)).await {
            Ok(message) => {
                mention.message = Some(message.metadata.unwrap_or_default().id);
                mention.state = MentionState::Asked;
                mention.request = None;
                mention.failures = 0;
                mention.error = None;
                return Ok(shared.store.slack_mention_save(mention, false, clock::now()).await?);
            }
            Err(status) if status.code() == tonic::Code::NotFound => {
                let task = mention.task.take().unwrap_or_default();
                shared.store.slack_thread_forget(&place, &task, agent).await?;
                mention.request = None;
                shared.store.slack_mention_save(mention, false, clock::now()).await?;
            }
            Err(status) => return Err(refused(status)),
        }
    }
    Err(Trouble::Failed("the thread's task is deleted again and again.".to_owned()))
}

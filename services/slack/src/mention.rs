//! Processes a stored mention, up to the answer in its thread.
//!
//! Each step can be repeated by another process. Requests to the gateway have ids derived from the
//! mention, and posts are found by their key ([`crate::posts`]). A process owns a mention by its
//! lease. When it loses the lease it stops, and posts nothing more.

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
    access, agents, answer, approvals, compose,
    error::Error,
    gateway::{Caller, call},
    members,
    posts::{LeaseGuard, Posts},
    progress,
    shared::Shared,
    teams::Team,
    texts,
};

/// The interval of the query for due mentions.
const SWEEP_INTERVAL: Duration = Duration::from_secs(2);
/// The delay after the first failure. It doubles with each further one.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
/// The longest retry delay.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// Consecutive failures after which a mention fails permanently: with these delays, about a day.
const MAX_FAILURES: i32 = 1_500;
/// The poll interval of a mention whose task waits for a person.
const WAITING_POLL_INTERVAL: Duration = Duration::from_secs(15);
/// The poll interval of an answered mention while a later mention follows the same task.
const FOLLOWED_POLL_INTERVAL: Duration = Duration::from_secs(60);
/// The delay of a mention that yielded its slot to others.
const YIELD_DELAY: Duration = Duration::from_secs(5);
/// The delay before others take over a mention of a draining process. Its last calls to Slack have
/// ended by then, and their posts are found.
const HAND_BACK_DELAY: Duration = Duration::from_secs(5);

/// The result of processing a mention.
enum Disposition {
    /// It reached a final state.
    Finished(MentionState),
    /// Its task waits for a person, or it yielded its slot; the delay until the next time.
    Requeued(Duration),
    /// It is answered, and active subtasks may still request approvals; the delay until the next
    /// time.
    SubtasksActive(Duration),
}

/// Claims and processes mentions until the service drains.
pub(crate) async fn run(shared: Arc<Shared>, lifecycle: Lifecycle) -> anyhow::Result<()> {
    let slots = Arc::new(Semaphore::new(shared.config.slack_concurrency));
    let draining = lifecycle.draining();
    let mut sweep = tokio::time::interval(SWEEP_INTERVAL);
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
            // While the database is unavailable, no mention has to yield.
            let crowded = shared.store.slack_mentions_due(clock::now()).await.unwrap_or(false);
            shared.crowded.store(crowded, Ordering::Relaxed);
            continue;
        }
        shared.crowded.store(false, Ordering::Relaxed);
        // The lease starts no later than the statement that acquires it.
        let began = Instant::now();
        let claimed = match shared
            .store
            .slack_mentions_claim(free, shared.config.slack_lease, clock::now())
            .await
        {
            Ok(claimed) => claimed,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "cannot query due mentions");
                continue;
            }
        };
        for mention in claimed {
            let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else { break };
            let (shared, draining) = (Arc::clone(&shared), draining.clone());
            lifecycle.spawn_job("mention", async move {
                let end = began + shared.config.slack_lease;
                let (key, lease) = (mention.key.clone(), mention.lease);
                let draining_now = tokio::select! {
                    biased;
                    () = draining.cancelled() => true,
                    () = process_with_lease(&shared, mention, end) => false,
                };
                // Others need not wait for the lease to expire. They look for the effects of
                // interrupted calls before they repeat them.
                if draining_now {
                    let until = clock::now() + HAND_BACK_DELAY;
                    if let Err(error) =
                        shared.store.slack_mention_extend_lease(&key, lease, until).await
                    {
                        tracing::debug!(error = %Chain(&error), "cannot hand back a mention");
                    }
                }
                drop(slot);
                shared.due.notify_one();
            });
        }
    }
}

/// Processes a mention while renewing its lease.
async fn process_with_lease(shared: &Shared, mention: Mention, end: Instant) {
    let (key, lease) = (mention.key.clone(), mention.lease);
    let lease_guard = LeaseGuard::until(end);
    let holding = async {
        let mut ticks = tokio::time::interval(shared.config.slack_lease / 4);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        loop {
            ticks.tick().await;
            let (began, until) = (Instant::now(), clock::now() + shared.config.slack_lease);
            match shared.store.slack_mention_extend_lease(&key, lease, until).await {
                Ok(true) => lease_guard.extend(began + shared.config.slack_lease),
                Ok(false) => return,
                Err(error) => tracing::debug!(error = %Chain(&error), "cannot renew a lease"),
            }
        }
    };
    tokio::select! {
        () = holding => tracing::warn!(channel = key.channel, ts = key.ts, "another process took over a mention"),
        () = process(shared, mention, lease_guard.clone()) => {}
    }
}

/// Processes a mention once and stores the result.
async fn process(shared: &Shared, mut mention: Mention, lease_guard: LeaseGuard) {
    let before = mention.state;
    let result = advance(shared, &mut mention, &lease_guard).await;
    let now = clock::now();
    match result {
        Ok(Disposition::Finished(state)) => finish(&mut mention, state, None),
        Ok(Disposition::SubtasksActive(delay)) => {
            finish(&mut mention, MentionState::Answered, None);
            (mention.failures, mention.next_wake) = (0, Some(now + delay));
        }
        Ok(Disposition::Requeued(delay)) => {
            mention.failures = 0;
            mention.next_wake = Some(now + delay);
        }
        Err(Error::LeaseLost) => return,
        Err(Error::Retryable { reason, retry_after }) if mention.failures < MAX_FAILURES => {
            mention.failures += 1;
            let backoff = MIN_RETRY_DELAY
                .saturating_mul(1 << mention.failures.clamp(1, 7) >> 1)
                .min(MAX_RETRY_DELAY);
            mention.next_wake = Some(now + backoff.max(retry_after.unwrap_or_default()));
            if mention.failures == 1 {
                tracing::warn!(
                    channel = mention.key.channel,
                    ts = mention.key.ts,
                    reason,
                    "processing a mention failed; retrying"
                );
            }
            mention.error = Some(reason);
        }
        // The posted answer stays.
        Err(error) if before == MentionState::Answered => {
            tracing::warn!(error = %Chain(&error), ts = mention.key.ts, "approvals of subtasks are no longer checked");
            finish(&mut mention, MentionState::Answered, Some(error.to_string()));
        }
        Err(Error::Silent(reason)) => {
            tracing::warn!(
                channel = mention.key.channel,
                ts = mention.key.ts,
                reason,
                "a mention failed permanently"
            );
            finish(&mut mention, MentionState::Failed, Some(reason));
        }
        Err(failure @ (Error::Failed(_) | Error::Retryable { .. })) => {
            let reason = match &failure {
                Error::Retryable { .. } => {
                    "it failed too often. Please ask your Construct operator for the reason."
                        .to_owned()
                }
                failure => failure.to_string(),
            };
            match post_failure(shared, &mention, &lease_guard, &reason).await {
                Ok(()) => finish(&mut mention, MentionState::Failed, Some(failure.to_string())),
                Err(Error::LeaseLost) => return,
                Err(Error::Retryable { reason, retry_after })
                    if mention.failures < MAX_FAILURES =>
                {
                    mention.failures += 1;
                    mention.next_wake = Some(now + retry_after.unwrap_or(MAX_RETRY_DELAY));
                    mention.error = Some(reason);
                }
                Err(error) => {
                    finish(&mut mention, MentionState::Failed, Some(format!("{failure}; {error}")))
                }
            }
        }
    }
    if let Err(error) = shared.store.slack_mention_save(&mention, true, now).await {
        tracing::warn!(error = %Chain(&error), ts = mention.key.ts, "cannot store the result of a mention");
    } else if mention.state != before && mention.state != MentionState::Asked {
        shared.metrics.record_mention(mention.state);
    }
}

fn finish(mention: &mut Mention, state: MentionState, error: Option<String>) {
    mention.state = state;
    mention.next_wake = None;
    mention.request = None;
    mention.error = error;
}

async fn post_failure(
    shared: &Shared,
    mention: &Mention,
    lease_guard: &LeaseGuard,
    reason: &str,
) -> Result<(), Error> {
    let team = shared.teams.team(&mention.key.team).await?;
    let posts = Posts {
        web: &shared.web,
        store: &shared.store,
        token: &team.token,
        lease: lease_guard.clone(),
    };
    let (thread_key, key) = (mention.thread_key(), answer::post_key(mention));
    let content = texts::failure(reason, &mention.key);
    let ts = posts.post_once(&thread_key, &key, &mention.key.ts, &content).await?;
    posts.replace(&thread_key, (&key, &ts), &mention.key.ts, &content).await?;
    Ok(())
}

async fn advance(
    shared: &Shared,
    mention: &mut Mention,
    lease_guard: &LeaseGuard,
) -> Result<Disposition, Error> {
    let team = shared.teams.team(&mention.key.team).await?;
    let posts = Posts {
        web: &shared.web,
        store: &shared.store,
        token: &team.token,
        lease: lease_guard.clone(),
    };
    if mention.organization != team.caller.organization {
        return Err(Error::Silent(
            "its workspace belongs to another organization by now".to_owned(),
        ));
    }
    if mention.state == MentionState::Answered {
        return check_subtasks(shared, (&posts, &team.caller), mention).await;
    }
    let thread_key = mention.thread_key();
    let agent = match mention.state {
        MentionState::Received => {
            Some(agents::agent_of_thread(shared, &team, &thread_key, &mention.event).await?)
        }
        _ => None,
    };
    if mention.request.is_none()
        && let Some(agent) = &agent
        && let Err(refusal) =
            access::may_use(shared, &team, &thread_key.channel, &mention.user, agent).await?
    {
        if refusal != access::Refusal::Bot {
            let key = format!("{}.refused", mention.key.ts);
            posts
                .post_once(
                    &thread_key,
                    &key,
                    &mention.key.ts,
                    &texts::plain_text(refusal.message()),
                )
                .await?;
        }
        return Ok(Disposition::Finished(MentionState::Refused));
    }
    let key = answer::post_key(mention);
    let placeholder =
        posts.post_once(&thread_key, &key, &mention.key.ts, &texts::working()).await?;
    if let Some(agent) = &agent {
        send_question(shared, &team, mention, agent).await?;
    }
    let (Some(task), Some(message)) = (mention.task.clone(), mention.message.clone()) else {
        return Err(Error::Failed("its database record is inconsistent.".to_owned()));
    };
    let followed =
        progress::follow(shared, (&posts, &team.caller), mention, (&task, &message), &placeholder)
            .await?;
    let open = approvals::show(shared, (&posts, &team.caller), mention, &task).await?;
    let suspended = matches!(followed, progress::FollowOutcome::AwaitsPerson { decision: false });
    if suspended != progress::is_suspended(mention) {
        if suspended {
            posts
                .replace(&thread_key, (&key, &placeholder), &mention.key.ts, &texts::suspended())
                .await?;
        }
        mention.error = suspended.then(|| progress::SUSPENDED.to_owned());
    }
    match followed {
        progress::FollowOutcome::Yielded => Ok(Disposition::Requeued(YIELD_DELAY)),
        // A decided call continues within a moment.
        progress::FollowOutcome::AwaitsPerson { decision: true } if open == 0 => {
            Ok(Disposition::Requeued(SWEEP_INTERVAL / 2))
        }
        progress::FollowOutcome::AwaitsPerson { .. } => {
            Ok(Disposition::Requeued(WAITING_POLL_INTERVAL))
        }
        progress::FollowOutcome::TurnEnded(message) => {
            answer::post_answer(shared, (&posts, &team.caller), mention, &message, &placeholder)
                .await?;
            // The answer is posted, whether or not this succeeds.
            match agents::has_active_subtasks(shared, &team.caller, &task).await {
                Ok(false) => Ok(Disposition::Finished(MentionState::Answered)),
                Ok(true) => Ok(Disposition::SubtasksActive(SWEEP_INTERVAL / 2)),
                Err(error) => {
                    tracing::debug!(error = %Chain(&error), "cannot determine whether subtasks are active");
                    Ok(Disposition::SubtasksActive(WAITING_POLL_INTERVAL))
                }
            }
        }
    }
}

/// Checks an answered mention whose task has active subtasks: their approvals are posted in the
/// thread.
async fn check_subtasks(
    shared: &Shared,
    (posts, caller): (&Posts<'_>, &Caller),
    mention: &Mention,
) -> Result<Disposition, Error> {
    let (Some(task), Some(message)) = (&mention.task, &mention.message) else {
        return Ok(Disposition::Finished(MentionState::Answered));
    };
    let open = approvals::show(shared, (posts, caller), mention, task).await?;
    // The process of a later mention of the task handles all its approvals. If that one fails, this
    // one continues.
    if shared.store.slack_mention_has_successor(task, message).await? {
        return Ok(Disposition::SubtasksActive(FOLLOWED_POLL_INTERVAL));
    }
    Ok(if open > 0 || agents::has_active_subtasks(shared, caller, task).await? {
        Disposition::SubtasksActive(WAITING_POLL_INTERVAL)
    } else {
        Disposition::Finished(MentionState::Answered)
    })
}

/// Sends the question to the gateway, exactly once.
async fn send_question(
    shared: &Shared,
    team: &Team,
    mention: &mut Mention,
    agent: &str,
) -> Result<(), Error> {
    let (thread_key, organization, caller) =
        (mention.thread_key(), mention.organization, &team.caller);
    let by = shared.members.authorization(&thread_key.team, organization, &mention.user).await?;
    let refused = |status| members::gateway_refusal(status, by.as_ref());
    let ids = format!("slack.{}.{}", thread_key.team, thread_key.channel);
    // In the second iteration, the thread's task was deleted and forgotten. A third time it would
    // have to be deleted within milliseconds.
    for _ in 0..3 {
        if mention.request.is_none() {
            let thread = shared.store.slack_thread_open(&thread_key, organization, agent).await?;
            if agents::current_agent(shared, caller, &thread).await? != agent {
                // Another question started the thread's task meanwhile, or it was handed over.
                // Check again whether this user may use its agent.
                return Err(Error::Retryable {
                    reason: "the thread's agent changed".to_owned(),
                    retry_after: None,
                });
            }
            let task = match thread.task {
                Some(task) => task,
                None => {
                    let spec = v1::TaskSpec { agent: thread.agent, ..v1::TaskSpec::default() };
                    let idempotency_key =
                        format!("{ids}.{}.task.{}", thread_key.thread, thread.generation);
                    let request = v1::CreateTaskRequest { spec: Some(spec), idempotency_key };
                    let request = shared.gateway.request_by(caller, by.as_ref(), request);
                    let created =
                        call(shared.gateway.tasks().create_task(request)).await.map_err(refused)?;
                    let task = created.metadata.unwrap_or_default().id;
                    shared
                        .store
                        .slack_thread_set_task(&thread_key, thread.generation, &task)
                        .await?;
                    task
                }
            };
            let blocks = compose::message_blocks(shared, team, mention).await?;
            let spec = v1::MessageSpec { task: task.clone(), blocks, ..v1::MessageSpec::default() };
            let idempotency_key =
                format!("{ids}.{}.{}.{task}", mention.key.ts, mention.key.attempt);
            let request = v1::CreateMessageRequest { spec: Some(spec), idempotency_key };
            mention.task = Some(task);
            // A thread changes over time; a repeated request must be identical.
            mention.request = Some(request.encode_to_vec());
            shared.store.slack_mention_save(mention, false, clock::now()).await?;
        }
        let request =
            v1::CreateMessageRequest::decode(mention.request.as_deref().unwrap_or_default())
                .map_err(|error| {
                    Error::Failed(format!("its database record is inconsistent ({error})."))
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
                shared.store.slack_thread_clear_task(&thread_key, &task, agent).await?;
                mention.request = None;
                shared.store.slack_mention_save(mention, false, clock::now()).await?;
            }
            Err(status) => return Err(refused(status)),
        }
    }
    Err(Error::Failed("the thread's task was deleted repeatedly.".to_owned()))
}

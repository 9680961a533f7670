//! Interactions with buttons and forms.

use construct_proto::v1::{self, decide_approval_request::Decision};
use construct_runtime::clock;
use construct_store::slack::{MentionKey, NewMention, ThreadKey};
use jiff::Timestamp;
use serde_json::Value;

use crate::{
    access, agents, approvals, commands,
    error::Error,
    gateway::{Caller, call},
    members,
    posts::{LeaseGuard, Posts},
    shared::Shared,
    teams::Team,
    texts,
    web::chat,
};

/// Questions of a thread that are searched for the one that caused a call. More do not wait there.
const MAX_ASKERS: i64 = 50;

/// Processes a pressed button or a submitted form.
pub(crate) async fn process(shared: &Shared, team: &str, payload: &Value) -> Result<(), Error> {
    if payload["type"] == "view_submission" {
        return commands::process_form(shared, team, payload).await;
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (message, action) = (&payload["message"], &payload["actions"][0]);
    let ts = text(&message["ts"]);
    let thread = message["thread_ts"].as_str().map_or_else(|| ts.clone(), str::to_owned);
    let thread_key =
        ThreadKey { team: team.to_owned(), channel: text(&payload["channel"]["id"]), thread };
    let press = ButtonPress {
        team: shared.teams.team(team).await?,
        thread_key,
        message: ts,
        user: text(&payload["user"]["id"]),
        value: serde_json::from_str(action["value"].as_str().unwrap_or_default())
            .unwrap_or_default(),
        action_ts: text(&action["action_ts"]),
    };
    match action["action_id"].as_str() {
        Some(texts::RETRY_ACTION) => retry_question(shared, press).await,
        Some(texts::APPROVE_ACTION) => decide(shared, press, Decision::Approve).await,
        Some(texts::REJECT_ACTION) => decide(shared, press, Decision::Reject).await,
        _ => Ok(()),
    }
}

/// A pressed button.
struct ButtonPress {
    team: Team,
    thread_key: ThreadKey,
    /// The message with the button.
    message: String,
    user: String,
    value: Value,
    /// The time according to Slack, equal in each delivery.
    action_ts: String,
}

/// Retries a question. Several presses of the button cause one further attempt.
async fn retry_question(shared: &Shared, press: ButtonPress) -> Result<(), Error> {
    let ButtonPress { team, thread_key, message, user, value, .. } = press;
    let attempt = value[1].as_i64().and_then(|attempt| i32::try_from(attempt).ok()).unwrap_or(0);
    let key = MentionKey {
        team: thread_key.team.clone(),
        channel: thread_key.channel.clone(),
        ts: value[0].as_str().unwrap_or_default().to_owned(),
        attempt,
    };
    let before = match shared.store.slack_mention(&key).await {
        Ok(before) => before,
        Err(construct_store::Error::NotFound { .. }) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    if before.event.is_null() || before.organization != team.installation.organization {
        return Err(Error::Failed("that question is too old. Please ask again.".to_owned()));
    }
    let asked = ThreadKey { thread: before.thread.clone(), ..thread_key.clone() };
    let agent = agents::agent_of_thread(shared, &team, &asked, &before.event).await?;
    if let Err(refusal) = access::may_use(shared, &team, &thread_key.channel, &user, &agent).await?
    {
        let (said, thread) = (refusal.message(), Some(before.thread.as_str()));
        return Ok(chat::post_ephemeral(
            &shared.web,
            &team.token,
            &thread_key.channel,
            &user,
            thread,
            said,
        )
        .await?);
    }
    let new = NewMention {
        key: MentionKey { attempt: attempt.saturating_add(1), ..key },
        organization: before.organization,
        thread: before.thread,
        user: user.clone(),
        event: before.event,
    };
    if shared.store.slack_mention_put(&new, clock::now()).await? {
        shared.due.notify_one();
    }
    // Only so that the button is not pressed again in vain.
    let target = (thread_key.channel.as_str(), message.as_str());
    let result =
        chat::update(&shared.web, &team.token, target, &texts::retrying(&user), &|| true).await;
    if let Err(error) = result {
        tracing::debug!(%error, "cannot remove a button");
    }
    Ok(())
}

/// Decides about a call, for exactly the arguments that were shown.
async fn decide(shared: &Shared, press: ButtonPress, decision: Decision) -> Result<(), Error> {
    let ButtonPress { team, thread_key, user, value, action_ts: at, .. } = press;
    let (id, hash) = (value[0].as_str().unwrap_or_default(), value[1].as_str().unwrap_or_default());
    let (organization, caller) = (team.installation.organization, &team.caller);
    let request =
        shared.gateway.request(caller, v1::GetApprovalRequest { approval: id.to_owned() });
    let approval = match call(shared.gateway.approvals().get_approval(request)).await {
        Ok(approval) => approval,
        Err(status) if status.code() == tonic::Code::NotFound => {
            return Err(Error::Failed(
                "there is nothing to decide: the task was deleted.".to_owned(),
            ));
        }
        Err(status) => return Err(status.into()),
    };
    let requesting_task = approval.spec.as_ref().map(|spec| spec.task.as_str()).unwrap_or_default();
    let unrelated = || Error::Silent("the approval belongs to a task of another thread".to_owned());
    let thread = shared.store.slack_thread(&thread_key).await.map_err(|error| match error {
        construct_store::Error::NotFound { .. } => unrelated(),
        error => error.into(),
    })?;
    let task = thread.task.ok_or_else(unrelated)?;
    // The requester: the thread's task or one of its descendants.
    let agents::ApprovalRequester { agent, subtask_created_at: begun } =
        agents::find_requester(shared, caller, requesting_task, &task)
            .await?
            .ok_or_else(unrelated)?;
    let of_subtask = (requesting_task != task).then_some(agent.as_str());
    let created = approval.metadata.as_ref().and_then(|metadata| metadata.created_at);
    let created = created.and_then(|at| Timestamp::new(at.seconds, at.nanos).ok());
    // A subtask may outlive the turn that created it. The user who caused that turn decides, not
    // the author of the current one.
    let asked_by = match begun.or(created) {
        Some(at) => find_asker(shared, caller, &thread_key, (&task, at)).await?,
        None => None,
    };
    let person = match access::may_approve(
        shared,
        &team,
        &thread_key,
        (&user, &agent),
        asked_by.as_deref(),
    )
    .await?
    {
        Ok(person) => person,
        Err(refusal) => {
            let text = match refusal {
                access::Refusal::NotLinked => texts::NOT_LINKED,
                _ => {
                    "You may not decide about this call. The person who asked the question and the workspace's admins may."
                }
            };
            let thread = Some(thread_key.thread.as_str());
            chat::post_ephemeral(
                &shared.web,
                &team.token,
                &thread_key.channel,
                &user,
                thread,
                text,
            )
            .await?;
            return Ok(());
        }
    };
    let by = shared.members.authorization(&thread_key.team, organization, &user).await?;
    let request = v1::DecideApprovalRequest {
        approval: id.to_owned(),
        decision: decision.into(),
        comment: crate::mrkdwn::truncate(
            &format!("decided in Slack by {} ({user})", person.display_name()),
            1_000,
        ),
        arguments_hash: hash.to_owned(),
        idempotency_key: format!("slack.decide.{id}.{}", texts::user_id(&at)),
    };
    let request = shared.gateway.request_by(caller, by.as_ref(), request);
    let decided = call(shared.gateway.approvals().decide_approval(request)).await;
    let (decided, decided_by) = match decided {
        Ok(decided) => (decided, Some(user.as_str())),
        // It was decided before, or is no longer needed. The post shows the result.
        Err(status)
            if matches!(status.code(), tonic::Code::FailedPrecondition | tonic::Code::Aborted) =>
        {
            let request =
                shared.gateway.request(caller, v1::GetApprovalRequest { approval: id.to_owned() });
            (call(shared.gateway.approvals().get_approval(request)).await?, None)
        }
        Err(status) => return Err(members::gateway_refusal(status, by.as_ref())),
    };
    let posts = Posts {
        web: &shared.web,
        store: &shared.store,
        token: &team.token,
        lease: LeaseGuard::default(),
    };
    approvals::close(shared, &posts, &thread_key, (&decided, of_subtask), decided_by).await?;
    shared.store.slack_mentions_wake(&task, clock::now()).await?;
    shared.due.notify_one();
    Ok(())
}

/// Finds the author of the question that a task worked on at a time. The gateway knows when a
/// question was processed; a thread's questions are processed in order.
async fn find_asker(
    shared: &Shared,
    caller: &Caller,
    thread_key: &ThreadKey,
    (task, at): (&str, Timestamp),
) -> Result<Option<String>, Error> {
    let mut asker = None;
    for (user, message) in shared.store.slack_askers(thread_key, task, at, MAX_ASKERS).await? {
        let request = shared.gateway.request(caller, v1::GetMessageRequest { message });
        let found = match call(shared.gateway.messages().get_message(request)).await {
            Ok(found) => found,
            Err(status) if status.code() == tonic::Code::NotFound => continue,
            Err(status) => return Err(status.into()),
        };
        let processed_at = found.status.and_then(|status| status.processed_at);
        let processed_at = processed_at
            .and_then(|processed_at| Timestamp::new(processed_at.seconds, processed_at.nanos).ok());
        if processed_at.is_some_and(|processed_at| processed_at <= at) {
            break;
        }
        asker = Some(user);
    }
    Ok(asker)
}

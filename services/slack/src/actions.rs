//! What people do with buttons and forms.

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

/// Questions of a thread that are looked at for the one that was worked on: more do not wait there.
const MAX_ASKERS: i64 = 50;

/// Deals with a press of a button or a form that was sent.
pub(crate) async fn process(shared: &Shared, team: &str, payload: &Value) -> Result<(), Error> {
    if payload["type"] == "view_submission" {
        return commands::process_form(shared, team, payload).await;
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (message, action) = (&payload["message"], &payload["actions"][0]);
    let ts = text(&message["ts"]);
    let thread = message["thread_ts"].as_str().map_or_else(|| ts.clone(), str::to_owned);
    let place =
        ThreadKey { team: team.to_owned(), channel: text(&payload["channel"]["id"]), thread };
    let pressed = ButtonPress {
        team: shared.teams.team(team).await?,
        place,
        message: ts,
        user: text(&payload["user"]["id"]),
        value: serde_json::from_str(action["value"].as_str().unwrap_or_default())
            .unwrap_or_default(),
        action_ts: text(&action["action_ts"]),
    };
    match action["action_id"].as_str() {
        Some(texts::RETRY_ACTION) => retry_question(shared, pressed).await,
        Some(texts::APPROVE_ACTION) => decide(shared, pressed, Decision::Approve).await,
        Some(texts::REJECT_ACTION) => decide(shared, pressed, Decision::Reject).await,
        _ => Ok(()),
    }
}

/// A button that was pressed.
struct ButtonPress {
    team: Team,
    place: ThreadKey,
    /// The message with the button.
    message: String,
    user: String,
    value: Value,
    /// When, as Slack says; the same in each delivery.
    action_ts: String,
}

/// Has a question answered once more. However often the button is pressed, it is one further try.
async fn retry_question(shared: &Shared, pressed: ButtonPress) -> Result<(), Error> {
    let ButtonPress { team, place, message, user, value, .. } = pressed;
    let attempt = value[1].as_i64().and_then(|attempt| i32::try_from(attempt).ok()).unwrap_or(0);
    let key = MentionKey {
        team: place.team.clone(),
        channel: place.channel.clone(),
        ts: value[0].as_str().unwrap_or_default().to_owned(),
        attempt,
    };
    let before = match shared.store.slack_mention(&key).await {
        Ok(before) => before,
        Err(construct_store::Error::NotFound { .. }) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    if before.event.is_null() || before.organization != team.installation.organization {
        return Err(Error::Failed("that was too long ago. Ask me again.".to_owned()));
    }
    let asked = ThreadKey { thread: before.thread.clone(), ..place.clone() };
    let agent = agents::agent_of_thread(shared, &team, &asked, &before.event).await?;
    if let Err(refusal) = access::may_use(shared, &team, &place.channel, &user, &agent).await? {
        let (said, thread) = (refusal.message(), Some(before.thread.as_str()));
        return Ok(chat::post_ephemeral(
            &shared.web,
            &team.token,
            &place.channel,
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
    // Only so that nobody presses it again in vain.
    let there = (place.channel.as_str(), message.as_str());
    let done =
        chat::update(&shared.web, &team.token, there, &texts::retrying(&user), &|| true).await;
    if let Err(error) = done {
        tracing::debug!(%error, "a button could not be taken away");
    }
    Ok(())
}

/// Decides about a call, for exactly the arguments that were shown.
async fn decide(shared: &Shared, pressed: ButtonPress, decision: Decision) -> Result<(), Error> {
    let ButtonPress { team, place, user, value, action_ts: at, .. } = pressed;
    let (id, hash) = (value[0].as_str().unwrap_or_default(), value[1].as_str().unwrap_or_default());
    let (organization, caller) = (team.installation.organization, &team.caller);
    let request =
        shared.gateway.request(caller, v1::GetApprovalRequest { approval: id.to_owned() });
    let approval = match call(shared.gateway.approvals().get_approval(request)).await {
        Ok(approval) => approval,
        Err(status) if status.code() == tonic::Code::NotFound => {
            return Err(Error::Failed(
                "there is nothing to decide any more: the task was deleted.".to_owned(),
            ));
        }
        Err(status) => return Err(status.into()),
    };
    let asking = approval.spec.as_ref().map(|spec| spec.task.as_str()).unwrap_or_default();
    let elsewhere =
        || Error::Silent("a decision was asked for in a thread of another task".to_owned());
    let thread = shared.store.slack_thread(&place).await.map_err(|error| match error {
        construct_store::Error::NotFound { .. } => elsewhere(),
        error => error.into(),
    })?;
    let task = thread.task.ok_or_else(elsewhere)?;
    // The one whose call it is: of the thread's task, or of one that works for that.
    let agents::ApprovalRequester { agent, subtask_created_at: begun } =
        agents::find_requester(shared, caller, asking, &task).await?.ok_or_else(elsewhere)?;
    let of_subtask = (asking != task).then_some(agent.as_str());
    let created = approval.metadata.as_ref().and_then(|metadata| metadata.created_at);
    let created = created.and_then(|at| Timestamp::new(at.seconds, at.nanos).ok());
    // A subtask may outlive the turn that has begun it: who asks in the thread by then has nothing
    // to do with it, and who asked for it still has.
    let asked_by = match begun.or(created) {
        Some(at) => find_asker(shared, caller, &place, (&task, at)).await?,
        None => None,
    };
    let person = match access::may_approve(
        shared,
        &team,
        &place,
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
                    "You may not decide about this. Whoever asked me may, and the workspace's admins."
                }
            };
            let thread = Some(place.thread.as_str());
            chat::post_ephemeral(&shared.web, &team.token, &place.channel, &user, thread, text)
                .await?;
            return Ok(());
        }
    };
    let by = shared.members.authorization(&place.team, organization, &user).await?;
    let request = v1::DecideApprovalRequest {
        approval: id.to_owned(),
        decision: decision.into(),
        words: crate::mrkdwn::truncate(
            &format!("decided in Slack by {} ({user})", person.display_name()),
            1_000,
        ),
        arguments_hash: hash.to_owned(),
        idempotency_key: format!("slack.decide.{id}.{}", texts::user_id(&at)),
    };
    let request = shared.gateway.request_by(caller, by.as_ref(), request);
    let decided = call(shared.gateway.approvals().decide_approval(request)).await;
    let (decided, who) = match decided {
        Ok(decided) => (decided, Some(user.as_str())),
        // Somebody was faster, or it is not needed any more: what became of it is shown.
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
    approvals::close(shared, &posts, &place, (&decided, of_subtask), who).await?;
    shared.store.slack_mentions_wake(&task, clock::now()).await?;
    shared.due.notify_one();
    Ok(())
}

/// Who has asked what a task worked on at a time. The gateway knows when a question was over; a
/// thread's questions are answered one after the other.
async fn find_asker(
    shared: &Shared,
    caller: &Caller,
    place: &ThreadKey,
    (task, at): (&str, Timestamp),
) -> Result<Option<String>, Error> {
    let mut asker = None;
    for (user, message) in shared.store.slack_askers(place, task, at, MAX_ASKERS).await? {
        let request = shared.gateway.request(caller, v1::GetMessageRequest { message });
        let found = match call(shared.gateway.messages().get_message(request)).await {
            Ok(found) => found,
            Err(status) if status.code() == tonic::Code::NotFound => continue,
            Err(status) => return Err(status.into()),
        };
        let over = found.status.and_then(|status| status.processed_at);
        let over = over.and_then(|over| Timestamp::new(over.seconds, over.nanos).ok());
        if over.is_some_and(|over| over <= at) {
            break;
        }
        asker = Some(user);
    }
    Ok(asker)
}

//! What people do with buttons and forms.

use construct_proto::v1::{self, decide_approval_request::Decision};
use construct_store::slack::{MentionKey, NewMention, Place};
use jiff::Timestamp;
use serde_json::Value;

use crate::{
    Shared, access, approvals, commands,
    gateway::call,
    mention::{self, Trouble},
    posts::{Posts, Right},
    teams::Team,
    web::chat,
    words,
};

/// Deals with a press of a button or a form that was sent.
pub(crate) async fn take(shared: &Shared, team: &str, payload: &Value) -> Result<(), Trouble> {
    if payload["type"] == "view_submission" {
        return commands::submitted(shared, team, payload).await;
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (message, action) = (&payload["message"], &payload["actions"][0]);
    let ts = text(&message["ts"]);
    let thread = message["thread_ts"].as_str().map_or_else(|| ts.clone(), str::to_owned);
    let place = Place { team: team.to_owned(), channel: text(&payload["channel"]["id"]), thread };
    let pressed = Pressed {
        team: shared.teams.team(team).await?,
        place,
        message: ts,
        user: text(&payload["user"]["id"]),
        value: serde_json::from_str(action["value"].as_str().unwrap_or_default()).unwrap_or_default(),
        at: text(&action["action_ts"]),
    };
    match action["action_id"].as_str() {
        Some(words::RETRY) => again(shared, pressed).await,
        Some(words::APPROVE) => decide(shared, pressed, Decision::Approve).await,
        Some(words::REJECT) => decide(shared, pressed, Decision::Reject).await,
        _ => Ok(()),
    }
}

/// A button that was pressed.
struct Pressed {
    team: Team,
    place: Place,
    /// The message with the button.
    message: String,
    user: String,
    value: Value,
    /// When, as Slack says; the same in each delivery.
    at: String,
}

/// Has a question answered once more. However often the button is pressed, it is one further try.
async fn again(shared: &Shared, pressed: Pressed) -> Result<(), Trouble> {
    let Pressed { team, place, message, user, value, .. } = pressed;
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
    if before.event.is_null() {
        return Err(Trouble::Failed("that was too long ago. Ask me again.".to_owned()));
    }
    let asked = Place { thread: before.thread.clone(), ..place.clone() };
    let agent = mention::agent(shared, &team, &asked, &before.event).await?;
    let asks = (&shared.store, &shared.people);
    if let Err(refusal) = access::may_use(asks, &team, &place.channel, &user, &agent).await? {
        let (said, thread) = (words::refusal(refusal), Some(before.thread.as_str()));
        return Ok(chat::post_ephemeral(&shared.web, &team.token, &place.channel, &user, thread, said).await?);
    }
    let new = NewMention {
        key: MentionKey { attempt: attempt.saturating_add(1), ..key },
        organization: before.organization,
        thread: before.thread,
        user: user.clone(),
        event: before.event,
    };
    if shared.store.slack_mention_put(&new, Timestamp::now()).await? {
        shared.due.notify_one();
    }
    // Only so that nobody presses it again in vain.
    let there = (place.channel.as_str(), message.as_str());
    let done = chat::update(&shared.web, &team.token, there, &words::again(&user), &|| true).await;
    if let Err(error) = done {
        tracing::debug!(%error, "a button could not be taken away");
    }
    Ok(())
}

/// Decides about a call, for exactly the arguments that were shown.
async fn decide(shared: &Shared, pressed: Pressed, decision: Decision) -> Result<(), Trouble> {
    let Pressed { team, place, user, value, at, .. } = pressed;
    let (id, hash) = (value[0].as_str().unwrap_or_default(), value[1].as_str().unwrap_or_default());
    let organization = team.installation.organization;
    let request = shared.gateway.request(organization, v1::GetApprovalRequest { approval: id.to_owned() });
    let approval = match call(shared.gateway.approvals().get_approval(request)).await {
        Ok(approval) => approval,
        Err(status) if status.code() == tonic::Code::NotFound => {
            return Err(Trouble::Failed("there is nothing to decide any more: the task was deleted.".to_owned()));
        }
        Err(status) => return Err(status.into()),
    };
    let task = approval.spec.as_ref().map(|spec| spec.task.clone()).unwrap_or_default();
    let elsewhere = || Trouble::Mute("a decision was asked for in a thread of another task".to_owned());
    let thread = shared.store.slack_thread(&place).await.map_err(|error| match error {
        construct_store::Error::NotFound { .. } => elsewhere(),
        error => error.into(),
    })?;
    if thread.task.as_deref() != Some(task.as_str()) {
        return Err(elsewhere());
    }
    let created = approval.metadata.as_ref().and_then(|metadata| metadata.created_at);
    let created = created.and_then(|at| Timestamp::new(at.seconds, at.nanos).ok());
    let asked_by = match created {
        Some(created) => shared.store.slack_asker(&task, created).await?,
        None => None,
    };
    let asks = (&shared.store, &shared.people);
    let person = match access::may_approve(asks, &team, &place, (&user, &thread.agent), asked_by.as_deref()).await? {
        Ok(person) => person,
        Err(_) => {
            let text = "You may not decide about this. Whoever asked me may, and the workspace's admins.";
            let thread = Some(place.thread.as_str());
            chat::post_ephemeral(&shared.web, &team.token, &place.channel, &user, thread, text).await?;
            return Ok(());
        }
    };
    let request = v1::DecideApprovalRequest {
        approval: id.to_owned(),
        decision: decision.into(),
        words: crate::mrkdwn::clip(&format!("decided in Slack by {} ({user})", person.shown()), 1_000),
        arguments_hash: hash.to_owned(),
        idempotency_key: format!("slack.decide.{id}.{}", words::user_id(&at)),
    };
    let decided = call(shared.gateway.approvals().decide_approval(shared.gateway.request(organization, request))).await;
    let (decided, by) = match decided {
        Ok(decided) => (decided, Some(user.as_str())),
        // Somebody was faster, or it is not needed any more: what became of it is shown.
        Err(status) if matches!(status.code(), tonic::Code::FailedPrecondition | tonic::Code::Aborted) => {
            let request = shared.gateway.request(organization, v1::GetApprovalRequest { approval: id.to_owned() });
            (call(shared.gateway.approvals().get_approval(request)).await?, None)
        }
        Err(status) => return Err(status.into()),
    };
    let posts = Posts { web: &shared.web, store: &shared.store, token: &team.token, right: Right::default() };
    approvals::close(shared, &posts, &place, &decided, by).await?;
    shared.store.slack_mentions_wake(&task, Timestamp::now()).await?;
    shared.due.notify_one();
    Ok(())
}

//! What people do with buttons and forms.

use construct_proto::v1::{self, decide_approval_request::Decision};
use construct_store::slack::{MentionKey, NewMention, Place};
use jiff::Timestamp;
use serde_json::Value;

use crate::{
    Shared, access, approvals, commands,
    gateway::call,
    mention::Trouble,
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
    let done = chat::update(&shared.web, &team.token, &place.channel, &message, &words::again(&user)).await;
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
    let approval = call(shared.gateway.approvals().get_approval(request)).await?;
    let task = approval.spec.as_ref().map(|spec| spec.task.clone()).unwrap_or_default();
    let thread = shared.store.slack_thread(&place).await?;
    if thread.task.as_deref() != Some(task.as_str()) {
        return Err(Trouble::Mute("a decision was asked for in a thread of another task".to_owned()));
    }
    let asked_by = shared.store.slack_askers(&task).await?;
    let asks = (&shared.store, &shared.people);
    let person = match access::may_approve(asks, &team, &place, (&user, &thread.agent), &asked_by).await? {
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

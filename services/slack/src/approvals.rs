//! Calls of scripts that a person has to decide about, as messages with buttons. What is shown is all of what is decided about: a call
//! that is too long to be shown cannot be approved here.

use construct_proto::v1::{self, ApprovalState};
use construct_store::slack::{Mention, Place, Posted};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::{
    Shared,
    gateway::call,
    mention::Trouble,
    mrkdwn::{self, escape},
    posts::{self, Posts},
    web::{chat, chat::Content},
    words,
};

/// Bytes of arguments that are shown; with more the call can be approved elsewhere only.
const SHOWN: usize = 24_000;
/// Approvals of a task that are looked at.
const PAGE: i32 = 100;

/// Shows what waits for a person, and of what is over how it ended. How many wait.
pub(crate) async fn show(shared: &Shared, posts: &Posts<'_>, mention: &Mention, task: &str) -> Result<usize, Trouble> {
    let request = v1::ListApprovalsRequest {
        page: Some(v1::PageRequest { page_size: PAGE, ..v1::PageRequest::default() }),
        filter: Some(v1::list_approvals_request::Filter { task: task.to_owned(), ..Default::default() }),
    };
    let request = shared.gateway.request(mention.organization, request);
    let found = call(shared.gateway.approvals().list_approvals(request)).await?;
    let place = mention.place();
    let mut open = 0;
    for approval in found.approvals.iter().rev() {
        let id = id(approval);
        let key = key(&id);
        if approval.status.as_ref().is_some_and(|status| status.state() == ApprovalState::Pending) {
            open += 1;
            posts.once(&place, &key, &mention.key.ts, &question(approval)).await?;
        } else if matches!(shared.store.slack_post(&place, &key).await?, Posted::At(_)) {
            close(shared, posts, &place, approval, None).await?;
        }
    }
    Ok(open)
}

/// Says under a question how it ended, once.
pub(crate) async fn close(
    shared: &Shared,
    posts: &Posts<'_>,
    place: &Place,
    approval: &v1::Approval,
    by: Option<&str>,
) -> Result<(), posts::Error> {
    let key = key(&id(approval));
    let (Posted::At(ts), closed) = (shared.store.slack_post(place, &key).await?, format!("{key}.closed")) else {
        return Ok(());
    };
    if matches!(shared.store.slack_post(place, &closed).await?, Posted::At(_)) {
        return Ok(());
    }
    posts.right.check()?;
    match chat::update(posts.web, posts.token, &place.channel, &ts, &ended(approval, by)).await {
        Ok(()) => {}
        Err(error) if error.code() == Some("message_not_found") => {}
        Err(error) => return Err(error.into()),
    }
    shared.store.slack_post_begin(place, &closed, Timestamp::now()).await?;
    Ok(shared.store.slack_post_done(place, &closed, &ts).await?)
}

/// The id in an approval's metadata.
pub(crate) fn id(approval: &v1::Approval) -> String {
    approval.metadata.as_ref().map(|metadata| metadata.id.clone()).unwrap_or_default()
}

fn key(id: &str) -> String {
    format!("approval.{id}")
}

/// The call itself, as it would be made.
fn described(spec: &v1::ApprovalSpec) -> Vec<Value> {
    let arguments: Value = serde_json::from_str(&spec.arguments).unwrap_or_else(|_| spec.arguments.clone().into());
    let shown = serde_json::to_string_pretty(&arguments).unwrap_or_else(|_| spec.arguments.clone());
    let mut blocks = vec![mrkdwn::section(&format!("May I call `{}`?", escape(&spec.tool.replace('`', ""))))];
    blocks.extend(mrkdwn::fenced(&shown));
    if !spec.reason.is_empty() {
        blocks.push(mrkdwn::context(&format!("Why I ask: {}", escape(&mrkdwn::clip(&spec.reason, 500)))));
    }
    blocks
}

fn is_whole(spec: &v1::ApprovalSpec) -> bool {
    spec.arguments_size <= spec.arguments.len() as u64 && spec.arguments.len() <= SHOWN
}

fn question(approval: &v1::Approval) -> Content {
    let spec = approval.spec.clone().unwrap_or_default();
    let id = id(approval);
    let value = json!([id, spec.arguments_hash]).to_string();
    let button = |action: &str, text: &str, style: &str| {
        json!({"type": "button", "action_id": action, "text": {"type": "plain_text", "text": text}, "style": style,
               "value": value})
    };
    let (mut blocks, elements) = if is_whole(&spec) {
        (
            described(&spec),
            vec![button(words::APPROVE, "Approve", "primary"), button(words::REJECT, "Reject", "danger")],
        )
    } else {
        let size = spec.arguments_size;
        let text = format!(
            "I want to call `{}` with {size} bytes of arguments, which are too many to be shown here. Look at them with \
             `construct approval show {id}` and approve them there.",
            escape(&spec.tool.replace('`', ""))
        );
        (vec![mrkdwn::section(&text)], vec![button(words::REJECT, "Reject", "danger")])
    };
    blocks.push(json!({"type": "actions", "elements": elements}));
    Content { text: format!("May I call {}?", escape(&spec.tool)), blocks }
}

fn ended(approval: &v1::Approval, by: Option<&str>) -> Content {
    let spec = approval.spec.clone().unwrap_or_default();
    let status = approval.status.clone().unwrap_or_default();
    let by = match by {
        Some(user) => format!(" by <@{}>", words::user_id(user)),
        None if !status.words.is_empty() => format!(": {}", escape(&mrkdwn::clip(&status.words, 300))),
        None => String::new(),
    };
    let how = match status.state() {
        ApprovalState::Approved => format!(":white_check_mark: Approved{by}"),
        ApprovalState::Rejected => format!(":no_entry: Rejected{by}"),
        ApprovalState::Expired => ":alarm_clock: Nobody decided in time".to_owned(),
        ApprovalState::Cancelled => "Not needed any more".to_owned(),
        ApprovalState::Unspecified | ApprovalState::Pending => "Not decided yet".to_owned(),
    };
    let mut blocks = if is_whole(&spec) { described(&spec) } else { Vec::new() };
    blocks.push(mrkdwn::section(&how));
    Content { text: how, blocks }
}

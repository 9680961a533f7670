//! Calls of scripts that a person has to decide about, as messages with buttons. What is shown is all of what is decided about: a call
//! that is too long to be shown cannot be approved here. Of the mentions that wait in a thread one shows them, the one its task works on.

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
    web::chat::Content,
    words,
};

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
    // Two would post the same buttons at once.
    let shows = shared.store.slack_mention_worked_on(task).await?.is_some_and(|key| key == mention.key);
    let mut open = 0;
    for approval in found.approvals.iter().rev() {
        let id = id(approval);
        let key = key(&id);
        if approval.status.as_ref().is_some_and(|status| status.state() == ApprovalState::Pending) {
            open += 1;
            if shows {
                // Another mention may have posted it, at any time since the thread began.
                let content = (&question(approval), &question_elsewhere(approval));
                posts.once_or(&place, &key, &place.thread, content).await?;
            }
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
    let mut done = posts.update(place, &ts, &ended(approval, by)).await;
    if matches!(&done, Err(posts::Error::Slack(error)) if error.is_shape()) {
        done = posts.update(place, &ts, &ended_shortly(approval, by)).await;
    }
    match done {
        Ok(()) => {}
        Err(posts::Error::Slack(error)) if error.code() == Some("message_not_found") => {}
        Err(error) => return Err(error),
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

fn buttons(approval: &v1::Approval, all: &[(&str, &str, &str)]) -> Value {
    let hash = approval.spec.as_ref().map(|spec| spec.arguments_hash.as_str()).unwrap_or_default();
    let value = json!([id(approval), hash]).to_string();
    let button = |(action, text, style): &(&str, &str, &str)| {
        json!({"type": "button", "action_id": action, "text": {"type": "plain_text", "text": text}, "style": style,
               "value": value})
    };
    json!({"type": "actions", "elements": all.iter().map(button).collect::<Vec<_>>()})
}

fn question(approval: &v1::Approval) -> Content {
    let spec = approval.spec.clone().unwrap_or_default();
    let mut blocks = described(&spec);
    blocks.push(buttons(approval, &[(words::APPROVE, "Approve", "primary"), (words::REJECT, "Reject", "danger")]));
    if spec.arguments_size > spec.arguments.len() as u64 || !mrkdwn::fits(&blocks) {
        return question_elsewhere(approval);
    }
    Content { text: format!("May I call {}?", named(&spec)), blocks }
}

/// What is not shown cannot be approved.
fn question_elsewhere(approval: &v1::Approval) -> Content {
    let spec = approval.spec.clone().unwrap_or_default();
    let (size, id, tool) = (spec.arguments_size, id(approval), named(&spec));
    let text = format!(
        "I want to call `{tool}` with {size} bytes of arguments, which are too many to be shown here. Look at them with \
         `construct approval show {id}` and approve them there."
    );
    let blocks = vec![mrkdwn::section(&text), buttons(approval, &[(words::REJECT, "Reject", "danger")])];
    Content { text: format!("May I call {tool}?"), blocks }
}

/// The tool's name, where the call is not shown as such.
fn named(spec: &v1::ApprovalSpec) -> String {
    escape(&mrkdwn::clip(&spec.tool.replace('`', ""), 200))
}

fn ended(approval: &v1::Approval, by: Option<&str>) -> Content {
    let spec = approval.spec.clone().unwrap_or_default();
    let short = ended_shortly(approval, by);
    let mut blocks = described(&spec);
    blocks.extend(short.blocks.iter().cloned());
    if spec.arguments_size > spec.arguments.len() as u64 || !mrkdwn::fits(&blocks) {
        return short;
    }
    Content { blocks, ..short }
}

fn ended_shortly(approval: &v1::Approval, by: Option<&str>) -> Content {
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
    Content { blocks: vec![mrkdwn::section(&how)], text: how }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn approval(arguments: &Value) -> v1::Approval {
        let arguments = arguments.to_string();
        let spec = v1::ApprovalSpec {
            tool: "create_file".to_owned(),
            arguments_size: arguments.len() as u64,
            arguments,
            ..v1::ApprovalSpec::default()
        };
        v1::Approval { spec: Some(spec), ..v1::Approval::default() }
    }

    #[test]
    fn a_call_can_be_approved_where_all_of_it_is_shown_within_slacks_limits_and_nowhere_else() {
        // Each is short enough in bytes, and the later ones grow when they are shown.
        for (arguments, whole) in [
            (json!({"text": "x".repeat(9_000)}), true),
            (json!({"text": "x".repeat(10_000)}), false),
            (json!({"text": "<".repeat(3_000)}), false),
            (json!({"rows": vec![0; 2_000]}), false),
        ] {
            let approval = approval(&arguments);
            let content = question(&approval);
            assert!(mrkdwn::fits(&content.blocks), "{:?}", content.blocks);
            let shown = Value::from(content.blocks).to_string();
            assert_eq!(shown.contains(words::APPROVE), whole, "{shown}");
            assert!(shown.contains(words::REJECT));
            let ended = ended(&approval, None);
            assert!(mrkdwn::fits(&ended.blocks), "{:?}", ended.blocks);
            assert_eq!(ended.blocks.len() > 1, whole);
        }
    }
}

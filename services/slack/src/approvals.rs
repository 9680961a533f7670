//! Approval requests, as messages with buttons. A message shows all arguments of the call. A call
//! that is too long to be shown cannot be approved here. Of the mentions that wait in a thread, one
//! shows the requests: the one that its task works on.

use construct_proto::v1::{self, ApprovalState, list_approvals_request};
use construct_runtime::clock;
use construct_store::slack::{Mention, PostState, ThreadKey};
use serde_json::{Value, json};

use crate::{
    agents,
    error::Error,
    gateway::{Caller, call},
    mrkdwn::{self, escape},
    posts::{self, Posts},
    shared::Shared,
    texts,
    web::chat::Content,
};

/// Approvals of a task that are read.
const PAGE_SIZE: i32 = 100;
/// The prefix of the key of a request's post; the approval's id follows.
const KEY_PREFIX: &str = "approval.";
/// The suffix of the row that records that the post shows the decision.
const CLOSED_SUFFIX: &str = ".closed";

/// Posts the pending approvals of a task and its subtasks, and updates the posts of decided ones.
/// Returns how many are pending.
pub(crate) async fn show(
    shared: &Shared,
    (posts, caller): (&Posts<'_>, &Caller),
    mention: &Mention,
    task: &str,
) -> Result<usize, Error> {
    let filter = list_approvals_request::Filter {
        tree: task.to_owned(),
        state: ApprovalState::Pending.into(),
        ..Default::default()
    };
    let request = v1::ListApprovalsRequest {
        page: Some(v1::PageRequest { page_size: PAGE_SIZE, ..v1::PageRequest::default() }),
        filter: Some(filter),
    };
    let request = shared.gateway.request(caller, request);
    let found = call(shared.gateway.approvals().list_approvals(request)).await?.approvals;
    let thread_key = mention.thread_key();
    // Two mentions would post the same buttons at once.
    let showing = shared.store.slack_mention_for_approvals(task).await?;
    let is_showing = showing.as_ref() == Some(&mention.key);
    let (mut open, mut hidden) = (0, false);
    for approval in found.iter().rev() {
        let key = post_key(&id(approval));
        if matches!(shared.store.slack_post(&thread_key, &key).await?, PostState::Posted(_)) {
            open += 1;
            continue;
        }
        // Skip approvals of unrelated tasks: an older gateway that does not know the filter lists
        // those of the whole organization.
        let origin = find_origin(shared, caller, approval, task).await?;
        if matches!(origin, ApprovalOrigin::Unrelated) {
            continue;
        }
        open += 1;
        hidden |= !is_showing;
        if is_showing {
            let asks = origin.subtask();
            // Another mention may have posted it, at any time since the thread started.
            let content =
                (&question_content(approval, asks), &truncated_question_content(approval, asks));
            posts.post_once_or_plainer(&thread_key, &key, &thread_key.thread, content).await?;
        }
    }
    // The mention that shows it may poll rarely, because it is answered itself.
    if let Some(showing) = showing.filter(|_| hidden)
        && shared.store.slack_mention_wake(&showing, clock::now()).await?
    {
        shared.due.notify_one();
    }
    let waiting: Vec<String> = found.iter().map(id).collect();
    for id in shared.store.slack_posts_open(&thread_key, KEY_PREFIX, CLOSED_SUFFIX).await? {
        if !waiting.contains(&id) {
            close_if_decided(shared, (posts, caller), &thread_key, &id, task).await?;
        }
    }
    Ok(open)
}

/// Updates the post of an approval, if it is decided.
async fn close_if_decided(
    shared: &Shared,
    (posts, caller): (&Posts<'_>, &Caller),
    thread_key: &ThreadKey,
    id: &str,
    task: &str,
) -> Result<(), Error> {
    let request =
        shared.gateway.request(caller, v1::GetApprovalRequest { approval: id.to_owned() });
    let approval = match call(shared.gateway.approvals().get_approval(request)).await {
        Ok(approval) => approval,
        // Its task was deleted.
        Err(status) if status.code() == tonic::Code::NotFound => {
            let metadata = v1::Metadata { id: id.to_owned(), ..v1::Metadata::default() };
            let status =
                v1::ApprovalStatus { state: ApprovalState::Cancelled.into(), ..Default::default() };
            v1::Approval { metadata: Some(metadata), spec: None, status: Some(status) }
        }
        Err(status) => return Err(status.into()),
    };
    if approval.status.as_ref().is_some_and(|status| status.state() == ApprovalState::Pending) {
        return Ok(());
    }
    let origin = find_origin(shared, caller, &approval, task).await?;
    Ok(close(shared, posts, thread_key, (&approval, origin.subtask()), None).await?)
}

/// The origin of an approval request.
enum ApprovalOrigin {
    /// The thread's task.
    ThreadTask,
    /// A subtask with this agent.
    Subtask(String),
    /// A task that is unrelated to the thread.
    Unrelated,
}

impl ApprovalOrigin {
    /// The agent of the subtask, if it is one.
    fn subtask(&self) -> Option<&str> {
        match self {
            Self::Subtask(agent) => Some(agent),
            Self::ThreadTask | Self::Unrelated => None,
        }
    }
}

async fn find_origin(
    shared: &Shared,
    caller: &Caller,
    approval: &v1::Approval,
    task: &str,
) -> Result<ApprovalOrigin, Error> {
    match approval.spec.as_ref().map(|spec| spec.task.as_str()) {
        Some(asking) if asking != task => {
            let found = agents::find_requester(shared, caller, asking, task).await?;
            Ok(found
                .map_or(ApprovalOrigin::Unrelated, |asking| ApprovalOrigin::Subtask(asking.agent)))
        }
        _ => Ok(ApprovalOrigin::ThreadTask),
    }
}

/// Shows the decision in the post of a request, once. `asks` is the agent of the subtask, if a
/// subtask made the call.
pub(crate) async fn close(
    shared: &Shared,
    posts: &Posts<'_>,
    thread_key: &ThreadKey,
    (approval, asks): (&v1::Approval, Option<&str>),
    by: Option<&str>,
) -> Result<(), posts::Error> {
    let key = post_key(&id(approval));
    let (PostState::Posted(ts), closed) =
        (shared.store.slack_post(thread_key, &key).await?, format!("{key}{CLOSED_SUFFIX}"))
    else {
        return Ok(());
    };
    if matches!(shared.store.slack_post(thread_key, &closed).await?, PostState::Posted(_)) {
        return Ok(());
    }
    let mut result = posts.update(thread_key, &ts, &decided_content(approval, asks, by)).await;
    if matches!(&result, Err(posts::Error::Slack(error)) if error.is_invalid_content()) {
        result = posts.update(thread_key, &ts, &short_decided_content(approval, by)).await;
    }
    match result {
        Ok(()) => {}
        // No message can show it: it was deleted, or can no longer be edited.
        Err(posts::Error::Slack(error)) if posts::is_uneditable(&error) => {}
        Err(error) => return Err(error),
    }
    shared.store.slack_post_begin(thread_key, &closed, clock::now()).await?;
    Ok(shared.store.slack_post_done(thread_key, &closed, &ts).await?)
}

/// The id of an approval.
pub(crate) fn id(approval: &v1::Approval) -> String {
    approval.metadata.as_ref().map(|metadata| metadata.id.clone()).unwrap_or_default()
}

fn post_key(id: &str) -> String {
    format!("{KEY_PREFIX}{id}")
}

/// The blocks that show the call and its arguments.
fn call_blocks(spec: &v1::ApprovalSpec, asks: Option<&str>) -> Vec<Value> {
    let arguments: Value =
        serde_json::from_str(&spec.arguments).unwrap_or_else(|_| spec.arguments.clone().into());
    let shown = serde_json::to_string_pretty(&arguments).unwrap_or_else(|_| spec.arguments.clone());
    let question =
        format!("{}May I call `{}`?", subtask_prefix(asks), escape(&spec.tool.replace('`', "")));
    let mut blocks = vec![mrkdwn::section(&question)];
    blocks.extend(mrkdwn::fenced(&shown));
    if !spec.reason.is_empty() {
        blocks.push(mrkdwn::context(&format!(
            "Why I ask: {}",
            escape(&mrkdwn::truncate(&spec.reason, 500))
        )));
    }
    blocks
}

/// The introduction of a call of a subtask.
fn subtask_prefix(asks: Option<&str>) -> String {
    asks.map(|agent| format!("*{}* asks, in a subtask: ", escape(agent))).unwrap_or_default()
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

fn question_content(approval: &v1::Approval, asks: Option<&str>) -> Content {
    let spec = approval.spec.clone().unwrap_or_default();
    let mut blocks = call_blocks(&spec, asks);
    blocks.push(buttons(
        approval,
        &[
            (texts::APPROVE_ACTION, "Approve", "primary"),
            (texts::REJECT_ACTION, "Reject", "danger"),
        ],
    ));
    if spec.arguments_size > spec.arguments.len() as u64 || !mrkdwn::fits(&blocks) {
        return truncated_question_content(approval, asks);
    }
    Content { text: format!("May I call {}?", tool_name(&spec)), blocks }
}

/// The request for a call that is too long to be shown: it can only be rejected here.
fn truncated_question_content(approval: &v1::Approval, asks: Option<&str>) -> Content {
    let spec = approval.spec.clone().unwrap_or_default();
    let (size, id, tool) = (spec.arguments_size, id(approval), tool_name(&spec));
    let text = format!(
        "{}I want to call `{tool}` with {size} bytes of arguments, too many to show here. Read them with \
         `construct approval get {id}` and approve them there.",
        subtask_prefix(asks)
    );
    let blocks = vec![
        mrkdwn::section(&text),
        buttons(approval, &[(texts::REJECT_ACTION, "Reject", "danger")]),
    ];
    Content { text: format!("May I call {tool}?"), blocks }
}

/// The tool's name, for plain text.
fn tool_name(spec: &v1::ApprovalSpec) -> String {
    escape(&mrkdwn::truncate(&spec.tool.replace('`', ""), 200))
}

fn decided_content(approval: &v1::Approval, asks: Option<&str>, by: Option<&str>) -> Content {
    let spec = approval.spec.clone().unwrap_or_default();
    let short = short_decided_content(approval, by);
    let mut blocks = call_blocks(&spec, asks);
    blocks.extend(short.blocks.iter().cloned());
    if approval.spec.is_none()
        || spec.arguments_size > spec.arguments.len() as u64
        || !mrkdwn::fits(&blocks)
    {
        return short;
    }
    Content { blocks, ..short }
}

fn short_decided_content(approval: &v1::Approval, by: Option<&str>) -> Content {
    let status = approval.status.clone().unwrap_or_default();
    let by = match by {
        Some(user) => format!(" by <@{}>", texts::user_id(user)),
        None if !status.comment.is_empty() => {
            format!(": {}", escape(&mrkdwn::truncate(&status.comment, 300)))
        }
        None => String::new(),
    };
    let how = match status.state() {
        ApprovalState::Approved => format!(":white_check_mark: Approved{by}"),
        ApprovalState::Rejected => format!(":no_entry: Rejected{by}"),
        ApprovalState::Expired => ":alarm_clock: Expired without a decision".to_owned(),
        ApprovalState::Cancelled => "No longer needed".to_owned(),
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
    fn call_can_be_approved_only_where_all_arguments_are_shown() {
        // Each is short enough in bytes; the later ones grow when they are rendered.
        for (arguments, whole) in [
            (json!({"text": "x".repeat(9_000)}), true),
            (json!({"text": "x".repeat(10_000)}), false),
            (json!({"text": "<".repeat(3_000)}), false),
            (json!({"rows": vec![0; 2_000]}), false),
        ] {
            let approval = approval(&arguments);
            let content = question_content(&approval, None);
            assert!(mrkdwn::fits(&content.blocks), "{:?}", content.blocks);
            let shown = Value::from(content.blocks).to_string();
            assert_eq!(shown.contains(texts::APPROVE_ACTION), whole, "{shown}");
            assert!(shown.contains(texts::REJECT_ACTION));
            let ended = decided_content(&approval, None, None);
            assert!(mrkdwn::fits(&ended.blocks), "{:?}", ended.blocks);
            assert_eq!(ended.blocks.len() > 1, whole);
        }
    }
}

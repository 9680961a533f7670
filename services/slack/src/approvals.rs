//! Calls of scripts that a person has to decide about, as messages with buttons. What is shown is
//! all of what is decided about: a call that is too long to be shown cannot be approved here. Of
//! the mentions that wait in a thread one shows them, the one its task works on.

use construct_proto::v1::{self, ApprovalState, list_approvals_request};
use construct_runtime::clock;
use construct_store::slack::{Mention, Place, Posted};
use serde_json::{Value, json};

use crate::{
    Shared, agents,
    gateway::{Caller, call},
    mention::Trouble,
    mrkdwn::{self, escape},
    posts::{self, Posts},
    web::chat::Content,
    words,
};

/// Approvals of a task that are looked at.
const PAGE: i32 = 100;
/// How the key of a question's post begins; the approval's id follows.
const KEY: &str = "approval.";
/// What is added to it for the row that says that the post shows how it ended.
const CLOSED: &str = ".closed";

/// Shows what waits for a person, of a task and of all that work for it, and of what is over how it
/// ended. How many wait.
pub(crate) async fn show(
    shared: &Shared,
    (posts, caller): (&Posts<'_>, &Caller),
    mention: &Mention,
    task: &str,
) -> Result<usize, Trouble> {
    let filter = list_approvals_request::Filter {
        tree: task.to_owned(),
        state: ApprovalState::Pending.into(),
        ..Default::default()
    };
    let request = v1::ListApprovalsRequest {
        page: Some(v1::PageRequest { page_size: PAGE, ..v1::PageRequest::default() }),
        filter: Some(filter),
    };
    let request = shared.gateway.request(caller, request);
    let found = call(shared.gateway.approvals().list_approvals(request)).await?.approvals;
    let place = mention.place();
    // Two would post the same buttons at once.
    let showing = shared.store.slack_mention_showing(task).await?;
    let shows = showing.as_ref() == Some(&mention.key);
    let (mut open, mut hidden) = (0, false);
    for approval in found.iter().rev() {
        let key = key(&id(approval));
        if matches!(shared.store.slack_post(&place, &key).await?, Posted::At(_)) {
            open += 1;
            continue;
        }
        // Nobody else's: a gateway that does not know the filter lists those of the whole
        // organization.
        let whose = whose(shared, caller, approval, task).await?;
        if matches!(whose, Whose::Others) {
            continue;
        }
        open += 1;
        hidden |= !shows;
        if shows {
            let asks = whose.subtask();
            // Another mention may have posted it, at any time since the thread began.
            let content = (&question(approval, asks), &question_elsewhere(approval, asks));
            posts.once_or(&place, &key, &place.thread, content).await?;
        }
    }
    // The one that shows it may look rarely, because it is answered itself.
    if let Some(showing) = showing.filter(|_| hidden)
        && shared.store.slack_mention_wake(&showing, clock::now()).await?
    {
        shared.due.notify_one();
    }
    let waiting: Vec<String> = found.iter().map(id).collect();
    for id in shared.store.slack_posts_open(&place, KEY, CLOSED).await? {
        if !waiting.contains(&id) {
            over(shared, (posts, caller), &place, &id, task).await?;
        }
    }
    Ok(open)
}

/// Says how a question that was shown ended, unless it has not.
async fn over(
    shared: &Shared,
    (posts, caller): (&Posts<'_>, &Caller),
    place: &Place,
    id: &str,
    task: &str,
) -> Result<(), Trouble> {
    let request =
        shared.gateway.request(caller, v1::GetApprovalRequest { approval: id.to_owned() });
    let approval = match call(shared.gateway.approvals().get_approval(request)).await {
        Ok(approval) => approval,
        // Its task is deleted.
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
    let whose = whose(shared, caller, &approval, task).await?;
    Ok(close(shared, posts, place, (&approval, whose.subtask()), None).await?)
}

/// Whose call waits.
enum Whose {
    /// The thread's task's.
    Own,
    /// That of a subtask with this agent.
    Subtask(String),
    /// That of a task that has nothing to do with the thread.
    Others,
}

impl Whose {
    /// The agent that asks, where it is not the one that is talked to.
    fn subtask(&self) -> Option<&str> {
        match self {
            Self::Subtask(agent) => Some(agent),
            Self::Own | Self::Others => None,
        }
    }
}

async fn whose(
    shared: &Shared,
    caller: &Caller,
    approval: &v1::Approval,
    task: &str,
) -> Result<Whose, Trouble> {
    match approval.spec.as_ref().map(|spec| spec.task.as_str()) {
        Some(asking) if asking != task => {
            let found = agents::within(shared, caller, asking, task).await?;
            Ok(found.map_or(Whose::Others, |asking| Whose::Subtask(asking.agent)))
        }
        _ => Ok(Whose::Own),
    }
}

/// Says under a question how it ended, once. `asks` is the agent of a subtask, where the call is
/// one's.
pub(crate) async fn close(
    shared: &Shared,
    posts: &Posts<'_>,
    place: &Place,
    (approval, asks): (&v1::Approval, Option<&str>),
    by: Option<&str>,
) -> Result<(), posts::Error> {
    let key = key(&id(approval));
    let (Posted::At(ts), closed) =
        (shared.store.slack_post(place, &key).await?, format!("{key}{CLOSED}"))
    else {
        return Ok(());
    };
    if matches!(shared.store.slack_post(place, &closed).await?, Posted::At(_)) {
        return Ok(());
    }
    let mut done = posts.update(place, &ts, &ended(approval, asks, by)).await;
    if matches!(&done, Err(posts::Error::Slack(error)) if error.is_shape()) {
        done = posts.update(place, &ts, &ended_shortly(approval, by)).await;
    }
    match done {
        Ok(()) => {}
        // There is nothing that could say it: the message is gone, or nobody may edit it any more.
        Err(posts::Error::Slack(error)) if posts::is_out_of_reach(&error) => {}
        Err(error) => return Err(error),
    }
    shared.store.slack_post_begin(place, &closed, clock::now()).await?;
    Ok(shared.store.slack_post_done(place, &closed, &ts).await?)
}

/// The id in an approval's metadata.
pub(crate) fn id(approval: &v1::Approval) -> String {
    approval.metadata.as_ref().map(|metadata| metadata.id.clone()).unwrap_or_default()
}

fn key(id: &str) -> String {
    format!("{KEY}{id}")
}

/// The call itself, as it would be made.
fn described(spec: &v1::ApprovalSpec, asks: Option<&str>) -> Vec<Value> {
    let arguments: Value =
        serde_json::from_str(&spec.arguments).unwrap_or_else(|_| spec.arguments.clone().into());
    let shown = serde_json::to_string_pretty(&arguments).unwrap_or_else(|_| spec.arguments.clone());
    let question =
        format!("{}May I call `{}`?", of_subtask(asks), escape(&spec.tool.replace('`', "")));
    let mut blocks = vec![mrkdwn::section(&question)];
    blocks.extend(mrkdwn::fenced(&shown));
    if !spec.reason.is_empty() {
        blocks.push(mrkdwn::context(&format!(
            "Why I ask: {}",
            escape(&mrkdwn::clip(&spec.reason, 500))
        )));
    }
    blocks
}

/// Who asks, where it is the agent of a subtask.
fn of_subtask(asks: Option<&str>) -> String {
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

fn question(approval: &v1::Approval, asks: Option<&str>) -> Content {
    let spec = approval.spec.clone().unwrap_or_default();
    let mut blocks = described(&spec, asks);
    blocks.push(buttons(
        approval,
        &[(words::APPROVE, "Approve", "primary"), (words::REJECT, "Reject", "danger")],
    ));
    if spec.arguments_size > spec.arguments.len() as u64 || !mrkdwn::fits(&blocks) {
        return question_elsewhere(approval, asks);
    }
    Content { text: format!("May I call {}?", named(&spec)), blocks }
}

/// What is not shown cannot be approved.
fn question_elsewhere(approval: &v1::Approval, asks: Option<&str>) -> Content {
    let spec = approval.spec.clone().unwrap_or_default();
    let (size, id, tool) = (spec.arguments_size, id(approval), named(&spec));
    let text = format!(
        "{}I want to call `{tool}` with {size} bytes of arguments, which are too many to be shown here. Look at them with \
         `construct approval get {id}` and approve them there.",
        of_subtask(asks)
    );
    let blocks =
        vec![mrkdwn::section(&text), buttons(approval, &[(words::REJECT, "Reject", "danger")])];
    Content { text: format!("May I call {tool}?"), blocks }
}

/// The tool's name, where the call is not shown as such.
fn named(spec: &v1::ApprovalSpec) -> String {
    escape(&mrkdwn::clip(&spec.tool.replace('`', ""), 200))
}

fn ended(approval: &v1::Approval, asks: Option<&str>, by: Option<&str>) -> Content {
    let spec = approval.spec.clone().unwrap_or_default();
    let short = ended_shortly(approval, by);
    let mut blocks = described(&spec, asks);
    blocks.extend(short.blocks.iter().cloned());
    if approval.spec.is_none()
        || spec.arguments_size > spec.arguments.len() as u64
        || !mrkdwn::fits(&blocks)
    {
        return short;
    }
    Content { blocks, ..short }
}

fn ended_shortly(approval: &v1::Approval, by: Option<&str>) -> Content {
    let status = approval.status.clone().unwrap_or_default();
    let by = match by {
        Some(user) => format!(" by <@{}>", words::user_id(user)),
        None if !status.words.is_empty() => {
            format!(": {}", escape(&mrkdwn::clip(&status.words, 300)))
        }
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
            let content = question(&approval, None);
            assert!(mrkdwn::fits(&content.blocks), "{:?}", content.blocks);
            let shown = Value::from(content.blocks).to_string();
            assert_eq!(shown.contains(words::APPROVE), whole, "{shown}");
            assert!(shown.contains(words::REJECT));
            let ended = ended(&approval, None, None);
            assert!(mrkdwn::fits(&ended.blocks), "{:?}", ended.blocks);
            assert_eq!(ended.blocks.len() > 1, whole);
        }
    }
}

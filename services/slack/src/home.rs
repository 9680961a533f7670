//! The app's home: a user's recent tasks, their state, and their cost.

use construct_proto::v1;
use construct_store::slack::Mention;
use serde_json::{Value, json};

use crate::{
    access::{self, Refusal},
    error::Error,
    gateway::call,
    mrkdwn::{self, escape},
    shared::Shared,
    texts,
    web::views,
};

/// Questions that are read.
const MAX_QUESTIONS: i64 = 50;
/// Tasks that are shown.
const MAX_TASKS: usize = 10;

/// Publishes a user's home.
pub(crate) async fn show(shared: &Shared, team: &str, user: Option<&str>) -> Result<(), Error> {
    let Some(user) = user else { return Ok(()) };
    let team = shared.teams.team(team).await?;
    let mut blocks = vec![texts::header("Your recent tasks")];
    let unknown =
        matches!(access::check_membership(shared, &team, user).await?, Err(Refusal::NotLinked));
    let mut shown: Vec<String> = Vec::new();
    let asked = if unknown {
        Vec::new()
    } else {
        shared.store.slack_mentions_by_user(&team.token.team, user, MAX_QUESTIONS).await?
    };
    for mention in asked {
        // Nothing of the workspace's former organization is shown.
        let Some(task) =
            mention.task.as_ref().filter(|_| mention.organization == team.caller.organization)
        else {
            continue;
        };
        if shown.contains(task) || shown.len() == MAX_TASKS {
            continue;
        }
        shown.push(task.clone());
        let request =
            shared.gateway.request(&team.caller, v1::GetTaskRequest { task: task.clone() });
        match call(shared.gateway.tasks().get_task(request)).await {
            Ok(found) => {
                blocks.push(mrkdwn::section(&task_line(shared, &mention, &found)));
            }
            Err(status) if status.code() == tonic::Code::NotFound => {}
            Err(status) => return Err(status.into()),
        }
    }
    if blocks.len() == 1 {
        let nothing = "Nothing yet. Mention me in a channel, or send me a message here.";
        blocks.push(mrkdwn::section(&escape(if unknown { texts::NOT_LINKED } else { nothing })));
    }
    blocks.push(json!({"type": "divider"}));
    blocks.push(mrkdwn::context(crate::commands::HELP));
    let view: Value = json!({"type": "home", "blocks": blocks});
    Ok(views::publish(&shared.web, &team.token, user, view).await?)
}

fn task_line(shared: &Shared, mention: &Mention, task: &v1::Task) -> String {
    let title = title(task);
    let id = mention.task.as_deref().unwrap_or_default();
    let title = match shared.config.task_url(id) {
        Some(url) => format!("<{}|{}>", escape(&url), escape(&title).replace('|', "¦")),
        None => format!("*{}*", escape(&title)),
    };
    format!("{title} in <#{}>\n{}", texts::user_id(&mention.key.channel), summary(task))
}

/// The title of a task.
pub(crate) fn title(task: &v1::Task) -> String {
    let title = task.spec.as_ref().map(|spec| spec.title.trim()).unwrap_or_default();
    if title.is_empty() {
        "A task without a title".to_owned()
    } else {
        mrkdwn::truncate(&title.replace('\n', " "), 150)
    }
}

/// The state of a task, and its cost with that of its descendants.
pub(crate) fn summary(task: &v1::Task) -> String {
    let status = task.status.clone().unwrap_or_default();
    let state = match status.phase() {
        v1::TaskPhase::InvokeModel | v1::TaskPhase::ExecuteTools | v1::TaskPhase::AwaitSubtasks => {
            "working"
        }
        v1::TaskPhase::Suspended => "suspended",
        v1::TaskPhase::AwaitApproval => "waiting for a decision",
        v1::TaskPhase::AwaitInput | v1::TaskPhase::Unspecified => "done",
    };
    let own = status.usage.map_or(0, |usage| usage.cost_pico_usd);
    let cost = own.saturating_add(status.subtask_totals.map_or(0, |totals| totals.cost_pico_usd));
    format!("{state} · {} messages · {}", status.message_count, format_dollars(cost))
}

/// Formats 10⁻¹² dollars to a hundredth of a cent.
fn format_dollars(pico: i64) -> String {
    let parts = pico / 100_000_000;
    format!("${}.{:04}", parts / 10_000, parts % 10_000)
}

#[cfg(test)]
mod tests {
    use super::format_dollars;

    #[test]
    fn cost_is_shown_to_a_hundredth_of_a_cent() {
        assert_eq!(format_dollars(0), "$0.0000");
        assert_eq!(format_dollars(1_234_567_890_123), "$1.2345");
    }
}

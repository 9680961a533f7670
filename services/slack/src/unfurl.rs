//! Previews of links to tasks.

use construct_proto::v1;
use serde_json::{Map, Value, json};

use crate::{
    access,
    config::TASK_PLACEHOLDER,
    error::Error,
    gateway::call,
    home,
    mrkdwn::{self, escape},
    shared::Shared,
    web::chat,
};

/// Links of one message that are unfurled.
const MAX_LINKS: usize = 5;

/// Attaches titles to links to tasks, for members of the workspace.
pub(crate) async fn show(shared: &Shared, team: &str, event: &Value) -> Result<(), Error> {
    let Some(pattern) = &shared.config.slack_task_url else { return Ok(()) };
    let team = shared.teams.team(team).await?;
    let user = event["user"].as_str().unwrap_or_default();
    if access::check_membership(shared, &team, user).await?.is_err() {
        return Ok(());
    }
    // With the user's own key, if they have one: nobody may show a task that they may not see.
    let organization = team.installation.organization;
    let by = shared.members.authorization(&team.token.team, organization, user).await?;
    let mut unfurls = Map::new();
    for link in event["links"].as_array().into_iter().flatten().take(MAX_LINKS) {
        let url = link["url"].as_str().unwrap_or_default();
        let Some(task) = task_id_in_url(pattern, url) else { continue };
        let request = v1::GetTaskRequest { task: task.to_owned() };
        let request = shared.gateway.request_by(&team.caller, by.as_ref(), request);
        // A task without access looks like one that never existed.
        let Ok(found) = call(shared.gateway.tasks().get_task(request)).await else { continue };
        let text = format!("*{}*\n{}", escape(&home::title(&found)), home::summary(&found));
        unfurls.insert(url.to_owned(), json!({"blocks": [mrkdwn::section(&text)]}));
    }
    if unfurls.is_empty() {
        return Ok(());
    }
    let text = |name: &str| event[name].as_str().unwrap_or_default();
    Ok(chat::unfurl(&shared.web, &team.token, text("channel"), text("message_ts"), unfurls.into())
        .await?)
}

/// The task id in an address of this form.
fn task_id_in_url<'a>(pattern: &str, url: &'a str) -> Option<&'a str> {
    let (before, after) = pattern.split_once(TASK_PLACEHOLDER)?;
    let rest = url.strip_prefix(before)?;
    let id = if after.is_empty() {
        rest.split(['?', '#', '/']).next()?
    } else {
        rest.split_once(after)?.0
    };
    let valid = id.starts_with("task_")
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
    valid.then_some(id)
}

#[cfg(test)]
mod tests {
    use super::task_id_in_url;

    #[test]
    fn task_id_is_read_from_configured_url_form_only() {
        let id = "task_00000000-0000-0000-0000-000000000007";
        assert_eq!(
            task_id_in_url(
                "https://c.example/t/{task}",
                &format!("https://c.example/t/{id}?tab=1")
            ),
            Some(id)
        );
        assert_eq!(
            task_id_in_url(
                "https://c.example/{task}/view",
                &format!("https://c.example/{id}/view")
            ),
            Some(id)
        );
        assert_eq!(
            task_id_in_url("https://c.example/t/{task}", &format!("https://d.example/t/{id}")),
            None
        );
        assert_eq!(
            task_id_in_url("https://c.example/t/{task}", "https://c.example/t/agent_7"),
            None
        );
    }
}

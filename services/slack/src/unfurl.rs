//! What is behind the links to tasks that people post.

use construct_proto::v1;
use serde_json::{Map, Value, json};

use crate::{
    Config, Shared, access,
    gateway::call,
    home,
    mention::Trouble,
    mrkdwn::{self, escape},
    web::chat,
};

/// Links of one message that are looked at.
const LINKS: usize = 5;
const PLACEHOLDER: &str = "{task}";

/// Where people look at a task.
pub(crate) fn address(config: &Config, task: &str) -> Option<String> {
    config.slack_task_url.as_ref().map(|url| url.replace(PLACEHOLDER, task))
}

/// Shows titles under links to tasks, for members of the workspace.
pub(crate) async fn show(shared: &Shared, team: &str, event: &Value) -> Result<(), Trouble> {
    let Some(pattern) = &shared.config.slack_task_url else { return Ok(()) };
    let team = shared.teams.team(team).await?;
    let user = event["user"].as_str().unwrap_or_default();
    if access::inside(shared, &team, user).await?.is_err() {
        return Ok(());
    }
    // With their own key, where they have one: whoever may not see a task any more shows it to
    // nobody.
    let organization = team.installation.organization;
    let by = shared.members.authorization(&team.token.team, organization, user).await?;
    let mut unfurls = Map::new();
    for link in event["links"].as_array().into_iter().flatten().take(LINKS) {
        let url = link["url"].as_str().unwrap_or_default();
        let Some(task) = task_of(pattern, url) else { continue };
        let request = v1::GetTaskRequest { task: task.to_owned() };
        let request = shared.gateway.request_by(&team.caller, by.as_ref(), request);
        // A task of somebody else is as absent as one that there never was.
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

/// The id in an address of this form.
fn task_of<'a>(pattern: &str, url: &'a str) -> Option<&'a str> {
    let (before, after) = pattern.split_once(PLACEHOLDER)?;
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
    use super::task_of;

    #[test]
    fn a_task_is_found_in_addresses_of_the_configured_form_only() {
        let id = "task_00000000-0000-0000-0000-000000000007";
        assert_eq!(
            task_of("https://c.example/t/{task}", &format!("https://c.example/t/{id}?tab=1")),
            Some(id)
        );
        assert_eq!(
            task_of("https://c.example/{task}/view", &format!("https://c.example/{id}/view")),
            Some(id)
        );
        assert_eq!(
            task_of("https://c.example/t/{task}", &format!("https://d.example/t/{id}")),
            None
        );
        assert_eq!(task_of("https://c.example/t/{task}", "https://c.example/t/agent_7"), None);
    }
}

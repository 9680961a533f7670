//! `/construct`: lists agents, asks one, and manages permissions.

use std::time::Duration;

use construct_proto::v1::{self, list_agents_request};
use construct_runtime::{clock, telemetry::Chain};
use construct_store::slack::{Grant, GrantKind, MentionKey, NewMention, ThreadKey};
use serde_json::{Value, json};

use crate::{
    access,
    error::Error,
    failure_notice,
    gateway::call,
    intake,
    mrkdwn::{self, escape},
    posts::{LeaseGuard, Posts},
    shared::Shared,
    teams::Team,
    texts,
    web::{self, chat::Content, views},
};

/// The help text.
pub(crate) const HELP: &str = "`/construct list [PREFIX]` — list the agents\n`/construct run` — ask an agent, with a form\n`/construct run AGENT MESSAGE` — \
                               ask an agent here\n`/construct allow use|approve AGENT|all [@USER] [here]` — for admins: who may ask an agent, \
                               or decide about its calls\n`/construct forbid …` — revoke that\n`/construct who` — list the permissions\n`/construct link CODE`, `unlink`, `me` — link your Construct account, with a code of \
                               `construct key code`";
/// The id of the form.
const FORM_ID: &str = "construct_run";
/// The menu of agents in the form, and its block.
const AGENT_FIELD: &str = "agent";
/// Agents per page; the API's maximum.
const PAGE_SIZE: i32 = 100;
/// Agents that are listed at most.
const MAX_LISTED: usize = 1_000;
/// Bytes of the list at most; Slack accepts 40,000 characters.
const MAX_LIST_BYTES: usize = 35_000;
/// Options of a menu; Slack's maximum
/// (<https://docs.slack.dev/reference/block-kit/block-elements/select-menu-element>).
const MAX_OPTIONS: usize = 100;
/// The time limit for suggestions.
const SUGGEST_TIMEOUT: Duration = Duration::from_millis(2_500);

/// Whether a command asks for help.
pub(crate) fn is_help(command: &Value) -> bool {
    matches!(command["text"].as_str().map(str::trim), None | Some("" | "help"))
}

/// Processes a command.
pub(crate) async fn process(
    shared: &Shared,
    team: &str,
    key: &str,
    command: &Value,
) -> Result<(), Error> {
    let text = |name: &str| command[name].as_str().unwrap_or_default();
    let team = shared.teams.team(team).await?;
    let (verb, rest) = split_first_word(text("text"));
    if matches!(verb, "list" | "run" | "who")
        && let Err(refusal) = access::check_membership(shared, &team, text("user_id")).await?
    {
        return reply_privately(shared, &team, command, refusal.message()).await;
    }
    let reply = match verb {
        "list" => Some(list(shared, &team, rest).await?),
        "run" if rest.is_empty() => {
            let form = agent_form(shared, &team, text("channel_id")).await?;
            views::open(&shared.web, &team.token, text("trigger_id"), form).await?;
            None
        }
        "run" => {
            let (agent, words) = split_first_word(rest);
            run(shared, &team, (text("channel_id"), text("user_id")), key, agent, words).await?
        }
        "link" if !rest.is_empty() => Some(link(shared, &team, text("user_id"), rest).await?),
        "unlink" => Some(shared.members.unlink(&team, text("user_id")).await?),
        "me" => {
            let organization = team.installation.organization;
            Some(
                shared
                    .members
                    .describe_link(&team.token.team, organization, text("user_id"))
                    .await?,
            )
        }
        "allow" | "forbid" | "who" => {
            Some(run_permission_command(shared, &team, command, verb, rest).await?)
        }
        _ => Some(HELP.to_owned()),
    };
    match reply {
        Some(reply) => reply_privately(shared, &team, command, &reply).await,
        None => Ok(()),
    }
}

/// Replies to the sender of a command only.
async fn reply_privately(
    shared: &Shared,
    team: &Team,
    command: &Value,
    reply: &str,
) -> Result<(), Error> {
    let text = |name: &str| command[name].as_str().unwrap_or_default();
    if !failure_notice::respond(shared, text("response_url"), reply).await? {
        let (channel, user) = (text("channel_id"), text("user_id"));
        web::chat::post_ephemeral(&shared.web, &team.token, channel, user, None, reply).await?;
    }
    Ok(())
}

/// Processes the submitted form.
pub(crate) async fn process_form(
    shared: &Shared,
    team: &str,
    payload: &Value,
) -> Result<(), Error> {
    let view = &payload["view"];
    if view["callback_id"] != FORM_ID {
        return Ok(());
    }
    let team = shared.teams.team(team).await?;
    let values = &view["state"]["values"];
    let agent = values["agent"]["agent"]["selected_option"]["value"].as_str().unwrap_or_default();
    let words = values["words"]["words"]["value"].as_str().unwrap_or_default();
    let channel = view["private_metadata"].as_str().unwrap_or_default();
    let user = payload["user"]["id"].as_str().unwrap_or_default();
    let key = view["id"].as_str().unwrap_or_default();
    if let Some(reply) = run(shared, &team, (channel, user), key, agent, &escape(words)).await? {
        let sent =
            web::chat::post_ephemeral(&shared.web, &team.token, channel, user, None, &reply).await;
        match sent {
            // The app cannot post in channels that it is not in, but it can always send a direct
            // message.
            Err(web::Error::Refused { .. }) => {
                let content = texts::plain_text(&reply);
                web::chat::post(
                    &shared.web,
                    &team.token,
                    (user, ""),
                    &format!("form/{key}"),
                    &content,
                    &|| true,
                )
                .await?;
            }
            sent => sent?,
        }
    }
    Ok(())
}

/// Asks an agent in a channel. The question, in Slack's markup, is posted there, and its thread
/// becomes the task. Returns a text for the user if that is impossible.
async fn run(
    shared: &Shared,
    team: &Team,
    (channel, user): (&str, &str),
    key: &str,
    agent: &str,
    markup: &str,
) -> Result<Option<String>, Error> {
    if agent.is_empty() || markup.trim().is_empty() {
        return Ok(Some("Name an agent and a message: `/construct run AGENT MESSAGE`".to_owned()));
    }
    if let Err(refusal) = access::may_use(shared, team, channel, user, agent).await? {
        return Ok(Some(refusal.message().to_owned()));
    }
    let request =
        shared.gateway.request(&team.caller, v1::GetAgentRequest { agent: agent.to_owned() });
    match call(shared.gateway.agents().get_agent(request)).await {
        Ok(_) => {}
        Err(status)
            if matches!(status.code(), tonic::Code::NotFound | tonic::Code::InvalidArgument) =>
        {
            return Ok(Some(format!(
                "There is no agent `{}`. `/construct list` shows them.",
                escape(&agent.replace('`', ""))
            )));
        }
        Err(status) => return Err(status.into()),
    }
    let posts = Posts {
        web: &shared.web,
        store: &shared.store,
        token: &team.token,
        lease: LeaseGuard::default(),
    };
    let thread_key = ThreadKey {
        team: team.token.team.clone(),
        channel: channel.to_owned(),
        thread: String::new(),
    };
    let asked = format!("<@{}> asks *{}*:", texts::user_id(user), escape(agent));
    // The user's text is shown literally; it mentions nobody.
    let words = markup.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    let shown = mrkdwn::section(&escape(&mrkdwn::truncate(&words, 2_000)));
    let blocks = vec![mrkdwn::section(&asked), shown];
    let content = Content { text: escape(&mrkdwn::truncate(&words, 300)), blocks };
    let ts = match posts.post_once(&thread_key, &format!("run.{key}"), "", &content).await {
        Ok(ts) => ts,
        Err(crate::posts::Error::Slack(error)) if error.code().is_some() => {
            return Ok(Some(texts::slack_error(&error)));
        }
        Err(error) => return Err(error.into()),
    };
    let event = json!({"type": "app_mention", "channel": channel, "user": user, "ts": ts, "text": markup,
                       "construct_agent": agent});
    let new = NewMention {
        key: MentionKey {
            team: thread_key.team,
            channel: thread_key.channel,
            ts: ts.clone(),
            attempt: 0,
        },
        organization: team.installation.organization,
        thread: ts,
        user: user.to_owned(),
        event,
    };
    if shared.store.slack_mention_put(&new, clock::now()).await? {
        shared.due.notify_one();
    }
    Ok(None)
}

/// Links the user's account. For members of the workspace only: a guest's key would outlive the
/// guest's access.
async fn link(shared: &Shared, team: &Team, user: &str, code: &str) -> Result<String, Error> {
    let person = shared.people.get(&team.token, user).await?;
    if person.is_bot || !person.is_member(&team.token.team) {
        return Ok(access::Refusal::NotAMember.message().to_owned());
    }
    shared.members.link(team, user, code.trim_matches('`')).await
}

/// The agents whose names begin with `begin`, in order, at most `most`; and whether there are more.
async fn find_agents(
    shared: &Shared,
    team: &Team,
    begin: &str,
    most: usize,
) -> Result<(Vec<v1::AgentSpec>, bool), Error> {
    let (mut agents, mut page_token) = (Vec::new(), String::new());
    loop {
        let page =
            v1::PageRequest { page_size: PAGE_SIZE, page_token, order_by: "name".to_owned() };
        let filter =
            list_agents_request::Filter { name_prefix: begin.to_owned(), ..Default::default() };
        let request = v1::ListAgentsRequest { page: Some(page), filter: Some(filter) };
        let request = shared.gateway.request(&team.caller, request);
        let found = call(shared.gateway.agents().list_agents(request)).await?;
        agents.extend(found.agents.into_iter().filter_map(|agent| agent.spec));
        page_token = found.page.unwrap_or_default().next_page_token;
        if page_token.is_empty() || agents.len() >= most {
            let more = !page_token.is_empty() || agents.len() > most;
            agents.truncate(most);
            return Ok((agents, more));
        }
    }
}

async fn list(shared: &Shared, team: &Team, begin: &str) -> Result<String, Error> {
    let (agents, more) = match find_agents(shared, team, begin, MAX_LISTED).await {
        // No name can begin with this.
        Err(Error::Failed(_)) if !begin.is_empty() => (Vec::new(), false),
        found => found?,
    };
    let lines = agents.iter().map(|agent| {
        let default =
            if agent.name == team.installation.agent { " (answers mentions)" } else { "" };
        format!(
            "• *{}*{default} {}",
            escape(&agent.name),
            escape(&mrkdwn::truncate(&agent.description.replace('\n', " "), 150))
        )
    });
    let mut lines: Vec<String> = lines.collect();
    if lines.is_empty() {
        return Ok(if begin.is_empty() {
            "There are no agents yet."
        } else {
            "No agent's name begins with this."
        }
        .to_owned());
    }
    let mut shown = 0;
    let all = lines.len();
    lines.retain(|line| {
        shown += line.len() + 1;
        shown < MAX_LIST_BYTES
    });
    if more || lines.len() < all {
        lines.push(
            "There are more. `/construct list PREFIX` lists those whose names begin with it."
                .to_owned(),
        );
    }
    Ok(lines.join("\n"))
}

/// An option of a menu.
fn menu_option(name: &str) -> Value {
    json!({"text": {"type": "plain_text", "text": mrkdwn::truncate(name, 75)}, "value": name})
}

/// The form. With more agents than a menu can have, Slack requests the options that match the
/// user's input ([`suggest`]).
async fn agent_form(shared: &Shared, team: &Team, channel: &str) -> Result<Value, Error> {
    let (agents, more) = find_agents(shared, team, "", MAX_OPTIONS).await?;
    // Slack's limit of a value is 150 characters; agents have names of at most 64.
    let options: Vec<Value> = agents.iter().map(|agent| menu_option(&agent.name)).collect();
    if options.is_empty() {
        return Err(Error::Failed("there are no agents to choose from.".to_owned()));
    }
    let mut select = if more {
        let placeholder = json!({"type": "plain_text", "text": "Type the beginning of its name"});
        json!({"type": "external_select", "action_id": AGENT_FIELD, "min_query_length": 0, "placeholder": placeholder})
    } else {
        json!({"type": "static_select", "action_id": AGENT_FIELD, "options": options})
    };
    if more || agents.iter().any(|agent| agent.name == team.installation.agent) {
        select["initial_option"] = menu_option(&team.installation.agent);
    }
    Ok(json!({
        "type": "modal",
        "callback_id": FORM_ID,
        "private_metadata": channel,
        "title": {"type": "plain_text", "text": "Ask an agent"},
        "submit": {"type": "plain_text", "text": "Ask"},
        "blocks": [
            {"type": "input", "block_id": AGENT_FIELD, "label": {"type": "plain_text", "text": "Agent"}, "element": select},
            {"type": "input", "block_id": "words", "label": {"type": "plain_text", "text": "What should it do?"},
             "element": {"type": "plain_text_input", "action_id": "words", "multiline": true, "max_length": 2900}},
        ],
    }))
}

/// Whether Slack requests the options of a menu.
pub(crate) fn is_suggestion(payload: &Value) -> bool {
    payload["type"] == "block_suggestion"
}

/// The options that match the user's input. Slack shows nothing after three seconds, so a failure
/// returns no options.
pub(crate) async fn suggest(shared: &Shared, payload: &Value) -> Value {
    let found = async {
        let team = intake::action_team(payload)
            .ok_or_else(|| Error::Silent("the payload names no workspace".to_owned()))?;
        let team = shared.teams.team(team).await?;
        let user = payload["user"]["id"].as_str().unwrap_or_default();
        if payload["action_id"] != AGENT_FIELD
            || access::check_membership(shared, &team, user).await?.is_err()
        {
            return Ok(Vec::new());
        }
        let begin = mrkdwn::truncate(payload["value"].as_str().unwrap_or_default().trim(), 63);
        find_agents(shared, &team, &begin, MAX_OPTIONS).await.map(|(agents, _)| agents)
    };
    let agents = match tokio::time::timeout(SUGGEST_TIMEOUT, found).await {
        Ok(Ok(agents)) => agents,
        Ok(Err(trouble)) => {
            tracing::debug!(error = %Chain(&trouble), "cannot list agents for a menu");
            Vec::new()
        }
        Err(_) => {
            tracing::warn!("listing agents for a menu timed out");
            Vec::new()
        }
    };
    json!({"options": agents.iter().map(|agent| menu_option(&agent.name)).collect::<Vec<_>>()})
}

/// Shows and changes permissions; changes are for the workspace's admins.
async fn run_permission_command(
    shared: &Shared,
    team: &Team,
    command: &Value,
    verb: &str,
    rest: &str,
) -> Result<String, Error> {
    let text = |name: &str| command[name].as_str().unwrap_or_default();
    let id = &team.token.team;
    if verb == "who" {
        let mut lines = Vec::new();
        for kind in [GrantKind::Use, GrantKind::Approve] {
            for grant in shared.store.slack_grants(id, kind).await? {
                lines.push(describe_grant(&grant));
            }
        }
        let none = "No permissions are set. Every member may ask the agent that answers mentions. Its calls are decided by the person who asked, and by admins.";
        return Ok(if lines.is_empty() { none.to_owned() } else { lines.join("\n") });
    }
    let person = shared.people.get(&team.token, text("user_id")).await?;
    if !(person.is_admin || person.is_owner) || !person.is_member(id) {
        return Ok("Only admins of the workspace can change permissions.".to_owned());
    }
    let Some(grant) = parse_grant(id, text("channel_id"), rest) else { return Ok(HELP.to_owned()) };
    if verb == "allow" {
        shared.store.slack_grant(&grant, text("user_id"), clock::now()).await?;
        Ok(format!("Allowed: {}", describe_grant(&grant)))
    } else if shared.store.slack_grant_remove(&grant).await? {
        Ok(format!("No longer allowed: {}", describe_grant(&grant)))
    } else {
        Ok("There was no such permission. `/construct who` lists them.".to_owned())
    }
}

/// Parses `use|approve AGENT|all [<@U1|name>] [here]`.
fn parse_grant(team: &str, channel: &str, words: &str) -> Option<Grant> {
    let mut words = words.split_whitespace();
    let kind = match words.next()? {
        "use" => GrantKind::Use,
        "approve" => GrantKind::Approve,
        _ => return None,
    };
    let agent = words.next().map(|agent| if agent == "all" { "" } else { agent })?;
    let mut grant = Grant {
        team: team.to_owned(),
        channel: String::new(),
        user: String::new(),
        agent: agent.to_owned(),
        kind,
    };
    for word in words {
        if word == "here" {
            channel.clone_into(&mut grant.channel);
        } else if let Some(user) = word.strip_prefix("<@").and_then(|word| word.strip_suffix('>')) {
            grant.user = texts::user_id(user.split('|').next().unwrap_or_default());
        } else {
            return None;
        }
    }
    Some(grant)
}

fn describe_grant(grant: &Grant) -> String {
    let subject = if grant.user.is_empty() {
        "every member".to_owned()
    } else {
        format!("<@{}>", texts::user_id(&grant.user))
    };
    let agent = if grant.agent.is_empty() {
        "every agent".to_owned()
    } else {
        format!("*{}*", escape(&grant.agent))
    };
    let location = if grant.channel.is_empty() {
        String::new()
    } else {
        format!(" in <#{}>", texts::user_id(&grant.channel))
    };
    match grant.kind {
        GrantKind::Use => format!("{subject} may ask {agent}{location}"),
        GrantKind::Approve => format!("{subject} may decide about calls of {agent}{location}"),
    }
}

fn split_first_word(text: &str) -> (&str, &str) {
    let text = text.trim();
    text.split_once(char::is_whitespace).map_or((text, ""), |(first, rest)| (first, rest.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_permission_is_rejected() {
        let read = parse_grant("T1", "C1", "approve all <@U1|ann> here").expect("it is one");
        assert_eq!(describe_grant(&read), "<@U1> may decide about calls of every agent in <#C1>");
        let read = parse_grant("T1", "C1", "use helper").expect("it is one");
        assert_eq!(describe_grant(&read), "every member may ask *helper*");
        assert!(read.covers("C9", "U9", "helper") && !read.covers("C9", "U9", "other"));
        for words in ["", "use", "delete all", "use helper ann", "use helper <!channel>"] {
            assert_eq!(parse_grant("T1", "C1", words), None, "{words}");
        }
    }
}

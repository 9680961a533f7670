//! `/construct`: lists agents, has one answer, and says who may do what.

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

/// What the command can do.
pub(crate) const HELP: &str = "`/construct list [BEGINNING]` — the agents there are\n`/construct run` — ask one, in a form\n`/construct run AGENT WORDS` — \
                               ask one here\n`/construct allow use|approve AGENT|all [@PERSON] [here]` — for admins: who may ask an agent, \
                               or decide about its calls\n`/construct forbid …` — takes that back\n`/construct who` — who may\n`/construct link CODE`, `unlink`, `me` — says who you are in Construct, with a code of \
                               `construct key code`";
/// The form's name.
const FORM_ID: &str = "construct_run";
/// The menu of agents in it, and its block.
const AGENT_FIELD: &str = "agent";
/// Agents read at once; the API's most.
const PAGE_SIZE: i32 = 100;
/// Agents that are listed at most.
const MAX_LISTED: usize = 1_000;
/// Bytes of the list; Slack takes 40,000 characters.
const MAX_LIST_BYTES: usize = 35_000;
/// Choices of a menu; Slack's most (<https://docs.slack.dev/reference/block-kit/block-elements/select-menu-element>).
const MAX_OPTIONS: usize = 100;
/// How long finding out what there is to choose from may take.
const SUGGEST_TIMEOUT: Duration = Duration::from_millis(2_500);

/// Whether somebody only wants to know what the command can do.
pub(crate) fn is_help(command: &Value) -> bool {
    matches!(command["text"].as_str().map(str::trim), None | Some("" | "help"))
}

/// Deals with a command.
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
    let said = match verb {
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
    match said {
        Some(said) => reply_privately(shared, &team, command, &said).await,
        None => Ok(()),
    }
}

/// Answers whoever has sent a command, and nobody else.
async fn reply_privately(
    shared: &Shared,
    team: &Team,
    command: &Value,
    said: &str,
) -> Result<(), Error> {
    let text = |name: &str| command[name].as_str().unwrap_or_default();
    if !failure_notice::respond(shared, text("response_url"), said).await? {
        let (channel, user) = (text("channel_id"), text("user_id"));
        web::chat::post_ephemeral(&shared.web, &team.token, channel, user, None, said).await?;
    }
    Ok(())
}

/// Deals with the form.
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
    if let Some(said) = run(shared, &team, (channel, user), key, agent, &escape(words)).await? {
        let told =
            web::chat::post_ephemeral(&shared.web, &team.token, channel, user, None, &said).await;
        match told {
            // Where the app is not, it can say nothing; with the person it can always talk.
            Err(web::Error::Refused { .. }) => {
                let content = texts::plain_text(&said);
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
            told => told?,
        }
    }
    Ok(())
}

/// Asks an agent in a channel: the question, in Slack's markup, becomes a message there, and its
/// thread the task. What to say to whoever asked instead.
async fn run(
    shared: &Shared,
    team: &Team,
    (channel, user): (&str, &str),
    key: &str,
    agent: &str,
    markup: &str,
) -> Result<Option<String>, Error> {
    if agent.is_empty() || markup.trim().is_empty() {
        return Ok(Some("Say which agent, and what: `/construct run AGENT WORDS`".to_owned()));
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
    let place = ThreadKey {
        team: team.token.team.clone(),
        channel: channel.to_owned(),
        thread: String::new(),
    };
    let asked = format!("<@{}> asks *{}*:", texts::user_id(user), escape(agent));
    // What a person has typed stands for itself here: it calls nobody.
    let words = markup.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    let shown = mrkdwn::section(&escape(&mrkdwn::truncate(&words, 2_000)));
    let blocks = vec![mrkdwn::section(&asked), shown];
    let content = Content { text: escape(&mrkdwn::truncate(&words, 300)), blocks };
    let ts = match posts.post_once(&place, &format!("run.{key}"), "", &content).await {
        Ok(ts) => ts,
        Err(crate::posts::Error::Slack(error)) if error.code().is_some() => {
            return Ok(Some(texts::slack_error(&error)));
        }
        Err(error) => return Err(error.into()),
    };
    let event = json!({"type": "app_mention", "channel": channel, "user": user, "ts": ts, "text": markup,
                       "construct_agent": agent});
    let new = NewMention {
        key: MentionKey { team: place.team, channel: place.channel, ts: ts.clone(), attempt: 0 },
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

/// Has somebody say who they are. For members of the workspace: their keys would outlive what
/// others have to do here.
async fn link(shared: &Shared, team: &Team, user: &str, code: &str) -> Result<String, Error> {
    let person = shared.people.get(&team.token, user).await?;
    if person.is_bot || !person.is_member(&team.token.team) {
        return Ok(access::Refusal::NotAMember.message().to_owned());
    }
    shared.members.link(team, user, code.trim_matches('`')).await
}

/// The agents whose names begin like this, by name, so many at most; and whether there are more.
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
        // What no name can begin with.
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
            "No agent's name begins like this."
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
            "There are more: `/construct list BEGINNING` shows those whose names begin like this."
                .to_owned(),
        );
    }
    Ok(lines.join("\n"))
}

/// One of a menu's choices.
fn menu_option(name: &str) -> Value {
    json!({"text": {"type": "plain_text", "text": mrkdwn::truncate(name, 75)}, "value": name})
}

/// The form. Where there are more agents than a menu can have, Slack asks for those that fit what
/// somebody types ([`suggest`]).
async fn agent_form(shared: &Shared, team: &Team, channel: &str) -> Result<Value, Error> {
    let (agents, more) = find_agents(shared, team, "", MAX_OPTIONS).await?;
    // Slack's limit of a value is 150; agents have names of at most 64 characters.
    let options: Vec<Value> = agents.iter().map(|agent| menu_option(&agent.name)).collect();
    if options.is_empty() {
        return Err(Error::Failed("there are no agents to choose from.".to_owned()));
    }
    let mut select = if more {
        let placeholder = json!({"type": "plain_text", "text": "Type how its name begins"});
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

/// Whether Slack asks what there is to choose from.
pub(crate) fn is_suggestion(payload: &Value) -> bool {
    payload["type"] == "block_suggestion"
}

/// What there is to choose from, for what somebody has typed. Slack shows nothing when it waits for
/// longer than three seconds, and so nothing is what it is told when this comes to nothing.
pub(crate) async fn suggest(shared: &Shared, payload: &Value) -> Value {
    let found = async {
        let team = intake::action_team(payload)
            .ok_or_else(|| Error::Silent("there is no workspace".to_owned()))?;
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
            tracing::debug!(error = %Chain(&trouble), "there is nothing to choose from");
            Vec::new()
        }
        Err(_) => {
            tracing::warn!("agents could not be listed in time");
            Vec::new()
        }
    };
    json!({"options": agents.iter().map(|agent| menu_option(&agent.name)).collect::<Vec<_>>()})
}

/// Says and changes who may do what; changes are for the workspace's admins.
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
        for may in [GrantKind::Use, GrantKind::Approve] {
            for grant in shared.store.slack_grants(id, may).await? {
                lines.push(describe_grant(&grant));
            }
        }
        let none = "Nothing is set: every member may ask the agent that answers mentions; who asked decides about its calls, and admins.";
        return Ok(if lines.is_empty() { none.to_owned() } else { lines.join("\n") });
    }
    let person = shared.people.get(&team.token, text("user_id")).await?;
    if !(person.is_admin || person.is_owner) || !person.is_member(id) {
        return Ok("Only admins of the workspace can change who may do what.".to_owned());
    }
    let Some(grant) = parse_grant(id, text("channel_id"), rest) else { return Ok(HELP.to_owned()) };
    if verb == "allow" {
        shared.store.slack_grant(&grant, text("user_id"), clock::now()).await?;
        Ok(format!("Allowed: {}", describe_grant(&grant)))
    } else if shared.store.slack_grant_remove(&grant).await? {
        Ok(format!("Not allowed any more: {}", describe_grant(&grant)))
    } else {
        Ok("There was no such permission. `/construct who` shows them.".to_owned())
    }
}

/// Reads `use|approve AGENT|all [<@U1|name>] [here]`.
fn parse_grant(team: &str, channel: &str, words: &str) -> Option<Grant> {
    let mut words = words.split_whitespace();
    let may = match words.next()? {
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
        may,
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
    let who = if grant.user.is_empty() {
        "every member".to_owned()
    } else {
        format!("<@{}>", texts::user_id(&grant.user))
    };
    let agent = if grant.agent.is_empty() {
        "every agent".to_owned()
    } else {
        format!("*{}*", escape(&grant.agent))
    };
    let place = if grant.channel.is_empty() {
        String::new()
    } else {
        format!(" in <#{}>", texts::user_id(&grant.channel))
    };
    match grant.kind {
        GrantKind::Use => format!("{who} may ask {agent}{place}"),
        GrantKind::Approve => format!("{who} may decide about calls of {agent}{place}"),
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
    fn a_permission_is_read_whole_or_not_at_all() {
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

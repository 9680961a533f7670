//! `/construct`: lists agents, has one answer, and says who may do what.

use construct_proto::v1;
use construct_store::slack::{Grant, May, MentionKey, NewMention, Place};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::{
    Shared, access,
    gateway::call,
    mention::Trouble,
    mrkdwn::{self, escape},
    posts::{Posts, Right},
    teams::Team,
    tell,
    web::{self, chat::Content, views},
    words,
};

/// What the command can do.
pub(crate) const HELP: &str = "`/construct list` — the agents there are\n`/construct run` — ask one, in a form\n`/construct run AGENT WORDS` — \
                               ask one here\n`/construct allow use|approve AGENT|all [@PERSON] [here]` — for admins: who may ask an agent, \
                               or decide about its calls\n`/construct forbid …` — takes that back\n`/construct who` — who may";
/// The form's name.
const FORM: &str = "construct_run";
/// Agents that are listed.
const AGENTS: i32 = 100;

/// Whether somebody only wants to know what the command can do.
pub(crate) fn is_help(command: &Value) -> bool {
    matches!(command["text"].as_str().map(str::trim), None | Some("" | "help"))
}

/// Deals with a command.
pub(crate) async fn take(shared: &Shared, team: &str, key: &str, command: &Value) -> Result<(), Trouble> {
    let text = |name: &str| command[name].as_str().unwrap_or_default();
    let team = shared.teams.team(team).await?;
    let (verb, rest) = split(text("text"));
    let said = match verb {
        "list" => Some(list(shared, &team).await?),
        "run" if rest.is_empty() => {
            let form = form(shared, &team, text("channel_id")).await?;
            views::open(&shared.web, &team.token, text("trigger_id"), form).await?;
            None
        }
        "run" => {
            let (agent, words) = split(rest);
            run(shared, &team, (text("channel_id"), text("user_id")), key, agent, words).await?
        }
        "allow" | "forbid" | "who" => Some(permit(shared, &team, command, verb, rest).await?),
        _ => Some(HELP.to_owned()),
    };
    match said {
        Some(said) => {
            if !tell::respond(shared, text("response_url"), &said).await? {
                let (channel, user) = (text("channel_id"), text("user_id"));
                web::chat::post_ephemeral(&shared.web, &team.token, channel, user, None, &said).await?;
            }
            Ok(())
        }
        None => Ok(()),
    }
}

/// Deals with the form.
pub(crate) async fn submitted(shared: &Shared, team: &str, payload: &Value) -> Result<(), Trouble> {
    let view = &payload["view"];
    if view["callback_id"] != FORM {
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
        web::chat::post_ephemeral(&shared.web, &team.token, channel, user, None, &said).await?;
    }
    Ok(())
}

/// Asks an agent in a channel: the question, in Slack's markup, becomes a message there, and its thread the task. What to say to whoever
/// asked instead.
async fn run(
    shared: &Shared,
    team: &Team,
    (channel, user): (&str, &str),
    key: &str,
    agent: &str,
    markup: &str,
) -> Result<Option<String>, Trouble> {
    if agent.is_empty() || markup.trim().is_empty() {
        return Ok(Some("Say which agent, and what: `/construct run AGENT WORDS`".to_owned()));
    }
    let asks = (&shared.store, &shared.people);
    if let Err(refusal) = access::may_use(asks, team, channel, user, agent).await? {
        return Ok(Some(words::refusal(refusal).to_owned()));
    }
    let organization = team.installation.organization;
    let request = shared.gateway.request(organization, v1::GetAgentRequest { agent: agent.to_owned() });
    match call(shared.gateway.agents().get_agent(request)).await {
        Ok(_) => {}
        Err(status) if matches!(status.code(), tonic::Code::NotFound | tonic::Code::InvalidArgument) => {
            return Ok(Some(format!(
                "There is no agent `{}`. `/construct list` shows them.",
                escape(&agent.replace('`', ""))
            )));
        }
        Err(status) => return Err(status.into()),
    }
    let posts = Posts { web: &shared.web, store: &shared.store, token: &team.token, right: Right::default() };
    let place = Place { team: team.token.team.clone(), channel: channel.to_owned(), thread: String::new() };
    let asked = format!("<@{}> asks *{}*:", words::user_id(user), escape(agent));
    // What a person has typed stands for itself here: it calls nobody.
    let words = markup.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    let shown = mrkdwn::section(&escape(&mrkdwn::clip(&words, 2_000)));
    let blocks = vec![mrkdwn::section(&asked), shown];
    let content = Content { text: escape(&mrkdwn::clip(&words, 300)), blocks };
    let ts = match posts.once(&place, &format!("run.{key}"), "", &content).await {
        Ok(ts) => ts,
        Err(crate::posts::Error::Slack(error)) if error.code().is_some() => return Ok(Some(words::slack(&error))),
        Err(error) => return Err(error.into()),
    };
    let event = json!({"type": "app_mention", "channel": channel, "user": user, "ts": ts, "text": markup,
                       "construct_agent": agent});
    let new = NewMention {
        key: MentionKey { team: place.team, channel: place.channel, ts: ts.clone(), attempt: 0 },
        organization,
        thread: ts,
        user: user.to_owned(),
        event,
    };
    if shared.store.slack_mention_put(&new, Timestamp::now()).await? {
        shared.due.notify_one();
    }
    Ok(None)
}

async fn agents(shared: &Shared, team: &Team) -> Result<Vec<v1::AgentSpec>, Trouble> {
    let page = v1::PageRequest { page_size: AGENTS, order_by: "name".to_owned(), ..v1::PageRequest::default() };
    let request = v1::ListAgentsRequest { page: Some(page), ..v1::ListAgentsRequest::default() };
    let request = shared.gateway.request(team.installation.organization, request);
    let agents = call(shared.gateway.agents().list_agents(request)).await?.agents;
    Ok(agents.into_iter().filter_map(|agent| agent.spec).collect())
}

async fn list(shared: &Shared, team: &Team) -> Result<String, Trouble> {
    let agents = agents(shared, team).await?;
    let lines = agents.iter().map(|agent| {
        let default = if agent.name == team.installation.agent { " (answers mentions)" } else { "" };
        format!(
            "• *{}*{default} {}",
            escape(&agent.name),
            escape(&mrkdwn::clip(&agent.description.replace('\n', " "), 150))
        )
    });
    let lines: Vec<String> = lines.collect();
    Ok(if lines.is_empty() { "There are no agents yet.".to_owned() } else { mrkdwn::clip(&lines.join("\n"), 35_000) })
}

async fn form(shared: &Shared, team: &Team, channel: &str) -> Result<Value, Trouble> {
    let agents = agents(shared, team).await?;
    let option = |name: &str| json!({"text": {"type": "plain_text", "text": mrkdwn::clip(name, 75)}, "value": name});
    // Slack's limit of a value; agents have names of at most 64 characters.
    let options: Vec<Value> =
        agents.iter().filter(|agent| agent.name.len() <= 150).map(|agent| option(&agent.name)).collect();
    if options.is_empty() {
        return Err(Trouble::Failed("there are no agents to choose from.".to_owned()));
    }
    let mut select = json!({"type": "static_select", "action_id": "agent", "options": options});
    if agents.iter().any(|agent| agent.name == team.installation.agent) {
        select["initial_option"] = option(&team.installation.agent);
    }
    Ok(json!({
        "type": "modal",
        "callback_id": FORM,
        "private_metadata": channel,
        "title": {"type": "plain_text", "text": "Ask an agent"},
        "submit": {"type": "plain_text", "text": "Ask"},
        "blocks": [
            {"type": "input", "block_id": "agent", "label": {"type": "plain_text", "text": "Agent"}, "element": select},
            {"type": "input", "block_id": "words", "label": {"type": "plain_text", "text": "What should it do?"},
             "element": {"type": "plain_text_input", "action_id": "words", "multiline": true, "max_length": 2900}},
        ],
    }))
}

/// Says and changes who may do what; changes are for the workspace's admins.
async fn permit(shared: &Shared, team: &Team, command: &Value, verb: &str, rest: &str) -> Result<String, Trouble> {
    let text = |name: &str| command[name].as_str().unwrap_or_default();
    let id = &team.token.team;
    if verb == "who" {
        let mut lines = Vec::new();
        for may in [May::Use, May::Approve] {
            for grant in shared.store.slack_grants(id, may).await? {
                lines.push(shown(&grant));
            }
        }
        let none = "Nothing is set: every member may ask the agent that answers mentions; who asked decides about its calls, and admins.";
        return Ok(if lines.is_empty() { none.to_owned() } else { lines.join("\n") });
    }
    let person = shared.people.one(&team.token, text("user_id")).await?;
    if !(person.is_admin || person.is_owner) || !person.is_member(id) {
        return Ok("Only admins of the workspace can change who may do what.".to_owned());
    }
    let Some(grant) = grant(id, text("channel_id"), rest) else { return Ok(HELP.to_owned()) };
    if verb == "allow" {
        shared.store.slack_grant(&grant, text("user_id"), Timestamp::now()).await?;
        Ok(format!("Allowed: {}", shown(&grant)))
    } else if shared.store.slack_grant_remove(&grant).await? {
        Ok(format!("Not allowed any more: {}", shown(&grant)))
    } else {
        Ok("There was no such permission. `/construct who` shows them.".to_owned())
    }
}

/// Reads `use|approve AGENT|all [<@U1|name>] [here]`.
fn grant(team: &str, channel: &str, words: &str) -> Option<Grant> {
    let mut words = words.split_whitespace();
    let may = match words.next()? {
        "use" => May::Use,
        "approve" => May::Approve,
        _ => return None,
    };
    let agent = words.next().map(|agent| if agent == "all" { "" } else { agent })?;
    let mut grant =
        Grant { team: team.to_owned(), channel: String::new(), user: String::new(), agent: agent.to_owned(), may };
    for word in words {
        if word == "here" {
            channel.clone_into(&mut grant.channel);
        } else if let Some(user) = word.strip_prefix("<@").and_then(|word| word.strip_suffix('>')) {
            grant.user = words::user_id(user.split('|').next().unwrap_or_default());
        } else {
            return None;
        }
    }
    Some(grant)
}

fn shown(grant: &Grant) -> String {
    let who =
        if grant.user.is_empty() { "every member".to_owned() } else { format!("<@{}>", words::user_id(&grant.user)) };
    let agent = if grant.agent.is_empty() { "every agent".to_owned() } else { format!("*{}*", escape(&grant.agent)) };
    let place =
        if grant.channel.is_empty() { String::new() } else { format!(" in <#{}>", words::user_id(&grant.channel)) };
    match grant.may {
        May::Use => format!("{who} may ask {agent}{place}"),
        May::Approve => format!("{who} may decide about calls of {agent}{place}"),
    }
}

fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    text.split_once(char::is_whitespace).map_or((text, ""), |(first, rest)| (first, rest.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permission_is_read_whole_or_not_at_all() {
        let read = grant("T1", "C1", "approve all <@U1|ann> here").expect("it is one");
        assert_eq!(shown(&read), "<@U1> may decide about calls of every agent in <#C1>");
        let read = grant("T1", "C1", "use helper").expect("it is one");
        assert_eq!(shown(&read), "every member may ask *helper*");
        assert!(read.covers("C9", "U9", "helper") && !read.covers("C9", "U9", "other"));
        for words in ["", "use", "delete all", "use helper ann", "use helper <!channel>"] {
            assert_eq!(grant("T1", "C1", words), None, "{words}");
        }
    }
}

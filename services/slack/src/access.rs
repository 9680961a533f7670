//! Who may do what. Full members of the workspace only; among them, when nothing is said in a workspace, everybody may use its
//! default agent, and calls are decided about by whoever asked and by the workspace's admins. As soon as there are permissions of a kind,
//! they alone count for that kind, beside admins for decisions.

use construct_store::{
    Store,
    slack::{May, Place},
};

use crate::{
    people::People,
    teams::Team,
    web::{self, users::User},
};

/// Why somebody may not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// They are a bot, with which we don't talk.
    Bot,
    /// They are a guest, or from another workspace.
    Stranger,
    /// They have no permission here.
    NotHere,
}

/// Why it could not be found out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// Slack doesn't say who somebody is.
    #[error("it cannot be found out who somebody is")]
    Person(#[source] web::Error),
    /// The permissions cannot be read.
    #[error("the permissions cannot be read")]
    Store(#[source] construct_store::Error),
}

/// Whether somebody may have an agent answer in a channel.
pub(crate) async fn may_use(
    (store, people): (&Store, &People),
    team: &Team,
    channel: &str,
    user: &str,
    agent: &str,
) -> Result<Result<User, Refusal>, Error> {
    let person = people.one(&team.token, user).await.map_err(Error::Person)?;
    if let Some(refusal) = outside(&person, team) {
        return Ok(Err(refusal));
    }
    let grants = store.slack_grants(&team.token.team, May::Use).await.map_err(Error::Store)?;
    let allowed = if grants.is_empty() {
        agent == team.installation.agent
    } else {
        grants.iter().any(|grant| grant.covers(channel, user, agent))
    };
    Ok(if allowed { Ok(person) } else { Err(Refusal::NotHere) })
}

/// Whether somebody may decide about a call of an agent's script; `asked_by` is whose question had it made.
pub(crate) async fn may_approve(
    (store, people): (&Store, &People),
    team: &Team,
    place: &Place,
    (user, agent): (&str, &str),
    asked_by: Option<&str>,
) -> Result<Result<User, Refusal>, Error> {
    let person = people.one(&team.token, user).await.map_err(Error::Person)?;
    if let Some(refusal) = outside(&person, team) {
        return Ok(Err(refusal));
    }
    let grants = store.slack_grants(&team.token.team, May::Approve).await.map_err(Error::Store)?;
    let allowed = person.is_admin
        || person.is_owner
        || if grants.is_empty() {
            asked_by == Some(user)
        } else {
            grants.iter().any(|grant| grant.covers(&place.channel, user, agent))
        };
    Ok(if allowed { Ok(person) } else { Err(Refusal::NotHere) })
}

fn outside(person: &User, team: &Team) -> Option<Refusal> {
    if person.is_bot {
        Some(Refusal::Bot)
    } else if !person.is_member(&team.token.team) {
        Some(Refusal::Stranger)
    } else {
        None
    }
}

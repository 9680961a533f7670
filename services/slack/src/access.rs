//! Who may do what. Full members of the workspace only (where it is so configured, those who have
//! said who they are in Construct); among them, when nothing is said in a workspace, everybody may
//! use its default agent, and calls are decided about by whoever asked and by the workspace's
//! admins. As soon as there are permissions of a kind, they alone count for that kind, beside
//! admins for decisions.

use construct_store::slack::{GrantKind, ThreadKey};

use crate::{
    error,
    shared::Shared,
    teams::Team,
    texts,
    web::{self, users::User},
};

/// Why somebody may not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// They are a bot, with which we don't talk.
    Bot,
    /// They are a guest, or from another workspace.
    NotAMember,
    /// Nobody knows who they are in Construct, and here one has to be a member there.
    NotLinked,
    /// They have no permission here.
    NotPermitted,
}

impl Refusal {
    /// What the user is told.
    pub(crate) const fn message(self) -> &'static str {
        match self {
            Self::Bot => "I talk with people only.",
            Self::NotAMember => {
                "I am sorry, I can help members of this workspace only. Guests and people of other organizations may ask a member to \
                 ask me."
            }
            Self::NotLinked => texts::NOT_LINKED,
            Self::NotPermitted => {
                "I am sorry, you may not use this agent here. An admin of the workspace can change that with `/construct allow`."
            }
        }
    }
}

/// Why it could not be found out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// Slack doesn't say who somebody is.
    #[error("it cannot be found out who somebody is")]
    User(#[source] web::Error),
    /// The permissions cannot be read.
    #[error("the permissions cannot be read")]
    Store(#[source] construct_store::Error),
}

impl From<Error> for error::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::User(error) => match error.into() {
                Self::Failed(_) => Self::Silent("it cannot be found out who asks".to_owned()),
                trouble => trouble,
            },
            Error::Store(error) => error.into(),
        }
    }
}

/// Whether somebody may have an agent answer in a channel.
pub(crate) async fn may_use(
    shared: &Shared,
    team: &Team,
    channel: &str,
    user: &str,
    agent: &str,
) -> Result<Result<User, Refusal>, Error> {
    let person = match check_membership(shared, team, user).await? {
        Ok(person) => person,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let grants =
        shared.store.slack_grants(&team.token.team, GrantKind::Use).await.map_err(Error::Store)?;
    let allowed = if grants.is_empty() {
        agent == team.installation.agent
    } else {
        grants.iter().any(|grant| grant.covers(channel, user, agent))
    };
    Ok(if allowed { Ok(person) } else { Err(Refusal::NotPermitted) })
}

/// Whether somebody may decide about a call of an agent's script; `asked_by` is whose question had
/// it made.
pub(crate) async fn may_approve(
    shared: &Shared,
    team: &Team,
    place: &ThreadKey,
    (user, agent): (&str, &str),
    asked_by: Option<&str>,
) -> Result<Result<User, Refusal>, Error> {
    let person = match check_membership(shared, team, user).await? {
        Ok(person) => person,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let grants = shared
        .store
        .slack_grants(&team.token.team, GrantKind::Approve)
        .await
        .map_err(Error::Store)?;
    let allowed = person.is_admin
        || person.is_owner
        || if grants.is_empty() {
            asked_by == Some(user)
        } else {
            grants.iter().any(|grant| grant.covers(&place.channel, user, agent))
        };
    Ok(if allowed { Ok(person) } else { Err(Refusal::NotPermitted) })
}

/// Whether somebody is one of those for whom we are here at all.
pub(crate) async fn check_membership(
    shared: &Shared,
    team: &Team,
    user: &str,
) -> Result<Result<User, Refusal>, Error> {
    let person = shared.people.get(&team.token, user).await.map_err(Error::User)?;
    let refusal = if person.is_bot {
        Refusal::Bot
    } else if !person.is_member(&team.token.team) {
        Refusal::NotAMember
    } else if shared.config.slack_members_only {
        let organization = team.installation.organization;
        match shared
            .members
            .member(&team.token.team, organization, user)
            .await
            .map_err(Error::Store)?
        {
            Some(_) => return Ok(Ok(person)),
            None => Refusal::NotLinked,
        }
    } else {
        return Ok(Ok(person));
    };
    Ok(Err(refusal))
}

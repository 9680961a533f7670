//! Permissions of Slack users.
//!
//! - Only full members of the workspace have access, and where so configured only those with a
//!   linked Construct account.
//! - Without permissions in a workspace, every member may use its default agent. The author of a
//!   question and the workspace's admins decide about its calls.
//! - Once there are permissions of a kind, only they count for that kind, besides admins for
//!   decisions.

use construct_store::slack::{GrantKind, ThreadKey};

use crate::{
    error,
    shared::Shared,
    teams::Team,
    texts,
    web::{self, users::User},
};

/// Why a user has no access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// A bot; bots are never answered.
    Bot,
    /// A guest, or a user of another workspace.
    NotAMember,
    /// A user without a linked account, where one is required.
    NotLinked,
    /// A user without permission here.
    NotPermitted,
}

impl Refusal {
    /// The text for the user.
    pub(crate) const fn message(self) -> &'static str {
        match self {
            Self::Bot => "I only answer people.",
            Self::NotAMember => {
                "I am sorry, I can only help members of this workspace. Guests and people of other organizations can ask a member to \
                 ask me."
            }
            Self::NotLinked => texts::NOT_LINKED,
            Self::NotPermitted => {
                "I am sorry, you may not use this agent here. An admin of the workspace can change that with `/construct allow`."
            }
        }
    }
}

/// Why access could not be checked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// Slack did not return the user.
    #[error("cannot look up a Slack user")]
    User(#[source] web::Error),
    /// The permissions cannot be read.
    #[error("cannot read the permissions")]
    Store(#[source] construct_store::Error),
}

impl From<Error> for error::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::User(error) => match error.into() {
                Self::Failed(_) => Self::Silent("cannot determine who asks".to_owned()),
                trouble => trouble,
            },
            Error::Store(error) => error.into(),
        }
    }
}

/// Whether a user may ask an agent in a channel.
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

/// Whether a user may decide about a call of an agent's script. `asked_by` is the author of the
/// question that caused it.
pub(crate) async fn may_approve(
    shared: &Shared,
    team: &Team,
    thread_key: &ThreadKey,
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
            grants.iter().any(|grant| grant.covers(&thread_key.channel, user, agent))
        };
    Ok(if allowed { Ok(person) } else { Err(Refusal::NotPermitted) })
}

/// Whether a user may use the app at all.
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

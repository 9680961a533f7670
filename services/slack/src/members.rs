//! Who people of a workspace are in Construct. Nobody is taken for a member because of what Slack
//! says of them: a person says so themselves, with a set-up code that they have made in Construct
//! (`/construct link CODE`), which becomes an API key of theirs. What they ask and decide is asked
//! with that key, so that the gateway holds it against their role, and knows them.

use std::sync::Arc;

use construct_domain::OrganizationId;
use construct_proto::v1;
use construct_runtime::{clock, telemetry::Chain};
use construct_store::{Keyring, SealError, Store, slack::Member};
use secrecy::ExposeSecret as _;
use tonic::{Code, Status};

use crate::{
    error,
    gateway::{Authorization, Gateway, call, is_transient, retry_transient},
    mrkdwn::escape,
    teams::Team,
    texts,
};

/// What the key has to be good for.
pub(crate) const SCOPE: &str = "tasks:write";
/// Keys that are looked at in one statement when the master key has changed.
const RESEAL_BATCH_SIZE: i64 = 500;

/// Why it cannot be found out who somebody is.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The table cannot be read.
    #[error("it cannot be read who is linked")]
    Store(#[source] construct_store::Error),
    /// The key is there and cannot be opened.
    #[error("somebody's key cannot be opened")]
    Unseal(#[source] SealError),
    /// What was sealed is no key.
    #[error("what is stored in the place of somebody's key is none")]
    InvalidKey,
}

impl From<Error> for error::Error {
    fn from(error: Error) -> Self {
        // Somebody may put the master key back.
        Self::Retryable { reason: Chain(&error).to_string(), retry_after: None }
    }
}

/// All of them. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Members {
    store: Store,
    gateway: Gateway,
    keyring: Arc<Keyring>,
}

impl Members {
    pub(crate) const fn new(store: Store, gateway: Gateway, keyring: Arc<Keyring>) -> Self {
        Self { store, gateway, keyring }
    }

    /// Who somebody is in an organization; none when they have not said so, or are somebody in
    /// another one.
    pub(crate) async fn member(
        &self,
        team: &str,
        organization: OrganizationId,
        user: &str,
    ) -> Result<Option<Member>, construct_store::Error> {
        let member = self.store.slack_member(team, user).await?;
        Ok(member.filter(|member| member.organization == organization))
    }

    /// What somebody's requests are authorized by; none: nothing of their own.
    pub(crate) async fn authorization(
        &self,
        team: &str,
        organization: OrganizationId,
        user: &str,
    ) -> Result<Option<Authorization>, Error> {
        let Some(member) = self.member(team, organization, user).await.map_err(Error::Store)?
        else {
            return Ok(None);
        };
        let key =
            self.keyring.open(&Member::record(team, user), &member.key).map_err(Error::Unseal)?;
        let key = std::str::from_utf8(key.expose_secret()).map_err(|_| Error::InvalidKey)?;
        Authorization::bearer(key).map(Some).ok_or(Error::InvalidKey)
    }

    /// Links somebody with whom a code was made for. What to tell them.
    pub(crate) async fn link(
        &self,
        team: &Team,
        user: &str,
        code: &str,
    ) -> Result<String, error::Error> {
        let organization = team.installation.organization;
        let id = &team.token.team;
        let request = tonic::Request::new(v1::ExchangeSetupCodeRequest { code: code.to_owned() });
        let made = match call(self.gateway.keys().exchange_setup_code(request)).await {
            Ok(made) => made,
            Err(status) if is_transient(&status) => return Err(status.into()),
            // The same command may have come twice, and have been dealt with the first time.
            Err(_) => {
                let linked = self.describe_link(id, organization, user).await?;
                return Ok(format!("That code is not good, or not any more. {linked}"));
            }
        };
        let authorization = Authorization::bearer(&made.key).ok_or(Error::InvalidKey)?;
        let who = match retry_transient(|| self.gateway.who_am_i(Some(&authorization))).await {
            Ok(who) if who.organization_id == organization.to_string() => who,
            Ok(_) => return Ok(texts::OTHER_ORGANIZATION.to_owned()),
            Err(status) if is_transient(&status) => {
                // The code is used up, and so there is nothing to try again.
                return Err(error::Error::Failed(
                    "Construct does not answer. Make another code, and try again.".to_owned(),
                ));
            }
            Err(_) => return Ok(texts::OTHER_ORGANIZATION.to_owned()),
        };
        if !who.scopes.iter().any(|scope| scope == SCOPE || scope == "admin") {
            return Ok(format!(
                "That code is for a key that cannot ask anything: it lacks the scope `{SCOPE}`."
            ));
        }
        let sealed = self
            .keyring
            .seal(&Member::record(id, user), made.key.as_bytes())
            .map_err(Error::Unseal)?;
        let member = Member {
            team: id.clone(),
            slack_user: user.to_owned(),
            organization,
            user: who.user_id,
            name: who.name,
            key: sealed,
        };
        self.store.slack_member_put(&member, clock::now()).await?;
        tracing::info!(
            team = id,
            slack_user = user,
            user = member.user,
            "somebody said who they are"
        );
        self.describe_link(id, organization, user).await
    }

    /// Forgets who somebody is. What to tell them.
    pub(crate) async fn unlink(&self, team: &Team, user: &str) -> Result<String, error::Error> {
        let was = self.store.slack_member_remove(&team.token.team, user).await?;
        Ok(if was {
            "I have forgotten who you are in Construct, and your key. `construct key revoke` makes it good for nothing."
        } else {
            texts::NOT_LINKED
        }
        .to_owned())
    }

    /// Who somebody is, for them.
    pub(crate) async fn describe_link(
        &self,
        team: &str,
        organization: OrganizationId,
        user: &str,
    ) -> Result<String, error::Error> {
        Ok(match self.member(team, organization, user).await? {
            Some(member) => {
                let name = if member.name.is_empty() { &member.user } else { &member.name };
                format!(
                    "In Construct you are *{}*. What you ask and decide here is yours there.",
                    escape(name)
                )
            }
            None => texts::NOT_LINKED.to_owned(),
        })
    }

    /// Seals anew what is not sealed with the active master key, so that an old one can be taken
    /// away.
    pub(crate) async fn reseal(&self) {
        loop {
            let others = match self
                .store
                .slack_members_sealed_with_other_keys(self.keyring.active(), RESEAL_BATCH_SIZE)
                .await
            {
                Ok(others) => others,
                Err(error) => {
                    tracing::warn!(error = %Chain(&error), "people's keys could not be looked through");
                    return;
                }
            };
            let mut done = 0;
            for member in &others {
                match self.reseal_one(member).await {
                    Ok(()) => done += 1,
                    Err(error) => {
                        let (team, user) = (&member.team, &member.slack_user);
                        tracing::error!(team, user, error = %Chain(&error), "somebody's key cannot be encrypted again");
                    }
                }
            }
            if done > 0 {
                tracing::info!(
                    done,
                    "people's keys were encrypted again, with the active master key"
                );
            }
            // Those that cannot be would be found again for ever.
            if done == 0 {
                return;
            }
        }
    }

    async fn reseal_one(&self, member: &Member) -> Result<(), Error> {
        let record = Member::record(&member.team, &member.slack_user);
        let plain = self.keyring.open(&record, &member.key).map_err(Error::Unseal)?;
        let sealed = self.keyring.seal(&record, plain.expose_secret()).map_err(Error::Unseal)?;
        self.store.slack_member_reseal(member, &sealed).await.map(drop).map_err(Error::Store)
    }
}

/// What the gateway has refused, in words for whoever asked, with a key of theirs or without one.
pub(crate) fn gateway_refusal(status: Status, by: Option<&Authorization>) -> error::Error {
    match (by, status.code()) {
        (Some(_), Code::Unauthenticated) => error::Error::Failed(texts::KEY_REJECTED.to_owned()),
        (Some(_), Code::PermissionDenied) => {
            error::Error::Failed(texts::ROLE_INSUFFICIENT.to_owned())
        }
        _ => status.into(),
    }
}

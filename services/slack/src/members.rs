//! Construct accounts of Slack users.
//!
//! Slack's own data makes nobody a member of the organization. A user links their account with a
//! set-up code that they created in Construct (`/construct link CODE`). The code becomes an API key
//! of theirs. Their questions and decisions use that key, so the gateway checks their role and
//! records them as the author.

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

/// The scope that the key needs.
pub(crate) const SCOPE: &str = "tasks:write";
/// Keys that are read per statement when the master key changed.
const RESEAL_BATCH_SIZE: i64 = 500;

/// Why a user's account cannot be determined.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The table cannot be read.
    #[error("cannot read the linked accounts")]
    Store(#[source] construct_store::Error),
    /// The key cannot be unsealed.
    #[error("cannot unseal a user's key")]
    Unseal(#[source] SealError),
    /// The unsealed value is not a key.
    #[error("the stored key of a user is invalid")]
    InvalidKey,
}

impl From<Error> for error::Error {
    fn from(error: Error) -> Self {
        // The master key may be restored.
        Self::Retryable { reason: Chain(&error).to_string(), retry_after: None }
    }
}

/// All linked accounts. Cheap to clone.
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

    /// A user's account in an organization; none when it is not linked, or linked in another
    /// organization.
    pub(crate) async fn member(
        &self,
        team: &str,
        organization: OrganizationId,
        user: &str,
    ) -> Result<Option<Member>, construct_store::Error> {
        let member = self.store.slack_member(team, user).await?;
        Ok(member.filter(|member| member.organization == organization))
    }

    /// The authorization of a user's own key; none when it is not linked.
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

    /// Links the account that a set-up code was created for. Returns the text for the user.
    pub(crate) async fn link(
        &self,
        team: &Team,
        user: &str,
        code: &str,
    ) -> Result<String, error::Error> {
        let organization = team.installation.organization;
        let id = &team.token.team;
        let request = tonic::Request::new(v1::ExchangeSetupCodeRequest { code: code.to_owned() });
        let created = match call(self.gateway.keys().exchange_setup_code(request)).await {
            Ok(created) => created,
            Err(status) if is_transient(&status) => return Err(status.into()),
            // The command may have been delivered twice, and processed the first time.
            Err(_) => {
                let linked = self.describe_link(id, organization, user).await?;
                return Ok(format!("That code is invalid or expired. {linked}"));
            }
        };
        let authorization = Authorization::bearer(&created.key).ok_or(Error::InvalidKey)?;
        let account = match retry_transient(|| self.gateway.who_am_i(Some(&authorization))).await {
            Ok(account) if account.organization_id == organization.to_string() => account,
            Ok(_) => return Ok(texts::OTHER_ORGANIZATION.to_owned()),
            Err(status) if is_transient(&status) => {
                // The code is used up, so there is nothing to retry.
                return Err(error::Error::Failed(
                    "Construct is not available. Create another code, and try again.".to_owned(),
                ));
            }
            Err(_) => return Ok(texts::OTHER_ORGANIZATION.to_owned()),
        };
        if !account.scopes.iter().any(|scope| scope == SCOPE || scope == "admin") {
            return Ok(format!(
                "The key of that code cannot ask questions: it lacks the scope `{SCOPE}`."
            ));
        }
        let sealed = self
            .keyring
            .seal(&Member::record(id, user), created.key.as_bytes())
            .map_err(Error::Unseal)?;
        let member = Member {
            team: id.clone(),
            slack_user: user.to_owned(),
            organization,
            user: account.user_id,
            name: account.name,
            key: sealed,
        };
        self.store.slack_member_put(&member, clock::now()).await?;
        tracing::info!(
            team = id,
            slack_user = user,
            user = member.user,
            "a user linked their account"
        );
        self.describe_link(id, organization, user).await
    }

    /// Unlinks a user's account. Returns the text for the user.
    pub(crate) async fn unlink(&self, team: &Team, user: &str) -> Result<String, error::Error> {
        let removed = self.store.slack_member_remove(&team.token.team, user).await?;
        Ok(if removed {
            "I have unlinked your Construct account and deleted your key here. Revoke the key with `construct key revoke`."
        } else {
            texts::NOT_LINKED
        }
        .to_owned())
    }

    /// Describes a user's link, for the user.
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
                    "In Construct you are *{}*. Your questions and decisions here are recorded under that account.",
                    escape(name)
                )
            }
            None => texts::NOT_LINKED.to_owned(),
        })
    }

    /// Reseals keys that are not sealed with the active master key, so that an old key can be
    /// removed.
    pub(crate) async fn reseal(&self) {
        loop {
            let outdated = match self
                .store
                .slack_members_sealed_with_other_keys(self.keyring.active(), RESEAL_BATCH_SIZE)
                .await
            {
                Ok(outdated) => outdated,
                Err(error) => {
                    tracing::warn!(error = %Chain(&error), "cannot list the keys to reseal");
                    return;
                }
            };
            let mut done = 0;
            for member in &outdated {
                match self.reseal_one(member).await {
                    Ok(()) => done += 1,
                    Err(error) => {
                        let (team, user) = (&member.team, &member.slack_user);
                        tracing::error!(team, user, error = %Chain(&error), "cannot reseal a user's key");
                    }
                }
            }
            if done > 0 {
                tracing::info!(done, "resealed users' keys with the active master key");
            }
            // Keys that cannot be resealed would be found forever.
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

/// Converts a refusal of the gateway for the user, whose own key `by` was used, if any.
pub(crate) fn gateway_refusal(status: Status, by: Option<&Authorization>) -> error::Error {
    match (by, status.code()) {
        (Some(_), Code::Unauthenticated) => error::Error::Failed(texts::KEY_REJECTED.to_owned()),
        (Some(_), Code::PermissionDenied) => {
            error::Error::Failed(texts::ROLE_INSUFFICIENT.to_owned())
        }
        _ => status.into(),
    }
}

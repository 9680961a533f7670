//! The workspaces the app is installed in, and the tokens it has there: opened for a call, renewed
//! before they end.

use std::{sync::Arc, time::Duration};

use construct_domain::OrganizationId;
use construct_runtime::{Lifecycle, clock, config::Secret, telemetry::Chain};
use construct_store::{
    Keyring, SealError, SealedSecret, Store,
    slack::{Installation, NewInstallation},
};
use jiff::{SignedDuration, Timestamp};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Value, json};
use tokio::sync::{Mutex, oneshot};

use crate::{
    gateway::{Authorization, Caller},
    web::{self, Token, Web, oauth},
};

/// A token is renewed when it has only so long to go: long enough for whatever is begun with it.
const RENEW: SignedDuration = SignedDuration::from_mins(30);
/// How often tokens are looked at while one that has ended keeps its workspace from working.
pub(crate) const AGAIN: Duration = Duration::from_secs(60);

/// How often it is tried to store what was renewed, and the pause between. A database that is
/// started again is back by then.
const STORE_ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_secs(1);

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The app isn't installed there, or not any more.
    #[error("the app is not installed in this workspace")]
    NotInstalled,
    /// It cannot be found out.
    #[error("the installation cannot be read")]
    Store(#[source] construct_store::Error),
    /// It is there and cannot be opened.
    #[error("the token cannot be opened")]
    Sealed(#[source] SealError),
    /// What was sealed is no token.
    #[error("what is stored in the token's place is none")]
    Unreadable,
    /// The process ends while it is renewed.
    #[error("the renewal of the token was interrupted")]
    Interrupted,
    /// The workspace is another organization's.
    #[error("the workspace is connected to another organization")]
    Elsewhere,
    /// It has ended and cannot be renewed.
    #[error("the token cannot be renewed")]
    Renewal(#[source] web::Error),
}

/// A workspace that can be worked in.
#[derive(Debug, Clone)]
pub(crate) struct Team {
    pub(crate) installation: Installation,
    pub(crate) token: Token,
    /// In whose name the mesh is asked about it.
    pub(crate) caller: Caller,
}

/// All of them. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Teams {
    store: Store,
    web: Web,
    keyring: Arc<Keyring>,
    /// HTTP's basic authentication of the app; none when it cannot be installed over OAuth.
    app: Option<SecretString>,
    /// Of several calls that need a new token, one gets it.
    renewing: Arc<Mutex<()>>,
    lifecycle: Lifecycle,
}

/// What is sealed.
struct Tokens {
    token: SecretString,
    refresh: Option<SecretString>,
    /// The key of the organization's member who has connected the workspace; none: the service's
    /// own.
    gateway: Option<SecretString>,
}

/// Who has connected a workspace, and what to.
pub(crate) struct Connected {
    /// Whose the workspace is from then on.
    pub(crate) organization: OrganizationId,
    /// The key of their member; none: the service's own.
    pub(crate) key: Option<SecretString>,
    /// The agent that answers there.
    pub(crate) agent: String,
}

impl Teams {
    pub(crate) fn new(
        store: Store,
        web: Web,
        keyring: Arc<Keyring>,
        app: Option<SecretString>,
        lifecycle: Lifecycle,
    ) -> Self {
        Self { store, web, keyring, app, renewing: Arc::default(), lifecycle }
    }

    /// A workspace, with a token that can be used.
    pub(crate) async fn team(&self, team: &str) -> Result<Team, Error> {
        let installation = self.installation(team).await?;
        let tokens = self.open(&installation)?;
        match (installation.expires_at, &tokens.refresh, &self.app) {
            (Some(expires_at), Some(_), Some(_)) if expires_at < clock::now() + RENEW => {
                // Slack takes a refresh token once: who asks for a new one has to see it stored,
                // even when nobody waits for it any more.
                let (this, team) = (self.clone(), team.to_owned());
                let (tell, told) = oneshot::channel();
                self.lifecycle.spawn_job("renewal of a token", async move {
                    let _one = this.renewing.lock().await;
                    // Somebody else may have been faster.
                    let renewed = match this.installation(&team).await {
                        Ok(installation) => this.renew(installation).await,
                        Err(error) => Err(error),
                    };
                    let _ = tell.send(renewed);
                });
                told.await.map_err(|_| Error::Interrupted)?
            }
            _ => team_of(installation, tokens),
        }
    }

    async fn installation(&self, team: &str) -> Result<Installation, Error> {
        self.store.slack_installation(team).await.map_err(|error| match error {
            construct_store::Error::NotFound { .. } => Error::NotInstalled,
            error => Error::Store(error),
        })
    }

    async fn renew(&self, installation: Installation) -> Result<Team, Error> {
        let now = clock::now();
        let tokens = self.open(&installation)?;
        let team = installation.team.clone();
        let ended = installation.expires_at.is_some_and(|at| at <= now);
        let (Some(app), Some(refresh)) = (&self.app, &tokens.refresh) else {
            return Err(Error::NotInstalled);
        };
        if installation.expires_at.is_none_or(|at| at >= now + RENEW) {
            return team_of(installation, tokens);
        }
        let access = match oauth::refresh(&self.web, app.expose_secret(), refresh.expose_secret())
            .await
        {
            Ok(access) => access,
            Err(error) => {
                // Another process has used it, and stored what it got.
                let again = self.installation(&team).await?;
                if again.revision != installation.revision {
                    let tokens = self.open(&again)?;
                    return team_of(again, tokens);
                }
                if ended {
                    return Err(Error::Renewal(error));
                }
                tracing::warn!(team, error = %Chain(&error), "a token could not be renewed; it is still valid");
                return team_of(installation, tokens);
            }
        };
        self.store_renewed(
            &installation,
            refresh.expose_secret(),
            &access,
            tokens.gateway.as_ref(),
        )
        .await?;
        team_of(
            installation,
            Tokens { token: SecretString::from(access.access_token.expose()), ..tokens },
        )
    }

    /// Puts new tokens in the place of those that were got with a refresh token, which is used up:
    /// the new ones are nowhere else.
    async fn store_renewed(
        &self,
        before: &Installation,
        used: &str,
        access: &oauth::Access,
        gateway: Option<&SecretString>,
    ) -> Result<(), Error> {
        let (team, sealed) = (&before.team, self.seal(&before.team, access, gateway)?);
        let (mut revision, mut attempts) = (before.revision, 0);
        loop {
            let now = clock::now();
            let stored = self
                .store
                .slack_tokens_replace(team, revision, &sealed, expiry(access, now), now)
                .await;
            attempts += 1;
            match stored {
                Ok(true) => return Ok(()),
                Ok(false) => {
                    let found = match self.installation(team).await {
                        Err(Error::Store(error)) if attempts < STORE_ATTEMPTS => {
                            tracing::warn!(team, error = %Chain(&error), "a renewed token could not be stored; it is tried again");
                            tokio::time::sleep(PAUSE).await;
                            continue;
                        }
                        found => found?,
                    };
                    let same = self
                        .open(&found)?
                        .refresh
                        .is_some_and(|refresh| refresh.expose_secret() == used);
                    if !same {
                        tracing::warn!(
                            team,
                            "a renewed token was not stored: the app has been installed anew meanwhile"
                        );
                        return Ok(());
                    }
                    // It has only been encrypted with another master key.
                    revision = found.revision;
                }
                Err(error) if attempts < STORE_ATTEMPTS => {
                    tracing::warn!(team, error = %Chain(&error), "a renewed token could not be stored; it is tried again");
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(Error::Store(error)),
            }
        }
    }

    /// Notes an installation that somebody has agreed to. Gives the workspace's name.
    ///
    /// # Errors
    /// [`Error::Elsewhere`] when the workspace is another organization's; nothing is changed then.
    pub(crate) async fn install(
        &self,
        access: &oauth::Access,
        connected: Connected,
    ) -> Result<String, Error> {
        let Connected { organization, key, agent } = connected;
        let now = clock::now();
        let team = access.team.as_ref().ok_or(Error::NotInstalled)?;
        let new = NewInstallation {
            team: team.id.clone(),
            organization,
            team_name: team.name.clone(),
            app: access.app_id.clone(),
            bot_user: access.bot_user_id.clone(),
            installed_by: access.authed_user.id.clone(),
            agent,
            scopes: access.scope.clone(),
            tokens: self.seal(&team.id, access, key.as_ref())?,
            expires_at: expiry(access, now),
        };
        if !self.store.slack_install(&new, now).await.map_err(Error::Store)? {
            tracing::warn!(team = new.team, organization = %organization, "a workspace of another organization was not connected");
            return Err(Error::Elsewhere);
        }
        tracing::info!(team = new.team, organization = %organization, "the app was installed");
        Ok(team.name.clone())
    }

    /// Seals anew what is not sealed with the active master key, so that an old one can be taken
    /// away.
    pub(crate) async fn reseal(&self) {
        let others = match self.store.slack_sealed_otherwise(self.keyring.active()).await {
            Ok(others) => others,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "tokens of workspaces could not be looked through");
                return;
            }
        };
        for installation in others {
            let (team, record) = (&installation.team, Installation::record(&installation.team));
            let Some(sealed) = &installation.tokens else { continue };
            let resealed = self.keyring.open(&record, sealed);
            let resealed =
                resealed.and_then(|plain| self.keyring.seal(&record, plain.expose_secret()));
            let done = match resealed {
                Ok(resealed) => {
                    let (revision, expires_at) = (installation.revision, installation.expires_at);
                    let now = clock::now();
                    self.store
                        .slack_tokens_replace(team, revision, &resealed, expires_at, now)
                        .await
                        .map_err(Error::Store)
                }
                Err(error) => Err(Error::Sealed(error)),
            };
            match done {
                Ok(_) => {
                    tracing::info!(
                        team,
                        "the tokens of a workspace were encrypted again, with the active master key"
                    )
                }
                Err(error) => {
                    tracing::error!(team, error = %Chain(&error), "the tokens of a workspace cannot be encrypted again");
                }
            }
        }
    }

    /// Forgets the tokens of a workspace that has removed the app at that time, unless it has
    /// installed it again since.
    pub(crate) async fn uninstall(
        &self,
        team: &str,
        at: Timestamp,
    ) -> Result<(), construct_store::Error> {
        if self.store.slack_uninstall(team, at, clock::now()).await? {
            tracing::info!(team, "the app was removed from a workspace");
        } else {
            tracing::info!(
                team,
                "the app was removed from a workspace before it was installed as it is now"
            );
        }
        Ok(())
    }

    fn seal(
        &self,
        team: &str,
        access: &oauth::Access,
        gateway: Option<&SecretString>,
    ) -> Result<SealedSecret, Error> {
        let refresh = access.refresh_token.as_ref().map(Secret::expose);
        let gateway = gateway.map(SecretString::expose_secret);
        let plain =
            json!({"token": access.access_token.expose(), "refresh": refresh, "gateway": gateway});
        let plain = SecretString::from(plain.to_string());
        self.keyring
            .seal(&Installation::record(team), plain.expose_secret().as_bytes())
            .map_err(Error::Sealed)
    }

    fn open(&self, installation: &Installation) -> Result<Tokens, Error> {
        let sealed = installation.tokens.as_ref().ok_or(Error::NotInstalled)?;
        let plain = self
            .keyring
            .open(&Installation::record(&installation.team), sealed)
            .map_err(Error::Sealed)?;
        let tokens: Value =
            serde_json::from_slice(plain.expose_secret()).map_err(|_| Error::Unreadable)?;
        let text = |name: &str| tokens[name].as_str().map(SecretString::from);
        Ok(Tokens {
            token: text("token").ok_or(Error::Unreadable)?,
            refresh: text("refresh"),
            gateway: text("gateway"),
        })
    }
}

fn team_of(installation: Installation, tokens: Tokens) -> Result<Team, Error> {
    let key = match &tokens.gateway {
        Some(key) => Some(Authorization::bearer(key.expose_secret()).ok_or(Error::Unreadable)?),
        None => None,
    };
    let caller = Caller { organization: installation.organization, key };
    let token = Token { team: installation.team.clone(), secret: tokens.token };
    Ok(Team { installation, token, caller })
}

fn expiry(access: &oauth::Access, now: Timestamp) -> Option<Timestamp> {
    access.expires_in.map(|seconds| now + SignedDuration::from_secs(seconds))
}

//! The workspaces that the app is installed in, with their tokens: unsealed for a call, renewed
//! before they expire.

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
    error,
    gateway::{Authorization, Caller},
    web::{self, Token, Web, oauth},
};

/// A token is renewed this long before it expires: long enough for anything that is started with
/// it.
const RENEW_BEFORE_EXPIRY: SignedDuration = SignedDuration::from_mins(30);
/// The retry delay while an expired token keeps its workspace from working.
pub(crate) const RETRY_DELAY: Duration = Duration::from_secs(60);

/// Attempts to store renewed tokens, and the delay between them. They outlast a restart of the
/// database.
const MAX_STORE_ATTEMPTS: u32 = 20;
const STORE_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Why a workspace has no usable token.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The app is not installed, or no longer.
    #[error("the app is not installed in this workspace")]
    NotInstalled,
    /// The installation cannot be read.
    #[error("the installation cannot be read")]
    Store(#[source] construct_store::Error),
    /// The token cannot be unsealed.
    #[error("cannot unseal the token")]
    Unseal(#[source] SealError),
    /// The unsealed value is not a token.
    #[error("the stored token is invalid")]
    InvalidToken,
    /// The process stopped during the renewal.
    #[error("the renewal of the token was interrupted")]
    Interrupted,
    /// The workspace belongs to another organization.
    #[error("the workspace is connected to another organization")]
    OtherOrganization,
    /// The token expired and cannot be renewed.
    #[error("the token cannot be renewed")]
    Renewal(#[source] web::Error),
}

impl From<Error> for error::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Store(error) => error.into(),
            Error::NotInstalled => Self::Silent(error.to_string()),
            // The key may be restored, or the app installed again.
            error => Self::Retryable {
                reason: Chain(&error).to_string(),
                retry_after: Some(RETRY_DELAY),
            },
        }
    }
}

/// A workspace with a usable token.
#[derive(Debug, Clone)]
pub(crate) struct Team {
    pub(crate) installation: Installation,
    pub(crate) token: Token,
    /// The caller of requests to the mesh about this workspace.
    pub(crate) caller: Caller,
}

/// All workspaces. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Teams {
    store: Store,
    web: Web,
    keyring: Arc<Keyring>,
    /// The app's HTTP basic authentication; none when it cannot be installed over OAuth.
    basic_authentication: Option<SecretString>,
    /// Of concurrent calls that need a new token, one renews it.
    renewal_lock: Arc<Mutex<()>>,
    lifecycle: Lifecycle,
}

/// The sealed secrets of a workspace.
struct Tokens {
    token: SecretString,
    refresh: Option<SecretString>,
    /// The API key of the member who connected the workspace; none: the service's own.
    gateway: Option<SecretString>,
}

/// How a workspace is connected.
pub(crate) struct WorkspaceConnection {
    /// The organization that owns the workspace.
    pub(crate) organization: OrganizationId,
    /// The API key of its member; none: the service's own.
    pub(crate) key: Option<SecretString>,
    /// The agent that answers in the workspace.
    pub(crate) agent: String,
}

impl Teams {
    pub(crate) fn new(
        store: Store,
        web: Web,
        keyring: Arc<Keyring>,
        basic_authentication: Option<SecretString>,
        lifecycle: Lifecycle,
    ) -> Self {
        Self { store, web, keyring, basic_authentication, renewal_lock: Arc::default(), lifecycle }
    }

    /// Returns a workspace with a usable token.
    pub(crate) async fn team(&self, team: &str) -> Result<Team, Error> {
        let installation = self.installation(team).await?;
        let tokens = self.open(&installation)?;
        match (installation.expires_at, &tokens.refresh, &self.basic_authentication) {
            (Some(expires_at), Some(_), Some(_))
                if expires_at < clock::now() + RENEW_BEFORE_EXPIRY =>
            {
                // Slack accepts a refresh token once. So the renewal is stored even when its caller
                // no longer waits.
                let (this, team) = (self.clone(), team.to_owned());
                let (sender, receiver) = oneshot::channel();
                self.lifecycle.spawn_job("token renewal", async move {
                    let _one = this.renewal_lock.lock().await;
                    // Another call may have been faster.
                    let renewed = match this.installation(&team).await {
                        Ok(installation) => this.renew(installation).await,
                        Err(error) => Err(error),
                    };
                    let _ = sender.send(renewed);
                });
                receiver.await.map_err(|_| Error::Interrupted)?
            }
            _ => build_team(installation, tokens),
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
        let (Some(app), Some(refresh)) = (&self.basic_authentication, &tokens.refresh) else {
            return Err(Error::NotInstalled);
        };
        if installation.expires_at.is_none_or(|at| at >= now + RENEW_BEFORE_EXPIRY) {
            return build_team(installation, tokens);
        }
        let access = match oauth::refresh(&self.web, app.expose_secret(), refresh.expose_secret())
            .await
        {
            Ok(access) => access,
            Err(error) => {
                // Another process used it, and stored the result.
                let current = self.installation(&team).await?;
                if current.revision != installation.revision {
                    let tokens = self.open(&current)?;
                    return build_team(current, tokens);
                }
                if ended {
                    return Err(Error::Renewal(error));
                }
                tracing::warn!(team, error = %Chain(&error), "cannot renew a token; it is still valid");
                return build_team(installation, tokens);
            }
        };
        self.store_renewed_tokens(
            &installation,
            refresh.expose_secret(),
            &access,
            tokens.gateway.as_ref(),
        )
        .await?;
        build_team(
            installation,
            Tokens { token: SecretString::from(access.access_token.expose()), ..tokens },
        )
    }

    /// Replaces the tokens after a renewal. The old refresh token is used up, and the new tokens
    /// exist nowhere else.
    async fn store_renewed_tokens(
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
                .slack_tokens_replace(team, revision, &sealed, expires_at(access, now), now)
                .await;
            attempts += 1;
            match stored {
                Ok(true) => return Ok(()),
                Ok(false) => {
                    let current = match self.installation(team).await {
                        Err(Error::Store(error)) if attempts < MAX_STORE_ATTEMPTS => {
                            tracing::warn!(team, error = %Chain(&error), "cannot store a renewed token; retrying");
                            tokio::time::sleep(STORE_RETRY_DELAY).await;
                            continue;
                        }
                        current => current?,
                    };
                    let same = self
                        .open(&current)?
                        .refresh
                        .is_some_and(|refresh| refresh.expose_secret() == used);
                    if !same {
                        tracing::warn!(
                            team,
                            "a renewed token was not stored: the app was installed again meanwhile"
                        );
                        return Ok(());
                    }
                    // It was only resealed with another master key.
                    revision = current.revision;
                }
                Err(error) if attempts < MAX_STORE_ATTEMPTS => {
                    tracing::warn!(team, error = %Chain(&error), "cannot store a renewed token; retrying");
                    tokio::time::sleep(STORE_RETRY_DELAY).await;
                }
                Err(error) => return Err(Error::Store(error)),
            }
        }
    }

    /// Stores an authorized installation. Returns the workspace's name.
    ///
    /// # Errors
    /// [`Error::OtherOrganization`] when the workspace belongs to another organization; nothing is
    /// changed then.
    pub(crate) async fn install(
        &self,
        access: &oauth::Access,
        connected: WorkspaceConnection,
    ) -> Result<String, Error> {
        let WorkspaceConnection { organization, key, agent } = connected;
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
            expires_at: expires_at(access, now),
        };
        if !self.store.slack_install(&new, now).await.map_err(Error::Store)? {
            tracing::warn!(team = new.team, organization = %organization, "refused to connect a workspace of another organization");
            return Err(Error::OtherOrganization);
        }
        tracing::info!(team = new.team, organization = %organization, "the app was installed");
        Ok(team.name.clone())
    }

    /// Reseals tokens that are not sealed with the active master key, so that an old key can be
    /// removed.
    pub(crate) async fn reseal(&self) {
        let outdated = match self.store.slack_sealed_with_other_keys(self.keyring.active()).await {
            Ok(outdated) => outdated,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "cannot list workspaces with tokens to reseal");
                return;
            }
        };
        for installation in outdated {
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
                Err(error) => Err(Error::Unseal(error)),
            };
            match done {
                Ok(_) => {
                    tracing::info!(
                        team,
                        "resealed the tokens of a workspace with the active master key"
                    )
                }
                Err(error) => {
                    tracing::error!(team, error = %Chain(&error), "cannot reseal the tokens of a workspace");
                }
            }
        }
    }

    /// Deletes the tokens of a workspace that removed the app at that time, unless it installed the
    /// app again since.
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
                "the app was removed from a workspace before its current installation"
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
            .map_err(Error::Unseal)
    }

    fn open(&self, installation: &Installation) -> Result<Tokens, Error> {
        let sealed = installation.tokens.as_ref().ok_or(Error::NotInstalled)?;
        let plain = self
            .keyring
            .open(&Installation::record(&installation.team), sealed)
            .map_err(Error::Unseal)?;
        let tokens: Value =
            serde_json::from_slice(plain.expose_secret()).map_err(|_| Error::InvalidToken)?;
        let text = |name: &str| tokens[name].as_str().map(SecretString::from);
        Ok(Tokens {
            token: text("token").ok_or(Error::InvalidToken)?,
            refresh: text("refresh"),
            gateway: text("gateway"),
        })
    }
}

fn build_team(installation: Installation, tokens: Tokens) -> Result<Team, Error> {
    let key = match &tokens.gateway {
        Some(key) => Some(Authorization::bearer(key.expose_secret()).ok_or(Error::InvalidToken)?),
        None => None,
    };
    let caller = Caller { organization: installation.organization, key };
    let token = Token { team: installation.team.clone(), secret: tokens.token };
    Ok(Team { installation, token, caller })
}

fn expires_at(access: &oauth::Access, now: Timestamp) -> Option<Timestamp> {
    access.expires_in.map(|seconds| now + SignedDuration::from_secs(seconds))
}

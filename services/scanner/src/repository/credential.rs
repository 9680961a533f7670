//! What a forge is shown: nothing, a token, or a token that a GitHub App gets for an hour.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Serialize;
use tokio::sync::Mutex;

use super::SourceError;

/// GitHub takes no assertion that is valid for more than ten minutes; its clock may be behind ours.
const ASSERTION: Duration = Duration::from_secs(9 * 60);
/// How far our clock may be ahead.
const SKEW: SignedDuration = SignedDuration::from_secs(60);
/// So long before its end a token is replaced: a download that begins with it must be accepted.
const MARGIN: SignedDuration = SignedDuration::from_secs(5 * 60);

/// The key of a GitHub App is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the app's key is no RSA key in PEM")]
pub(super) struct AppKeyError;

/// What is shown to a forge.
pub(super) enum Credential {
    /// Nothing.
    None,
    /// `Authorization: Bearer`.
    Bearer(SecretString),
    /// `PRIVATE-TOKEN`, as GitLab has it.
    Private(SecretString),
    /// An installation of a GitHub App.
    App(App),
}

impl std::fmt::Debug for Credential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Bearer(_) => "a token",
            Self::Private(_) => "a private token",
            Self::App(_) => "a GitHub App",
        })
    }
}

/// A GitHub App where it is installed.
pub(super) struct App {
    issuer: String,
    installation: u64,
    key: EncodingKey,
    /// Held while a new one is asked for, so that one is enough.
    token: Mutex<Option<Token>>,
}

/// A token of an installation.
#[derive(Clone)]
pub(super) struct Token {
    pub(super) secret: SecretString,
    pub(super) expires_at: Timestamp,
}

#[derive(Serialize)]
struct Claims<'a> {
    iat: i64,
    exp: i64,
    iss: &'a str,
}

impl App {
    pub(super) fn new(
        issuer: String,
        installation: u64,
        key: &SecretString,
    ) -> Result<Self, AppKeyError> {
        let key =
            EncodingKey::from_rsa_pem(key.expose_secret().as_bytes()).map_err(|_| AppKeyError)?;
        Ok(Self { issuer, installation, key, token: Mutex::new(None) })
    }

    /// Where a token is had, below the API's base.
    pub(super) fn token_path(&self) -> String {
        format!("app/installations/{}/access_tokens", self.installation)
    }

    /// What says that we are the app.
    pub(super) fn assertion(&self, now: Timestamp) -> Result<SecretString, SourceError> {
        let claims = Claims {
            iat: (now - SKEW).as_second(),
            exp: now.as_second().saturating_add_unsigned(ASSERTION.as_secs()),
            iss: &self.issuer,
        };
        jsonwebtoken::encode(&Header::new(Algorithm::RS256), &claims, &self.key)
            .map(SecretString::from)
            .map_err(|_| SourceError::Denied { why: "the app's key cannot sign".to_owned() })
    }

    /// The token that is kept, or a new one.
    pub(super) async fn token(
        &self,
        now: Timestamp,
        ask: impl AsyncFnOnce(SecretString) -> Result<Token, SourceError>,
    ) -> Result<SecretString, SourceError> {
        let mut kept = self.token.lock().await;
        if let Some(token) = &*kept
            && token.expires_at - MARGIN > now
        {
            return Ok(token.secret.clone());
        }
        let token = ask(self.assertion(now)?).await?;
        let secret = token.secret.clone();
        *kept = Some(token);
        Ok(secret)
    }

    /// Forgets the token: it was refused.
    pub(super) async fn forget(&self) {
        *self.token.lock().await = None;
    }
}

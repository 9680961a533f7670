//! Credentials for a forge: none, a token, or a GitHub App's token, which is valid for an hour.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Serialize;
use tokio::sync::Mutex;

use super::SourceError;

/// The lifetime of an assertion. GitHub accepts at most ten minutes, and its clock may be behind
/// ours.
const ASSERTION_LIFETIME: Duration = Duration::from_secs(9 * 60);
/// How far our clock may be ahead.
const CLOCK_SKEW: SignedDuration = SignedDuration::from_secs(60);
/// How long before its expiry a token is replaced: a download that starts with it must be accepted.
const RENEWAL_MARGIN: SignedDuration = SignedDuration::from_secs(5 * 60);

/// The key of a GitHub App is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the app's key is not an RSA key in PEM")]
pub(super) struct AppKeyError;

/// A credential.
pub(super) enum Credential {
    /// No credential.
    None,
    /// `Authorization: Bearer`.
    Bearer(SecretString),
    /// `PRIVATE-TOKEN`, as GitLab has it.
    Private(SecretString),
    /// An installation of a GitHub App.
    App(GitHubApp),
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

/// An installation of a GitHub App.
pub(super) struct GitHubApp {
    issuer: String,
    installation: u64,
    key: EncodingKey,
    /// Locked during a request for a new one, so that one request is enough.
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

impl GitHubApp {
    pub(super) fn new(
        issuer: String,
        installation: u64,
        key: &SecretString,
    ) -> Result<Self, AppKeyError> {
        let key =
            EncodingKey::from_rsa_pem(key.expose_secret().as_bytes()).map_err(|_| AppKeyError)?;
        Ok(Self { issuer, installation, key, token: Mutex::new(None) })
    }

    /// The path for a new token, below the API's base.
    pub(super) fn token_path(&self) -> String {
        format!("app/installations/{}/access_tokens", self.installation)
    }

    /// The assertion that authenticates as the app.
    pub(super) fn assertion(&self, now: Timestamp) -> Result<SecretString, SourceError> {
        let claims = Claims {
            iat: (now - CLOCK_SKEW).as_second(),
            exp: now.as_second().saturating_add_unsigned(ASSERTION_LIFETIME.as_secs()),
            iss: &self.issuer,
        };
        jsonwebtoken::encode(&Header::new(Algorithm::RS256), &claims, &self.key)
            .map(SecretString::from)
            .map_err(|_| SourceError::Denied { reason: "the app's key cannot sign".to_owned() })
    }

    /// Returns the cached token, or a new one.
    pub(super) async fn token(
        &self,
        now: Timestamp,
        request: impl AsyncFnOnce(SecretString) -> Result<Token, SourceError>,
    ) -> Result<SecretString, SourceError> {
        let mut cached = self.token.lock().await;
        if let Some(token) = &*cached
            && token.expires_at - RENEWAL_MARGIN > now
        {
            return Ok(token.secret.clone());
        }
        let token = request(self.assertion(now)?).await?;
        let secret = token.secret.clone();
        *cached = Some(token);
        Ok(secret)
    }

    /// Discards the token after it was refused.
    pub(super) async fn discard_token(&self) {
        *self.token.lock().await = None;
    }
}

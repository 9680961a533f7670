//! Slack's Web API: how methods are called, and the responses that any of them can return. The
//! modules below hold the methods, one per area.
//!
//! A rate-limited call is retried after the requested delay. Other failures are the caller's to
//! handle, because only the caller knows whether the call may have had an effect.

pub(crate) mod chat;
pub(crate) mod conversations;
pub(crate) mod files;
pub(crate) mod oauth;
pub(crate) mod users;
pub(crate) mod views;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use reqwest::{
    StatusCode, Url,
    header::{AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER},
    redirect,
};
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use tokio::time::{Instant, sleep, sleep_until};

use crate::metrics::Metrics;

/// The timeout of one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// The longest delay that is waited here. For a longer one the work is requeued.
const MAX_RATE_LIMIT_WAIT: Duration = Duration::from_secs(30);
/// Attempts of a rate-limited call.
const MAX_ATTEMPTS: u32 = 4;
/// The delay after a rate limit that names none.
const DEFAULT_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Bytes of a response that are read at most.
const MAX_RESPONSE_BYTES: usize = 8 * 1024 * 1024;

/// Why a method call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    /// Slack refused, with this code.
    #[error("Slack refused `{method}`: {code}")]
    Refused {
        /// The method.
        method: &'static str,
        /// Slack's error code.
        code: String,
    },
    /// The delay until the next call is longer than is waited here. Nothing was done.
    #[error("Slack limits `{method}`: retry after {retry_after:?}")]
    Limited {
        /// The method.
        method: &'static str,
        /// The delay until the next call.
        retry_after: Duration,
    },
    /// The outcome of the call is unknown.
    #[error("unexpected response to `{method}`: {reason}")]
    Unknown {
        /// The method.
        method: &'static str,
        /// What happened.
        reason: String,
    },
    /// The caller lost the right to continue. Nothing was done.
    #[error("`{method}` was not called: the lease was lost")]
    Stopped {
        /// The method.
        method: &'static str,
    },
    /// The workspace has no usable token.
    #[error("the app has no token for this workspace")]
    NoToken,
}

impl Error {
    /// The kind of error, for metrics.
    const fn kind(&self) -> &'static str {
        match self {
            Self::Refused { .. } => "refused",
            Self::Limited { .. } => "rate_limited",
            Self::Unknown { .. } => "no_answer",
            Self::Stopped { .. } => "stopped",
            Self::NoToken => "no_token",
        }
    }

    /// Slack's error code, if it refused.
    pub(crate) fn code(&self) -> Option<&str> {
        match self {
            Self::Refused { code, .. } => Some(code),
            _ => None,
        }
    }

    /// Whether the token is permanently invalid.
    pub(crate) fn is_revoked(&self) -> bool {
        let revoked_codes =
            ["invalid_auth", "account_inactive", "token_revoked", "not_authed", "app_uninstalled"];
        self.code().is_some_and(|code| revoked_codes.contains(&code)) || *self == Self::NoToken
    }

    /// Whether Slack rejected a message for its format or size.
    pub(crate) fn is_invalid_content(&self) -> bool {
        let content_codes = [
            "invalid_blocks",
            "msg_blocks_too_long",
            "msg_too_long",
            "invalid_blocks_format",
            "too_many_blocks",
        ];
        self.code().is_some_and(|code| content_codes.contains(&code))
    }

    /// Whether the same call may succeed later without any change.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Limited { .. } | Self::Unknown { .. } => true,
            Self::NoToken | Self::Stopped { .. } => false,
            Self::Refused { code, .. } => {
                let transient_codes = [
                    "internal_error",
                    "fatal_error",
                    "service_unavailable",
                    "request_timeout",
                    "token_expired",
                ];
                transient_codes.contains(&code.as_str())
            }
        }
    }
}

/// Returns whether a call may still be made. Checked before each attempt, because delays between
/// attempts outlast leases.
pub(crate) type MayContinue<'a> = &'a (dyn Fn() -> bool + Send + Sync);

/// The client. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Web {
    client: reqwest::Client,
    base: Arc<Url>,
    /// The time before which a method must not be called with a workspace's token. Slack limits
    /// each method per workspace.
    pauses: Arc<Mutex<HashMap<(&'static str, String), Instant>>>,
    metrics: Metrics,
}

/// A workspace's token, for calls.
#[derive(Debug, Clone)]
pub(crate) struct Token {
    /// The workspace.
    pub(crate) team: String,
    /// The secret itself.
    pub(crate) secret: SecretString,
}

/// The common part of all responses.
#[derive(Debug, Deserialize)]
struct Envelope {
    ok: bool,
    #[serde(default)]
    error: Option<String>,
}

/// The body of a request.
pub(crate) enum Body<'a> {
    /// For methods that take JSON.
    Json(Value),
    /// For methods that take a form.
    Form(&'a [(&'a str, &'a str)]),
}

impl Web {
    /// Creates a client of the API at `base`, which ends with a slash. It follows no redirects, so
    /// that a token goes nowhere else.
    ///
    /// # Errors
    /// When the address is invalid, or the machine has no certificate authorities.
    pub(crate) fn new(base: &str, metrics: Metrics) -> anyhow::Result<Self> {
        let client = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(5))
            .timeout(CALL_TIMEOUT)
            .redirect(redirect::Policy::none())
            .no_proxy()
            .user_agent(concat!("construct/", env!("CARGO_PKG_VERSION")))
            .build()?;
        Ok(Self { client, base: Arc::new(Url::parse(base)?), pauses: Arc::default(), metrics })
    }

    /// The HTTP client, for addresses that Slack names.
    pub(crate) const fn client(&self) -> &reqwest::Client {
        &self.client
    }

    /// Whether a token may be sent to an address: to Slack's own hosts, or to the host of the API.
    pub(crate) fn is_slack_url(&self, url: &Url) -> bool {
        let same = url.scheme() == self.base.scheme() && url.host_str() == self.base.host_str();
        let host = url.host_str().unwrap_or_default();
        same || (url.scheme() == "https" && (host == "slack.com" || host.ends_with(".slack.com")))
    }

    /// Calls a method with a workspace's token.
    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        token: &Token,
        method: &'static str,
        body: Body<'_>,
    ) -> Result<T, Error> {
        self.call_while(token, method, body, &|| true).await
    }

    /// Like [`Web::call`], while `may_continue` allows it.
    pub(crate) async fn call_while<T: DeserializeOwned>(
        &self,
        token: &Token,
        method: &'static str,
        body: Body<'_>,
        may_continue: MayContinue<'_>,
    ) -> Result<T, Error> {
        self.wait_for_rate_limit(method, &token.team).await?;
        let mut attempts = 1;
        loop {
            if !may_continue() {
                return Err(Error::Stopped { method });
            }
            match self
                .attempt(method, &format!("Bearer {}", token.secret.expose_secret()), &body)
                .await
            {
                Err(Error::Limited { method, retry_after }) => {
                    self.set_pause(method, &token.team, retry_after);
                    if attempts >= MAX_ATTEMPTS || retry_after > MAX_RATE_LIMIT_WAIT {
                        return Err(Error::Limited { method, retry_after });
                    }
                    attempts += 1;
                    sleep(retry_after).await;
                }
                result => return result,
            }
        }
    }

    /// Calls a method once, without waiting for rate limits: for optional calls.
    pub(crate) async fn call_once<T: DeserializeOwned>(
        &self,
        token: &Token,
        method: &'static str,
        body: Body<'_>,
    ) -> Result<T, Error> {
        if let Some(until) = self.paused_until(method, &token.team) {
            return Err(Error::Limited {
                method,
                retry_after: until.saturating_duration_since(Instant::now()),
            });
        }
        let result =
            self.attempt(method, &format!("Bearer {}", token.secret.expose_secret()), &body).await;
        if let Err(Error::Limited { retry_after, .. }) = &result {
            self.set_pause(method, &token.team, *retry_after);
        }
        result
    }

    /// Calls a method that needs another authorization than a workspace's token.
    pub(crate) async fn call_with_authorization<T: DeserializeOwned>(
        &self,
        authorization: &str,
        method: &'static str,
        body: Body<'_>,
    ) -> Result<T, Error> {
        self.attempt(method, authorization, &body).await
    }

    async fn wait_for_rate_limit(&self, method: &'static str, team: &str) -> Result<(), Error> {
        let Some(until) = self.paused_until(method, team) else { return Ok(()) };
        let retry_after = until.saturating_duration_since(Instant::now());
        if retry_after > MAX_RATE_LIMIT_WAIT {
            return Err(Error::Limited { method, retry_after });
        }
        sleep_until(until).await;
        Ok(())
    }

    fn paused_until(&self, method: &'static str, team: &str) -> Option<Instant> {
        let mut pauses = self.pauses.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        pauses.retain(|_, until| *until > now);
        pauses.get(&(method, team.to_owned())).copied()
    }

    fn set_pause(&self, method: &'static str, team: &str, retry_after: Duration) {
        let mut pauses = self.pauses.lock().unwrap_or_else(PoisonError::into_inner);
        pauses.insert((method, team.to_owned()), Instant::now() + retry_after);
    }

    async fn attempt<T: DeserializeOwned>(
        &self,
        method: &'static str,
        authorization: &str,
        body: &Body<'_>,
    ) -> Result<T, Error> {
        let began = Instant::now();
        let result = self.exchange(method, authorization, body).await;
        self.metrics.record_call(
            method,
            result.as_ref().err().map_or("", Error::kind),
            began.elapsed(),
        );
        result
    }

    async fn exchange<T: DeserializeOwned>(
        &self,
        method: &'static str,
        authorization: &str,
        body: &Body<'_>,
    ) -> Result<T, Error> {
        let unknown = |reason: String| Error::Unknown { method, reason };
        let url = self.base.join(method).map_err(|error| unknown(error.to_string()))?;
        let request = self.client.post(url).header(AUTHORIZATION, authorization);
        let request = match body {
            Body::Json(value) => request
                .header(CONTENT_TYPE, "application/json; charset=utf-8")
                .body(value.to_string()),
            Body::Form(fields) => {
                let mut form = form_urlencoded::Serializer::new(String::new());
                for (name, value) in *fields {
                    form.append_pair(name, value);
                }
                request
                    .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
                    .body(form.finish())
            }
        };
        let mut response =
            request.send().await.map_err(|error| unknown(error.without_url().to_string()))?;
        let status = response.status();
        if status == StatusCode::TOO_MANY_REQUESTS {
            return Err(rate_limited_error(method, &response));
        }
        if !status.is_success() {
            return Err(unknown(format!("HTTP status {status}")));
        }
        let mut answer = Vec::new();
        while let Some(chunk) =
            response.chunk().await.map_err(|error| unknown(error.without_url().to_string()))?
        {
            answer.extend_from_slice(&chunk);
            if answer.len() > MAX_RESPONSE_BYTES {
                return Err(unknown(format!(
                    "the answer has more than {MAX_RESPONSE_BYTES} bytes"
                )));
            }
        }
        let envelope: Envelope =
            serde_json::from_slice(&answer).map_err(|error| unknown(error.to_string()))?;
        if !envelope.ok {
            let code = envelope.error.unwrap_or_else(|| "unknown_error".to_owned());
            if code == "ratelimited" || code == "rate_limited" {
                return Err(Error::Limited { method, retry_after: DEFAULT_RETRY_DELAY });
            }
            return Err(Error::Refused { method, code });
        }
        serde_json::from_slice(&answer).map_err(|error| unknown(error.to_string()))
    }
}

/// The error of a rate-limited response.
fn rate_limited_error(method: &'static str, response: &reqwest::Response) -> Error {
    let retry_after =
        response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    Error::Limited {
        method,
        retry_after: retry_after.map_or(DEFAULT_RETRY_DELAY, Duration::from_secs),
    }
}

//! Slack's Web API: how a method is called, and what Slack can answer to any of them. The methods
//! are in the modules below, one per area.
//!
//! A call is made once more when Slack was too busy, after as long as it asks for; what fails for
//! another reason is its caller's to decide, because only the caller knows whether the call may
//! have had an effect.

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

/// How long one call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// The longest pause that Slack may ask for and that is waited here; for a longer one the work is
/// put away.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How often a call is made while Slack says that it is too busy.
const TRIES: u32 = 4;
/// The pause after an answer that names none.
const PAUSE: Duration = Duration::from_secs(1);
/// How much of an answer is read.
const MAX_ANSWER: usize = 8 * 1024 * 1024;

/// Why a method did not do what it was to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    /// Slack refuses, with this code.
    #[error("Slack refuses `{method}`: {code}")]
    Refused {
        /// The method.
        method: &'static str,
        /// Slack's word for why.
        code: String,
    },
    /// Slack wants to be left alone for longer than one waits here. Nothing was done.
    #[error("Slack asks for a pause of {after:?} before the next `{method}`")]
    Limited {
        /// The method.
        method: &'static str,
        /// For how long.
        after: Duration,
    },
    /// Whether the call had an effect is not known.
    #[error("Slack has not answered `{method}` as it should: {what}")]
    Unknown {
        /// The method.
        method: &'static str,
        /// What happened instead.
        what: String,
    },
    /// Its caller may not go on. Nothing was done.
    #[error("`{method}` is not called any more")]
    Stopped {
        /// The method.
        method: &'static str,
    },
    /// There is no token for the workspace, or it cannot be used.
    #[error("the app has no token for this workspace")]
    NoToken,
}

impl Error {
    /// Which kind it is, for what is counted.
    const fn kind(&self) -> &'static str {
        match self {
            Self::Refused { .. } => "refused",
            Self::Limited { .. } => "rate_limited",
            Self::Unknown { .. } => "no_answer",
            Self::Stopped { .. } => "stopped",
            Self::NoToken => "no_token",
        }
    }

    /// Slack's word for why it refuses.
    pub(crate) fn code(&self) -> Option<&str> {
        match self {
            Self::Refused { code, .. } => Some(code),
            _ => None,
        }
    }

    /// Whether the token is of no use any more, whatever is asked with it.
    pub(crate) fn is_revoked(&self) -> bool {
        let gone =
            ["invalid_auth", "account_inactive", "token_revoked", "not_authed", "app_uninstalled"];
        self.code().is_some_and(|code| gone.contains(&code)) || *self == Self::NoToken
    }

    /// Whether Slack has refused a message for what it looks like.
    pub(crate) fn is_shape(&self) -> bool {
        let shapes = [
            "invalid_blocks",
            "msg_blocks_too_long",
            "msg_too_long",
            "invalid_blocks_format",
            "too_many_blocks",
        ];
        self.code().is_some_and(|code| shapes.contains(&code))
    }

    /// Whether the same call may succeed later, with nobody changing anything.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Limited { .. } | Self::Unknown { .. } => true,
            Self::NoToken | Self::Stopped { .. } => false,
            Self::Refused { code, .. } => {
                let passing = [
                    "internal_error",
                    "fatal_error",
                    "service_unavailable",
                    "request_timeout",
                    "token_expired",
                ];
                passing.contains(&code.as_str())
            }
        }
    }
}

/// Says whether a call may still be made: asked before each attempt, because pauses between them
/// outlast leases.
pub(crate) type Leave<'a> = &'a (dyn Fn() -> bool + Send + Sync);

/// The client. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Web {
    client: reqwest::Client,
    base: Arc<Url>,
    /// Until when a method must not be called with a workspace's token. Slack limits each method in
    /// each workspace.
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

/// What every answer says.
#[derive(Debug, Deserialize)]
struct Envelope {
    ok: bool,
    #[serde(default)]
    error: Option<String>,
}

/// What a request carries.
pub(crate) enum Body<'a> {
    /// For methods that take JSON.
    Json(Value),
    /// For those that don't.
    Form(&'a [(&'a str, &'a str)]),
}

impl Web {
    /// A client of the API at `base`, which ends with a slash. It follows no redirect, so that a
    /// token goes nowhere else.
    ///
    /// # Errors
    /// When the address is none, or the machine has no certificate authorities.
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

    /// The HTTP client, for what is fetched from addresses that Slack names.
    pub(crate) const fn client(&self) -> &reqwest::Client {
        &self.client
    }

    /// Whether an address that Slack has named lies where a token may be sent: at Slack's own
    /// hosts, or where the API is.
    pub(crate) fn is_slacks(&self, url: &Url) -> bool {
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

    /// The same while there is leave to.
    pub(crate) async fn call_while<T: DeserializeOwned>(
        &self,
        token: &Token,
        method: &'static str,
        body: Body<'_>,
        leave: Leave<'_>,
    ) -> Result<T, Error> {
        self.wait(method, &token.team).await?;
        let mut tries = 1;
        loop {
            if !leave() {
                return Err(Error::Stopped { method });
            }
            match self
                .attempt(method, &format!("Bearer {}", token.secret.expose_secret()), &body)
                .await
            {
                Err(Error::Limited { method, after }) => {
                    self.pause(method, &token.team, after);
                    if tries >= TRIES || after > LONGEST_PAUSE {
                        return Err(Error::Limited { method, after });
                    }
                    tries += 1;
                    sleep(after).await;
                }
                done => return done,
            }
        }
    }

    /// Calls a method once, with nothing said about limits: for what may as well be left out.
    pub(crate) async fn call_once<T: DeserializeOwned>(
        &self,
        token: &Token,
        method: &'static str,
        body: Body<'_>,
    ) -> Result<T, Error> {
        if let Some(until) = self.paused_until(method, &token.team) {
            return Err(Error::Limited {
                method,
                after: until.saturating_duration_since(Instant::now()),
            });
        }
        let done =
            self.attempt(method, &format!("Bearer {}", token.secret.expose_secret()), &body).await;
        if let Err(Error::Limited { after, .. }) = &done {
            self.pause(method, &token.team, *after);
        }
        done
    }

    /// Calls a method that wants something else than a workspace's token.
    pub(crate) async fn call_as<T: DeserializeOwned>(
        &self,
        authorization: &str,
        method: &'static str,
        body: Body<'_>,
    ) -> Result<T, Error> {
        self.attempt(method, authorization, &body).await
    }

    async fn wait(&self, method: &'static str, team: &str) -> Result<(), Error> {
        let Some(until) = self.paused_until(method, team) else { return Ok(()) };
        let after = until.saturating_duration_since(Instant::now());
        if after > LONGEST_PAUSE {
            return Err(Error::Limited { method, after });
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

    fn pause(&self, method: &'static str, team: &str, after: Duration) {
        let mut pauses = self.pauses.lock().unwrap_or_else(PoisonError::into_inner);
        pauses.insert((method, team.to_owned()), Instant::now() + after);
    }

    async fn attempt<T: DeserializeOwned>(
        &self,
        method: &'static str,
        authorization: &str,
        body: &Body<'_>,
    ) -> Result<T, Error> {
        let began = Instant::now();
        let done = self.exchange(method, authorization, body).await;
        self.metrics.call(method, done.as_ref().err().map_or("", Error::kind), began.elapsed());
        done
    }

    async fn exchange<T: DeserializeOwned>(
        &self,
        method: &'static str,
        authorization: &str,
        body: &Body<'_>,
    ) -> Result<T, Error> {
        let unknown = |what: String| Error::Unknown { method, what };
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
            return Err(limited(method, &response));
        }
        if !status.is_success() {
            return Err(unknown(format!("HTTP status {status}")));
        }
        let mut answer = Vec::new();
        while let Some(chunk) =
            response.chunk().await.map_err(|error| unknown(error.without_url().to_string()))?
        {
            answer.extend_from_slice(&chunk);
            if answer.len() > MAX_ANSWER {
                return Err(unknown(format!("the answer has more than {MAX_ANSWER} bytes")));
            }
        }
        let envelope: Envelope =
            serde_json::from_slice(&answer).map_err(|error| unknown(error.to_string()))?;
        if !envelope.ok {
            let code = envelope.error.unwrap_or_else(|| "unknown_error".to_owned());
            if code == "ratelimited" || code == "rate_limited" {
                return Err(Error::Limited { method, after: PAUSE });
            }
            return Err(Error::Refused { method, code });
        }
        serde_json::from_slice(&answer).map_err(|error| unknown(error.to_string()))
    }
}

/// How long Slack wants to be left alone.
fn limited(method: &'static str, response: &reqwest::Response) -> Error {
    let after =
        response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    Error::Limited { method, after: after.map_or(PAUSE, Duration::from_secs) }
}

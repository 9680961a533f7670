//! Asking a forge's API: credentials, redirects, limits, retries and remembered answers.
//!
//! The credential goes to the origin of the API and to no other. Redirects are followed by hand for
//! that, and each of their addresses is checked anew.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use construct_runtime::clock;
use futures::{StreamExt as _, TryStreamExt as _, stream::BoxStream};
use jiff::{SignedDuration, Timestamp};
use reqwest::{
    Method, Response, StatusCode, Url,
    header::{
        ACCEPT, AUTHORIZATION, ETAG, HeaderMap, HeaderName, HeaderValue, IF_NONE_MATCH, LINK,
        LOCATION, RETRY_AFTER,
    },
};
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, de::DeserializeOwned};
use tokio::time::sleep;

use super::{
    Reach, SourceError,
    credential::{Credential, Token},
    http::NotPublic,
};

/// The longest pause that is waited here; a longer one is the caller's to wait.
const PATIENCE: SignedDuration = SignedDuration::from_secs(10);
/// A forge that asks for a longer pause is not believed.
const LONGEST_PAUSE: SignedDuration = SignedDuration::from_hours(2);
/// The pause after a secondary limit that names none, as GitHub's documentation says.
const UNNAMED_PAUSE: SignedDuration = SignedDuration::from_secs(60);
/// How often something is asked.
const TRIES: u32 = 3;
/// The pause before it is asked again that failed; doubled each time.
const PAUSE: Duration = Duration::from_millis(250);
/// How many redirects are followed.
const MAX_REDIRECTS: usize = 5;
/// How long an answer that is no archive may take.
const ANSWER: Duration = Duration::from_secs(30);
/// How much of it is read.
const MAX_ANSWER: usize = 8 << 20;
/// How many answers are remembered, and how many bytes they have together: for each connection in
/// use.
const MAX_REMEMBERED: usize = 128;
/// See [`MAX_REMEMBERED`].
const MAX_REMEMBERED_BYTES: usize = 4 << 20;

/// A forge's API, asked with one credential. Shared by all repositories of a connection.
#[derive(Debug)]
pub(super) struct Api {
    reach: Reach,
    /// Whether the operator has named the base's host.
    is_trusted: bool,
    base: Url,
    credential: Credential,
    accept: &'static str,
    /// Until when it wants to be left alone.
    paused: Mutex<Option<Timestamp>>,
    remembered: Mutex<VecDeque<Remembered>>,
}

/// An answer that the forge need not send again as long as it says that it holds.
#[derive(Clone)]
struct Remembered {
    url: Url,
    tag: HeaderValue,
    /// As it came: what is made of it can be many times as large.
    body: Bytes,
    next: Option<Url>,
}

impl std::fmt::Debug for Remembered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remembered").field("size", &self.body.len()).finish_non_exhaustive()
    }
}

/// An answer in JSON.
pub(super) struct Answer<T> {
    pub(super) value: T,
    /// The next page.
    pub(super) next: Option<Url>,
}

impl Api {
    /// The API at `base`, which has a path such as `/api/v3` or none.
    pub(super) fn new(
        reach: Reach,
        base: &str,
        credential: Credential,
        accept: &'static str,
    ) -> Result<Self, SourceError> {
        let invalid = |why: String| SourceError::Invalid { what: "the base URL".to_owned(), why };
        let mut base = Url::parse(base).map_err(|error| invalid(error.to_string()))?;
        if base.query().is_some() || base.fragment().is_some() || base.cannot_be_a_base() {
            return Err(invalid("it has a query or fragment, or no host".to_owned()));
        }
        let is_trusted = reach.trusts(&base);
        reach.client(&base, is_trusted)?;
        let path = format!("{}/", base.path().trim_end_matches('/'));
        base.set_path(&path);
        let (paused, remembered) = (Mutex::new(None), Mutex::new(VecDeque::new()));
        Ok(Self { reach, is_trusted, base, credential, accept, paused, remembered })
    }

    /// An address below the base. The segments may hold anything; it cannot lead elsewhere.
    pub(super) fn url<'a>(&self, segments: impl IntoIterator<Item = &'a str>) -> Url {
        let mut url = self.base.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }

    /// The host of the base.
    pub(super) fn host(&self) -> &str {
        self.base.host_str().unwrap_or_default()
    }

    /// Asks for an answer in JSON, of which nothing is kept but what is wanted. `what` is named
    /// when it isn't there.
    pub(super) async fn json<T: DeserializeOwned>(
        &self,
        url: Url,
        what: &str,
    ) -> Result<Answer<T>, SourceError> {
        let remembered = self.recall(&url);
        let mut headers = HeaderMap::new();
        if let Some(remembered) = &remembered {
            headers.insert(IF_NONE_MATCH, remembered.tag.clone());
        }
        let response = self.ask(&url, &headers, what, false).await?;
        if response.status() == StatusCode::NOT_MODIFIED {
            let gone = || SourceError::Unexpected {
                why: "an answer is unchanged that was never given".to_owned(),
            };
            let remembered = remembered.ok_or_else(gone)?;
            return Ok(Answer { value: read(&remembered.body)?, next: remembered.next });
        }
        let tag = response.headers().get(ETAG).cloned();
        let next = self.next_page(response.headers())?;
        let body = Bytes::from(body(response).await?);
        let value = read(&body)?;
        if let Some(tag) = tag {
            self.remember(Remembered { url, tag, body, next: next.clone() });
        }
        Ok(Answer { value, next })
    }

    /// Asks for an archive, wherever the forge says it lies.
    pub(super) async fn stream(
        &self,
        url: Url,
        what: &str,
    ) -> Result<BoxStream<'static, Result<Bytes, SourceError>>, SourceError> {
        let response = self.ask(&url, &HeaderMap::new(), what, true).await?;
        Ok(response.bytes_stream().map_err(|error| transport(&error)).boxed())
    }

    /// Asks until there is an answer, or no use in asking again.
    async fn ask(
        &self,
        url: &Url,
        headers: &HeaderMap,
        what: &str,
        may_leave: bool,
    ) -> Result<Response, SourceError> {
        let mut tries = 1;
        loop {
            self.wait().await?;
            let secret = self.secret().await?;
            let done = self.follow(url.clone(), headers, secret.as_ref(), what, may_leave).await;
            let again = match &done {
                Err(SourceError::RateLimited { until }) => {
                    self.pause(*until);
                    until.duration_since(clock::now()) <= PATIENCE
                }
                Err(SourceError::Unavailable { .. }) => {
                    sleep(PAUSE * 2_u32.pow(tries)).await;
                    true
                }
                Err(SourceError::Denied { .. }) => match &self.credential {
                    // Its token was taken back before its time.
                    Credential::App(app) if tries == 1 => {
                        app.forget().await;
                        true
                    }
                    _ => false,
                },
                _ => false,
            };
            if !again || tries >= TRIES {
                return done;
            }
            tries += 1;
        }
    }

    async fn follow(
        &self,
        mut url: Url,
        headers: &HeaderMap,
        secret: Option<&SecretString>,
        what: &str,
        may_leave: bool,
    ) -> Result<Response, SourceError> {
        for _ in 0..=MAX_REDIRECTS {
            let ours = url.origin() == self.base.origin();
            let secret = secret.filter(|_| ours);
            let response = self.send(Method::GET, url.clone(), headers, secret).await?;
            if ours {
                self.heed(response.headers());
            }
            if !response.status().is_redirection() || response.status() == StatusCode::NOT_MODIFIED
            {
                return accept(response, what).await;
            }
            let location = response
                .headers()
                .get(LOCATION)
                .and_then(|value| value.to_str().ok())
                .unwrap_or_default();
            let next = url
                .join(location)
                .map_err(|error| SourceError::Unexpected { why: error.to_string() })?;
            if !may_leave && next.origin() != self.base.origin() {
                let host = next.host_str().unwrap_or_default().to_owned();
                return Err(SourceError::Forbidden {
                    what: host,
                    why: "the API redirects to another host".to_owned(),
                });
            }
            url = next;
        }
        Err(SourceError::Unexpected {
            why: format!("there are more than {MAX_REDIRECTS} redirects"),
        })
    }

    async fn send(
        &self,
        method: Method,
        url: Url,
        headers: &HeaderMap,
        secret: Option<&SecretString>,
    ) -> Result<Response, SourceError> {
        let client = self.reach.client(&url, self.is_trusted)?;
        let mut request =
            client.request(method, url).headers(headers.clone()).header(ACCEPT, self.accept);
        if let Some(secret) = secret {
            let (name, text) = match &self.credential {
                Credential::Private(_) => {
                    (HeaderName::from_static("private-token"), secret.expose_secret().to_owned())
                }
                _ => (AUTHORIZATION, format!("Bearer {}", secret.expose_secret())),
            };
            let unusable =
                |_| SourceError::Denied { why: "the credential cannot be a header".to_owned() };
            let mut value = HeaderValue::from_str(&text).map_err(unusable)?;
            value.set_sensitive(true);
            request = request.header(name, value);
        }
        let silent = |_| SourceError::Unavailable {
            why: format!("no answer within {} s", ANSWER.as_secs()),
        };
        tokio::time::timeout(ANSWER, request.send())
            .await
            .map_err(silent)?
            .map_err(|error| transport(&error))
    }

    async fn secret(&self) -> Result<Option<SecretString>, SourceError> {
        match &self.credential {
            Credential::None => Ok(None),
            Credential::Bearer(secret) | Credential::Private(secret) => Ok(Some(secret.clone())),
            Credential::App(app) => {
                let url = self.url(app.token_path().split('/'));
                app.token(clock::now(), async |assertion| self.new_token(url, &assertion).await)
                    .await
                    .map(Some)
            }
        }
    }

    async fn new_token(&self, url: Url, assertion: &SecretString) -> Result<Token, SourceError> {
        let response = self.send(Method::POST, url, &HeaderMap::new(), Some(assertion)).await?;
        let response = accept(response, "the app's installation").await?;
        let unexpected =
            || SourceError::Unexpected { why: "it gives no token for the app".to_owned() };
        let given: Given =
            serde_json::from_slice(&body(response).await?).map_err(|_| unexpected())?;
        Ok(Token { secret: SecretString::from(given.token), expires_at: given.expires_at })
    }

    /// Waits out a pause the forge wants, if that is short.
    async fn wait(&self) -> Result<(), SourceError> {
        let until = *self.paused.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(until), now) = (until, clock::now()) else { return Ok(()) };
        if until <= now {
            let mut paused = self.paused.lock().unwrap_or_else(PoisonError::into_inner);
            // Somebody may have been told of another one meanwhile.
            *paused = paused.filter(|until| *until > now);
            return Ok(());
        }
        let left = until.duration_since(now);
        if left > PATIENCE {
            return Err(SourceError::RateLimited { until });
        }
        // A bit more, as the other's seconds are whole.
        sleep(left.unsigned_abs() + Duration::from_millis(50)).await;
        Ok(())
    }

    /// Notes what a forge says about its limit: the last request has been spent with this answer.
    fn heed(&self, headers: &HeaderMap) {
        if remaining(headers) == Some(0)
            && let Some(until) = reset(headers)
        {
            self.pause(until);
        }
    }

    /// Of several pauses the longest holds: they are of limits beside each other.
    fn pause(&self, until: Timestamp) {
        let mut paused = self.paused.lock().unwrap_or_else(PoisonError::into_inner);
        *paused = (*paused).max(Some(until));
    }

    fn next_page(&self, headers: &HeaderMap) -> Result<Option<Url>, SourceError> {
        let links = headers.get(LINK).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let next = links
            .split(',')
            .find(|link| link.split(';').skip(1).any(|part| part.trim() == "rel=\"next\""));
        let Some(address) = next.and_then(|link| link.split(';').next()) else { return Ok(None) };
        let address = address.trim().trim_start_matches('<').trim_end_matches('>');
        let url = self
            .base
            .join(address)
            .map_err(|error| SourceError::Unexpected { why: error.to_string() })?;
        if url.origin() == self.base.origin() {
            return Ok(Some(url));
        }
        Err(SourceError::Forbidden {
            what: "the next page".to_owned(),
            why: "it lies at another host".to_owned(),
        })
    }

    fn recall(&self, url: &Url) -> Option<Remembered> {
        let remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.iter().find(|remembered| remembered.url == *url).cloned()
    }

    fn remember(&self, new: Remembered) {
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.retain(|old| old.url != new.url);
        remembered.push_back(new);
        while remembered.len() > MAX_REMEMBERED
            || remembered.iter().map(|one| one.body.len()).sum::<usize>() > MAX_REMEMBERED_BYTES
        {
            remembered.pop_front();
        }
    }
}

/// A token for an installation.
#[derive(Deserialize)]
struct Given {
    token: String,
    expires_at: Timestamp,
}

/// What a forge says of its refusal.
#[derive(Default, Deserialize)]
struct Said {
    message: Option<String>,
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, SourceError> {
    serde_json::from_slice(body).map_err(|error| SourceError::Unexpected { why: error.to_string() })
}

/// A failure of the exchange, without the address, which may hold a key of its own.
fn transport(error: &reqwest::Error) -> SourceError {
    let (mut why, mut cause) =
        (String::from("the exchange failed"), std::error::Error::source(error));
    while let Some(inner) = cause {
        if inner.is::<NotPublic>() {
            return SourceError::Forbidden { what: "the host".to_owned(), why: inner.to_string() };
        }
        // The innermost cause says the most.
        why = inner.to_string();
        cause = inner.source();
    }
    SourceError::Unavailable { why }
}

async fn body(response: Response) -> Result<Vec<u8>, SourceError> {
    let read = async {
        let (mut body, mut chunks) = (Vec::new(), response.bytes_stream());
        while let Some(chunk) = chunks.next().await {
            body.extend_from_slice(&chunk.map_err(|error| transport(&error))?);
            if body.len() > MAX_ANSWER {
                return Err(SourceError::Unexpected {
                    why: format!("it has more than {MAX_ANSWER} bytes"),
                });
            }
        }
        Ok(body)
    };
    let silent = |_| SourceError::Unavailable {
        why: format!("no whole answer within {} s", ANSWER.as_secs()),
    };
    tokio::time::timeout(ANSWER, read).await.map_err(silent)?
}

/// What an answer means that is none.
async fn accept(response: Response, what: &str) -> Result<Response, SourceError> {
    let status = response.status();
    if status.is_success() || status == StatusCode::NOT_MODIFIED {
        return Ok(response);
    }
    let headers = response.headers().clone();
    let said = body(response).await.unwrap_or_default();
    let said: Said = serde_json::from_slice(&said).unwrap_or_default();
    let message: String = said.message.unwrap_or_default().chars().take(200).collect();
    let what = what.to_owned();
    Err(match status.as_u16() {
        403 | 429 => match limited(&headers, status, &message) {
            Some(until) => SourceError::RateLimited { until },
            None => SourceError::Denied { why: format!("{message} (403)") },
        },
        401 => SourceError::Denied { why: format!("{message} (401)") },
        404 | 422 => SourceError::NotFound { what },
        409 => SourceError::NotFound { what: format!("a commit of {what}") },
        410 | 451 => SourceError::Gone { what, why: format!("{message} ({})", status.as_u16()) },
        500.. => SourceError::Unavailable { why: format!("HTTP status {status}") },
        _ => SourceError::Unexpected { why: format!("HTTP status {status}: {message}") },
    })
}

/// Until when the forge wants to be left alone, if that is what a refusal means.
fn limited(headers: &HeaderMap, status: StatusCode, message: &str) -> Option<Timestamp> {
    let now = clock::now();
    let after =
        headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse::<i64>().ok());
    let until = if let Some(after) = after {
        now + SignedDuration::from_secs(after.clamp(0, LONGEST_PAUSE.as_secs()))
    } else if remaining(headers) == Some(0) {
        // Its clock can be behind ours; asked at once, it would say the same.
        reset(headers).map_or(now + UNNAMED_PAUSE, |at| at.max(now + SignedDuration::from_secs(1)))
    } else if status == StatusCode::TOO_MANY_REQUESTS
        || message.to_ascii_lowercase().contains("rate limit")
    {
        // The reset that is told beside it is the primary limit's, which is not the one that was
        // met.
        now + UNNAMED_PAUSE
    } else {
        return None;
    };
    Some(until.min(now + LONGEST_PAUSE))
}

/// GitHub's name for it, then GitLab's.
fn number(headers: &HeaderMap, names: [&str; 2]) -> Option<i64> {
    names.iter().find_map(|name| headers.get(*name)?.to_str().ok()?.trim().parse().ok())
}

fn remaining(headers: &HeaderMap) -> Option<i64> {
    number(headers, ["x-ratelimit-remaining", "ratelimit-remaining"])
}

fn reset(headers: &HeaderMap) -> Option<Timestamp> {
    let until =
        Timestamp::from_second(number(headers, ["x-ratelimit-reset", "ratelimit-reset"])?).ok()?;
    Some(until.min(clock::now() + LONGEST_PAUSE))
}

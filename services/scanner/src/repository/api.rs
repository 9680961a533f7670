//! Requests to a forge's API: credentials, redirects, rate limits, retries and cached responses.
//!
//! The credential is sent to the origin of the API only. So redirects are followed by this module,
//! and each of their addresses is checked again.

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
    ForgeClients, SourceError,
    credential::{Credential, Token},
    http::NotPublicError,
};

/// The longest rate limit that is waited here; a longer one is the caller's to wait.
const MAX_INLINE_WAIT: SignedDuration = SignedDuration::from_secs(10);
/// The longest rate limit that is believed.
const MAX_RATE_LIMIT_WAIT: SignedDuration = SignedDuration::from_hours(2);
/// The delay after a secondary limit that names none, as GitHub's documentation says.
const DEFAULT_RATE_LIMIT_WAIT: SignedDuration = SignedDuration::from_secs(60);
/// Attempts of a request.
const MAX_ATTEMPTS: u32 = 3;
/// The delay before the first retry; it doubles each time.
const RETRY_DELAY: Duration = Duration::from_millis(250);
/// Redirects that are followed at most.
const MAX_REDIRECTS: usize = 5;
/// The timeout of a response that is no archive.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of such a response at most.
const MAX_RESPONSE_BYTES: usize = 8 << 20;
/// Cached responses of a connection at most.
const CACHE_CAPACITY: usize = 128;
/// Bytes of a connection's cached responses at most.
const MAX_CACHE_BYTES: usize = 4 << 20;

/// A forge's API with one credential. Shared by all repositories of a connection.
#[derive(Debug)]
pub(super) struct Api {
    forge_clients: ForgeClients,
    /// Whether the operator trusts the base's host.
    is_trusted: bool,
    base: Url,
    credential: Credential,
    accept: &'static str,
    /// The end of the current rate limit.
    paused_until: Mutex<Option<Timestamp>>,
    cache: Mutex<VecDeque<CachedResponse>>,
}

/// A response that the forge can confirm with its `ETag`.
#[derive(Clone)]
struct CachedResponse {
    url: Url,
    tag: HeaderValue,
    /// The raw body: its parsed form can be many times as large.
    body: Bytes,
    next: Option<Url>,
}

impl std::fmt::Debug for CachedResponse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remembered").field("size", &self.body.len()).finish_non_exhaustive()
    }
}

/// A response in JSON.
pub(super) struct JsonResponse<T> {
    pub(super) value: T,
    /// The next page.
    pub(super) next: Option<Url>,
}

impl Api {
    /// Creates a client of the API at `base`, with or without a path such as `/api/v3`.
    pub(super) fn new(
        reach: ForgeClients,
        base: &str,
        credential: Credential,
        accept: &'static str,
    ) -> Result<Self, SourceError> {
        let invalid =
            |reason: String| SourceError::Invalid { subject: "the base URL".to_owned(), reason };
        let mut base = Url::parse(base).map_err(|error| invalid(error.to_string()))?;
        if base.query().is_some() || base.fragment().is_some() || base.cannot_be_a_base() {
            return Err(invalid("it has a query or fragment, or no host".to_owned()));
        }
        let is_trusted = reach.trusts(&base);
        reach.client(&base, is_trusted)?;
        let path = format!("{}/", base.path().trim_end_matches('/'));
        base.set_path(&path);
        let (paused, remembered) = (Mutex::new(None), Mutex::new(VecDeque::new()));
        Ok(Self {
            forge_clients: reach,
            is_trusted,
            base,
            credential,
            accept,
            paused_until: paused,
            cache: remembered,
        })
    }

    /// Returns an address below the base. The segments may hold anything; it cannot lead elsewhere.
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

    /// Requests JSON, of which only the fields of `T` are kept. Errors name `what`.
    pub(super) async fn json<T: DeserializeOwned>(
        &self,
        url: Url,
        subject: &str,
    ) -> Result<JsonResponse<T>, SourceError> {
        let remembered = self.find_cached(&url);
        let mut headers = HeaderMap::new();
        if let Some(remembered) = &remembered {
            headers.insert(IF_NONE_MATCH, remembered.tag.clone());
        }
        let response = self.request(&url, &headers, subject, false).await?;
        if response.status() == StatusCode::NOT_MODIFIED {
            let unknown = || SourceError::Unexpected {
                reason: "an unknown response was reported as unchanged".to_owned(),
            };
            let remembered = remembered.ok_or_else(unknown)?;
            return Ok(JsonResponse {
                value: parse_json(&remembered.body)?,
                next: remembered.next,
            });
        }
        let tag = response.headers().get(ETAG).cloned();
        let next = self.next_page(response.headers())?;
        let body = Bytes::from(read_body(response).await?);
        let value = parse_json(&body)?;
        if let Some(tag) = tag {
            self.store_in_cache(CachedResponse { url, tag, body, next: next.clone() });
        }
        Ok(JsonResponse { value, next })
    }

    /// Requests an archive, wherever the forge redirects to.
    pub(super) async fn stream(
        &self,
        url: Url,
        subject: &str,
    ) -> Result<BoxStream<'static, Result<Bytes, SourceError>>, SourceError> {
        let response = self.request(&url, &HeaderMap::new(), subject, true).await?;
        Ok(response.bytes_stream().map_err(|error| transport_error(&error)).boxed())
    }

    /// Sends a request, with retries.
    async fn request(
        &self,
        url: &Url,
        headers: &HeaderMap,
        subject: &str,
        may_leave: bool,
    ) -> Result<Response, SourceError> {
        let mut attempts = 1;
        loop {
            self.wait_for_rate_limit().await?;
            let secret = self.credential_secret().await?;
            let done = self
                .follow_redirects(url.clone(), headers, secret.as_ref(), subject, may_leave)
                .await;
            let again = match &done {
                Err(SourceError::RateLimited { until }) => {
                    self.set_pause(*until);
                    until.duration_since(clock::now()) <= MAX_INLINE_WAIT
                }
                Err(SourceError::Unavailable { .. }) => {
                    sleep(RETRY_DELAY * 2_u32.pow(attempts)).await;
                    true
                }
                Err(SourceError::Denied { .. }) => match &self.credential {
                    // Its token was revoked early.
                    Credential::App(app) if attempts == 1 => {
                        app.discard_token().await;
                        true
                    }
                    _ => false,
                },
                _ => false,
            };
            if !again || attempts >= MAX_ATTEMPTS {
                return done;
            }
            attempts += 1;
        }
    }

    async fn follow_redirects(
        &self,
        mut url: Url,
        headers: &HeaderMap,
        secret: Option<&SecretString>,
        subject: &str,
        may_leave: bool,
    ) -> Result<Response, SourceError> {
        for _ in 0..=MAX_REDIRECTS {
            let ours = url.origin() == self.base.origin();
            let secret = secret.filter(|_| ours);
            let response = self.send(Method::GET, url.clone(), headers, secret).await?;
            if ours {
                self.note_rate_limit(response.headers());
            }
            if !response.status().is_redirection() || response.status() == StatusCode::NOT_MODIFIED
            {
                return check_status(response, subject).await;
            }
            let location = response
                .headers()
                .get(LOCATION)
                .and_then(|value| value.to_str().ok())
                .unwrap_or_default();
            let next = url
                .join(location)
                .map_err(|error| SourceError::Unexpected { reason: error.to_string() })?;
            if !may_leave && next.origin() != self.base.origin() {
                let host = next.host_str().unwrap_or_default().to_owned();
                return Err(SourceError::Forbidden {
                    subject: host,
                    reason: "the API redirects to another host".to_owned(),
                });
            }
            url = next;
        }
        Err(SourceError::Unexpected { reason: format!("more than {MAX_REDIRECTS} redirects") })
    }

    async fn send(
        &self,
        method: Method,
        url: Url,
        headers: &HeaderMap,
        secret: Option<&SecretString>,
    ) -> Result<Response, SourceError> {
        let client = self.forge_clients.client(&url, self.is_trusted)?;
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
                |_| SourceError::Denied { reason: "the credential cannot be a header".to_owned() };
            let mut value = HeaderValue::from_str(&text).map_err(unusable)?;
            value.set_sensitive(true);
            request = request.header(name, value);
        }
        let timed_out = |_| SourceError::Unavailable {
            reason: format!("no response within {} s", RESPONSE_TIMEOUT.as_secs()),
        };
        tokio::time::timeout(RESPONSE_TIMEOUT, request.send())
            .await
            .map_err(timed_out)?
            .map_err(|error| transport_error(&error))
    }

    async fn credential_secret(&self) -> Result<Option<SecretString>, SourceError> {
        match &self.credential {
            Credential::None => Ok(None),
            Credential::Bearer(secret) | Credential::Private(secret) => Ok(Some(secret.clone())),
            Credential::App(app) => {
                let url = self.url(app.token_path().split('/'));
                app.token(clock::now(), async |assertion| {
                    self.fetch_app_token(url, &assertion).await
                })
                .await
                .map(Some)
            }
        }
    }

    async fn fetch_app_token(
        &self,
        url: Url,
        assertion: &SecretString,
    ) -> Result<Token, SourceError> {
        let response = self.send(Method::POST, url, &HeaderMap::new(), Some(assertion)).await?;
        let response = check_status(response, "the app's installation").await?;
        let unexpected = || SourceError::Unexpected {
            reason: "the response has no token for the app".to_owned(),
        };
        let given: AppToken =
            serde_json::from_slice(&read_body(response).await?).map_err(|_| unexpected())?;
        Ok(Token { secret: SecretString::from(given.token), expires_at: given.expires_at })
    }

    /// Waits for a rate limit, if it is short.
    async fn wait_for_rate_limit(&self) -> Result<(), SourceError> {
        let until = *self.paused_until.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(until), now) = (until, clock::now()) else { return Ok(()) };
        if until <= now {
            let mut paused = self.paused_until.lock().unwrap_or_else(PoisonError::into_inner);
            // Another request may have set a later one meanwhile.
            *paused = paused.filter(|until| *until > now);
            return Ok(());
        }
        let left = until.duration_since(now);
        if left > MAX_INLINE_WAIT {
            return Err(SourceError::RateLimited { until });
        }
        // A bit more, as the forge reports whole seconds.
        sleep(left.unsigned_abs() + Duration::from_millis(50)).await;
        Ok(())
    }

    /// Records an exhausted rate limit: this response used the last request.
    fn note_rate_limit(&self, headers: &HeaderMap) {
        if remaining_requests(headers) == Some(0)
            && let Some(until) = reset_time(headers)
        {
            self.set_pause(until);
        }
    }

    /// Of several limits the longest holds: they are independent.
    fn set_pause(&self, until: Timestamp) {
        let mut paused = self.paused_until.lock().unwrap_or_else(PoisonError::into_inner);
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
            .map_err(|error| SourceError::Unexpected { reason: error.to_string() })?;
        if url.origin() == self.base.origin() {
            return Ok(Some(url));
        }
        Err(SourceError::Forbidden {
            subject: "the next page".to_owned(),
            reason: "it is on another host".to_owned(),
        })
    }

    fn find_cached(&self, url: &Url) -> Option<CachedResponse> {
        let remembered = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.iter().find(|remembered| remembered.url == *url).cloned()
    }

    fn store_in_cache(&self, new: CachedResponse) {
        let mut remembered = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.retain(|old| old.url != new.url);
        remembered.push_back(new);
        while remembered.len() > CACHE_CAPACITY
            || remembered.iter().map(|one| one.body.len()).sum::<usize>() > MAX_CACHE_BYTES
        {
            remembered.pop_front();
        }
    }
}

/// A token for an installation.
#[derive(Deserialize)]
struct AppToken {
    token: String,
    expires_at: Timestamp,
}

/// The body of an error.
#[derive(Default, Deserialize)]
struct ErrorBody {
    message: Option<String>,
}

fn parse_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, SourceError> {
    serde_json::from_slice(body)
        .map_err(|error| SourceError::Unexpected { reason: error.to_string() })
}

/// A transport failure, without the address, which may hold a key.
fn transport_error(error: &reqwest::Error) -> SourceError {
    let (mut reason, mut cause) =
        (String::from("the transfer failed"), std::error::Error::source(error));
    while let Some(inner) = cause {
        if inner.is::<NotPublicError>() {
            return SourceError::Forbidden {
                subject: "the host".to_owned(),
                reason: inner.to_string(),
            };
        }
        // The innermost cause is the most specific.
        reason = inner.to_string();
        cause = inner.source();
    }
    SourceError::Unavailable { reason }
}

async fn read_body(response: Response) -> Result<Vec<u8>, SourceError> {
    let read = async {
        let (mut body, mut chunks) = (Vec::new(), response.bytes_stream());
        while let Some(chunk) = chunks.next().await {
            body.extend_from_slice(&chunk.map_err(|error| transport_error(&error))?);
            if body.len() > MAX_RESPONSE_BYTES {
                return Err(SourceError::Unexpected {
                    reason: format!("it has more than {MAX_RESPONSE_BYTES} bytes"),
                });
            }
        }
        Ok(body)
    };
    let timed_out = |_| SourceError::Unavailable {
        reason: format!("no complete response within {} s", RESPONSE_TIMEOUT.as_secs()),
    };
    tokio::time::timeout(RESPONSE_TIMEOUT, read).await.map_err(timed_out)?
}

/// Converts error statuses.
async fn check_status(response: Response, subject: &str) -> Result<Response, SourceError> {
    let status = response.status();
    if status.is_success() || status == StatusCode::NOT_MODIFIED {
        return Ok(response);
    }
    let headers = response.headers().clone();
    let body_bytes = read_body(response).await.unwrap_or_default();
    let error_body: ErrorBody = serde_json::from_slice(&body_bytes).unwrap_or_default();
    let message: String = error_body.message.unwrap_or_default().chars().take(200).collect();
    let subject = subject.to_owned();
    Err(match status.as_u16() {
        403 | 429 => match rate_limited_until(&headers, status, &message) {
            Some(until) => SourceError::RateLimited { until },
            None => SourceError::Denied { reason: format!("{message} (403)") },
        },
        401 => SourceError::Denied { reason: format!("{message} (401)") },
        404 | 422 => SourceError::NotFound { subject },
        409 => SourceError::NotFound { subject: format!("a commit of {subject}") },
        410 | 451 => {
            SourceError::Gone { subject, reason: format!("{message} ({})", status.as_u16()) }
        }
        500.. => SourceError::Unavailable { reason: format!("HTTP status {status}") },
        _ => SourceError::Unexpected { reason: format!("HTTP status {status}: {message}") },
    })
}

/// The end of the rate limit, if the refusal is one.
fn rate_limited_until(headers: &HeaderMap, status: StatusCode, message: &str) -> Option<Timestamp> {
    let now = clock::now();
    let after =
        headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse::<i64>().ok());
    let until = if let Some(after) = after {
        now + SignedDuration::from_secs(after.clamp(0, MAX_RATE_LIMIT_WAIT.as_secs()))
    } else if remaining_requests(headers) == Some(0) {
        // Its clock can be behind ours; an immediate request would fail again.
        reset_time(headers)
            .map_or(now + DEFAULT_RATE_LIMIT_WAIT, |at| at.max(now + SignedDuration::from_secs(1)))
    } else if status == StatusCode::TOO_MANY_REQUESTS
        || message.to_ascii_lowercase().contains("rate limit")
    {
        // The reported reset belongs to the primary limit, which was not exceeded.
        now + DEFAULT_RATE_LIMIT_WAIT
    } else {
        return None;
    };
    Some(until.min(now + MAX_RATE_LIMIT_WAIT))
}

/// Reads a numeric header, by GitHub's or GitLab's name.
fn header_number(headers: &HeaderMap, names: [&str; 2]) -> Option<i64> {
    names.iter().find_map(|name| headers.get(*name)?.to_str().ok()?.trim().parse().ok())
}

fn remaining_requests(headers: &HeaderMap) -> Option<i64> {
    header_number(headers, ["x-ratelimit-remaining", "ratelimit-remaining"])
}

fn reset_time(headers: &HeaderMap) -> Option<Timestamp> {
    let until =
        Timestamp::from_second(header_number(headers, ["x-ratelimit-reset", "ratelimit-reset"])?)
            .ok()?;
    Some(until.min(clock::now() + MAX_RATE_LIMIT_WAIT))
}

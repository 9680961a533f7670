//! What vendors reached over HTTP have in common: one client, timeouts, classified errors, and the
//! loop that turns bytes into chunks.

mod headroom;

use std::{collections::VecDeque, sync::Arc, time::Duration};

use bytes::Bytes;
use construct_proto::mesh::v1::FailureClass;
use construct_runtime::clock;
use futures::{
    FutureExt as _,
    stream::{self, BoxStream, StreamExt as _},
};
use jiff::Timestamp;
use reqwest::{
    Method, RequestBuilder, Response, Url,
    header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER},
    redirect,
};
use secrecy::{ExposeSecret as _, SecretString};
use serde::de::{DeserializeOwned, IgnoredAny};
use tokio::time::timeout;

pub(crate) use self::headroom::{Headroom, HeadroomObserver, LimitHeaders};
use crate::{
    cassette::{self, Recorder},
    failure::{Failure, MAX_KEY_BYTES},
    framing::{Event, Framing},
    vendor::Chunk,
};

/// Bytes of an error body that are read; the rest says nothing more.
const MAX_ERROR_BODY_BYTES: usize = 64 * 1024;
/// Bytes of a response that is not a stream.
const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;
/// Timeout of the body of a response that is not a stream.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a large response with one value: two thousand vectors of three thousand numbers.
const MAX_LARGE_BODY_BYTES: usize = 128 * 1024 * 1024;
/// Timeout of a large response after its head.
const LARGE_BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// Upper bound of the delay that a vendor may ask for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(24 * 3600);

/// Timeouts of one exchange.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timeouts {
    /// Name resolution, TCP and TLS together.
    pub(crate) connect: Duration,
    /// From sending the request to the response head, and from there to the first byte.
    pub(crate) first_byte: Duration,
    /// Between two reads of the response.
    pub(crate) idle: Duration,
}

/// The HTTP client of all vendors, with one connection pool.
#[derive(Debug, Clone)]
pub(crate) struct Http {
    /// On a machine without certificate authorities no client can be created. Vendors that need
    /// none must still work, so the error is reported at the first call.
    client: Result<reqwest::Client, Arc<str>>,
    timeouts: Timeouts,
    /// Receives the limits that vendors report.
    observer: Option<Arc<dyn HeadroomObserver>>,
    recorder: Option<Arc<Recorder>>,
}

impl Http {
    /// A client that follows no redirect (a key must not travel on) and uses no proxy from the
    /// environment.
    pub(crate) fn new(timeouts: Timeouts) -> Self {
        let client = reqwest::Client::builder()
            .connect_timeout(timeouts.connect)
            .redirect(redirect::Policy::none())
            .no_proxy()
            .tcp_nodelay(true)
            .tcp_keepalive(Duration::from_secs(30))
            .pool_idle_timeout(Duration::from_secs(90))
            .user_agent(concat!("construct/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| Arc::from(error_chain(&error)));
        Self { client, timeouts, observer: None, recorder: None }
    }

    /// The same connections, with `observer` for the limits that vendors report.
    pub(crate) fn with_observer(&self, observer: Option<Arc<dyn HeadroomObserver>>) -> Self {
        Self { observer, ..self.clone() }
    }

    /// The same client, with recorded calls.
    pub(crate) fn with_recorder(self, recorder: Option<Arc<Recorder>>) -> Self {
        Self { recorder, ..self }
    }

    /// The recorder of its calls.
    pub(crate) fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.recorder.as_ref()
    }

    /// A POST to `url`.
    pub(crate) fn post(&self, url: Url) -> Result<RequestBuilder, Failure> {
        self.request(Method::POST, url)
    }

    /// A GET of `url`.
    pub(crate) fn get(&self, url: Url) -> Result<RequestBuilder, Failure> {
        self.request(Method::GET, url)
    }

    fn request(&self, method: Method, url: Url) -> Result<RequestBuilder, Failure> {
        match &self.client {
            Ok(client) => Ok(client.request(method, url)),
            Err(reason) => Err(Failure::configuration(format!(
                "no HTTPS client can be made on this machine: {reason}"
            ))),
        }
    }

    /// Sends `request` and reads a response with one JSON value. `refused` classifies an error
    /// response.
    pub(crate) async fn send_json(
        &self,
        request: Result<RequestBuilder, Failure>,
        refused: impl Fn(u16, &[u8]) -> Failure + Send,
    ) -> Result<serde_json::Value, Failure> {
        let response = self.send_request(request, &[], refused).await?;
        parse_json(&read_body(response, MAX_BODY_BYTES, BODY_TIMEOUT).await)
    }

    /// The same for a response that may be large, of a call to which the vendor's `limits` apply.
    pub(crate) async fn send_large_json<T: DeserializeOwned>(
        &self,
        request: Result<RequestBuilder, Failure>,
        limits: LimitHeaders,
        refused: impl Fn(u16, &[u8]) -> Failure + Send,
    ) -> Result<T, Failure> {
        let response = self.send_request(request, limits, refused).await?;
        let body = read_body(response, MAX_LARGE_BODY_BYTES, LARGE_BODY_TIMEOUT).await;
        if body.len() >= MAX_LARGE_BODY_BYTES {
            let words = format!(
                "the vendor's answer is larger than {} MiB: ask for less at a time",
                MAX_LARGE_BODY_BYTES >> 20
            );
            return Err(Failure::new(FailureClass::InvalidRequest, words).after_success());
        }
        parse_json(&body).map_err(Failure::after_success)
    }

    async fn send_request(
        &self,
        request: Result<RequestBuilder, Failure>,
        limits: LimitHeaders,
        refused: impl Fn(u16, &[u8]) -> Failure + Send,
    ) -> Result<Response, Failure> {
        let patience = self.timeouts.first_byte;
        let silent = |_| {
            Failure::transient(format!(
                "the vendor did not answer for {} s",
                patience.as_secs_f64()
            ))
        };
        let response =
            timeout(patience, request?.send()).await.map_err(silent)?.map_err(transport_failure)?;
        if let Some(observer) = &self.observer {
            observer.on_headroom(headroom::read(limits, response.headers(), clock::now()));
        }
        let status = response.status().as_u16();
        if response.status().is_success() {
            return Ok(response);
        }
        let retry_at = retry_at(response.headers(), clock::now());
        let body = read_error_body(response).await;
        let failure = refused(status, &body).with_status(status);
        // Some vendors name the time of the next attempt in the body.
        let retry_at = retry_at.or(failure.retry_at);
        Err(failure.with_retry_at(retry_at))
    }

    /// Sends `request` and reads the stream with `dialect`.
    pub(crate) fn stream<D: Dialect>(
        &self,
        request: Result<RequestBuilder, Failure>,
        dialect: D,
    ) -> BoxStream<'static, Result<Chunk, Failure>> {
        let exchange = Exchange {
            observer: self.observer.clone(),
            timeouts: self.timeouts,
            state: State::Unsent(request),
            framing: D::Framing::default(),
            events: VecDeque::new(),
            dialect,
            chunks: VecDeque::new(),
        };
        stream::try_unfold(exchange, |mut exchange| async move {
            let chunk = exchange.next().await?;
            Ok(chunk.map(|chunk| (chunk, exchange)))
        })
        .boxed()
    }
}

/// The address of a vendor, and the key.
#[derive(Debug, Clone)]
pub(crate) struct Endpoint {
    pub(crate) base: Url,
    pub(crate) key: Option<SecretString>,
}

impl Endpoint {
    pub(crate) fn parse(base_url: &str, key: Option<SecretString>) -> Result<Self, Failure> {
        let base = Url::parse(base_url).map_err(|error| {
            Failure::configuration(format!("the base URL is not a URL: {error}"))
        })?;
        if !matches!(base.scheme(), "http" | "https") || base.host_str().is_none() {
            return Err(Failure::configuration(
                "the base URL must begin with http:// or https:// and name a host",
            ));
        }
        Ok(Self { base, key })
    }

    /// The base URL with `path` appended; `skip` is a suffix that users often include already.
    pub(crate) fn join(&self, skip: &str, path: &str) -> Url {
        let mut url = self.base.clone();
        let base = url.path().trim_end_matches('/');
        let base = if skip.is_empty() { base } else { base.strip_suffix(skip).unwrap_or(base) };
        let path = format!("{base}{path}");
        url.set_path(&path);
        url
    }
}

/// How a vendor uses the event stream. Without I/O, so that any split of the bytes can be tested.
pub(crate) trait Dialect: Send + 'static {
    /// How the stream is divided into events.
    type Framing: Framing;
    /// The headers in which the vendor reports the rest of its limits.
    const LIMITS: LimitHeaders = &[];

    /// Reads one event.
    fn read(&mut self, event: &Event, chunks: &mut VecDeque<Chunk>) -> Result<(), Failure>;
    /// Whether the vendor reported that the answer is complete and nothing more comes.
    fn is_complete(&self) -> bool;
    /// The stream ended: an error when the answer is incomplete.
    fn end(&mut self, chunks: &mut VecDeque<Chunk>) -> Result<(), Failure>;
    /// Classifies a status other than 2xx, or a body that is not a stream.
    fn response_failure(&self, status: u16, body: &[u8]) -> Failure;
}

struct Exchange<D: Dialect> {
    observer: Option<Arc<dyn HeadroomObserver>>,
    timeouts: Timeouts,
    state: State,
    framing: D::Framing,
    events: VecDeque<Event>,
    dialect: D,
    chunks: VecDeque<Chunk>,
}

enum State {
    Unsent(Result<RequestBuilder, Failure>),
    Open {
        response: Response,
        has_begun: bool,
    },
    /// Nothing more is read. The rest of `chunks` is sent first, so that the split of the bytes
    /// cannot decide whether a piece before an error is seen.
    Ended(Result<(), Failure>),
}

impl<D: Dialect> Exchange<D> {
    async fn next(&mut self) -> Result<Option<Chunk>, Failure> {
        loop {
            if let Some(chunk) = self.chunks.pop_front() {
                return Ok(Some(chunk));
            }
            self.state = match std::mem::replace(&mut self.state, State::Ended(Ok(()))) {
                State::Unsent(request) => {
                    State::Open { response: self.send(request?).await?, has_begun: false }
                }
                State::Open { response, has_begun } => self.read(response, has_begun).await,
                State::Ended(result) => return result.map(|()| None),
            };
        }
    }

    async fn send(&mut self, request: RequestBuilder) -> Result<Response, Failure> {
        let response = match timeout(self.timeouts.first_byte, request.send()).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Err(transport_failure(error)),
            Err(_) => return Err(self.timeout_failure("did not answer", self.timeouts.first_byte)),
        };
        if let Some(observer) = &self.observer {
            observer.on_headroom(headroom::read(D::LIMITS, response.headers(), clock::now()));
        }
        let status = response.status().as_u16();
        cassette::record_head(status, response.headers());
        let is_json = response
            .headers()
            .get(CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().starts_with(b"application/json"));
        if response.status().is_success() && !is_json {
            return Ok(response);
        }
        let retry_at = retry_at(response.headers(), clock::now());
        let body = read_error_body(response).await;
        let failure = self.dialect.response_failure(status, &body).with_status(status);
        // Some vendors say in the body when another try is welcome.
        let retry_at = retry_at.or(failure.retry_at);
        Err(failure.with_retry_at(retry_at))
    }

    async fn read(&mut self, mut response: Response, has_begun: bool) -> State {
        let patience = if has_begun { self.timeouts.idle } else { self.timeouts.first_byte };
        let bytes = match timeout(patience, response.chunk()).await {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(error)) => return State::Ended(Err(transport_failure(error))),
            Err(_) => return State::Ended(Err(self.timeout_failure("sent nothing", patience))),
        };
        let Some(bytes) = bytes else { return State::Ended(self.end()) };
        match self.feed(&bytes) {
            Err(failure) => State::Ended(Err(failure)),
            Ok(()) if self.dialect.is_complete() => {
                // The end of the body has usually arrived; reading it returns the connection to the
                // pool.
                while let Some(Ok(Some(_))) = response.chunk().now_or_never() {}
                State::Ended(self.end())
            }
            Ok(()) => State::Open { response, has_begun: true },
        }
    }

    fn feed(&mut self, bytes: &Bytes) -> Result<(), Failure> {
        let pushed = self.framing.push(bytes, &mut self.events);
        self.read_events()?;
        pushed.map_err(|error| Failure::transient(error.to_string()))
    }

    fn end(&mut self) -> Result<(), Failure> {
        if !self.dialect.is_complete() {
            self.framing
                .finish(&mut self.events)
                .map_err(|error| Failure::transient(error.to_string()))?;
            self.read_events()?;
        }
        self.dialect.end(&mut self.chunks)
    }

    fn read_events(&mut self) -> Result<(), Failure> {
        while let Some(event) = self.events.pop_front() {
            self.dialect.read(&event, &mut self.chunks)?;
        }
        Ok(())
    }

    fn timeout_failure(&self, what: &str, patience: Duration) -> Failure {
        Failure::transient(format!("the vendor {what} for {} s", patience.as_secs_f64()))
    }
}

fn parse_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(body)
        .map_err(|error| Failure::transient(format!("the vendor's answer cannot be read: {error}")))
}

async fn read_body(response: Response, limit: usize, within: Duration) -> Vec<u8> {
    read_body_with_end(response, limit, within).await.0
}

/// The body of a response that is an error. People are shown a part of it, without the key
/// ([`Failure::scrubbed`]). Where it broke off, it may have done so within the key: so many bytes
/// before its end are left out then, whatever they are.
async fn read_error_body(response: Response) -> Vec<u8> {
    let (mut body, is_whole) =
        read_body_with_end(response, MAX_ERROR_BODY_BYTES, BODY_TIMEOUT).await;
    // Of a whole JSON text nothing is missing, whatever should have come after it.
    if !is_whole && serde_json::from_slice::<IgnoredAny>(&body).is_err() {
        body.truncate(body.len().saturating_sub(MAX_KEY_BYTES - 1));
    }
    body
}

/// A body, and whether its end was reached.
async fn read_body_with_end(
    mut response: Response,
    limit: usize,
    within: Duration,
) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    // What came until the time ran out or the connection broke is better than nothing.
    let read = timeout(within, async {
        loop {
            match response.chunk().await {
                Ok(Some(bytes)) => body.extend_from_slice(&bytes),
                Ok(None) => return true,
                Err(_) => return false,
            }
            if body.len() >= limit {
                body.truncate(limit);
                return false;
            }
        }
    });
    let is_whole = read.await.unwrap_or(false);
    (body, is_whole)
}

/// The time of the next attempt, from `retry-after-ms`, or `Retry-After` in seconds or as a date.
fn retry_at(headers: &HeaderMap, now: Timestamp) -> Option<Timestamp> {
    let text = |name: HeaderName| headers.get(name)?.to_str().ok().map(str::trim);
    let millis =
        text(HeaderName::from_static("retry-after-ms")).and_then(|text| text.parse::<f64>().ok());
    let seconds = text(RETRY_AFTER).and_then(|text| text.parse::<f64>().ok());
    let wait = match (millis, seconds) {
        (Some(millis), _) => Some(millis / 1_000.0),
        (None, seconds) => seconds,
    };
    if let Some(wait) = wait {
        let wait = Duration::try_from_secs_f64(wait).ok()?.min(MAX_RETRY_AFTER);
        return now.checked_add(wait).ok();
    }
    let date = jiff::fmt::rfc2822::parse(text(RETRY_AFTER)?).ok()?;
    Some(date.timestamp().clamp(now, now.checked_add(MAX_RETRY_AFTER).ok()?))
}

/// Classifies a failure below HTTP.
fn transport_failure(error: reqwest::Error) -> Failure {
    // The address may be internal to the installation, and says nothing to the reader of a task.
    let error = error.without_url();
    let text = error_chain(&error);
    if error.is_builder() {
        Failure::configuration(format!("the request cannot be built: {text}"))
    } else if error.is_connect() {
        Failure::transient(format!("the vendor cannot be reached: {text}"))
    } else if error.is_timeout() {
        Failure::transient(format!("the vendor took too long: {text}"))
    } else {
        Failure::transient(format!("the connection to the vendor broke: {text}"))
    }
}

/// An error with all its causes in one line.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// The first of `classes` with a phrase (lower case) that `message` contains.
pub(crate) fn class_from_message(
    message: &str,
    classes: &[(FailureClass, &[&str])],
) -> Option<FailureClass> {
    let message = message.to_lowercase();
    classes
        .iter()
        .find(|(_, words)| words.iter().any(|word| message.contains(word)))
        .map(|(class, _)| *class)
}

/// `key` as a header value, marked as sensitive.
pub(crate) fn key_header(key: Option<&SecretString>) -> Result<Option<HeaderValue>, Failure> {
    let value = key.map(|key| HeaderValue::from_str(key.expose_secret())).transpose();
    let mut value = value.map_err(|_| {
        Failure::configuration("the API key holds characters that no HTTP header allows")
    })?;
    if let Some(value) = &mut value {
        value.set_sensitive(true);
    }
    Ok(value)
}

/// Describes a body that is not in the vendor's error format.
pub(crate) fn describe_body(status: u16, body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let text = text.trim();
    if (200..300).contains(&status) {
        return format!("the vendor answered without a stream: {text}");
    }
    if (300..400).contains(&status) {
        return format!(
            "the base URL redirects elsewhere (HTTP {status}); redirects are not followed with a key"
        );
    }
    // The error page of a proxy is of no use in a message.
    if text.is_empty() || text.starts_with('<') {
        return format!("the vendor answered with HTTP {status}");
    }
    format!("the vendor answered with HTTP {status}: {text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| {
                (HeaderName::from_static(name), value.parse().expect("a header value"))
            })
            .collect()
    }

    #[test]
    fn retry_after_is_parsed_in_every_form() {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
        let seconds =
            |headers| retry_at(&headers, now).map(|at| at.duration_since(now).as_millis());
        assert_eq!(seconds(headers(&[("retry-after", "7")])), Some(7_000));
        assert_eq!(seconds(headers(&[("retry-after-ms", "250"), ("retry-after", "7")])), Some(250));
        assert_eq!(
            seconds(headers(&[("retry-after", "Thu, 01 Jan 2026 00:01:00 GMT")])),
            Some(60_000)
        );
        assert_eq!(seconds(headers(&[("retry-after", "Wed, 31 Dec 2025 00:00:00 GMT")])), Some(0));
        assert_eq!(seconds(headers(&[("retry-after", "9999999999999")])), Some(24 * 3_600_000));
        assert_eq!(seconds(headers(&[("retry-after", "-1")])), None);
        assert_eq!(seconds(headers(&[("retry-after", "soon")])), None);
        assert_eq!(seconds(headers(&[])), None);
    }

    #[test]
    fn base_url_is_joined_with_or_without_version() {
        for (base, url) in [
            ("https://host", "https://host/v1/messages"),
            ("https://host/", "https://host/v1/messages"),
            ("https://host/v1/", "https://host/v1/messages"),
            ("http://host:1/proxy/v1", "http://host:1/proxy/v1/messages"),
        ] {
            let endpoint = Endpoint::parse(base, None).expect("a base URL");
            assert_eq!(endpoint.join("/v1", "/v1/messages").as_str(), url);
        }
    }

    #[test]
    fn base_url_of_other_schemes_is_rejected() {
        for base in ["ftp://host", "host", "file:///etc/passwd", "unix:/run/x"] {
            let failure = Endpoint::parse(base, None).expect_err(base);
            assert_eq!(failure.class, FailureClass::Configuration);
        }
    }
}

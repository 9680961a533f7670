//! `fetch`: an HTTP request to a granted host.

mod body;
mod redirect;

use std::collections::BTreeMap;
use std::error::Error as _;
use std::net::IpAddr;
use std::time::Duration;

use body::{Form, receive};
use redirect::{check_redirect, redirect_target};
use reqwest::header::{
    ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, HeaderMap, HeaderName, HeaderValue,
};
use reqwest::{Method, Response, Url};
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::definition::{Definition, Effect, Permission, Provider, wall_limit};
use super::egress::{Egress, Forbidden, HostPattern};
use super::error::ToolError;
use super::kind::{Kind, optional, required};
use super::output::{Output, field, optional_field};
use super::secrets::{self, NOT_ALLOWED, Secrets, SentSecrets};
use super::size::{json_byte_size, json_size};
use super::subject;

pub use redirect::Redirects;

pub(super) const DEFINITION: Definition = Definition {
    name: "fetch",
    aliases: &[],
    summary: "Makes an HTTP request to a granted host.",
    description: "A status other than 2xx is a result, not an error: check status.\nRedirects are followed to granted \
        hosts, at most 5. To read a page, use as: \"markdown\".",
    parameters: &[
        required("url", Kind::Text { min_bytes: 1, max_bytes: 8192 }, "Address, http or https."),
        optional(
            "options",
            Kind::Object(&[
                optional(
                    "method",
                    Kind::OneOf(&["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]),
                    "GET",
                    "Request method.",
                ),
                optional(
                    "headers",
                    Kind::TextMap,
                    "{}",
                    "Request headers; their values may contain handles of secrets.",
                ),
                optional(
                    "body",
                    Kind::Text { min_bytes: 0, max_bytes: 1 << 20 },
                    "none",
                    "Request body.",
                ),
                optional(
                    "timeout_seconds",
                    Kind::Integer { min: 1, max: 120 },
                    "30",
                    "For the whole exchange, redirects included.",
                ),
                optional(
                    "as",
                    Kind::OneOf(&["text", "markdown"]),
                    "text",
                    "With \"markdown\", HTML is converted to Markdown and text is returned unchanged; anything else is an error.",
                ),
                optional(
                    "max_bytes",
                    Kind::Integer { min: 1, max: MAX_BODY_BYTES },
                    "all",
                    "Truncate a larger body to this size.",
                ),
            ]),
            "{}",
            "Options.",
        ),
    ],
    output: Output::Object(&[
        field("status", Output::Integer, "Status code of the response, for example 200."),
        field("headers", Output::TextMap, "Response headers, names in lower case."),
        field("body", Output::Text, "Response body, as text or Markdown."),
        field("truncated", Output::Boolean, "Whether the body was longer than `max_bytes`."),
        field("url", Output::Text, "Address of the response, after redirects."),
        optional_field("note", Output::Text, "How the body differs from what the host sent."),
    ]),
    base_tool: None,
    example: "fetch(\"https://example.com/data.json\", { headers: { accept: \"application/json\" } })",
    errors: &[
        ("HostNotGranted", "when the host, or the target of a redirect, was not granted."),
        ("AddressForbidden", "when the host has a private, local or reserved address."),
        NOT_ALLOWED,
        secrets::NOT_FOUND,
        secrets::UNAVAILABLE,
        ("Timeout", "when it takes too long; the outcome of the request is unknown."),
        ("FetchFailed", "when the host cannot be reached or closes the connection."),
        (
            "BodyTooLarge",
            "when the body is larger than a call can return; set `max_bytes` to get a part.",
        ),
        ("TooManyRedirects", "when there are more than 5 redirects."),
        (
            "RedirectNotFollowed",
            "when a person must approve the target of a redirect: fetch that address in a separate call.",
        ),
        (
            "PolicyDenied",
            "when a rule denies the target of a redirect; the request itself was made.",
        ),
        (
            "NotText",
            "when Markdown was requested and the body is neither HTML nor text; the message has the status.",
        ),
        ("NotConverted", "when converting the page to Markdown takes too long."),
    ],
    effect: Effect::External,
    permission: Permission::Network,
    subject: subject::request,
    provider: Provider::Host,
    limits: wall_limit(125),
};

const TOOL: &str = DEFINITION.name;

/// The `Accept` header of requests for Markdown: some servers have it themselves.
const MARKDOWN_ACCEPT: HeaderValue = HeaderValue::from_static(
    "text/markdown, text/html;q=0.9, application/xhtml+xml;q=0.9, text/plain;q=0.8, */*;q=0.1",
);

/// Default timeout of the whole exchange, in seconds.
const DEFAULT_TIMEOUT_SECONDS: u64 = 30;

/// Maximum bytes of a body that are read.
const MAX_BODY_BYTES: u64 = 10 << 20;

/// Maximum number of redirects that are followed.
const MAX_REDIRECTS: usize = 5;

/// Maximum number and total size of request headers.
const MAX_HEADERS: usize = 64;
const MAX_HEADER_BYTES: usize = 32 * 1024;

/// Headers that the connection sets, not the request.
const CONNECTION_HEADERS: [&str; 9] = [
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "keep-alive",
    "upgrade",
    "te",
    "trailer",
    "expect",
];

/// Headers that are forwarded to another origin after a redirect. Any other header may be a
/// credential.
const FORWARDED_HEADERS: [&str; 4] = ["accept", "accept-language", "content-type", "user-agent"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    url: String,
    #[serde(default)]
    options: Options,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    method: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    body: Option<String>,
    timeout_seconds: Option<u64>,
    max_bytes: Option<usize>,
    #[serde(rename = "as", default)]
    form: Form,
}

#[derive(Debug, Serialize)]
pub(super) struct FetchResult {
    status: u16,
    headers: BTreeMap<String, String>,
    body: String,
    truncated: bool,
    url: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<&'static str>,
}

impl FetchResult {
    /// Truncates the body if the result would take more than `bytes` bytes of JSON. Escaping makes
    /// a body with many quotes or line breaks larger than it was received.
    fn fit(&mut self, bytes: usize) {
        let rest: usize =
            self.headers.iter().map(|(name, value)| json_size(name) + json_size(value) + 2).sum();
        let room = bytes.saturating_sub(rest + json_size(&self.url) + RESULT_OVERHEAD_BYTES);
        let mut size = 0;
        let end = self.body.bytes().position(|byte| {
            size += json_byte_size(byte);
            size > room
        });
        if let Some(end) = end {
            self.body.truncate(self.body.floor_char_boundary(end));
            self.truncated = true;
        }
    }

    /// Fails if the body was truncated although the call did not ask for that.
    fn require_complete(self, result_bytes: usize) -> Result<Self, ToolError> {
        if !self.truncated {
            return Ok(self);
        }
        let Self { status, url, .. } = &self;
        let shown = Url::parse(url).map(|url| without_query(&url)).unwrap_or_default();
        let message = format!(
            "fetch: {shown} answered with status {status}, but its body is larger than one call may return \
             ({result_bytes} bytes as JSON). The request was made. Get the beginning of the body with {{ max_bytes: \
             100000 }}, or, if the server supports it, a range with the header {{ range: \"bytes=0-99999\" }}."
        );
        Err(ToolError::new("BodyTooLarge", message)
            .with(json!({"status": status, "limit": result_bytes})))
    }
}

/// Size of the result's field names as JSON, with reserve for handles that replace secrets in the
/// headers, in bytes.
const RESULT_OVERHEAD_BYTES: usize = 1024;

/// One request of an exchange.
struct Hop {
    url: Url,
    method: Method,
    /// With handles in place of secrets.
    headers: HeaderMap,
    body: Option<String>,
}

/// The resources and permissions of a request.
pub(super) struct Network<'a> {
    pub(super) egress: &'a Egress,
    pub(super) granted: &'a [HostPattern],
    pub(super) secrets: &'a Secrets,
    /// Decides which redirects are followed; without it, all redirects to granted hosts.
    pub(super) redirects: Option<&'a dyn Redirects>,
    /// Largest result, in bytes of JSON.
    pub(super) result_bytes: usize,
}

pub(super) async fn run(
    network: &Network<'_>,
    arguments: Arguments,
    cancel: &CancellationToken,
) -> Result<FetchResult, ToolError> {
    let secrets = network.secrets;
    let Arguments { url, options } = arguments;
    let form = options.form;
    // Addresses are logged at every hop, and a body is content that a host may show to others.
    let address =
        url.replace("%7B", "{").replace("%7b", "{").replace("%3A", ":").replace("%3a", ":");
    secrets::refuse(TOOL, "the address", &address.replace("%7D", "}").replace("%7d", "}"))?;
    secrets::refuse(TOOL, "the body", options.body.as_deref().unwrap_or_default())?;
    let mut hop = Hop {
        url: parse_url(&url)?,
        method: method(options.method.as_deref())?,
        headers: headers(&options.headers)?,
        body: options.body,
    };
    if form == Form::Markdown {
        hop.headers.entry(ACCEPT).or_insert(MARKDOWN_ACCEPT);
    }
    let seconds = options.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS);
    let most = match form {
        Form::Text => network.result_bytes,
        // Markdown is shorter than its page.
        Form::Markdown => usize::MAX,
    };
    let max_bytes = options.max_bytes.unwrap_or(MAX_BODY_BYTES as usize).min(most);
    let host = hop.url.host_str().unwrap_or_default().to_owned();
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let mut sent = SentSecrets::default();
    let received = async {
        let (response, url) = exchange(network, hop, &mut sent).await?;
        let scrubber = secrets.scrubber(&sent);
        let received = receive(response, &url, max_bytes, form, &scrubber, deadline).await?;
        Ok((received, scrubber))
    };
    let fetched = match tokio::time::timeout_at(deadline, received).await {
        Ok(Ok((received, scrubber))) => {
            received.into_result(form, max_bytes, &scrubber, cancel).await
        }
        Ok(Err(error)) => Err(error),
        Err(_) => Err(ToolError::new(
            "Timeout",
            format!(
                "fetch: {host} did not answer within {seconds} seconds. The outcome of the request is unknown. Set \
                 timeout_seconds to wait longer."
            ),
        )),
    };
    match fetched {
        Ok(mut fetched) => {
            fetched.fit(network.result_bytes);
            if options.max_bytes.is_some() {
                Ok(fetched)
            } else {
                fetched.require_complete(network.result_bytes)
            }
        }
        // An error may repeat secrets that the host was sent, for example in the target of a
        // redirect.
        Err(error) => Err(secrets::scrubbed(error, &secrets.scrubber(&sent))),
    }
}

/// Sends the request, follows redirects, and returns the response and its address. Adds the secrets
/// that were sent to `sent`.
async fn exchange(
    network: &Network<'_>,
    mut hop: Hop,
    sent: &mut SentSecrets,
) -> Result<(Response, Url), ToolError> {
    let Network { egress, granted, secrets, redirects, .. } = *network;
    let first = hop.subject();
    admit(egress, granted, &hop.url)?;
    for _ in 0..=MAX_REDIRECTS {
        let (headers, used) = fill_secrets(egress, secrets, &hop)?;
        sent.extend(used);
        let response = send(egress, &hop, headers).await?;
        if !sent.is_empty()
            && response.headers().get(CONTENT_ENCODING).is_some_and(|how| how != "identity")
        {
            // The encoding was not requested, and secrets cannot be found in it.
            return Err(ToolError::new(
                "FetchFailed",
                format!(
                    "fetch: {} answered with a content encoding that was not requested.",
                    without_query(&hop.url)
                ),
            ));
        }
        match redirect_target(&response, &hop)? {
            Some(target) => {
                admit(egress, granted, &target.url)?;
                // A redirect back to the original method and host was permitted with the call.
                if target.subject() != first
                    && let Some(redirects) = redirects
                {
                    check_redirect(redirects, &hop, &target)?;
                }
                hop = target;
            }
            None => return Ok((response, hop.url)),
        }
    }
    Err(ToolError::new(
        "TooManyRedirects",
        format!("fetch: gave up after {MAX_REDIRECTS} redirects, at {}.", without_query(&hop.url)),
    ))
}

/// Rejects a host that is not granted or not public. The addresses of names are checked when
/// connecting.
fn admit(egress: &Egress, granted: &[HostPattern], url: &Url) -> Result<(), ToolError> {
    let host = url.host_str().unwrap_or_default();
    if !granted.iter().any(|pattern| pattern.matches(host)) {
        let names: Vec<String> = granted.iter().map(ToString::to_string).collect();
        let list = if names.is_empty() {
            "No host is granted".to_owned()
        } else {
            format!("The granted hosts are: {}", names.join(", "))
        };
        let message = format!(
            "fetch: the host {host:?} is not granted to this task. {list}. The operator grants hosts for all tasks \
             (CONSTRUCT_INTERPRETER_FETCH_HOSTS); tell the user that \"{host}\" is needed."
        );
        return Err(
            ToolError::new("HostNotGranted", message).with(json!({"host": host, "granted": names}))
        );
    }
    // The URL parser has already normalized every spelling of an IPv4 address (0x7f.1, 2130706433).
    let literal = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    match literal {
        Ok(address) if !egress.permits(address) => Err(forbidden(host, &[address])),
        _ => Ok(()),
    }
}

fn forbidden(host: &str, addresses: &[IpAddr]) -> ToolError {
    let list: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let message = format!(
        "fetch: {host} has the address {}, which is not public. Local, private and cloud-metadata addresses are never \
         reachable.",
        list.join(", ")
    );
    ToolError::new("AddressForbidden", message).with(json!({"host": host, "addresses": list}))
}

/// Replaces handles in the headers of a request by secrets, and returns which secrets were used.
/// The recipient is known here.
fn fill_secrets(
    egress: &Egress,
    secrets: &Secrets,
    hop: &Hop,
) -> Result<(HeaderMap, SentSecrets), ToolError> {
    let host = hop.url.host_str().unwrap_or_default();
    let mut headers = hop.headers.clone();
    let mut room = MAX_HEADER_BYTES;
    let mut used = SentSecrets::default();
    for (name, value) in &mut headers {
        // Handles in a value that is not ASCII are not replaced.
        let text = value.to_str().unwrap_or_default();
        let Some(secret) = secrets.in_header(text, host, room, &mut used)? else { continue };
        let filled = HeaderValue::from_str(secret.expose_secret());
        *value = filled.map_err(|_| {
            ToolError::invalid(format!(
                "fetch: with its secret, the value of the header {:?} contains invalid characters; nothing was sent.",
                name.as_str()
            ))
        })?;
        // Keeps it out of logs and of HTTP/2's header compression tables.
        value.set_sensitive(true);
        room = room.saturating_sub(value.len());
    }
    if used.is_empty() {
        return Ok((headers, used));
    }
    let literal = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    if hop.url.scheme() != "https" && !literal.is_ok_and(|address| egress.is_excepted(address)) {
        let message = format!(
            "fetch: secrets are only sent over https, and {} is not https; nothing was sent.",
            without_query(&hop.url)
        );
        return Err(ToolError::new(NOT_ALLOWED.0, message));
    }
    // The response must be readable, so that secrets are found in it: the client itself requests
    // the encodings it can decode.
    headers.remove(ACCEPT_ENCODING);
    Ok((headers, used))
}

async fn send(egress: &Egress, hop: &Hop, headers: HeaderMap) -> Result<Response, ToolError> {
    let mut request = egress.client.request(hop.method.clone(), hop.url.clone()).headers(headers);
    if let Some(body) = &hop.body {
        request = request.body(body.clone());
    }
    request.send().await.map_err(|e| exchange_error(&hop.url, &e))
}

fn exchange_error(url: &Url, error: &reqwest::Error) -> ToolError {
    // The error's own text contains the address, which may contain a secret. Its sources say what
    // happened.
    let mut causes = Vec::new();
    let mut cause = error.source();
    while let Some(current) = cause {
        if let Some(refused) = current.downcast_ref::<Forbidden>() {
            return forbidden(&refused.host, &refused.addresses);
        }
        causes.push(current.to_string());
        cause = current.source();
    }
    let host = url.host_str().unwrap_or_default();
    let what = if error.is_connect() {
        "could not be reached; nothing was sent"
    } else {
        "closed the connection"
    };
    let why = causes.last().map(|last| format!(" ({last})")).unwrap_or_default();
    ToolError::new("FetchFailed", format!("fetch: {host} {what}{why}."))
}

fn parse_url(text: &str) -> Result<Url, ToolError> {
    let shown: String = text.chars().take(200).collect();
    let url = Url::parse(text).map_err(|e| {
        ToolError::invalid(format!(
            "fetch: {shown:?} is not an absolute URL ({e}). Example: \"https://example.com/a\"."
        ))
    })?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(ToolError::invalid(format!("fetch: {shown:?} is not an http or https URL.")));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(ToolError::invalid(
            "fetch: the URL contains a user name or password; send an authorization header instead.",
        ));
    }
    Ok(url)
}

fn method(name: Option<&str>) -> Result<Method, ToolError> {
    let name = name.unwrap_or("GET");
    Method::from_bytes(name.as_bytes())
        .map_err(|_| ToolError::invalid(format!("fetch: {name:?} is not a request method.")))
}

fn headers(given: &BTreeMap<String, String>) -> Result<HeaderMap, ToolError> {
    let size: usize = given.iter().map(|(name, value)| name.len() + value.len()).sum();
    if given.len() > MAX_HEADERS || size > MAX_HEADER_BYTES {
        return Err(ToolError::invalid(format!(
            "fetch: the limit is {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes together."
        )));
    }
    let mut headers = HeaderMap::new();
    for (name, value) in given {
        let shown: String = name.chars().take(100).collect();
        let lower = name.to_ascii_lowercase();
        if CONNECTION_HEADERS.contains(&lower.as_str()) || lower.starts_with("proxy-") {
            return Err(ToolError::invalid(format!(
                "fetch: the header {shown:?} is set by the connection and cannot be given."
            )));
        }
        let name = HeaderName::from_bytes(lower.as_bytes()).map_err(|_| {
            ToolError::invalid(format!("fetch: {shown:?} is not a valid header name."))
        })?;
        let value = HeaderValue::from_str(value).map_err(|_| {
            ToolError::invalid(format!(
                "fetch: the value of the header {shown:?} contains invalid characters."
            ))
        })?;
        headers.insert(name, value);
    }
    Ok(headers)
}

/// An address without its query, which may contain a secret.
fn without_query(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.set_fragment(None);
    url.to_string()
}

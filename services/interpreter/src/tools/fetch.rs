//! `fetch`: an HTTP request to a granted host.

mod body;
mod redirect;

use std::collections::BTreeMap;
use std::error::Error as _;
use std::net::IpAddr;
use std::time::Duration;

use body::{Form, receive};
use redirect::{may_follow, next};
use reqwest::header::{
    ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, HeaderMap, HeaderName, HeaderValue,
};
use reqwest::{Method, Response, Url};
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::egress::{Egress, Forbidden, HostPattern};
use super::error::ToolError;
use super::kind::{Kind, optional, required};
use super::output::{Output, field};
use super::secrets::{self, NOT_ALLOWED, Secrets};
use super::subject;

pub use redirect::Redirects;

pub(super) const DEFINITION: Definition = Definition {
    name: "fetch",
    aliases: &[],
    summary: "Makes an HTTP request to a host that was granted.",
    description: "A status other than 2xx is a result, not an error: look at status.\nRedirects are followed to granted \
        hosts, at most 5. To read a page take it as \"markdown\".",
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
                    "Request headers; handles of secrets may stand in their values.",
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
                    "With \"markdown\" HTML becomes readable Markdown; text stays as it is, and what is neither is refused.",
                ),
                optional(
                    "max_bytes",
                    Kind::Integer { min: 1, max: 10 << 20 },
                    "1048576",
                    "Of the body, at most this much is taken, and no more than a result may hold.",
                ),
            ]),
            "{}",
            "Options.",
        ),
    ],
    output: Output::Object(&[
        field("status", Output::Integer, "Of the response, for example 200."),
        field("headers", Output::TextMap, "Of the response, names in lower case."),
        field("body", Output::Text, "Of the response, as text or Markdown."),
        field("truncated", Output::Boolean, "Whether there was more of the body."),
        field("url", Output::Text, "Where it came from, after redirects."),
    ]),
    like: None,
    example: "fetch(\"https://example.com/data.json\", { headers: { accept: \"application/json\" } })",
    errors: &[
        ("HostNotGranted", "when the host, or one it redirects to, was not granted."),
        ("AddressForbidden", "when the host has a private, local or reserved address."),
        NOT_ALLOWED,
        secrets::NOT_FOUND,
        secrets::UNAVAILABLE,
        ("Timeout", "when it takes too long; whether the request had an effect is unknown."),
        ("FetchFailed", "when the host cannot be reached or breaks off."),
        ("TooManyRedirects", "when there are more than 5."),
        (
            "RedirectNotFollowed",
            "when a person must approve of where it redirects to: fetch that address in a call of its own.",
        ),
        ("PolicyDenied", "when a rule forbids where it redirects to; the request itself was made."),
        (
            "NotText",
            "when Markdown was asked for and the body is neither HTML nor text; the message has the status.",
        ),
        ("NotConverted", "when a page takes too long to become Markdown."),
    ],
    effect: Effect::External,
    permission: Permission::Network,
    subject: subject::request,
    provider: Provider::Host,
    limits: limits(125, 10 << 10),
};

const TOOL: &str = DEFINITION.name;

/// What is asked for when Markdown is wanted: some servers have it themselves.
const READABLE: HeaderValue = HeaderValue::from_static(
    "text/markdown, text/html;q=0.9, application/xhtml+xml;q=0.9, text/plain;q=0.8, */*;q=0.1",
);

/// Seconds for the whole exchange when nothing else is asked for.
const DEFAULT_TIMEOUT: u64 = 30;

/// Bytes of a body when nothing else is asked for.
const DEFAULT_BYTES: usize = 1 << 20;

/// Most redirects that are followed.
const MAX_REDIRECTS: usize = 5;

/// Most request headers, and most bytes of them.
const MAX_HEADERS: usize = 64;
const MAX_HEADER_BYTES: usize = 32 * 1024;

/// Headers that belong to the connection and not to the request.
const OURS: [&str; 9] = [
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

/// Headers that are sent on to another origin after a redirect. Every other one may be a
/// credential.
const HARMLESS: [&str; 4] = ["accept", "accept-language", "content-type", "user-agent"];

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
pub(super) struct Fetched {
    status: u16,
    headers: BTreeMap<String, String>,
    body: String,
    truncated: bool,
    url: String,
}

impl Fetched {
    /// Cuts the body, if need be, so that all of it takes no more than so many bytes as JSON: there
    /// a body of many quotes or line breaks is larger than it came.
    fn fit(&mut self, bytes: usize) {
        let rest: usize =
            self.headers.iter().map(|(name, value)| written(name) + written(value) + 6).sum();
        let room = bytes.saturating_sub(rest + written(&self.url) + AROUND);
        let mut size = 0;
        let end = self.body.char_indices().find_map(|(at, c)| {
            size += written_char(c);
            (size > room).then_some(at)
        });
        if let Some(end) = end {
            self.body.truncate(end);
            self.truncated = true;
        }
    }
}

/// What the names of the result's fields take as JSON, with room to spare for handles that stand
/// where secrets were in the headers.
const AROUND: usize = 1024;

/// How many bytes a text takes within quotes.
fn written(text: &str) -> usize {
    text.chars().map(written_char).sum()
}

const fn written_char(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\x08' | '\x0c' => 2,
        '\0'..='\x1f' => 6,
        c => c.len_utf8(),
    }
}

/// One request of an exchange.
struct Hop {
    url: Url,
    method: Method,
    /// With handles where secrets are to stand.
    headers: HeaderMap,
    body: Option<String>,
}

/// What a request may use.
pub(super) struct Network<'a> {
    pub(super) egress: &'a Egress,
    pub(super) granted: &'a [HostPattern],
    pub(super) secrets: &'a Secrets,
    /// Says which redirects are followed; without it those to all hosts that are granted.
    pub(super) redirects: Option<&'a dyn Redirects>,
    /// How large the result may be as JSON.
    pub(super) result_bytes: usize,
}

pub(super) async fn run(
    network: &Network<'_>,
    arguments: Arguments,
    cancel: &CancellationToken,
) -> Result<Fetched, ToolError> {
    let secrets = network.secrets;
    let Arguments { url, options } = arguments;
    let form = options.form;
    // Addresses are logged everywhere on their way, and a body is content: a host may show it to
    // others.
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
        hop.headers.entry(ACCEPT).or_insert(READABLE);
    }
    let seconds = options.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT);
    let max_bytes = options.max_bytes.unwrap_or(DEFAULT_BYTES).min(network.result_bytes);
    let host = hop.url.host_str().unwrap_or_default().to_owned();
    let received = async {
        let (response, url) = exchange(network, hop).await?;
        receive(response, &url, max_bytes, form, secrets.scrubber()).await
    };
    match tokio::time::timeout(Duration::from_secs(seconds), received).await {
        Ok(received) => {
            let mut fetched =
                received?.into_fetched(form, max_bytes, secrets.scrubber(), cancel).await?;
            fetched.fit(network.result_bytes);
            Ok(fetched)
        }
        Err(_) => Err(ToolError::new(
            "Timeout",
            format!(
                "fetch: {host} did not answer within {seconds} seconds. Whether the request had an effect there is \
                 unknown. A longer time can be given with timeout_seconds."
            ),
        )),
    }
}

/// Sends the request, follows redirects, and returns the response and where it came from.
async fn exchange(network: &Network<'_>, mut hop: Hop) -> Result<(Response, Url), ToolError> {
    let Network { egress, granted, secrets, redirects, .. } = *network;
    let first = hop.subject();
    let mut has_secrets = false;
    admit(egress, granted, &hop.url)?;
    for _ in 0..=MAX_REDIRECTS {
        let filled = filled(egress, secrets, &hop)?;
        has_secrets |= filled.is_some();
        let response = send(egress, &hop, filled.unwrap_or_else(|| hop.headers.clone())).await?;
        if has_secrets
            && response.headers().get(CONTENT_ENCODING).is_some_and(|how| how != "identity")
        {
            // It was not asked for, and a secret could not be found in it.
            return Err(ToolError::new(
                "FetchFailed",
                format!(
                    "fetch: {} answered in an encoding that was not asked for.",
                    shown(&hop.url)
                ),
            ));
        }
        match next(&response, &hop)? {
            Some(further) => {
                admit(egress, granted, &further.url)?;
                // What was permitted for the call is permitted for where it leads back to.
                if further.subject() != first
                    && let Some(redirects) = redirects
                {
                    may_follow(redirects, &hop, &further)?;
                }
                hop = further;
            }
            None => return Ok((response, hop.url)),
        }
    }
    Err(ToolError::new(
        "TooManyRedirects",
        format!("fetch: gave up after {MAX_REDIRECTS} redirects, at {}.", shown(&hop.url)),
    ))
}

/// Refuses what is not granted, or is not public. Names are checked again, by their addresses, when
/// connecting.
fn admit(egress: &Egress, granted: &[HostPattern], url: &Url) -> Result<(), ToolError> {
    let host = url.host_str().unwrap_or_default();
    if !granted.iter().any(|pattern| pattern.matches(host)) {
        let names: Vec<String> = granted.iter().map(ToString::to_string).collect();
        let known = if names.is_empty() {
            "No host is granted".to_owned()
        } else {
            format!("Granted are: {}", names.join(", "))
        };
        let message = format!(
            "fetch: the host {host:?} is not granted to this task. {known}. Who runs this installation grants hosts, \
             for all tasks (CONSTRUCT_INTERPRETER_FETCH_HOSTS); tell the person you work for that \"{host}\" is needed."
        );
        return Err(
            ToolError::new("HostNotGranted", message).with(json!({"host": host, "granted": names}))
        );
    }
    // The URL parser has already turned every spelling of an IPv4 address (0x7f.1, 2130706433) into
    // the usual one.
    let literal = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    match literal {
        Ok(address) if !egress.permits(address) => Err(forbidden(host, &[address])),
        _ => Ok(()),
    }
}

fn forbidden(host: &str, addresses: &[IpAddr]) -> ToolError {
    let list: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let message = format!(
        "fetch: {host} is at {}, which is not a public address. Local, private and cloud-metadata addresses are never \
         reachable from here.",
        list.join(", ")
    );
    ToolError::new("AddressForbidden", message).with(json!({"host": host, "addresses": list}))
}

/// The headers of a request with the secrets in them; none when there are no handles in them. Here
/// it is clear to whom they go.
fn filled(egress: &Egress, secrets: &Secrets, hop: &Hop) -> Result<Option<HeaderMap>, ToolError> {
    let host = hop.url.host_str().unwrap_or_default();
    let mut headers = hop.headers.clone();
    let mut room = MAX_HEADER_BYTES;
    let mut any = false;
    for (name, value) in &mut headers {
        // In a value that is not ASCII a handle stays a handle.
        let Some(secret) = secrets.in_header(value.to_str().unwrap_or_default(), host, room)?
        else {
            continue;
        };
        let filled = HeaderValue::from_str(secret.expose_secret());
        *value = filled.map_err(|_| {
            ToolError::invalid(format!(
                "fetch: with the secret in it the value of the header {:?} contains characters that cannot be sent; nothing \
                 was sent.",
                name.as_str()
            ))
        })?;
        // Kept out of logs, and out of the tables by which HTTP/2 shortens headers.
        value.set_sensitive(true);
        room = room.saturating_sub(value.len());
        any = true;
    }
    if !any {
        return Ok(None);
    }
    let literal = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    if hop.url.scheme() != "https" && !literal.is_ok_and(|address| egress.is_excepted(address)) {
        let message = format!(
            "fetch: a secret is sent over https only, and {} is not; nothing was sent.",
            shown(&hop.url)
        );
        return Err(ToolError::new(NOT_ALLOWED.0, message));
    }
    // What comes back has to be readable, so that secrets are found in it: the client itself asks
    // for what it can unpack.
    headers.remove(ACCEPT_ENCODING);
    Ok(Some(headers))
}

async fn send(egress: &Egress, hop: &Hop, headers: HeaderMap) -> Result<Response, ToolError> {
    let mut request = egress.client.request(hop.method.clone(), hop.url.clone()).headers(headers);
    if let Some(body) = &hop.body {
        request = request.body(body.clone());
    }
    request.send().await.map_err(|e| failed(&hop.url, &e))
}

fn failed(url: &Url, error: &reqwest::Error) -> ToolError {
    // The error's own text contains the address, which may contain a secret; its causes say what
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
        "broke off the exchange"
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
        .map_err(|_| ToolError::invalid(format!("fetch: {name:?} is no request method.")))
}

fn headers(given: &BTreeMap<String, String>) -> Result<HeaderMap, ToolError> {
    let size: usize = given.iter().map(|(name, value)| name.len() + value.len()).sum();
    if given.len() > MAX_HEADERS || size > MAX_HEADER_BYTES {
        return Err(ToolError::invalid(format!(
            "fetch: at most {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes together can be sent."
        )));
    }
    let mut headers = HeaderMap::new();
    for (name, value) in given {
        let shown: String = name.chars().take(100).collect();
        let lower = name.to_ascii_lowercase();
        if OURS.contains(&lower.as_str()) || lower.starts_with("proxy-") {
            return Err(ToolError::invalid(format!(
                "fetch: the header {shown:?} is set by the connection itself."
            )));
        }
        let name = HeaderName::from_bytes(lower.as_bytes()).map_err(|_| {
            ToolError::invalid(format!("fetch: {shown:?} cannot be the name of a header."))
        })?;
        let value = HeaderValue::from_str(value).map_err(|_| {
            ToolError::invalid(format!(
                "fetch: the value of the header {shown:?} contains characters that cannot be sent."
            ))
        })?;
        headers.insert(name, value);
    }
    Ok(headers)
}

/// An address without its query, which may contain a secret.
fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.set_fragment(None);
    url.to_string()
}

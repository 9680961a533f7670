//! The body of a response: read to its limit, decoded, and made into Markdown when that was asked
//! for.

use std::collections::BTreeMap;
use std::time::Duration;

use encoding_rs::{Encoding, UTF_8};
use reqwest::header::CONTENT_TYPE;
use reqwest::{Response, Url};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::{Fetched, TOOL, failed, shown};
use crate::blocking::blocking;
use crate::scrub::Scrubber;
use crate::tools::error::ToolError;
use crate::tools::html;
use crate::tools::stop::{Stop, Stopped};

/// How long a page may take to become Markdown. One of 10 MiB takes a fraction of it.
const CONVERSION: Duration = Duration::from_secs(5);

/// How many pages of all tasks are converted at the same time; more wait. Each occupies a thread
/// and a multiple of its size.
static CONVERSIONS: Semaphore = Semaphore::const_new(8);

/// What a body is wanted as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Form {
    /// As it came.
    #[default]
    Text,
    /// As Markdown, where it is HTML.
    Markdown,
}

/// What a body is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Html,
    Text,
    /// Nobody says.
    Unknown,
    /// Neither HTML nor text.
    Other,
}

/// A response as it was read.
pub(super) struct Received {
    status: u16,
    headers: BTreeMap<String, String>,
    body: String,
    truncated: bool,
    content: Content,
    url: Url,
}

/// Reads a response, at most `max_bytes` of its body.
pub(super) async fn receive(
    mut response: Response,
    url: &Url,
    max_bytes: usize,
    form: Form,
    scrubber: &Scrubber,
) -> Result<Received, ToolError> {
    let status = response.status().as_u16();
    let headers = headers(&response);
    let (kind, charset) = content_type(&response);
    let mut body = Vec::new();
    let mut truncated = false;
    let mut content = content(&kind);
    while let Some(chunk) = response.chunk().await.map_err(|e| failed(url, &e))? {
        if content == Content::Unknown {
            content = sniffed(&chunk);
        }
        if form == Form::Markdown && content == Content::Other && !chunk.is_empty() {
            return Err(not_text(url, status, &kind));
        }
        let room = max_bytes - body.len();
        body.extend_from_slice(&chunk[..chunk.len().min(room)]);
        if chunk.len() > room {
            truncated = true;
            break;
        }
    }
    // Once as it came, whatever encoding it claims to have, and once decoded.
    let mut body = scrubber.bytes(body, truncated);
    let encoding = charset.and_then(|name| Encoding::for_label(name.as_bytes())).unwrap_or(UTF_8);
    if truncated
        && encoding == UTF_8
        && let Err(error) = std::str::from_utf8(&body)
        && error.error_len().is_none()
    {
        body.truncate(error.valid_up_to());
    }
    let body = if encoding == UTF_8 {
        // The mark in front, if there is one, stays, as it always has for text.
        String::from_utf8(body)
            .unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
    } else {
        encoding.decode(&body).0.into_owned()
    };
    let body = scrubber.text(body, truncated);
    Ok(Received { status, headers, body, truncated, content, url: url.clone() })
}

impl Received {
    /// The result of the tool.
    pub(super) async fn into_fetched(
        self,
        form: Form,
        max_bytes: usize,
        scrubber: &Scrubber,
        cancel: &CancellationToken,
    ) -> Result<Fetched, ToolError> {
        let Self { status, headers, mut body, mut truncated, content, url } = self;
        let address = url.to_string();
        if form == Form::Markdown && content == Content::Html {
            let shown = shown(&url);
            let cancelled = |_| ToolError::cancelled(TOOL);
            let permit = CONVERSIONS.acquire().await.map_err(cancelled)?;
            let stop = Stop::new(cancel.clone(), CONVERSION);
            let converting = blocking(move || {
                // Held by the thread, which may outlive the call.
                let _permit = permit;
                html::to_markdown(&body, &url, max_bytes, &stop)
            });
            let died = || {
                ToolError::internal(TOOL, "the thread that converted the page ended unexpectedly")
            };
            let page = converting
                .await
                .ok_or_else(died)?
                .map_err(|stopped| not_converted(stopped, &shown, status))?;
            truncated |= page.truncated;
            body = scrubber.text(page.text, truncated);
        }
        if body.len() > max_bytes && !scrubber.is_empty() {
            // Handles are longer than short secrets.
            body.truncate(body.floor_char_boundary(max_bytes));
            truncated = true;
        }
        Ok(Fetched { status, headers, body, truncated, url: address })
    }
}

fn headers(response: &Response) -> BTreeMap<String, String> {
    let mut headers = BTreeMap::<String, String>::new();
    for (name, value) in response.headers() {
        let value = String::from_utf8_lossy(value.as_bytes());
        headers
            .entry(name.as_str().to_owned())
            .and_modify(|all| {
                all.push_str(", ");
                all.push_str(&value);
            })
            .or_insert_with(|| value.into_owned());
    }
    headers
}

/// The type of the content in lower case, without parameters, and its character encoding.
fn content_type(response: &Response) -> (String, Option<String>) {
    let value =
        response.headers().get(CONTENT_TYPE).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let value = value.unwrap_or_default().to_ascii_lowercase();
    let mut parts = value.split(';').map(str::trim);
    let kind = parts.next().unwrap_or_default().to_owned();
    let charset = parts
        .find_map(|part| part.strip_prefix("charset="))
        .map(|name| name.trim_matches('"').to_owned());
    (kind, charset)
}

fn content(kind: &str) -> Content {
    const TEXT: [&str; 13] = [
        "application/json",
        "application/x-ndjson",
        "application/xml",
        "application/javascript",
        "application/ecmascript",
        "application/x-javascript",
        "application/typescript",
        "application/yaml",
        "application/x-yaml",
        "application/toml",
        "application/x-sh",
        "application/sql",
        "application/graphql",
    ];
    match kind {
        "" => Content::Unknown,
        "text/html" | "application/xhtml+xml" => Content::Html,
        _ if kind.starts_with("text/") || TEXT.contains(&kind) => Content::Text,
        _ if kind.ends_with("+json") || kind.ends_with("+xml") || kind.ends_with("+yaml") => {
            Content::Text
        }
        _ => Content::Other,
    }
}

/// What a body without a type begins like.
fn sniffed(start: &[u8]) -> Content {
    let text =
        String::from_utf8_lossy(&start[..start.len().min(512)]).trim_start().to_ascii_lowercase();
    if start.contains(&0) {
        Content::Other
    } else if text.starts_with("<!doctype html") || text.starts_with("<html") {
        Content::Html
    } else {
        Content::Text
    }
}

fn not_text(url: &Url, status: u16, kind: &str) -> ToolError {
    let kind = if kind.is_empty() { "binary" } else { kind };
    let kind: String = kind.chars().take(100).collect();
    let message = format!(
        "fetch: {} answered with status {status}, but with {kind}, which is neither HTML nor text, so that there is no \
         Markdown of it. Look for a page or a text of it instead.",
        shown(url)
    );
    ToolError::new("NotText", message).with(json!({"status": status, "content_type": kind}))
}

fn not_converted(stopped: Stopped, shown: &str, status: u16) -> ToolError {
    if stopped == Stopped::Cancelled {
        return ToolError::cancelled(TOOL);
    }
    let message = format!(
        "fetch: {shown} answered with status {status}, but the page takes too long to be made into Markdown. Ask for less of \
         it with max_bytes, or take it as text."
    );
    ToolError::new("NotConverted", message).with(json!({"status": status}))
}

//! The body of a response: read up to its limit, decoded, and converted to Markdown if requested.

use std::collections::BTreeMap;
use std::time::Duration;

use encoding_rs::{CoderResult, Decoder, Encoding, UTF_8};
use reqwest::header::CONTENT_TYPE;
use reqwest::{Response, Url};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{FetchResult, TOOL, exchange_error, without_query};
use crate::blocking::blocking;
use crate::scrub::Scrubber;
use crate::tools::error::ToolError;
use crate::tools::html;
use crate::tools::note;
use crate::tools::stop::{Stop, StopReason};

/// Time limit for converting a page to Markdown. A page of 10 MiB takes a fraction of it.
const CONVERSION_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum concurrent conversions of all tasks; more wait. Each occupies a thread and memory of
/// several times the size of its page.
static CONVERSIONS: Semaphore = Semaphore::const_new(8);

/// Time limit for reading beyond the point of truncation.
const LOOK_AHEAD_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum encoded bytes for one byte of decoded text: ISO-2022-JP has an escape sequence of three
/// bytes before a letter.
const MAX_ENCODED_BYTES_PER_BYTE: usize = 4;

/// The requested form of a body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Form {
    /// Text as it was received.
    #[default]
    Text,
    /// Markdown, if the body is HTML.
    Markdown,
}

/// The type of a body.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Html,
    Text,
    /// The response has no content type.
    Unknown,
    /// Neither HTML nor text.
    Other,
}

/// A response as it was received.
pub(super) struct ReceivedResponse {
    status: u16,
    headers: BTreeMap<String, String>,
    body: String,
    /// Invalid bytes of the body were replaced.
    is_replaced: bool,
    truncated: bool,
    content: Content,
    url: Url,
}

/// Reads a response, at most `max_bytes` of its body, until `deadline`.
///
/// It reads [`Scrubber::margin`] bytes beyond the point of truncation, so that a secret across it
/// is found. If the host sends no more in time, that many bytes at the end of the received body are
/// omitted.
pub(super) async fn receive(
    mut response: Response,
    url: &Url,
    max_bytes: usize,
    form: Form,
    scrubber: &Scrubber,
    deadline: Instant,
) -> Result<ReceivedResponse, ToolError> {
    let status = response.status().as_u16();
    let headers = headers(&response);
    let (kind, charset) = content_type(&response, scrubber);
    let margin = scrubber.margin();
    // One more byte shows whether the body is longer.
    let wanted = max_bytes + (margin * MAX_ENCODED_BYTES_PER_BYTE).max(1);
    let mut body = Vec::new();
    let mut complete = false;
    let mut content = content(&kind);
    let mut look_ahead = None;
    while body.len() < wanted {
        let chunk = if body.len() <= max_bytes {
            response.chunk().await.map_err(|e| exchange_error(url, &e))?
        } else {
            let until = *look_ahead
                .get_or_insert_with(|| deadline.min(Instant::now() + LOOK_AHEAD_TIMEOUT));
            match tokio::time::timeout_at(until, response.chunk()).await {
                Ok(Ok(chunk)) => chunk,
                Ok(Err(_)) | Err(_) => break,
            }
        };
        let Some(chunk) = chunk else {
            complete = true;
            break;
        };
        if content == Content::Unknown {
            content = sniff_content(&chunk);
        }
        if form == Form::Markdown && content == Content::Other && !chunk.is_empty() {
            return Err(not_text(url, status, &kind));
        }
        body.extend_from_slice(&chunk[..chunk.len().min(wanted - body.len())]);
    }
    let truncated = body.len() > max_bytes;
    // The length of the prefix that cannot end with the beginning of a secret.
    let scanned = |length: usize| if complete { length } else { length.saturating_sub(margin) };

    // Scrub twice: the raw bytes, whatever encoding they claim to have, and the decoded text.
    let found = scrubber.find(&body);
    let end = max_bytes.min(scanned(body.len()));
    let (mut shown, mut rest) = (Vec::new(), Vec::new());
    scrubber.render(&body, &found, 0..end, &mut shown);
    scrubber.render(&body, &found, end..body.len(), &mut rest);
    let encoding = charset.and_then(|name| Encoding::for_label(name.as_bytes())).unwrap_or(UTF_8);
    let mut decoder = if encoding == UTF_8 {
        // A byte order mark is kept.
        encoding.new_decoder_without_bom_handling()
    } else {
        encoding.new_decoder()
    };
    let mut text = String::new();
    // A character that the truncation divides is omitted.
    let is_replaced = decode(&mut decoder, &shown, rest.is_empty(), &mut text);
    let cut = text.len();
    if !rest.is_empty() {
        decode(&mut decoder, &rest, complete, &mut text);
    }
    let end = cut.min(scanned(text.len()));
    let scrubbed = scrubber.beginning(text, end);
    Ok(ReceivedResponse {
        status,
        headers,
        body: scrubbed,
        is_replaced,
        truncated,
        content,
        url: url.clone(),
    })
}

/// Decodes the bytes and appends them to `text`. Returns whether some of them were invalid.
fn decode(decoder: &mut Decoder, bytes: &[u8], is_last: bool, text: &mut String) -> bool {
    let (mut next, mut is_replaced) = (0, false);
    loop {
        text.reserve((bytes.len() - next).max(64));
        let (result, read, had_errors) = decoder.decode_to_string(&bytes[next..], text, is_last);
        next += read;
        is_replaced |= had_errors;
        if result == CoderResult::InputEmpty {
            return is_replaced;
        }
    }
}

impl ReceivedResponse {
    /// The result of the tool.
    pub(super) async fn into_result(
        self,
        form: Form,
        max_bytes: usize,
        scrubber: &Scrubber,
        cancel: &CancellationToken,
    ) -> Result<FetchResult, ToolError> {
        let Self { status, headers, mut body, is_replaced, mut truncated, content, url } = self;
        let address = url.to_string();
        if form == Form::Markdown && content == Content::Html {
            let shown = without_query(&url);
            let cancelled = |_| ToolError::cancelled(TOOL);
            let permit = CONVERSIONS.acquire().await.map_err(cancelled)?;
            let stop = Stop::new(cancel.clone(), CONVERSION_TIMEOUT);
            // Enough for `max_bytes` and the margin, even if the limit divides a character.
            let limit = max_bytes + scrubber.margin() + 3;
            let converting = blocking(move || {
                // Held by the thread, which may outlive the call.
                let _permit = permit;
                html::to_markdown(&body, &url, limit, &stop)
            });
            let died = || {
                ToolError::internal(TOOL, "the thread that converted the page ended unexpectedly")
            };
            let page = converting
                .await
                .ok_or_else(died)?
                .map_err(|stopped| not_converted(stopped, &shown, status))?;
            // Character references are text now, so that there may be new secrets to find.
            body = page.text;
            // The line feed at the end is not part of the page.
            let length = body.len() - usize::from(!page.truncated && body.ends_with('\n'));
            let mut end = if length <= max_bytes { body.len() } else { max_bytes };
            if truncated || page.truncated {
                end = end.min(body.len().saturating_sub(scrubber.margin()));
            }
            truncated |= end < body.len();
            body = scrubber.beginning(body, end);
        }
        let headers =
            headers.into_iter().map(|(name, value)| (scrubber.text(name), scrubber.text(value)));
        let note = is_replaced.then_some(note::UNDECODED);
        Ok(FetchResult {
            status,
            headers: headers.collect(),
            body,
            truncated,
            url: scrubber.text(address),
            note,
        })
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

/// The type of the content in lower case, without parameters, and its character encoding. Errors
/// show part of it, so it is scrubbed.
fn content_type(response: &Response, scrubber: &Scrubber) -> (String, Option<String>) {
    let value =
        response.headers().get(CONTENT_TYPE).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let value = scrubber.text(value.unwrap_or_default().into_owned()).to_ascii_lowercase();
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

/// Guesses the type of a body from its beginning.
fn sniff_content(start: &[u8]) -> Content {
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
        "fetch: {} answered with status {status} and {kind} content, which is neither HTML nor text and cannot be \
         converted to Markdown. Look for a page or a text version instead.",
        without_query(url)
    );
    ToolError::new("NotText", message).with(json!({"status": status, "content_type": kind}))
}

fn not_converted(stopped: StopReason, shown: &str, status: u16) -> ToolError {
    if stopped == StopReason::Cancelled {
        return ToolError::cancelled(TOOL);
    }
    let message = format!(
        "fetch: {shown} answered with status {status}, but converting the page to Markdown takes too long. Request \
         less of it with max_bytes, or fetch it as text."
    );
    ToolError::new("NotConverted", message).with(json!({"status": status}))
}

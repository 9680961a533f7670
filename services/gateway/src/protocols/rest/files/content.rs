//! The content of files. It is untrusted and may be a malicious page, so browsers are told to save
//! it, not to guess its type, and to run nothing in it.

use construct_proto::v1;
use futures::stream;
use http_body::Frame;
use http_body_util::StreamBody;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use prost::Message as _;
use tonic::{
    Status,
    body::Body,
    codegen::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header},
};

use super::FileRequest;
use crate::{
    deadline::Deadline,
    protocols::{
        TIMEOUT,
        call::{self, Answers, Call},
        errors,
    },
    status,
};

/// Characters that `filename*` does not escape (RFC 8187).
const UNESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
const SANDBOX_POLICY: HeaderValue = HeaderValue::from_static("default-src 'none'; sandbox");

impl FileRequest<'_> {
    pub(super) async fn content(&self, file: &str, is_head: bool) -> Response<Body> {
        let file = match self.get(file).await {
            Ok(file) => file,
            Err(refusal) => return errors::problem(&refusal),
        };
        let (spec, state) = (file.spec.unwrap_or_default(), file.status.unwrap_or_default());
        if state.state() != v1::FileState::Ready {
            let message = match state.state() {
                v1::FileState::Refused => format!("the file was refused: {}", state.reason),
                _ => "the file is not ready yet".to_owned(),
            };
            return errors::problem_with_status(
                StatusCode::CONFLICT,
                &status::precondition("NOT_READY", "file", message),
            );
        }
        let tag = format!("\"{}\"", state.sha256);
        let request = &self.head.headers;
        let mut headers = content_headers(&spec, &tag);
        if is_cached(request, &tag) {
            headers.remove(header::CONTENT_TYPE);
            return with(StatusCode::NOT_MODIFIED, headers, Body::empty());
        }
        let size = spec.size.unsigned_abs();
        let range = match range(request, &tag, size) {
            Ok(range) => range,
            Err(Unsatisfiable) => {
                let mut response = errors::problem_with_status(
                    StatusCode::RANGE_NOT_SATISFIABLE,
                    &Status::out_of_range(format!("the file has {size} bytes")),
                );
                set(response.headers_mut(), header::CONTENT_RANGE, format!("bytes */{size}"));
                return response;
            }
        };
        let (code, begin, length) = match range {
            None => (StatusCode::OK, 0, size),
            Some((begin, end)) => {
                set(
                    &mut headers,
                    header::CONTENT_RANGE,
                    format!("bytes {begin}-{}/{size}", end - 1),
                );
                (StatusCode::PARTIAL_CONTENT, begin, end - begin)
            }
        };
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
        if is_head || length == 0 {
            return with(code, headers, Body::empty());
        }
        let id = file.metadata.unwrap_or_default().id;
        let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let request_message =
            v1::DownloadFileRequest { file: id, offset: number(begin), length: number(length) }
                .encode_to_vec();
        let call = Call { method: &self.files.download, head: self.head };
        match Deadline::new(None, TIMEOUT)
            .begin(call.open(self.inner(), call::unary_body(&request_message)))
            .await
        {
            Ok(answers) => with(code, headers, pieces(answers)),
            Err(refusal) => errors::problem(&refusal),
        }
    }
}

/// Asks for the next piece when the client has taken the previous one. An error ends the connection
/// before everything was sent.
fn pieces(answers: Answers) -> Body {
    let pieces = stream::try_unfold(answers, async |mut answers| {
        let Some(message) = answers.next().await? else { return Ok::<_, Status>(None) };
        let piece = v1::DownloadFileResponse::decode(message);
        let piece = piece.map_err(|error| status::internal("an answer cannot be read", &error))?;
        Ok(Some((Frame::data(piece.data.into()), answers)))
    });
    Body::new(StreamBody::new(pieces))
}

fn with(code: StatusCode, headers: HeaderMap, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = code;
    *response.headers_mut() = headers;
    response
}

fn set(headers: &mut HeaderMap, name: HeaderName, value: String) {
    if let Ok(value) = HeaderValue::try_from(value) {
        headers.insert(name, value);
    }
}

/// The headers that describe the content, whatever range of it is sent.
fn content_headers(spec: &v1::FileSpec, tag: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    set(&mut headers, header::CONTENT_TYPE, spec.media_type.clone());
    set(&mut headers, header::ETAG, tag.to_owned());
    set(&mut headers, header::CONTENT_DISPOSITION, disposition(&spec.name));
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    // The content never changes, but the permission to read it does.
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CONTENT_SECURITY_POLICY, SANDBOX_POLICY);
    headers.append(header::VARY, HeaderValue::from_static("authorization, x-organization-id"));
    headers
}

/// Saves the file under its name, with an ASCII fallback for old clients.
fn disposition(name: &str) -> String {
    let plain = |letter: char| match letter {
        ' '..='~' if !matches!(letter, '"' | '\\' | '/' | '%') => letter,
        _ => '_',
    };
    let ascii: String = name.chars().map(plain).collect();
    if ascii == name {
        format!("attachment; filename=\"{ascii}\"")
    } else {
        format!(
            "attachment; filename=\"{ascii}\"; filename*=UTF-8''{}",
            utf8_percent_encode(name, UNESCAPED)
        )
    }
}

/// Whether the client already has the content.
fn is_cached(headers: &HeaderMap, tag: &str) -> bool {
    headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok()).any(
        |tags| {
            tags.split(',')
                .map(|candidate| candidate.trim().trim_start_matches("W/"))
                .any(|candidate| candidate == "*" || candidate == tag)
        },
    )
}

/// The range has no byte of the file.
#[derive(Debug, PartialEq, Eq)]
struct Unsatisfiable;

/// The requested range, its end excluded. Anything but a single range is ignored, and the whole
/// file is sent.
fn range(headers: &HeaderMap, tag: &str, size: u64) -> Result<Option<(u64, u64)>, Unsatisfiable> {
    let Some(value) = headers.get(header::RANGE).and_then(|value| value.to_str().ok()) else {
        return Ok(None);
    };
    // A range of other content is useless.
    if headers.get(header::IF_RANGE).is_some_and(|validator| validator.as_bytes() != tag.as_bytes())
    {
        return Ok(None);
    }
    let Some((first, last)) =
        value.strip_prefix("bytes=").and_then(|range| range.trim().split_once('-'))
    else {
        return Ok(None);
    };
    let number = |text: &str| {
        text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u64>().ok()).flatten()
    };
    let (begin, end) = match (first, last) {
        ("", last) => {
            let Some(last) = number(last) else { return Ok(None) };
            (size - last.min(size), size)
        }
        (first, "") => {
            let Some(first) = number(first) else { return Ok(None) };
            (first, size)
        }
        (first, last) => {
            let (Some(first), Some(last)) = (number(first), number(last)) else { return Ok(None) };
            if last < first {
                return Ok(None);
            }
            (first, last.saturating_add(1).min(size))
        }
    };
    if begin >= end { Err(Unsatisfiable) } else { Ok(Some((begin, end))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_follow_rfc_9110() {
        let tag = "\"abc\"";
        for (value, if_range, expected) in [
            ("bytes=0-0", None, Ok(Some((0, 1)))),
            ("bytes=2-", None, Ok(Some((2, 10)))),
            ("bytes=2-99", None, Ok(Some((2, 10)))),
            ("bytes=-3", None, Ok(Some((7, 10)))),
            ("bytes=-99", None, Ok(Some((0, 10)))),
            ("bytes=10-", None, Err(Unsatisfiable)),
            ("bytes=-0", None, Err(Unsatisfiable)),
            ("bytes=5-2", None, Ok(None)),
            ("bytes=0-1,3-4", None, Ok(None)),
            ("bytes=x-1", None, Ok(None)),
            ("bytes=-", None, Ok(None)),
            ("lines=0-1", None, Ok(None)),
            ("bytes=0-18446744073709551615", None, Ok(Some((0, 10)))),
            ("bytes=0-1", Some(tag), Ok(Some((0, 2)))),
            ("bytes=0-1", Some("\"other\""), Ok(None)),
        ] {
            let mut headers = HeaderMap::new();
            set(&mut headers, header::RANGE, value.to_owned());
            if let Some(if_range) = if_range {
                set(&mut headers, header::IF_RANGE, if_range.to_owned());
            }
            assert_eq!(range(&headers, tag, 10), expected, "{value} {if_range:?}");
        }
    }

    #[test]
    fn file_name_cannot_inject_headers() {
        for (name, expected) in [
            ("report.pdf", "attachment; filename=\"report.pdf\""),
            (
                "a\"; x=\"b",
                "attachment; filename=\"a_; x=_b\"; filename*=UTF-8''a%22%3B%20x%3D%22b",
            ),
            ("Über.txt", "attachment; filename=\"_ber.txt\"; filename*=UTF-8''%C3%9Cber.txt"),
        ] {
            assert_eq!(disposition(name), expected);
        }
    }

    #[test]
    fn cached_content_is_recognized_by_its_tag() {
        for (value, expected) in [
            ("\"a\"", true),
            ("W/\"a\"", true),
            ("\"b\", \"a\"", true),
            ("*", true),
            ("\"b\"", false),
            ("a", false),
        ] {
            let mut headers = HeaderMap::new();
            set(&mut headers, header::IF_NONE_MATCH, value.to_owned());
            assert_eq!(is_cached(&headers, "\"a\""), expected, "{value}");
        }
    }
}

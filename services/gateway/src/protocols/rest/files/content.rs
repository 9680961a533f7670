//! What a file says. It comes from somebody, and may be a page that wants to do something: browsers
//! save it, take it for nothing but what it is called, and run nothing of it.

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

use super::Work;
use crate::{
    deadline::Deadline,
    protocols::{
        TIMEOUT,
        call::{self, Answers, Call},
        errors,
    },
    status,
};

/// What stands in `filename*` as it is (RFC 8187).
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
const NOTHING: HeaderValue = HeaderValue::from_static("default-src 'none'; sandbox");

impl Work<'_> {
    pub(super) async fn content(&self, file: &str, is_head: bool) -> Response<Body> {
        let file = match self.get(file).await {
            Ok(file) => file,
            Err(refusal) => return errors::problem(&refusal),
        };
        let (spec, state) = (file.spec.unwrap_or_default(), file.status.unwrap_or_default());
        if state.state() != v1::FileState::Ready {
            let words = match state.state() {
                v1::FileState::Refused => format!("the file was refused: {}", state.reason),
                _ => "the file is not ready yet".to_owned(),
            };
            return errors::problem_as(
                StatusCode::CONFLICT,
                &status::precondition("NOT_READY", "file", words),
            );
        }
        let tag = format!("\"{}\"", state.sha256);
        let request = &self.head.headers;
        let mut headers = about(&spec, &tag);
        if known(request, &tag) {
            headers.remove(header::CONTENT_TYPE);
            return with(StatusCode::NOT_MODIFIED, headers, Body::empty());
        }
        let size = spec.size.unsigned_abs();
        let range = match range(request, &tag, size) {
            Ok(range) => range,
            Err(Unsatisfiable) => {
                let mut response = errors::problem_as(
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
        let wanted =
            v1::DownloadFileRequest { file: id, offset: number(begin), length: number(length) }
                .encode_to_vec();
        let call = Call { method: &self.files.download, head: self.head };
        match Deadline::new(None, TIMEOUT).begin(call.open(self.inner(), call::one(&wanted))).await
        {
            Ok(answers) => with(code, headers, pieces(answers)),
            Err(refusal) => errors::problem(&refusal),
        }
    }
}

/// The next piece is asked for when the client has taken the one before. What goes wrong halfway
/// ends the connection before all was sent.
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

/// What is said of the content, whatever of it is sent.
fn about(spec: &v1::FileSpec, tag: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    set(&mut headers, header::CONTENT_TYPE, spec.media_type.clone());
    set(&mut headers, header::ETAG, tag.to_owned());
    set(&mut headers, header::CONTENT_DISPOSITION, disposition(&spec.name));
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    // It never changes, but who may read it does.
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CONTENT_SECURITY_POLICY, NOTHING);
    headers.append(header::VARY, HeaderValue::from_static("authorization, x-organization-id"));
    headers
}

/// To be saved under its name; in ASCII for those who know nothing else.
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
            utf8_percent_encode(name, PLAIN)
        )
    }
}

/// Whether the client has it already.
fn known(headers: &HeaderMap, tag: &str) -> bool {
    headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok()).any(
        |tags| {
            tags.split(',')
                .map(|known| known.trim().trim_start_matches("W/"))
                .any(|known| known == "*" || known == tag)
        },
    )
}

/// No byte of the file is in the range.
#[derive(Debug, PartialEq, Eq)]
struct Unsatisfiable;

/// The range that is asked for, its end excluded. What is not one range is no question for one, and
/// answered with everything.
fn range(headers: &HeaderMap, tag: &str, size: u64) -> Result<Option<(u64, u64)>, Unsatisfiable> {
    let Some(value) = headers.get(header::RANGE).and_then(|value| value.to_str().ok()) else {
        return Ok(None);
    };
    // A part of something else is of no use.
    if headers.get(header::IF_RANGE).is_some_and(|wanted| wanted.as_bytes() != tag.as_bytes()) {
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
    fn a_range_is_what_rfc_9110_says() {
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
    fn a_name_cannot_say_anything_else_in_a_header() {
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
    fn what_the_client_has_is_told_by_its_tag() {
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
            assert_eq!(known(&headers, "\"a\""), expected, "{value}");
        }
    }
}

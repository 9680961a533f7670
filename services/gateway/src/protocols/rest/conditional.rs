//! Conditional requests (RFC 9110, section 13) for entities with versions. The version is the
//! entity tag, `"7"`, and `"7-gzip"` for a compressed response. Other entities have a revision that
//! some visible changes don't raise, so it cannot be a tag.

use construct_proto::v1::State;
use prost::Message as _;
use prost_reflect::{MessageDescriptor, MethodDescriptor};
use tonic::{
    Code, Status,
    codegen::http::{HeaderMap, HeaderName, HeaderValue, Method as Verb, header},
};
use tonic_types::StatusExt as _;

use super::routes::Route;
use crate::protocols::codec::invalid;

/// The version that no document has.
const NO_VERSION: i64 = i64::MAX;
/// The field with the expected version; 0 means none.
pub(super) const EXPECTED_FIELD: &str = "expected_version";
/// The suffix of the tag of a compressed response.
const GZIP_SUFFIX: &str = "-gzip";

/// Whether a method's response has a version.
pub(super) fn has_version(method: &MethodDescriptor) -> bool {
    method.output().full_name() == "construct.v1.State"
}

/// Whether a request may name an expected version.
pub(super) fn may_expect(request: &MessageDescriptor) -> bool {
    request.get_field_by_name(EXPECTED_FIELD).is_some()
}

/// The version that a changing request expects.
///
/// # Errors
/// `INVALID_ARGUMENT` for conditions that do not name one version.
pub(super) fn expected_version(
    headers: &HeaderMap,
    request: &MessageDescriptor,
) -> Result<Option<i64>, Status> {
    if !may_expect(request) {
        return Ok(None);
    }
    let (matches, none_match) =
        (tags(headers, &header::IF_MATCH), tags(headers, &header::IF_NONE_MATCH));
    match (matches.as_slice(), none_match.as_slice()) {
        ([], []) => Ok(None),
        ([], [any]) if any == "*" => Ok(Some(0)),
        // A weak tag does not identify one exact version.
        ([one], []) if one != "*" => Ok(Some(version(one).unwrap_or(NO_VERSION))),
        (_, []) => Err(invalid("if-match", "must be one strong entity tag")),
        _ => Err(invalid("if-none-match", "must be only `*` for a request that changes something")),
    }
}

/// Whether a status is the failure of a condition in the headers.
pub(super) fn is_condition_failure(
    headers: &HeaderMap,
    request: &MessageDescriptor,
    status: &Status,
) -> bool {
    let conditional =
        [header::IF_MATCH, header::IF_NONE_MATCH].iter().any(|name| headers.contains_key(name));
    conditional
        && may_expect(request)
        && status.code() == Code::Aborted
        && status.get_details_precondition_failure().is_some_and(|failure| {
            failure.violations.iter().any(|violation| violation.r#type == "VERSION")
        })
}

/// The version of a response, if it has one.
pub(super) fn response_version(method: &MethodDescriptor, answer: &[u8]) -> Option<i64> {
    let state = has_version(method).then(|| State::decode(answer).ok()).flatten()?;
    Some(state.version)
}

/// Whether the client already has this version.
pub(super) fn is_current(route: &Route, headers: &HeaderMap, current: i64) -> bool {
    let weak = |tag: &String| version(tag.strip_prefix("W/").unwrap_or(tag)) == Some(current);
    route.verb == Verb::GET
        && tags(headers, &header::IF_NONE_MATCH).iter().any(|tag| tag == "*" || weak(tag))
}

/// The entity tag of a version.
pub(super) fn tag(version: i64, is_compressed: bool) -> Option<HeaderValue> {
    HeaderValue::try_from(format!("\"{version}{}\"", if is_compressed { GZIP_SUFFIX } else { "" }))
        .ok()
}

/// The tags in all headers of this name.
fn tags(headers: &HeaderMap, name: &HeaderName) -> Vec<String> {
    let lines = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    lines
        .flat_map(|line| line.split(','))
        .map(|tag| tag.trim().to_owned())
        .filter(|tag| !tag.is_empty())
        .collect()
}

/// The version of a strong tag.
fn version(tag: &str) -> Option<i64> {
    let inner = tag.strip_prefix('"')?.strip_suffix('"')?;
    inner.strip_suffix(GZIP_SUFFIX).unwrap_or(inner).parse().ok().filter(|version| *version > 0)
}

#[cfg(test)]
mod tests {
    use construct_proto::DESCRIPTORS;

    use super::*;

    fn headers(fields: &[(HeaderName, &'static str)]) -> HeaderMap {
        fields.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn condition_names_one_version_or_none() {
        let put =
            DESCRIPTORS.get_message_by_name("construct.v1.PutStateRequest").expect("it is there");
        let wants = |fields: &[(HeaderName, &'static str)]| {
            expected_version(&headers(fields), &put).map_err(|status| status.code())
        };
        let (matches, none) = (header::IF_MATCH, header::IF_NONE_MATCH);
        assert_eq!(wants(&[]), Ok(None));
        for tag in ["\"7\"", " \"7-gzip\" "] {
            assert_eq!(wants(&[(matches.clone(), tag)]), Ok(Some(7)), "{tag}");
        }
        for tag in ["W/\"7\"", "7", "\"x\"", "\"0\"", "\"-1\""] {
            assert_eq!(wants(&[(matches.clone(), tag)]), Ok(Some(NO_VERSION)), "{tag}");
        }
        assert_eq!(wants(&[(none.clone(), "*")]), Ok(Some(0)));
        for wrong in [
            vec![(matches.clone(), "*")],
            vec![(matches.clone(), "\"1\", \"2\"")],
            vec![(none.clone(), "\"1\"")],
            vec![(matches, "\"1\""), (none, "*")],
        ] {
            assert_eq!(wants(&wrong), Err(Code::InvalidArgument), "{wrong:?}");
        }
        let task =
            DESCRIPTORS.get_message_by_name("construct.v1.UpdateTaskRequest").expect("it is there");
        assert_eq!(
            expected_version(&headers(&[(header::IF_MATCH, "\"7\"")]), &task)
                .expect("it is not looked at"),
            None
        );
    }
}

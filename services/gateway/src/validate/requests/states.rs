//! Documents that clients keep. What is wrong with one is told without a word of what it says.

use std::collections::BTreeMap;

use construct_domain::state::{MAX_DEPTH, NAMES, json_depth, parse_name};
use construct_proto::v1::{PutStateRequest, WatchStatesRequest};
use serde::de::IgnoredAny;
use tonic::Status;

use crate::validate::Violations;

pub(crate) fn put_state(request: &PutStateRequest) -> Result<(), Status> {
    let mut violations = Violations::in_request(request);
    if request.restore == 0 {
        json(&mut violations, "json", &request.json);
    } else {
        violations.require(request.json.is_empty(), "json", || {
            "must be empty when an earlier version is put".into()
        });
    }
    violations.finish()
}

/// Returns the names that are watched, each with the version that the client has.
pub(crate) fn watch_states(
    request: &WatchStatesRequest,
) -> Result<BTreeMap<&'static str, i64>, Status> {
    let mut violations = Violations::in_request(request);
    let mut watched = BTreeMap::new();
    if request.states.is_empty() {
        watched.extend(NAMES.map(|name| (name, 0)));
    }
    watched.extend(request.states.iter().filter_map(|text| parse_name(text)).map(|name| (name, 0)));
    match cursor(&request.cursor) {
        // Versions of what is not watched say nothing here.
        Some(has) => has.into_iter().for_each(|(name, version)| {
            watched.entry(name).and_modify(|known| *known = version);
        }),
        None => violations.add("cursor", "is the cursor of no event"),
    }
    violations.finish().map(|()| watched)
}

/// The versions in a cursor.
fn cursor(text: &str) -> Option<Vec<(&'static str, i64)>> {
    if text.is_empty() {
        return Some(Vec::new());
    }
    let versions = text.split(',').map(|id| {
        let (text, version) = id.split_once('@')?;
        let version = version.parse::<i64>().ok().filter(|version| *version > 0)?;
        Some((parse_name(text)?, version))
    });
    versions.collect()
}

/// The text is looked through, not read: numbers of any size and precision are somebody's.
fn json(violations: &mut Violations, field: &str, json: &str) {
    if violations.concern(field) {
        return;
    }
    // Of an error only the place is told.
    if let Err(error) = serde_json::from_str::<IgnoredAny>(json) {
        let (line, column) = (error.line(), error.column());
        return violations
            .add(field, format!("is not JSON, as line {line}, column {column} shows"));
    }
    violations
        .require(json.trim_start().starts_with('{'), field, || "must be a JSON object".into());
    violations.require(json_depth(json) <= MAX_DEPTH, field, || {
        format!("must not have more than {MAX_DEPTH} values within each other")
    });
}

#[cfg(test)]
mod tests {
    use construct_domain::state::MAX_BYTES;

    use super::*;
    use crate::validate::tests::fields;

    fn put(json: &str) -> Result<(), Status> {
        put_state(&PutStateRequest {
            state: "settings".into(),
            json: json.into(),
            ..PutStateRequest::default()
        })
    }

    #[test]
    fn a_document_is_an_object_of_bounded_size_and_depth_with_any_numbers() {
        let nested =
            |depth: usize| format!("{{\"a\": {}{}}}", "[".repeat(depth - 1), "]".repeat(depth - 1));
        let long = |bytes: usize| format!("{{\"a\": \"{}\"}}", "x".repeat(bytes - 9));
        for good in [
            "{}",
            " {\"a\": 1}\n",
            r#"{"n": 12345678901234567890.12345678901234567890, "m": 1e9999, "a": 1, "a": 2}"#,
            nested(MAX_DEPTH).as_str(),
            long(MAX_BYTES).as_str(),
        ] {
            put(good)
                .unwrap_or_else(|status| panic!("{}: {status:?}", &good[..good.len().min(80)]));
        }
        for bad in [
            "",
            "[]",
            "7",
            "\"{}\"",
            "{} {}",
            "{\"a\": }",
            "{\"a\": \"\u{0}\"}",
            nested(MAX_DEPTH + 1).as_str(),
            // Deep enough to overflow the stack of whoever reads it by recursion.
            "[".repeat(MAX_BYTES).as_str(),
            nested(400_000).as_str(),
            long(MAX_BYTES + 1).as_str(),
        ] {
            let status = put(bad).expect_err(&bad[..bad.len().min(80)]);
            assert_eq!(fields(&status), ["json"], "{}", status.message());
        }
    }

    #[test]
    fn what_is_wrong_with_a_document_does_not_say_what_it_says() {
        let status = put("{\"apiKey\": \"sk-hunter2\", sk-hunter2}").expect_err("it is no JSON");
        assert!(!format!("{status:?}").contains("hunter2"), "{status:?}");
        assert!(status.message().contains("line 1, column 2"), "{}", status.message());
    }

    #[test]
    fn a_cursor_says_what_the_client_has_of_what_it_watches() {
        let watch = |states: &[&str], cursor: &str| {
            let states = states.iter().map(|state| (*state).to_owned()).collect();
            watch_states(&WatchStatesRequest { states, shared: false, cursor: cursor.into() })
        };
        let all = watch(&[], "").expect("everything");
        assert!(all.len() == NAMES.len() && all.values().all(|version| *version == 0), "{all:?}");
        let some = watch(&["settings", "pinned"], "pinned@7,storage@3").expect("two");
        assert_eq!(some, BTreeMap::from([("pinned", 7), ("settings", 0)]));
        for wrong in
            ["7", "settings", "settings@", "settings@0", "settings@-1", "sessions@1", "settings@1,"]
        {
            let status = watch(&[], wrong).expect_err(wrong);
            assert_eq!(fields(&status), ["cursor"], "{wrong}");
        }
        assert_eq!(fields(&watch(&["nothing"], "").expect_err("no such document")), ["states[0]"]);
        assert_eq!(fields(&watch(&["settings"; 9], "").expect_err("too many")), ["states"]);
    }
}

use std::time::{Duration, Instant};

use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD, URL_SAFE},
};

use serde_json::json;

use super::*;

const HANDLE: &str = "{{secret:S:0123456789abcdef}}";

fn scrub(value: &str, text: &str) -> String {
    Scrubber::new([(value, HANDLE)]).text(text.to_owned(), false)
}

#[test]
fn every_usual_way_to_write_a_value_is_found() {
    let value = "p/w+d?é \"<&'>\\ ~end=";
    let json = serde_json::to_string(value).expect("JSON");
    let cases = [
        value.to_owned(),
        STANDARD.encode(value),
        STANDARD.encode(value).trim_end_matches('=').to_owned(),
        URL_SAFE.encode(value),
        "p%2Fw%2Bd%3F%C3%A9%20%22%3C%26%27%3E%5C%20~end%3D".to_owned(),
        "p%2fw%2bd%3f%c3%a9%20%22%3c%26%27%3e%5c%20~end%3d".to_owned(),
        // encodeURIComponent, encodeURI, and a form.
        "p%2Fw%2Bd%3F%C3%A9%20%22%3C%26'%3E%5C%20~end%3D".to_owned(),
        "p/w+d?%C3%A9%20%22%3C&'%3E%5C%20~end=".to_owned(),
        "p%2Fw%2Bd%3F%C3%A9+%22%3C%26%27%3E%5C+%7Eend%3D".to_owned(),
        json[1..json.len() - 1].to_owned(),
        json[1..json.len() - 1].replace('/', "\\/"),
        json[1..json.len() - 1].replace('é', "\\u00e9"),
        json[1..json.len() - 1].replace('é', "\\u00e9").replace('/', "\\/"),
        json[1..json.len() - 1]
            .replace('<', "\\u003c")
            .replace('>', "\\u003e")
            .replace('&', "\\u0026"),
        value
            .replace('&', "&amp;")
            .replace('<', "&lt;")
            .replace('>', "&gt;")
            .replace('"', "&quot;")
            .replace('\'', "&#39;"),
        value.bytes().map(|byte| format!("{byte:02x}")).collect(),
        value.bytes().map(|byte| format!("{byte:02X}")).collect(),
    ];
    for form in cases {
        assert_eq!(
            scrub(value, &format!("before {form} after")),
            format!("before {HANDLE} after"),
            "{form}"
        );
    }
}

#[test]
fn a_value_is_found_in_the_base64_of_something_longer() {
    let value = "t0ken-of-many-letters";
    for before in ["", "a", "ab", "user:", "user:name:"] {
        for after in ["", "x", "xy", "xyz"] {
            for encoded in [
                STANDARD.encode(format!("{before}{value}{after}")),
                URL_SAFE.encode(format!("{before}{value}{after}")),
            ] {
                let scrubbed = scrub(value, &encoded);
                assert!(scrubbed.contains(HANDLE), "{before:?} {after:?}: {scrubbed}");
                // What is left of the value are a few bits at its ends.
                let left = scrubbed.replace(HANDLE, "");
                let most = STANDARD.encode(format!("{before}{after}")).len() + 8;
                assert!(left.len() <= most, "{before:?} {after:?}: {scrubbed}");
            }
        }
    }
}

#[test]
fn white_space_around_a_value_need_not_come_back() {
    assert_eq!(scrub(" key-material\n", "[key-material]"), format!("[{HANDLE}]"));
    assert_eq!(scrub("key-material\n", "key-material\nnext"), format!("{HANDLE}next"));
}

#[test]
fn where_a_text_was_cut_the_beginning_of_a_value_goes_too() {
    let scrubber = Scrubber::new([("abcdefghijkl", HANDLE)]);
    for length in 0..12 {
        let text = format!("text {}", &"abcdefghijkl"[..length]);
        let expected = if length < PARTIAL { text.clone() } else { format!("text {HANDLE}") };
        assert_eq!(scrubber.text(text.clone(), true), expected);
        assert_eq!(scrubber.text(text.clone(), false), text, "nothing was cut");
    }
    assert_eq!(
        scrubber.text("abcdefghijklabcdef".to_owned(), true),
        HANDLE,
        "one handle for what follows on itself"
    );
}

#[test]
fn values_that_overlap_leave_nothing_behind() {
    assert_eq!(scrub("aaaaaaaa", &"a".repeat(21)), HANDLE);
    assert_eq!(scrub("abcabcabc", "xabcabcabcabcabcx"), format!("x{HANDLE}x"));
    let scrubber = Scrubber::new([("one-two-three", "{{1}}"), ("three-four-five", "{{2}}")]);
    assert_eq!(scrubber.text("one-two-three-four-five".to_owned(), false), "{{1}}");
    assert_eq!(scrubber.text("three-four-five one-two-three".to_owned(), false), "{{2}} {{1}}");
}

#[test]
fn a_value_is_found_in_every_text_and_name_of_a_result() {
    let scrubber = Scrubber::new([("abcdefgh", HANDLE)]);
    let mut found = json!({"a": ["1 abcdefgh", {"b": "abcdefgh"}], "abcdefgh": {"x abcdefgh": null}, "c": [1, true, "abcdefg"]});
    scrubber.value(&mut found);
    let name = format!("x {HANDLE}");
    let expected = json!({"a": [format!("1 {HANDLE}"), {"b": HANDLE}], HANDLE: {name: null}, "c": [1, true, "abcdefg"]});
    assert_eq!(found, expected);
}

#[test]
fn other_text_stays_as_it_is() {
    let text = "ein schöner Text, {{secret:S:0123456789abcdef}}, aGVsbG8=";
    assert_eq!(scrub("something-else", text), text);
    assert_eq!(Scrubber::default().text(text.to_owned(), true), text);
    assert_eq!(
        scrub("something-else", "something-elsx something-els"),
        "something-elsx something-els"
    );
}

#[test]
fn hostile_repetitions_take_no_longer_than_their_length() {
    let began = Instant::now();
    let almost = format!("{}b", "a".repeat(60_000));
    for (value, text) in [
        ("a".repeat(60_000), "a".repeat(1 << 20)),
        // Each place could be its beginning, and only the last byte tells that it is not.
        (almost, "a".repeat(1 << 20)),
    ] {
        let scrubbed = scrub(&value, &text);
        assert!(
            scrubbed.len() < 100 || !scrubbed.contains(&value),
            "{} bytes are left",
            scrubbed.len()
        );
    }
    assert!(began.elapsed() < Duration::from_secs(20), "it took {:?}", began.elapsed());
}

#[test]
fn nothing_secret_is_printed() {
    let scrubber = Scrubber::new([("very-secret-value", HANDLE)]);
    assert!(!format!("{scrubber:?}").contains("very"), "{scrubber:?}");
}

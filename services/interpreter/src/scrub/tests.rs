use std::time::{Duration, Instant};

use proptest::prelude::*;

use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD, URL_SAFE},
};

use serde_json::json;

use super::*;

const HANDLE: &str = "{{secret:S:0123456789abcdef}}";

fn scrubber(secrets: &[(&str, &str)]) -> Scrubber {
    Scrubber::new(secrets.iter().map(|(value, handle)| Arc::new(Pattern::new(value, handle))))
}

fn scrub(value: &str, text: &str) -> String {
    scrubber(&[(value, HANDLE)]).text(text.to_owned())
}

#[test]
fn every_usual_encoding_is_found() {
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
fn value_inside_longer_base64_is_found() {
    let value = "t0ken-of-many-letters";
    for before in ["", "a", "ab", "user:", "user:name:"] {
        for after in ["", "x", "xy", "xyz"] {
            for encoded in [
                STANDARD.encode(format!("{before}{value}{after}")),
                URL_SAFE.encode(format!("{before}{value}{after}")),
            ] {
                let scrubbed = scrub(value, &encoded);
                assert!(scrubbed.contains(HANDLE), "{before:?} {after:?}: {scrubbed}");
                // Only a few bits at the ends of the value remain.
                let left = scrubbed.replace(HANDLE, "");
                let most = STANDARD.encode(format!("{before}{after}")).len() + 8;
                assert!(left.len() <= most, "{before:?} {after:?}: {scrubbed}");
            }
        }
    }
}

#[test]
fn trimmed_value_is_found() {
    assert_eq!(scrub(" key-material\n", "[key-material]"), format!("[{HANDLE}]"));
    assert_eq!(scrub("key-material\n", "key-material\nnext"), format!("{HANDLE}next"));
}

/// A text of base64 or hexadecimal digits in lines.
fn wrapped(text: &str, columns: usize, line_break: &str) -> String {
    let lines: Vec<&str> = text
        .as_bytes()
        .chunks(columns)
        .map(|line| std::str::from_utf8(line).expect("ASCII"))
        .collect();
    lines.join(line_break)
}

#[test]
fn encoded_value_is_found_across_line_breaks() {
    let long = "x7Qw9Zk2/Lm4+Vt8.".repeat(30);
    for value in ["t0ken-of-letters", "x7Qw9Zk2/Lm4+Vt8&Rp1eNd5Yc3Hs6Jf0AbUi2", &long] {
        let scrubber = scrubber(&[(value, HANDLE)]);
        for before in 0..80 {
            let content = format!("{}{value} and more", "-".repeat(before));
            let hexadecimal: String = content.bytes().map(|byte| format!("{byte:02x}")).collect();
            for encoded in [STANDARD.encode(&content), URL_SAFE.encode(&content), hexadecimal] {
                for columns in [60, 64, 76] {
                    for line_break in ["\n", "\r\n", "\\n", "\\r\\n"] {
                        let scrubbed = scrubber.text(wrapped(&encoded, columns, line_break));
                        assert!(
                            scrubbed.contains(HANDLE),
                            "{columns} {line_break:?} {before}: {scrubbed}"
                        );
                        let most = encoded.len() - value.len() * 4 / 3 + HANDLE.len() + 8;
                        assert!(
                            scrubbed.len() <= most + encoded.len() / 15,
                            "{columns} {before}: {scrubbed}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn line_breaks_of_no_encoder_are_kept() {
    let value = "x7Qw9Zk2Lm4Vt8Rp1";
    let encoded = STANDARD.encode(value);
    // Lines of four characters are a list of words, not base64.
    let text = wrapped(&encoded, 4, "\n");
    assert_eq!(scrub(value, &text), text);
    let text = format!("{value}\n\n{encoded}\n{}\n{value}", "y".repeat(100));
    assert_eq!(scrub(value, &text), format!("{HANDLE}\n\n{HANDLE}\n{}\n{HANDLE}", "y".repeat(100)));
}

#[test]
fn part_of_value_is_kept() {
    let scrubber = scrubber(&[("abcdefghijkl", HANDLE)]);
    for length in 0..12 {
        let text = format!("text {}", &"abcdefghijkl"[..length]);
        assert_eq!(scrubber.text(text.clone()), text);
    }
    assert_eq!(scrubber.text("abcdefghijklabcdef".to_owned()), format!("{HANDLE}abcdef"));
    // A value across the end is replaced as a whole.
    assert_eq!(scrubber.beginning("text abcdefghijkl".to_owned(), 8), format!("text {HANDLE}"));
    assert_eq!(scrubber.beginning("text abcdefghijkm".to_owned(), 8), "text abc");
}

#[test]
fn overlapping_values_leave_no_rest() {
    assert_eq!(scrub("aaaaaaaa", &"a".repeat(21)), HANDLE);
    assert_eq!(scrub("abcabcabc", "xabcabcabcabcabcx"), format!("x{HANDLE}x"));
    let scrubber = scrubber(&[("one-two-three", "{{1}}"), ("three-four-five", "{{2}}")]);
    assert_eq!(scrubber.text("one-two-three-four-five".to_owned()), "{{1}}");
    assert_eq!(scrubber.text("three-four-five one-two-three".to_owned()), "{{2}} {{1}}");
}

#[test]
fn value_is_scrubbed_in_strings_and_field_names() {
    let scrubber = scrubber(&[("abcdefgh", HANDLE)]);
    let mut found = json!({"a": ["1 abcdefgh", {"b": "abcdefgh"}], "abcdefgh": {"x abcdefgh": null}, "c": [1, true, "abcdefg"]});
    scrubber.value(&mut found);
    let name = format!("x {HANDLE}");
    let expected = json!({"a": [format!("1 {HANDLE}"), {"b": HANDLE}], HANDLE: {name: null}, "c": [1, true, "abcdefg"]});
    assert_eq!(found, expected);
}

#[test]
fn other_text_is_unchanged() {
    let text = "ein schöner Text, {{secret:S:0123456789abcdef}}, aGVsbG8=";
    assert_eq!(scrub("something-else", text), text);
    assert_eq!(Scrubber::default().text(text.to_owned()), text);
    assert_eq!(
        scrub("something-else", "something-elsx something-els"),
        "something-elsx something-els"
    );
}

/// Neither the time nor the result reveals how much of a value a text contains.
#[test]
fn hostile_repetitions_take_linear_time() {
    let began = Instant::now();
    let almost = format!("{}b", "a".repeat(60_000));
    // The value could begin at each position; only the last byte differs.
    let text = "a".repeat(1 << 20);
    assert_eq!(scrub(&almost, &text), text);
    assert_eq!(scrub(&"a".repeat(60_000), &text), HANDLE);
    let long: String = (0..9_000).map(|number| format!("{number:x}.")).collect();
    let beginnings = long[..5_000].repeat(300);
    assert_eq!(scrub(&long, &beginnings), beginnings);
    assert!(began.elapsed() < Duration::from_secs(20), "it took {:?}", began.elapsed());
}

proptest! {
    /// Texts of almost nothing but forms: every occurrence of every form is found, and nothing
    /// else.
    #[test]
    fn matches_equal_those_of_a_plain_search(value in "[ab]{8,40}", text in "[ab612]{0,200}", times in 0..3_usize) {
        let text = format!("{text}{}{text}", value.repeat(times));
        let scrubber = scrubber(&[(&value, HANDLE)]);
        let mut hidden = vec![false; text.len()];
        for (form, _) in forms::all_forms(&value) {
            for start in 0..text.len() {
                if text.as_bytes()[start..].starts_with(&form) {
                    hidden[start..start + form.len()].fill(true);
                }
            }
        }
        let mut found = vec![false; text.len()];
        for SecretMatch { range, .. } in scrubber.find(text.as_bytes()) {
            prop_assert!(found[range.clone()].iter().all(|found| !found), "{range:?} overlaps");
            found[range].fill(true);
        }
        prop_assert_eq!(found, hidden);
    }

    /// A prefix is scrubbed like the whole text if the margin behind it is known.
    #[test]
    fn margin_suffices_at_every_cut(
        before in "[a-z]{0,90}",
        value in "[a-zA-Z0-9/+]{8,60}",
        after in "[a-z]{0,300}",
        columns in prop_oneof![Just(60_usize), Just(64), Just(76), Just(1000)],
        way in 0..3_u8,
        cut in 0..500_usize,
    ) {
        let content = format!("{before}{value}{after}");
        let text = match way {
            0 => content,
            1 => wrapped(&STANDARD.encode(content), columns, "\r\n"),
            _ => wrapped(&STANDARD.encode(content), columns, "\\r\\n"),
        };
        let scrubber = scrubber(&[(&value, HANDLE)]);
        let cut = cut.min(text.len());
        let known = text[..(cut + scrubber.margin()).min(text.len())].to_owned();
        prop_assert_eq!(scrubber.beginning(known, cut), scrubber.beginning(text, cut));
    }
}

#[test]
fn debug_output_has_no_secret() {
    let scrubber = scrubber(&[("very-secret-value", HANDLE)]);
    assert!(!format!("{scrubber:?}").contains("very"), "{scrubber:?}");
}

//! Long arguments as a person is shown them who is to approve them.

use serde_json::Value;

/// How much of each text is shown when not everything can be, in bytes; less where even that is too much.
const LONGEST: usize = 16 * 1024;
const SHORTEST: usize = 64;

/// Arguments as JSON of at most `limit` bytes. Where they are longer, their long texts are cut: everything that is not long is seen
/// in full, whatever stands before it.
pub(super) fn arguments(arguments: &Value, limit: usize) -> String {
    let whole = arguments.to_string();
    if whole.len() <= limit {
        return whole;
    }
    let mut longest = LONGEST;
    while longest >= SHORTEST {
        let mut shown = arguments.clone();
        shorten(&mut shown, longest);
        let shown = shown.to_string();
        if shown.len() <= limit {
            return shown;
        }
        longest /= 2;
    }
    // So many short texts that they are too long together.
    whole[..whole.floor_char_boundary(limit)].to_owned()
}

fn shorten(value: &mut Value, longest: usize) {
    match value {
        Value::String(text) if text.len() > longest => {
            let left_out = text.len() - text.floor_char_boundary(longest);
            text.truncate(text.floor_char_boundary(longest));
            text.push_str(&format!("[… {left_out} more bytes …]"));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| shorten(item, longest)),
        Value::Object(fields) => fields.values_mut().for_each(|field| shorten(field, longest)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_short_is_seen_whatever_long_text_stands_before_it() {
        let long = json!({"content": "é".repeat(100_000), "path": "secrets/key", "list": ["x".repeat(70_000), 1]});
        let shown = arguments(&long, 64 * 1024);
        assert!(shown.len() <= 64 * 1024, "{}", shown.len());
        let shown: Value = serde_json::from_str(&shown).expect("it is whole");
        assert_eq!((&shown["path"], &shown["list"][1]), (&json!("secrets/key"), &json!(1)));
        let text = shown["content"].as_str().expect("a text");
        assert!(text.starts_with("ééé") && text.ends_with("[… 183616 more bytes …]"), "{}", &text[text.len() - 40..]);
        assert_eq!(arguments(&json!({"a": 1}), 64), r#"{"a":1}"#);
    }

    #[test]
    fn very_many_texts_are_cut_at_the_limit() {
        let many: Vec<String> = (0..10_000).map(|number| format!("{number} é")).collect();
        let shown = arguments(&json!(many), 1000);
        assert!((990..=1000).contains(&shown.len()), "{}", shown.len());
    }
}

//! Long arguments as a person is shown them who is to approve them.

use serde_json::Value;

/// How much of each text is shown when not everything can be, in bytes; less where even that is too much.
const LONGEST: usize = 16 * 1024;
const SHORTEST: usize = 64;

/// Of a list or an object this many entries are shown for each so many bytes that a text may have.
const BYTES_PER_ENTRY: usize = 16;

/// Arguments as JSON of at most `limit` bytes. Where they are longer, their long texts and lists are cut: everything that is not long is
/// seen in full, whatever stands before it.
pub(super) fn arguments(arguments: &Value, limit: usize) -> String {
    let whole = arguments.to_string();
    if whole.len() <= limit {
        return whole;
    }
    let mut longest = LONGEST;
    while longest >= SHORTEST {
        let shown = shorten(arguments, longest).to_string();
        if shown.len() <= limit {
            return shown;
        }
        longest /= 2;
    }
    // Nested so widely that even its ends are too long together.
    whole[..whole.floor_char_boundary(limit)].to_owned()
}

fn shorten(value: &Value, longest: usize) -> Value {
    let most = longest / BYTES_PER_ENTRY;
    match value {
        Value::String(text) => Value::String(cut(text, longest)),
        Value::Array(items) => {
            let shown = items.iter().take(most).map(|item| shorten(item, longest));
            let left_out = items.len().saturating_sub(most);
            shown.chain((left_out > 0).then(|| Value::String(format!("[… {left_out} more …]")))).collect()
        }
        Value::Object(fields) => {
            let mut shown = serde_json::Map::new();
            for (name, field) in fields.iter().take(most) {
                insert(&mut shown, cut(name, longest), shorten(field, longest));
            }
            let left_out = fields.len().saturating_sub(most);
            if left_out > 0 {
                insert(&mut shown, "…".to_owned(), Value::String(format!("[… {left_out} more …]")));
            }
            Value::Object(shown)
        }
        other => other.clone(),
    }
}

/// Adds a field whose name may have been cut to that of another one: each is seen.
fn insert(fields: &mut serde_json::Map<String, Value>, mut name: String, field: Value) {
    while fields.contains_key(&name) {
        name.push('\'');
    }
    fields.insert(name, field);
}

fn cut(text: &str, longest: usize) -> String {
    let shown = &text[..text.floor_char_boundary(longest)];
    match text.len() - shown.len() {
        0 => shown.to_owned(),
        left_out => format!("{shown}[… {left_out} more bytes …]"),
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
    fn long_lists_and_names_are_cut_too() {
        let many: Vec<String> = (0..100_000).map(|number| format!("{number} é")).collect();
        let fields: serde_json::Map<String, Value> =
            (0..100_000).map(|number| (format!("f{number:06}"), json!(1))).collect();
        let (name, twin) = ("n".repeat(100_000), format!("{}m", "n".repeat(99_999)));
        let long = json!({"a": many, "b": fields, "c": {name: 1, twin: 2}, "path": "secrets/key"});
        let shown = arguments(&long, 64 * 1024);
        assert!(shown.len() <= 64 * 1024, "{}", shown.len());
        let shown: Value = serde_json::from_str(&shown).expect("it is whole");
        assert_eq!(shown["path"], "secrets/key");
        let list = shown["a"].as_array().expect("a list");
        let end = format!("[… {} more …]", 100_000 - (list.len() - 1));
        assert_eq!((&list[0], list.last()), (&json!("0 é"), Some(&json!(end))));
        assert!(shown["b"]["…"].as_str().is_some_and(|text| text.contains("more")), "{}", shown["b"]);
        let cut = shown["c"].as_object().expect("fields");
        assert_eq!(cut.len(), 2, "each is seen, although the names begin alike");
        assert!(cut.keys().any(|name| name.ends_with("more bytes …]")), "{cut:?}");
    }

    #[test]
    fn what_is_nested_too_widely_is_cut_at_the_limit() {
        let mut wide = json!("é");
        for _ in 0..6 {
            wide = json!(vec![wide; 4]);
        }
        let shown = arguments(&wide, 1000);
        assert!((990..=1000).contains(&shown.len()), "{}", shown.len());
    }
}

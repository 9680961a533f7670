//! Documents that clients keep: which there are, and what one may be.

/// What documents can be called. There is at most one of each name for an organization, and for
/// each of its members.
pub const NAMES: [&str; 8] = [
    "designs",
    "hook-states",
    "mcp-states",
    "pinned",
    "project-settings",
    "settings",
    "skill-states",
    "storage",
];
/// Most bytes of a document.
pub const MAX_BYTES: usize = 1024 * 1024;
/// Most values within each other, the document itself counted. Clients read documents by recursion.
pub const MAX_DEPTH: usize = 64;
/// Earlier versions that are kept of each document.
pub const VERSIONS_KEPT: u32 = 10;

/// The name, if it is one that a document can have.
pub fn name(text: &str) -> Option<&'static str> {
    NAMES.into_iter().find(|name| *name == text)
}

/// How many values stand within each other in a text that is JSON: of `{"a": [1]}` it is 2, objects
/// and arrays counted.
pub fn depth(json: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let (mut quoted, mut escaped) = (false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'{' | b'[' if !quoted => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' if !quoted => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_known_and_in_order() {
        assert!(NAMES.is_sorted());
        assert_eq!(name("settings"), Some("settings"));
        for wrong in ["", "Settings", "settings.json", "sessions"] {
            assert_eq!(name(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_stands_within_each_other_is_counted_and_brackets_in_texts_are_not() {
        for (json, expected) in [
            ("{}", 1),
            ("7", 0),
            (r#"{"a": [1], "b": {}}"#, 2),
            (r#"{"[[{": "}]\"[[", "b\\": [[]]}"#, 3),
            (r#"[{"a": {}}, {"a": {}}]"#, 3),
        ] {
            assert_eq!(depth(json), expected, "{json}");
        }
    }
}

//! Documents that clients store: their names and limits.

/// The names a document can have. An organization, and each of its members, has at most one
/// document of each name.
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
/// Maximum size of a document.
pub const MAX_BYTES: usize = 1024 * 1024;
/// Maximum nesting depth of the values in a document, the document itself included. Clients parse
/// documents recursively.
pub const MAX_DEPTH: usize = 64;
/// Number of earlier versions that are kept of each document.
pub const VERSIONS_KEPT: u32 = 10;

/// Returns the name if a document can have it.
pub fn parse_name(text: &str) -> Option<&'static str> {
    NAMES.into_iter().find(|name| *name == text)
}

/// The nesting depth of a JSON text: 2 for `{"a": [1]}`. Objects and arrays count.
pub fn json_depth(json: &str) -> usize {
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
    fn only_listed_names_are_valid() {
        assert!(NAMES.is_sorted());
        assert_eq!(parse_name("settings"), Some("settings"));
        for wrong in ["", "Settings", "settings.json", "sessions"] {
            assert_eq!(parse_name(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn depth_counts_containers_and_ignores_strings() {
        for (json, expected) in [
            ("{}", 1),
            ("7", 0),
            (r#"{"a": [1], "b": {}}"#, 2),
            (r#"{"[[{": "}]\"[[", "b\\": [[]]}"#, 3),
            (r#"[{"a": {}}, {"a": {}}]"#, 3),
        ] {
            assert_eq!(json_depth(json), expected, "{json}");
        }
    }
}

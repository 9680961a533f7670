//! Names of archive entries. Git allows neither `..` nor absolute paths, so an archive with them is
//! hostile. Unusual names are allowed, and skipped.

use std::collections::BTreeMap;

use unicode_normalization::UnicodeNormalization as _;

use super::{Limit, Limits, SnapshotError};
use crate::repository::SkipReason;

/// Reserved names of Git and of the scanner, at any level (case-insensitive).
const RESERVED: [&str; 2] = [".git", ".construct"];

/// Returns a usable name, or why the entry is skipped.
pub(super) fn check_name<'a>(
    name: &'a [u8],
    limits: &Limits,
) -> Result<Result<&'a str, SkipReason>, SnapshotError> {
    let refuse = |reason| Err(SnapshotError::hostile(reason, name));
    if name.contains(&0) {
        return refuse("a name has a zero byte");
    }
    if name.starts_with(b"/") {
        return refuse("a path is absolute");
    }
    // Archives of a folder start with `./`, and folders end with a slash.
    let path = name.strip_suffix(b"/").unwrap_or(name);
    let path = path.strip_prefix(b"./").unwrap_or(path);
    if name.len() > limits.path_bytes {
        return Err(SnapshotError::exceeded(Limit::PathBytes, name));
    }
    let parts = || path.split(|byte| *byte == b'/');
    // One more than the limit, because archives of forges have one root folder.
    if parts().count() > limits.depth.saturating_add(2) {
        return Err(SnapshotError::exceeded(Limit::Depth, name));
    }
    if parts().any(|part| part == b"..") {
        return refuse("a path leads upwards");
    }
    if path == b"." || path.is_empty() {
        return Ok(Ok(""));
    }
    if parts().any(|part| part.is_empty() || part == b"." || part.len() > 255) {
        return refuse("a path has an empty, dotted or overlong part");
    }
    let Ok(text) = str::from_utf8(path) else { return Ok(Err(SkipReason::OddName)) };
    if text.chars().any(|c| c == '\\' || c.is_control() || is_direction_mark(c)) {
        return Ok(Err(SkipReason::OddName));
    }
    if text
        .split('/')
        .any(|part| RESERVED.iter().any(|reserved| part.eq_ignore_ascii_case(reserved)))
    {
        return Ok(Err(SkipReason::Reserved));
    }
    Ok(Ok(text))
}

/// Characters that make a name look like another one.
const fn is_direction_mark(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}')
}

/// Groups of paths that differ only in case or normalization; at most a hundred.
pub(super) fn similar_paths<'a>(paths: impl Iterator<Item = &'a String>) -> Vec<Vec<String>> {
    let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in paths {
        groups
            .entry(path.nfkc().flat_map(char::to_lowercase).collect())
            .or_default()
            .push(path.clone());
    }
    groups.into_values().filter(|group| group.len() > 1).take(100).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaping_names_are_hostile_and_odd_names_are_skipped() {
        let limits = Limits { depth: 4, path_bytes: 40, ..Limits::default() };
        for hostile in ["/etc/passwd", "../a", "a/../../b", "a/..", "a\0b", "a//b", "a/./b"] {
            assert!(
                matches!(
                    check_name(hostile.as_bytes(), &limits),
                    Err(SnapshotError::Hostile { .. })
                ),
                "{hostile:?}"
            );
        }
        for odd in [&b"a\\b"[..], b"a\nb", b"\xff\xfe", "a\u{202e}b".as_bytes()] {
            assert!(matches!(check_name(odd, &limits), Ok(Err(SkipReason::OddName))), "{odd:?}");
        }
        for reserved in [".git/config", "a/.GIT/hooks/x", ".construct/outline/a"] {
            assert!(
                matches!(check_name(reserved.as_bytes(), &limits), Ok(Err(SkipReason::Reserved))),
                "{reserved:?}"
            );
        }
        for (name, path) in
            [("a/b.rs", "a/b.rs"), ("./a/", "a"), (".github/x..y", ".github/x..y"), ("./", "")]
        {
            assert_eq!(check_name(name.as_bytes(), &limits).expect("honest"), Ok(path));
        }
        assert!(matches!(
            check_name(&[b'a'; 41], &limits),
            Err(SnapshotError::Exceeded { limit: Limit::PathBytes, .. })
        ));
        assert!(matches!(
            check_name(b"1/2/3/4/5/6/7", &limits),
            Err(SnapshotError::Exceeded { limit: Limit::Depth, .. })
        ));
    }

    #[test]
    fn paths_that_differ_by_case_or_normalization_are_grouped() {
        let paths: Vec<String> =
            ["README", "readme", "caf\u{e9}", "cafe\u{301}", "other"].map(str::to_owned).to_vec();
        let groups = similar_paths(paths.iter());
        assert_eq!(groups.len(), 2, "{groups:?}");
    }
}

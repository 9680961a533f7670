//! Globs on event types: `*` matches any characters, every other character matches itself.

/// The types of events that a subscriber receives.
#[derive(Debug, Clone, Default)]
pub(crate) struct Globs(Vec<String>);

impl Globs {
    /// Matches what any of `patterns` matches; without patterns, everything.
    pub(crate) fn new(patterns: Vec<String>) -> Self {
        Self(patterns)
    }

    /// Whether a subscriber receives events of this type.
    pub(crate) fn include(&self, kind: &str) -> bool {
        self.0.is_empty()
            || self.0.iter().any(|pattern| matches(pattern.as_bytes(), kind.as_bytes()))
    }
}

/// Backtracks only to the last `*`: an earlier one could not match more. So the time is at most
/// proportional to the product of both lengths.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if pattern.get(p) == Some(&b'*') {
            star = Some((p, t));
            p += 1;
        } else if pattern.get(p) == Some(&text[t]) {
            p += 1;
            t += 1;
        } else if let Some((at, from)) = star {
            star = Some((at, from + 1));
            p = at + 1;
            t = from + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn star_matches_any_characters() {
        for (pattern, kind, expected) in [
            ("message.*", "message.delta", true),
            ("message.*", "message.", true),
            ("message.*", "messages.delta", false),
            ("*.created", "task.created", true),
            ("*.created", "task.created.x", false),
            ("*", "", true),
            ("task.*ed", "task.created", true),
            ("t*k.*c*d", "task.created", true),
            ("task.created", "task.created", true),
            ("task.create", "task.created", false),
            ("", "error", false),
            ("[a-z]?", "ab", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), kind.as_bytes()), expected, "{pattern} {kind}");
        }
    }

    #[test]
    fn globs_without_patterns_match_everything() {
        assert!(Globs::default().include("error"));
        assert!(!Globs::new(vec!["task.*".into(), "tool.*".into()]).include("error"));
        assert!(Globs::new(vec!["task.*".into(), "tool.*".into()]).include("tool.called"));
    }

    /// The definition of a glob, by recursion.
    fn matches_recursively(pattern: &[u8], text: &[u8]) -> bool {
        match pattern.split_first() {
            None => text.is_empty(),
            Some((b'*', rest)) => {
                (0..=text.len()).any(|from| matches_recursively(rest, &text[from..]))
            }
            Some((byte, rest)) => text
                .split_first()
                .is_some_and(|(first, text)| first == byte && matches_recursively(rest, text)),
        }
    }

    proptest! {
        #[test]
        fn matching_agrees_with_the_recursive_definition(pattern in "[ab*]{0,8}", text in "[ab]{0,8}") {
            prop_assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), matches_recursively(pattern.as_bytes(), text.as_bytes()));
        }
    }
}

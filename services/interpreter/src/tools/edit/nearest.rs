//! Finds the text that a model most likely meant when the text it quoted does not occur.

use crate::tools::stop::{Stop, StopReason};

/// Limit on the work: comparisons of two lines.
const MAX_COMPARISONS: usize = 1_000_000;

/// Start lines that are compared between two checks of the stop.
const STARTS_PER_STOP_CHECK: usize = 256;

/// How much of a line is compared, in bytes.
const MAX_COMPARED_BYTES: usize = 400;

/// Lines of the quoted text that are compared, and lines that are shown.
const MAX_LINES: usize = 40;

/// Average similarity per line below which a text is not shown.
const MIN_SIMILARITY: f64 = 0.55;

/// The text that is most similar to the quoted one.
#[derive(Debug, PartialEq)]
pub(super) struct Nearest {
    /// Its first line, counted from 1.
    pub(super) line: usize,
    /// The text.
    pub(super) text: String,
    /// Whether it differs from the quoted text only in whitespace.
    pub(super) only_whitespace: bool,
}

/// The part of `text` that is most similar to `wanted`, if any is similar enough.
pub(super) fn find(text: &str, wanted: &str, stop: &Stop) -> Result<Option<Nearest>, StopReason> {
    let wanted: Vec<&str> = wanted.lines().skip_while(|line| line.trim().is_empty()).collect();
    let Some(last) = wanted.iter().rposition(|line| !line.trim().is_empty()) else {
        return Ok(None);
    };
    let wanted = &wanted[..=last];
    let lines: Vec<&str> = text.lines().take(MAX_COMPARISONS).collect();
    let compared = wanted.len().min(MAX_LINES).min((MAX_COMPARISONS / lines.len().max(1)).max(1));

    let mut best = (0.0, 0);
    for start in 0..lines.len() {
        if start % STARTS_PER_STOP_CHECK == 0 {
            stop.check()?;
        }
        let here = &lines[start..];
        let score: f64 = wanted[..compared]
            .iter()
            .zip(here)
            .map(|(wanted, line)| similarity(line, wanted))
            .sum();
        if score > best.0 {
            best = (score, start);
        }
    }
    let (score, start) = best;
    #[expect(clippy::cast_precision_loss, reason = "a count of at most 40")]
    let average = score / compared as f64;
    if average < MIN_SIMILARITY {
        return Ok(None);
    }
    let part = &lines[start..lines.len().min(start + wanted.len())];
    let only_whitespace =
        part.len() == wanted.len() && part.iter().zip(wanted).all(|(a, b)| same_words(a, b));
    let shown: Vec<String> =
        part.iter().take(MAX_LINES).map(|line| line.chars().take(300).collect()).collect();
    Ok(Some(Nearest { line: start + 1, text: shown.join("\n"), only_whitespace }))
}

/// From 0 for nothing in common to 1 for equal.
fn similarity(a: &str, b: &str) -> f64 {
    if a == b {
        return 1.0;
    }
    if same_words(a, b) {
        return 0.95;
    }
    let (a, b) = (a.trim().as_bytes(), b.trim().as_bytes());
    let (a, b) = (&a[..a.len().min(MAX_COMPARED_BYTES)], &b[..b.len().min(MAX_COMPARED_BYTES)]);
    let longer = a.len().max(b.len());
    let prefix = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let suffix =
        a[prefix..].iter().rev().zip(b[prefix..].iter().rev()).take_while(|(a, b)| a == b).count();
    #[expect(clippy::cast_precision_loss, reason = "counts of at most 400")]
    let part = (prefix + suffix) as f64 / longer.max(1) as f64;
    part * 0.9
}

fn same_words(a: &str, b: &str) -> bool {
    a.split_whitespace().eq(b.split_whitespace())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio_util::sync::CancellationToken;

    use super::*;

    fn find(text: &str, wanted: &str) -> Option<Nearest> {
        super::find(text, wanted, &Stop::new(CancellationToken::new(), Duration::from_secs(60)))
            .expect("nothing stops it")
    }

    #[test]
    fn indentation_difference_is_reported_as_whitespace_only() {
        let near = find("a\n    if x {\n        y();\n    }\n", "if x {\n  y();\n}")
            .expect("similar text");
        assert_eq!(near.line, 2);
        assert!(near.only_whitespace);
    }

    #[test]
    fn line_with_a_typo_is_found() {
        let near =
            find("alpha\nlet count = 10;\nomega\n", "let cuont = 10;").expect("similar text");
        assert_eq!(
            (near.line, near.text.as_str(), near.only_whitespace),
            (2, "let count = 10;", false)
        );
    }

    #[test]
    fn dissimilar_text_has_no_nearest() {
        assert_eq!(find("alpha\nbeta\n", "completely different"), None);
        assert_eq!(find("", "text"), None);
        assert_eq!(find("alpha", "\n\n"), None);
    }
}

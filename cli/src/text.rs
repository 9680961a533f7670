//! Makes text safe for a terminal, and clips it to a width.

use unicode_width::UnicodeWidthChar as _;

/// The text without characters that control a terminal or reorder text: models and tools write
/// arbitrary text. Line breaks and tabs stay.
pub(crate) fn printable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => safe.push(c),
            // A carriage return would overwrite the line; before a line break it is redundant.
            '\r' => {}
            // Bidirectional controls are shown escaped: they make text look like something else,
            // and a person may be approving it.
            '\u{200E}'
            | '\u{200F}'
            | '\u{061C}'
            | '\u{202A}'..='\u{202E}'
            | '\u{2066}'..='\u{2069}' => {
                safe.extend(c.escape_unicode());
            }
            c if c.is_control() => safe.push('\u{FFFD}'),
            c => safe.push(c),
        }
    }
    safe
}

/// The text as one line: line breaks become spaces.
pub(crate) fn one_line(text: &str) -> String {
    let text = printable(text);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The text in at most `width` columns; `…` marks a cut.
pub(crate) fn clip(text: &str, width: usize) -> String {
    if columns(text) <= width {
        return text.to_owned();
    }
    let mut clipped = String::new();
    let mut used = 0;
    for c in text.chars() {
        used += c.width().unwrap_or(0);
        if used >= width {
            break;
        }
        clipped.push(c);
    }
    clipped.push('…');
    clipped
}

/// The columns that the text takes on a terminal.
pub(crate) fn columns(text: &str) -> usize {
    text.chars().map(|c| c.width().unwrap_or(0)).sum()
}

/// `1 call`, `2 calls`.
pub(crate) fn count(n: impl Into<i128>, one: &str) -> String {
    let n = n.into();
    if n == 1 { format!("{n} {one}") } else { format!("{} {one}s", thousands(n)) }
}

/// Digits in groups of three.
pub(crate) fn thousands(n: impl Into<i128>) -> String {
    let n = n.into();
    let digits = n.unsigned_abs().to_string();
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    if n < 0 { format!("-{grouped}") } else { grouped }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_controls_are_removed_or_escaped() {
        assert_eq!(
            printable("a\x1b[2Jb\r\nc\td\u{9b}e\u{202E}f"),
            "a\u{FFFD}[2Jb\nc\td\u{FFFD}e\\u{202e}f"
        );
    }

    #[test]
    fn text_is_clipped_by_columns() {
        assert_eq!(clip("short", 5), "short");
        assert_eq!(clip("longer", 5), "long…");
        assert_eq!(columns("日本"), 4);
        assert_eq!(clip("日本語", 5), "日本…");
    }

    #[test]
    fn numbers_are_grouped_by_thousands() {
        assert_eq!(
            [0_i64, 999, 1000, -1_234_567].map(thousands),
            ["0", "999", "1,000", "-1,234,567"]
        );
        assert_eq!(count(1_u32, "call"), "1 call");
        assert_eq!(count(1200_u32, "call"), "1,200 calls");
    }
}

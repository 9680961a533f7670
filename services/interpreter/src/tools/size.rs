//! What a result takes as JSON. That is the form in which a call hands it to a script, and in which
//! its size is bounded.

/// The size of a text as a JSON string, in bytes, quotes included.
pub(super) fn written(text: &str) -> usize {
    2 + text.bytes().map(written_byte).sum::<usize>()
}

/// The share of one byte of UTF-8 in the size of a JSON string.
pub(super) const fn written_byte(byte: u8) -> usize {
    match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..=0x1f => 6,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_of_text_is_that_of_its_json() {
        let ascii: String = (0..=0x7f_u8).map(char::from).collect();
        for text in [ascii.as_str(), "", "\u{e4}\u{20ac}\u{1f600}\u{2028}\u{85}"] {
            assert_eq!(written(text), serde_json::to_string(text).expect("JSON").len(), "{text:?}");
        }
    }
}

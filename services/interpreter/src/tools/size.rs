//! Size of results as JSON, the form in which a call passes them to a script and in which their
//! size is bounded.

/// The size of a text as a JSON string, in bytes, quotes included.
pub(super) fn json_size(text: &str) -> usize {
    2 + text.bytes().map(json_byte_size).sum::<usize>()
}

/// The share of one byte of UTF-8 in the size of a JSON string.
pub(super) const fn json_byte_size(byte: u8) -> usize {
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
    fn json_size_equals_the_serialized_length() {
        let ascii: String = (0..=0x7f_u8).map(char::from).collect();
        for text in [ascii.as_str(), "", "\u{e4}\u{20ac}\u{1f600}\u{2028}\u{85}"] {
            assert_eq!(
                json_size(text),
                serde_json::to_string(text).expect("JSON").len(),
                "{text:?}"
            );
        }
    }
}

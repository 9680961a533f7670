//! Text encodings of files.
//!
//! Each encoding here is lossless: decoded text encodes to the same bytes again. Bytes for which
//! that is impossible are rejected.

use serde::Deserialize;

use super::kind::{Kind, Parameter, named};
use super::size::json_byte_size;

/// The parameter of tools for a file's encoding.
pub(super) const ENCODING: Parameter = named(
    "encoding",
    Kind::OneOf(&["utf-8", "latin1", "utf-16le", "utf-16be"]),
    "utf-8",
    "With latin1 each byte is a character.",
);

/// An encoding. A byte order mark is an ordinary character.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) enum Encoding {
    #[default]
    #[serde(rename = "utf-8")]
    Utf8,
    /// ISO 8859-1, whose characters U+0000 to U+00FF are the bytes. It decodes any file.
    #[serde(rename = "latin1")]
    Latin1,
    #[serde(rename = "utf-16le")]
    Utf16Le,
    #[serde(rename = "utf-16be")]
    Utf16Be,
}

impl Encoding {
    /// Its name in the parameter of tools.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Utf8 => "utf-8",
            Self::Latin1 => "latin1",
            Self::Utf16Le => "utf-16le",
            Self::Utf16Be => "utf-16be",
        }
    }

    /// The encoding that a UTF-16 byte order mark at the start of a file indicates. The mark of
    /// UTF-32 begins with the same bytes.
    pub(super) fn from_byte_order_mark(start: &[u8]) -> Option<Self> {
        match start {
            [0xff, 0xfe, 0, 0, ..] => None,
            [0xff, 0xfe, ..] => Some(Self::Utf16Le),
            [0xfe, 0xff, ..] => Some(Self::Utf16Be),
            _ => None,
        }
    }

    /// Decodes the bytes.
    ///
    /// # Errors
    /// The offset of the first byte that is not part of a character.
    pub(super) fn decode(self, bytes: Vec<u8>) -> Result<String, usize> {
        match self {
            Self::Utf8 => {
                String::from_utf8(bytes).map_err(|error| error.utf8_error().valid_up_to())
            }
            Self::Latin1 => Ok(bytes.into_iter().map(char::from).collect()),
            Self::Utf16Le | Self::Utf16Be => {
                let mut text = String::with_capacity(bytes.len());
                let units = bytes.chunks_exact(2).map(|unit| self.unit(unit));
                for character in char::decode_utf16(units) {
                    // Each decoded character takes the same number of units here as in the file.
                    text.push(character.map_err(|_| 2 * text.encode_utf16().count())?);
                }
                if bytes.len().is_multiple_of(2) { Ok(text) } else { Err(bytes.len() - 1) }
            }
        }
    }

    /// Encodes the text.
    ///
    /// # Errors
    /// The first character that the encoding does not have.
    pub(super) fn encode(self, text: String) -> Result<Vec<u8>, char> {
        match self {
            Self::Utf8 => Ok(text.into_bytes()),
            Self::Latin1 => {
                text.chars().map(|c| u8::try_from(u32::from(c)).map_err(|_| c)).collect()
            }
            Self::Utf16Le => Ok(text.encode_utf16().flat_map(u16::to_le_bytes).collect()),
            Self::Utf16Be => Ok(text.encode_utf16().flat_map(u16::to_be_bytes).collect()),
        }
    }

    /// Number of bytes at the beginning of `bytes`, located at `offset` of a file, that belong to a
    /// character that begins before them.
    pub(super) fn rest_of_character(self, bytes: &[u8], offset: u64) -> usize {
        if offset == 0 {
            return 0;
        }
        match self {
            Self::Utf8 => bytes.iter().take(3).take_while(|byte| **byte & 0xc0 == 0x80).count(),
            Self::Latin1 => 0,
            Self::Utf16Le | Self::Utf16Be => {
                let half = usize::from(offset % 2 == 1);
                let unit = bytes.get(half..half + 2).map(|unit| self.unit(unit));
                let is_second = unit.is_some_and(|unit| (0xdc00..0xe000).contains(&unit));
                (if is_second { half + 2 } else { half }).min(bytes.len())
            }
        }
    }

    /// End of the first line of `bytes`, after its line feed. `bytes` begin at a character
    /// boundary.
    pub(super) fn line_end(self, bytes: &[u8]) -> Option<usize> {
        match self {
            Self::Utf8 | Self::Latin1 => memchr::memchr(b'\n', bytes).map(|at| at + 1),
            Self::Utf16Le | Self::Utf16Be => {
                let at =
                    bytes.chunks_exact(2).position(|unit| self.unit(unit) == u16::from(b'\n'))?;
                Some(2 * (at + 1))
            }
        }
    }

    /// Size of the text of these bytes within the quotes of a JSON string, in bytes. Approximate
    /// for bytes that are not text.
    pub(super) fn json_bytes(self, bytes: &[u8]) -> usize {
        let of_unit = |unit: u16| match u8::try_from(unit) {
            Ok(byte) if byte < 0x80 => json_byte_size(byte),
            _ if unit < 0x800 => 2,
            // A surrogate pair takes four bytes, two for each half.
            _ if (0xd800..0xe000).contains(&unit) => 2,
            _ => 3,
        };
        match self {
            Self::Utf8 => bytes.iter().map(|byte| json_byte_size(*byte)).sum(),
            Self::Latin1 => bytes.iter().map(|byte| of_unit((*byte).into())).sum(),
            Self::Utf16Le | Self::Utf16Be => {
                bytes.chunks(2).map(|unit| of_unit(self.unit(unit))).sum()
            }
        }
    }

    /// Largest number of file bytes whose text can take `json_bytes` bytes within a JSON string.
    pub(super) const fn max_file_bytes(self, json_bytes: usize) -> usize {
        match self {
            Self::Utf8 | Self::Latin1 => json_bytes,
            Self::Utf16Le | Self::Utf16Be => 2 * json_bytes,
        }
    }

    /// The UTF-16 code unit; a missing second byte counts as 0.
    fn unit(self, bytes: &[u8]) -> u16 {
        let pair = [bytes[0], bytes.get(1).copied().unwrap_or(0)];
        if self == Self::Utf16Be { u16::from_be_bytes(pair) } else { u16::from_le_bytes(pair) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Encoding; 4] =
        [Encoding::Utf8, Encoding::Latin1, Encoding::Utf16Le, Encoding::Utf16Be];

    #[test]
    fn decoded_text_encodes_to_the_same_bytes() {
        let text = "\u{feff}a\r\n\u{e4}\u{20ac}\u{1f600}\u{0}\u{a0a}\"\\\u{1}";
        for encoding in ALL {
            let text: String = if encoding == Encoding::Latin1 {
                (0..=u8::MAX).map(char::from).collect()
            } else {
                text.into()
            };
            let bytes = encoding.encode(text.clone()).expect("it has all of these");
            assert_eq!(
                encoding.json_bytes(&bytes) + 2,
                serde_json::to_string(&text).expect("JSON").len(),
                "{encoding:?}"
            );
            assert!(
                bytes.len() <= encoding.max_file_bytes(encoding.json_bytes(&bytes)),
                "{encoding:?}"
            );
            assert_eq!(encoding.decode(bytes), Ok(text), "{encoding:?}");
        }
        assert_eq!(Encoding::Latin1.encode("a\u{20ac}".into()), Err('\u{20ac}'));
    }

    #[test]
    fn invalid_bytes_are_rejected_with_their_offset() {
        assert_eq!(Encoding::Utf8.decode(b"caf\xe9".to_vec()), Err(3));
        // A second half without a first one, a first half without a second one, and half a unit.
        assert_eq!(
            Encoding::Utf16Le.decode(vec![0x61, 0, 0x3d, 0xd8, 0x00, 0xde, 0x00, 0xde]),
            Err(6)
        );
        assert_eq!(Encoding::Utf16Be.decode(vec![0, 0x61, 0xd8, 0x3d]), Err(2));
        assert_eq!(Encoding::Utf16Le.decode(vec![0x61, 0, 0x62]), Err(2));
    }

    #[test]
    fn characters_are_never_split() {
        let text = "a\u{e4}\u{20ac}\u{1f600}\u{10ffff}z\u{e4}";
        for encoding in [Encoding::Utf8, Encoding::Utf16Le, Encoding::Utf16Be] {
            let bytes = encoding.encode(text.into()).expect("it has all of these");
            for cut in 0..=bytes.len() {
                let at = cut + encoding.rest_of_character(&bytes[cut..], cut as u64);
                let halves = [&bytes[..at], &bytes[at..]]
                    .map(|half| encoding.decode(half.to_vec()).expect("whole characters"));
                assert_eq!(halves.concat(), text, "{encoding:?} at {cut}");
            }
        }
    }

    #[test]
    fn utf16_line_ends_with_a_whole_line_feed() {
        // U+0A0A and U+010A have bytes of line feeds.
        for encoding in [Encoding::Utf16Le, Encoding::Utf16Be] {
            let bytes = encoding.encode("\u{a0a}\u{10a}\n\n".into()).expect("it has all of these");
            assert_eq!(encoding.line_end(&bytes), Some(6), "{encoding:?}");
        }
    }
}

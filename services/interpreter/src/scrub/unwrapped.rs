//! Removes the line breaks that encoders put into base64 and hexadecimal digits.

use std::ops::Range;

use memchr::memchr2_iter;

/// The shortest line that encoders write: GitHub and `xxd` write 60 characters, PEM 64, MIME 76.
const MIN_LINE_BYTES: usize = 60;

/// Line breaks as they are written in a JSON text; the longest first of those with a common prefix.
const ESCAPED_BREAKS: [&[u8]; 2] = [b"\\r\\n", b"\\n"];

/// Size of the longest line break in bytes.
pub(super) const MAX_BREAK_BYTES: usize = 4;

/// The maximum number of line breaks within `length` bytes.
pub(super) const fn max_breaks(length: usize) -> usize {
    1 + length / MIN_LINE_BYTES
}

/// A text without its line breaks.
pub(super) struct Unwrapped {
    pub(super) bytes: Vec<u8>,
    breaks: Vec<Break>,
}

struct Break {
    /// Its position, as the number of bytes before it in [`Unwrapped::bytes`].
    at: usize,
    /// Size of this break and all before it, in bytes.
    removed: usize,
}

impl Unwrapped {
    /// Returns `None` if the text has no line break. A break counts if its line is long enough for
    /// an encoder to have ended it. The first line of a text may be the rest of a longer one.
    pub(super) fn from_text(text: &[u8]) -> Option<Self> {
        let mut bytes = Vec::new();
        let mut breaks: Vec<Break> = Vec::new();
        let (mut line, mut copied) = (None, 0);
        for at in memchr2_iter(b'\n', b'\\', text) {
            let Some(range) = break_at(text, at) else { continue };
            let is_long = line.is_none_or(|start| range.start >= start + MIN_LINE_BYTES);
            line = Some(range.end);
            if is_long {
                bytes.extend_from_slice(&text[copied..range.start]);
                copied = range.end;
                let removed = breaks.last().map_or(0, |last| last.removed) + range.len();
                breaks.push(Break { at: bytes.len(), removed });
            }
        }
        if breaks.is_empty() {
            return None;
        }
        bytes.extend_from_slice(&text[copied..]);
        Some(Self { bytes, breaks })
    }

    /// The range of the original text for a part of [`Unwrapped::bytes`]; `None` if no break was
    /// within it.
    pub(super) fn original_range(&self, part: Range<usize>) -> Option<Range<usize>> {
        let before = self.breaks.partition_point(|one| one.at <= part.start);
        let within = self.breaks.partition_point(|one| one.at < part.end);
        let removed =
            |breaks: usize| breaks.checked_sub(1).map_or(0, |last| self.breaks[last].removed);
        (within > before).then(|| part.start + removed(before)..part.end + removed(within))
    }
}

/// The line break whose line feed or first backslash is the byte at `at`.
fn break_at(text: &[u8], at: usize) -> Option<Range<usize>> {
    if text[at] == b'\n' {
        let start = if at > 0 && text[at - 1] == b'\r' { at - 1 } else { at };
        return Some(start..at + 1);
    }
    let escaped = ESCAPED_BREAKS.iter().find(|escaped| text[at..].starts_with(escaped))?;
    Some(at..at + escaped.len())
}

//! Texts without the line breaks that encoders put into base64 and hexadecimal digits.

use std::ops::Range;

use memchr::memchr2_iter;

/// Shortest line that an encoder ends: GitHub and `xxd` write 60 characters, PEM 64, MIME 76.
const MIN_LINE: usize = 60;

/// The ways to break a line, as it stands and in a JSON text; longest first of those that begin
/// alike.
const ESCAPED: [&[u8]; 2] = [b"\\r\\n", b"\\n"];

/// Bytes of the longest of them.
pub(super) const MAX_BREAK: usize = 4;

/// Most breaks that stand within `length` bytes.
pub(super) const fn most_breaks(length: usize) -> usize {
    1 + length / MIN_LINE
}

/// A text without breaks.
pub(super) struct Unwrapped {
    pub(super) bytes: Vec<u8>,
    breaks: Vec<Break>,
}

struct Break {
    /// Where it was, as the number of bytes before it in [`Unwrapped::bytes`].
    at: usize,
    /// Bytes of this break and all before it.
    removed: usize,
}

impl Unwrapped {
    /// None when there is no break. A break counts when the line that it ends is long enough to
    /// have been ended by an encoder; the first line of a text may be the rest of a longer one.
    pub(super) fn of(text: &[u8]) -> Option<Self> {
        let mut bytes = Vec::new();
        let mut breaks: Vec<Break> = Vec::new();
        let (mut line, mut copied) = (None, 0);
        for at in memchr2_iter(b'\n', b'\\', text) {
            let Some(place) = break_at(text, at) else { continue };
            let is_long = line.is_none_or(|start| place.start >= start + MIN_LINE);
            line = Some(place.end);
            if is_long {
                bytes.extend_from_slice(&text[copied..place.start]);
                copied = place.end;
                let removed = breaks.last().map_or(0, |last| last.removed) + place.len();
                breaks.push(Break { at: bytes.len(), removed });
            }
        }
        if breaks.is_empty() {
            return None;
        }
        bytes.extend_from_slice(&text[copied..]);
        Some(Self { bytes, breaks })
    }

    /// Where a part of [`Unwrapped::bytes`] stands in the text; none when no break was within it.
    pub(super) fn place(&self, part: Range<usize>) -> Option<Range<usize>> {
        let before = self.breaks.partition_point(|one| one.at <= part.start);
        let within = self.breaks.partition_point(|one| one.at < part.end);
        let removed =
            |breaks: usize| breaks.checked_sub(1).map_or(0, |last| self.breaks[last].removed);
        (within > before).then(|| part.start + removed(before)..part.end + removed(within))
    }
}

/// The break of which the byte at `at` is the line feed or the first backslash.
fn break_at(text: &[u8], at: usize) -> Option<Range<usize>> {
    if text[at] == b'\n' {
        let start = if at > 0 && text[at - 1] == b'\r' { at - 1 } else { at };
        return Some(start..at + 1);
    }
    let escaped = ESCAPED.iter().find(|escaped| text[at..].starts_with(escaped))?;
    Some(at..at + escaped.len())
}

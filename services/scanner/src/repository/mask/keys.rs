//! Private keys in PEM: in lines of their own, or as one string in a line of code.

use std::ops::Range;

use regex::bytes::Regex;

/// Lines within which a key must end. Source code that names a begin mark has no end, and is not
/// changed.
const MAX_LINES: usize = 200;
/// The minimum length of base64 text; shorter words may be anything.
const MIN_BASE64_CHARS: usize = 16;

/// Patterns of the begin and end marks of keys.
pub(super) struct PrivateKeys {
    begins: Regex,
    ends: Regex,
    header: Regex,
}

impl PrivateKeys {
    pub(super) fn new(regex: impl Fn(&str) -> Regex) -> Self {
        Self {
            begins: regex(r"-----BEGIN[ A-Z0-9_-]{0,100}PRIVATE KEY(?: BLOCK)?-----"),
            ends: regex(r"-----END[ A-Z0-9_-]{0,100}PRIVATE KEY(?: BLOCK)?-----"),
            header: regex(r"^[A-Za-z][A-Za-z-]{0,40}: [!-~ ]{1,200}$"),
        }
    }

    /// Returns the ranges of keys, in order.
    pub(super) fn find(&self, content: &[u8]) -> Vec<Range<usize>> {
        let begins: Vec<_> =
            self.begins.find_iter(content).map(|found| (found.start(), found.end())).collect();
        if begins.is_empty() {
            return Vec::new();
        }
        let ends: Vec<_> = self.ends.find_iter(content).map(|found| found.start()).collect();
        let bodies = begins.iter().enumerate().map(|(index, (_, from))| {
            // Content before the next begin mark belongs to this key.
            let next = begins.get(index + 1).map_or(content.len(), |(next, _)| *next);
            let end = ends.get(ends.partition_point(|end| end < from)).filter(|end| **end <= next);
            let near = end.filter(|end| {
                content[*from..**end].iter().filter(|byte| **byte == b'\n').count() <= MAX_LINES
            });
            *from..near.copied().unwrap_or_else(|| self.unterminated_end(content, *from, next))
        });
        bodies.filter(|body| !content[body.clone()].trim_ascii().is_empty()).collect()
    }

    /// The end of a key without an end mark: as far as the content looks like a key.
    fn unterminated_end(&self, content: &[u8], from: usize, limit: usize) -> usize {
        let (mut end, mut at) = (from, from);
        for (index, line) in content[from..limit].split_inclusive(|byte| *byte == b'\n').enumerate()
        {
            at += line.len();
            let line = line.trim_ascii();
            // The rest of the first line may be a quotation mark and a bracket, or the whole key.
            if self.is_body(line) || index == 0 && longest_base64_run(line) >= MIN_BASE64_CHARS {
                end = at;
            } else if !(index == 0 && line.len() <= 4 || line.is_empty()) {
                break;
            }
        }
        // Keep the line ending.
        while end > from && matches!(content[end - 1], b'\n' | b'\r') {
            end -= 1;
        }
        end
    }

    fn is_body(&self, line: &[u8]) -> bool {
        let bare: &[u8] = line.strip_suffix(b"\\n").unwrap_or(line);
        let is_edge = |byte: &u8| b"\"'`+, \\;".contains(byte);
        let start = bare.iter().position(|byte| !is_edge(byte)).unwrap_or(bare.len());
        let end = bare.iter().rposition(|byte| !is_edge(byte)).map_or(start, |at| at + 1);
        let bare = bare[start..end].strip_suffix(b"\\n").unwrap_or(&bare[start..end]);
        let is_base64 = !bare.is_empty() && bare.iter().all(is_base64);
        is_base64 && (bare.len() >= MIN_BASE64_CHARS || bare.ends_with(b"="))
            || self.header.is_match(line)
    }
}

fn is_base64(byte: &u8) -> bool {
    byte.is_ascii_alphanumeric() || b"+/=".contains(byte)
}

/// The longest run of base64 characters.
fn longest_base64_run(line: &[u8]) -> usize {
    line.split(|byte| !is_base64(byte)).map(<[u8]>::len).max().unwrap_or(0)
}

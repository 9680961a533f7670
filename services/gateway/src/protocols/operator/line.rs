//! Splits a byte stream into lines.

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// One line, without its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Line {
    Text(String),
    /// It was longer than the limit, and was skipped.
    TooLong,
    /// It was not UTF-8.
    NotUtf8,
}

/// Splits bytes into lines, however they were chunked. Buffers at most one line.
#[derive(Debug)]
pub(super) struct Splitter {
    buffer: BytesMut,
    /// Length of the part of the buffer without a newline.
    searched_bytes: usize,
    /// Within a line that is too long.
    is_skipping: bool,
    limit: usize,
}

impl Splitter {
    pub(super) fn new(limit: usize) -> Self {
        Self { buffer: BytesMut::new(), searched_bytes: 0, is_skipping: false, limit }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete line. Skips empty lines.
    pub(super) fn next(&mut self) -> Option<Line> {
        loop {
            let Some(end) =
                self.buffer[self.searched_bytes..].iter().position(|byte| *byte == b'\n')
            else {
                if self.buffer.len() > self.limit {
                    self.is_skipping = true;
                }
                if self.is_skipping {
                    self.buffer.clear();
                }
                self.searched_bytes = self.buffer.len();
                return None;
            };
            let line = self.buffer.split_to(self.searched_bytes + end);
            self.buffer.advance(1);
            self.searched_bytes = 0;
            if std::mem::take(&mut self.is_skipping) || line.len() > self.limit {
                return Some(Line::TooLong);
            }
            let line = line.strip_suffix(b"\r").unwrap_or(&line);
            match std::str::from_utf8(line) {
                Ok(text) if text.trim().is_empty() => {}
                Ok(text) => return Some(Line::Text(text.to_owned())),
                Err(_) => return Some(Line::NotUtf8),
            }
        }
    }
}

/// The lines of a connection.
pub(super) struct Lines<R> {
    source: R,
    splitter: Splitter,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub(super) fn new(source: R, limit: usize) -> Self {
        Self { source, splitter: Splitter::new(limit) }
    }

    /// The next line; `None` at the end of the stream. Cancel-safe.
    pub(super) async fn next(&mut self) -> std::io::Result<Option<Line>> {
        loop {
            if let Some(line) = self.splitter.next() {
                return Ok(Some(line));
            }
            let mut bytes = [0; 8192];
            let read = self.source.read(&mut bytes).await?;
            if read == 0 {
                return Ok(None);
            }
            self.splitter.push(&bytes[..read]);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(chunks: &[&[u8]], limit: usize) -> Vec<Line> {
        let mut splitter = Splitter::new(limit);
        let mut lines = Vec::new();
        for chunk in chunks {
            splitter.push(chunk);
            lines.extend(std::iter::from_fn(|| splitter.next()));
        }
        lines
    }

    #[test]
    fn lines_are_split_at_newlines() {
        let text = |text: &str| Line::Text(text.to_owned());
        let bytes = b"{}\n\n  \r\n{\"a\":1}\r\n\xff\n0123456789\nok\nrest";
        let expected = [text("{}"), text("{\"a\":1}"), Line::NotUtf8, Line::TooLong, text("ok")];
        assert_eq!(all(&[bytes], 8), expected);
        for cut in 0..bytes.len() {
            assert_eq!(all(&[&bytes[..cut], &bytes[cut..]], 8), expected, "cut at {cut}");
        }
    }

    proptest! {
        /// The lines do not depend on chunk boundaries, and the buffer holds no more than a line
        /// and the last chunk.
        #[test]
        fn chunk_boundaries_do_not_matter(bytes in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'x'), any::<u8>()], 0..200), cuts in prop::collection::vec(0_usize..200, 0..8)) {
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(bytes.len())).chain([0, bytes.len()]).collect();
            cuts.sort_unstable();
            let chunks: Vec<_> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            prop_assert_eq!(all(&chunks, 10), all(&[&bytes], 10));
            let mut splitter = Splitter::new(10);
            for byte in &bytes {
                splitter.push(&[*byte]);
                while splitter.next().is_some() {}
                prop_assert!(splitter.buffer.len() <= 10);
            }
        }
    }
}

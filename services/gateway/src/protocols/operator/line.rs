//! Lines of a byte stream.

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// One line, without its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Line {
    Text(String),
    /// It had more bytes than a line may have; they were passed over.
    TooLong,
    /// It was no UTF-8.
    NoText,
}

/// Splits bytes into lines, however they were cut on their way. Holds one line at most.
#[derive(Debug)]
pub(super) struct Splitter {
    buffer: BytesMut,
    /// How much of the buffer is known to have no end of a line.
    searched: usize,
    /// Within a line that is too long.
    passing: bool,
    limit: usize,
}

impl Splitter {
    pub(super) fn new(limit: usize) -> Self {
        Self { buffer: BytesMut::new(), searched: 0, passing: false, limit }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next line that is complete. Empty lines are passed over.
    pub(super) fn next(&mut self) -> Option<Line> {
        loop {
            let Some(end) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n')
            else {
                if self.buffer.len() > self.limit {
                    self.passing = true;
                }
                if self.passing {
                    self.buffer.clear();
                }
                self.searched = self.buffer.len();
                return None;
            };
            let line = self.buffer.split_to(self.searched + end);
            self.buffer.advance(1);
            self.searched = 0;
            if std::mem::take(&mut self.passing) || line.len() > self.limit {
                return Some(Line::TooLong);
            }
            let line = line.strip_suffix(b"\r").unwrap_or(&line);
            match std::str::from_utf8(line) {
                Ok(text) if text.trim().is_empty() => {}
                Ok(text) => return Some(Line::Text(text.to_owned())),
                Err(_) => return Some(Line::NoText),
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

    /// The next line; none at the end of the stream. May be dropped and called again.
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
        let mut found = Vec::new();
        for chunk in chunks {
            splitter.push(chunk);
            found.extend(std::iter::from_fn(|| splitter.next()));
        }
        found
    }

    #[test]
    fn lines_end_where_they_end() {
        let text = |text: &str| Line::Text(text.to_owned());
        let bytes = b"{}\n\n  \r\n{\"a\":1}\r\n\xff\n0123456789\nok\nrest";
        let expected = [text("{}"), text("{\"a\":1}"), Line::NoText, Line::TooLong, text("ok")];
        assert_eq!(all(&[bytes], 8), expected);
        for cut in 0..bytes.len() {
            assert_eq!(all(&[&bytes[..cut], &bytes[cut..]], 8), expected, "cut at {cut}");
        }
    }

    proptest! {
        /// However bytes are cut, the lines are the same, and memory holds no more than a line and
        /// what was pushed last.
        #[test]
        fn cuts_change_nothing(bytes in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'x'), any::<u8>()], 0..200), cuts in prop::collection::vec(0_usize..200, 0..8)) {
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

//! Reading the output of a command: its beginning and its end are kept, what lies between is counted.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::task::JoinHandle;

/// Bytes kept of one stream: this many from its beginning and as many from its end.
const HALF: usize = 128 * 1024;

/// What was kept of one stream.
#[derive(Debug)]
pub(crate) struct Captured {
    /// The text; bytes that are no UTF-8 are replaced, and a marker stands where something was left out.
    pub(crate) text: String,
    /// Something was left out.
    pub(crate) truncated: bool,
}

impl Captured {
    /// Whether nothing was written.
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty()
    }
}

#[derive(Debug, Default)]
struct Kept {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    omitted: u64,
}

impl Kept {
    fn push(&mut self, chunk: &[u8]) {
        let (head, rest) = chunk.split_at(chunk.len().min(HALF - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail.extend(rest);
        let excess = self.tail.len().saturating_sub(HALF);
        self.tail.drain(..excess);
        self.omitted += excess as u64;
    }

    fn captured(&mut self) -> Captured {
        let mut bytes = std::mem::take(&mut self.head);
        if self.omitted > 0 {
            bytes.extend_from_slice(format!("\n[... {} bytes left out ...]\n", self.omitted).as_bytes());
        }
        bytes.extend(self.tail.drain(..));
        let text = match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        };
        Captured { text, truncated: self.omitted > 0 }
    }
}

/// A stream being read in the background, so that a command never waits for a full pipe.
pub(super) struct Capture {
    kept: Arc<Mutex<Kept>>,
    reading: JoinHandle<()>,
}

impl Capture {
    /// Starts reading.
    pub(super) fn start(stream: Option<impl AsyncRead + Unpin + Send + 'static>) -> Self {
        let kept = Arc::new(Mutex::new(Kept::default()));
        let shared = Arc::clone(&kept);
        let reading = tokio::spawn(async move {
            let Some(mut stream) = stream else { return };
            let mut buffer = vec![0; 16 * 1024];
            while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                shared.lock().unwrap_or_else(PoisonError::into_inner).push(&buffer[..read]);
            }
        });
        Self { kept, reading }
    }

    /// What was read until the end of the stream, or until `patience` is over.
    pub(super) async fn finish(mut self, patience: Duration) -> Captured {
        if tokio::time::timeout(patience, &mut self.reading).await.is_err() {
            self.reading.abort();
        }
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).captured()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.reading.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_output_is_kept_whole() {
        let mut kept = Kept::default();
        kept.push(b"one ");
        kept.push(b"two");
        let captured = kept.captured();
        assert_eq!((captured.text.as_str(), captured.truncated), ("one two", false));
    }

    #[test]
    fn of_long_output_the_beginning_and_the_end_are_kept() {
        let mut kept = Kept::default();
        kept.push(b"first");
        for _ in 0..100 {
            kept.push(&[b'x'; 10_000]);
        }
        kept.push(b"last");
        let captured = kept.captured();
        assert!(captured.truncated);
        assert!(captured.text.starts_with("first") && captured.text.ends_with("last"));
        assert!(captured.text.contains("bytes left out"));
        assert!(captured.text.len() < 2 * HALF + 100);
    }
}

//! Reading the output of a command: its beginning and its end are kept, what lies between is
//! counted.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::task::JoinHandle;

/// Bytes kept of one stream: this many from its beginning and as many from its end.
const HALF: usize = 128 * 1024;

use crate::scrub::Scrubber;

/// What was kept of one stream.
#[derive(Debug)]
pub(crate) struct Captured {
    /// The text; bytes that are no UTF-8 are replaced, and a marker stands where something was left
    /// out.
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

/// Of each half a little more than is shown: a secret that lies across a cut must be seen whole to
/// be taken out.
#[derive(Debug, Default)]
struct Kept {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    omitted: usize,
    scrubber: Arc<Scrubber>,
}

impl Kept {
    fn new(scrubber: Arc<Scrubber>) -> Self {
        Self { scrubber, ..Self::default() }
    }

    fn push(&mut self, chunk: &[u8]) {
        let half = HALF + self.scrubber.margin();
        let (head, rest) = chunk.split_at(chunk.len().min(half - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail.extend(rest);
        let excess = self.tail.len().saturating_sub(half);
        self.tail.drain(..excess);
        self.omitted += excess;
    }

    fn captured(&mut self) -> Captured {
        let (mut head, tail) =
            (std::mem::take(&mut self.head), Vec::from(std::mem::take(&mut self.tail)));
        let all = head.len() + self.omitted + tail.len();
        let truncated = all > 2 * HALF;
        let mut bytes = Vec::new();
        if self.omitted == 0 {
            // Nothing is missing, so that what lies across the two is seen whole as well.
            head.extend_from_slice(&tail);
        }
        let found = self.scrubber.find(&head, false);
        if truncated {
            self.scrubber.render(&head, &found, 0..HALF, &mut bytes);
            bytes.extend_from_slice(
                format!("\n[... {} bytes left out ...]\n", all - 2 * HALF).as_bytes(),
            );
            let (end, found) = if self.omitted == 0 {
                (&head, found)
            } else {
                (&tail, self.scrubber.find(&tail, false))
            };
            self.scrubber.render(end, &found, end.len() - HALF..end.len(), &mut bytes);
        } else {
            self.scrubber.render(&head, &found, 0..head.len(), &mut bytes);
        }
        let text = match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        };
        Captured { text, truncated }
    }
}

/// A stream being read in the background, so that a command never waits for a full pipe.
pub(super) struct Capture {
    kept: Arc<Mutex<Kept>>,
    reading: JoinHandle<()>,
}

impl Capture {
    /// Starts reading.
    pub(super) fn start(
        stream: Option<impl AsyncRead + Unpin + Send + 'static>,
        scrubber: Arc<Scrubber>,
    ) -> Self {
        let kept = Arc::new(Mutex::new(Kept::new(scrubber)));
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

    #[test]
    fn a_secret_is_taken_out_wherever_the_output_is_cut() {
        let (value, handle) = ("s3cr3t-0123456789abcdef", "{{secret:S:0000000000000000}}");
        let scrubber = Arc::new(Scrubber::new([(value, handle)]));
        let pieces: Vec<&str> =
            (0..=value.len() - 4).map(|start| &value[start..start + 4]).collect();
        // Nothing is left out of what is kept, or little, or much.
        for total in [2 * HALF + 10, 3 * HALF] {
            for cut in [HALF, total - HALF] {
                for before in [0, 1, 3, 11, value.len() - 3, value.len() - 1, value.len()] {
                    let start = cut.saturating_sub(before);
                    let mut output = vec![b'.'; start];
                    output.extend_from_slice(value.as_bytes());
                    output.resize(total, b'.');
                    let mut kept = Kept::new(Arc::clone(&scrubber));
                    output.chunks(7919).for_each(|chunk| kept.push(chunk));
                    let text = kept.captured().text;
                    let leaked = pieces.iter().find(|piece| text.contains(**piece));
                    assert_eq!(leaked, None, "of {total} bytes, {before} before a cut");
                }
            }
        }
    }
}

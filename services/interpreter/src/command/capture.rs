//! Captures the output of a command: keeps its beginning and its end, and counts the rest.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::task::JoinHandle;

use crate::scrub::Scrubber;

/// Bytes kept from the beginning and from the end of a stream; a stream of up to twice this size is
/// kept completely.
pub(crate) const HALF_BYTES: usize = 1 << 20;

/// The captured output of one stream.
#[derive(Debug)]
pub(crate) struct CapturedOutput {
    /// The text; invalid UTF-8 is replaced, and a marker replaces an omitted part.
    pub(crate) text: String,
    /// Whether a part was omitted.
    pub(crate) truncated: bool,
    /// Whether invalid UTF-8 was replaced.
    pub(crate) is_replaced: bool,
    /// Whether the command did not close the stream and its last bytes are withheld, because they
    /// may be part of a secret.
    pub(crate) is_withheld: bool,
}

impl CapturedOutput {
    /// Whether the output is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty()
    }
}

/// The buffered beginning and end of a stream. Each half is a little longer than what is shown: a
/// secret across a cut must be complete to be found.
#[derive(Debug, Default)]
struct OutputBuffer {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    omitted: usize,
    scrubber: Arc<Scrubber>,
}

impl OutputBuffer {
    fn new(scrubber: Arc<Scrubber>) -> Self {
        Self { scrubber, ..Self::default() }
    }

    fn push(&mut self, chunk: &[u8]) {
        let half = HALF_BYTES + self.scrubber.margin();
        let (head, rest) = chunk.split_at(chunk.len().min(half - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail.extend(rest);
        let excess = self.tail.len().saturating_sub(half);
        self.tail.drain(..excess);
        self.omitted += excess;
    }

    /// Returns the scrubbed output. `complete` means that the command closed the stream itself.
    /// Otherwise the stream may have ended within a secret, so any bytes that could be the first
    /// part of a secret are withheld.
    fn take_output(&mut self, complete: bool) -> CapturedOutput {
        let (mut head, tail) =
            (std::mem::take(&mut self.head), Vec::from(std::mem::take(&mut self.tail)));
        let all = head.len() + self.omitted + tail.len();
        let withheld = if complete { 0 } else { self.scrubber.margin().min(all) };
        let mut bytes = Vec::new();
        if self.omitted == 0 {
            // Nothing is omitted, so a secret across the two halves is complete as well.
            head.extend_from_slice(&tail);
        }
        let found = self.scrubber.find(&head);
        let is_long = all > 2 * HALF_BYTES;
        if is_long {
            self.scrubber.render(&head, &found, 0..HALF_BYTES.min(all - withheld), &mut bytes);
            bytes.extend_from_slice(
                format!("\n[... {} bytes omitted ...]\n", all - 2 * HALF_BYTES).as_bytes(),
            );
            let (end, found) =
                if self.omitted == 0 { (&head, found) } else { (&tail, self.scrubber.find(&tail)) };
            let last = end.len() - HALF_BYTES..end.len() - withheld.min(HALF_BYTES);
            self.scrubber.render(end, &found, last, &mut bytes);
        } else {
            self.scrubber.render(&head, &found, 0..head.len() - withheld, &mut bytes);
        }
        let (text, is_replaced) = match String::from_utf8(bytes) {
            Ok(text) => (text, false),
            Err(error) => (String::from_utf8_lossy(error.as_bytes()).into_owned(), true),
        };
        CapturedOutput { text, truncated: is_long, is_replaced, is_withheld: withheld > 0 }
    }
}

/// Reads a stream in the background, so that a command never blocks on a full pipe.
pub(super) struct Capture {
    buffer: Arc<Mutex<OutputBuffer>>,
    /// Returns whether the end of the stream was reached.
    reading: JoinHandle<bool>,
}

impl Capture {
    /// Starts reading.
    pub(super) fn start(
        stream: Option<impl AsyncRead + Unpin + Send + 'static>,
        scrubber: Arc<Scrubber>,
    ) -> Self {
        let buffer = Arc::new(Mutex::new(OutputBuffer::new(scrubber)));
        let shared = Arc::clone(&buffer);
        let reading = tokio::spawn(async move {
            let Some(mut stream) = stream else { return true };
            let mut chunk = vec![0; 16 * 1024];
            loop {
                match stream.read(&mut chunk).await {
                    Ok(0) => return true,
                    Ok(read) => {
                        shared.lock().unwrap_or_else(PoisonError::into_inner).push(&chunk[..read])
                    }
                    Err(_) => return false,
                }
            }
        });
        Self { buffer, reading }
    }

    /// The output up to the end of the stream, or until `timeout`. `complete` means that the
    /// command was not killed while it could have been writing.
    pub(super) async fn finish(mut self, timeout: Duration, complete: bool) -> CapturedOutput {
        let read = tokio::time::timeout(timeout, &mut self.reading).await;
        if read.is_err() {
            self.reading.abort();
        }
        let complete = complete && matches!(read, Ok(Ok(true)));
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner).take_output(complete)
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
    use crate::scrub::Pattern;

    const VALUE: &str = "s3cr3t-0123456789abcdef";

    fn scrubber() -> Arc<Scrubber> {
        Arc::new(Scrubber::new([Arc::new(Pattern::new(VALUE, "{{secret:S:0000000000000000}}"))]))
    }

    fn captured(scrubber: &Arc<Scrubber>, output: &[u8], complete: bool) -> CapturedOutput {
        let mut buffer = OutputBuffer::new(Arc::clone(scrubber));
        output.chunks(7919).for_each(|chunk| buffer.push(chunk));
        buffer.take_output(complete)
    }

    #[test]
    fn short_output_is_kept_completely() {
        let mut buffer = OutputBuffer::default();
        buffer.push(b"one ");
        buffer.push(b"two");
        let captured = buffer.take_output(true);
        assert_eq!((captured.text.as_str(), captured.truncated), ("one two", false));
    }

    #[test]
    fn long_output_keeps_its_beginning_and_end() {
        let mut buffer = OutputBuffer::default();
        buffer.push(b"first");
        for _ in 0..3 {
            buffer.push(&[b'x'; HALF_BYTES]);
        }
        buffer.push(b"last");
        let captured = buffer.take_output(true);
        assert!(captured.truncated);
        assert!(captured.text.starts_with("first") && captured.text.ends_with("last"));
        assert!(captured.text.contains("bytes omitted"));
        assert!(captured.text.len() < 2 * HALF_BYTES + 100);
    }

    #[test]
    fn secret_is_removed_wherever_the_output_is_cut() {
        let scrubber = scrubber();
        let pieces: Vec<&str> =
            (0..=VALUE.len() - 4).map(|start| &VALUE[start..start + 4]).collect();
        // A little or much is omitted.
        for total in [2 * HALF_BYTES + 10, 3 * HALF_BYTES] {
            for cut in [HALF_BYTES, total - HALF_BYTES] {
                for before in [0, 1, 3, 11, VALUE.len() - 3, VALUE.len() - 1, VALUE.len()] {
                    let start = cut.saturating_sub(before);
                    let mut output = vec![b'.'; start];
                    output.extend_from_slice(VALUE.as_bytes());
                    output.resize(total, b'.');
                    let text = captured(&scrubber, &output, true).text;
                    let leaked = pieces.iter().find(|piece| text.contains(**piece));
                    assert_eq!(leaked, None, "of {total} bytes, {before} before a cut");
                }
            }
        }
    }

    /// A part of a secret is ordinary text, at every cut.
    #[test]
    fn partial_secret_is_ordinary_text() {
        let (with, without) = (scrubber(), Arc::default());
        for total in [1_000, 2 * HALF_BYTES, 2 * HALF_BYTES + 10, 3 * HALF_BYTES] {
            for place in [0, HALF_BYTES - 5, total.saturating_sub(HALF_BYTES + 5), total - 11] {
                let mut output = vec![b'.'; total];
                let place = place.min(total - 11);
                output[place..place + 11].copy_from_slice(&VALUE.as_bytes()[..11]);
                let (one, other) =
                    (captured(&with, &output, true), captured(&without, &output, true));
                assert_eq!(
                    (one.text, one.truncated),
                    (other.text, other.truncated),
                    "{place} of {total}"
                );
            }
        }
    }

    /// A command that was killed may have written one part of the value, and not yet the next.
    #[test]
    fn end_of_interrupted_output_is_withheld() {
        let scrubber = scrubber();
        let margin = scrubber.margin();
        for total in [10, 1_000, 2 * HALF_BYTES, 2 * HALF_BYTES + 10, 3 * HALF_BYTES] {
            let plain = vec![b'.'; total];
            let mut output = plain.clone();
            let known = 10.min(total);
            output[total - known..].copy_from_slice(&VALUE.as_bytes()[..known]);
            let whole = captured(&Arc::default(), &plain, true).text;
            let (one, other) =
                (captured(&scrubber, &output, false), captured(&scrubber, &plain, false));
            assert_eq!(one.text, other.text, "{total}");
            assert_eq!(one.text, whole[..whole.len() - margin.min(total)], "{total}");
            assert!(one.is_withheld && other.is_withheld);
        }
        // Without secrets nothing is withheld.
        let text = captured(&Arc::default(), b"text", false);
        assert_eq!((text.text.as_str(), text.truncated), ("text", false));
    }
}

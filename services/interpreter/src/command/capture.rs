//! Reading the output of a command: its beginning and its end are kept, what lies between is
//! counted.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::task::JoinHandle;

use crate::scrub::Scrubber;

/// Bytes kept of one stream: this many from its beginning and as many from its end, so that one of
/// twice as many is whole.
pub(crate) const HALF: usize = 1 << 20;

/// What was kept of one stream.
#[derive(Debug)]
pub(crate) struct Captured {
    /// The text; bytes that are no UTF-8 are replaced, and a marker stands where something was left
    /// out.
    pub(crate) text: String,
    /// Something was left out.
    pub(crate) truncated: bool,
    /// Bytes that are no UTF-8 were replaced.
    pub(crate) is_replaced: bool,
    /// The stream did not end by itself, and its last bytes are left out: they may be a part of a
    /// secret.
    pub(crate) is_withheld: bool,
}

impl Captured {
    /// Whether nothing was written.
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty()
    }
}

/// Of each half a little more than is shown: a secret that lies across a cut must be known whole to
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

    /// `complete` says that the command ended the stream by itself. Where it did not, the stream
    /// may have broken off within a secret. What could be the first part of one is left out then,
    /// whatever it is.
    fn captured(&mut self, complete: bool) -> Captured {
        let (mut head, tail) =
            (std::mem::take(&mut self.head), Vec::from(std::mem::take(&mut self.tail)));
        let all = head.len() + self.omitted + tail.len();
        let withheld = if complete { 0 } else { self.scrubber.margin().min(all) };
        let mut bytes = Vec::new();
        if self.omitted == 0 {
            // Nothing is missing, so that what lies across the two is known whole as well.
            head.extend_from_slice(&tail);
        }
        let found = self.scrubber.find(&head);
        let is_long = all > 2 * HALF;
        if is_long {
            self.scrubber.render(&head, &found, 0..HALF.min(all - withheld), &mut bytes);
            bytes.extend_from_slice(
                format!("\n[... {} bytes left out ...]\n", all - 2 * HALF).as_bytes(),
            );
            let (end, found) =
                if self.omitted == 0 { (&head, found) } else { (&tail, self.scrubber.find(&tail)) };
            let last = end.len() - HALF..end.len() - withheld.min(HALF);
            self.scrubber.render(end, &found, last, &mut bytes);
        } else {
            self.scrubber.render(&head, &found, 0..head.len() - withheld, &mut bytes);
        }
        let (text, is_replaced) = match String::from_utf8(bytes) {
            Ok(text) => (text, false),
            Err(error) => (String::from_utf8_lossy(error.as_bytes()).into_owned(), true),
        };
        Captured { text, truncated: is_long, is_replaced, is_withheld: withheld > 0 }
    }
}

/// A stream being read in the background, so that a command never waits for a full pipe.
pub(super) struct Capture {
    kept: Arc<Mutex<Kept>>,
    /// Gives whether the end of the stream was reached.
    reading: JoinHandle<bool>,
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
            let Some(mut stream) = stream else { return true };
            let mut buffer = vec![0; 16 * 1024];
            loop {
                match stream.read(&mut buffer).await {
                    Ok(0) => return true,
                    Ok(read) => {
                        shared.lock().unwrap_or_else(PoisonError::into_inner).push(&buffer[..read])
                    }
                    Err(_) => return false,
                }
            }
        });
        Self { kept, reading }
    }

    /// What was read until the end of the stream, or until `patience` is over. `complete` says that
    /// the command was not killed while it may have been writing.
    pub(super) async fn finish(mut self, patience: Duration, complete: bool) -> Captured {
        let read = tokio::time::timeout(patience, &mut self.reading).await;
        if read.is_err() {
            self.reading.abort();
        }
        let complete = complete && matches!(read, Ok(Ok(true)));
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).captured(complete)
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

    fn captured(scrubber: &Arc<Scrubber>, output: &[u8], complete: bool) -> Captured {
        let mut kept = Kept::new(Arc::clone(scrubber));
        output.chunks(7919).for_each(|chunk| kept.push(chunk));
        kept.captured(complete)
    }

    #[test]
    fn short_output_is_kept_whole() {
        let mut kept = Kept::default();
        kept.push(b"one ");
        kept.push(b"two");
        let captured = kept.captured(true);
        assert_eq!((captured.text.as_str(), captured.truncated), ("one two", false));
    }

    #[test]
    fn of_long_output_the_beginning_and_the_end_are_kept() {
        let mut kept = Kept::default();
        kept.push(b"first");
        for _ in 0..3 {
            kept.push(&[b'x'; HALF]);
        }
        kept.push(b"last");
        let captured = kept.captured(true);
        assert!(captured.truncated);
        assert!(captured.text.starts_with("first") && captured.text.ends_with("last"));
        assert!(captured.text.contains("bytes left out"));
        assert!(captured.text.len() < 2 * HALF + 100);
    }

    #[test]
    fn a_secret_is_taken_out_wherever_the_output_is_cut() {
        let scrubber = scrubber();
        let pieces: Vec<&str> =
            (0..=VALUE.len() - 4).map(|start| &VALUE[start..start + 4]).collect();
        // Nothing is left out of what is kept, or little, or much.
        for total in [2 * HALF + 10, 3 * HALF] {
            for cut in [HALF, total - HALF] {
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

    /// A part of a secret is text like any other, at every cut.
    #[test]
    fn output_with_part_of_secret_is_as_without_the_secret() {
        let (with, without) = (scrubber(), Arc::default());
        for total in [1_000, 2 * HALF, 2 * HALF + 10, 3 * HALF] {
            for place in [0, HALF - 5, total.saturating_sub(HALF + 5), total - 11] {
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
    fn output_that_breaks_off_lacks_its_end_whatever_it_is() {
        let scrubber = scrubber();
        let margin = scrubber.margin();
        for total in [10, 1_000, 2 * HALF, 2 * HALF + 10, 3 * HALF] {
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
        // Without secrets nothing is left out.
        let text = captured(&Arc::default(), b"text", false);
        assert_eq!((text.text.as_str(), text.truncated), ("text", false));
    }
}

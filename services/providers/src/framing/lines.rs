//! Newline-delimited JSON: one event per line.

use std::collections::VecDeque;

use super::{Error, Event, Framing, MAX_EVENT_BYTES};

/// The decoder. Every event is called `line`; empty lines are skipped.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    line: Vec<u8>,
}

impl Framing for Lines {
    fn push(&mut self, mut bytes: &[u8], events: &mut VecDeque<Event>) -> Result<(), Error> {
        while let Some(end) = bytes.iter().position(|&byte| byte == b'\n') {
            self.extend(&bytes[..end])?;
            self.end_line(events);
            bytes = &bytes[end + 1..];
        }
        self.extend(bytes)
    }

    fn finish(&mut self, events: &mut VecDeque<Event>) -> Result<(), Error> {
        self.end_line(events);
        Ok(())
    }
}

impl Lines {
    fn extend(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if self.line.len() + bytes.len() > MAX_EVENT_BYTES {
            return Err(Error::TooLarge);
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn end_line(&mut self, events: &mut VecDeque<Event>) {
        // The line is complete, so invalid UTF-8 was never valid.
        let line = String::from_utf8_lossy(&self.line);
        let line = line.trim();
        if !line.is_empty() {
            events.push_back(Event { name: "line".to_owned(), data: line.to_owned() });
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framing::tests::decode;

    #[test]
    fn stream_parses_the_same_at_every_split_without_final_newline() {
        let stream = "{\"a\":\"ä😀\"}\r\n\n  {\"b\":1}\n{\"c\":2}".as_bytes();
        let data =
            |events: Vec<Event>| events.into_iter().map(|event| event.data).collect::<Vec<_>>();
        for at in 0..=stream.len() {
            let (left, right) = stream.split_at(at);
            let events = decode::<Lines>([left, right]).expect("short lines");
            assert_eq!(
                data(events),
                ["{\"a\":\"ä😀\"}", "{\"b\":1}", "{\"c\":2}"],
                "split at {at}"
            );
        }
        assert_eq!(decode::<Lines>(stream.chunks(1)).map(|events| events.len()), Ok(3));
    }

    #[test]
    fn line_without_end_is_rejected() {
        let piece = vec![b'x'; 1024 * 1024];
        assert_eq!(decode::<Lines>((0..9).map(|_| piece.as_slice())), Err(Error::TooLarge));
    }
}

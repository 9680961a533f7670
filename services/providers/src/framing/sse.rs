//! Server-sent events, decoded from bytes as they arrive.
//!
//! An own decoder, because it must be exact at every byte split *and* bounded. The available crates
//! keep a line of any length in memory, and fail the whole stream on one byte that is not UTF-8.

use std::collections::VecDeque;

use super::{Error, Event, Framing, MAX_EVENT_BYTES};

/// The decoder. An event without a name is called `message`.
#[derive(Debug, Default)]
pub(crate) struct ServerSentEvents {
    line: Vec<u8>,
    /// The last byte was a carriage return: a line feed that follows belongs to it.
    after_return: bool,
    /// The first line, and with it a byte order mark, is over.
    started: bool,
    name: String,
    data: String,
    has_data: bool,
}

impl Framing for ServerSentEvents {
    fn push(&mut self, mut bytes: &[u8], events: &mut VecDeque<Event>) -> Result<(), Error> {
        if self.after_return && !bytes.is_empty() {
            self.after_return = false;
            if bytes[0] == b'\n' {
                bytes = &bytes[1..];
            }
        }
        while let Some(end) = bytes.iter().position(|&byte| byte == b'\n' || byte == b'\r') {
            self.extend(&bytes[..end])?;
            self.end_line(events)?;
            let returned = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            if returned {
                match bytes.first() {
                    Some(b'\n') => bytes = &bytes[1..],
                    Some(_) => {}
                    None => self.after_return = true,
                }
            }
        }
        self.extend(bytes)
    }

    /// Some compatible servers omit the blank line after the last event.
    fn finish(&mut self, events: &mut VecDeque<Event>) -> Result<(), Error> {
        if !self.line.is_empty() {
            self.end_line(events)?;
        }
        self.dispatch(events);
        Ok(())
    }
}

impl ServerSentEvents {
    fn extend(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if self.line.len() + bytes.len() > MAX_EVENT_BYTES {
            return Err(Error::TooLarge);
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn end_line(&mut self, events: &mut VecDeque<Event>) -> Result<(), Error> {
        let mut bytes = std::mem::take(&mut self.line);
        if !std::mem::replace(&mut self.started, true) && bytes.starts_with(b"\xEF\xBB\xBF") {
            bytes.drain(..3);
        }
        if bytes.is_empty() {
            self.dispatch(events);
            return Ok(());
        }
        // The line is complete, so invalid UTF-8 was never valid; the format says to replace it.
        let line = String::from_utf8_lossy(&bytes);
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => {
                if self.data.len() + value.len() > MAX_EVENT_BYTES {
                    return Err(Error::TooLarge);
                }
                if std::mem::replace(&mut self.has_data, true) {
                    self.data.push('\n');
                }
                self.data.push_str(value);
            }
            "event" => value.clone_into(&mut self.name),
            // `id` and `retry` are for reconnecting, which no vendor offers; an empty field name is
            // a comment.
            _ => {}
        }
        // The allocation serves the next line.
        bytes.clear();
        self.line = bytes;
        Ok(())
    }

    fn dispatch(&mut self, events: &mut VecDeque<Event>) {
        let name = std::mem::take(&mut self.name);
        let data = std::mem::take(&mut self.data);
        if std::mem::take(&mut self.has_data) {
            events.push_back(Event {
                name: if name.is_empty() { "message".to_owned() } else { name },
                data,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<(String, String)> {
        let events = super::super::tests::decode::<ServerSentEvents>(pieces)
            .expect("the stream is within its bounds");
        events.into_iter().map(|event| (event.name, event.data)).collect()
    }

    fn event(name: &str, data: &str) -> (String, String) {
        (name.to_owned(), data.to_owned())
    }

    const STREAM: &[u8] = b"\xEF\xBB\xBFevent: start\r\ndata: {\"a\":\r\ndata: \"\xC3\xA4\xF0\x9F\x98\x80\"}\r\n\r\n: ping\n\nid: 7\nretry: 10\ndata:no space\rdata\r\rdata:  two\n\nevent: empty\n\ndata: [DONE]\n\n";

    fn expected() -> Vec<(String, String)> {
        vec![
            event("start", "{\"a\":\n\"ä😀\"}"),
            event("message", "no space\n"),
            event("message", " two"),
            event("message", "[DONE]"),
        ]
    }

    #[test]
    fn stream_split_in_two_parses_the_same() {
        for at in 0..=STREAM.len() {
            let (left, right) = STREAM.split_at(at);
            assert_eq!(decode([left, right]), expected(), "split at {at}");
        }
    }

    #[test]
    fn stream_split_into_bytes_parses_the_same() {
        assert_eq!(decode(STREAM.chunks(1)), expected());
        assert_eq!(decode(STREAM.chunks(3)), expected());
    }

    #[test]
    fn last_event_needs_no_blank_line() {
        assert_eq!(
            decode([b"data: a\n\ndata: b".as_slice()]),
            [event("message", "a"), event("message", "b")]
        );
    }

    #[test]
    fn truncated_utf8_is_replaced() {
        assert_eq!(
            decode([b"data: a\xF0\x9F\n\ndata: b\n\n".as_slice()]),
            [event("message", "a\u{FFFD}"), event("message", "b")]
        );
    }

    #[test]
    fn line_without_end_is_rejected() {
        let mut decoder = ServerSentEvents::default();
        let mut events = VecDeque::new();
        let piece = vec![b'x'; 1024 * 1024];
        let result = (0..9).try_for_each(|_| decoder.push(&piece, &mut events));
        assert_eq!(result, Err(Error::TooLarge));
    }

    #[test]
    fn event_of_endless_lines_is_rejected() {
        let mut decoder = ServerSentEvents::default();
        let mut events = VecDeque::new();
        let line = [b"data: ".as_slice(), &vec![b'x'; 1024 * 1024], b"\n"].concat();
        let result = (0..9).try_for_each(|_| decoder.push(&line, &mut events));
        assert_eq!(result, Err(Error::TooLarge));
    }
}

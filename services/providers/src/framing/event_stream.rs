//! Amazon's binary event stream encoding (`application/vnd.amazon.eventstream`): messages with
//! typed headers, a payload and two checksums. Specified at
//! <https://smithy.io/2.0/aws/amazon-eventstream.html>.
//!
//! An own decoder, because the crate for it depends on the runtime of Amazon's whole client.

use std::collections::VecDeque;

use super::{Error, Event, Framing, MAX_EVENT_BYTES};

/// Total length, header length, and the checksum of both, four bytes each.
const PRELUDE_BYTES: usize = 12;
/// The checksum of everything before it.
const TRAILER_BYTES: usize = 4;

/// The decoder. The name of an event is its `:event-type`, `:exception-type` or `:error-code`. Its
/// data is the payload, or the message of an error without payload as `{"message": …}`.
#[derive(Debug, Default)]
pub(crate) struct EventStream {
    buffer: Vec<u8>,
}

impl Framing for EventStream {
    fn push(&mut self, bytes: &[u8], events: &mut VecDeque<Event>) -> Result<(), Error> {
        self.buffer.extend_from_slice(bytes);
        let mut taken = 0;
        let result = loop {
            match parse_message(&self.buffer[taken..]) {
                Ok(Some((length, event))) => {
                    taken += length;
                    events.extend(event);
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        self.buffer.drain(..taken);
        result
    }

    fn finish(&mut self, _events: &mut VecDeque<Event>) -> Result<(), Error> {
        if self.buffer.is_empty() {
            Ok(())
        } else {
            Err(Error::Damaged("it ends within a message"))
        }
    }
}

/// The first message of `bytes` with its length; none while it is incomplete. A message of an
/// unknown kind gives no event.
fn parse_message(bytes: &[u8]) -> Result<Option<(usize, Option<Event>)>, Error> {
    let Some(prelude) = bytes.first_chunk::<PRELUDE_BYTES>() else { return Ok(None) };
    let (total, headers) = (big_endian(&prelude[..4]), big_endian(&prelude[4..8]));
    // Before the lengths are trusted, and before the decoder waits for more.
    if checksum(&prelude[..8]) != big_endian(&prelude[8..]) {
        return Err(Error::Damaged("the checksum of a message's length is wrong"));
    }
    if total > MAX_EVENT_BYTES {
        return Err(Error::TooLarge);
    }
    if total < PRELUDE_BYTES + TRAILER_BYTES || headers > total - PRELUDE_BYTES - TRAILER_BYTES {
        return Err(Error::Damaged("a message's lengths contradict each other"));
    }
    let Some(whole) = bytes.get(..total) else { return Ok(None) };
    let (body, trailer) = whole.split_at(total - TRAILER_BYTES);
    if checksum(body) != big_endian(trailer) {
        return Err(Error::Damaged("the checksum of a message is wrong"));
    }
    let (headers, payload) = body[PRELUDE_BYTES..].split_at(headers);
    let headers =
        Headers::read(headers).ok_or(Error::Damaged("the headers of a message cannot be read"))?;
    Ok(Some((total, headers.into_event(payload))))
}

/// The headers that say what a message is.
#[derive(Default)]
struct Headers {
    message_type: String,
    name: String,
    error_message: String,
}

impl Headers {
    fn read(mut bytes: &[u8]) -> Option<Self> {
        let mut found = Self::default();
        while let Some((length, rest)) = bytes.split_first() {
            let (name, rest) = rest.split_at_checked(usize::from(*length))?;
            let (kind, rest) = rest.split_first()?;
            let (size, rest) = match kind {
                // True and false; integers of one, two, four and eight bytes.
                0 | 1 => (0, rest),
                2 => (1, rest),
                3 => (2, rest),
                4 => (4, rest),
                5 | 8 => (8, rest),
                // Bytes and strings have a length; a time has eight bytes, a UUID sixteen.
                6 | 7 => {
                    let (size, rest) = rest.split_at_checked(2)?;
                    (big_endian(size), rest)
                }
                9 => (16, rest),
                _ => return None,
            };
            let (value, rest) = rest.split_at_checked(size)?;
            if *kind == 7 {
                let value = String::from_utf8_lossy(value).into_owned();
                match name {
                    b":message-type" => found.message_type = value,
                    b":event-type" | b":exception-type" | b":error-code" => found.name = value,
                    b":error-message" => found.error_message = value,
                    _ => {}
                }
            }
            bytes = rest;
        }
        Some(found)
    }

    fn into_event(self, payload: &[u8]) -> Option<Event> {
        let data = match self.message_type.as_str() {
            "error" => serde_json::json!({"message": self.error_message}).to_string(),
            _ => String::from_utf8_lossy(payload).into_owned(),
        };
        (!self.name.is_empty()).then_some(Event { name: self.name, data })
    }
}

fn big_endian(bytes: &[u8]) -> usize {
    bytes.iter().fold(0, |number, byte| (number << 8) | usize::from(*byte))
}

fn checksum(bytes: &[u8]) -> usize {
    usize::try_from(crc32fast::hash(bytes)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use construct_tests::vendor::bedrock;

    use super::*;
    use crate::framing::tests::decode;

    /// From the format's own test suite (`all_headers` there has every type of header): an empty
    /// message and one with a header.
    const EMPTY: &[u8] =
        &[0, 0, 0, 0x10, 0, 0, 0, 0, 0x05, 0xC2, 0x48, 0xEB, 0x7D, 0x98, 0xC8, 0xFF];

    fn event(name: &str, data: &str) -> Event {
        Event { name: name.into(), data: data.into() }
    }

    fn stream() -> Vec<u8> {
        [
            bedrock::event("messageStart", r#"{"role":"assistant"}"#),
            EMPTY.to_vec(),
            bedrock::exception("throttlingException", r#"{"message":"ä😀"}"#),
            bedrock::error("InternalError", "no"),
        ]
        .concat()
    }

    fn expected() -> Vec<Event> {
        vec![
            event("messageStart", r#"{"role":"assistant"}"#),
            event("throttlingException", r#"{"message":"ä😀"}"#),
            event("InternalError", r#"{"message":"no"}"#),
        ]
    }

    #[test]
    fn stream_parses_the_same_at_every_split() {
        let stream = stream();
        for at in 0..=stream.len() {
            let (left, right) = stream.split_at(at);
            assert_eq!(decode::<EventStream>([left, right]), Ok(expected()), "split at {at}");
        }
        assert_eq!(decode::<EventStream>(stream.chunks(1)), Ok(expected()));
    }

    #[test]
    fn every_damaged_byte_is_detected() {
        let stream = bedrock::event("messageStart", r#"{"role":"assistant"}"#);
        for at in 0..stream.len() {
            let mut damaged = stream.clone();
            damaged[at] ^= 0x10;
            assert!(decode::<EventStream>([damaged.as_slice()]).is_err(), "byte {at}");
        }
    }

    #[test]
    fn stream_ending_within_a_message_is_corrupt() {
        let stream = stream();
        for end in 1..bedrock::event("messageStart", r#"{"role":"assistant"}"#).len() {
            let cut = decode::<EventStream>([&stream[..end]]);
            assert_eq!(cut, Err(Error::Damaged("it ends within a message")), "{end}");
        }
    }

    #[test]
    fn message_claiming_a_huge_length_is_rejected_at_once() {
        let mut prelude = [0x40, 0, 0, 0, 0, 0, 0, 0].to_vec();
        prelude.extend(crc32fast::hash(&prelude).to_be_bytes());
        assert_eq!(decode::<EventStream>([prelude.as_slice()]), Err(Error::TooLarge));
    }

    #[test]
    fn headers_of_every_type_are_skipped() {
        let mut headers = Vec::new();
        let mut header = |name: &str, kind: u8, value: &[u8]| {
            headers.push(u8::try_from(name.len()).expect("short"));
            headers.extend(name.as_bytes());
            headers.push(kind);
            headers.extend(value);
        };
        for (kind, length) in [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (5, 8), (8, 8), (9, 16)] {
            header("other", kind, &vec![7; length]);
        }
        header("bytes", 6, &[0, 3, 1, 2, 3]);
        header(":event-type", 7, &[0, 1, b'x']);
        assert_eq!(
            decode::<EventStream>([bedrock::message(&headers, b"{}").as_slice()]),
            Ok(vec![event("x", "{}")])
        );
    }
}

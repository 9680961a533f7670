//! Finds the boundaries of NATS' protocol operations in a byte stream: each is a line, and a
//! message's line is followed by its payload
//! (<https://docs.nats.io/reference/reference-protocols/nats-protocol>).

use std::io;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A message to or from the server.
    Message,
    /// Any other operation.
    Word,
}

/// Operations with a payload, whose length is their last word. With headers (`H`), that is the
/// length of both.
const MESSAGES: [&[u8]; 4] = [b"MSG", b"HMSG", b"PUB", b"HPUB"];

/// The line end after a payload.
const LINE_END: usize = 2;

/// Splits input into frames, without keeping their content.
#[derive(Debug, Default)]
pub(super) struct Frames {
    /// The incomplete current line.
    line: Vec<u8>,
    /// The bytes that are missing of the payload after a complete line; 0: none.
    left: usize,
}

impl Frames {
    /// The number of bytes at the beginning of `piece` that belong to the current frame, and the
    /// frame's kind if it ends there; otherwise all of the piece belongs to it.
    ///
    /// # Errors
    /// When the input is not the protocol.
    pub(super) fn next(&mut self, piece: &[u8]) -> io::Result<(usize, Option<Kind>)> {
        let mut length = 0;
        if self.left == 0 {
            let Some(end) = piece.iter().position(|byte| *byte == b'\n') else {
                self.line.extend_from_slice(piece);
                return Ok((piece.len(), None));
            };
            length = end + 1;
            self.line.extend_from_slice(&piece[..length]);
            let payload = payload(&self.line)?;
            self.line.clear();
            match payload {
                Some(payload) => self.left = payload + LINE_END,
                None => return Ok((length, Some(Kind::Word))),
            }
        }
        let there = self.left.min(piece.len() - length);
        self.left -= there;
        Ok((length + there, (self.left == 0).then_some(Kind::Message)))
    }
}

/// The length of the payload after a line.
fn payload(line: &[u8]) -> io::Result<Option<usize>> {
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let operation = words.next().unwrap_or_default();
    if !MESSAGES.iter().any(|name| name.eq_ignore_ascii_case(operation)) {
        return Ok(None);
    }
    let length = words.next_back().and_then(|word| std::str::from_utf8(word).ok());
    length
        .and_then(|word| word.parse::<usize>().ok())
        .map(Some)
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The subject and the reply subject of a message.
pub(super) fn address(frame: &[u8]) -> Option<(&str, Option<&str>)> {
    let line = frame.split(|byte| *byte == b'\n').next()?;
    let words: Vec<&str> = std::str::from_utf8(line).ok()?.split_ascii_whitespace().collect();
    match words.as_slice() {
        ["PUB", subject, _] | ["HPUB" | "MSG", subject, _, _] | ["HMSG", subject, _, _, _] => {
            Some((*subject, None))
        }
        ["PUB", subject, reply, _]
        | ["HPUB", subject, reply, _, _]
        | ["MSG", subject, _, reply, _]
        | ["HMSG", subject, _, reply, _, _] => Some((*subject, Some(*reply))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames of both directions, with payloads that look like frames.
    const EXCHANGE: [(&[u8], Kind); 13] = [
        (b"INFO {\"server_id\":\"a\",\"max_payload\":1048576}\r\n", Kind::Word),
        (b"CONNECT {\"verbose\":true,\"headers\":true}\r\n", Kind::Word),
        (b"+OK\r\n", Kind::Word),
        (b"PING\r\n", Kind::Word),
        (b"PONG\r\n", Kind::Word),
        (b"SUB _INBOX.a.> 7\r\n", Kind::Word),
        (b"MSG a.b 7 5\r\nhello\r\n", Kind::Message),
        (b"MSG a.b 7 reply.to 23\r\nx\r\nMSG a.b 7 3\r\nabc\r\n\r\n\r\n", Kind::Message),
        (b"MSG\ta.b  7 0\r\n\r\n", Kind::Message),
        (b"HMSG a.b 7 28 28\r\nNATS/1.0 404 No Messages\r\n\r\n\r\n", Kind::Message),
        (b"pub a.b reply.to 9\r\nPING\r\nMSG\r\n", Kind::Message),
        (b"HPUB a.b 18 23\r\nNATS/1.0\r\nA: B\r\n\r\nhello\r\n", Kind::Message),
        (b"-ERR 'Permissions Violation for Publish to \"MSG 5\"'\r\n", Kind::Word),
    ];

    /// The frames in these pieces.
    fn frames<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<(Vec<u8>, Kind)> {
        let (mut told, mut frame, mut found) = (Frames::default(), Vec::new(), Vec::new());
        for mut piece in pieces {
            while !piece.is_empty() {
                let (length, kind) = told.next(piece).unwrap();
                frame.extend_from_slice(&piece[..length]);
                piece = &piece[length..];
                match kind {
                    Some(kind) => found.push((std::mem::take(&mut frame), kind)),
                    None => {
                        assert!(piece.is_empty(), "a frame that does not end takes the whole piece")
                    }
                }
            }
        }
        assert_eq!(frame, b"", "all frames have an end");
        found
    }

    fn exchange() -> (Vec<u8>, Vec<(Vec<u8>, Kind)>) {
        (
            EXCHANGE.map(|(frame, _)| frame).concat(),
            EXCHANGE.map(|(frame, kind)| (frame.to_vec(), kind)).to_vec(),
        )
    }

    #[test]
    fn frames_are_the_same_for_every_split() {
        let (all, expected) = exchange();
        assert_eq!(frames([all.as_slice()]), expected);
        for at in 0..=all.len() {
            let (before, behind) = all.split_at(at);
            assert_eq!(frames([before, behind]), expected, "split at {at}");
        }
    }

    #[test]
    fn frames_are_the_same_in_small_pieces() {
        let (all, expected) = exchange();
        for size in 1..=16 {
            assert_eq!(frames(all.chunks(size)), expected, "pieces of {size}");
        }
    }

    #[test]
    fn message_frame_yields_subject_and_reply() {
        let found: Vec<_> = EXCHANGE.iter().filter_map(|(frame, _)| address(frame)).collect();
        let (there, back) = (("a.b", None), ("a.b", Some("reply.to")));
        // In lowercase; no client of ours writes it this way.
        assert_eq!(found, [there, back, there, there, there]);
        assert_eq!(address(b"HPUB a.b reply.to 12 12\r\n"), Some(back));
        assert_eq!(address(b"HMSG a.b 7 reply.to 12 12\r\n"), Some(back));
    }

    #[test]
    fn message_without_length_is_a_protocol_error() {
        for line in ["MSG a.b 7 x\r\n", "PUB\r\n", "HMSG a 7 -1\r\n"] {
            let refused = Frames::default().next(line.as_bytes()).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{line}");
        }
    }
}

//! Where the operations of NATS's protocol begin and end in what comes in pieces: each is a line,
//! and a message's is followed by its payload
//! (<https://docs.nats.io/reference/reference-protocols/nats-protocol>).

use std::io;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A message, on its way to the server or from there.
    Message,
    /// Everything else that is said.
    Word,
}

/// Operations that are followed by a payload, whose length is their last word. With headers (`H`)
/// that is the length of both.
const MESSAGES: [&[u8]; 4] = [b"MSG", b"HMSG", b"PUB", b"HPUB"];

/// The line end behind a payload.
const LINE_END: usize = 2;

/// Tells frames apart. What they hold is not kept.
#[derive(Debug, Default)]
pub(super) struct Frames {
    /// The line that has begun, up to here.
    line: Vec<u8>,
    /// What is still to come of the payload behind a line that is complete; 0: none is.
    left: usize,
}

impl Frames {
    /// How much of the beginning of `piece` belongs to the frame that has begun, and what that is
    /// if it ends there; if it does not, all of the piece belongs to it.
    ///
    /// # Errors
    /// When that is not the protocol.
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

/// The length of the payload that follows a line.
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

/// Where a message goes, and where it says that its answer goes.
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

    /// What passes in both directions, one frame each, with payloads that look like frames.
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

    /// The frames in what comes in these pieces.
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
        // In lower letters no client of ours writes it.
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

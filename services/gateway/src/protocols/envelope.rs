//! Messages on a stream: one byte of flags, the length as four bytes (big endian), the message.
//! gRPC and Connect share this format; the flags differ.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use tonic::Status;

use crate::status;

/// The message is compressed.
pub(super) const COMPRESSED: u8 = 1;
/// Connect: the last message, which has the status of the stream.
pub(super) const END: u8 = 2;
const HEADER: usize = 5;

/// One message with its flags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Envelope {
    pub(super) flags: u8,
    pub(super) message: Bytes,
}

impl Envelope {
    /// # Panics
    /// When the message has 4 GiB or more, which no message here has.
    pub(super) fn encode(flags: u8, message: &[u8]) -> Bytes {
        let length = u32::try_from(message.len()).expect("a message has at most a few megabytes");
        let mut bytes = BytesMut::with_capacity(HEADER + message.len());
        bytes.put_u8(flags);
        bytes.put_u32(length);
        bytes.put_slice(message);
        bytes.freeze()
    }
}

/// Splits the bytes of a stream into messages, however they were chunked.
#[derive(Debug)]
pub(super) struct Envelopes {
    buffer: BytesMut,
    /// Maximum size of a message, in bytes.
    limit: usize,
}

impl Envelopes {
    pub(super) fn new(limit: usize) -> Self {
        Self { buffer: BytesMut::new(), limit }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next message, if it is complete.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when the header announces a message that is too large.
    pub(super) fn next(&mut self) -> Result<Option<Envelope>, Status> {
        let Some(header) = self.buffer.first_chunk::<HEADER>() else { return Ok(None) };
        let [flags, length @ ..] = *header;
        let length = u32::from_be_bytes(length) as usize;
        if length > self.limit {
            return Err(status::too_large(self.limit));
        }
        if self.buffer.len() < HEADER + length {
            return Ok(None);
        }
        self.buffer.advance(HEADER);
        Ok(Some(Envelope { flags, message: self.buffer.split_to(length).freeze() }))
    }

    /// Whether the buffer ends within a message.
    pub(super) fn is_incomplete(&self) -> bool {
        !self.buffer.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(envelopes: &mut Envelopes) -> Vec<Envelope> {
        std::iter::from_fn(|| envelopes.next().expect("none is too large")).collect()
    }

    #[test]
    fn messages_do_not_depend_on_chunk_boundaries() {
        let sent = [(0, &b"one"[..]), (COMPRESSED, b""), (END, b"{}")];
        let bytes: Vec<u8> =
            sent.iter().flat_map(|(flags, message)| Envelope::encode(*flags, message)).collect();
        for cut in 0..=bytes.len() {
            let mut envelopes = Envelopes::new(16);
            envelopes.push(&bytes[..cut]);
            let mut messages = all(&mut envelopes);
            envelopes.push(&bytes[cut..]);
            messages.extend(all(&mut envelopes));
            let messages: Vec<_> =
                messages.iter().map(|envelope| (envelope.flags, &envelope.message[..])).collect();
            assert_eq!(messages, sent, "cut at {cut}");
            assert!(!envelopes.is_incomplete());
        }
    }

    #[test]
    fn too_large_message_is_refused_by_its_header() {
        let mut envelopes = Envelopes::new(16);
        envelopes.push(&[0, 0, 0, 0, 17]);
        assert_eq!(
            envelopes.next().expect_err("17 is more than 16").code(),
            tonic::Code::ResourceExhausted
        );
    }

    proptest! {
        /// No input makes it panic, buffer more than the limit, or find messages that were not
        /// sent.
        #[test]
        fn arbitrary_bytes_do_not_panic(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20)) {
            let mut envelopes = Envelopes::new(64);
            let mut pushed = 0;
            let mut parsed = 0;
            for chunk in chunks {
                pushed += chunk.len();
                envelopes.push(&chunk);
                while let Ok(Some(envelope)) = envelopes.next() {
                    prop_assert!(envelope.message.len() <= 64);
                    parsed += HEADER + envelope.message.len();
                }
            }
            prop_assert_eq!(parsed + envelopes.buffer.len(), pushed);
        }
    }
}

//! Divides a vendor's stream into events. Without I/O: takes bytes split anywhere, returns events.

mod event_stream;
mod lines;
mod sse;

use std::collections::VecDeque;

pub(crate) use self::{event_stream::EventStream, lines::Lines, sse::ServerSentEvents};

/// Bytes of one event at most. A larger one ends the stream, because a vendor that never ends an
/// event would otherwise exhaust the memory. A whole script in one event is far smaller.
const MAX_EVENT_BYTES: usize = 8 * 1024 * 1024;

/// The stream violates its format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error("an event of the stream is larger than {MAX_EVENT_BYTES} bytes")]
    TooLarge,
    #[error("the stream is damaged: {0}")]
    Damaged(&'static str),
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    /// The event name of the stream; formats without names use a fixed one.
    pub(crate) name: String,
    pub(crate) data: String,
}

/// Takes bytes, split anywhere, and returns events.
pub(crate) trait Framing: Default + Send + 'static {
    /// Takes the next bytes and appends the events that they complete.
    fn push(&mut self, bytes: &[u8], events: &mut VecDeque<Event>) -> Result<(), Error>;

    /// The stream has ended: appends an event that only lacks its end mark, in formats whose end
    /// mark servers omit. A truncated event fails when its JSON is parsed.
    fn finish(&mut self, events: &mut VecDeque<Event>) -> Result<(), Error>;
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The events of a stream given in pieces.
    pub(crate) fn decode<'a, F: Framing>(
        pieces: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<Vec<Event>, Error> {
        let (mut framing, mut events) = (F::default(), VecDeque::new());
        for piece in pieces {
            framing.push(piece, &mut events)?;
        }
        framing.finish(&mut events)?;
        Ok(events.into())
    }
}

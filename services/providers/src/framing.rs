//! How a vendor's stream is cut into events, whatever they mean. Without I/O: bytes come split
//! anywhere, and events leave.

mod event_stream;
mod lines;
mod sse;

use std::collections::VecDeque;

pub(crate) use self::{event_stream::EventStream, lines::Lines, sse::ServerSentEvents};

/// What one event may hold at most, in bytes. Beyond it the stream is given up, because a vendor
/// that never ends an event would otherwise fill the memory. A whole script in one event is far
/// smaller.
const MAX_EVENT_BYTES: usize = 8 * 1024 * 1024;

/// The stream is not what its format allows.
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
    /// What the stream calls it; formats without names have a fixed one.
    pub(crate) name: String,
    pub(crate) data: String,
}

/// Feeds on bytes, split anywhere; gives events.
pub(crate) trait Framing: Default + Send + 'static {
    /// Takes the next bytes and appends the events they complete.
    fn push(&mut self, bytes: &[u8], events: &mut VecDeque<Event>) -> Result<(), Error>;

    /// The stream has ended: appends what only lacks its end mark, where the format has one that
    /// servers leave out. An event that was cut within fails when its JSON is read.
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

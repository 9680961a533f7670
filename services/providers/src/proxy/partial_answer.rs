//! A partial answer, in the pieces of all protocols.

use construct_domain::money::Usage;
use construct_proto::mesh::v1::{FailureClass, model_completed::StopReason};

use crate::{answer, failure::Failure, meter, vendor::Chunk};

/// Bytes of one answer at most.
const MAX_ANSWER_BYTES: usize = 16 * 1024 * 1024;
/// Calls of one answer at most.
const MAX_CALLS: usize = 128;

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    Text(String),
    /// `data` is what its vendor wants back.
    Thinking {
        text: String,
        data: String,
    },
    Call {
        slot: u32,
        id: String,
        name: String,
        arguments: String,
    },
}

/// What a chunk changed in the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceChange {
    /// A piece began with this chunk.
    Started(usize),
    /// A piece was extended.
    Extended(usize),
    /// No piece: the usage, or the stop reason.
    None,
}

/// An answer so far.
#[derive(Debug, Default)]
pub(crate) struct PartialAnswer {
    /// Makes the call ids of this answer unique.
    id: String,
    pub(crate) pieces: Vec<Piece>,
    input_chars: usize,
    /// Bytes that the model wrote.
    output_bytes: usize,
    /// Bytes that the vendor wants back and the model did not write: they count toward the size
    /// limit, not toward the usage.
    opaque_bytes: usize,
    reported: Option<Usage>,
    stop: Option<StopReason>,
}

impl PartialAnswer {
    pub(crate) fn new(id: &str, input_chars: usize) -> Self {
        Self { id: id.to_owned(), input_chars, ..Self::default() }
    }

    pub(crate) fn push(&mut self, chunk: &Chunk) -> Result<PieceChange, Failure> {
        let last = self.pieces.len().wrapping_sub(1);
        let new = self.pieces.len();
        match chunk {
            Chunk::Text(text) => {
                self.add_bytes(text.len())?;
                if let Some(Piece::Text(whole)) = self.pieces.last_mut() {
                    whole.push_str(text);
                    return Ok(PieceChange::Extended(last));
                }
                self.pieces.push(Piece::Text(text.clone()));
            }
            Chunk::Thinking(text) => {
                self.add_bytes(text.len())?;
                if let Some(Piece::Thinking { text: whole, data }) = self.pieces.last_mut()
                    && data.is_empty()
                {
                    whole.push_str(text);
                    return Ok(PieceChange::Extended(last));
                }
                self.pieces.push(Piece::Thinking { text: text.clone(), data: String::new() });
            }
            Chunk::ThinkingData(of_thought) => {
                self.opaque_bytes += of_thought.len();
                self.add_bytes(0)?;
                if let Some(Piece::Thinking { data, .. }) = self.pieces.last_mut()
                    && data.is_empty()
                {
                    data.clone_from(of_thought);
                    return Ok(PieceChange::Extended(last));
                }
                self.pieces.push(Piece::Thinking { text: String::new(), data: of_thought.clone() });
            }
            Chunk::Call { slot, id, name } => {
                let calls = self.calls();
                if calls >= MAX_CALLS {
                    let words = format!("the model made more than {MAX_CALLS} calls in one answer");
                    return Err(Failure::new(FailureClass::InvalidRequest, words));
                }
                // Some vendors send no call ids, and every client needs an id for the result.
                let id =
                    if id.is_empty() { format!("call_{}_{calls}", self.id) } else { id.clone() };
                self.pieces.push(Piece::Call {
                    slot: *slot,
                    id,
                    name: name.clone(),
                    arguments: String::new(),
                });
            }
            Chunk::Arguments { slot: of, json } => {
                self.add_bytes(json.len())?;
                let found =
                    self.pieces.iter_mut().enumerate().find_map(|(at, piece)| match piece {
                        Piece::Call { slot, arguments, .. } if slot == of => Some((at, arguments)),
                        _ => None,
                    });
                let (at, arguments) = found.ok_or_else(|| {
                    Failure::transient("the stream holds arguments of a call that never began")
                })?;
                arguments.push_str(json);
                return Ok(PieceChange::Extended(at));
            }
            Chunk::Usage(usage) => {
                self.reported = Some(*usage);
                return Ok(PieceChange::None);
            }
            Chunk::Stop(reason) => {
                self.stop = Some(*reason);
                return Ok(PieceChange::None);
            }
            Chunk::Named { .. } => return Ok(PieceChange::None),
            Chunk::Vector(_) => return Err(answer::vector_in_answer()),
        }
        Ok(PieceChange::Started(new))
    }

    /// The number of calls so far.
    pub(crate) fn calls(&self) -> usize {
        self.pieces.iter().filter(|piece| matches!(piece, Piece::Call { .. })).count()
    }

    /// All text.
    pub(crate) fn text(&self) -> String {
        let texts = self
            .pieces
            .iter()
            .filter_map(|piece| if let Piece::Text(text) = piece { Some(&**text) } else { None });
        texts.collect()
    }

    /// All visible thinking.
    pub(crate) fn thinking(&self) -> String {
        let texts = self.pieces.iter().filter_map(|piece| match piece {
            Piece::Thinking { text, .. } => Some(&**text),
            _ => None,
        });
        texts.collect()
    }

    /// The usage so far. Usage that the vendor has not reported is estimated: an interrupted answer
    /// is not free.
    pub(crate) fn usage(&self, complete: bool) -> Usage {
        meter::reported_or_estimated(self.reported, self.output_bytes, complete, false, || {
            self.input_chars
        })
    }

    /// The stop reason. Some servers report a normal end after calls; what counts is whether there
    /// are any.
    pub(crate) fn stop(&self) -> StopReason {
        match (self.stop.unwrap_or(StopReason::EndTurn), self.calls() > 0) {
            (StopReason::EndTurn | StopReason::Unspecified, true) => StopReason::ToolUse,
            (StopReason::ToolUse | StopReason::Unspecified, false) => StopReason::EndTurn,
            (reason, _) => reason,
        }
    }

    fn add_bytes(&mut self, bytes: usize) -> Result<(), Failure> {
        self.output_bytes += bytes;
        if self.output_bytes + self.opaque_bytes > MAX_ANSWER_BYTES {
            let words = format!("the model's answer is larger than {MAX_ANSWER_BYTES} bytes");
            return Err(Failure::new(FailureClass::InvalidRequest, words));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opaque_data_counts_toward_the_size_limit_but_not_usage() {
        let mut answer = PartialAnswer::new("answer", 0);
        let data = Chunk::ThinkingData("x".repeat(1024 * 1024));
        for _ in 0..16 {
            answer.push(&data).expect("it fits");
        }
        assert_eq!(answer.usage(true).output_tokens, 0);
        assert!(
            answer.push(&data).is_err_and(|failure| failure.class == FailureClass::InvalidRequest)
        );
    }
}

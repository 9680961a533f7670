//! Builds an answer: takes chunks, returns the text to show at once, and in the end the blocks.

mod arguments;

use construct_proto::{
    mesh::v1::{FailureClass, model_completed::StopReason},
    v1::{self, CodeInterpreterCall, Text, Thinking, block},
};
use serde_json::Value;

use self::arguments::ArgumentExtractor;
use crate::{
    failure::Failure,
    vendor::{Chunk, Origin, Request, Tool},
};

/// Bytes of one answer at most. An endless answer is rejected here.
const MAX_ANSWER_BYTES: usize = 16 * 1024 * 1024;
/// Calls of one answer at most.
const MAX_CALLS: usize = 64;
/// A rule of thumb for tokens that no vendor has counted.
const CHARS_PER_TOKEN: usize = 4;

/// Text of the answer that has just become visible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VisibleText {
    /// The index of the growing block.
    pub(crate) block: u32,
    pub(crate) kind: BlockKind,
    pub(crate) text: String,
}

/// The content of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockKind {
    Text,
    Code,
    Thinking,
}

/// A complete answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CompletedAnswer {
    pub(crate) blocks: Vec<v1::Block>,
    pub(crate) stop_reason: StopReason,
    /// Input tokens, cached ones included, as the vendor has counted those of the answered call; 0:
    /// not counted.
    pub(crate) input_tokens: i64,
}

/// One answer of one attempt.
#[derive(Debug)]
pub(crate) struct Answer {
    step_id: String,
    origin: Origin,
    code_tool: Option<Tool>,
    pieces: Vec<Piece>,
    bytes: usize,
    stop: Option<StopReason>,
}

#[derive(Debug)]
enum Piece {
    Text(String),
    Thinking {
        text: String,
        data: String,
    },
    Call {
        slot: u32,
        id: String,
        name: String,
        arguments: String,
        extractor: Option<ArgumentExtractor>,
    },
}

impl Answer {
    pub(crate) fn new(request: &Request) -> Self {
        Self {
            step_id: request.step_id.clone(),
            origin: request.origin.clone(),
            code_tool: request.tools.first().cloned(),
            pieces: Vec::new(),
            bytes: 0,
            stop: None,
        }
    }

    /// The text of an incomplete answer. Its calls may be truncated, and its thinking may lack the
    /// proof.
    pub(crate) fn partial_blocks(self) -> Vec<v1::Block> {
        let texts = self.pieces.into_iter().filter_map(|piece| match piece {
            Piece::Text(text) => Some(v1::Block { block: Some(block::Block::Text(Text { text })) }),
            Piece::Thinking { .. } | Piece::Call { .. } => None,
        });
        texts.collect()
    }

    /// Takes the next chunk.
    pub(crate) fn push(&mut self, chunk: Chunk) -> Result<Option<VisibleText>, Failure> {
        match chunk {
            Chunk::Text(text) => {
                self.add_bytes(text.len())?;
                match self.pieces.last_mut() {
                    Some(Piece::Text(whole)) => whole.push_str(&text),
                    _ => self.pieces.push(Piece::Text(text.clone())),
                }
                Ok(Some(VisibleText { block: self.last_block(), kind: BlockKind::Text, text }))
            }
            Chunk::Thinking(text) => {
                self.add_bytes(text.len())?;
                match self.pieces.last_mut() {
                    Some(Piece::Thinking { text: whole, data }) if data.is_empty() => {
                        whole.push_str(&text)
                    }
                    _ => self
                        .pieces
                        .push(Piece::Thinking { text: text.clone(), data: String::new() }),
                }
                Ok(Some(VisibleText { block: self.last_block(), kind: BlockKind::Thinking, text }))
            }
            Chunk::ThinkingData(data) => {
                self.add_bytes(data.len())?;
                match self.pieces.last_mut() {
                    Some(Piece::Thinking { data: whole, .. }) if whole.is_empty() => *whole = data,
                    _ => self.pieces.push(Piece::Thinking { text: String::new(), data }),
                }
                Ok(None)
            }
            Chunk::Call { slot, id, name } => {
                let calls =
                    self.pieces.iter().filter(|piece| matches!(piece, Piece::Call { .. })).count();
                if calls >= MAX_CALLS {
                    return Err(Failure::new(
                        FailureClass::InvalidRequest,
                        format!("the model made more than {MAX_CALLS} calls in one answer"),
                    ));
                }
                let tool = self.code_tool.as_ref().filter(|tool| tool.name == name);
                let extractor = tool.map(|tool| ArgumentExtractor::new(&tool.argument));
                self.pieces.push(Piece::Call {
                    slot,
                    id,
                    name,
                    arguments: String::new(),
                    extractor,
                });
                Ok(None)
            }
            Chunk::Arguments { slot: of, json } => {
                self.add_bytes(json.len())?;
                let found =
                    self.pieces.iter_mut().enumerate().find_map(|(at, piece)| match piece {
                        Piece::Call { slot, arguments, extractor, .. } if *slot == of => {
                            Some((at, arguments, extractor))
                        }
                        Piece::Call { .. } | Piece::Text(_) | Piece::Thinking { .. } => None,
                    });
                let Some((at, arguments, extractor)) = found else {
                    return Err(Failure::transient(
                        "the stream holds arguments of a call that never began",
                    ));
                };
                arguments.push_str(&json);
                let text =
                    extractor.as_mut().map(|extractor| extractor.push(&json)).unwrap_or_default();
                Ok((!text.is_empty()).then(|| VisibleText {
                    block: block_number(at),
                    kind: BlockKind::Code,
                    text,
                }))
            }
            Chunk::Usage(_) | Chunk::Named { .. } => Ok(None),
            Chunk::Stop(reason) => {
                self.stop = Some(reason);
                Ok(None)
            }
            Chunk::Vector(_) => Err(vector_in_answer()),
        }
    }

    /// Completes the answer.
    pub(crate) fn complete(self) -> CompletedAnswer {
        let cut = self.stop == Some(StopReason::MaxTokens);
        let mut blocks = Vec::with_capacity(self.pieces.len());
        let mut calls = false;
        for piece in self.pieces {
            let block = match piece {
                Piece::Text(text) => block::Block::Text(Text { text }),
                Piece::Thinking { text, data } if text.trim().is_empty() && data.is_empty() => {
                    continue;
                }
                Piece::Thinking { text, data } => block::Block::Thinking(Thinking {
                    text,
                    vendor: self.origin.vendor.clone(),
                    provider_id: self.origin.provider_id.clone(),
                    data,
                }),
                Piece::Call { slot, id, name, arguments, .. } => {
                    let Some(code) =
                        script_for_call(&name, &arguments, self.code_tool.as_ref(), cut)
                    else {
                        continue;
                    };
                    calls = true;
                    let id =
                        if id.is_empty() { format!("call_{}_{slot}", self.step_id) } else { id };
                    block::Block::CodeInterpreterCall(CodeInterpreterCall { id, code })
                }
            };
            blocks.push(v1::Block { block: Some(block) });
        }
        // Some servers report `stop` after calls. What counts is whether there is something to run.
        let stop_reason = match (self.stop.unwrap_or(StopReason::EndTurn), calls) {
            (StopReason::EndTurn | StopReason::Unspecified, true) => StopReason::ToolUse,
            (StopReason::ToolUse | StopReason::Unspecified, false) => StopReason::EndTurn,
            (reason, _) => reason,
        };
        CompletedAnswer { blocks, stop_reason, input_tokens: 0 }
    }

    fn add_bytes(&mut self, bytes: usize) -> Result<(), Failure> {
        self.bytes += bytes;
        if self.bytes > MAX_ANSWER_BYTES { Err(too_large()) } else { Ok(()) }
    }

    fn last_block(&self) -> u32 {
        block_number(self.pieces.len().saturating_sub(1))
    }
}

/// The failure when a vendor returns a vector in an answer.
pub(crate) fn vector_in_answer() -> Failure {
    Failure::internal("an answer holds a vector")
}

fn too_large() -> Failure {
    Failure::new(
        FailureClass::InvalidRequest,
        format!("the model's answer is larger than {MAX_ANSWER_BYTES} bytes"),
    )
}

/// Estimates the tokens of `chars` characters.
pub(crate) fn estimate_tokens(chars: usize) -> i64 {
    i64::try_from(chars.div_ceil(CHARS_PER_TOKEN)).unwrap_or(i64::MAX)
}

fn block_number(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}

/// The script of a call. None when the answer was truncated (`cut`) within the call: half a script
/// must not run.
///
/// A call of another tool than the code tool comes from a model that takes the script's functions
/// for tools. It means `name(arguments)`, and becomes that script. An unreadable call becomes a
/// script that throws the reason, because every call needs a result.
fn script_for_call(
    name: &str,
    arguments: &str,
    code_tool: Option<&Tool>,
    cut: bool,
) -> Option<String> {
    let arguments = if arguments.trim().is_empty() { "{}" } else { arguments };
    let parsed = match serde_json::from_str::<Value>(arguments) {
        Ok(parsed) => parsed,
        Err(_) if cut => return None,
        Err(error) => {
            return Some(throw_script(&format!(
                "The arguments of the call are not valid JSON ({error}). Nothing ran."
            )));
        }
    };
    let Some(tool) = code_tool.filter(|tool| tool.name == name || name.is_empty()) else {
        return Some(if is_identifier(name) {
            format!("{name}({})", js_literal(&parsed))
        } else {
            throw_script(&format!("There is no tool named {name:?}. Nothing ran."))
        });
    };
    Some(match &parsed {
        Value::String(code) => code.clone(),
        parsed => match parsed[tool.argument.as_str()].as_str() {
            Some(code) => code.to_owned(),
            None => throw_script(&format!(
                "The call has no argument {:?}, which holds the script. Nothing ran.",
                tool.argument
            )),
        },
    })
}

fn throw_script(message: &str) -> String {
    format!("throw new Error({})", js_literal(&Value::String(message.to_owned())))
}

/// JSON is JavaScript but for two line separators, which older engines don't allow in a string.
fn js_literal(value: &Value) -> String {
    value.to_string().replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
}

fn is_identifier(name: &str) -> bool {
    let mut chars = name.chars();
    chars.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[cfg(test)]
pub(crate) mod tests;

//! Scripts for models that cannot call tools: a protocol of fenced blocks around any vendor.
//!
//! The system prompt tells the model to write a block
//!
//! ````text
//! ```construct
//! print(1 + 1)
//! ```
//! ````
//!
//! which becomes a call like any other. What such a model writes after its script is an imagined
//! result. It is dropped, so that the transcript contains only the real one.

use std::{collections::VecDeque, sync::Arc};

use construct_proto::{mesh::v1::model_completed::StopReason, v1::VendorModel};
use futures::{
    future::BoxFuture,
    stream::{self, BoxStream, StreamExt as _},
};

use crate::{
    failure::Failure,
    transcript::FENCE_LANGUAGE,
    vendor::{Chunk, Request, Vendor},
};

/// The minimum number of backticks that opens a block.
const MIN_FENCE_LEN: usize = 3;
/// A longer line opens or closes nothing. Bounds the buffer of an incomplete line.
const MAX_FENCE_LINE_LEN: usize = 64;

/// Wraps `vendor` for fenced blocks when the model of `request` needs them.
pub(crate) fn wrap(vendor: Box<dyn Vendor>, request: &Request) -> Box<dyn Vendor> {
    if request.tool_calling || request.tools.is_empty() {
        vendor
    } else {
        Box::new(FencedVendor { vendor })
    }
}

struct FencedVendor {
    vendor: Box<dyn Vendor>,
}

impl Vendor for FencedVendor {
    fn models(&self) -> BoxFuture<'static, Result<Vec<VendorModel>, Failure>> {
        self.vendor.models()
    }

    fn check(&self) -> BoxFuture<'static, Result<(), Failure>> {
        self.vendor.check()
    }

    fn count(&self, request: &Request) -> BoxFuture<'static, Result<Option<i64>, Failure>> {
        self.vendor.count(&without_tools(request))
    }

    fn invoke(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        let (name, argument) = request.code_call();
        let reader = FenceReader::new(name, argument);
        let plain = without_tools(&request);
        // Fused: polled once more at its end, after the reader's buffer was flushed.
        let state = (self.vendor.invoke(Arc::new(plain)).fuse(), Some(reader), VecDeque::new());
        stream::try_unfold(state, |(mut chunks, mut reader, mut ready)| async move {
            loop {
                if let Some(chunk) = ready.pop_front() {
                    return Ok(Some((chunk, (chunks, reader, ready))));
                }
                match (chunks.next().await.transpose()?, &mut reader) {
                    (Some(Chunk::Text(text)), Some(reader)) => reader.push(&text, &mut ready),
                    (Some(chunk), reader) => {
                        if let (Chunk::Stop(StopReason::MaxTokens), Some(reader)) = (&chunk, reader)
                        {
                            reader.is_truncated = true;
                        }
                        ready.push_back(chunk);
                    }
                    (None, Some(open)) => {
                        open.finish(&mut ready);
                        reader = None;
                    }
                    (None, None) => return Ok(None),
                }
            }
        })
        .boxed()
    }
}

/// The request as it is sent to the model.
fn without_tools(request: &Request) -> Request {
    let (name, _) = request.code_call();
    Request {
        system: format!("{}\n\n{}", request.system, instructions(name)),
        tools: Vec::new(),
        ..Request::clone(request)
    }
}

/// The instructions in place of a tool definition.
fn instructions(name: &str) -> String {
    format!(
        "# Calling `{name}`\n\nYou have no other way to call the tool `{name}` than to write its script as a fenced block that \
         begins with the word `{FENCE_LANGUAGE}`:\n\n```{FENCE_LANGUAGE}\nprint(read_file('README.md'))\n```\n\nWrite at most one \
         such block in an answer and nothing after it: it is run as soon as your answer ends, and the next message shows you what \
         came of it between `<result>` and `</result>`. Never write a result yourself. Blocks with any other first word are \
         shown to the person and not run. When the script itself holds a line of three backticks, fence it with four."
    )
}

/// Finds the first script in text that arrives in pieces.
struct FenceReader {
    name: String,
    argument: String,
    position: Position,
    /// The incomplete line, as far as it was not emitted.
    line: String,
    /// Part of the line was emitted: it cannot be a fence any more.
    is_line_emitted: bool,
    /// The answer reached its length limit.
    is_truncated: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Position {
    Text,
    /// In a block of another language with this many backticks; nothing in it opens a block.
    OtherBlock(usize),
    /// In the script, with this many backticks.
    Script(usize),
    /// After the script.
    AfterScript,
}

impl FenceReader {
    fn new(name: &str, argument: &str) -> Self {
        let (name, argument) = (name.to_owned(), argument.to_owned());
        Self {
            name,
            argument,
            position: Position::Text,
            line: String::new(),
            is_line_emitted: false,
            is_truncated: false,
        }
    }

    fn push(&mut self, mut text: &str, chunks: &mut VecDeque<Chunk>) {
        while let Some(end) = text.find('\n') {
            self.line.push_str(&text[..end]);
            self.end_line(true, chunks);
            text = &text[end + 1..];
        }
        self.line.push_str(text);
        // Text that opens no block can be shown before its line ends.
        if self.is_line_emitted || !may_be_fence_line(&self.line) {
            let line = std::mem::take(&mut self.line);
            self.emit(&line, chunks);
            self.is_line_emitted = true;
        }
    }

    /// The answer ends.
    fn finish(&mut self, chunks: &mut VecDeque<Chunk>) {
        self.end_line(false, chunks);
        // A truncated script stays open, and its arguments are invalid, so that half of it does not
        // run. A script that only lacks its closing fence is complete.
        if let Position::Script(_) = self.position
            && !self.is_truncated
        {
            self.close(chunks);
        }
    }

    /// Handles a complete line; `broken` when a line break ends it.
    fn end_line(&mut self, broken: bool, chunks: &mut VecDeque<Chunk>) {
        let line = std::mem::take(&mut self.line);
        let mark =
            if std::mem::take(&mut self.is_line_emitted) { None } else { parse_fence_line(&line) };
        match (self.position, mark) {
            (Position::Text, Some((fence, language))) => {
                if language == FENCE_LANGUAGE {
                    self.open(fence, chunks);
                    return;
                }
                self.position = Position::OtherBlock(fence);
            }
            (Position::OtherBlock(fence), Some((closing, ""))) if closing >= fence => {
                self.position = Position::Text
            }
            (Position::Script(fence), Some((closing, ""))) if closing >= fence => {
                self.close(chunks);
                return;
            }
            _ => {}
        }
        let line = if broken { line + "\n" } else { line };
        self.emit(&line, chunks);
    }

    fn open(&mut self, fence: usize, chunks: &mut VecDeque<Chunk>) {
        self.position = Position::Script(fence);
        chunks.push_back(Chunk::Call { slot: 0, id: String::new(), name: self.name.clone() });
        let argument = serde_json::Value::String(self.argument.clone());
        chunks.push_back(Chunk::Arguments { slot: 0, json: format!("{{{argument}:\"") });
    }

    fn close(&mut self, chunks: &mut VecDeque<Chunk>) {
        self.position = Position::AfterScript;
        chunks.push_back(Chunk::Arguments { slot: 0, json: "\"}".to_owned() });
    }

    fn emit(&mut self, text: &str, chunks: &mut VecDeque<Chunk>) {
        if text.is_empty() {
            return;
        }
        match self.position {
            Position::Text | Position::OtherBlock(_) => {
                chunks.push_back(Chunk::Text(text.to_owned()))
            }
            Position::Script(_) => {
                let quoted = serde_json::Value::String(text.to_owned()).to_string();
                // Without the quotes, because the next piece continues the same string.
                chunks.push_back(Chunk::Arguments {
                    slot: 0,
                    json: quoted[1..quoted.len() - 1].to_owned(),
                });
            }
            Position::AfterScript => {}
        }
    }
}

/// The backticks and the language of a line that opens or closes a block.
fn parse_fence_line(line: &str) -> Option<(usize, &str)> {
    let line = line.trim();
    let fence = line.bytes().take_while(|&byte| byte == b'`').count();
    let word = line[fence..].trim();
    (line.len() <= MAX_FENCE_LINE_LEN && fence >= MIN_FENCE_LEN && !word.contains('`'))
        .then_some((fence, word))
}

/// Whether a line that begins so may still become a fence.
fn may_be_fence_line(line: &str) -> bool {
    let begin = line.trim_start();
    let fence = begin.bytes().take_while(|&byte| byte == b'`').count();
    line.len() <= MAX_FENCE_LINE_LEN
        && (fence == begin.len() || (fence >= MIN_FENCE_LEN && !begin[fence..].contains('`')))
}

#[cfg(test)]
mod tests;

//! One answer of the model: streamed in pieces, then told whole. Shows each part once, whichever
//! comes first.

use std::io;

use construct_proto::v1::{self, MessageDelta, block::Block, message_delta::Delta};

use crate::console::{Channel, Sink, Style};

/// What stands before each line of JavaScript.
const MARGIN: &str = "  │ ";
/// What stands before each line of the model's thinking.
const THOUGHT_MARGIN: &str = "  ┊ ";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Code,
}

/// Text that came as one block of the answer.
#[derive(Debug)]
struct Part {
    block: u32,
    kind: Kind,
    text: String,
}

/// The answer that is being written.
#[derive(Debug)]
pub(super) struct Answer {
    /// Whether anything is shown before the answer is whole.
    live: bool,
    step: u64,
    parts: Vec<Part>,
    /// The unfinished line of JavaScript.
    line: String,
    /// The unfinished line of the model's thinking, while it thinks. It is shown live only, and is
    /// no part of the answer.
    thought: Option<String>,
}

impl Answer {
    pub(super) fn new(live: bool) -> Self {
        Self { live, step: 0, parts: Vec::new(), line: String::new(), thought: None }
    }

    /// A piece.
    pub(super) fn delta(
        &mut self,
        step: u64,
        delta: &MessageDelta,
        sink: &mut dyn Sink,
    ) -> io::Result<()> {
        if !self.live {
            return Ok(());
        }
        if step != self.step {
            self.abandon(sink)?;
            self.step = step;
        }
        match &delta.delta {
            Some(Delta::Text(text)) => self.push(delta.block, Kind::Text, text, sink),
            Some(Delta::Code(code)) => self.push(delta.block, Kind::Code, code, sink),
            Some(Delta::Thinking(text)) => self.think(text, sink),
            None => Ok(()),
        }
    }

    /// What came so far is void.
    pub(super) fn restart(&mut self, reason: &str, sink: &mut dyn Sink) -> io::Result<()> {
        let shown = !self.parts.is_empty();
        self.abandon(sink)?;
        if !shown {
            return Ok(());
        }
        let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        sink.line(&[(Style::Dim, &format!("↻ the answer begins again{reason}"))])
    }

    /// The answer is whole: shows what has not been shown.
    pub(super) fn complete(
        &mut self,
        step: u64,
        blocks: &[v1::Block],
        sink: &mut dyn Sink,
    ) -> io::Result<()> {
        if step != self.step {
            self.abandon(sink)?;
            self.step = step;
        }
        let whole: Vec<(Kind, &str)> = blocks.iter().filter_map(kind_and_text).collect();
        let streamed = std::mem::take(&mut self.parts);
        let mut matching = true;
        for (index, &(kind, text)) in whole.iter().enumerate() {
            let rest = match streamed.get(index).filter(|_| matching) {
                // Whoever joined in the middle has seen the end of the first part only.
                Some(part) if part.kind == kind && index == 0 && text.ends_with(&part.text) => "",
                Some(part) if part.kind == kind => match text.strip_prefix(part.text.as_str()) {
                    Some(rest) => rest,
                    None => self.diverged(&mut matching, text, sink)?,
                },
                Some(_) => self.diverged(&mut matching, text, sink)?,
                None => text,
            };
            let continues = index + 1 == streamed.len() && matching;
            if !continues {
                self.end_part(sink)?;
            }
            self.show(kind, rest, sink)?;
        }
        self.end_part(sink)
    }

    /// No more will come of this answer.
    pub(super) fn abandon(&mut self, sink: &mut dyn Sink) -> io::Result<()> {
        self.parts.clear();
        self.end_part(sink)
    }

    /// What was streamed is not what the answer is: all of it from here on is shown again.
    fn diverged<'a>(
        &mut self,
        matching: &mut bool,
        text: &'a str,
        sink: &mut dyn Sink,
    ) -> io::Result<&'a str> {
        *matching = false;
        self.end_part(sink)?;
        sink.line(&[(Style::Dim, "↻ the whole answer:")])?;
        Ok(text)
    }

    fn push(&mut self, block: u32, kind: Kind, text: &str, sink: &mut dyn Sink) -> io::Result<()> {
        match self.parts.last_mut() {
            Some(part) if part.block == block && part.kind == kind => part.text.push_str(text),
            _ => {
                self.end_part(sink)?;
                self.parts.push(Part { block, kind, text: text.to_owned() });
            }
        }
        self.show(kind, text, sink)
    }

    fn think(&mut self, text: &str, sink: &mut dyn Sink) -> io::Result<()> {
        if self.thought.is_none() {
            self.end_part(sink)?;
        }
        let mut thought = self.thought.take().unwrap_or_default() + text;
        while let Some((line, rest)) = thought.split_once('\n') {
            thought_line(line, sink)?;
            thought = rest.to_owned();
        }
        self.thought = Some(thought);
        Ok(())
    }

    fn show(&mut self, kind: Kind, text: &str, sink: &mut dyn Sink) -> io::Result<()> {
        if kind == Kind::Text {
            return sink.text(Channel::Answer, Style::Plain, text);
        }
        // JavaScript is shown by whole lines: each has a margin.
        self.line.push_str(text);
        while let Some((line, rest)) = self.line.split_once('\n') {
            code_line(line, sink)?;
            self.line = rest.to_owned();
        }
        Ok(())
    }

    fn end_part(&mut self, sink: &mut dyn Sink) -> io::Result<()> {
        if let Some(line) = self.thought.take().filter(|line| !line.is_empty()) {
            thought_line(&line, sink)?;
        }
        let line = std::mem::take(&mut self.line);
        if !line.is_empty() {
            code_line(&line, sink)?;
        }
        sink.end_line()
    }
}

fn code_line(line: &str, sink: &mut dyn Sink) -> io::Result<()> {
    sink.line(&[(Style::Dim, MARGIN), (Style::Code, line)])
}

fn thought_line(line: &str, sink: &mut dyn Sink) -> io::Result<()> {
    sink.line(&[(Style::Dim, THOUGHT_MARGIN), (Style::Dim, line)])
}

fn kind_and_text(block: &v1::Block) -> Option<(Kind, &str)> {
    match &block.block {
        Some(Block::Text(text)) if !text.text.is_empty() => Some((Kind::Text, &text.text)),
        Some(Block::CodeInterpreterCall(call)) if !call.code.is_empty() => {
            Some((Kind::Code, &call.code))
        }
        _ => None,
    }
}

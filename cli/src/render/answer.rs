//! Renders one answer of the model, which arrives as deltas and then as a complete message. Shows
//! each part once.

use std::io;

use construct_proto::v1::{self, MessageDelta, block::Block, message_delta::Delta};

use crate::console::{Channel, Sink, Style};

/// The prefix of each line of JavaScript.
const CODE_MARGIN: &str = "  │ ";
/// The prefix of each line of thinking.
const THOUGHT_MARGIN: &str = "  ┊ ";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Code,
}

/// The streamed text of one block of the answer.
#[derive(Debug)]
struct Part {
    block: u32,
    kind: Kind,
    text: String,
}

/// The current answer.
#[derive(Debug)]
pub(super) struct Answer {
    /// Whether deltas are shown before the answer is complete.
    live: bool,
    step: u64,
    parts: Vec<Part>,
    /// The unfinished line of JavaScript.
    line: String,
    /// The unfinished line of thinking, while the model thinks. Shown live only; not a part of the
    /// answer.
    thought: Option<String>,
}

impl Answer {
    pub(super) fn new(live: bool) -> Self {
        Self { live, step: 0, parts: Vec::new(), line: String::new(), thought: None }
    }

    /// Shows a delta.
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

    /// Discards the streamed answer: the model starts again.
    pub(super) fn restart(&mut self, reason: &str, sink: &mut dyn Sink) -> io::Result<()> {
        let was_shown = !self.parts.is_empty();
        self.abandon(sink)?;
        if !was_shown {
            return Ok(());
        }
        let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        sink.line(&[(Style::Dim, &format!("↻ the answer restarts{reason}"))])
    }

    /// Shows the parts of the complete answer that were not streamed.
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
        let complete: Vec<(Kind, &str)> = blocks.iter().filter_map(kind_and_text).collect();
        let streamed = std::mem::take(&mut self.parts);
        let mut matching = true;
        for (index, &(kind, text)) in complete.iter().enumerate() {
            let rest = match streamed.get(index).filter(|_| matching) {
                // A client that subscribed late has seen only the end of the first part.
                Some(part) if part.kind == kind && index == 0 && text.ends_with(&part.text) => "",
                Some(part) if part.kind == kind => match text.strip_prefix(part.text.as_str()) {
                    Some(rest) => rest,
                    None => self.restart_from(&mut matching, text, sink)?,
                },
                Some(_) => self.restart_from(&mut matching, text, sink)?,
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

    /// Ends an answer that will not be completed.
    pub(super) fn abandon(&mut self, sink: &mut dyn Sink) -> io::Result<()> {
        self.parts.clear();
        self.end_part(sink)
    }

    /// The streamed text differs from the answer: from this part on, everything is shown again.
    fn restart_from<'a>(
        &mut self,
        matching: &mut bool,
        text: &'a str,
        sink: &mut dyn Sink,
    ) -> io::Result<&'a str> {
        *matching = false;
        self.end_part(sink)?;
        sink.line(&[(Style::Dim, "↻ the complete answer:")])?;
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
        // JavaScript is shown in complete lines: each has a margin.
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
    sink.line(&[(Style::Dim, CODE_MARGIN), (Style::Code, line)])
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

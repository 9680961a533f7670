//! Events as a person reads them: the model's words as they come, its JavaScript, each tool call
//! with its result, phase changes, errors, and what the turn cost. Knows nothing of terminals;
//! writes to a [`Sink`].

mod answer;
mod tool;

use std::io;

use construct_proto::v1::{
    Approval, ApprovalState, Event, Message, MessageSource, PhaseChanged, Task, TaskPhase,
    TurnCompleted, TurnOutcome, Usage, block::Block, event::Payload,
};

use crate::{
    console::{Channel, Sink, Style},
    money,
    tally::Tally,
    words::{clip, count, one_line, thousands},
};

/// Lines of a script's output that are shown.
const OUTPUT_LINES: usize = 6;

/// What is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Options {
    /// Text as it is written. Otherwise each answer when it is whole, so that nothing void is ever
    /// printed.
    pub(crate) live: bool,
    /// What people said, too.
    pub(crate) people: bool,
    /// Also what is of no interest in a conversation: entities that are created, updated, deleted.
    pub(crate) entities: bool,
}

/// Turns events into output. Keeps what it needs to show nothing twice.
#[derive(Debug)]
pub(crate) struct Renderer {
    options: Options,
    answer: answer::Answer,
    tools: tool::Tools,
    tally: Tally,
    agent: String,
}

impl Renderer {
    pub(crate) fn new(options: Options) -> Self {
        Self {
            options,
            answer: answer::Answer::new(options.live),
            tools: tool::Tools::default(),
            tally: Tally::default(),
            agent: String::new(),
        }
    }

    /// Shows an event.
    ///
    /// # Errors
    /// When the sink can't take it.
    pub(crate) fn event(&mut self, event: &Event, sink: &mut dyn Sink) -> io::Result<()> {
        self.tally.event(event);
        match &event.payload {
            Some(Payload::MessageDelta(delta)) => self.answer.delta(event.step, delta, sink),
            Some(Payload::MessageRestarted(restarted)) => {
                self.answer.restart(&restarted.reason, sink)
            }
            Some(Payload::ToolCalled(called)) => {
                self.tools.called(called);
                Ok(())
            }
            Some(Payload::ToolResult(result)) => self.tools.result(event.step, result, sink),
            Some(Payload::Message(message)) => self.message(event, message, sink),
            Some(Payload::PhaseChanged(changed)) => phase(changed, sink),
            Some(Payload::Error(error)) => sink.line(&[
                (Style::Bad, &format!("✗ {}", error.code)),
                (Style::Plain, &format!(": {}", one_line(&error.message))),
            ]),
            Some(Payload::TurnCompleted(turn)) => self.turn(turn, sink),
            Some(Payload::Task(task)) => self.task(event, task, sink),
            Some(Payload::Agent(agent)) => {
                self.entity(event, agent.spec.as_ref().map_or("", |spec| spec.name.as_str()), sink)
            }
            Some(Payload::Model(model)) => {
                self.entity(event, model.spec.as_ref().map_or("", |spec| spec.name.as_str()), sink)
            }
            Some(Payload::ModelProvider(provider)) => self.entity(
                event,
                provider.spec.as_ref().map_or("", |spec| spec.name.as_str()),
                sink,
            ),
            Some(Payload::Secret(secret)) => {
                self.entity(event, secret.spec.as_ref().map_or("", |spec| spec.name.as_str()), sink)
            }
            Some(Payload::Schedule(schedule)) => self.entity(
                event,
                schedule.spec.as_ref().map_or("", |spec| spec.name.as_str()),
                sink,
            ),
            Some(Payload::Budget(budget)) => self.entity(
                event,
                budget.metadata.as_ref().map_or("", |metadata| metadata.id.as_str()),
                sink,
            ),
            Some(Payload::Deleted(deleted)) => {
                sink.line(&[(Style::Dim, &format!("· {} {}", event.r#type, deleted.id))])
            }
            Some(Payload::Approval(approval)) => self.approval(approval, sink),
            Some(Payload::Subtask(subtask)) => {
                let title = if subtask.title.is_empty() {
                    String::new()
                } else {
                    format!(": {}", one_line(&subtask.title))
                };
                sink.line(&[(
                    Style::Dim,
                    &format!("· subtask {} of {}{title}", subtask.task, subtask.agent),
                )])
            }
            Some(Payload::Rewound(rewound)) => {
                let (from, last) = (rewound.from_position, rewound.last_position);
                self.answer.abandon(sink)?;
                sink.line(&[(
                    Style::Dim,
                    &format!("· taken back: messages {from} to {last} are put aside"),
                )])
            }
            Some(Payload::ContextCompacted(compacted)) => {
                let what = if compacted.summary { "summed up" } else { "left out" };
                let (through, before, after) =
                    (compacted.through_position, compacted.tokens_before, compacted.tokens_after);
                let line = format!(
                    "· the conversation no longer fits the model: up to message {through} it is {what} ({before} → {after} tokens)"
                );
                sink.line(&[(Style::Dim, &line)])
            }
            // Of a newer version.
            None => sink.line(&[(Style::Dim, &format!("· {}", event.r#type))]),
        }
    }

    fn message(&mut self, event: &Event, message: &Message, sink: &mut dyn Sink) -> io::Result<()> {
        let source =
            message.status.as_ref().map_or(MessageSource::Unspecified, |status| status.source());
        let blocks = message.spec.as_ref().map_or(&[][..], |spec| &spec.blocks);
        if event.r#type != "message.created" {
            return if self.options.people {
                sink.line(&[(Style::Dim, "· a waiting message was changed")])
            } else {
                Ok(())
            };
        }
        match source {
            MessageSource::User if self.options.people => {
                for (index, line) in text_of(blocks).lines().enumerate() {
                    sink.line(&[(
                        Style::Person,
                        &format!("{}{line}", if index == 0 { "❯ " } else { "  " }),
                    )])?;
                }
                Ok(())
            }
            MessageSource::User => Ok(()),
            MessageSource::Assistant => self.answer.complete(event.step, blocks, sink),
            MessageSource::System | MessageSource::Unspecified => {
                for block in blocks {
                    match &block.block {
                        Some(Block::CodeInterpreterResult(result)) => {
                            self.tools.missed(event.step, &result.tool_uses, sink)?;
                            output(&result.output, Style::Dim, sink)?;
                            output(&result.error, Style::Bad, sink)?;
                        }
                        Some(Block::Text(text)) => output(&text.text, Style::Dim, sink)?,
                        Some(
                            Block::CodeInterpreterCall(_)
                            | Block::Thinking(_)
                            | Block::Attachment(_),
                        )
                        | None => {}
                    }
                }
                self.tools.end_step();
                Ok(())
            }
        }
    }

    /// What a person is asked, and what became of it.
    fn approval(&mut self, approval: &Approval, sink: &mut dyn Sink) -> io::Result<()> {
        let (Some(spec), Some(status)) = (&approval.spec, &approval.status) else { return Ok(()) };
        let words = if status.words.is_empty() {
            String::new()
        } else {
            format!(": {}", one_line(&status.words))
        };
        let by = if status.decided_by.is_empty() {
            String::new()
        } else {
            format!(" by {}", status.decided_by)
        };
        match status.state() {
            ApprovalState::Pending => {}
            ApprovalState::Approved => {
                return sink.line(&[
                    (Style::Good, &format!("✓ {} approved{by}", one_line(&spec.tool))),
                    (Style::Dim, &words),
                ]);
            }
            state => {
                let state = crate::entity::approval::state_name(state);
                return sink.line(&[
                    (Style::Bad, &format!("✗ {} {state}{by}", one_line(&spec.tool))),
                    (Style::Dim, &words),
                ]);
            }
        }
        self.answer.abandon(sink)?;
        let reason = if spec.reason.is_empty() {
            String::new()
        } else {
            format!(": {}", one_line(&spec.reason))
        };
        sink.line(&[(
            Style::Accent,
            &format!("? {} needs approval{reason}", one_line(&spec.tool)),
        )])?;
        // All of it: what is not seen cannot be approved in good conscience.
        for line in asked_arguments(&spec.arguments) {
            sink.line(&[(Style::Plain, &format!("    {line}"))])?;
        }
        let left_out = spec.arguments_size.saturating_sub(spec.arguments.len() as u64);
        if left_out > 0 {
            sink.line(&[(Style::Bad, &format!("    … {left_out} bytes more that are not shown"))])?;
        }
        let id = approval.metadata.as_ref().map_or("", |metadata| metadata.id.as_str());
        sink.line(&[(Style::Dim, &format!("  decide: construct approval approve {id}"))])?;
        sink.line(&[(Style::Dim, &format!("      or: construct approval reject {id} --words WHY"))])
    }

    fn turn(&mut self, turn: &TurnCompleted, sink: &mut dyn Sink) -> io::Result<()> {
        self.answer.abandon(sink)?;
        let tally = std::mem::take(&mut self.tally);
        let mut parts = vec![count(turn.turns, "model call")];
        if tally.tool_calls() > 0 {
            parts.push(count(tally.tool_calls(), "tool call"));
        }
        parts.push(usage(&tally.usage));
        let (style, word) = match turn.outcome() {
            TurnOutcome::Completed => (Style::Good, "✓ completed"),
            TurnOutcome::Cancelled => (Style::Bad, "■ cancelled"),
            TurnOutcome::Interrupted => (Style::Dim, "■ interrupted by a newer message"),
            TurnOutcome::MaxTurns => (Style::Bad, "✗ stopped at the limit of model calls"),
            TurnOutcome::Failed | TurnOutcome::Unspecified => (Style::Bad, "✗ failed"),
        };
        sink.line(&[(style, word), (Style::Dim, &format!(" · {}", parts.join(" · ")))])?;
        match &turn.error {
            Some(error) if turn.outcome() == TurnOutcome::Failed => sink
                .line(&[(Style::Bad, &format!("  {}: {}", error.code, one_line(&error.message)))]),
            _ => Ok(()),
        }
    }

    fn task(&mut self, event: &Event, task: &Task, sink: &mut dyn Sink) -> io::Result<()> {
        let (Some(spec), Some(status)) = (&task.spec, &task.status) else { return Ok(()) };
        let before = std::mem::replace(&mut self.agent, status.agent_id.clone());
        if !before.is_empty() && before != status.agent_id {
            return sink.line(&[(Style::Dim, &format!("· the agent is now {}", spec.agent))]);
        }
        self.entity(event, &spec.title, sink)
    }

    fn entity(&self, event: &Event, name: &str, sink: &mut dyn Sink) -> io::Result<()> {
        if !self.options.entities {
            return Ok(());
        }
        sink.line(&[(Style::Dim, format!("· {} {}", event.r#type, one_line(name)).trim_end())])
    }
}

/// Tokens and cost: `1,200 in (800 cached) + 34 out · $0.0123`.
pub(crate) fn usage(usage: &Usage) -> String {
    let cached = usage.cache_read_tokens.saturating_add(usage.cache_write_tokens);
    let all = usage.input_tokens.saturating_add(cached);
    let cached =
        if cached > 0 { format!(" ({} cached)", thousands(cached)) } else { String::new() };
    let out = thousands(usage.output_tokens);
    format!(
        "{} in{cached} + {out} out tokens · {}",
        thousands(all),
        money::cost(usage.cost_pico_usd)
    )
}

/// The name of a phase as people say it.
pub(crate) fn phase_name(phase: TaskPhase) -> &'static str {
    match phase {
        TaskPhase::AwaitInput => "await input",
        TaskPhase::InvokeModel => "invoke model",
        TaskPhase::ExecuteTools => "execute tools",
        TaskPhase::AwaitApproval => "await approval",
        TaskPhase::AwaitSubtasks => "await subtasks",
        TaskPhase::Suspended => "suspended",
        TaskPhase::Unspecified => "unknown",
    }
}

/// An attachment in words.
pub(crate) fn attachment_line(attachment: &construct_proto::v1::Attachment) -> String {
    let name = if attachment.name.is_empty() { "attachment" } else { &attachment.name };
    match attachment.file.as_str() {
        "" => format!("[{name}: {}, {} bytes]", attachment.media_type, attachment.data.len()),
        file => format!("[{name}: {}, {} bytes, {file}]", attachment.media_type, attachment.size),
    }
}

/// All text of a message, and what is attached to it.
pub(crate) fn text_of(blocks: &[construct_proto::v1::Block]) -> String {
    let texts = blocks.iter().filter_map(|block| match &block.block {
        Some(Block::Text(text)) => Some(text.text.clone()),
        Some(Block::Attachment(attachment)) => Some(attachment_line(attachment)),
        _ => None,
    });
    texts.collect::<Vec<_>>().join("\n")
}

fn phase(changed: &PhaseChanged, sink: &mut dyn Sink) -> io::Result<()> {
    let waits = matches!(
        changed.phase(),
        TaskPhase::Suspended | TaskPhase::AwaitApproval | TaskPhase::AwaitSubtasks
    );
    let sign = if waits { "‖" } else { "·" };
    let reason =
        if changed.reason.is_empty() { String::new() } else { format!(": {}", changed.reason) };
    sink.line(&[(Style::Dim, &format!("{sign} {}{reason}", phase_name(changed.phase())))])
}

/// Arguments that a person is to approve, in lines.
fn asked_arguments(json: &str) -> Vec<String> {
    let text = match serde_json::from_str::<serde_json::Value>(json) {
        Ok(value) => serde_json::to_string_pretty(&value).unwrap_or_default(),
        // Only the beginning of them.
        Err(_) => json.to_owned(),
    };
    crate::words::printable(&text).lines().map(str::to_owned).collect()
}

/// The first lines of what a script gave back.
fn output(text: &str, style: Style, sink: &mut dyn Sink) -> io::Result<()> {
    let width = sink.width().saturating_sub(6);
    let mut lines = text.trim_end().lines();
    for line in lines.by_ref().take(OUTPUT_LINES) {
        sink.line(&[
            (Style::Dim, "    ⎿ "),
            (style, &clip(&crate::words::printable(line).replace('\t', "  "), width)),
        ])?;
    }
    match lines.count() {
        0 => Ok(()),
        more => sink.line(&[(Style::Dim, &format!("    ⎿ … {more} more lines"))]),
    }
}

/// Ends whatever is open, so that something else can be written.
pub(crate) fn note(text: &str, sink: &mut dyn Sink) -> io::Result<()> {
    sink.end_line()?;
    sink.text(Channel::Aside, Style::Dim, text)?;
    sink.end_line()
}

#[cfg(test)]
mod tests;

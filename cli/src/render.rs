//! Renders events for people: the model's answer while it is written, its JavaScript, each tool
//! call with its result, phase changes, errors, and the cost of the turn. Independent of terminals:
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
    text::{clip, count, one_line, thousands},
    totals::Totals,
};

/// The maximum lines of a script's output to show.
const MAX_OUTPUT_LINES: usize = 6;

/// What to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Options {
    /// Text while it is written. Otherwise each answer when it is complete, so that no discarded
    /// text is printed.
    pub(crate) live: bool,
    /// Also the messages of users.
    pub(crate) user_messages: bool,
    /// Also created, updated and deleted entities, which a conversation does not show.
    pub(crate) entities: bool,
}

/// Turns events into output. Remembers what was shown, so that nothing is shown twice.
#[derive(Debug)]
pub(crate) struct Renderer {
    options: Options,
    answer: answer::Answer,
    tools: tool::Tools,
    totals: Totals,
    agent: String,
}

impl Renderer {
    pub(crate) fn new(options: Options) -> Self {
        Self {
            options,
            answer: answer::Answer::new(options.live),
            tools: tool::Tools::default(),
            totals: Totals::default(),
            agent: String::new(),
        }
    }

    /// Shows an event.
    ///
    /// # Errors
    /// When the sink can't take it.
    pub(crate) fn event(&mut self, event: &Event, sink: &mut dyn Sink) -> io::Result<()> {
        self.totals.add_event(event);
        match &event.payload {
            Some(Payload::MessageDelta(delta)) => self.answer.delta(event.step, delta, sink),
            Some(Payload::MessageRestarted(restarted)) => {
                self.answer.restart(&restarted.reason, sink)
            }
            Some(Payload::ToolCalled(called)) => {
                self.tools.record_call(called);
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
                    &format!("· rewound: messages {from} to {last} are superseded"),
                )])
            }
            Some(Payload::ContextCompacted(compacted)) => {
                let action =
                    if compacted.summary { "summarized" } else { "removed from the prompt" };
                let (through, before, after) =
                    (compacted.through_position, compacted.tokens_before, compacted.tokens_after);
                let line = format!(
                    "· the context was compacted: messages up to {through} are {action} ({before} → {after} tokens)"
                );
                sink.line(&[(Style::Dim, &line)])
            }
            // An event of a newer version.
            None => sink.line(&[(Style::Dim, &format!("· {}", event.r#type))]),
        }
    }

    fn message(&mut self, event: &Event, message: &Message, sink: &mut dyn Sink) -> io::Result<()> {
        let source =
            message.status.as_ref().map_or(MessageSource::Unspecified, |status| status.source());
        let blocks = message.spec.as_ref().map_or(&[][..], |spec| &spec.blocks);
        if event.r#type != "message.created" {
            return if self.options.user_messages {
                sink.line(&[(Style::Dim, "· a queued message was changed")])
            } else {
                Ok(())
            };
        }
        match source {
            MessageSource::User if self.options.user_messages => {
                for (index, line) in message_text(blocks).lines().enumerate() {
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
                            self.tools.show_remaining(event.step, &result.tool_uses, sink)?;
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

    /// Shows a pending approval, or its decision.
    fn approval(&mut self, approval: &Approval, sink: &mut dyn Sink) -> io::Result<()> {
        let (Some(spec), Some(status)) = (&approval.spec, &approval.status) else { return Ok(()) };
        let comment = if status.comment.is_empty() {
            String::new()
        } else {
            format!(": {}", one_line(&status.comment))
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
                    (Style::Dim, &comment),
                ]);
            }
            state => {
                let state = crate::entity::approval::state_name(state);
                return sink.line(&[
                    (Style::Bad, &format!("✗ {} {state}{by}", one_line(&spec.tool))),
                    (Style::Dim, &comment),
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
        // All arguments: a person must see what they approve.
        for line in argument_lines(&spec.arguments) {
            sink.line(&[(Style::Plain, &format!("    {line}"))])?;
        }
        let omitted = spec.arguments_size.saturating_sub(spec.arguments.len() as u64);
        if omitted > 0 {
            sink.line(&[(Style::Bad, &format!("    … {omitted} more bytes are not shown"))])?;
        }
        let id = approval.metadata.as_ref().map_or("", |metadata| metadata.id.as_str());
        sink.line(&[(Style::Dim, &format!("  approve: construct approval approve {id}"))])?;
        sink.line(&[(
            Style::Dim,
            &format!("  reject:  construct approval reject {id} --comment COMMENT"),
        )])
    }

    fn turn(&mut self, turn: &TurnCompleted, sink: &mut dyn Sink) -> io::Result<()> {
        self.answer.abandon(sink)?;
        let totals = std::mem::take(&mut self.totals);
        let mut parts = vec![count(turn.turns, "model call")];
        if totals.tool_calls() > 0 {
            parts.push(count(totals.tool_calls(), "tool call"));
        }
        parts.push(usage(&totals.usage));
        let (style, outcome) = match turn.outcome() {
            TurnOutcome::Completed => (Style::Good, "✓ completed"),
            TurnOutcome::Cancelled => (Style::Bad, "■ cancelled"),
            TurnOutcome::Interrupted => (Style::Dim, "■ interrupted by a newer message"),
            TurnOutcome::MaxTurns => (Style::Bad, "✗ stopped at the limit of model calls"),
            TurnOutcome::Failed | TurnOutcome::Unspecified => (Style::Bad, "✗ failed"),
        };
        sink.line(&[(style, outcome), (Style::Dim, &format!(" · {}", parts.join(" · ")))])?;
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

/// Formats tokens and cost: `1,200 in (800 cached) + 34 out tokens · $0.0123`.
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

/// The name of a phase for people.
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

/// An attachment as one line of text.
pub(crate) fn attachment_line(attachment: &construct_proto::v1::Attachment) -> String {
    let name = if attachment.name.is_empty() { "attachment" } else { &attachment.name };
    match attachment.file.as_str() {
        "" => format!("[{name}: {}, {} bytes]", attachment.media_type, attachment.data.len()),
        file => format!("[{name}: {}, {} bytes, {file}]", attachment.media_type, attachment.size),
    }
}

/// The text of a message and its attachments.
pub(crate) fn message_text(blocks: &[construct_proto::v1::Block]) -> String {
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

/// The arguments of a pending approval as lines.
fn argument_lines(json: &str) -> Vec<String> {
    let text = match serde_json::from_str::<serde_json::Value>(json) {
        Ok(value) => serde_json::to_string_pretty(&value).unwrap_or_default(),
        // Truncated arguments are not valid JSON.
        Err(_) => json.to_owned(),
    };
    crate::text::printable(&text).lines().map(str::to_owned).collect()
}

/// Shows the first lines of a script's output.
fn output(text: &str, style: Style, sink: &mut dyn Sink) -> io::Result<()> {
    let width = sink.width().saturating_sub(6);
    let mut lines = text.trim_end().lines();
    for line in lines.by_ref().take(MAX_OUTPUT_LINES) {
        sink.line(&[
            (Style::Dim, "    ⎿ "),
            (style, &clip(&crate::text::printable(line).replace('\t', "  "), width)),
        ])?;
    }
    match lines.count() {
        0 => Ok(()),
        more => sink.line(&[(Style::Dim, &format!("    ⎿ … {more} more lines"))]),
    }
}

/// Ends the open line, and writes a dim note on the status channel.
pub(crate) fn note(text: &str, sink: &mut dyn Sink) -> io::Result<()> {
    sink.end_line()?;
    sink.text(Channel::Status, Style::Dim, text)?;
    sink.end_line()
}

#[cfg(test)]
mod tests;

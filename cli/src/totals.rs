//! Totals of a turn or conversation, counted from its messages. Messages are records, so none is
//! missing.

use std::collections::BTreeMap;

use construct_proto::v1::{Event, Message, MessageSource, Usage, block::Block, event::Payload};

/// Tokens, cost and tool calls of a turn, and its answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Totals {
    pub(crate) usage: Usage,
    pub(crate) tool_uses: BTreeMap<String, i64>,
    /// The text of the model's last message with text.
    pub(crate) text: String,
}

impl Totals {
    /// Adds the message that an event reports, if it reports one.
    pub(crate) fn add_event(&mut self, event: &Event) {
        if let (Some(Payload::Message(message)), "message.created") =
            (&event.payload, event.r#type.as_str())
        {
            self.add_message(message);
        }
    }

    fn add_message(&mut self, message: &Message) {
        let Some(status) = &message.status else { return };
        if let (MessageSource::Assistant, Some(usage)) = (status.source(), &status.usage) {
            add_usage(&mut self.usage, usage);
        }
        let mut text = Vec::new();
        for block in message.spec.iter().flat_map(|spec| &spec.blocks) {
            match &block.block {
                Some(Block::Text(block)) => text.push(block.text.as_str()),
                Some(Block::CodeInterpreterResult(result)) => {
                    for tool in &result.tool_uses {
                        *self.tool_uses.entry(tool.name.clone()).or_default() += 1;
                    }
                }
                Some(Block::CodeInterpreterCall(_) | Block::Thinking(_) | Block::Attachment(_))
                | None => {}
            }
        }
        if status.source() == MessageSource::Assistant && !text.is_empty() {
            self.text = text.join("\n");
        }
    }

    pub(crate) fn tool_calls(&self) -> i64 {
        self.tool_uses.values().sum()
    }
}

fn add_usage(sum: &mut Usage, usage: &Usage) {
    sum.input_tokens = sum.input_tokens.saturating_add(usage.input_tokens);
    sum.output_tokens = sum.output_tokens.saturating_add(usage.output_tokens);
    sum.cache_read_tokens = sum.cache_read_tokens.saturating_add(usage.cache_read_tokens);
    sum.cache_write_tokens = sum.cache_write_tokens.saturating_add(usage.cache_write_tokens);
    sum.thinking_tokens = sum.thinking_tokens.saturating_add(usage.thinking_tokens);
    sum.cost_pico_usd = sum.cost_pico_usd.saturating_add(usage.cost_pico_usd);
}

//! What a turn came to: counted from its messages, which are records and never lost.

use std::collections::BTreeMap;

use construct_proto::v1::{Event, Message, MessageSource, Usage, block::Block, event::Payload};

/// Counts the model calls, tool calls, tokens and cost of a turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Tally {
    pub(crate) usage: Usage,
    pub(crate) tool_uses: BTreeMap<String, i64>,
    /// The text of the last message of the model that had one.
    pub(crate) text: String,
}

impl Tally {
    pub(crate) fn event(&mut self, event: &Event) {
        if let (Some(Payload::Message(message)), "message.created") =
            (&event.payload, event.r#type.as_str())
        {
            self.message(message);
        }
    }

    fn message(&mut self, message: &Message) {
        let Some(status) = &message.status else { return };
        if let (MessageSource::Assistant, Some(usage)) = (status.source(), &status.usage) {
            add(&mut self.usage, usage);
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

fn add(sum: &mut Usage, usage: &Usage) {
    sum.input_tokens = sum.input_tokens.saturating_add(usage.input_tokens);
    sum.output_tokens = sum.output_tokens.saturating_add(usage.output_tokens);
    sum.cache_read_tokens = sum.cache_read_tokens.saturating_add(usage.cache_read_tokens);
    sum.cache_write_tokens = sum.cache_write_tokens.saturating_add(usage.cache_write_tokens);
    sum.thinking_tokens = sum.thinking_tokens.saturating_add(usage.thinking_tokens);
    sum.cost_pico_usd = sum.cost_pico_usd.saturating_add(usage.cost_pico_usd);
}

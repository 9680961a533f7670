//! The maximum cost of a call, before it is made. Budgets reserve this amount.
//!
//! The estimate is deliberately high. Text counts as twice its usual number of tokens, an image as
//! more than any vendor counts, and the answer as its maximum length, all at the highest applicable
//! price. It is capped by the model's context window: a vendor rejects a longer call and charges
//! nothing.

use super::{PICO_PER_MICRO, Prices};
use crate::message::{Attachment, Block, Content, Presentation};

/// Bytes of text per token, nearly always an upper bound for tokens: English has four, source code
/// three, Chinese two and a half.
const BYTES_PER_TOKEN: usize = 2;
/// Maximum tokens of an image of any size: vendors scale it down to less.
const TOKENS_PER_IMAGE: i64 = 6_000;
/// Maximum tokens of a document: a hundred pages, which is the limit of some vendors, and more than
/// the text of a scan of that length.
const TOKENS_PER_DOCUMENT: i64 = 150_000;
/// Tokens of a file besides its content: its name, type, hash, and how a script reads it.
const TOKENS_PER_NOTICE: i64 = 500;
/// Tokens of each block besides its text: its role, its type, the id of a call.
const TOKENS_PER_BLOCK: i64 = 50;

/// A model that a call may go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Its prices.
    pub prices: Prices,
    /// Its context window in tokens.
    pub context_window: i64,
    /// Its output limit in tokens.
    pub max_output_tokens: i64,
}

/// Maximum tokens of a text with this many bytes.
pub fn tokens_of_bytes(bytes: usize) -> i64 {
    i64::try_from(bytes.div_ceil(BYTES_PER_TOKEN)).unwrap_or(i64::MAX)
}

/// Maximum tokens of a message.
pub fn tokens_of_content(content: &Content) -> i64 {
    content.blocks.iter().map(tokens_of_block).fold(0, i64::saturating_add)
}

fn tokens_of_block(block: &Block) -> i64 {
    let tokens = match block {
        Block::Text(text) => tokens_of_bytes(text.len()),
        Block::CodeInterpreterCall(call) => tokens_of_bytes(call.code.len()),
        Block::CodeInterpreterResult(result) => {
            tokens_of_bytes(result.output.len() + result.error.len())
        }
        Block::Thinking(thinking) => tokens_of_bytes(thinking.text.len() + thinking.data.len()),
        Block::Attachment(attachment) => tokens_of_attachment(attachment),
    };
    tokens.saturating_add(TOKENS_PER_BLOCK)
}

fn tokens_of_attachment(Attachment { media_type, data, file, .. }: &Attachment) -> i64 {
    let Some(file) = file else {
        // Base64 encodes three bytes as four characters.
        let bytes = data.len() / 4 * 3;
        return if media_type.starts_with("image/") {
            TOKENS_PER_IMAGE
        } else {
            tokens_of_bytes(bytes)
        };
    };
    let text = tokens_of_bytes(usize::try_from(file.size).unwrap_or(usize::MAX));
    let content = match Presentation::for_file(media_type, file.size) {
        Presentation::Image => TOKENS_PER_IMAGE,
        Presentation::Document => text.min(TOKENS_PER_DOCUMENT),
        Presentation::Text => text,
        Presentation::NameOnly | Presentation::TooLarge => 0,
    };
    content.saturating_add(TOKENS_PER_NOTICE)
}

/// Maximum cost of a call with this many input tokens, whichever target answers it. A `hedged` call
/// may be answered by two.
pub fn max_cost(targets: &[Target], hedged: bool, input_tokens: i64) -> i64 {
    let mut costs: Vec<i64> = targets.iter().map(|target| target.max_cost(input_tokens)).collect();
    costs.sort_unstable_by(|one, other| other.cmp(one));
    costs.into_iter().take(if hedged { 2 } else { 1 }).fold(0, i64::saturating_add)
}

impl Target {
    fn max_cost(&self, input_tokens: i64) -> i64 {
        let input_tokens = input_tokens.min(self.context_window.max(0));
        let Prices { request, long_context, .. } = self.prices;
        // The applicable prices are only known after the input is counted: it may be shorter than
        // the estimate, and cheaper or not.
        let short = self.prices.rates(0);
        let long = long_context
            .filter(|long| input_tokens > long.above_input_tokens)
            .map_or(short, |long| long.rates);
        let highest = |prices: [i64; 6]| prices.into_iter().max().unwrap_or(0);
        let input = highest([
            short.input,
            short.cache_read,
            short.cache_write,
            long.input,
            long.cache_read,
            long.cache_write,
        ]);
        let output = highest([short.output, short.thinking, long.output, long.thinking, 0, 0]);
        let parts = [
            (input_tokens, input),
            (self.max_output_tokens.max(0), output),
            (1, request.saturating_mul(PICO_PER_MICRO)),
        ];
        parts
            .into_iter()
            .fold(0, |sum: i64, (tokens, price)| sum.saturating_add(tokens.saturating_mul(price)))
    }
}

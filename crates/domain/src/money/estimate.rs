//! What a call will cost at most, before it is made: what is set aside of budgets.
//!
//! The estimate is high on purpose. Text is taken for twice as many tokens as it usually has, a
//! picture for more than any vendor counts, and the answer for as long as it may become; all of it
//! at the highest price that may hold. It is not above what the model's window can hold: a vendor
//! refuses what is longer, and charges nothing.

use super::{PICO_PER_MICRO, Prices};
use crate::message::{Attachment, Block, Content, Shown};

/// Bytes of text that are at least one token, nearly always: English has four, source code three,
/// Chinese two and a half.
const BYTES_PER_TOKEN: usize = 2;
/// What a picture counts for at most, whatever its size: the vendors scale it down to less.
const TOKENS_PER_PICTURE: i64 = 6_000;
/// What a document counts for at most: a hundred pages, which is what some vendors take, and more
/// than a scan of as many has in words.
const TOKENS_PER_DOCUMENT: i64 = 150_000;
/// What a file costs besides what it says: its name, its kind, its hash, and how a script gets it.
const TOKENS_PER_NOTICE: i64 = 500;
/// What each block costs besides its text: its role, its kind, the id of a call.
const TOKENS_PER_BLOCK: i64 = 50;

/// Whom a call may go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// What its tokens cost.
    pub prices: Prices,
    /// Tokens it can see.
    pub context_window: i64,
    /// Tokens it may answer at most.
    pub max_output_tokens: i64,
}

/// Tokens of a text with so many bytes, at most.
pub fn tokens_of_bytes(bytes: usize) -> i64 {
    i64::try_from(bytes.div_ceil(BYTES_PER_TOKEN)).unwrap_or(i64::MAX)
}

/// Tokens of a message, at most.
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
        // Base64 has four characters for three bytes.
        let bytes = data.len() / 4 * 3;
        return if media_type.starts_with("image/") {
            TOKENS_PER_PICTURE
        } else {
            tokens_of_bytes(bytes)
        };
    };
    let text = tokens_of_bytes(usize::try_from(file.size).unwrap_or(usize::MAX));
    let content = match Shown::of(media_type, file.size) {
        Shown::Image => TOKENS_PER_PICTURE,
        Shown::Document => text.min(TOKENS_PER_DOCUMENT),
        Shown::Text => text,
        Shown::Named | Shown::TooLarge => 0,
    };
    content.saturating_add(TOKENS_PER_NOTICE)
}

/// What a call with so many tokens of input costs at most, whichever of the targets answers it;
/// when it is `hedged`, two of them may.
pub fn upper_cost(targets: &[Target], hedged: bool, input_tokens: i64) -> i64 {
    let mut costs: Vec<i64> =
        targets.iter().map(|target| target.upper_cost(input_tokens)).collect();
    costs.sort_unstable_by(|one, other| other.cmp(one));
    costs.into_iter().take(if hedged { 2 } else { 1 }).fold(0, i64::saturating_add)
}

impl Target {
    fn upper_cost(&self, input_tokens: i64) -> i64 {
        let input_tokens = input_tokens.min(self.context_window.max(0));
        let Prices { request, long_context, .. } = self.prices;
        // Which prices hold is known only when the input is counted: it may be shorter than the
        // estimate, and cheaper or not.
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

//! A model's context window: how much of it a conversation fills, and where it may be cut.
//!
//! Only vendors count tokens exactly. Before a call there is an estimate from its bytes
//! ([`crate::money::tokens_of_bytes`]), which is deliberately high. Its error is learned from what
//! the vendor counted for the last call ([`Context::scale`]).

use crate::{MessageId, message::Source};

/// Scale before any vendor has counted, in thousandths: four bytes per token.
pub const INITIAL_SCALE: u32 = 500;
/// Valid values of [`Context::scale`]. Beyond them the vendor has counted something else.
const SCALE_RANGE: std::ops::RangeInclusive<i64> = 100..=2_000;
/// Fill level, in percent of a model's input limit, at which a conversation is compacted when its
/// agent sets none.
pub const DEFAULT_COMPACT_AT_PERCENT: u32 = 80;
/// Minimum that an early summary must replace besides the summary before it, in percent of the
/// available tokens.
const MIN_SUMMARY_PERCENT: i64 = 20;
/// Share of the newest messages that is kept when the rest is summarized, in percent of the
/// available tokens.
const TAIL_PERCENT: i64 = 30;
/// The same when the rest is dropped. Larger, so that less is lost.
const DROPPED_TAIL_PERCENT: i64 = 50;
/// The same when that was not enough.
const LAST_RESORT_TAIL_PERCENT: i64 = 15;

/// How far a task's conversation fills its model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context {
    /// Input limit of the agent's model in tokens; 0 when unknown.
    pub input_limit: i64,
    /// Fill level at which the conversation is compacted, in percent of the input limit.
    pub compact_at: u32,
    /// Estimated tokens of a call besides the transcript.
    pub base: i64,
    /// Estimated tokens of the visible transcript.
    pub transcript: i64,
    /// Estimated tokens of the next queued message.
    pub queued: i64,
    /// Real tokens per thousand estimated tokens.
    pub scale: u32,
    /// Input tokens that the vendor counted for the call whose result is being absorbed.
    pub counted: Option<i64>,
    /// Tokens that the next call needs, as decided last.
    pub tokens: i64,
    /// Position up to which a summary replaces the transcript; 0 without a summary.
    pub through: i64,
    /// The visible transcript. Loaded only when a decision needs it.
    pub outline: Option<Outline>,
}

impl Default for Context {
    fn default() -> Self {
        Self {
            input_limit: 0,
            compact_at: DEFAULT_COMPACT_AT_PERCENT,
            base: 0,
            transcript: 0,
            queued: 0,
            scale: INITIAL_SCALE,
            counted: None,
            tokens: 0,
            through: 0,
            outline: None,
        }
    }
}

/// The visible transcript without its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outline {
    /// Estimated tokens of the summary at its start; 0 without a summary.
    pub summary: i64,
    /// Its messages, in order.
    pub shown: Vec<OutlineEntry>,
}

/// A message of an outline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutlineEntry {
    /// The message's id.
    pub message: MessageId,
    /// Its position.
    pub position: i64,
    /// Its author.
    pub source: Source,
    /// Whether it holds results of the scripts in the message before. The two are never separated.
    pub results: bool,
    /// Its estimated tokens.
    pub tokens: i64,
}

/// Where a transcript is cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CutPoint {
    /// Position of the last message that is no longer shown in full.
    pub through: i64,
    /// Positions before that which are still shown.
    pub kept: Vec<i64>,
    /// Estimated tokens that are no longer shown.
    pub replaced: i64,
    /// Number of messages that are no longer shown.
    pub messages: usize,
}

/// How much of a transcript is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepPolicy {
    /// The rest is summarized.
    Summary,
    /// The rest is dropped: whole exchanges if possible.
    Newest,
    /// As little as possible is kept.
    Least,
}

impl Context {
    /// The input limit of a model: its context window without the output limit. When a model may
    /// answer with its whole window, half is for the input.
    pub fn input_limit_for(window: i64, max_output: i64) -> i64 {
        (window - max_output.max(0)).max(window / 2).max(0)
    }

    /// Tokens that a call needs with `more` estimated tokens in addition.
    pub fn tokens_needed(&self, more: i64) -> i64 {
        let estimate = self.base.saturating_add(self.transcript).saturating_add(more);
        estimate.saturating_mul(i64::from(self.scale)) / 1_000
    }

    /// Whether a conversation should be compacted before a call that needs this many tokens.
    ///
    /// Where tools and instructions alone fill most of the window, the conversation must fill at
    /// least twice what compaction keeps of the rest. Otherwise every call would be preceded by a
    /// summary, or a summary could not help at all.
    pub fn is_full(&self, need: i64) -> bool {
        let fixed = self.base.saturating_mul(i64::from(self.scale)) / 1_000;
        let (conversation, available) =
            (need.saturating_sub(fixed), self.input_limit.saturating_sub(fixed));
        available > 0
            && need.saturating_mul(100)
                >= self.input_limit.saturating_mul(i64::from(self.compact_at))
            && conversation.saturating_mul(100) >= available.saturating_mul(2 * self.tail())
    }

    /// Share of the newest messages that is kept beside a summary, in percent of what the
    /// conversation has for itself. Smaller where conversations are compacted early: what is kept
    /// must not fill the limit again at once.
    fn tail(&self) -> i64 {
        TAIL_PERCENT.min(i64::from(self.compact_at) / 2)
    }

    /// Whether a summary replaces enough new messages to be worth a call when the conversation
    /// would still fit without it.
    pub(crate) fn is_worth_a_summary(&self, cut: &CutPoint, outline: &Outline) -> bool {
        cut.replaced.saturating_sub(outline.summary).saturating_mul(100)
            >= self.available_tokens().saturating_mul(MIN_SUMMARY_PERCENT)
    }

    /// Estimated tokens available beside what is always sent.
    fn available_tokens(&self) -> i64 {
        self.input_limit.saturating_mul(1_000) / i64::from(self.scale.max(1)) - self.base
    }

    /// Adjusts the scale to what the vendor counted for the estimated call.
    pub(crate) fn calibrate(&mut self) {
        let estimate = self.base.saturating_add(self.transcript);
        if let Some(counted) = self.counted.take().filter(|&counted| counted > 0)
            && estimate > 0
        {
            self.set_scale(counted.saturating_mul(1_000) / estimate);
        }
    }

    /// Adjusts the scale after a call was rejected as too long: it had more tokens than the input
    /// limit.
    pub(crate) fn calibrate_too_long(&mut self) {
        let estimate = self.base.saturating_add(self.transcript).max(1);
        self.set_scale(
            (self.input_limit.saturating_mul(1_000) / estimate).max(i64::from(self.scale)),
        );
    }

    fn set_scale(&mut self, scale: i64) {
        let scale = scale.clamp(*SCALE_RANGE.start(), *SCALE_RANGE.end());
        self.scale = u32::try_from(scale).unwrap_or(INITIAL_SCALE);
    }

    /// Finds where to cut. Keeps the user's first message, and the message that is being
    /// `answered`. `None` when nothing could be removed.
    pub(crate) fn find_cut(
        &self,
        outline: &Outline,
        answered: MessageId,
        keep: KeepPolicy,
    ) -> Option<CutPoint> {
        let shown = &outline.shown;
        let room = self.available_tokens();
        let percent = match keep {
            KeepPolicy::Summary => self.tail(),
            KeepPolicy::Newest => DROPPED_TAIL_PERCENT,
            KeepPolicy::Least => LAST_RESORT_TAIL_PERCENT,
        };
        // A model may accept less than its known limit, and reject what seems to fit. So the share
        // is taken of what there is.
        let size =
            shown.iter().map(|entry| entry.tokens).fold(outline.summary, i64::saturating_add);
        let budget = room.clamp(0, size.max(0)).saturating_mul(percent) / 100;
        let tail = |from: usize| {
            shown[from..].iter().map(|entry| entry.tokens).fold(0, i64::saturating_add)
        };
        // Messages kept from an earlier cut lie before it.
        let candidates = (1..shown.len())
            .filter(|&at| !shown[at].results && shown[at - 1].position > self.through);
        let fitting = candidates.clone().filter(|&at| tail(at) <= budget);
        let begins_exchange = |at: &usize| shown[*at].source == Source::User;
        let exchange = fitting.clone().find(begins_exchange).filter(|_| keep == KeepPolicy::Newest);
        let at = exchange
            .or_else(|| fitting.clone().next())
            .or_else(|| candidates.clone().next_back())?;

        let before = &shown[..at];
        let first = before.iter().find(|entry| entry.source == Source::User);
        // A first message that fills half of the budget is not kept.
        let first = first.filter(|entry| entry.tokens <= budget / 2).map(|entry| entry.position);
        let stays =
            |entry: &&OutlineEntry| entry.message == answered || Some(entry.position) == first;
        let kept = before.iter().filter(stays).map(|entry| entry.position).collect();
        let left_out = before.iter().filter(|entry| !stays(entry));
        let messages = left_out.clone().count();
        let replaced =
            left_out.map(|entry| entry.tokens).fold(outline.summary, i64::saturating_add);
        (messages > 0).then(|| CutPoint {
            through: before[at - 1].position,
            kept,
            replaced,
            messages,
        })
    }
}

#[cfg(test)]
mod tests;

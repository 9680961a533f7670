//! What a model can see at once: how much of that a conversation takes, and where it may be cut.
//!
//! Tokens are counted by vendors only. What is known before a call is an estimate from its bytes
//! ([`crate::money::tokens_of_bytes`]), which is high on purpose; how far it is from the truth is
//! learned from what the vendor has counted for the last call ([`Context::scale`]).

use crate::{MessageId, message::Source};

/// How much of an estimate is true before any vendor has counted, in thousandths: four bytes for a
/// token.
pub const FIRST_SCALE: u32 = 500;
/// What [`Context::scale`] may be: beyond that the vendor has counted something else.
const SCALES: std::ops::RangeInclusive<i64> = 100..=2_000;
/// The share of a model's room from which on a conversation is compacted, in percent, when its
/// agent does not say.
pub const COMPACT_AT: u32 = 80;
/// What a summary that is asked for early has to take the place of besides the one before it, in
/// percent of the room.
const WORTH: i64 = 20;
/// What of the newest messages stays as it is when the rest is summed up, in percent of the room.
const TAIL: i64 = 30;
/// The same when the rest is left out, so that less is lost.
const TAIL_OF_DROPPED: i64 = 50;
/// The same when that was not enough.
const TAIL_OF_LAST_RESORT: i64 = 15;

/// How far a task's conversation fills its model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context {
    /// Tokens of input that the agent's model takes; 0: not known.
    pub room: i64,
    /// From which share of the room on the conversation is compacted, in percent.
    pub compact_at: u32,
    /// What a call sends besides the transcript, as an estimate.
    pub base: i64,
    /// What is shown of the transcript, as an estimate.
    pub transcript: i64,
    /// What the message has that is next, as an estimate.
    pub queued: i64,
    /// How many tokens a thousand of the estimate are.
    pub scale: u32,
    /// Tokens that the vendor has counted of the input of the call whose result is taken in.
    pub counted: Option<i64>,
    /// Tokens that the next call needs, as it was last decided.
    pub tokens: i64,
    /// Up to which place the transcript is shown as a summary; 0: there is none.
    pub through: i64,
    /// What is shown of the transcript. Read only when a decision asks for it.
    pub outline: Option<Outline>,
}

impl Default for Context {
    fn default() -> Self {
        Self {
            room: 0,
            compact_at: COMPACT_AT,
            base: 0,
            transcript: 0,
            queued: 0,
            scale: FIRST_SCALE,
            counted: None,
            tokens: 0,
            through: 0,
            outline: None,
        }
    }
}

/// A transcript as it is shown, without what it says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outline {
    /// Estimate of the summary it begins with; 0: there is none.
    pub summary: i64,
    /// Its messages, in order.
    pub shown: Vec<Entry>,
}

/// A message of an outline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Which.
    pub message: MessageId,
    /// Its place.
    pub position: i64,
    /// Who it is from.
    pub source: Source,
    /// Whether it holds results of the scripts in the message before: the two are not parted.
    pub results: bool,
    /// Estimate of its tokens.
    pub tokens: i64,
}

/// Where a transcript is cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// The last place that is not shown as it is any more.
    pub through: i64,
    /// The places up to there that are shown all the same.
    pub kept: Vec<i64>,
    /// What is not shown any more, as an estimate.
    pub replaced: i64,
    /// How many messages that are.
    pub messages: usize,
}

/// How much is to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// The rest is summed up.
    Summary,
    /// The rest is left out: whole exchanges, where that is possible.
    Newest,
    /// As little as possible.
    Least,
}

impl Context {
    /// The room of a model. What it may answer needs room as well; of a model that may answer with
    /// all it can see, half is for the input.
    pub fn room_of(window: i64, max_output: i64) -> i64 {
        (window - max_output.max(0)).max(window / 2).max(0)
    }

    /// Tokens a call needs when so much more (an estimate) is said.
    pub fn need(&self, more: i64) -> i64 {
        let estimate = self.base.saturating_add(self.transcript).saturating_add(more);
        estimate.saturating_mul(i64::from(self.scale)) / 1_000
    }

    /// Whether a call that needs so many tokens is for a conversation that should be compacted
    /// first. Where tools and instructions alone fill most of the room, it has to fill at least
    /// twice as much of the rest as is kept of it: a summary would be asked for before each call,
    /// or could not help at all.
    pub fn is_full(&self, need: i64) -> bool {
        let fixed = self.base.saturating_mul(i64::from(self.scale)) / 1_000;
        let (said, left) = (need.saturating_sub(fixed), self.room.saturating_sub(fixed));
        left > 0
            && need.saturating_mul(100) >= self.room.saturating_mul(i64::from(self.compact_at))
            && said.saturating_mul(100) >= left.saturating_mul(2 * self.tail())
    }

    /// What of the newest messages stays as it is beside a summary, in percent of what the
    /// conversation has for itself. Less where conversations are compacted early: what stays must
    /// not be full again at once.
    fn tail(&self) -> i64 {
        TAIL.min(i64::from(self.compact_at) / 2)
    }

    /// Whether a summary says enough that none said before, to be worth a call where the
    /// conversation would fit as it is.
    pub(crate) fn is_worth_a_summary(&self, cut: &Cut, outline: &Outline) -> bool {
        cut.replaced.saturating_sub(outline.summary).saturating_mul(100)
            >= self.left().saturating_mul(WORTH)
    }

    /// What there is room for beside what is always sent, as an estimate.
    fn left(&self) -> i64 {
        self.room.saturating_mul(1_000) / i64::from(self.scale.max(1)) - self.base
    }

    /// Learns from what the vendor has counted of the call that the estimate was of.
    pub(crate) fn learn(&mut self) {
        let estimate = self.base.saturating_add(self.transcript);
        if let Some(counted) = self.counted.take().filter(|&counted| counted > 0)
            && estimate > 0
        {
            self.set_scale(counted.saturating_mul(1_000) / estimate);
        }
    }

    /// Learns that a call was refused as too long: it had more tokens than there is room for.
    pub(crate) fn learn_too_long(&mut self) {
        let estimate = self.base.saturating_add(self.transcript).max(1);
        self.set_scale((self.room.saturating_mul(1_000) / estimate).max(i64::from(self.scale)));
    }

    fn set_scale(&mut self, scale: i64) {
        let scale = scale.clamp(*SCALES.start(), *SCALES.end());
        self.scale = u32::try_from(scale).unwrap_or(FIRST_SCALE);
    }

    /// Where to cut. The user's first message stays, and the one that is `answered`. None when
    /// nothing could be left out.
    pub(crate) fn cut(&self, outline: &Outline, answered: MessageId, keep: Keep) -> Option<Cut> {
        let shown = &outline.shown;
        let room = self.left();
        let percent = match keep {
            Keep::Summary => self.tail(),
            Keep::Newest => TAIL_OF_DROPPED,
            Keep::Least => TAIL_OF_LAST_RESORT,
        };
        // A model may see less than is known of it: then it refuses what seems to fit, and the
        // share is one of what there is.
        let size =
            shown.iter().map(|entry| entry.tokens).fold(outline.summary, i64::saturating_add);
        let budget = room.clamp(0, size.max(0)).saturating_mul(percent) / 100;
        let tail = |from: usize| {
            shown[from..].iter().map(|entry| entry.tokens).fold(0, i64::saturating_add)
        };
        // What is kept from an earlier cut lies before it.
        let places = (1..shown.len())
            .filter(|&at| !shown[at].results && shown[at - 1].position > self.through);
        let fitting = places.clone().filter(|&at| tail(at) <= budget);
        let begins_exchange = |at: &usize| shown[*at].source == Source::User;
        let exchange = fitting.clone().find(begins_exchange).filter(|_| keep == Keep::Newest);
        let at =
            exchange.or_else(|| fitting.clone().next()).or_else(|| places.clone().next_back())?;

        let before = &shown[..at];
        let first = before.iter().find(|entry| entry.source == Source::User);
        // One that fills half of what is to be kept is not worth it.
        let first = first.filter(|entry| entry.tokens <= budget / 2).map(|entry| entry.position);
        let stays = |entry: &&Entry| entry.message == answered || Some(entry.position) == first;
        let kept = before.iter().filter(stays).map(|entry| entry.position).collect();
        let left_out = before.iter().filter(|entry| !stays(entry));
        let messages = left_out.clone().count();
        let replaced =
            left_out.map(|entry| entry.tokens).fold(outline.summary, i64::saturating_add);
        (messages > 0).then(|| Cut { through: before[at - 1].position, kept, replaced, messages })
    }
}

#[cfg(test)]
mod tests;

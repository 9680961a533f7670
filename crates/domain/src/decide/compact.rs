//! A conversation that no longer fits its model. A separate model call summarizes the older part.
//! If that fails, the older part is dropped.
//!
//! Both are bounded: between two answers of the model there are at most [`MAX_CUTS`] cuts, the
//! second without a call, and at most [`MAX_SUMMARIES`] summaries are requested. After that the
//! model is called with what there is, and its vendor decides.

use super::{Draft, Effect, MODEL_TIMEOUT};
use crate::{
    context::{CutPoint, KeepPolicy},
    message::{Block, Content},
    money::tokens_of_content,
    task::{CONTEXT_TOO_LONG, Phase, Stage, StopReason, Turn, TurnOutcome},
};

/// Maximum number of cuts between two answers of the model.
const MAX_CUTS: u32 = 2;
/// Maximum number of summaries that are requested before the oldest messages are dropped instead.
const MAX_SUMMARIES: u32 = 2;

/// Required sections of a summary, each under its own heading.
pub const SUMMARY_SECTIONS: [&str; 4] = ["Goal", "Facts", "Done", "Open"];

/// Whether a summary has all sections. How a model marks headings does not matter.
fn is_structured(summary: &str) -> bool {
    let marks = |c: char| c.is_whitespace() || "#*_:".contains(c);
    let lines: Vec<&str> = summary.lines().map(|line| line.trim_matches(marks)).collect();
    SUMMARY_SECTIONS
        .iter()
        .all(|section| lines.iter().any(|line| line.eq_ignore_ascii_case(section)))
}

/// What replaces the older part of a transcript from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextCompaction {
    /// Position of the last message that is no longer shown in full.
    pub through: i64,
    /// Positions before that which are still shown, after the text.
    pub kept: Vec<i64>,
    /// The text that is shown instead.
    pub text: String,
    /// Its estimated tokens.
    pub tokens: i64,
    /// Estimated tokens of what is replaced, which is more.
    pub replaced: i64,
    /// Whether the text is a model's summary, and not only a notice that messages were dropped.
    pub summary: bool,
    /// Tokens that a call needed before.
    pub before: i64,
    /// Tokens that a call needs now.
    pub after: i64,
}

impl Draft<'_> {
    /// Ensures that the next model call fits. Returns whether something else comes first.
    pub(super) fn make_room(&mut self, turn: &Turn) -> bool {
        let context = &self.d.task.context;
        let need = context.tokens_needed(self.added_tokens());
        if context.input_limit <= 0 || !(turn.compaction.too_long || context.is_full(need)) {
            return false;
        }
        if turn.compaction.cuts > 0 && !turn.compaction.too_long && need <= context.input_limit {
            // After a cut, what remains fits. It is not cut further only because it is still large.
            return false;
        }
        let d = &self.d;
        if d.admitted.is_some()
            || !d.appended.is_empty()
            || d.ended.is_some()
            || d.compacted.is_some()
        {
            // What is cut must be in the transcript. The next decision finds it there.
            self.d.task.next_wake = Some(self.now);
            return true;
        }
        if turn.compaction.cuts >= MAX_CUTS {
            return self.handle_no_room(turn);
        }
        let Some(outline) = &context.outline else {
            self.d.needs_outline = true;
            self.d.task.next_wake = Some(self.now);
            return true;
        };
        let ask = turn.compaction.cuts == 0 && turn.compaction.summaries < MAX_SUMMARIES;
        let keep = match turn.compaction.cuts {
            _ if ask => KeepPolicy::Summary,
            0 => KeepPolicy::Newest,
            _ => KeepPolicy::Least,
        };
        let Some(cut) = context.find_cut(outline, turn.message, keep) else {
            return self.handle_no_room(turn);
        };
        let fits = need <= context.input_limit && !turn.compaction.too_long;
        if ask && fits && !context.is_worth_a_summary(&cut, outline) {
            return false;
        }
        if !ask {
            let text = omission_notice(&cut);
            return !self.compact(cut, text, false) && self.handle_no_room(turn);
        }
        if self.refuse_without_budget() {
            return true;
        }
        let CutPoint { through, kept, replaced, .. } = cut;
        self.set_stage(Stage::Compact { through, kept, replaced });
        self.start_step(1, MODEL_TIMEOUT, Effect::Compact);
        true
    }

    /// Nothing more can be dropped. A call that the vendor has rejected would be rejected again;
    /// otherwise the vendor is asked.
    fn handle_no_room(&mut self, turn: &Turn) -> bool {
        if !turn.compaction.too_long {
            return false;
        }
        let message = "what must be said does not fit the model, even without the older part of the conversation";
        self.fail(CONTEXT_TOO_LONG, message.to_owned());
        self.end_turn(TurnOutcome::Failed);
        self.settle_running();
        true
    }

    /// A summary is in flight.
    pub(super) fn settle_compact(&mut self) {
        self.d.task.phase = Phase::InvokeModel;
        match self.d.task.step.clone() {
            Some(step) => self.settle_call(step, Effect::Compact),
            None => {
                // It was stopped. The next decision checks whether it is still needed.
                self.set_stage(Stage::Model);
                self.settle_running();
            }
        }
    }

    /// Absorbs a summary. An empty or truncated one, or one that is no shorter than what it
    /// replaces, is rejected. One without its sections is accepted only as the last attempt: it
    /// says more than a notice that messages were dropped.
    pub(super) fn handle_summary(&mut self, cut: CutPoint, blocks: &[Block], stop: StopReason) {
        self.set_stage(Stage::Model);
        let texts = blocks.iter().filter_map(|block| match block {
            Block::Text(text) => Some(text.trim()),
            _ => None,
        });
        let summary = texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n\n");
        let last = self
            .d
            .task
            .turn
            .as_ref()
            .is_some_and(|turn| turn.compaction.summaries + 1 >= MAX_SUMMARIES);
        let is_valid = stop == StopReason::Complete
            && !summary.is_empty()
            && (last || is_structured(&summary));
        let text = format!(
            "The conversation so far, up to its message {}, was summed up, because it no longer fitted. This is the summary; \
             what follows it is shown as it was said.\n\n{summary}",
            cut.through
        );
        if !(is_valid && self.compact(cut, text, true)) {
            self.count_failed_summaries(1);
        }
    }

    /// Counts failed attempts at a summary.
    pub(super) fn count_failed_summaries(&mut self, attempts: u32) {
        self.set_stage(Stage::Model);
        if let Some(turn) = &mut self.d.task.turn {
            turn.compaction.summaries += attempts;
        }
    }

    /// Gives up on summaries for a reason that will not pass.
    pub(super) fn give_up_summaries(&mut self) {
        self.count_failed_summaries(MAX_SUMMARIES);
    }

    /// Handles a call that a vendor rejected as too long. Returns whether anything can be done
    /// about it.
    pub(super) fn handle_too_long(&mut self) -> bool {
        let has_limit = self.d.task.context.input_limit > 0;
        let Some(turn) =
            self.d.task.turn.as_mut().filter(|turn| has_limit && turn.compaction.cuts < MAX_CUTS)
        else {
            return false;
        };
        turn.compaction.too_long = true;
        self.d.task.context.calibrate_too_long();
        self.uncount_call();
        true
    }

    /// Replaces the older part by a text. Returns false when that would not be shorter.
    fn compact(&mut self, cut: CutPoint, text: String, summary: bool) -> bool {
        let tokens = tokens_of_content(&Content { blocks: vec![Block::Text(text.clone())] });
        if tokens >= cut.replaced {
            return false;
        }
        let before = self.d.task.context.tokens_needed(0);
        let context = &mut self.d.task.context;
        context.transcript = context.transcript.saturating_sub(cut.replaced).saturating_add(tokens);
        context.through = cut.through;
        context.outline = None;
        let after = context.tokens_needed(0);
        if let Some(turn) = &mut self.d.task.turn {
            turn.compaction.cuts += 1;
            turn.compaction.too_long = false;
        }
        let CutPoint { through, kept, replaced, .. } = cut;
        self.d.compacted = Some(ContextCompaction {
            through,
            kept,
            text,
            tokens,
            replaced,
            summary,
            before,
            after,
        });
        true
    }

    /// Estimated tokens that this decision adds to the transcript.
    pub(super) fn added_tokens(&self) -> i64 {
        let appended = self.d.appended.iter();
        let appended =
            appended.map(|message| tokens_of_content(&Content { blocks: message.blocks.clone() }));
        let admitted = if self.d.admitted.is_some() { self.d.task.context.queued } else { 0 };
        appended.fold(admitted, i64::saturating_add)
    }
}

/// The notice that replaces messages without a summary.
fn omission_notice(cut: &CutPoint) -> String {
    let (count, through) = (cut.messages, cut.through);
    let kept = if cut.kept.is_empty() { "" } else { " What the user had asked for is kept." };
    format!(
        "{count} older messages of this conversation, up to its message {through}, are left out here, because they no longer fitted and \
         could not be summed up.{kept} Look at the workspace before you rely on what was done before."
    )
}

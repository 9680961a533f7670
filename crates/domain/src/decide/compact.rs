//! A conversation that no longer fits its model: the older part is summed up by a call of its own,
//! or, where that does not succeed, left out.
//!
//! It is bounded: between two answers of the model at most two cuts are made, the second without a
//! call, and at most [`SUMMARIES`] summaries are asked for. After that the model is asked with what
//! there is, and its vendor has the last word.

use super::{Draft, Effect, MODEL_DEADLINE};
use crate::{
    context::{Cut, Keep},
    message::{Block, Content},
    money::tokens_of_content,
    task::{CONTEXT_TOO_LONG, Phase, Stage, Stop, Turn, TurnOutcome},
};

/// Cuts between two answers of the model.
const CUTS: u32 = 2;
/// Summaries that are asked for at most before the oldest messages are left out instead.
const SUMMARIES: u32 = 2;

/// What a summary has to have, each under a heading of its own.
pub const SECTIONS: [&str; 4] = ["Goal", "Facts", "Done", "Open"];

/// Whether it has all of them. How a model marks its headings is its own affair.
fn is_structured(summary: &str) -> bool {
    let marks = |c: char| c.is_whitespace() || "#*_:".contains(c);
    let lines: Vec<&str> = summary.lines().map(|line| line.trim_matches(marks)).collect();
    SECTIONS.iter().all(|section| lines.iter().any(|line| line.eq_ignore_ascii_case(section)))
}

/// What stands in the place of the older part of a transcript from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compacted {
    /// The last place that is not shown as it is any more.
    pub through: i64,
    /// The places up to there that are shown all the same, behind the text.
    pub kept: Vec<i64>,
    /// What is shown instead.
    pub text: String,
    /// Estimate of its tokens.
    pub tokens: i64,
    /// Estimate of what is not shown any more, which is more.
    pub replaced: i64,
    /// Whether the text is a model's summary, and not only a note that something was left out.
    pub summary: bool,
    /// Tokens that a call needed before.
    pub before: i64,
    /// Tokens that it needs now.
    pub after: i64,
}

impl Draft<'_> {
    /// Sees to it that the next model call fits. True when something else comes first.
    pub(super) fn make_room(&mut self, turn: &Turn) -> bool {
        let context = &self.d.task.context;
        let need = context.need(self.added());
        if context.room <= 0 || !(turn.room.too_long || context.is_full(need)) {
            return false;
        }
        if turn.room.cuts > 0 && !turn.room.too_long && need <= context.room {
            // A cut was made, and what is left fits: it is not cut further only because it is still
            // much.
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
        if turn.room.cuts >= CUTS {
            return self.no_room(turn);
        }
        let Some(outline) = &context.outline else {
            self.d.wants_outline = true;
            self.d.task.next_wake = Some(self.now);
            return true;
        };
        let ask = turn.room.cuts == 0 && turn.room.summaries < SUMMARIES;
        let keep = match turn.room.cuts {
            _ if ask => Keep::Summary,
            0 => Keep::Newest,
            _ => Keep::Least,
        };
        let Some(cut) = context.cut(outline, turn.message, keep) else { return self.no_room(turn) };
        let fits = need <= context.room && !turn.room.too_long;
        if ask && fits && !context.is_worth_a_summary(&cut, outline) {
            return false;
        }
        if !ask {
            let text = left_out(&cut);
            return !self.compact(cut, text, false) && self.no_room(turn);
        }
        if self.refuse_for_money() {
            return true;
        }
        let Cut { through, kept, replaced, .. } = cut;
        self.set_stage(Stage::Compact { through, kept, replaced });
        self.start_step(1, MODEL_DEADLINE, Effect::Compact);
        true
    }

    /// Nothing more can be left out. What the vendor has refused already would be refused again;
    /// otherwise it is asked.
    fn no_room(&mut self, turn: &Turn) -> bool {
        if !turn.room.too_long {
            return false;
        }
        let words = "what must be said does not fit the model, even without the older part of the conversation";
        self.fail(CONTEXT_TOO_LONG, words.to_owned());
        self.end_turn(TurnOutcome::Failed);
        self.settle_running();
        true
    }

    /// A summary is on its way.
    pub(super) fn settle_compact(&mut self) {
        self.d.task.phase = Phase::InvokeModel;
        match self.d.task.step.clone() {
            Some(step) => self.settle_call(step, Effect::Compact),
            None => {
                // It was stopped; whether it is still wanted is looked at anew.
                self.set_stage(Stage::Model);
                self.settle_running();
            }
        }
    }

    /// Takes in a summary. One that is empty, cut off, or no shorter than what it stands for is not
    /// taken, and one without its sections only when it is the last that is asked for: it says more
    /// than that something was left out.
    pub(super) fn summarized(&mut self, cut: Cut, blocks: &[Block], stop: Stop) {
        self.set_stage(Stage::Model);
        let texts = blocks.iter().filter_map(|block| match block {
            Block::Text(text) => Some(text.trim()),
            _ => None,
        });
        let summary = texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n\n");
        let last =
            self.d.task.turn.as_ref().is_some_and(|turn| turn.room.summaries + 1 >= SUMMARIES);
        let whole = stop == Stop::Done && !summary.is_empty() && (last || is_structured(&summary));
        let text = format!(
            "The conversation so far, up to its message {}, was summed up, because it no longer fitted. This is the summary; \
             what follows it is shown as it was said.\n\n{summary}",
            cut.through
        );
        if !(whole && self.compact(cut, text, true)) {
            self.no_summary(1);
        }
    }

    /// So many more tries at a summary have not given one.
    pub(super) fn no_summary(&mut self, tries: u32) {
        self.set_stage(Stage::Model);
        if let Some(turn) = &mut self.d.task.turn {
            turn.room.summaries += tries;
        }
    }

    /// A summary that cannot be made for reasons that will not pass.
    pub(super) fn never_a_summary(&mut self) {
        self.no_summary(SUMMARIES);
    }

    /// A vendor refused a call as too long. True when something can be done about that.
    pub(super) fn was_too_long(&mut self) -> bool {
        let known = self.d.task.context.room > 0;
        let Some(turn) = self.d.task.turn.as_mut().filter(|turn| known && turn.room.cuts < CUTS)
        else {
            return false;
        };
        turn.room.too_long = true;
        self.d.task.context.learn_too_long();
        self.unanswered();
        true
    }

    /// Shows a text instead of the older part. False when that would not be shorter.
    fn compact(&mut self, cut: Cut, text: String, summary: bool) -> bool {
        let tokens = tokens_of_content(&Content { blocks: vec![Block::Text(text.clone())] });
        if tokens >= cut.replaced {
            return false;
        }
        let before = self.d.task.context.need(0);
        let context = &mut self.d.task.context;
        context.transcript = context.transcript.saturating_sub(cut.replaced).saturating_add(tokens);
        context.through = cut.through;
        context.outline = None;
        let after = context.need(0);
        if let Some(turn) = &mut self.d.task.turn {
            turn.room.cuts += 1;
            turn.room.too_long = false;
        }
        let Cut { through, kept, replaced, .. } = cut;
        self.d.compacted =
            Some(Compacted { through, kept, text, tokens, replaced, summary, before, after });
        true
    }

    /// Estimate of what this decision adds to the transcript.
    pub(super) fn added(&self) -> i64 {
        let appended = self.d.appended.iter();
        let appended =
            appended.map(|message| tokens_of_content(&Content { blocks: message.blocks.clone() }));
        let admitted = if self.d.admitted.is_some() { self.d.task.context.queued } else { 0 };
        appended.fold(admitted, i64::saturating_add)
    }
}

/// What is said in the place of messages that no summary could be had of.
fn left_out(cut: &Cut) -> String {
    let (count, through) = (cut.messages, cut.through);
    let kept = if cut.kept.is_empty() { "" } else { " What the user had asked for is kept." };
    format!(
        "{count} older messages of this conversation, up to its message {through}, are left out here, because they no longer fitted and \
         could not be summed up.{kept} Look at the workspace before you rely on what was done before."
    )
}

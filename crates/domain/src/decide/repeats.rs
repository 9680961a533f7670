//! A model that runs in circles: the same scripts with the same results, again and again.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use super::Draft;
use crate::{
    message::{Block, CodeResult, Source, code_calls},
    task::{STUCK, TurnOutcome},
};

/// The same scripts with the same results so many times in a row are a loop. The first one of a
/// turn is said to the model, the second one ends the turn. Scripts that look at something which
/// takes its time give the same a few times as well, and the model can wait within a script, so
/// that more patience would only cost money.
pub const REPEATS: u32 = 3;

/// What a model is told that runs in circles.
const TOLD: &str = "The last three times you ran the same script and it gave the same result. Running it again will not change that. Try \
                    something else, wait within one script if something takes its time, or answer with what you know and what is \
                    missing. If it happens again, your turn ends.";

/// What scripts ask for, as a number. It is compared only with others of the same turn, so that a
/// hash which another release counts differently costs one more round.
fn digest_of_scripts(blocks: &[Block]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for call in code_calls(blocks) {
        call.code.hash(&mut hasher);
    }
    hasher.finish()
}

/// The same of scripts with what they gave. The ids of calls and how long tools took differ each
/// time and say nothing.
fn digest_of_results(scripts: u64, results: &[CodeResult]) -> u64 {
    let mut hasher = DefaultHasher::new();
    scripts.hash(&mut hasher);
    for result in results {
        (&result.output, &result.error).hash(&mut hasher);
    }
    hasher.finish()
}

impl Draft<'_> {
    /// Notes what the model wants to run.
    pub(super) fn note_scripts(&mut self, blocks: &[Block]) {
        if let Some(turn) = &mut self.d.task.turn {
            turn.repeats.scripts = digest_of_scripts(blocks);
        }
    }

    /// Compares what scripts gave with what they gave before; to be called when their results are
    /// in the transcript.
    pub(super) fn note_results(&mut self, results: &[CodeResult]) {
        let Some(turn) = &mut self.d.task.turn else { return };
        let repeats = &mut turn.repeats;
        let now = digest_of_results(repeats.scripts, results);
        repeats.count =
            if repeats.count > 0 && repeats.last == now { repeats.count + 1 } else { 1 };
        repeats.last = now;
        if repeats.count < REPEATS {
            return;
        }
        repeats.count = 0;
        if !std::mem::replace(&mut repeats.told, true) {
            return self.append(Source::System, vec![Block::Text(TOLD.to_owned())]);
        }
        let words = format!(
            "the model ran the same script with the same result {REPEATS} times in a row, twice"
        );
        self.fail(STUCK, words);
        self.end_turn(TurnOutcome::Failed);
    }
}

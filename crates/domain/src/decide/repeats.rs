//! Detects a model that runs the same scripts with the same results again and again.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use super::Draft;
use crate::{
    message::{Block, CodeResult, Source, code_calls},
    task::{STUCK, TurnOutcome},
};

/// Number of identical results in a row that count as a loop. The first loop of a turn warns the
/// model, the second ends the turn.
///
/// Scripts that poll something also give the same result a few times. The model can wait within a
/// script, so a higher number would only cost money.
pub const MAX_REPEATS: u32 = 3;

/// Tells a model that it repeats itself.
const LOOP_NOTICE: &str = "The last three times you ran the same script and it gave the same result. Running it again will not change that. Try \
                    something else, wait within one script if something takes its time, or answer with what you know and what is \
                    missing. If it happens again, your turn ends.";

/// Hash of the scripts. It is only compared with others of the same turn, so a different hash in
/// another release costs one more round.
fn digest_of_scripts(blocks: &[Block]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for call in code_calls(blocks) {
        call.code.hash(&mut hasher);
    }
    hasher.finish()
}

/// Hash of the scripts with their results. The ids of calls and the duration of tools differ each
/// time and are left out.
fn digest_of_results(scripts: u64, results: &[CodeResult]) -> u64 {
    let mut hasher = DefaultHasher::new();
    scripts.hash(&mut hasher);
    for result in results {
        (&result.output, &result.error).hash(&mut hasher);
    }
    hasher.finish()
}

impl Draft<'_> {
    /// Records the scripts that the model wants to run.
    pub(super) fn record_scripts(&mut self, blocks: &[Block]) {
        if let Some(turn) = &mut self.d.task.turn {
            turn.repeats.scripts = digest_of_scripts(blocks);
        }
    }

    /// Compares the results of scripts with their previous ones. Call it when the results are in
    /// the transcript.
    pub(super) fn record_results(&mut self, results: &[CodeResult]) {
        let Some(turn) = &mut self.d.task.turn else { return };
        let repeats = &mut turn.repeats;
        let now = digest_of_results(repeats.scripts, results);
        repeats.count =
            if repeats.count > 0 && repeats.last == now { repeats.count + 1 } else { 1 };
        repeats.last = now;
        if repeats.count < MAX_REPEATS {
            return;
        }
        repeats.count = 0;
        if !std::mem::replace(&mut repeats.warned, true) {
            return self.append(Source::System, vec![Block::Text(LOOP_NOTICE.to_owned())]);
        }
        let message = format!(
            "the model ran the same script with the same result {MAX_REPEATS} times in a row, twice"
        );
        self.fail(STUCK, message);
        self.end_turn(TurnOutcome::Failed);
    }
}

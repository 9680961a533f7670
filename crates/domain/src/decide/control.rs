//! What people ask for while a task works: to pause it, to end the turn, to take the conversation
//! back, or to be answered at once. Each of them stops what runs first.

use super::{
    BROKEN_OFF, CANCEL_GRACE, CANCEL_REPEAT, CANCELLED, Draft, Effect, INTERRUPTED, MODEL_GRACE,
};
use crate::{
    message::{Block, Source},
    task::{Phase, Stage, Step, StepState, TaskError, TurnOutcome},
};
use jiff::Timestamp;

impl Draft<'_> {
    /// Looks at the state alone and moves it on.
    pub(super) fn settle(&mut self) {
        // A decision that has appended or ended something is committed before the next is made,
        // except that a new step is started at once: that is the hot path of every turn.
        if self.d.task.cancel.is_some() || self.d.task.rewind.is_some() {
            self.settle_cancel();
        } else if self.d.task.suspend {
            self.settle_suspend();
        } else {
            self.settle_running();
        }
    }

    /// Ends the turn and drops what waits; with a rewind, which is the same and more, puts a part
    /// of the transcript aside.
    fn settle_cancel(&mut self) {
        let reason = match &self.d.task.cancel {
            Some(reason) => reason.clone(),
            None => "the conversation was taken back to an earlier message".to_owned(),
        };
        if self.stop_step(&reason) {
            return;
        }
        let words =
            if reason.is_empty() { "cancelled".to_owned() } else { format!("cancelled: {reason}") };
        match self.d.task.turn.as_ref().map(|turn| turn.stage.clone()) {
            Some(Stage::Code { calls }) => {
                self.append_results(
                    &calls,
                    Vec::new(),
                    &format!("not run: the user cancelled ({reason})"),
                );
                self.end_turn_for(TurnOutcome::Cancelled, CANCELLED, &words);
            }
            Some(Stage::Model | Stage::Compact { .. }) => {
                self.end_turn_for(TurnOutcome::Cancelled, CANCELLED, &words)
            }
            None => {}
        }
        self.d.drop_queued = Some(words);
        self.queued = None;
        self.d.task.cancel = None;
        // Who takes a turn back, or ends it, does not want it tried again.
        self.d.task.retry = None;
        self.d.rewound = self.d.task.rewind.take();
        if self.d.rewound.is_some() {
            // A summary that has just come tells of what is put aside.
            self.d.compacted = None;
        }
        if self.d.task.suspend { self.settle_suspend() } else { self.settle_running() }
    }

    fn settle_suspend(&mut self) {
        self.d.task.phase = Phase::Suspended;
        if let Some(step @ Step { state: StepState::Parked { .. }, .. }) = &self.d.task.step
            && self.now < step.approvals_expire()
        {
            // Nothing runs that would have to be stopped, and what people decide meanwhile is not
            // lost.
            self.d.task.next_wake = Some(step.approvals_expire());
            return;
        }
        if self.stop_step("the user suspended the task") {
            return;
        }
        self.d.task.next_wake = None;
    }

    /// Ends the turn because the next message does not wait for its end.
    pub(super) fn settle_interrupt(&mut self) {
        let words = "interrupted by a newer message of the user";
        if self.stop_step(words) {
            return;
        }
        if let Some(Stage::Code { calls }) =
            self.d.task.turn.as_ref().map(|turn| turn.stage.clone())
        {
            self.append_results(&calls, Vec::new(), &format!("not run: {words}"));
        }
        self.end_turn_for(TurnOutcome::Interrupted, INTERRUPTED, words);
        self.settle_running();
    }

    /// Whether a person has asked for a stop that leaves no room for what a model would still say.
    pub(super) fn is_held(&self) -> bool {
        self.d.task.cancel.is_some() || self.d.task.rewind.is_some() || self.d.task.suspend
    }

    /// Takes in what a model had said before it was stopped. It is kept only when that was for a
    /// newer message: in every other case nobody wants it, or the model is asked again, and would
    /// find its own words before its answer.
    pub(super) fn broken_off(&mut self, step: &Step, mut said: Vec<Block>) {
        said.retain(|block| matches!(block, Block::Text(text) if !text.trim().is_empty()));
        let interrupted = !self.is_held() && self.queued.is_some_and(|queued| queued.interrupts);
        if !(interrupted && matches!(step.state, StepState::Cancelling { .. })) || said.is_empty() {
            return self.unanswered();
        }
        self.append(Source::Assistant, said);
        self.append(Source::System, vec![Block::Text(BROKEN_OFF.to_owned())]);
    }

    fn end_turn_for(&mut self, outcome: TurnOutcome, code: &str, words: &str) {
        self.end_turn(outcome);
        // What a person has asked for is kept with the task and told with the turn's end, not as an
        // error of its own.
        self.d.task.last_error =
            Some(TaskError { code: code.to_owned(), message: words.to_owned(), time: self.now });
    }

    /// Stops the step in flight. True while its last words are awaited: those of scripts say what
    /// has happened, those of a model that nothing more is used, and what it had said.
    fn stop_step(&mut self, reason: &str) -> bool {
        let Some(step) = self.d.task.step.clone() else { return false };
        match step.state {
            StepState::Backoff { .. } => {
                self.d.task.step = None;
                self.unanswered();
                false
            }
            StepState::InFlight { .. } => {
                let (effect, grace) = if self.is_code() {
                    (Effect::CancelCode(step.id, reason.to_owned()), CANCEL_GRACE)
                } else {
                    (Effect::CancelModel(step.id, reason.to_owned()), MODEL_GRACE)
                };
                self.d.effects.push(effect);
                let state = StepState::Cancelling { deadline: self.now + grace };
                self.d.task.step = Some(Step { state, ..step });
                self.d.task.next_wake = Some(self.now + CANCEL_REPEAT);
                true
            }
            StepState::Cancelling { deadline } => self.await_last_words(&step, deadline),
            StepState::Parked { results, .. } => {
                if let Some(Stage::Code { calls }) =
                    self.d.task.turn.as_ref().map(|turn| turn.stage.clone())
                {
                    self.end_parked(step.id, &calls, results);
                }
                false
            }
        }
    }

    /// True while the worker still has time; else the outcome is unknown, and said so.
    pub(super) fn await_last_words(&mut self, step: &Step, deadline: Timestamp) -> bool {
        // Whoever has begun it meanwhile has not heard it.
        let reason = "it was told to stop before".to_owned();
        let tell =
            if self.is_code() { Effect::CancelCode } else { Effect::CancelModel }(step.id, reason);
        if self.now < deadline {
            if self.woken && self.d.task.next_wake.is_none_or(|wake| self.now >= wake) {
                self.d.effects.push(tell);
                self.d.task.next_wake = Some((self.now + CANCEL_REPEAT).min(deadline));
            }
            return true;
        }
        self.d.task.step = None;
        let Some(Stage::Code { calls }) = self.d.task.turn.as_ref().map(|turn| turn.stage.clone())
        else {
            // For the last time: a call at work that nobody waits for would cost money to its end.
            self.d.effects.push(tell);
            self.unanswered();
            return false;
        };
        self.d.effects.push(Effect::EndCode(step.id));
        let words = "the script was stopped and did not report; it is unknown what it did";
        self.append_results(&calls, Vec::new(), words);
        false
    }

    fn is_code(&self) -> bool {
        matches!(self.d.task.turn.as_ref().map(|turn| &turn.stage), Some(Stage::Code { .. }))
    }
}

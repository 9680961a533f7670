//! What people request while a task runs: suspend it, cancel the turn, rewind the conversation, or
//! interrupt it with a message. Each of them first stops the running step.

use super::{
    CANCEL_RETRY_INTERVAL, CANCELLED, CODE_GRACE_PERIOD, Draft, Effect, INTERRUPTED,
    INTERRUPTED_NOTICE, MODEL_GRACE_PERIOD,
};
use crate::{
    message::{Block, Source},
    task::{Phase, Stage, Step, StepState, TaskError, TurnOutcome},
};
use jiff::Timestamp;

impl Draft<'_> {
    /// Advances the task from its state alone.
    pub(super) fn settle(&mut self) {
        // A decision that has appended or ended something is committed before the next is made. A
        // new step is the exception: it starts at once, because that is the hot path of every turn.
        if self.d.task.cancel.is_some() || self.d.task.rewind.is_some() {
            self.settle_cancel();
        } else if self.d.task.suspend {
            self.settle_suspend();
        } else {
            self.settle_running();
        }
    }

    /// Ends the turn and drops queued messages. A rewind does the same, and supersedes part of the
    /// transcript.
    fn settle_cancel(&mut self) {
        let reason = match &self.d.task.cancel {
            Some(reason) => reason.clone(),
            None => "the conversation was rewound to an earlier message".to_owned(),
        };
        if self.stop_step(&reason) {
            return;
        }
        let message =
            if reason.is_empty() { "cancelled".to_owned() } else { format!("cancelled: {reason}") };
        match self.d.task.turn.as_ref().map(|turn| turn.stage.clone()) {
            Some(Stage::Code { calls }) => {
                self.append_results(
                    &calls,
                    Vec::new(),
                    &format!("not run: the user cancelled ({reason})"),
                );
                self.end_turn_for(TurnOutcome::Cancelled, CANCELLED, &message);
            }
            Some(Stage::Model | Stage::Compact { .. }) => {
                self.end_turn_for(TurnOutcome::Cancelled, CANCELLED, &message)
            }
            None => {}
        }
        self.d.drop_queued = Some(message);
        self.queued = None;
        self.d.task.cancel = None;
        // A person who rewinds or cancels a turn does not want it retried.
        self.d.task.retry = None;
        self.d.rewound = self.d.task.rewind.take();
        if self.d.rewound.is_some() {
            // A summary that has just arrived covers superseded messages.
            self.d.compacted = None;
        }
        if self.d.task.suspend { self.settle_suspend() } else { self.settle_running() }
    }

    fn settle_suspend(&mut self) {
        self.d.task.phase = Phase::Suspended;
        if let Some(step @ Step { state: StepState::Suspended { .. }, .. }) = &self.d.task.step
            && self.now < step.approvals_expire_at()
        {
            // Nothing runs that must be stopped, and decisions that people make meanwhile are not
            // lost.
            self.d.task.next_wake = Some(step.approvals_expire_at());
            return;
        }
        if self.stop_step("the user suspended the task") {
            return;
        }
        self.d.task.next_wake = None;
    }

    /// Ends the turn because the next message interrupts it.
    pub(super) fn settle_interrupt(&mut self) {
        let message = "interrupted by a newer message of the user";
        if self.stop_step(message) {
            return;
        }
        if let Some(Stage::Code { calls }) =
            self.d.task.turn.as_ref().map(|turn| turn.stage.clone())
        {
            self.append_results(&calls, Vec::new(), &format!("not run: {message}"));
        }
        self.end_turn_for(TurnOutcome::Interrupted, INTERRUPTED, message);
        self.settle_running();
    }

    /// Whether a person has requested a stop that discards a model's further answer.
    pub(super) fn is_stop_requested(&self) -> bool {
        self.d.task.cancel.is_some() || self.d.task.rewind.is_some() || self.d.task.suspend
    }

    /// Absorbs the partial answer of a stopped model call. It is kept only when a newer message
    /// interrupted the call. In every other case nobody needs it, or the model is called again and
    /// would find its own words before its answer.
    pub(super) fn handle_interrupted(&mut self, step: &Step, mut partial: Vec<Block>) {
        partial.retain(|block| matches!(block, Block::Text(text) if !text.trim().is_empty()));
        let interrupted =
            !self.is_stop_requested() && self.queued.is_some_and(|queued| queued.interrupts);
        if !(interrupted && matches!(step.state, StepState::Cancelling { .. }))
            || partial.is_empty()
        {
            return self.uncount_call();
        }
        self.append(Source::Assistant, partial);
        self.append(Source::System, vec![Block::Text(INTERRUPTED_NOTICE.to_owned())]);
    }

    fn end_turn_for(&mut self, outcome: TurnOutcome, code: &str, message: &str) {
        self.end_turn(outcome);
        // A person's request is stored with the task and reported with the turn's end, not as an
        // error of its own.
        self.d.task.last_error =
            Some(TaskError { code: code.to_owned(), message: message.to_owned(), time: self.now });
    }

    /// Stops the step in flight. Returns whether its final result is still awaited. The result of
    /// scripts says what happened; that of a model call contains its usage and partial answer.
    fn stop_step(&mut self, reason: &str) -> bool {
        let Some(step) = self.d.task.step.clone() else { return false };
        match step.state {
            StepState::Backoff { .. } => {
                self.d.task.step = None;
                self.uncount_call();
                false
            }
            StepState::InFlight { .. } => {
                let (effect, grace) = if self.is_code() {
                    (Effect::CancelCode(step.id, reason.to_owned()), CODE_GRACE_PERIOD)
                } else {
                    (Effect::CancelModel(step.id, reason.to_owned()), MODEL_GRACE_PERIOD)
                };
                self.d.effects.push(effect);
                let state = StepState::Cancelling { deadline: self.now + grace };
                self.d.task.step = Some(Step { state, ..step });
                self.d.task.next_wake = Some(self.now + CANCEL_RETRY_INTERVAL);
                true
            }
            StepState::Cancelling { deadline } => self.await_stopped_step(&step, deadline),
            StepState::Suspended { results, .. } => {
                if let Some(Stage::Code { calls }) =
                    self.d.task.turn.as_ref().map(|turn| turn.stage.clone())
                {
                    self.end_suspended(step.id, &calls, results);
                }
                false
            }
        }
    }

    /// Returns whether the worker still has time. Otherwise the outcome is unknown, and reported
    /// so.
    pub(super) fn await_stopped_step(&mut self, step: &Step, deadline: Timestamp) -> bool {
        // A worker that started it meanwhile has not received the request.
        let reason = "it was told to stop before".to_owned();
        let cancel =
            if self.is_code() { Effect::CancelCode } else { Effect::CancelModel }(step.id, reason);
        if self.now < deadline {
            if self.woken && self.d.task.next_wake.is_none_or(|wake| self.now >= wake) {
                self.d.effects.push(cancel);
                self.d.task.next_wake = Some((self.now + CANCEL_RETRY_INTERVAL).min(deadline));
            }
            return true;
        }
        self.d.task.step = None;
        let Some(Stage::Code { calls }) = self.d.task.turn.as_ref().map(|turn| turn.stage.clone())
        else {
            // For the last time: a running call that nobody waits for would cost money to its end.
            self.d.effects.push(cancel);
            self.uncount_call();
            return false;
        };
        self.d.effects.push(Effect::EndCode(step.id));
        let message = "the script was stopped and did not report; it is unknown what it did";
        self.append_results(&calls, Vec::new(), message);
        false
    }

    fn is_code(&self) -> bool {
        matches!(self.d.task.turn.as_ref().map(|turn| &turn.stage), Some(Stage::Code { .. }))
    }
}

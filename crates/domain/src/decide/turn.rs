//! A running turn: a message is admitted, the model called and its scripts run, until the turn
//! ends.

use std::time::Duration;

use super::{
    BUDGET_EXHAUSTED, CANCEL_RETRY_INTERVAL, CODE_GRACE_PERIOD, CODE_TIMEOUT, Draft, Effect,
    MAX_CHECK_INTERVAL, MIN_CHECK_INTERVAL, MODEL_TIMEOUT,
};
use crate::task::{
    Failure, FailureClass, Phase, QueuedMessage, Stage, Step, StepState, Turn, TurnOutcome,
};
use jiff::Timestamp;

impl Draft<'_> {
    pub(super) fn settle_running(&mut self) {
        if self.d.ended.is_some() && self.queued.is_some() {
            // The next message starts its own decision, so that each commit describes one turn.
            self.d.task.phase = Phase::AwaitInput;
            self.d.task.next_wake = Some(self.now);
            return;
        }
        if self.d.task.turn.is_some() && self.queued.is_some_and(|queued| queued.interrupts) {
            return self.settle_interrupt();
        }
        if self.d.task.turn.is_none() {
            let message = match (self.queued.take(), self.d.task.retry.take()) {
                (Some(QueuedMessage { message, .. }), _) => {
                    self.d.task.last_position += 1;
                    self.d.admitted = Some((message, self.d.task.last_position));
                    message
                }
                // The message is already in the transcript, with everything its turn has done.
                (None, Some(message)) if self.d.ended.is_none() => message,
                (None, _) => {
                    self.d.task.phase = Phase::AwaitInput;
                    self.d.task.next_wake = None;
                    return;
                }
            };
            self.d.task.turn = Some(Turn::new(message, Stage::Model));
            self.d.task.last_error = None;
        }
        let Some(turn) = self.d.task.turn.clone() else { return };
        match turn.stage {
            Stage::Model => self.settle_model(&turn),
            Stage::Code { .. } => self.settle_code(),
            Stage::Compact { .. } => self.settle_compact(),
        }
    }

    fn settle_model(&mut self, turn: &Turn) {
        self.d.task.phase = Phase::InvokeModel;
        let Some(step) = self.d.task.step.clone() else {
            if turn.calls >= self.d.task.max_turns {
                let limit = self.d.task.max_turns;
                self.fail(
                    "MAX_TURNS",
                    format!("the limit of {limit} model calls for one message is reached"),
                );
                self.end_turn(TurnOutcome::MaxTurns);
                self.settle_running();
                return;
            }
            if self.make_room(turn) || self.refuse_without_budget() {
                return;
            }
            if let Some(turn) = &mut self.d.task.turn {
                turn.calls += 1;
            }
            self.start_step(1, MODEL_TIMEOUT, Effect::InvokeModel);
            return;
        };
        self.settle_call(step, Effect::InvokeModel);
    }

    /// A model call that is in flight or waits for a retry.
    pub(super) fn settle_call(&mut self, step: Step, effect: fn(Step) -> Effect) {
        match step.state {
            StepState::Backoff { until } if self.now >= until => {
                if self.refuse_without_budget() {
                    return;
                }
                self.start_step(step.attempt, MODEL_TIMEOUT, effect);
            }
            StepState::Backoff { until } => self.d.task.next_wake = Some(until),
            StepState::InFlight { deadline } if self.now >= deadline => {
                self.d
                    .effects
                    .push(Effect::CancelModel(step.id, "its deadline has passed".to_owned()));
                self.d.task.step = None;
                // The worker that took it may have called the vendor. If no worker took it, the
                // shell reports that as its result.
                let message =
                    format!("the model did not answer within {} s", MODEL_TIMEOUT.as_secs());
                self.handle_model_failure(
                    &step,
                    Failure {
                        class: FailureClass::DeadlineExceeded,
                        message,
                        retry_at: None,
                        attempts: 1,
                    },
                );
                self.settle_running();
            }
            StepState::InFlight { deadline } => self.recheck_step(&step, deadline, effect),
            // The reason for the stop is gone. The call is made again as soon as it has stopped.
            StepState::Cancelling { deadline } => {
                if !self.await_stopped_step(&step, deadline) {
                    self.settle_running();
                }
            }
            // Only scripts are suspended, so this is a defect. A call that was not made costs
            // nothing.
            StepState::Suspended { .. } => {
                self.d.task.step = None;
                self.uncount_call();
                self.settle_running();
            }
        }
    }

    /// Ends the turn when no budget covers its next model call. Returns whether it did.
    pub(super) fn refuse_without_budget(&mut self) -> bool {
        let Some(exhausted) = self.exhausted else { return false };
        if self.d.admitted.is_some() || self.d.ended.is_some() {
            // A commit describes one turn, and one thing about a message. The next decision asks
            // the budget again.
            self.d.task.next_wake = Some(self.now);
            return true;
        }
        self.fail(BUDGET_EXHAUSTED, exhausted.to_owned());
        self.end_turn(TurnOutcome::Failed);
        self.settle_running();
        true
    }

    fn settle_code(&mut self) {
        self.d.task.phase = Phase::ExecuteTools;
        let Some(step) = self.d.task.step.clone() else {
            self.start_step(1, CODE_TIMEOUT, Effect::ExecuteCode);
            return;
        };
        match step.state {
            StepState::InFlight { deadline } if self.now >= deadline => {
                let deadline = self.now + CODE_GRACE_PERIOD;
                self.d
                    .effects
                    .push(Effect::CancelCode(step.id, "its deadline has passed".to_owned()));
                self.d.task.step = Some(Step { state: StepState::Cancelling { deadline }, ..step });
                self.d.task.next_wake = Some(self.now + CANCEL_RETRY_INTERVAL);
            }
            StepState::InFlight { deadline } => {
                self.recheck_step(&step, deadline, Effect::ExecuteCode)
            }
            StepState::Cancelling { deadline } => {
                if !self.await_stopped_step(&step, deadline) {
                    self.settle_running();
                }
            }
            StepState::Suspended { ref waits, ref awaits, .. } => {
                let (waits, awaits) = (waits.clone(), awaits.clone());
                self.settle_suspended(step, &waits, &awaits);
            }
            StepState::Backoff { .. } => {
                // Scripts are never retried: their side effects may have happened.
                self.d.task.step = None;
                self.settle_code();
            }
        }
    }

    pub(super) fn start_step(&mut self, attempt: u32, limit: Duration, effect: fn(Step) -> Effect) {
        self.d.task.steps += 1;
        let step = Step {
            id: self.fresh.step,
            number: self.d.task.steps,
            attempt,
            since: self.now,
            round: 0,
            resumed: None,
            state: StepState::InFlight { deadline: self.now + limit },
        };
        self.d.task.step = Some(step.clone());
        self.d.task.next_wake = Some(self.now + MIN_CHECK_INTERVAL);
        self.d.effects.push(effect(step));
    }

    /// A step in flight needs nothing, unless its command was lost. Sends the same command again,
    /// which the bus rejects while the first one is queued or running.
    fn recheck_step(&mut self, step: &Step, deadline: Timestamp, effect: fn(Step) -> Effect) {
        if self.d.task.next_wake.is_some_and(|wake| self.now < wake) {
            return;
        }
        let age =
            Duration::try_from(self.now.duration_since(step.requested_at())).unwrap_or_default();
        self.d.task.next_wake =
            Some((self.now + age.clamp(MIN_CHECK_INTERVAL, MAX_CHECK_INTERVAL)).min(deadline));
        self.d.effects.push(effect(step.clone()));
    }
}

//! A turn on its way: a message is taken, the model asked, its scripts run, until the turn ends.

use std::time::Duration;

use super::{
    BUDGET_EXHAUSTED, CANCEL_GRACE, CANCEL_REPEAT, CODE_DEADLINE, Draft, Effect, FIRST_CHECK,
    LAST_CHECK, MODEL_DEADLINE,
};
use crate::task::{
    Failure, FailureClass, Phase, Queued, Stage, Step, StepState, Turn, TurnOutcome,
};
use jiff::Timestamp;

impl Draft<'_> {
    pub(super) fn settle_running(&mut self) {
        if self.d.ended.is_some() && self.queued.is_some() {
            // The next message begins its own decision, so that each commit tells of one turn.
            self.d.task.phase = Phase::AwaitInput;
            self.d.task.next_wake = Some(self.now);
            return;
        }
        if self.d.task.turn.is_some() && self.queued.is_some_and(|queued| queued.interrupts) {
            return self.settle_interrupt();
        }
        if self.d.task.turn.is_none() {
            let message = match (self.queued.take(), self.d.task.retry.take()) {
                (Some(Queued { message, .. }), _) => {
                    self.d.task.last_position += 1;
                    self.d.admitted = Some((message, self.d.task.last_position));
                    message
                }
                // It is in the transcript already, with whatever its turn has done.
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
            if self.make_room(turn) || self.refuse_for_money() {
                return;
            }
            if let Some(turn) = &mut self.d.task.turn {
                turn.calls += 1;
            }
            self.start_step(1, MODEL_DEADLINE, Effect::InvokeModel);
            return;
        };
        self.settle_call(step, Effect::InvokeModel);
    }

    /// A model call that is on its way, or to be tried again.
    pub(super) fn settle_call(&mut self, step: Step, effect: fn(Step) -> Effect) {
        match step.state {
            StepState::Backoff { until } if self.now >= until => {
                if self.refuse_for_money() {
                    return;
                }
                self.start_step(step.attempt, MODEL_DEADLINE, effect);
            }
            StepState::Backoff { until } => self.d.task.next_wake = Some(until),
            StepState::InFlight { deadline } if self.now >= deadline => {
                self.d
                    .effects
                    .push(Effect::CancelModel(step.id, "its deadline has passed".to_owned()));
                self.d.task.step = None;
                // Whoever took it may have called the vendor. Of a call that nobody has taken the
                // shell says so, as its result.
                let message =
                    format!("the model did not answer within {} s", MODEL_DEADLINE.as_secs());
                self.model_failed(
                    &step,
                    Failure {
                        class: FailureClass::DeadlineExceeded,
                        message,
                        retry_at: None,
                        tries: 1,
                    },
                );
                self.settle_running();
            }
            StepState::InFlight { deadline } => self.check_step(&step, deadline, effect),
            // What it was stopped for is not wanted any more: as soon as it has stopped it is asked
            // for again.
            StepState::Cancelling { deadline } => {
                if !self.await_last_words(&step, deadline) {
                    self.settle_running();
                }
            }
            // Of scripts only, so a defect; a call costs nothing while it is not asked for.
            StepState::Parked { .. } => {
                self.d.task.step = None;
                self.unanswered();
                self.settle_running();
            }
        }
    }

    /// Ends the turn when there is no money for its next model call. True when that is so.
    pub(super) fn refuse_for_money(&mut self) -> bool {
        let Some(exhausted) = self.exhausted else { return false };
        if self.d.admitted.is_some() || self.d.ended.is_some() {
            // One commit tells of one turn, and of a message one thing: the next decision asks for
            // the money again.
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
            self.start_step(1, CODE_DEADLINE, Effect::ExecuteCode);
            return;
        };
        match step.state {
            StepState::InFlight { deadline } if self.now >= deadline => {
                let deadline = self.now + CANCEL_GRACE;
                self.d
                    .effects
                    .push(Effect::CancelCode(step.id, "its deadline has passed".to_owned()));
                self.d.task.step = Some(Step { state: StepState::Cancelling { deadline }, ..step });
                self.d.task.next_wake = Some(self.now + CANCEL_REPEAT);
            }
            StepState::InFlight { deadline } => {
                self.check_step(&step, deadline, Effect::ExecuteCode)
            }
            StepState::Cancelling { deadline } => {
                if !self.await_last_words(&step, deadline) {
                    self.settle_running();
                }
            }
            StepState::Parked { ref waits, ref awaits, .. } => {
                let (waits, awaits) = (waits.clone(), awaits.clone());
                self.settle_parked(step, &waits, &awaits);
            }
            StepState::Backoff { .. } => {
                // Scripts are never tried again by us: their side effects may have happened.
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
        self.d.task.next_wake = Some(self.now + FIRST_CHECK);
        self.d.effects.push(effect(step));
    }

    /// A step in flight needs nothing, unless its command was lost: then the same command is sent
    /// again, which the bus refuses while the first one is still queued or being worked on.
    fn check_step(&mut self, step: &Step, deadline: Timestamp, effect: fn(Step) -> Effect) {
        if self.d.task.next_wake.is_some_and(|wake| self.now < wake) {
            return;
        }
        let age = Duration::try_from(self.now.duration_since(step.wanted())).unwrap_or_default();
        self.d.task.next_wake = Some((self.now + age.clamp(FIRST_CHECK, LAST_CHECK)).min(deadline));
        self.d.effects.push(effect(step.clone()));
    }
}

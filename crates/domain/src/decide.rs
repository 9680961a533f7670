//! What happens next to a task: a pure function of its state, what is queued, what happened, and the time.
//!
//! It is level-triggered: an event only changes the state (a result is absorbed), and then `settle` looks at the state
//! alone and moves it on until nothing more can be done without the outside world. So a lost wake, a repeated one, or a
//! crash between two of them costs time and nothing else. Effects repeat safely: each names a step by its id.

use std::time::Duration;

use jiff::Timestamp;

use crate::{
    MessageId, StepId,
    approval::{Approval, ApprovalState, Asked, AskedCall, Closed},
    backoff,
    message::{Block, CodeResult, Source, code_calls},
    task::{
        BUDGET_EXHAUSTED, Failure, FailureClass, NewMessage, Outcome, Phase, Stage, Step, StepResult, StepState, Stop,
        Task, TaskError, Turn, TurnOutcome,
    },
};

mod approvals;
#[cfg(test)]
mod tests;

/// How long a model call may take, from the moment it is wanted.
pub const MODEL_DEADLINE: Duration = Duration::from_secs(10 * 60);
/// How long the scripts of one assistant message may take together.
pub const CODE_DEADLINE: Duration = Duration::from_secs(30 * 60);
/// How long a worker that was told to stop has for its last words.
pub const CANCEL_GRACE: Duration = Duration::from_secs(10);
/// How often it is told again.
pub const CANCEL_REPEAT: Duration = Duration::from_secs(1);
/// How long a vendor may ask us to stay away; one that asks for more is asked again after this.
pub const LONGEST_RETRY: Duration = Duration::from_secs(10 * 60);
/// How soon a step in flight is looked at again, in case its command was lost; doubles with the step's age.
pub const FIRST_CHECK: Duration = Duration::from_secs(2);
/// How late at most.
pub const LAST_CHECK: Duration = Duration::from_secs(30);

/// What a model is told whose answer was cut off.
const CUT: &str = "Your answer was cut off at your limit of output tokens. A script that was not whole was not run. Go on in smaller \
                   pieces.";

/// Why a task is looked at.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Somebody thinks there may be something to do.
    Wake,
    /// A worker says what became of a step.
    Result(StepResult),
}

/// What `decide` cannot make itself without ceasing to be pure.
#[derive(Debug, Clone, Copy)]
pub struct Fresh {
    /// For the step it may start.
    pub step: StepId,
    /// For a title it may ask for.
    pub title_step: StepId,
    /// For the messages it may append.
    pub messages: [MessageId; 2],
    /// 0 to 1, for pauses.
    pub jitter: f64,
}

/// What to commit, then what to do.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// The task's new state.
    pub task: Task,
    /// The queued message that enters the transcript, at [`Task::last_position`] of its moment.
    pub admitted: Option<(MessageId, i64)>,
    /// Messages appended to the transcript: one, or two when an answer is followed at once by what the system says to it.
    pub appended: Vec<NewMessage>,
    /// The turn that ended.
    pub ended: Option<EndedTurn>,
    /// Whether every queued message is dropped, as cancelled.
    pub drop_queued: bool,
    /// An error clients are told about.
    pub error: Option<TaskError>,
    /// What people are asked from now on. A question about the same call with other arguments is replaced.
    pub asked: Vec<Asked>,
    /// Questions that are over without a person's decision.
    pub closed: Vec<Closed>,
    /// To be performed after the commit, in order; may be repeated.
    pub effects: Vec<Effect>,
}

/// A turn that ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedTurn {
    /// The user message it answered.
    pub message: MessageId,
    /// Model calls it took.
    pub calls: u32,
    /// How it ended.
    pub outcome: TurnOutcome,
}

/// Something to do outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Have the model called for this step, unless a command for the task is already waiting.
    InvokeModel(Step),
    /// Have the scripts run.
    ExecuteCode(Step),
    /// Tell the worker to stop.
    CancelModel(StepId, String),
    /// Tell the worker to stop.
    CancelCode(StepId, String),
    /// The scripts' step is over, whatever became of it: nobody may run it any more, and its journal is not needed.
    EndCode(StepId),
    /// Have a title made.
    MakeTitle(StepId),
}

impl Decision {
    /// Whether anything needs to be committed.
    pub fn changes(&self, before: &Task) -> bool {
        self.task != *before
            || self.admitted.is_some()
            || !self.appended.is_empty()
            || self.ended.is_some()
            || self.drop_queued
            || !self.asked.is_empty()
            || !self.closed.is_empty()
    }
}

/// Decides what happens next. `queued` is the oldest accepted user message that is not in the transcript yet.
///
/// One decision admits at most one message and ends at most one turn, so that each commit is small and tells of one
/// turn; when more can be done at once, `next_wake` is `now`.
pub fn decide(task: &Task, queued: Option<MessageId>, event: Event, now: Timestamp, fresh: Fresh) -> Decision {
    begin(task, queued, event, now, fresh, None)
}

fn begin(
    task: &Task,
    queued: Option<MessageId>,
    event: Event,
    now: Timestamp,
    fresh: Fresh,
    exhausted: Option<&str>,
) -> Decision {
    let mut draft = Draft {
        exhausted,
        d: Decision {
            task: task.clone(),
            admitted: None,
            appended: Vec::new(),
            ended: None,
            drop_queued: false,
            error: None,
            asked: Vec::new(),
            closed: Vec::new(),
            effects: Vec::new(),
        },
        queued,
        now,
        fresh,
        woken: matches!(event, Event::Wake),
    };
    if let Event::Result(result) = event {
        draft.absorb(result);
    }
    draft.settle();
    draft.close_approvals(task.step.as_ref());
    draft.d
}

/// As [`decide`], when a budget has not got what the model call that would follow may cost: the turn ends instead, with
/// `exhausted` as its error. A message that is admitted by the same decision ends with the next one.
pub fn decide_without_money(
    task: &Task,
    queued: Option<MessageId>,
    event: Event,
    now: Timestamp,
    fresh: Fresh,
    exhausted: &str,
) -> Decision {
    begin(task, queued, event, now, fresh, Some(exhausted))
}

struct Draft<'a> {
    /// Why no model can be called.
    exhausted: Option<&'a str>,
    d: Decision,
    queued: Option<MessageId>,
    now: Timestamp,
    fresh: Fresh,
    woken: bool,
}

impl Draft<'_> {
    /// Takes in what became of the current step. Results of other steps are stale: their cost is booked elsewhere, and
    /// what they say no longer matters.
    fn absorb(&mut self, result: StepResult) {
        if self.d.task.title_step == Some(result.step) {
            // The text itself is stored by the shell; failing to make a title is not worth a word.
            self.d.task.title_step = None;
            if let Outcome::Model(blocks, _) = result.outcome {
                let is_text = |block: &Block| matches!(block, Block::Text(text) if !text.trim().is_empty());
                self.d.task.titled = blocks.iter().any(is_text);
            }
            return;
        }
        let Some(step) = self.d.task.step.take_if(|step| step.awaits(&result)) else { return };
        let Some(turn) = &self.d.task.turn else { return };
        match (turn.stage.clone(), result.outcome) {
            (Stage::Model, Outcome::Model(blocks, stop)) => self.answered(blocks, stop),
            (Stage::Model, Outcome::Failed(failure)) => self.model_failed(&step, failure),
            // Told to stop, and neither suspended nor cancelled any more: the turn simply asks again.
            (Stage::Model, Outcome::Cancelled(_)) => self.unanswered(),
            (Stage::Code { calls }, Outcome::Code(results) | Outcome::Cancelled(results)) => {
                self.d.effects.push(Effect::EndCode(step.id));
                self.append_results(
                    &calls,
                    results,
                    "the script was stopped before it could report; it is unknown what it did",
                );
            }
            (Stage::Code { calls }, Outcome::Failed(failure)) => {
                self.d.effects.push(Effect::EndCode(step.id));
                let words =
                    format!("the script could not be run to its end ({}); it is unknown what it did", failure.message);
                self.fail(failure.class.code(), failure.message);
                self.append_results(&calls, Vec::new(), &words);
            }
            (Stage::Code { calls }, Outcome::Parked { asked, results }) => self.parked(step, &calls, asked, results),
            (Stage::Model, Outcome::Code(_) | Outcome::Parked { .. }) | (Stage::Code { .. }, Outcome::Model(..)) => {
                // A result of the wrong kind under the right id is a defect of a worker; ask again rather than stall.
                self.fail("INTERNAL", "a worker answered with the wrong kind of result".to_owned());
                self.d.task.step = Some(step);
            }
        }
    }

    fn answered(&mut self, mut blocks: Vec<Block>, stop: Stop) {
        if stop == Stop::Refused {
            // What was refused is not carried out, and a call in the transcript needs a result.
            blocks.retain(|block| !matches!(block, Block::CodeInterpreterCall(_)));
        }
        let calls: Vec<String> = code_calls(&blocks).map(|call| call.id.clone()).collect();
        // An answer without a word or a call would be an empty message, which vendors refuse to take back.
        if !blocks.is_empty() {
            self.append(Source::Assistant, blocks);
        }
        let told = self.d.task.turn.as_ref().is_some_and(|turn| turn.cut);
        match stop {
            Stop::Refused => {
                self.fail("CONTENT_REFUSED", "the model's vendor refused to let it answer".to_owned());
                self.end_turn(TurnOutcome::Failed);
            }
            Stop::Cut if calls.is_empty() && told => {
                self.fail("OUTPUT_LIMIT", "the model's answers are longer than its limit of output tokens".to_owned());
                self.end_turn(TurnOutcome::Failed);
            }
            Stop::Cut if calls.is_empty() => {
                self.append(Source::System, vec![Block::Text(CUT.to_owned())]);
                self.set_cut(true);
            }
            Stop::Done | Stop::Cut => {
                self.set_cut(false);
                if calls.is_empty() {
                    self.end_turn(TurnOutcome::Completed)
                } else {
                    self.set_stage(Stage::Code { calls })
                }
            }
        }
    }

    /// A model call that was never answered does not count towards the turn's limit.
    fn unanswered(&mut self) {
        if let Some(turn) = &mut self.d.task.turn {
            turn.calls = turn.calls.saturating_sub(1);
        }
    }

    fn model_failed(&mut self, step: &Step, failure: Failure) {
        let cancelling = self.d.task.cancel.is_some() || self.d.task.suspend;
        // What keeps a service of ours away is said once a turn: an outage of hours would fill the task's events otherwise.
        let said = |error: &TaskError| error.code == failure.class.code() && error.message == failure.message;
        if failure.tries > 0 || !self.d.task.last_error.as_ref().is_some_and(said) {
            self.fail(failure.class.code(), failure.message);
        }
        // Calls that were never made, because a service of ours was away, don't count: what was accepted waits for it.
        let attempt = step.attempt.saturating_add(failure.tries);
        if failure.class.is_retryable() && attempt <= backoff::MAX_ATTEMPTS && !cancelling {
            let pause = backoff::pause(attempt - 1, self.fresh.jitter);
            let until = (self.now + pause).max(failure.retry_at.unwrap_or(self.now)).min(self.now + LONGEST_RETRY);
            self.d.task.step = Some(Step { attempt, state: StepState::Backoff { until }, ..step.clone() });
        } else if !cancelling {
            self.end_turn(TurnOutcome::Failed);
        }
    }

    /// Looks at the state alone and moves it on.
    fn settle(&mut self) {
        // A decision that has appended or ended something is committed before the next is made, except that a new
        // step is started at once: that is the hot path of every turn.
        let reason = self.d.task.cancel.clone();
        if let Some(reason) = reason {
            self.settle_cancel(&reason);
        } else if self.d.task.suspend {
            self.settle_suspend();
        } else {
            self.settle_running();
        }
    }

    fn settle_cancel(&mut self, reason: &str) {
        if self.stop_step(reason) {
            return;
        }
        match self.d.task.turn.as_ref().map(|turn| turn.stage.clone()) {
            Some(Stage::Code { calls }) => {
                self.append_results(&calls, Vec::new(), &format!("not run: the user cancelled ({reason})"));
                self.end_turn(TurnOutcome::Cancelled);
            }
            Some(Stage::Model) => self.end_turn(TurnOutcome::Cancelled),
            None => {}
        }
        self.d.drop_queued = true;
        self.queued = None;
        self.d.task.cancel = None;
        if self.d.task.suspend { self.settle_suspend() } else { self.settle_running() }
    }

    fn settle_suspend(&mut self) {
        self.d.task.phase = Phase::Suspended;
        if let Some(step @ Step { state: StepState::Parked { .. }, .. }) = &self.d.task.step
            && self.now < step.approvals_expire()
        {
            // Nothing runs that would have to be stopped, and what people decide meanwhile is not lost.
            self.d.task.next_wake = Some(step.approvals_expire());
            return;
        }
        if self.stop_step("the user suspended the task") {
            return;
        }
        self.d.task.next_wake = None;
    }

    /// Stops the step in flight. True while its last words are awaited.
    fn stop_step(&mut self, reason: &str) -> bool {
        let Some(step) = self.d.task.step.clone() else { return false };
        let is_code = matches!(self.d.task.turn.as_ref().map(|turn| &turn.stage), Some(Stage::Code { .. }));
        match step.state {
            StepState::Backoff { .. } => {
                self.d.task.step = None;
                self.unanswered();
                false
            }
            StepState::InFlight { .. } if !is_code => {
                self.d.effects.push(Effect::CancelModel(step.id, reason.to_owned()));
                self.d.task.step = None;
                self.unanswered();
                false
            }
            StepState::InFlight { .. } => {
                let deadline = self.now + CANCEL_GRACE;
                self.d.effects.push(Effect::CancelCode(step.id, reason.to_owned()));
                self.d.task.step = Some(Step { state: StepState::Cancelling { deadline }, ..step });
                self.d.task.next_wake = Some(self.now + CANCEL_REPEAT);
                true
            }
            StepState::Cancelling { deadline } => self.await_last_words(&step, deadline),
            StepState::Parked { results, .. } => {
                if let Some(Stage::Code { calls }) = self.d.task.turn.as_ref().map(|turn| turn.stage.clone()) {
                    self.end_parked(step.id, &calls, results);
                }
                false
            }
        }
    }

    /// True while the worker still has time; else the outcome is unknown, and said so.
    fn await_last_words(&mut self, step: &Step, deadline: Timestamp) -> bool {
        if self.now < deadline {
            if self.woken && self.d.task.next_wake.is_none_or(|wake| self.now >= wake) {
                // Whoever has begun the script meanwhile has not heard it.
                self.d.effects.push(Effect::CancelCode(step.id, "it was told to stop before".to_owned()));
                self.d.task.next_wake = Some((self.now + CANCEL_REPEAT).min(deadline));
            }
            return true;
        }
        self.d.task.step = None;
        self.d.effects.push(Effect::EndCode(step.id));
        if let Some(Stage::Code { calls }) = self.d.task.turn.as_ref().map(|turn| turn.stage.clone()) {
            self.append_results(
                &calls,
                Vec::new(),
                "the script was stopped and did not report; it is unknown what it did",
            );
        }
        false
    }

    fn settle_running(&mut self) {
        if self.d.ended.is_some() && self.queued.is_some() {
            // The next message begins its own decision, so that each commit tells of one turn.
            self.d.task.phase = Phase::AwaitInput;
            self.d.task.next_wake = Some(self.now);
            return;
        }
        if self.d.task.turn.is_none() {
            let Some(message) = self.queued.take() else {
                self.d.task.phase = Phase::AwaitInput;
                self.d.task.next_wake = None;
                return;
            };
            self.d.task.last_position += 1;
            self.d.admitted = Some((message, self.d.task.last_position));
            self.d.task.turn = Some(Turn { message, calls: 0, stage: Stage::Model, cut: false });
            self.d.task.last_error = None;
        }
        let Some(turn) = self.d.task.turn.clone() else { return };
        match turn.stage {
            Stage::Model => self.settle_model(&turn),
            Stage::Code { .. } => self.settle_code(),
        }
    }

    fn settle_model(&mut self, turn: &Turn) {
        self.d.task.phase = Phase::InvokeModel;
        let Some(step) = self.d.task.step.clone() else {
            if turn.calls >= self.d.task.max_turns {
                let limit = self.d.task.max_turns;
                self.fail("MAX_TURNS", format!("the limit of {limit} model calls for one message is reached"));
                self.end_turn(TurnOutcome::MaxTurns);
                self.settle_running();
                return;
            }
            if self.refuse_for_money() {
                return;
            }
            if let Some(turn) = &mut self.d.task.turn {
                turn.calls += 1;
            }
            self.start_step(1, MODEL_DEADLINE, Effect::InvokeModel);
            return;
        };
        match step.state {
            StepState::Backoff { until } if self.now >= until => {
                if self.refuse_for_money() {
                    return;
                }
                self.start_step(step.attempt, MODEL_DEADLINE, Effect::InvokeModel);
            }
            StepState::Backoff { until } => self.d.task.next_wake = Some(until),
            StepState::InFlight { deadline } if self.now >= deadline => {
                self.d.effects.push(Effect::CancelModel(step.id, "its deadline has passed".to_owned()));
                self.d.task.step = None;
                let message = format!("the model did not answer within {} s", MODEL_DEADLINE.as_secs());
                self.model_failed(
                    &step,
                    Failure { class: FailureClass::DeadlineExceeded, message, retry_at: None, tries: 1 },
                );
                self.settle_running();
            }
            StepState::InFlight { deadline } => self.check_step(&step, deadline, Effect::InvokeModel),
            StepState::Cancelling { .. } | StepState::Parked { .. } => {
                // Model steps are never waited for; ask again.
                self.d.task.step = None;
                self.settle_model(turn);
            }
        }
    }

    /// Ends the turn when there is no money for its next model call. True when that is so.
    fn refuse_for_money(&mut self) -> bool {
        let Some(exhausted) = self.exhausted else { return false };
        if self.d.admitted.is_some() || self.d.ended.is_some() {
            // One commit tells of one turn, and of a message one thing: the next decision asks for the money again.
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
                self.d.effects.push(Effect::CancelCode(step.id, "its deadline has passed".to_owned()));
                self.d.task.step = Some(Step { state: StepState::Cancelling { deadline }, ..step });
                self.d.task.next_wake = Some(self.now + CANCEL_REPEAT);
            }
            StepState::InFlight { deadline } => self.check_step(&step, deadline, Effect::ExecuteCode),
            StepState::Cancelling { deadline } => {
                if !self.await_last_words(&step, deadline) {
                    self.settle_running();
                }
            }
            StepState::Parked { ref waits, .. } => {
                let is_decided = |call: &AskedCall| {
                    let is_it = |approval: &&Approval| approval.call == *call;
                    let found = self.d.task.approvals.iter().find(is_it);
                    found.is_some_and(|approval| approval.state != ApprovalState::Pending)
                };
                if waits.iter().any(is_decided) || self.now >= step.approvals_expire() {
                    self.resume_step(step);
                } else {
                    self.d.task.phase = Phase::AwaitApproval;
                    self.d.task.next_wake = Some(step.approvals_expire());
                }
            }
            StepState::Backoff { .. } => {
                // Scripts are never tried again by us: their side effects may have happened.
                self.d.task.step = None;
                self.settle_code();
            }
        }
    }

    fn start_step(&mut self, attempt: u32, limit: Duration, effect: fn(Step) -> Effect) {
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

    /// A step in flight needs nothing, unless its command was lost: then the same command is sent again, which the bus
    /// refuses while the first one is still queued or being worked on.
    fn check_step(&mut self, step: &Step, deadline: Timestamp, effect: fn(Step) -> Effect) {
        if self.d.task.next_wake.is_some_and(|wake| self.now < wake) {
            return;
        }
        let age = Duration::try_from(self.now.duration_since(step.wanted())).unwrap_or_default();
        self.d.task.next_wake = Some((self.now + age.clamp(FIRST_CHECK, LAST_CHECK)).min(deadline));
        self.d.effects.push(effect(step.clone()));
    }

    fn append(&mut self, source: Source, blocks: Vec<Block>) {
        self.d.task.last_position += 1;
        let id = self.fresh.messages[self.d.appended.len()];
        self.d.appended.push(NewMessage { id, position: self.d.task.last_position, source, blocks });
    }

    /// Appends one result for each call, in the calls' order: vendors refuse a transcript in which a call has none or
    /// a result has no call.
    fn append_results(&mut self, calls: &[String], mut results: Vec<CodeResult>, missing: &str) {
        let blocks = calls
            .iter()
            .map(|call| {
                let found = results.iter().position(|result| result.id == *call).map(|index| results.remove(index));
                Block::CodeInterpreterResult(found.unwrap_or_else(|| CodeResult {
                    id: call.clone(),
                    error: missing.to_owned(),
                    ..CodeResult::default()
                }))
            })
            .collect();
        self.append(Source::System, blocks);
        self.set_stage(Stage::Model);
    }

    fn set_cut(&mut self, cut: bool) {
        if let Some(turn) = &mut self.d.task.turn {
            turn.cut = cut;
        }
    }

    fn set_stage(&mut self, stage: Stage) {
        if let Some(turn) = &mut self.d.task.turn {
            turn.stage = stage;
        }
    }

    fn fail(&mut self, code: &str, message: String) {
        let error = TaskError { code: code.to_owned(), message, time: self.now };
        self.d.task.last_error = Some(error.clone());
        self.d.error = Some(error);
    }

    fn end_turn(&mut self, outcome: TurnOutcome) {
        let Some(turn) = self.d.task.turn.take() else { return };
        self.d.task.step = None;
        self.d.task.last_outcome = Some(outcome);
        if outcome == TurnOutcome::Completed {
            self.d.task.last_error = None;
            // A title is not worth an error: without money there is none.
            if !self.d.task.titled && self.exhausted.is_none() {
                self.d.task.title_step = Some(self.fresh.title_step);
                self.d.effects.push(Effect::MakeTitle(self.fresh.title_step));
            }
        }
        self.d.ended = Some(EndedTurn { message: turn.message, calls: turn.calls, outcome });
    }
}

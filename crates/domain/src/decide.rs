//! What happens next to a task: a pure function of its state, the queued message, the event and the
//! time.
//!
//! It is level-triggered. An event only changes the state (a result is absorbed). Then `settle`
//! looks at the state alone and advances it until nothing more can be done without the outside
//! world. So a lost wake, a repeated one, or a crash between two of them only costs time. Effects
//! can be repeated safely: each names a step by its id.

use std::time::Duration;

use jiff::Timestamp;

use crate::{
    MessageId, StepId,
    approval::{ApprovalRequest, ClosedApproval},
    backoff,
    context::{Context, CutPoint},
    message::{Block, CodeResult, Source, code_calls},
    task::{
        BUDGET_EXHAUSTED, CANCELLED, CompactionAttempts, Failure, FailureClass, INTERRUPTED,
        NewMessage, OUTPUT_LIMIT, Outcome, QueuedMessage, Stage, Step, StepResult, StepState,
        StopReason, Task, TaskError, TurnOutcome,
    },
};

mod approvals;
mod compact;
mod control;
mod repeats;
#[cfg(test)]
mod tests;
mod turn;

pub use compact::{ContextCompaction, SUMMARY_SECTIONS};
pub use repeats::MAX_REPEATS;

/// Timeout of a model call, from its request.
pub const MODEL_TIMEOUT: Duration = Duration::from_secs(10 * 60);
/// Timeout of all scripts of one assistant message.
pub const CODE_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// Time that a worker has to report after it was told to stop scripts.
pub const CODE_GRACE_PERIOD: Duration = Duration::from_secs(10);
/// The same for a model call. Only its partial text can be lost, and it costs money until it stops.
/// Short, because a person waits.
pub const MODEL_GRACE_PERIOD: Duration = Duration::from_secs(2);
/// Interval at which the worker is told again.
pub const CANCEL_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Longest delay that a vendor may ask for. A vendor that asks for more is called again after this.
pub const MAX_RETRY_DELAY: Duration = Duration::from_secs(10 * 60);
/// Interval at which a step in flight is checked, in case its command was lost. It doubles with the
/// step's age.
pub const MIN_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Upper bound of that interval.
pub const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Tells a model that its answer was truncated.
const TRUNCATED_NOTICE: &str = "Your answer was cut off at your limit of output tokens. A script that was incomplete was not run. Continue in smaller \
                   pieces.";

/// Marks an answer that a user's message has interrupted, for the model and for people.
const INTERRUPTED_NOTICE: &str = "The answer above was broken off here: the user has sent a message that did not wait for its end.";

/// Why a task is reconciled.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// There may be something to do.
    Wake,
    /// A worker reports the result of a step.
    Result(StepResult),
}

/// What `decide` needs and cannot create without ceasing to be pure.
#[derive(Debug, Clone, Copy)]
pub struct Entropy {
    /// Id for a step that it starts.
    pub step: StepId,
    /// Id for a title that it requests.
    pub title_step: StepId,
    /// Ids for messages that it appends.
    pub messages: [MessageId; 2],
    /// Jitter of retry delays, 0 to 1.
    pub jitter: f64,
}

/// What to commit, and then to perform.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// The task's new state.
    pub task: Task,
    /// The queued message that enters the transcript, and its position: [`Task::last_position`] at
    /// that moment.
    pub admitted: Option<(MessageId, i64)>,
    /// Messages appended to the transcript: one, or two when a notice of the system follows an
    /// answer at once.
    pub appended: Vec<NewMessage>,
    /// The turn that ended.
    pub ended: Option<EndedTurn>,
    /// Drops every message that was queued when the cancel or rewind was requested. This text is
    /// their error.
    pub drop_queued: Option<String>,
    /// Messages from this position on are superseded, those appended by this decision included.
    pub rewound: Option<i64>,
    /// What replaces the transcript's older part from now on.
    pub compacted: Option<ContextCompaction>,
    /// The decision needs [`Context::outline`]: load it and decide again. Nothing of this decision
    /// is valid.
    pub needs_outline: bool,
    /// An error for clients.
    pub error: Option<TaskError>,
    /// New approval requests. A request for the same call with other arguments is replaced.
    pub approval_requests: Vec<ApprovalRequest>,
    /// Approvals that are closed without a person's decision.
    pub closed_approvals: Vec<ClosedApproval>,
    /// Performed after the commit, in order. May be repeated.
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

/// A command to the outside world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Call the model for this step, unless a command for the task is already queued.
    InvokeModel(Step),
    /// Summarize the older part of the conversation; the turn's stage says which.
    Compact(Step),
    /// Run the scripts.
    ExecuteCode(Step),
    /// Tell the worker to stop.
    CancelModel(StepId, String),
    /// Tell the worker to stop.
    CancelCode(StepId, String),
    /// The scripts' step has ended: no worker may run it any more, and its journal is no longer
    /// needed.
    EndCode(StepId),
    /// Create a title.
    MakeTitle(StepId),
}

impl Decision {
    /// Whether anything needs to be committed.
    pub fn changes(&self, before: &Task) -> bool {
        // Read-only fields are not stored.
        let Context { scale, tokens, through, .. } = before.context;
        let context = Context { scale, tokens, through, ..self.task.context.clone() };
        self.task != Task { context, ..before.clone() }
            || self.admitted.is_some()
            || !self.appended.is_empty()
            || self.ended.is_some()
            || self.drop_queued.is_some()
            || self.rewound.is_some()
            || self.compacted.is_some()
            || !self.approval_requests.is_empty()
            || !self.closed_approvals.is_empty()
    }
}

/// Decides what happens next. `queued` is the next accepted user message that is not in the
/// transcript: interrupting messages come first, otherwise in the order of acceptance.
///
/// One decision admits at most one message and ends at most one turn, so that each commit is small
/// and describes one turn. When more can be done at once, `next_wake` is `now`.
pub fn decide(
    task: &Task,
    queued: Option<QueuedMessage>,
    event: Event,
    now: Timestamp,
    entropy: Entropy,
) -> Decision {
    decide_with(task, queued, event, now, entropy, None)
}

/// The command of the step in flight, as it was requested when the step started. `None` when no
/// worker should have one.
pub fn command(task: &Task) -> Option<Effect> {
    let step =
        task.step.as_ref().filter(|step| matches!(step.state, StepState::InFlight { .. }))?;
    let effect: fn(Step) -> Effect = match task.turn.as_ref()?.stage {
        Stage::Model => Effect::InvokeModel,
        Stage::Code { .. } => Effect::ExecuteCode,
        Stage::Compact { .. } => Effect::Compact,
    };
    Some(effect(step.clone()))
}

fn decide_with(
    task: &Task,
    queued: Option<QueuedMessage>,
    event: Event,
    now: Timestamp,
    fresh: Entropy,
    exhausted: Option<&str>,
) -> Decision {
    let mut draft = Draft {
        exhausted,
        d: Decision {
            task: task.clone(),
            admitted: None,
            appended: Vec::new(),
            ended: None,
            drop_queued: None,
            rewound: None,
            compacted: None,
            needs_outline: false,
            error: None,
            approval_requests: Vec::new(),
            closed_approvals: Vec::new(),
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
    draft.update_context();
    draft.d
}

/// As [`decide`], when a budget cannot cover the model call that would follow: the turn ends
/// instead, with `exhausted` as its error. The turn of a message that the same decision admits ends
/// with the next decision.
pub fn decide_without_budget(
    task: &Task,
    queued: Option<QueuedMessage>,
    event: Event,
    now: Timestamp,
    fresh: Entropy,
    exhausted: &str,
) -> Decision {
    decide_with(task, queued, event, now, fresh, Some(exhausted))
}

struct Draft<'a> {
    /// Why no model can be called.
    exhausted: Option<&'a str>,
    d: Decision,
    queued: Option<QueuedMessage>,
    now: Timestamp,
    fresh: Entropy,
    woken: bool,
}

impl Draft<'_> {
    /// Absorbs the result of the current step. Results of other steps are stale: their cost is
    /// recorded elsewhere, and their content no longer matters.
    fn absorb(&mut self, result: StepResult) {
        if self.d.task.title_step == Some(result.step) {
            // The shell stores the text. A title that fails is not reported.
            self.d.task.title_step = None;
            if let Outcome::Model(blocks, _) = result.outcome {
                let is_text =
                    |block: &Block| matches!(block, Block::Text(text) if !text.trim().is_empty());
                self.d.task.titled = blocks.iter().any(is_text);
            }
            return;
        }
        let Some(step) = self.d.task.step.take_if(|step| step.awaits(&result)) else { return };
        let Some(turn) = &self.d.task.turn else { return };
        let stopped = matches!(result.outcome, Outcome::Cancelled(_));
        match (turn.stage.clone(), result.outcome) {
            (Stage::Model, Outcome::Model(blocks, stop)) => self.handle_answer(blocks, stop),
            (Stage::Model, Outcome::Failed(failure))
                if failure.class == FailureClass::ContextTooLong && self.handle_too_long() => {}
            (Stage::Model, Outcome::Failed(failure)) => self.handle_model_failure(&step, failure),
            (Stage::Compact { through, kept, replaced }, Outcome::Model(blocks, stop)) => {
                self.handle_summary(
                    CutPoint { through, kept, replaced, messages: 0 },
                    &blocks,
                    stop,
                );
            }
            (Stage::Compact { .. }, Outcome::Failed(failure))
                if matches!(
                    failure.class,
                    FailureClass::ContextTooLong | FailureClass::ContentRefused
                ) =>
            {
                self.give_up_summaries();
            }
            (Stage::Compact { .. }, Outcome::Failed(failure)) => {
                self.handle_model_failure(&step, failure)
            }
            (Stage::Compact { .. }, Outcome::Cancelled(_) | Outcome::Interrupted(_)) => {
                self.set_stage(Stage::Model)
            }
            // It was told to stop, but is neither suspended nor canceled any more: the turn calls
            // the model again.
            (Stage::Model, Outcome::Cancelled(_)) => self.uncount_call(),
            (Stage::Model, Outcome::Interrupted(partial)) => {
                self.handle_interrupted(&step, partial)
            }
            (Stage::Code { calls }, Outcome::Code(results) | Outcome::Cancelled(results)) => {
                self.d.effects.push(Effect::EndCode(step.id));
                // Stopped scripts say nothing about a loop of the model.
                let loop_input = (!stopped).then(|| results.clone());
                self.append_results(
                    &calls,
                    results,
                    "the script was stopped before it could report; it is unknown what it did",
                );
                if let Some(loop_input) = loop_input {
                    self.record_results(&loop_input);
                }
            }
            (Stage::Code { calls }, Outcome::Failed(failure)) => {
                self.d.effects.push(Effect::EndCode(step.id));
                let missing = format!(
                    "the script could not be run to its end ({}); it is unknown what it did",
                    failure.message
                );
                self.fail(failure.class.code(), failure.message);
                self.append_results(&calls, Vec::new(), &missing);
            }
            (Stage::Code { calls }, Outcome::Suspended { approval_requests, awaits, results }) => {
                self.suspend_script(step, &calls, approval_requests, awaits, results);
            }
            (
                Stage::Model | Stage::Compact { .. },
                Outcome::Code(_) | Outcome::Suspended { .. },
            )
            | (Stage::Code { .. }, Outcome::Model(..) | Outcome::Interrupted(_)) => {
                // A result of the wrong kind for the right id is a defect of a worker. Ask again
                // instead of stalling.
                self.fail("INTERNAL", "a worker answered with the wrong kind of result".to_owned());
                self.d.task.step = Some(step);
            }
        }
    }

    fn handle_answer(&mut self, mut blocks: Vec<Block>, stop: StopReason) {
        if stop == StopReason::Refused {
            // Scripts of a refused answer are not run, and a call in the transcript needs a result.
            blocks.retain(|block| !matches!(block, Block::CodeInterpreterCall(_)));
        }
        let calls: Vec<String> = code_calls(&blocks).map(|call| call.id.clone()).collect();
        self.d.task.context.calibrate();
        if let Some(turn) = &mut self.d.task.turn {
            turn.compaction = CompactionAttempts::default();
        }
        self.record_scripts(&blocks);
        // An answer without text or calls would be an empty message, which vendors reject.
        if !blocks.is_empty() {
            self.append(Source::Assistant, blocks);
        }
        let warned = self.d.task.turn.as_ref().is_some_and(|turn| turn.truncated);
        match stop {
            StopReason::Refused => {
                self.fail(
                    "CONTENT_REFUSED",
                    "the model's vendor refused to let it answer".to_owned(),
                );
                self.end_turn(TurnOutcome::Failed);
            }
            StopReason::OutputLimit if calls.is_empty() && warned => {
                self.fail(
                    OUTPUT_LIMIT,
                    "the model's answers are longer than its limit of output tokens".to_owned(),
                );
                self.end_turn(TurnOutcome::Failed);
            }
            StopReason::OutputLimit if calls.is_empty() => {
                self.append(Source::System, vec![Block::Text(TRUNCATED_NOTICE.to_owned())]);
                self.set_truncated(true);
            }
            StopReason::Complete | StopReason::OutputLimit => {
                self.set_truncated(false);
                if calls.is_empty() {
                    self.end_turn(TurnOutcome::Completed)
                } else {
                    self.set_stage(Stage::Code { calls })
                }
            }
        }
    }

    /// A model call without an answer does not count toward the turn's limit.
    fn uncount_call(&mut self) {
        if let Some(turn) = &mut self.d.task.turn
            && turn.stage == Stage::Model
        {
            turn.calls = turn.calls.saturating_sub(1);
        }
    }

    fn handle_model_failure(&mut self, step: &Step, failure: Failure) {
        let stopping = self.is_stop_requested();
        // An outage of our own services is reported once per turn. An outage of hours would
        // otherwise fill the task's events.
        let is_reported = |error: &TaskError| {
            error.code == failure.class.code() && error.message == failure.message
        };
        if failure.attempts > 0 || !self.d.task.last_error.as_ref().is_some_and(is_reported) {
            self.fail(failure.class.code(), failure.message);
        }
        // Calls that were never made, because one of our services was down, do not count: what was
        // accepted waits for the service.
        let attempt = step.attempt.saturating_add(failure.attempts);
        if failure.class.is_retryable() && attempt <= backoff::MAX_ATTEMPTS && !stopping {
            let pause = backoff::delay(attempt - 1, self.fresh.jitter);
            let until = (self.now + pause)
                .max(failure.retry_at.unwrap_or(self.now))
                .min(self.now + MAX_RETRY_DELAY);
            self.d.task.step =
                Some(Step { attempt, state: StepState::Backoff { until }, ..step.clone() });
        } else if !stopping {
            self.end_turn(TurnOutcome::Failed);
        } else {
            self.uncount_call();
        }
    }

    fn append(&mut self, source: Source, blocks: Vec<Block>) {
        self.d.task.last_position += 1;
        let id = self.fresh.messages[self.d.appended.len()];
        self.d.appended.push(NewMessage {
            id,
            position: self.d.task.last_position,
            source,
            blocks,
        });
    }

    /// Appends one result for each call, in the calls' order. Vendors reject a transcript in which
    /// a call has no result, or a result has no call.
    fn append_results(&mut self, calls: &[String], mut results: Vec<CodeResult>, missing: &str) {
        let blocks = calls
            .iter()
            .map(|call| {
                let result = results
                    .iter()
                    .position(|result| result.id == *call)
                    .map(|index| results.remove(index));
                Block::CodeInterpreterResult(result.unwrap_or_else(|| CodeResult {
                    id: call.clone(),
                    error: missing.to_owned(),
                    ..CodeResult::default()
                }))
            })
            .collect();
        self.append(Source::System, blocks);
        self.set_stage(Stage::Model);
    }

    /// Updates the tokens that the next call needs, when they have changed.
    fn update_context(&mut self) {
        let context = &mut self.d.task.context;
        (context.outline, context.counted) = (None, None);
        let added = self.added_tokens();
        if added > 0 || self.d.compacted.is_some() {
            self.d.task.context.tokens = self.d.task.context.tokens_needed(added);
        }
    }

    fn set_truncated(&mut self, cut: bool) {
        if let Some(turn) = &mut self.d.task.turn {
            turn.truncated = cut;
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
            // A missing title is no error: without budget there is none.
            if !self.d.task.titled && self.exhausted.is_none() {
                self.d.task.title_step = Some(self.fresh.title_step);
                self.d.effects.push(Effect::MakeTitle(self.fresh.title_step));
            }
        }
        self.d.ended = Some(EndedTurn { message: turn.message, calls: turn.calls, outcome });
    }
}

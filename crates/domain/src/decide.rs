//! What happens next to a task: a pure function of its state, what is queued, what happened, and
//! the time.
//!
//! It is level-triggered: an event only changes the state (a result is absorbed), and then `settle`
//! looks at the state alone and moves it on until nothing more can be done without the outside
//! world. So a lost wake, a repeated one, or a crash between two of them costs time and nothing
//! else. Effects repeat safely: each names a step by its id.

use std::time::Duration;

use jiff::Timestamp;

use crate::{
    MessageId, StepId,
    approval::{Asked, Closed},
    backoff,
    context::{Context, Cut},
    message::{Block, CodeResult, Source, code_calls},
    task::{
        BUDGET_EXHAUSTED, CANCELLED, Failure, FailureClass, INTERRUPTED, NewMessage, OUTPUT_LIMIT,
        Outcome, Queued, Room, Stage, Step, StepResult, StepState, Stop, Task, TaskError,
        TurnOutcome,
    },
};

mod approvals;
mod compact;
mod control;
mod repeats;
#[cfg(test)]
mod tests;
mod turn;

pub use compact::{Compacted, SECTIONS};
pub use repeats::REPEATS;

/// How long a model call may take, from the moment it is wanted.
pub const MODEL_DEADLINE: Duration = Duration::from_secs(10 * 60);
/// How long the scripts of one assistant message may take together.
pub const CODE_DEADLINE: Duration = Duration::from_secs(30 * 60);
/// How long a worker that was told to stop has for its last words.
pub const CANCEL_GRACE: Duration = Duration::from_secs(10);
/// The same of a model call, whose text so far is all that can be lost, and which costs money until
/// it has heard. Short, because somebody waits.
pub const MODEL_GRACE: Duration = Duration::from_secs(2);
/// How often it is told again.
pub const CANCEL_REPEAT: Duration = Duration::from_secs(1);
/// How long a vendor may ask us to stay away; one that asks for more is asked again after this.
pub const LONGEST_RETRY: Duration = Duration::from_secs(10 * 60);
/// How soon a step in flight is looked at again, in case its command was lost; doubles with the
/// step's age.
pub const FIRST_CHECK: Duration = Duration::from_secs(2);
/// How late at most.
pub const LAST_CHECK: Duration = Duration::from_secs(30);

/// What a model is told whose answer was cut off.
const CUT: &str = "Your answer was cut off at your limit of output tokens. A script that was not whole was not run. Go on in smaller \
                   pieces.";

/// What stands behind an answer that a message of the user has interrupted, for the model and for
/// people.
const BROKEN_OFF: &str = "The answer above was broken off here: the user has sent a message that did not wait for its end.";

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
    /// Messages appended to the transcript: one, or two when an answer is followed at once by what
    /// the system says to it.
    pub appended: Vec<NewMessage>,
    /// The turn that ended.
    pub ended: Option<EndedTurn>,
    /// Every message that was queued when a cancel or rewind was asked for is dropped, with these
    /// words as its error.
    pub drop_queued: Option<String>,
    /// The transcript is put aside from this place on, what this decision appends included.
    pub rewound: Option<i64>,
    /// What is shown of the transcript's older part from now on.
    pub compacted: Option<Compacted>,
    /// The decision cannot be made without [`Context::outline`]: read it and decide again. Nothing
    /// of this one holds.
    pub wants_outline: bool,
    /// An error clients are told about.
    pub error: Option<TaskError>,
    /// What people are asked from now on. A question about the same call with other arguments is
    /// replaced.
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
    /// Have the older part of the conversation summed up; the turn's stage says which.
    Compact(Step),
    /// Have the scripts run.
    ExecuteCode(Step),
    /// Tell the worker to stop.
    CancelModel(StepId, String),
    /// Tell the worker to stop.
    CancelCode(StepId, String),
    /// The scripts' step is over, whatever became of it: nobody may run it any more, and its
    /// journal is not needed.
    EndCode(StepId),
    /// Have a title made.
    MakeTitle(StepId),
}

impl Decision {
    /// Whether anything needs to be committed.
    pub fn changes(&self, before: &Task) -> bool {
        // What is read only is not kept.
        let Context { scale, tokens, through, .. } = before.context;
        let context = Context { scale, tokens, through, ..self.task.context.clone() };
        self.task != Task { context, ..before.clone() }
            || self.admitted.is_some()
            || !self.appended.is_empty()
            || self.ended.is_some()
            || self.drop_queued.is_some()
            || self.rewound.is_some()
            || self.compacted.is_some()
            || !self.asked.is_empty()
            || !self.closed.is_empty()
    }
}

/// Decides what happens next. `queued` is the next of the accepted user messages that are not in
/// the transcript yet: those that interrupt come before the others, otherwise in the order in which
/// they were accepted.
///
/// One decision admits at most one message and ends at most one turn, so that each commit is small
/// and tells of one turn; when more can be done at once, `next_wake` is `now`.
pub fn decide(
    task: &Task,
    queued: Option<Queued>,
    event: Event,
    now: Timestamp,
    fresh: Fresh,
) -> Decision {
    begin(task, queued, event, now, fresh, None)
}

/// The command of the step that is in flight, as it was asked for when the step began. None when no
/// worker is to have one.
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

fn begin(
    task: &Task,
    queued: Option<Queued>,
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
            drop_queued: None,
            rewound: None,
            compacted: None,
            wants_outline: false,
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
    draft.note_context();
    draft.d
}

/// As [`decide`], when a budget has not got what the model call that would follow may cost: the
/// turn ends instead, with `exhausted` as its error. A message that is admitted by the same
/// decision ends with the next one.
pub fn decide_without_money(
    task: &Task,
    queued: Option<Queued>,
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
    queued: Option<Queued>,
    now: Timestamp,
    fresh: Fresh,
    woken: bool,
}

impl Draft<'_> {
    /// Takes in what became of the current step. Results of other steps are stale: their cost is
    /// booked elsewhere, and what they say no longer matters.
    fn absorb(&mut self, result: StepResult) {
        if self.d.task.title_step == Some(result.step) {
            // The text itself is stored by the shell; failing to make a title is not worth a word.
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
            (Stage::Model, Outcome::Model(blocks, stop)) => self.answered(blocks, stop),
            (Stage::Model, Outcome::Failed(failure))
                if failure.class == FailureClass::ContextTooLong && self.was_too_long() => {}
            (Stage::Model, Outcome::Failed(failure)) => self.model_failed(&step, failure),
            (Stage::Compact { through, kept, replaced }, Outcome::Model(blocks, stop)) => {
                self.summarized(Cut { through, kept, replaced, messages: 0 }, &blocks, stop);
            }
            (Stage::Compact { .. }, Outcome::Failed(failure))
                if matches!(
                    failure.class,
                    FailureClass::ContextTooLong | FailureClass::ContentRefused
                ) =>
            {
                self.never_a_summary();
            }
            (Stage::Compact { .. }, Outcome::Failed(failure)) => self.model_failed(&step, failure),
            (Stage::Compact { .. }, Outcome::Cancelled(_) | Outcome::Stopped(_)) => {
                self.set_stage(Stage::Model)
            }
            // Told to stop, and neither suspended nor cancelled any more: the turn simply asks
            // again.
            (Stage::Model, Outcome::Cancelled(_)) => self.unanswered(),
            (Stage::Model, Outcome::Stopped(said)) => self.broken_off(&step, said),
            (Stage::Code { calls }, Outcome::Code(results) | Outcome::Cancelled(results)) => {
                self.d.effects.push(Effect::EndCode(step.id));
                // What was stopped says nothing about where the model would have gone.
                let given = (!stopped).then(|| results.clone());
                self.append_results(
                    &calls,
                    results,
                    "the script was stopped before it could report; it is unknown what it did",
                );
                if let Some(given) = given {
                    self.note_results(&given);
                }
            }
            (Stage::Code { calls }, Outcome::Failed(failure)) => {
                self.d.effects.push(Effect::EndCode(step.id));
                let words = format!(
                    "the script could not be run to its end ({}); it is unknown what it did",
                    failure.message
                );
                self.fail(failure.class.code(), failure.message);
                self.append_results(&calls, Vec::new(), &words);
            }
            (Stage::Code { calls }, Outcome::Parked { asked, awaits, results }) => {
                self.parked(step, &calls, asked, awaits, results);
            }
            (Stage::Model | Stage::Compact { .. }, Outcome::Code(_) | Outcome::Parked { .. })
            | (Stage::Code { .. }, Outcome::Model(..) | Outcome::Stopped(_)) => {
                // A result of the wrong kind under the right id is a defect of a worker; ask again
                // rather than stall.
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
        self.d.task.context.learn();
        if let Some(turn) = &mut self.d.task.turn {
            turn.room = Room::default();
        }
        self.note_scripts(&blocks);
        // An answer without a word or a call would be an empty message, which vendors refuse to
        // take back.
        if !blocks.is_empty() {
            self.append(Source::Assistant, blocks);
        }
        let told = self.d.task.turn.as_ref().is_some_and(|turn| turn.cut);
        match stop {
            Stop::Refused => {
                self.fail(
                    "CONTENT_REFUSED",
                    "the model's vendor refused to let it answer".to_owned(),
                );
                self.end_turn(TurnOutcome::Failed);
            }
            Stop::Cut if calls.is_empty() && told => {
                self.fail(
                    OUTPUT_LIMIT,
                    "the model's answers are longer than its limit of output tokens".to_owned(),
                );
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

    /// A model call that was never answered does not count toward the turn's limit.
    fn unanswered(&mut self) {
        if let Some(turn) = &mut self.d.task.turn
            && turn.stage == Stage::Model
        {
            turn.calls = turn.calls.saturating_sub(1);
        }
    }

    fn model_failed(&mut self, step: &Step, failure: Failure) {
        let held = self.is_held();
        // What keeps a service of ours away is said once a turn: an outage of hours would fill the
        // task's events otherwise.
        let said = |error: &TaskError| {
            error.code == failure.class.code() && error.message == failure.message
        };
        if failure.tries > 0 || !self.d.task.last_error.as_ref().is_some_and(said) {
            self.fail(failure.class.code(), failure.message);
        }
        // Calls that were never made, because a service of ours was away, don't count: what was
        // accepted waits for it.
        let attempt = step.attempt.saturating_add(failure.tries);
        if failure.class.is_retryable() && attempt <= backoff::MAX_ATTEMPTS && !held {
            let pause = backoff::pause(attempt - 1, self.fresh.jitter);
            let until = (self.now + pause)
                .max(failure.retry_at.unwrap_or(self.now))
                .min(self.now + LONGEST_RETRY);
            self.d.task.step =
                Some(Step { attempt, state: StepState::Backoff { until }, ..step.clone() });
        } else if !held {
            self.end_turn(TurnOutcome::Failed);
        } else {
            self.unanswered();
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

    /// Appends one result for each call, in the calls' order: vendors refuse a transcript in which
    /// a call has none or a result has no call.
    fn append_results(&mut self, calls: &[String], mut results: Vec<CodeResult>, missing: &str) {
        let blocks = calls
            .iter()
            .map(|call| {
                let found = results
                    .iter()
                    .position(|result| result.id == *call)
                    .map(|index| results.remove(index));
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

    /// Notes what the next call will need, when that has changed.
    fn note_context(&mut self) {
        let context = &mut self.d.task.context;
        (context.outline, context.counted) = (None, None);
        let added = self.added();
        if added > 0 || self.d.compacted.is_some() {
            self.d.task.context.tokens = self.d.task.context.need(added);
        }
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

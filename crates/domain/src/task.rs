//! The state of a task, as far as decisions need it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    AgentId, MessageId, OrganizationId, StepId, TaskId,
    approval::{APPROVAL_LIMIT, Approval, Asked, AskedCall},
    context::Context,
    message::{Block, CodeResult, Source},
    subtask::AwaitedCall,
};

/// Model calls one user message may cause when neither agent nor task says otherwise.
pub const DEFAULT_MAX_TURNS: u32 = 50;

/// The code of the error of a turn that ended because a budget has not got what its next model call
/// may cost.
pub const BUDGET_EXHAUSTED: &str = "BUDGET_EXHAUSTED";

/// The code of what is kept of a turn that a person ended.
pub const CANCELLED: &str = "CANCELLED";

/// The code of what is kept of a turn that a newer message ended.
pub const INTERRUPTED: &str = "INTERRUPTED";

/// The code of the error of a turn that ended because the model ran the same script with the same
/// result again and again.
pub const STUCK: &str = "STUCK";

/// The code of the error of a turn that ended because what must be said does not fit the model.
pub const CONTEXT_TOO_LONG: &str = FailureClass::ContextTooLong.code();

/// The code of the error of a turn that ended because the model's answers were longer than they may
/// be.
pub const OUTPUT_LIMIT: &str = "OUTPUT_LIMIT";

/// The code of the error of a task of which not everything that is stored can be read.
pub const UNREADABLE: &str = "UNREADABLE";

/// The code of the error of a task that cannot be looked at just now, and will be looked at again.
pub const LOOK_FAILED: &str = "LOOK_FAILED";

/// The code of the error of a task that was put aside, because looking at it failed each time.
pub const PUT_ASIDE: &str = "PUT_ASIDE";

/// The message that is next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Queued {
    /// Which.
    pub message: MessageId,
    /// Whether it ends the turn that runs, instead of waiting for its end.
    pub interrupts: bool,
}

/// Where a task stands (seed 000, "Task Reconciler").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// No unprocessed message.
    AwaitInput,
    /// A model call is wanted or runs.
    InvokeModel,
    /// A script is wanted or runs.
    ExecuteTools,
    /// A script is put away until a person has decided about calls it wants to make.
    AwaitApproval,
    /// A script is put away until subtasks have ended.
    AwaitSubtasks,
    /// A person paused the task.
    Suspended,
}

impl Phase {
    /// Every phase.
    pub const ALL: [Self; 6] = [
        Self::AwaitInput,
        Self::InvokeModel,
        Self::ExecuteTools,
        Self::AwaitApproval,
        Self::AwaitSubtasks,
        Self::Suspended,
    ];

    /// As stored.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AwaitInput => "await_input",
            Self::InvokeModel => "invoke_model",
            Self::ExecuteTools => "execute_tools",
            Self::AwaitApproval => "await_approval",
            Self::AwaitSubtasks => "await_subtasks",
            Self::Suspended => "suspended",
        }
    }

    /// Reads what [`Phase::as_str`] wrote.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|phase| phase.as_str() == text)
    }
}

/// A task's state. The reconciler alone changes it, except for the intents ([`Task::suspend`],
/// [`Task::cancel`], [`Task::rewind`], the agent), which the gateway writes and the reconciler
/// reads.
#[derive(Debug, Clone, PartialEq)]
pub struct Task {
    /// Which task.
    pub id: TaskId,
    /// Whose.
    pub organization: OrganizationId,
    /// Who answers; can change between two steps.
    pub agent: AgentId,
    /// Whether a person wants it paused.
    pub suspend: bool,
    /// Whether a person wants the running turn ended, and why. Cleared when done.
    pub cancel: Option<String>,
    /// From which place on a person wants the transcript put aside. What runs is stopped first.
    /// Cleared when done.
    pub rewind: Option<i64>,
    /// The message whose turn has failed, if a person wants that tried again. Read only, and of no
    /// account when there is something newer to answer.
    pub retry: Option<MessageId>,
    /// Model calls one user message may cause.
    pub max_turns: u32,
    /// Whether the task has a title already.
    pub titled: bool,
    /// Where it stands.
    pub phase: Phase,
    /// The user message being answered.
    pub turn: Option<Turn>,
    /// The step that is wanted or runs.
    pub step: Option<Step>,
    /// A title being made.
    pub title_step: Option<StepId>,
    /// Steps so far: the number of the newest.
    pub steps: u64,
    /// Place of the newest message in the transcript, from 1.
    pub last_position: i64,
    /// When to look again without being asked.
    pub next_wake: Option<Timestamp>,
    /// How the last finished turn ended.
    pub last_outcome: Option<TurnOutcome>,
    /// The last error, until a turn completes.
    pub last_error: Option<TaskError>,
    /// What people were asked about the step's scripts, and what they said. Read only: an intent
    /// like [`Task::suspend`], kept in rows of its own. Only there once the step has waited for an
    /// approval.
    pub approvals: Vec<Approval>,
    /// The subtasks that are at work, where a script that is put away waits for some. None: nobody
    /// has looked, which a decision that needs it asks for by [`Task::next_wake`]. Read only.
    pub subtasks: Option<Vec<TaskId>>,
    /// How far the conversation fills its model. [`Context::scale`], [`Context::tokens`] and
    /// [`Context::through`] are written; the rest is read.
    pub context: Context,
}

/// The work one user message causes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// The user message.
    pub message: MessageId,
    /// Model calls begun for it; a retry of a failed call counts once.
    pub calls: u32,
    /// What comes next, or runs.
    pub stage: Stage,
    /// Whether the model's last answer was cut off, and the model told so.
    #[serde(default)]
    pub cut: bool,
    /// Whether it runs in circles.
    #[serde(default, skip_serializing_if = "Repeats::is_none")]
    pub repeats: Repeats,
    /// What was done since the model's last answer to make the next call fit.
    #[serde(default, skip_serializing_if = "Room::is_none")]
    pub room: Room,
}

/// What was done between two answers of a model to make a call fit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// How often the transcript was cut.
    pub cuts: u32,
    /// How many summaries were asked for in vain.
    pub summaries: u32,
    /// Whether the vendor has refused the call as too long since it was last cut.
    pub too_long: bool,
}

impl Room {
    /// Whether nothing was.
    fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl Turn {
    /// One that has not called a model yet.
    pub fn new(message: MessageId, stage: Stage) -> Self {
        Self {
            message,
            calls: 0,
            stage,
            cut: false,
            repeats: Repeats::default(),
            room: Room::default(),
        }
    }
}

/// How often the same scripts gave the same in a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Repeats {
    /// What the scripts are that were asked for last, as a hash.
    pub scripts: u64,
    /// What the scripts were that ran last, with their results, as a hash.
    pub last: u64,
    /// How often that was so in a row.
    pub count: u32,
    /// Whether the model was told in this turn.
    pub told: bool,
}

impl Repeats {
    /// Whether no script was asked for yet.
    fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// What a turn does next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "stage", rename_all = "snake_case")]
pub enum Stage {
    /// Ask the model.
    Model,
    /// Run the scripts of the newest assistant message: their calls' ids, in order.
    Code {
        /// The vendor's ids of the calls, each to be answered by one result.
        calls: Vec<String>,
    },
    /// Have the older part of the conversation summed up, so that the rest fits; then ask the
    /// model.
    Compact {
        /// The last place that is summed up.
        through: i64,
        /// The places up to there that are not.
        kept: Vec<i64>,
        /// What is summed up, as an estimate in tokens.
        replaced: i64,
    },
}

/// One model call or one execution of scripts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Deduplicates the command, its result and its cost.
    pub id: StepId,
    /// Counts the task's steps from 1.
    pub number: u64,
    /// The call of the vendor it begins with, from 1: a step that is tried again goes on where the
    /// one before it ended.
    pub attempt: u32,
    /// When it was first wanted.
    pub since: Timestamp,
    /// How often its scripts were gone on with after they had waited for approvals or subtasks. A
    /// command and its result carry it, so that those of an earlier round are told apart.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub round: u32,
    /// When its scripts were last gone on with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed: Option<Timestamp>,
    /// What is being done about it.
    pub state: StepState,
}

fn is_zero(round: &u32) -> bool {
    *round == 0
}

impl Step {
    /// When its command was first wanted: that of this round.
    pub fn wanted(&self) -> Timestamp {
        self.resumed.unwrap_or(self.since)
    }

    /// Until when people can decide about its calls. Counted from the step's beginning, and not
    /// from when they were asked, because the journal its scripts go on from is kept for so long
    /// from then.
    pub fn approvals_expire(&self) -> Timestamp {
        self.since + APPROVAL_LIMIT
    }

    /// Whether this result is what is waited for: neither another step's, nor one of an earlier
    /// round, nor one of a worker that had the command again after it had let go of it.
    pub fn awaits(&self, result: &StepResult) -> bool {
        self.id == result.step
            && self.round == result.round
            && !matches!(self.state, StepState::Parked { .. })
    }
}

/// What is being done about a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum StepState {
    /// A worker has it, or the command is on its way.
    InFlight {
        /// Nobody waits for the result after this.
        deadline: Timestamp,
    },
    /// It failed and is tried again.
    Backoff {
        /// Not before this.
        until: Timestamp,
    },
    /// The worker was told to stop; its last words are awaited, because they say which side effects
    /// happened.
    Cancelling {
        /// Not longer than this.
        deadline: Timestamp,
    },
    /// Its scripts are put away until a person has decided, or subtasks have ended. No worker has
    /// them, and nothing of them is in memory.
    Parked {
        /// The calls they wait for that a person decides about.
        waits: Vec<AskedCall>,
        /// The calls that wait for subtasks.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        awaits: Vec<AwaitedCall>,
        /// What the model is told if they are never gone on with.
        results: Vec<CodeResult>,
    },
}

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TurnOutcome {
    /// The model answered.
    Completed,
    /// The model could not be reached or refused.
    Failed,
    /// A person ended it.
    Cancelled,
    /// The limit of model calls was reached.
    MaxTurns,
    /// A newer message of the user did not wait for its end.
    Interrupted,
}

impl TurnOutcome {
    /// As stored.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::MaxTurns => "max_turns",
            Self::Interrupted => "interrupted",
        }
    }

    /// Reads what [`TurnOutcome::as_str`] wrote.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Completed, Self::Failed, Self::Cancelled, Self::MaxTurns, Self::Interrupted]
            .into_iter()
            .find(|outcome| outcome.as_str() == text)
    }
}

/// An error a person can read about a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskError {
    /// Stable and machine-readable, e.g. `RATE_LIMITED`.
    pub code: String,
    /// For people; holds no secret.
    pub message: String,
    /// When it happened.
    pub time: Timestamp,
}

/// Why a step failed, in classes that are treated alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailureClass {
    /// Worth another try.
    Transient,
    /// The vendor asks to slow down.
    RateLimited,
    /// The vendor is busy.
    Overloaded,
    /// The key is refused.
    Authentication,
    /// The vendor refuses the request as such.
    InvalidRequest,
    /// The conversation does not fit the model.
    ContextTooLong,
    /// The vendor refuses the content.
    ContentRefused,
    /// It took too long.
    DeadlineExceeded,
    /// The command cannot be carried out as configured.
    Configuration,
    /// A defect of ours.
    Internal,
}

impl FailureClass {
    /// Whether the same step may succeed later.
    pub const fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::Transient | Self::RateLimited | Self::Overloaded | Self::DeadlineExceeded
        )
    }

    /// Stable name, as API clients see it in an error's code.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Transient => "TRANSIENT",
            Self::RateLimited => "RATE_LIMITED",
            Self::Overloaded => "OVERLOADED",
            Self::Authentication => "AUTHENTICATION",
            Self::InvalidRequest => "INVALID_REQUEST",
            Self::ContextTooLong => "CONTEXT_TOO_LONG",
            Self::ContentRefused => "CONTENT_REFUSED",
            Self::DeadlineExceeded => "DEADLINE_EXCEEDED",
            Self::Configuration => "CONFIGURATION",
            Self::Internal => "INTERNAL",
        }
    }
}

/// Why a step failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What kind of failure.
    pub class: FailureClass,
    /// For people; holds no secret.
    pub message: String,
    /// When another try is welcome, if the vendor says so.
    pub retry_at: Option<Timestamp>,
    /// Calls of the vendor that failed; 0 when it was never called.
    pub tries: u32,
}

/// What a worker says became of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepResult {
    /// Which step.
    pub step: StepId,
    /// Which round of it: [`Step::round`] of the command.
    pub round: u32,
    /// What became of it.
    pub outcome: Outcome,
}

/// Why a model stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// It had said what it wanted to.
    Done,
    /// It reached its limit of output: text may end in the middle, and a script that was not whole
    /// is missing.
    Cut,
    /// The vendor kept it from going on because of the content.
    Refused,
}

/// What became of a step.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The model answered with these blocks.
    Model(Vec<Block>, Stop),
    /// The scripts ran, each giving one result.
    Code(Vec<CodeResult>),
    /// It failed.
    Failed(Failure),
    /// The worker stopped because it was told to; of scripts, what is known of the calls that ran.
    Cancelled(Vec<CodeResult>),
    /// The model call stopped because it was told to, and this is what it had said. Scripts in it
    /// were not whole.
    Stopped(Vec<Block>),
    /// The scripts wait for people or subtasks, and the worker has let go of them.
    Parked {
        /// What people are asked.
        asked: Vec<Asked>,
        /// The calls that wait for subtasks.
        awaits: Vec<AwaitedCall>,
        /// What the model is told if they are never gone on with.
        results: Vec<CodeResult>,
    },
}

/// A message to append to the transcript.
#[derive(Debug, Clone, PartialEq)]
pub struct NewMessage {
    /// Its id.
    pub id: MessageId,
    /// Its place.
    pub position: i64,
    /// Who it is from.
    pub source: Source,
    /// What it says.
    pub blocks: Vec<Block>,
}

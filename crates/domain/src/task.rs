//! The state of a task, as far as decisions need it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    AgentId, MessageId, OrganizationId, StepId, TaskId,
    approval::{APPROVAL_TIMEOUT, Approval, ApprovalCall, ApprovalRequest},
    context::Context,
    message::{Block, CodeResult, Source},
    subtask::AwaitedCall,
};

/// Limit of model calls per user message when neither agent nor task sets one.
pub const DEFAULT_MAX_TURNS: u32 = 50;

/// Error code of a turn that ended because a budget cannot cover its next model call.
pub const BUDGET_EXHAUSTED: &str = "BUDGET_EXHAUSTED";

/// Error code of a turn that a person canceled.
pub const CANCELLED: &str = "CANCELLED";

/// Error code of a turn that a newer message interrupted.
pub const INTERRUPTED: &str = "INTERRUPTED";

/// Error code of a turn that ended because the model repeated the same script with the same result.
pub const STUCK: &str = "STUCK";

/// Error code of a turn that ended because the prompt does not fit the model.
pub const CONTEXT_TOO_LONG: &str = FailureClass::ContextTooLong.code();

/// Error code of a turn that ended because the model's answers exceed the output limit.
pub const OUTPUT_LIMIT: &str = "OUTPUT_LIMIT";

/// Error code of a task whose stored state cannot be read completely.
pub const UNREADABLE: &str = "UNREADABLE";

/// Error code of a task whose reconcile failed and is retried.
pub const RECONCILE_FAILED: &str = "RECONCILE_FAILED";

/// Error code of a quarantined task: its reconciles failed repeatedly.
pub const QUARANTINED: &str = "QUARANTINED";

/// The next queued message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuedMessage {
    /// Which.
    pub message: MessageId,
    /// Whether it interrupts the running turn instead of waiting for its end.
    pub interrupts: bool,
}

/// Where a task stands (seed 000, "Task Reconciler").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// No unprocessed message.
    AwaitInput,
    /// A model call is requested or running.
    InvokeModel,
    /// A script is requested or running.
    ExecuteTools,
    /// A script is suspended until a person has decided about its calls.
    AwaitApproval,
    /// A script is suspended until subtasks have ended.
    AwaitSubtasks,
    /// A person suspended the task.
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

/// A task's state. Only the reconciler changes it, except for the intents ([`Task::suspend`],
/// [`Task::cancel`], [`Task::rewind`], the agent): the gateway writes those.
#[derive(Debug, Clone, PartialEq)]
pub struct Task {
    /// Which task.
    pub id: TaskId,
    /// Whose.
    pub organization: OrganizationId,
    /// The agent that answers. It can change between two steps.
    pub agent: AgentId,
    /// Whether a person has suspended the task.
    pub suspend: bool,
    /// The reason of a person who canceled the running turn. Cleared when the turn has ended.
    pub cancel: Option<String>,
    /// Position from which messages are to be superseded. The running step is stopped first.
    /// Cleared when done.
    pub rewind: Option<i64>,
    /// The message whose failed turn a person wants to retry. Read only, and ignored when there is
    /// a newer message to answer.
    pub retry: Option<MessageId>,
    /// Limit of model calls per user message.
    pub max_turns: u32,
    /// Whether the task has a title.
    pub titled: bool,
    /// The current phase.
    pub phase: Phase,
    /// The user message being answered.
    pub turn: Option<Turn>,
    /// The step that is requested or running.
    pub step: Option<Step>,
    /// The model call that creates a title.
    pub title_step: Option<StepId>,
    /// Number of steps so far, which is the number of the newest.
    pub steps: u64,
    /// Position of the newest message in the transcript, from 1.
    pub last_position: i64,
    /// When to reconcile again without a wake.
    pub next_wake: Option<Timestamp>,
    /// How the last finished turn ended.
    pub last_outcome: Option<TurnOutcome>,
    /// The last error, until a turn completes.
    pub last_error: Option<TaskError>,
    /// The approvals of the step's scripts. Read only: decisions are intents like
    /// [`Task::suspend`], kept in rows of their own. Loaded only once the step has waited for an
    /// approval.
    pub approvals: Vec<Approval>,
    /// The running subtasks, when a suspended script waits for some. `None` when they were not
    /// loaded; a decision that needs them asks for another reconcile with [`Task::next_wake`]. Read
    /// only.
    pub subtasks: Option<Vec<TaskId>>,
    /// How far the conversation fills its model. [`Context::scale`], [`Context::tokens`] and
    /// [`Context::through`] are written, the rest is read only.
    pub context: Context,
}

/// All work for one user message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// The user message.
    pub message: MessageId,
    /// Model calls started for it. A retry of a failed call is not counted.
    pub calls: u32,
    /// What is running, or comes next.
    pub stage: Stage,
    /// Whether the model's last answer was truncated, and the model has been told.
    #[serde(default, rename = "cut")]
    pub truncated: bool,
    /// Detects a model that repeats itself.
    #[serde(default, skip_serializing_if = "Repeats::is_none")]
    pub repeats: Repeats,
    /// Attempts since the model's last answer to make the next call fit.
    #[serde(default, rename = "room", skip_serializing_if = "CompactionAttempts::is_none")]
    pub compaction: CompactionAttempts,
}

/// Attempts between two answers of a model to make the conversation fit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompactionAttempts {
    /// How often the transcript was compacted.
    pub cuts: u32,
    /// How many summaries failed.
    pub summaries: u32,
    /// Whether the vendor has rejected the call as too long since the last compaction.
    pub too_long: bool,
}

impl CompactionAttempts {
    fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl Turn {
    /// A turn that has not called a model yet.
    pub fn new(message: MessageId, stage: Stage) -> Self {
        Self {
            message,
            calls: 0,
            stage,
            truncated: false,
            repeats: Repeats::default(),
            compaction: CompactionAttempts::default(),
        }
    }
}

/// How often in a row the same scripts gave the same result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Repeats {
    /// Hash of the scripts that were requested last.
    pub scripts: u64,
    /// Hash of the scripts that ran last, with their results.
    pub last: u64,
    /// How often in a row that happened.
    pub count: u32,
    /// Whether the model was warned in this turn.
    #[serde(rename = "told")]
    pub warned: bool,
}

impl Repeats {
    fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// What a turn does next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "stage", rename_all = "snake_case")]
pub enum Stage {
    /// Call the model.
    Model,
    /// Run the scripts of the newest assistant message.
    Code {
        /// The vendor's ids of the calls, in order. Each needs one result.
        calls: Vec<String>,
    },
    /// Summarize the older part of the conversation, so that the rest fits, then call the model.
    Compact {
        /// Position of the last message that is summarized.
        through: i64,
        /// Positions before that which are not summarized.
        kept: Vec<i64>,
        /// Estimated tokens of the summarized messages.
        replaced: i64,
    },
}

/// One model call or one execution of scripts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Deduplicates the command, its result and its cost.
    pub id: StepId,
    /// The number of the step in its task, from 1.
    pub number: u64,
    /// The number of its first vendor call, from 1. A retried step continues the count of the step
    /// before it.
    pub attempt: u32,
    /// When it was requested.
    pub since: Timestamp,
    /// How often its scripts were resumed after waiting for approvals or subtasks. A command and
    /// its result carry this number, so that those of an earlier round can be told apart.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub round: u32,
    /// When its scripts were last resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed: Option<Timestamp>,
    /// Its current state.
    pub state: StepState,
}

fn is_zero(round: &u32) -> bool {
    *round == 0
}

impl Step {
    /// When the command of the current round was requested.
    pub fn requested_at(&self) -> Timestamp {
        self.resumed.unwrap_or(self.since)
    }

    /// When its approvals expire. Counted from the step's start and not from the request for the
    /// approval, because the journal that its scripts resume from is kept for a fixed time from the
    /// start.
    pub fn approvals_expire_at(&self) -> Timestamp {
        self.since + APPROVAL_TIMEOUT
    }

    /// Whether the step waits for this result. Results of another step, of an earlier round, or of
    /// a worker that received the command again after it had suspended the scripts are stale.
    pub fn awaits(&self, result: &StepResult) -> bool {
        self.id == result.step
            && self.round == result.round
            && !matches!(self.state, StepState::Suspended { .. })
    }
}

/// The state of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum StepState {
    /// A worker has it, or the command is on its way.
    InFlight {
        /// The result is not awaited after this time.
        deadline: Timestamp,
    },
    /// It failed and is retried.
    Backoff {
        /// Not before this.
        until: Timestamp,
    },
    /// The worker was told to stop. Its final result is awaited, because it says which side effects
    /// happened.
    Cancelling {
        /// The result is not awaited after this time.
        deadline: Timestamp,
    },
    /// Its scripts are suspended until a person has decided, or subtasks have ended. No worker
    /// holds them, and nothing of them is in memory.
    #[serde(rename = "parked")]
    Suspended {
        /// The calls that wait for a person's decision.
        waits: Vec<ApprovalCall>,
        /// The calls that wait for subtasks.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        awaits: Vec<AwaitedCall>,
        /// The results for the model if the scripts are never resumed.
        results: Vec<CodeResult>,
    },
}

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TurnOutcome {
    /// The model answered.
    Completed,
    /// The model could not be reached, or it refused.
    Failed,
    /// A person canceled it.
    Cancelled,
    /// The limit of model calls was reached.
    MaxTurns,
    /// A newer message of the user interrupted it.
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

/// An error of a task, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskError {
    /// Stable and machine-readable, e.g. `RATE_LIMITED`.
    pub code: String,
    /// For people; holds no secret.
    pub message: String,
    /// When it happened.
    pub time: Timestamp,
}

/// Why a step failed. Failures of one class are handled alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailureClass {
    /// Worth a retry.
    Transient,
    /// The vendor's rate limit is exceeded.
    RateLimited,
    /// The vendor is overloaded.
    Overloaded,
    /// The vendor rejects the credential.
    Authentication,
    /// The vendor rejects the request as invalid.
    InvalidRequest,
    /// The conversation does not fit the model.
    ContextTooLong,
    /// The vendor refuses the content.
    ContentRefused,
    /// The deadline has passed.
    DeadlineExceeded,
    /// The command cannot be executed with the current configuration.
    Configuration,
    /// A defect of Construct.
    Internal,
}

impl FailureClass {
    /// Whether a retry of the step may succeed.
    pub const fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::Transient | Self::RateLimited | Self::Overloaded | Self::DeadlineExceeded
        )
    }

    /// Stable code, as API clients see it.
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
    /// The class of the failure.
    pub class: FailureClass,
    /// For people; holds no secret.
    pub message: String,
    /// When to retry, if the vendor says so.
    pub retry_at: Option<Timestamp>,
    /// Failed vendor calls; 0 when the vendor was never called.
    pub attempts: u32,
}

/// A worker's result of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepResult {
    /// The step.
    pub step: StepId,
    /// The round of the step: [`Step::round`] of the command.
    pub round: u32,
    /// The outcome.
    pub outcome: Outcome,
}

/// Why a model stopped generating.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The answer is complete.
    Complete,
    /// The output limit was reached. Text may end in the middle, and an incomplete script is
    /// missing.
    OutputLimit,
    /// The vendor stopped the answer because of its content.
    Refused,
}

/// The outcome of a step.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The model answered with these blocks.
    Model(Vec<Block>, StopReason),
    /// The scripts ran; each has one result.
    Code(Vec<CodeResult>),
    /// The step failed.
    Failed(Failure),
    /// The worker stopped on request. For scripts, the known results of the calls that ran.
    Cancelled(Vec<CodeResult>),
    /// The model call stopped on request, with its partial answer. Scripts in it are incomplete and
    /// left out.
    Interrupted(Vec<Block>),
    /// The scripts wait for people or subtasks, and the worker no longer holds them.
    Suspended {
        /// The approvals that people are asked for.
        approval_requests: Vec<ApprovalRequest>,
        /// The calls that wait for subtasks.
        awaits: Vec<AwaitedCall>,
        /// The results for the model if the scripts are never resumed.
        results: Vec<CodeResult>,
    },
}

/// A message to append to the transcript.
#[derive(Debug, Clone, PartialEq)]
pub struct NewMessage {
    /// Its id.
    pub id: MessageId,
    /// Its position.
    pub position: i64,
    /// Who it is from.
    pub source: Source,
    /// Its content.
    pub blocks: Vec<Block>,
}

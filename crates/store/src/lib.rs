//! PostgreSQL: schema, queries, encryption at rest. The only user of sqlx.
//!
//! Two services write the core tables: the gateway writes what clients ask for (entities, messages,
//! intents), the reconciler writes the progress of tasks. The Slack service writes its own tables
//! ([`slack`]), and the scanner writes the progress of scans ([`scan`]). [`Store`] holds every
//! query, named object first (`task_load`, `message_create`). `migrations/0004_tasks.sql` and
//! [`Store::task_commit`] describe how the two writers avoid overwriting each other's work.
//!
//! Invariants, each tested:
//! - every row belongs to an organization, and another organization's row is [`Error::NotFound`];
//! - an event is stored with the change it describes, and a stream's sequence has no gap;
//! - a commit of the reconciler is one statement, guarded by the version it read;
//! - a step's cost is counted once;
//! - the reserved and spent money of a budget never exceeds its limit, except by what a call costs
//!   above its estimate.

mod agent;
mod approval;
mod audit;
mod budget;
mod compaction;
mod cost;
mod diagnosis;
mod error;
mod event;
mod file;
pub mod identity;
mod invocation;
mod ledger;
mod message;
mod model;
mod model_provider;
mod page;
mod pool;
mod quota;
mod reservation;
mod routing;
pub mod scan;
mod schedule;
mod seal;
mod secret;
pub mod slack;
mod state;
mod store;
mod task;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod text;
mod time;
mod usage;
mod write;

pub use agent::{
    Agent, AgentChanges, AgentFilter, ModelParameters, NewAgent, ScriptCapabilities, ThinkingEffort,
};
pub use approval::{ApprovalDecision, ApprovalFilter, StoredApproval};
pub use audit::{Audit, AuditEntry, AuditFilter};
pub use budget::{Budget, BudgetFilter, NewBudget};
pub use compaction::Compaction;
pub use cost::{CostFilter, CostGroup, CostRow};
pub use diagnosis::{
    AgentSpending, DatabaseState, KeyringKind, ModelSpending, QuarantinedTasks, SealedRows,
};
pub use error::Error;
pub use event::{NewEvent, StoredEvent, Stream};
pub use file::{
    ClaimedFile, File, FileContent, FileFilter, FileState, MAX_PARTS, MAX_UNFINISHED_UPLOADS,
    NewFile, NewPart, Part, PartOutcome, Removal, RemovalTarget, UPLOAD_TIMEOUT,
};
pub use invocation::{
    Invocation, InvocationAgent, InvocationFallback, InvocationModel, InvocationProvider,
    ModelRoute,
};
pub use ledger::{Dimensions, UsageCursor, UsageFilter, UsagePage, UsageRow, UsageTotals};
pub use message::{
    MessageCursor, MessageFilter, MessagePage, NewUserMessage, QUEUE_LIMIT, StoredMessage,
};
pub use model::{Model, ModelChanges, ModelFilter, NewModel, PricesSource};
pub use model_provider::{
    ModelProvider, ModelProviderChanges, ModelProviderFilter, ModelProviderKind, NewModelProvider,
    ResealReport,
};
pub use page::{Cursor, CursorValue, Key, Order, Page};
pub use quota::{CountSelection, Counts, Limits, Periods, Quota};
pub use reservation::{CallReport, CallReservation, CleanupReport, StepReservation};
pub use routing::{Fallback, KeyLimits};
pub use schedule::{
    DueSchedule, FiredSchedule, NewSchedule, RUN_HISTORY_LIMIT, RunEvents, RunOutcome, Schedule,
    ScheduleChanges, ScheduleFilter, ScheduleRun, ScheduleTarget,
};
pub use seal::{Error as SealError, Keyring, SealedSecret};
pub use secret::{Bindings, NewSecret, Secret, SecretChanges};
pub use state::{State, StateContent, StateGrowth, StateRef};
pub use store::{PoolOptions, STATEMENT_TIMEOUT, Store};
pub use task::{
    AppendedMessage, CommittedTask, CostInputs, DescendantTotals, DueTask, EndedMessage,
    LoadedTask, NewApproval, NewFork, NewSubtask, NewTask, Quarantine, Rewind, ScriptCaller,
    StoredTask, SubtaskChange, SubtaskEvents, SubtaskState, SubtaskStatus, TaskChanges, TaskCommit,
    TaskFilter,
};
pub use usage::{Purpose, StepUsage};
pub use write::{Idempotency, Write, WriteOutcome, WriteOutput};

//! Construct's rules, without I/O, clock or randomness: ids, messages, the lifecycle of a task, and
//! [`decide()`], the pure function that computes what happens next.

pub mod access;
pub mod approval;
pub mod backoff;
pub mod budget;
pub mod compute;
pub mod context;
pub mod decide;
pub mod id;
pub mod message;
pub mod money;
pub mod partition;
pub mod policy;
pub mod schedule;
pub mod secret;
pub mod state;
pub mod subtask;
pub mod task;

pub use decide::decide;
pub use id::{
    AgentId, ApiKeyId, ApprovalId, AuditEntryId, BudgetId, CandidateId, FileId, HandOverId,
    InvitationId, MessageId, ModelId, ModelProviderId, OrganizationId, ScanConnectionId, ScanId,
    ScheduleId, SecretId, StepId, TaskId, UserId,
};

//! Construct's rules, without I/O, clock or randomness: identifiers, messages, the life of a task, and [`decide()`],
//! the pure function that says what happens next.

pub mod backoff;
pub mod decide;
pub mod id;
pub mod message;
pub mod money;
pub mod partition;
pub mod task;

pub use decide::decide;
pub use id::{AgentId, MessageId, ModelId, ModelProviderId, OrganizationId, StepId, TaskId};

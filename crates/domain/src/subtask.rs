//! Subtasks: tasks that a script of another task created, and what that script waits for.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use crate::{MessageId, StepId, TaskId};

/// Limits of subtasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum depth of a task below its root.
    pub depth: u32,
    /// Maximum number of subtasks that one task creates in its lifetime.
    pub children: u32,
    /// Maximum number of subtasks of one tree that run at the same time.
    pub at_work: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { depth: 5, children: 64, at_work: 256 }
    }
}

/// Longest time that a script can wait for subtasks, from the call. Journals are kept longer than
/// that.
pub const MAX_WAIT: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// A call of a script that waits for subtasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AwaitedCall {
    /// Index of the script in its step, from 0.
    pub script: u32,
    /// Number of the call in that script, from 1.
    pub number: u32,
    /// The call waits until all of these have ended.
    pub tasks: Vec<TaskId>,
    /// The deadline of the wait.
    pub until: Timestamp,
}

impl AwaitedCall {
    /// Whether the wait is over when these subtasks are still running.
    pub fn is_over(&self, at_work: &[TaskId], now: Timestamp) -> bool {
        now >= self.until || !self.tasks.iter().any(|task| at_work.contains(task))
    }
}

/// Why a request of a script about tasks was rejected. None of it has happened. The text is for the
/// model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The script has ended, or is being stopped.
    #[error("the script is being stopped, or its turn has already ended.")]
    ScriptOver,
    /// There is no such agent.
    #[error("there is no agent {0:?}. Leave it out to use your own agent.")]
    UnknownAgent(String),
    /// The subtask would be nested too deeply.
    #[error(
        "subtasks can be nested {limit} levels deep, and this task is at the last one. Do the work here."
    )]
    TooDeep {
        /// Maximum depth.
        limit: u32,
    },
    /// The task has created too many subtasks.
    #[error(
        "a task can spawn {limit} subtasks in all, and this one has. Send further work to those that have ended, with tasks.send, \
         or do it here."
    )]
    TooMany {
        /// Maximum number.
        limit: u32,
    },
    /// Too many subtasks of the tree are running.
    #[error(
        "at most {limit} subtasks of one tree can be at work at the same time, and so many are. Wait until some have ended, or do \
         the work here."
    )]
    TooManyAtWork {
        /// Maximum number.
        limit: u32,
    },
    /// It is not a subtask of this task.
    #[error("{0} is no subtask that this task has spawned. tasks.list() names those.")]
    NotASubtask(String),
    /// The calling task has no parent: a person created it.
    #[error(
        "no other task has spawned this one, so there is no parent to tell. What you answer goes to the user."
    )]
    NoParent,
    /// Too many messages are queued there.
    #[error("{limit} messages wait there already. Wait until some of them are answered.")]
    QueueFull {
        /// Maximum number.
        limit: u32,
    },
}

impl Refusal {
    /// The name of the error in the script.
    pub const fn error_name(&self) -> &'static str {
        match self {
            Self::ScriptOver => "TaskOver",
            Self::UnknownAgent(_) => "AgentNotFound",
            Self::TooDeep { .. } => "TooDeep",
            Self::TooMany { .. } | Self::TooManyAtWork { .. } => "TooManySubtasks",
            Self::NotASubtask(_) => "NotASubtask",
            Self::NoParent => "NoParent",
            Self::QueueFull { .. } => "QueueFull",
        }
    }
}

/// The ids of what one call of a script creates. They are derived from the call, so that a call
/// that is repeated after a crash creates nothing new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallIds {
    /// The subtask's id.
    pub task: TaskId,
    /// The message's id.
    pub message: MessageId,
    /// The id of the subtask's own budget.
    pub budget: Uuid,
}

impl CallIds {
    /// Derives the ids of a call of a step from its script (from 0) and its number there (from 1).
    pub fn for_call(step: StepId, script: u32, number: u32) -> Self {
        let id = |what: &str| {
            let hash = Sha256::new()
                .chain_update(what)
                .chain_update(step.uuid())
                .chain_update(script.to_be_bytes())
                .chain_update(number.to_be_bytes())
                .finalize();
            let mut bytes = [0; 16];
            bytes.copy_from_slice(&hash[..16]);
            uuid::Builder::from_custom_bytes(bytes).into_uuid()
        };
        Self {
            task: TaskId::from_uuid(id("task")),
            message: MessageId::from_uuid(id("message")),
            budget: id("budget"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_ids_are_stable_and_unique_per_call() {
        let step = |n| StepId::from_uuid(Uuid::from_u128(n));
        let ids = CallIds::for_call(step(1), 0, 1);
        assert_eq!(CallIds::for_call(step(1), 0, 1), ids);
        for other in [
            CallIds::for_call(step(2), 0, 1),
            CallIds::for_call(step(1), 1, 1),
            CallIds::for_call(step(1), 0, 2),
        ] {
            assert!(
                other.task != ids.task
                    && other.message != ids.message
                    && other.budget != ids.budget
            );
        }
        assert_ne!(ids.task.uuid(), ids.message.uuid());
        assert_eq!(ids.task.uuid().get_version_num(), 8);
    }

    #[test]
    fn wait_ends_when_all_subtasks_ended_or_deadline_passed() {
        let [a, b, c] = [1, 2, 3].map(|n| TaskId::from_uuid(Uuid::from_u128(n)));
        let now = Timestamp::UNIX_EPOCH;
        let until = now + Duration::from_secs(60);
        let call = AwaitedCall { script: 0, number: 1, tasks: vec![a, b], until };
        assert!(!call.is_over(&[b], now));
        assert!(call.is_over(&[c], now));
        assert!(call.is_over(&[a, b], until));
    }
}

//! Subtasks: tasks that a script of another task has begun, and what that script waits for.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use crate::{MessageId, StepId, TaskId};

/// How many subtasks there can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How far below its root a task can be.
    pub depth: u32,
    /// Subtasks one task can begin in its life.
    pub children: u32,
    /// Subtasks of one tree that can be at work at the same time.
    pub at_work: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { depth: 5, children: 64, at_work: 256 }
    }
}

/// How long a script can wait for subtasks, counted from the call. Journals are kept longer than
/// that.
pub const LONGEST_WAIT: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// A call of a script that waits for subtasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AwaitedCall {
    /// Which of the step's scripts, from 0.
    pub script: u32,
    /// Its number in that script, from 1.
    pub number: u32,
    /// All of these are waited for.
    pub tasks: Vec<TaskId>,
    /// Not longer than this.
    pub until: Timestamp,
}

impl AwaitedCall {
    /// Whether the wait is over, when these subtasks are still at work.
    pub fn is_over(&self, at_work: &[TaskId], now: Timestamp) -> bool {
        now >= self.until || !self.tasks.iter().any(|task| at_work.contains(task))
    }
}

/// Why something that a script wanted of tasks was not done. Nothing of it has happened. The words
/// are for the model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The script is over, or about to be stopped.
    #[error("the script is being stopped, or its turn is over already.")]
    Over,
    /// There is no such agent.
    #[error("there is no agent {0:?}. Leave it out to use your own agent.")]
    NoAgent(String),
    /// It would lie too far below the root of its tree.
    #[error(
        "subtasks can be nested {limit} levels deep, and this task is at the last one. Do the work here."
    )]
    TooDeep {
        /// How deep.
        limit: u32,
    },
    /// The task has begun too many.
    #[error(
        "a task can spawn {limit} subtasks in all, and this one has. Send further work to those that have ended, with tasks.send, \
         or do it here."
    )]
    TooMany {
        /// How many it can.
        limit: u32,
    },
    /// Too many of the tree are at work.
    #[error(
        "at most {limit} subtasks of one tree can be at work at the same time, and so many are. Wait until some have ended, or do \
         the work here."
    )]
    TooManyAtWork {
        /// How many can be.
        limit: u32,
    },
    /// It is no subtask of this task.
    #[error("{0} is no subtask that this task has spawned. tasks.list() names those.")]
    NotASubtask(String),
    /// Nobody has begun the task that asks but a person.
    #[error(
        "no other task has spawned this one, so that there is nobody to tell. What you answer goes to the user."
    )]
    NoParent,
    /// Too many messages wait there.
    #[error("{limit} messages wait there already. Wait until some of them are answered.")]
    QueueFull {
        /// How many can wait.
        limit: u32,
    },
}

impl Refused {
    /// The name of the error that a script gets.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Over => "TaskOver",
            Self::NoAgent(_) => "AgentNotFound",
            Self::TooDeep { .. } => "TooDeep",
            Self::TooMany { .. } | Self::TooManyAtWork { .. } => "TooManySubtasks",
            Self::NotASubtask(_) => "NotASubtask",
            Self::NoParent => "NoParent",
            Self::QueueFull { .. } => "QueueFull",
        }
    }
}

/// The ids of what one call of a script makes. They follow from the call, so that a call which is
/// made again, because a process died, makes nothing new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallIds {
    /// Of the subtask.
    pub task: TaskId,
    /// Of the message.
    pub message: MessageId,
    /// Of the subtask's own budget.
    pub budget: Uuid,
}

impl CallIds {
    /// Those of a call of a step, by its script (from 0) and its number there (from 1).
    pub fn of(step: StepId, script: u32, number: u32) -> Self {
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
    fn the_same_call_has_the_same_ids_and_no_other_has() {
        let step = |n| StepId::from_uuid(Uuid::from_u128(n));
        let ids = CallIds::of(step(1), 0, 1);
        assert_eq!(CallIds::of(step(1), 0, 1), ids);
        for other in
            [CallIds::of(step(2), 0, 1), CallIds::of(step(1), 1, 1), CallIds::of(step(1), 0, 2)]
        {
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
    fn a_wait_is_over_when_all_have_ended_or_its_time_has() {
        let [a, b, c] = [1, 2, 3].map(|n| TaskId::from_uuid(Uuid::from_u128(n)));
        let now = Timestamp::UNIX_EPOCH;
        let until = now + Duration::from_secs(60);
        let call = AwaitedCall { script: 0, number: 1, tasks: vec![a, b], until };
        assert!(!call.is_over(&[b], now));
        assert!(call.is_over(&[c], now));
        assert!(call.is_over(&[a, b], until));
    }
}

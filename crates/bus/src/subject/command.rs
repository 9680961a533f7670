//! Commands: work queues, one message per piece of work.

use std::{fmt, str::FromStr};

use construct_domain::{StepId, TaskId, compute, partition};
use construct_proto::mesh::v1 as mesh;

use super::{
    Address, Command, CommandStep, Invalid, StreamAddress, agree, tokens::ROOT, tokens::Tokens,
};
use crate::topology::Stream;

/// Requests a reconcile of a task. Never coalesced: a wake that arrives while an earlier one is
/// being handled must not be lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskWake {
    task: TaskId,
}

/// The result of a step. Every publish is a message of its own; the storing process decides whether
/// a result is new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskResult {
    task: TaskId,
}

macro_rules! partitioned {
    ($address:ident, $verb:literal, $message:ty, |$payload:ident| $ids:expr, |$of:ident| $step:expr) => {
        impl $address {
            /// The address of a task. The partition is computed from its id.
            pub const fn new(task: TaskId) -> Self {
                Self { task }
            }

            /// The task.
            pub const fn task(&self) -> TaskId {
                self.task
            }
        }

        impl Address for $address {
            type Message = $message;

            fn subject(&self) -> String {
                format!(
                    concat!("{}.cmd.task.", $verb, ".{}.{}"),
                    ROOT,
                    partition_token(partition::for_task(self.task)),
                    self.task
                )
            }

            fn pattern() -> String {
                format!(concat!("{}.cmd.task.", $verb, ".*.*"), ROOT)
            }

            fn parse(subject: &str) -> Result<Self, Invalid> {
                let mut tokens = Tokens::after(subject, concat!("cmd.task.", $verb))?;
                let partition = tokens.next()?;
                let task = tokens.value::<TaskId>()?;
                tokens.end()?;
                if partition != partition_token(partition::for_task(task)) {
                    return Err(Invalid::new("the task belongs to another partition", subject));
                }
                Ok(Self { task })
            }

            fn check(&self, $payload: &$message) -> Result<(), Invalid> {
                let ids: Option<(&str, &str)> = $ids;
                let (organization, task) =
                    ids.ok_or_else(|| Invalid::new("the payload names no step", ""))?;
                check_organization(organization)?;
                if let Some(step) = <Self as StreamAddress>::step($payload) {
                    step.parse::<StepId>()
                        .map_err(|_| Invalid::new("the payload names no step", step))?;
                }
                agree("the payload is about another task", self.task, task)
            }
        }

        impl StreamAddress for $address {
            const STREAM: Stream = Stream::Task;

            fn step($of: &$message) -> Option<&str> {
                $step
            }
        }
    };
}

partitioned!(
    TaskWake,
    "wake",
    mesh::TaskWake,
    |wake| Some((&wake.organization_id, &wake.task_id)),
    |_wake| None
);
partitioned!(
    TaskResult,
    "result",
    mesh::StepResult,
    |result| result
        .step
        .as_ref()
        .map(|step| (step.organization_id.as_str(), step.task_id.as_str())),
    |result| result.step.as_ref().map(|step| step.step_id.as_str())
);

/// A partition in subjects and consumer names: two digits.
pub(crate) fn partition_token(partition: u16) -> String {
    format!("{partition:02}")
}

/// Call a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInvoke {
    pool: Pool,
    task: TaskId,
}

/// Run scripts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodeExecute {
    pool: Pool,
    task: TaskId,
}

macro_rules! pooled {
    ($address:ident, $verb:literal, $stream:expr, $message:ty, |$payload:ident| $pool:expr) => {
        impl $address {
            /// The address of a task's command in a pool of workers.
            pub const fn new(pool: Pool, task: TaskId) -> Self {
                Self { pool, task }
            }

            /// The task.
            pub const fn task(&self) -> TaskId {
                self.task
            }

            /// The pool of workers.
            pub const fn pool(&self) -> &Pool {
                &self.pool
            }
        }

        impl Address for $address {
            type Message = $message;

            fn subject(&self) -> String {
                format!(concat!("{}.cmd.", $verb, ".{}.{}"), ROOT, self.pool, self.task)
            }

            fn pattern() -> String {
                format!(concat!("{}.cmd.", $verb, ".*.*"), ROOT)
            }

            fn parse(subject: &str) -> Result<Self, Invalid> {
                let mut tokens = Tokens::after(subject, concat!("cmd.", $verb))?;
                let pool = tokens.value()?;
                let task = tokens.value()?;
                tokens.end()?;
                Ok(Self { pool, task })
            }

            fn check(&self, message: &$message) -> Result<(), Invalid> {
                let step = message
                    .step
                    .as_ref()
                    .ok_or_else(|| Invalid::new("the payload names no step", ""))?;
                check_organization(&step.organization_id)?;
                step.step_id.parse::<construct_domain::StepId>().map_err(|_| {
                    Invalid::new("the payload's step id is malformed", &step.step_id)
                })?;
                agree("the payload is about another task", self.task, &step.task_id)?;
                let $payload = message;
                match $pool {
                    "" => Ok(()),
                    pool => agree("the payload is for another pool", &self.pool, pool),
                }
            }
        }

        impl StreamAddress for $address {
            const STREAM: Stream = $stream;

            fn step(message: &$message) -> Option<&str> {
                message.step.as_ref().map(|step| step.step_id.as_str())
            }
        }

        impl Command for $address {
            fn command_step(message: &$message) -> CommandStep<'_> {
                match &message.step {
                    Some(step) => CommandStep {
                        organization: &step.organization_id,
                        step: &step.step_id,
                        number: step.number,
                        round: step.round,
                    },
                    None => CommandStep::default(),
                }
            }
        }
    };
}

// Model calls name no pool, because there is one. Scripts of earlier versions name none either.
pooled!(ModelInvoke, "model.invoke", Stream::Model, mesh::ModelInvoke, |_invoke| "");
pooled!(CodeExecute, "code.execute", Stream::Code, mesh::CodeExecute, |execute| execute
    .compute
    .as_str());

fn check_organization(organization: &str) -> Result<(), Invalid> {
    match organization.parse::<construct_domain::OrganizationId>() {
        Ok(_) => Ok(()),
        Err(_) => Err(Invalid::new("the payload's organization id is malformed", organization)),
    }
}

/// A pool of equivalent workers, e.g. those with two cores: `[a-z][a-z0-9-]{0,31}`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pool(String);

impl Pool {
    /// A pool by name.
    ///
    /// # Errors
    /// When the name is not a valid subject token.
    pub fn new(name: impl Into<String>) -> Result<Self, Invalid> {
        let name = name.into();
        if compute::is_name(&name) {
            Ok(Self(name))
        } else {
            Err(Invalid::new("not a pool's name", name))
        }
    }

    /// The default pool of model calls.
    pub fn model_default() -> Self {
        Self("default".to_owned())
    }

    /// The default pool of scripts.
    pub fn code_default() -> Self {
        Self(compute::DEFAULT.to_owned())
    }

    /// The pools of scripts that always exist.
    pub fn code_standard() -> [Self; 3] {
        compute::STANDARD.map(|name| Self(name.to_owned()))
    }

    /// Its name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Pool {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        Self::new(text)
    }
}

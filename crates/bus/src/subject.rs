//! Addresses: one type per kind of message, with its subject, stream, payload type and
//! deduplication. Subjects are computed from typed ids and parsed by one checked function each.
//!
//! The names are API, because people tap them:
//!
//! ```text
//! construct.v1.cmd.task.wake.<partition>.<task>     TaskWake
//! construct.v1.cmd.task.result.<partition>.<task>   TaskResult
//! construct.v1.cmd.model.invoke.<pool>.<task>       ModelInvoke
//! construct.v1.cmd.code.execute.<pool>.<task>       CodeExecute
//! construct.v1.cmd.spending.<org>                   Spending
//! construct.v1.cmd.slack.<kind>.<team>              SlackDelivery
//! construct.v1.cmd.scan.run.<org>.<scan>            ScanRun
//! construct.v1.cmd.tool.create.<org>                ToolCreate
//! construct.v1.evt.<org>.task.<task>.<event>        TaskEvent (`message.created` is two tokens)
//! construct.v1.evt.<org>.<entity>.<id>.<event>      EntityEvent (agent, budget, model, provider)
//! construct.v1.evt.<org>.scan.<scan>                ScanUpdate
//! construct.v1.delta.<org>.task.<task>              Delta
//! construct.v1.journal.<step>                       Journal
//! construct.v1.dead.<stream>                        DeadLetters
//! construct.v1.ctl.<service>.all.cancel             Cancel
//! construct.v1.ctl.gateway.<org>.state              StateUpdate
//! construct.v1.ctl.interpreter.pool.<pool>.tools    Tools
//! construct.v1.ctl.providers.<instance>.breaker     BreakerUpdate
//! construct.v1.ctl.providers.all.breakers           BreakersRequest
//! construct.v1.ctl.providers.any.state              BreakerState
//! construct.v1.ctl.providers.any.check              CheckProvider
//! construct.v1.ctl.providers.any.models             ListVendorModels
//! construct.v1.ctl.providers.any.tokens             CountTokens
//! construct.v1.ctl.reconciler.<instance>.beat       ReconcilerBeat
//! construct.v1.ctl.reconciler.census                Census
//! construct.v1.ctl.reconciler.models                Models
//! construct.v1.ctl.reconciler.budgets               Budgets
//! construct.v1.ctl.reconciler.subtasks              Subtasks
//! construct.v1.ctl.reconciler.step_location           StepLocation
//! construct.v1.ctl.scanner.any.repositories         ListRepositories
//! ```

mod census;
mod command;
mod control;
mod event;
mod membership;
mod providers;
mod scan;
mod slack;
mod spending;
mod state;
mod step_location;
mod subtasks;
mod tokens;

use std::fmt::Debug;

pub use census::{Census, MAX_CENSUS_TASKS};
pub(crate) use command::partition_token;
pub use command::{CodeExecute, ModelInvoke, Pool, TaskResult, TaskWake};
pub use control::{Cancel, DeadLetters, Journal, Service, Tools};
pub use event::{Delta, Entity, EntityEvent, EventType, TaskEvent};
pub(crate) use event::{EventAddress, organization_subjects};
pub use membership::ReconcilerHeartbeat;
pub use providers::{
    BreakerState, BreakerUpdate, BreakersRequest, CheckProvider, CountTokens, ListVendorModels,
};
pub use scan::{ListRepositories, ScanRun, ScanUpdate, ToolCreate};
pub use slack::{SlackDelivery, SlackKind};
pub use spending::{Budgets, Models, Spending};
pub use state::StateUpdate;
pub use step_location::StepLocation;
pub use subtasks::Subtasks;
pub(crate) use tokens::all_subjects;

use crate::{Message, topology::Stream};

/// An invalid subject, or a payload that does not belong on it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {text:?}")]
pub struct Invalid {
    /// What is wrong.
    pub what: &'static str,
    /// The invalid text.
    pub text: String,
}

impl Invalid {
    pub(crate) fn new(what: &'static str, text: impl Into<String>) -> Self {
        Self { what, text: text.into() }
    }
}

/// The address of one kind of message.
pub trait Address: Clone + Debug + Eq + Send + Sync + 'static {
    /// The payload type.
    type Message: Message;

    /// The subject to publish to.
    fn subject(&self) -> String;

    /// The pattern of all subjects of this kind, for permissions.
    fn pattern() -> String;

    /// Parses a subject and checks every token.
    ///
    /// # Errors
    /// When the subject is not one that [`Address::subject`] makes.
    fn parse(subject: &str) -> Result<Self, Invalid>;

    /// Checks that the ids in a payload agree with the subject.
    ///
    /// # Errors
    /// When an id differs, is missing or malformed.
    fn check(&self, message: &Self::Message) -> Result<(), Invalid>;
}

/// An address at which processes answer questions.
pub trait Question: Address {
    /// The type of the answers.
    type Answer: Message;

    /// The queue group that shares the questions. `None`: every subscriber receives each question,
    /// and the one that knows the answer replies.
    const GROUP: Option<&'static str>;
}

/// An address whose messages are stored in a stream.
pub trait StreamAddress: Address {
    /// The stream.
    const STREAM: Stream;

    /// The key by which the stream drops duplicates within its window (header `Nats-Msg-Id`).
    /// `None`: every publish call is a message of its own; only its own retries are deduplicated.
    fn duplicate_key(_message: &Self::Message) -> Option<String> {
        None
    }

    /// The step of a message, for the header `Construct-Step`.
    fn step(_message: &Self::Message) -> Option<&str> {
        None
    }
}

/// A command. At most one per subject may be queued or in progress.
pub trait Command: StreamAddress {
    /// The step of the command.
    fn command_step(message: &Self::Message) -> CommandStep<'_>;
}

/// The step of a command. Numbers rise within a task and rounds within a step, so that later
/// commands supersede earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CommandStep<'a> {
    /// The task's organization.
    pub organization: &'a str,
    /// The step's id.
    pub step: &'a str,
    /// The step's number in the task.
    pub number: u64,
    /// The step's round: how often it was continued.
    pub round: u32,
}

pub(crate) fn agree(
    what: &'static str,
    expected: impl ToString,
    found: &str,
) -> Result<(), Invalid> {
    if expected.to_string() == found { Ok(()) } else { Err(Invalid::new(what, found)) }
}

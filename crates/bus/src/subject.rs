//! Addresses: for every kind of message one type that is its subject, its stream, its payload type
//! and its rule for duplicates. Subjects are computed from typed ids and read back by one checked
//! function each.
//!
//! The names are API, because people tap them:
//!
//! ```text
//! construct.v1.cmd.task.wake.<partition>.<task>             TaskWake
//! construct.v1.cmd.task.result.<partition>.<task>           TaskResult
//! construct.v1.cmd.model.invoke.<pool>.<task>               ModelInvoke
//! construct.v1.cmd.code.execute.<pool>.<task>               CodeExecute
//! construct.v1.evt.<org>.task.<task>.<event>                TaskEvent      (`message.created` makes two tokens)
//! construct.v1.evt.<org>.<agent|budget|model|provider>.<id>.<event> EntityEvent
//! construct.v1.delta.<org>.task.<task>                      Delta
//! construct.v1.journal.<step>                               Journal
//! construct.v1.ctl.<service>.all.cancel                     Cancel
//! construct.v1.ctl.providers.<instance>.breaker             BreakerUpdate
//! construct.v1.ctl.providers.all.breakers                   BreakersRequest
//! construct.v1.ctl.providers.any.<question>                 BreakerState, CheckProvider, ListVendorModels, CountTokens
//! construct.v1.ctl.interpreter.pool.<pool>.tools            Tools
//! construct.v1.ctl.reconciler.<instance>.beat               ReconcilerBeat
//! construct.v1.ctl.reconciler.census                        Census
//! construct.v1.ctl.reconciler.models                        Models
//! construct.v1.ctl.reconciler.budgets                       Budgets
//! construct.v1.ctl.reconciler.subtasks                      Subtasks
//! construct.v1.ctl.reconciler.whereabouts                   StepLocation
//! construct.v1.cmd.spending.<org>                           Spending
//! construct.v1.cmd.slack.<kind>.<team>                     SlackDelivery
//! construct.v1.cmd.scan.run.<org>.<scan>                    ScanRun
//! construct.v1.cmd.tool.create.<org>                        ToolCreate
//! construct.v1.evt.<org>.scan.<scan>                        ScanUpdate
//! construct.v1.ctl.scanner.any.repositories                 ListRepositories
//! construct.v1.ctl.gateway.<org>.state                      StateUpdate
//! construct.v1.dead.<stream>                                DeadLetters
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
pub use membership::ReconcilerBeat;
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

/// A subject that is not what it should be, or a payload that does not belong on it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {text:?}")]
pub struct Invalid {
    /// What is wrong, in words.
    pub what: &'static str,
    /// The offending text.
    pub text: String,
}

impl Invalid {
    pub(crate) fn new(what: &'static str, text: impl Into<String>) -> Self {
        Self { what, text: text.into() }
    }
}

/// Where one kind of message travels.
pub trait Address: Clone + Debug + Eq + Send + Sync + 'static {
    /// What is sent there.
    type Message: Message;

    /// The subject to publish to.
    fn subject(&self) -> String;

    /// What matches the subjects of all addresses of this kind, for who is to be allowed them.
    fn pattern() -> String;

    /// Reads a subject back, checking every token.
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

/// An address where one process answers.
pub trait Question: Address {
    /// What is answered.
    type Answer: Message;

    /// The processes that share the questions. None: all that answer here hear each of them, and
    /// the one that knows answers.
    const GROUP: Option<&'static str>;
}

/// An address whose messages are kept in a stream.
pub trait StreamAddress: Address {
    /// The stream that keeps them.
    const STREAM: Stream;

    /// The identity under which the stream drops duplicates within its window (header
    /// `Nats-Msg-Id`). `None`: every publish call is a message of its own, only its own retries
    /// collapse.
    fn duplicate_key(_message: &Self::Message) -> Option<String> {
        None
    }

    /// The step a message is about, shown in the header `Construct-Step`.
    fn step(_message: &Self::Message) -> Option<&str> {
        None
    }
}

/// A command of which at most one per subject may be waiting or in flight.
pub trait Command: StreamAddress {
    /// Which step is command_step.
    fn command_step(message: &Self::Message) -> CommandStep<'_>;
}

/// The step of a command. Numbers rise within a task, and rounds within a step, so that what is
/// earlier gives way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CommandStep<'a> {
    /// Whose task it is of.
    pub organization: &'a str,
    /// Its id.
    pub step: &'a str,
    /// Its number in the task.
    pub number: u64,
    /// How often it was gone on with.
    pub round: u32,
}

pub(crate) fn agree(
    what: &'static str,
    expected: impl ToString,
    found: &str,
) -> Result<(), Invalid> {
    if expected.to_string() == found { Ok(()) } else { Err(Invalid::new(what, found)) }
}

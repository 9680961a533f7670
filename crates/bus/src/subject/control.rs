//! Journals, dead letters, and messages to running processes.

use construct_domain::StepId;
use construct_proto::mesh::v1 as mesh;

use super::{Address, Invalid, Pool, Question, StreamAddress, agree, tokens::ROOT, tokens::Tokens};
use crate::topology::Stream;

/// The journal of one execution of scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Journal {
    /// The step, whose id is also the execution's.
    pub step: StepId,
}

impl Address for Journal {
    type Message = mesh::JournalEntry;

    fn subject(&self) -> String {
        format!("{ROOT}.journal.{}", self.step)
    }

    fn pattern() -> String {
        format!("{ROOT}.journal.*")
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "journal")?;
        let step = tokens.value()?;
        tokens.end()?;
        Ok(Self { step })
    }

    fn check(&self, entry: &mesh::JournalEntry) -> Result<(), Invalid> {
        agree("the entry belongs to another step", self.step, &entry.step_id)
    }
}

impl StreamAddress for Journal {
    const STREAM: Stream = Stream::Journal;

    fn step(entry: &mesh::JournalEntry) -> Option<&str> {
        Some(&entry.step_id)
    }
}

/// A service of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Service {
    /// Serves all client protocols.
    Gateway,
    /// Runs JavaScript and tools.
    Interpreter,
    /// Talks to model vendors.
    Providers,
    /// Decides what a task does next.
    Reconciler,
}

impl Service {
    /// Every service, alphabetically.
    pub const ALL: [Self; 4] =
        [Self::Gateway, Self::Interpreter, Self::Providers, Self::Reconciler];

    /// Its name in subjects.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gateway => "gateway",
            Self::Interpreter => "interpreter",
            Self::Providers => "providers",
            Self::Reconciler => "reconciler",
        }
    }
}

/// Tells every process of a service to stop working on a step. Not stored: a process that is not
/// running has nothing to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cancel {
    /// The service.
    pub service: Service,
}

impl Address for Cancel {
    type Message = mesh::CancelStep;

    fn subject(&self) -> String {
        format!("{ROOT}.ctl.{}.all.cancel", self.service.name())
    }

    fn pattern() -> String {
        format!("{ROOT}.ctl.*.all.cancel")
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "ctl")?;
        let name = tokens.next()?;
        tokens.word("all")?;
        tokens.word("cancel")?;
        tokens.end()?;
        let service = Service::ALL.into_iter().find(|service| service.name() == name);
        Ok(Self {
            service: service
                .ok_or_else(|| Invalid::new("the subject names no service", subject))?,
        })
    }

    fn check(&self, cancel: &mesh::CancelStep) -> Result<(), Invalid> {
        match cancel.step_id.parse::<StepId>() {
            Ok(_) => Ok(()),
            Err(_) => Err(Invalid::new("the payload's step id is malformed", &cancel.step_id)),
        }
    }
}

/// Asks any interpreter of a pool for its tools; the answer is a `ToolCatalog`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tools {
    /// The pool.
    pub pool: Pool,
}

impl Address for Tools {
    type Message = mesh::ToolCatalogRequest;

    fn subject(&self) -> String {
        format!("{ROOT}.ctl.interpreter.pool.{}.tools", self.pool)
    }

    fn pattern() -> String {
        format!("{ROOT}.ctl.interpreter.pool.*.tools")
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "ctl.interpreter.pool")?;
        let pool = tokens.value()?;
        tokens.word("tools")?;
        tokens.end()?;
        Ok(Self { pool })
    }

    fn check(&self, _request: &mesh::ToolCatalogRequest) -> Result<(), Invalid> {
        Ok(())
    }
}

impl Question for Tools {
    type Answer = mesh::ToolCatalog;

    const GROUP: Option<&'static str> = Some("tools");
}

/// Messages that could not be decoded or processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeadLetters {
    /// The stream of the message.
    pub stream: Stream,
}

impl Address for DeadLetters {
    type Message = mesh::DeadLetter;

    fn subject(&self) -> String {
        format!("{ROOT}.dead.{}", self.stream.name())
    }

    fn pattern() -> String {
        format!("{ROOT}.dead.*")
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "dead")?;
        let name = tokens.next()?;
        tokens.end()?;
        let stream = Stream::ALL.into_iter().find(|stream| stream.name() == name);
        Ok(Self {
            stream: stream.ok_or_else(|| Invalid::new("the subject names no stream", subject))?,
        })
    }

    fn check(&self, letter: &mesh::DeadLetter) -> Result<(), Invalid> {
        agree("the letter comes from another stream", self.stream.name(), &letter.stream)
    }
}

impl StreamAddress for DeadLetters {
    const STREAM: Stream = Stream::DeadLetters;
}

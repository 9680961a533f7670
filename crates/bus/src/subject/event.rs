//! Events for subscribers.

use std::{fmt, str::FromStr};

use construct_domain::{AgentId, BudgetId, ModelId, ModelProviderId, OrganizationId, TaskId};
use construct_proto::v1::{Event, event::Payload};

use super::{Address, Invalid, StreamAddress, agree, tokens::ROOT, tokens::Tokens};
use crate::topology::Stream;

/// An event about a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskEvent {
    /// The task's organization.
    pub organization: OrganizationId,
    /// The task.
    pub task: TaskId,
    /// The type of the event.
    pub event: EventType,
}

/// An event about an agent, a budget, a model or a provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntityEvent {
    /// The entity's organization.
    pub organization: OrganizationId,
    /// The entity.
    pub entity: Entity,
    /// The type of the event.
    pub event: EventType,
}

/// Live text of a task: the event types [`Delta::TYPES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delta {
    /// The task's organization.
    pub organization: OrganizationId,
    /// The task.
    pub task: TaskId,
}

/// An entity that belongs to the organization and not to a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Entity {
    /// An agent's configuration.
    Agent(AgentId),
    /// A budget.
    Budget(BudgetId),
    /// A model.
    Model(ModelId),
    /// An account with a model vendor.
    Provider(ModelProviderId),
}

/// The type of an event: one or two words of `a-z` and `_`, joined by a dot. Each word is a token
/// of the subject.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EventType(String);

impl EventType {
    /// An event type by name.
    ///
    /// # Errors
    /// When it is not valid in a subject.
    pub fn new(name: impl Into<String>) -> Result<Self, Invalid> {
        let name = name.into();
        let word = |word: &str| {
            (1..=32).contains(&word.len())
                && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        };
        let fits = match name.split_once('.') {
            Some((first, second)) => word(first) && word(second),
            None => word(&name),
        };
        if fits { Ok(Self(name)) } else { Err(Invalid::new("not an event type", name)) }
    }

    /// Its name, as in the event.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for EventType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for EventType {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        Self::new(text)
    }
}

/// The subjects of an organization in each stream of events.
pub(crate) fn organization_subjects(organization: OrganizationId) -> [(Stream, String); 2] {
    [
        (Stream::Events, format!("{ROOT}.evt.{organization}.>")),
        (Stream::Deltas, format!("{ROOT}.delta.{organization}.>")),
    ]
}

impl TaskEvent {
    /// Matches everything about a task except its live text.
    pub(crate) fn all(organization: OrganizationId, task: TaskId) -> String {
        format!("{ROOT}.evt.{organization}.task.{task}.>")
    }

    /// Matches tool calls and results of any task.
    pub(crate) fn any_tool() -> String {
        format!("{ROOT}.evt.*.task.*.tool.*")
    }

    /// Tool calls and results of a task.
    pub(crate) fn tools(organization: OrganizationId, task: TaskId) -> [String; 2] {
        ["called", "result"]
            .map(|what| format!("{ROOT}.evt.{organization}.task.{task}.tool.{what}"))
    }
}

impl Address for TaskEvent {
    type Message = Event;

    fn subject(&self) -> String {
        format!("{ROOT}.evt.{}.task.{}.{}", self.organization, self.task, self.event)
    }

    fn pattern() -> String {
        format!("{ROOT}.evt.*.task.*.>")
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "evt")?;
        let organization = tokens.value()?;
        tokens.word("task")?;
        Ok(Self { organization, task: tokens.value()?, event: EventType::new(tokens.rest()?)? })
    }

    fn check(&self, event: &Event) -> Result<(), Invalid> {
        agree(
            "the event belongs to another organization",
            self.organization,
            &event.organization_id,
        )?;
        agree("the event is about another task", self.task, &event.task_id)?;
        agree("the event is of another type", &self.event, &event.r#type)
    }
}

impl StreamAddress for TaskEvent {
    const STREAM: Stream = Stream::Events;

    fn duplicate_key(event: &Event) -> Option<String> {
        (!event.id.is_empty()).then(|| event.id.clone())
    }
}

impl EntityEvent {
    /// Matches everything about the organization's agents, budgets, models or providers.
    pub(crate) fn all(organization: OrganizationId, kind: &str) -> String {
        format!("{ROOT}.evt.{organization}.{kind}.>")
    }

    /// Matches everything about any organization's entities of a kind.
    pub(crate) fn any(kind: &str) -> String {
        format!("{ROOT}.evt.*.{kind}.>")
    }

    /// The kinds of entity, as in subjects.
    pub(crate) const KINDS: [&str; 4] = ["agent", "budget", "model", "provider"];
}

impl Address for EntityEvent {
    type Message = Event;

    fn subject(&self) -> String {
        let (organization, event) = (self.organization, &self.event);
        match self.entity {
            Entity::Agent(id) => format!("{ROOT}.evt.{organization}.agent.{id}.{event}"),
            Entity::Budget(id) => format!("{ROOT}.evt.{organization}.budget.{id}.{event}"),
            Entity::Model(id) => format!("{ROOT}.evt.{organization}.model.{id}.{event}"),
            Entity::Provider(id) => format!("{ROOT}.evt.{organization}.provider.{id}.{event}"),
        }
    }

    fn pattern() -> String {
        format!("{ROOT}.evt.*.*.*.>")
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "evt")?;
        let organization = tokens.value()?;
        let entity = match tokens.next()? {
            "agent" => Entity::Agent(tokens.value()?),
            "budget" => Entity::Budget(tokens.value()?),
            "model" => Entity::Model(tokens.value()?),
            "provider" => Entity::Provider(tokens.value()?),
            _ => return Err(Invalid::new("the subject names no kind of entity", subject)),
        };
        Ok(Self { organization, entity, event: EventType::new(tokens.rest()?)? })
    }

    fn check(&self, event: &Event) -> Result<(), Invalid> {
        agree(
            "the event belongs to another organization",
            self.organization,
            &event.organization_id,
        )?;
        agree("the event is of another type", &self.event, &event.r#type)?;
        match entity_of(event)? {
            entity if entity == self.entity => Ok(()),
            _ => Err(Invalid::new("the event is about another entity", self.subject())),
        }
    }
}

impl StreamAddress for EntityEvent {
    const STREAM: Stream = Stream::Events;

    fn duplicate_key(event: &Event) -> Option<String> {
        (!event.id.is_empty()).then(|| event.id.clone())
    }
}

impl Delta {
    /// The event types of live text.
    pub const TYPES: [&str; 2] = ["message.delta", "message.restarted"];
}

impl Address for Delta {
    type Message = Event;

    fn subject(&self) -> String {
        format!("{ROOT}.delta.{}.task.{}", self.organization, self.task)
    }

    fn pattern() -> String {
        format!("{ROOT}.delta.*.task.*")
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "delta")?;
        let organization = tokens.value()?;
        tokens.word("task")?;
        let task = tokens.value()?;
        tokens.end()?;
        Ok(Self { organization, task })
    }

    fn check(&self, event: &Event) -> Result<(), Invalid> {
        agree(
            "the event belongs to another organization",
            self.organization,
            &event.organization_id,
        )?;
        agree("the event is about another task", self.task, &event.task_id)?;
        if Self::TYPES.contains(&event.r#type.as_str()) {
            Ok(())
        } else {
            Err(Invalid::new("the event is not live text", &event.r#type))
        }
    }
}

/// No key of its own: receivers drop duplicates by step and index, and a deduplication table of
/// every delta would cost memory.
impl StreamAddress for Delta {
    const STREAM: Stream = Stream::Deltas;
}

/// The address of an event, derived from its content.
#[derive(Debug, Clone)]
pub(crate) enum EventAddress {
    Task(TaskEvent),
    Entity(EntityEvent),
    Delta(Delta),
}

impl EventAddress {
    pub(crate) fn from_event(event: &Event) -> Result<Self, Invalid> {
        let organization = event.organization_id.parse().map_err(|_| {
            Invalid::new("the event's organization id is malformed", &event.organization_id)
        })?;
        let kind = EventType::new(&event.r#type)?;
        if event.task_id.is_empty() {
            return Ok(Self::Entity(EntityEvent {
                organization,
                entity: entity_of(event)?,
                event: kind,
            }));
        }
        let task = event
            .task_id
            .parse()
            .map_err(|_| Invalid::new("the event's task id is malformed", &event.task_id))?;
        if Delta::TYPES.contains(&kind.as_str()) {
            return Ok(Self::Delta(Delta { organization, task }));
        }
        Ok(Self::Task(TaskEvent { organization, task, event: kind }))
    }
}

fn entity_of(event: &Event) -> Result<Entity, Invalid> {
    let missing =
        || Invalid::new("the event is about no agent, budget, model or provider", &event.r#type);
    let id = match &event.payload {
        Some(Payload::Agent(agent)) => agent.metadata.as_ref().map(|metadata| metadata.id.as_str()),
        Some(Payload::Budget(budget)) => {
            budget.metadata.as_ref().map(|metadata| metadata.id.as_str())
        }
        Some(Payload::Model(model)) => model.metadata.as_ref().map(|metadata| metadata.id.as_str()),
        Some(Payload::ModelProvider(provider)) => {
            provider.metadata.as_ref().map(|metadata| metadata.id.as_str())
        }
        Some(Payload::Deleted(deleted)) => Some(deleted.id.as_str()),
        _ => None,
    }
    .ok_or_else(missing)?;
    // The prefixes differ, so at most one of them parses.
    let agent = id.parse().map(Entity::Agent);
    agent
        .or_else(|_| id.parse().map(Entity::Budget))
        .or_else(|_| id.parse().map(Entity::Model))
        .or_else(|_| id.parse().map(Entity::Provider))
        .map_err(|_| missing())
}

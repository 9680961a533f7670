//! Decides which events of a task belong to the turn of one message, and when that turn has ended.
//! Pure.

use std::collections::BTreeSet;

use construct_proto::v1::{Event, Message, TaskError, TaskPhase, TurnOutcome, event::Payload};

use crate::totals::Totals;

/// The meaning of an event for the message.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum TurnEvent {
    /// Nothing.
    Other,
    /// Its turn has ended.
    Ended {
        outcome: TurnOutcome,
        error: Option<TaskError>,
    },
    /// The message gets no turn: it was deleted, or a cancel dropped it from the queue.
    MessageDropped,
    TaskDeleted,
    /// Nothing more happens until a person resumes the task.
    Suspended,
}

/// Follows the turn of one message.
#[derive(Debug)]
pub(super) struct TurnWatch {
    message: String,
    /// Messages that are answered first.
    ahead: BTreeSet<String>,
    /// Whether the message's own event has arrived. Earlier events do not matter.
    created: bool,
    totals: Totals,
}

impl TurnWatch {
    pub(super) fn new(message: String, ahead: Vec<String>) -> Self {
        Self {
            message,
            ahead: ahead.into_iter().collect(),
            created: false,
            totals: Totals::default(),
        }
    }

    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// Whether current events belong to the turn of the message.
    pub(super) fn is_active(&self) -> bool {
        self.created && self.ahead.is_empty()
    }

    /// The totals of the turn so far.
    pub(super) fn totals(&self) -> &Totals {
        &self.totals
    }

    pub(super) fn observe(&mut self, event: &Event) -> TurnEvent {
        let observed = self.classify(event);
        if self.is_active() {
            self.totals.add_event(event);
        }
        observed
    }

    fn classify(&mut self, event: &Event) -> TurnEvent {
        match &event.payload {
            Some(Payload::Message(message)) if event.r#type == "message.created" => {
                self.created |=
                    message.metadata.as_ref().is_some_and(|metadata| metadata.id == self.message);
                TurnEvent::Other
            }
            Some(Payload::TurnCompleted(turn)) if turn.message_id == self.message => {
                TurnEvent::Ended { outcome: turn.outcome(), error: turn.error.clone() }
            }
            Some(Payload::Message(message))
                if event.r#type == "message.updated" && is_dropped(message) =>
            {
                self.message_dropped(message.metadata.as_ref().map_or("", |metadata| &metadata.id))
            }
            Some(Payload::TurnCompleted(turn)) => {
                self.ahead.remove(&turn.message_id);
                TurnEvent::Other
            }
            Some(Payload::PhaseChanged(changed))
                if self.created && changed.phase() == TaskPhase::Suspended =>
            {
                TurnEvent::Suspended
            }
            Some(Payload::Deleted(_)) if event.r#type == "task.deleted" => TurnEvent::TaskDeleted,
            Some(Payload::Deleted(deleted)) => self.message_dropped(&deleted.id),
            _ => TurnEvent::Other,
        }
    }

    /// Handles a message that gets no turn.
    fn message_dropped(&mut self, id: &str) -> TurnEvent {
        self.ahead.remove(id);
        if id == self.message { TurnEvent::MessageDropped } else { TurnEvent::Other }
    }
}

/// Whether a cancel dropped the message from the queue: it never gets a turn.
pub(crate) fn is_dropped(message: &Message) -> bool {
    message
        .status
        .as_ref()
        .is_some_and(|status| status.position == 0 && status.processed_at.is_some())
}

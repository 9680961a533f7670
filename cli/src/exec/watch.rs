//! Which events of a task belong to the turn of one message, and when that turn has ended. Pure.

use std::collections::BTreeSet;

use construct_proto::v1::{Event, Message, TaskError, TaskPhase, TurnOutcome, event::Payload};

use crate::tally::Tally;

/// What an event means for the message.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Seen {
    Nothing,
    /// Its turn has ended.
    Ended {
        outcome: TurnOutcome,
        error: Option<TaskError>,
    },
    /// The message gets no turn: it was taken back, or a cancel dropped it while it waited.
    Gone,
    TaskDeleted,
    /// Nothing more happens until a person resumes the task.
    Suspended,
}

/// Watches for one message.
#[derive(Debug)]
pub(super) struct Watch {
    message: String,
    /// Messages that are answered first.
    ahead: BTreeSet<String>,
    /// Whether the message itself has come by; what came before is of no interest.
    begun: bool,
    tally: Tally,
}

impl Watch {
    pub(super) fn new(message: String, ahead: Vec<String>) -> Self {
        Self { message, ahead: ahead.into_iter().collect(), begun: false, tally: Tally::default() }
    }

    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// Whether what happens now is about the message.
    pub(super) fn is_ours(&self) -> bool {
        self.begun && self.ahead.is_empty()
    }

    /// What the turn came to so far.
    pub(super) fn tally(&self) -> &Tally {
        &self.tally
    }

    pub(super) fn see(&mut self, event: &Event) -> Seen {
        let seen = self.look(event);
        if self.is_ours() {
            self.tally.event(event);
        }
        seen
    }

    fn look(&mut self, event: &Event) -> Seen {
        match &event.payload {
            Some(Payload::Message(message)) if event.r#type == "message.created" => {
                self.begun |=
                    message.metadata.as_ref().is_some_and(|metadata| metadata.id == self.message);
                Seen::Nothing
            }
            Some(Payload::TurnCompleted(turn)) if turn.message_id == self.message => {
                Seen::Ended { outcome: turn.outcome(), error: turn.error.clone() }
            }
            Some(Payload::Message(message))
                if event.r#type == "message.updated" && is_dropped(message) =>
            {
                self.gone(message.metadata.as_ref().map_or("", |metadata| &metadata.id))
            }
            Some(Payload::TurnCompleted(turn)) => {
                self.ahead.remove(&turn.message_id);
                Seen::Nothing
            }
            Some(Payload::PhaseChanged(changed))
                if self.begun && changed.phase() == TaskPhase::Suspended =>
            {
                Seen::Suspended
            }
            Some(Payload::Deleted(_)) if event.r#type == "task.deleted" => Seen::TaskDeleted,
            Some(Payload::Deleted(deleted)) => self.gone(&deleted.id),
            _ => Seen::Nothing,
        }
    }

    /// A message that gets no turn.
    fn gone(&mut self, id: &str) -> Seen {
        self.ahead.remove(id);
        if id == self.message { Seen::Gone } else { Seen::Nothing }
    }
}

/// Whether a message that waited for its turn will never get one, because a cancel dropped it.
pub(crate) fn is_dropped(message: &Message) -> bool {
    message
        .status
        .as_ref()
        .is_some_and(|status| status.position == 0 && status.processed_at.is_some())
}

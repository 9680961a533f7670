//! Which events of a task belong to the turn of one message, and when that turn has ended. Pure.

use std::collections::BTreeSet;

use construct_proto::v1::{Event, TaskError, TaskPhase, TurnOutcome, event::Payload};

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
    /// Another turn was cancelled, and with it what waited: perhaps this message.
    PerhapsDropped,
    /// The message was taken back.
    Withdrawn,
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
                self.begun |= message.metadata.as_ref().is_some_and(|metadata| metadata.id == self.message);
                Seen::Nothing
            }
            Some(Payload::TurnCompleted(turn)) if turn.message_id == self.message => {
                Seen::Ended { outcome: turn.outcome(), error: turn.error.clone() }
            }
            Some(Payload::TurnCompleted(turn)) => {
                self.ahead.remove(&turn.message_id);
                let dropped = self.begun && turn.outcome() == TurnOutcome::Cancelled;
                if dropped { Seen::PerhapsDropped } else { Seen::Nothing }
            }
            Some(Payload::PhaseChanged(changed)) if self.begun && changed.phase() == TaskPhase::Suspended => {
                Seen::Suspended
            }
            Some(Payload::Deleted(deleted)) if deleted.id == self.message => Seen::Withdrawn,
            Some(Payload::Deleted(deleted)) => {
                self.ahead.remove(&deleted.id);
                if event.r#type == "task.deleted" { Seen::TaskDeleted } else { Seen::Nothing }
            }
            _ => Seen::Nothing,
        }
    }
}

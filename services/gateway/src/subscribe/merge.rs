//! Merges three sources into one stream without gap or duplicate: live events, the records in
//! PostgreSQL, and the progress that the bus retains. Pure, without I/O: it names the next
//! [`Action`], and the caller reports the result.
//!
//! # Sources
//!
//! *Live* events are fast, and any of them may be lost. *Records* are complete and numbered 1, 2,
//! 3, …; *progress* is retained for a while and numbered within its step. A worker publishes the
//! progress of a step before the step's result, hence before the record that ends the step.
//!
//! # Catch-up
//!
//! That defines the order of a catch-up:
//!
//! 1. Read the stream's head `H`.
//! 2. Read the progress. It holds everything that belongs before any record up to `H`.
//! 3. Read the records up to `H`. Before each one that ends a step goes the progress of that step.
//! 4. If progress is left, read the head again. Still `H`: all that is left belongs after `H`.
//!    Moved: the progress is too old for the new records, so go back to 2.
//!
//! Without progress left there is nothing to place: records and progress since the two reads were
//! published after listening began, and arrive live in their order. For the same reason the
//! progress of a task that has had no step need not be read, also when its first step begins a
//! moment later: there was none when the head was read.
//!
//! If the publication of the record that begins a step is lost, its progress is shown before the
//! record, which is found a moment later. Waiting for it would delay the first output of every step
//! because of a rare disorder.
//!
//! # Live
//!
//! The subscriber listens live before the first read, so nothing falls between catch-up and live.
//! Each live event is compared with the cursor. An event before it is a duplicate. An event that
//! does not follow it directly means a loss, and leads to another catch-up.

use std::{collections::VecDeque, sync::Arc};

use construct_bus::Position;
use construct_proto::v1::Event;

use super::cursor::Cursor;

#[cfg(test)]
mod tests;

/// The upper half of a progress event's index is the delivery of the command it comes from.
const DELIVERY_SHIFT: u32 = 32;
/// Deliveries count from 1, progress within one from 0.
const FIRST_INDEX: u64 = 1 << DELIVERY_SHIFT;

/// What arrives live.
#[derive(Debug, Clone)]
pub(crate) enum LiveItem {
    /// An event.
    Event(Arc<Event>),
    /// There are records up to this sequence.
    Head(u64),
    /// Something may have been lost.
    Lost,
}

/// What the subscription does next.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// Send this event to the subscriber with this cursor. An event that is filtered out need not
    /// be copied.
    Emit(Arc<Event>, Cursor),
    /// Read the sequence of the newest record: [`Merge::on_head`].
    ReadHead,
    /// Read all retained progress after this: [`Merge::on_progress`].
    ReadProgress(Option<Position>),
    /// Read a page of records after this sequence: [`Merge::on_records`].
    ReadRecords(u64),
    /// Wait for the next live item: [`Merge::on_live`].
    ReceiveLive,
}

/// The cursor lies after the head of the stream: it belongs to another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CursorBeyondHead;

/// The position of an event in its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    Record {
        sequence: u64,
        step: u64,
    },
    Progress {
        step: u64,
        index: u64,
    },
    /// Neither: a defect of the publisher.
    Unplaced,
}

impl Mark {
    /// The mark of an event.
    pub(crate) fn from_event(event: &Event) -> Self {
        match (event.sequence, event.step) {
            (0, 0) => Self::Unplaced,
            (0, step) => Self::Progress { step, index: event.index },
            (sequence, step) => Self::Record { sequence, step },
        }
    }
}

#[derive(Debug)]
pub(crate) struct Merge {
    cursor: Cursor,
    has_progress: bool,
    state: State,
    ready: VecDeque<(Arc<Event>, Cursor)>,
    suspect: Option<Suspect>,
    /// A step whose progress is numbered with gaps: they don't mean a loss.
    gapped_step: Option<u64>,
}

#[derive(Debug)]
enum State {
    /// Finds the newest of the old progress, for a subscription from now on.
    SkipProgress,
    Head,
    Progress {
        head: u64,
    },
    Records {
        head: u64,
        progress: VecDeque<Event>,
    },
    Check {
        progress: VecDeque<Event>,
    },
    Live,
}

/// Live progress that does not follow the cursor. The missing events are read first.
#[derive(Debug)]
struct Suspect {
    event: Arc<Event>,
    step: u64,
    index: u64,
    /// Whether it belongs to the same delivery as the cursor.
    same_delivery: bool,
    /// Whether an event before it was found.
    has_predecessor: bool,
}

impl Merge {
    /// Resumes after `cursor`. Only a task's stream has progress.
    pub(crate) fn resume(cursor: Cursor, has_progress: bool) -> Self {
        Self {
            cursor,
            has_progress,
            state: State::Head,
            ready: VecDeque::new(),
            suspect: None,
            gapped_step: None,
        }
    }

    /// Begins after the record `head`, when `step` is the oldest step that can still have progress.
    /// The head must have been read after listening began: newer events arrive live.
    pub(crate) fn from_now(head: u64, step: u64, has_progress: bool) -> Self {
        let cursor = Cursor { sequence: head, step: step.max(1), ..Cursor::BEGINNING };
        let state = if has_progress { State::SkipProgress } else { State::Live };
        Self { state, ..Self::resume(cursor, has_progress) }
    }

    /// Whether everything that could be read has been emitted.
    pub(crate) fn is_live(&self) -> bool {
        self.ready.is_empty() && matches!(self.state, State::Live)
    }

    /// The position after everything that was emitted or is ready.
    pub(crate) const fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// The next action. Events that are ready are emitted first, so that memory holds one page of
    /// records and the retained progress.
    pub(crate) fn next_action(&mut self) -> Action {
        if let Some((event, cursor)) = self.ready.pop_front() {
            return Action::Emit(event, cursor);
        }
        match &self.state {
            State::Head | State::Check { .. } => Action::ReadHead,
            State::SkipProgress | State::Progress { .. } => {
                Action::ReadProgress(self.last_progress())
            }
            State::Records { .. } => Action::ReadRecords(self.cursor.sequence),
            State::Live => Action::ReceiveLive,
        }
    }

    /// The newest record has this sequence (0: there is none). At the beginning it may be reported
    /// without [`Action::ReadHead`], if it was read after listening began.
    pub(crate) fn on_head(&mut self, head: u64) -> Result<(), CursorBeyondHead> {
        if head < self.cursor.sequence {
            return Err(CursorBeyondHead);
        }
        match std::mem::replace(&mut self.state, State::Live) {
            State::Check { progress } if head == self.cursor.sequence => {
                for event in progress {
                    self.push_progress(Arc::new(event));
                }
                self.go_live();
            }
            State::Head | State::Check { .. } if self.has_progress => {
                self.state = State::Progress { head }
            }
            State::Head | State::Check { .. } => self.begin_records(head, VecDeque::new()),
            other => self.state = other,
        }
        Ok(())
    }

    /// All retained progress after what [`Action::ReadProgress`] named, in order of step and index.
    /// A task that had no step when the head was read has none, and need not be read.
    pub(crate) fn on_progress(&mut self, progress: Vec<Event>) {
        match self.state {
            State::SkipProgress => {
                if let Some(newest) = progress.last() {
                    self.cursor.advance_to_progress(newest.step, newest.index);
                }
                self.state = State::Live;
            }
            State::Progress { head } => self.begin_records(head, progress.into()),
            _ => {}
        }
    }

    /// Records after what [`Action::ReadRecords`] named, in order; empty only if there are none.
    pub(crate) fn on_records(&mut self, records: Vec<Event>) {
        let State::Records { head, mut progress } = std::mem::replace(&mut self.state, State::Live)
        else {
            return;
        };
        if records.is_empty() {
            // Records are only deleted with their task, whose last record stays. Don't read
            // forever.
            self.cursor.sequence = head;
        }
        for record in records {
            let (sequence, step) = (record.sequence, record.step);
            if sequence > head && self.has_progress {
                // The missing records up to the head were deleted with their task meanwhile.
                self.cursor.sequence = head;
                break;
            }
            while let Some(event) = progress.pop_front_if(|event| event.step <= step) {
                self.push_progress(Arc::new(event));
            }
            self.push_record(Arc::new(record), sequence, step);
        }
        self.begin_records(head, progress);
    }

    /// A live item arrived.
    pub(crate) fn on_live(&mut self, item: LiveItem) {
        match item {
            LiveItem::Lost => self.state = State::Head,
            LiveItem::Head(head) if head > self.cursor.sequence => self.state = State::Head,
            LiveItem::Head(_) => {}
            LiveItem::Event(event) => match Mark::from_event(&event) {
                Mark::Record { sequence, .. } if sequence <= self.cursor.sequence => {}
                Mark::Record { sequence, step } if sequence == self.cursor.sequence + 1 => {
                    self.push_record(event, sequence, step);
                }
                Mark::Record { .. } | Mark::Unplaced => self.state = State::Head,
                Mark::Progress { step, index } if self.cursor.is_past(step, index) => {}
                Mark::Progress { step, index } if self.follows(step, index) => {
                    self.push_progress(event)
                }
                Mark::Progress { step, index } => {
                    let delivery = self.cursor.index >> DELIVERY_SHIFT;
                    let same_delivery = step == self.cursor.step
                        && [0, index >> DELIVERY_SHIFT].contains(&delivery);
                    self.suspect =
                        Some(Suspect { event, step, index, same_delivery, has_predecessor: false });
                    self.state = State::Head;
                }
            },
        }
    }

    /// Reads the records up to `head`, then ends the catch-up.
    fn begin_records(&mut self, head: u64, progress: VecDeque<Event>) {
        if self.cursor.sequence < head {
            self.state = State::Records { head, progress };
        } else if !progress.is_empty() {
            self.state = State::Check { progress };
        } else {
            self.go_live();
        }
    }

    fn go_live(&mut self) {
        self.state = State::Live;
        let Some(suspect) = self.suspect.take() else { return };
        if suspect.same_delivery && !suspect.has_predecessor {
            self.gapped_step = Some(suspect.step);
        }
        self.push_progress(suspect.event);
    }

    /// Whether live progress follows the cursor directly. The index counts from 0 within each
    /// delivery of the command, which is in its upper half. A new delivery or step does not follow
    /// directly, because there may be more progress before it. So it leads to a catch-up, unless it
    /// is the first delivery of a step whose predecessor's end was seen.
    fn follows(&self, step: u64, index: u64) -> bool {
        let first = self.cursor.index == 0 && index == FIRST_INDEX;
        step == self.cursor.step
            && (index == self.cursor.index || first || self.gapped_step == Some(step))
    }

    /// The newest seen progress, as a position of the bus.
    fn last_progress(&self) -> Option<Position> {
        match (self.cursor.step, self.cursor.index) {
            (step, 0) if step > 1 => Some(Position { step: step - 1, index: u64::MAX }),
            (_, 0) => None,
            (step, index) => Some(Position { step, index: index - 1 }),
        }
    }

    fn push_progress(&mut self, event: Arc<Event>) {
        if self.cursor.is_past(event.step, event.index) {
            return;
        }
        if let Some(suspect) = &mut self.suspect
            && (event.step, event.index) < (suspect.step, suspect.index)
        {
            suspect.has_predecessor = true;
        }
        self.cursor.advance_to_progress(event.step, event.index);
        self.ready.push_back((event, self.cursor));
    }

    fn push_record(&mut self, event: Arc<Event>, sequence: u64, step: u64) {
        if sequence <= self.cursor.sequence {
            return;
        }
        self.cursor.advance_to_record(sequence, step);
        self.ready.push_back((event, self.cursor));
    }
}

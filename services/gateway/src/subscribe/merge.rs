//! One stream without gap or duplicate, out of three sources: what is live, the records in
//! PostgreSQL, and the progress the bus retains. Pure: it says what it wants next ([`Want`]) and is
//! told what came of it.
//!
//! *Live* is fast and may lose anything. *Records* are complete and numbered 1, 2, 3, …; *progress*
//! is retained for a while and numbered within its step. What a worker says about a step is on the
//! bus before the step's result, hence before the record that ends the step. From that follows the
//! order of a catch-up:
//!
//! 1. read the stream's head `H`;
//! 2. read the progress. It holds everything that belongs before any record up to `H`;
//! 3. read the records up to `H`; before each one that ends a step goes the progress of that step;
//! 4. if progress is left, read the head again. Still `H`: all that is left belongs behind `H`.
//!    Moved: the progress read is too old for the records that came, so go back to 2.
//!
//! Without progress left there is nothing to put in its place: what came since the two reads,
//! records and progress, was published after listening began, and comes live in its order. For the
//! same reason a task that has had no step needs no read of its progress, also when its first step
//! begins a moment later: there was none when the head was read.
//!
//! Should the publication of the record that begins a step be lost, its progress is shown before
//! the record, which is found a moment later: waiting for it would delay every first word for the
//! sake of a rare disorder.
//!
//! The subscriber listens live before the first read, so nothing falls between catch-up and live.
//! Live events are held against the cursor: what lies before it is a duplicate; what does not
//! follow it directly means that something was lost, and leads to another catch-up.

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

/// What arrives while nothing is wanted.
#[derive(Debug, Clone)]
pub(crate) enum Live {
    /// An event.
    Event(Arc<Event>),
    /// Records up to this sequence exist.
    Head(u64),
    /// Something may have been lost.
    Lost,
}

/// What the merge wants next.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Want {
    /// This goes to the subscriber, with this as its cursor. Whoever wants it not need not copy it.
    Emit(Arc<Event>, Cursor),
    /// The sequence of the newest record: [`Merge::on_head`].
    ReadHead,
    /// All retained progress after this: [`Merge::on_progress`].
    ReadProgress(Option<Position>),
    /// A page of the records after this sequence: [`Merge::on_records`].
    ReadRecords(u64),
    /// The next live item: [`Merge::on_live`].
    Live,
}

/// The cursor lies behind the end of the stream: it is of another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ahead;

/// What an event is in the order of its stream.
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
    /// Neither: a defect of who published it.
    Unplaced,
}

impl Mark {
    /// The mark an event carries.
    pub(crate) fn of(event: &Event) -> Self {
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
    /// A step whose progress turned out to be numbered with holes; they mean nothing there.
    holes: Option<u64>,
}

#[derive(Debug)]
enum State {
    /// Finding out how much of the progress is old.
    NowProgress,
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

/// Live progress that does not follow the cursor: what is missing is read first.
#[derive(Debug)]
struct Suspect {
    event: Arc<Event>,
    step: u64,
    index: u64,
    /// Whether it is of the delivery the cursor is in.
    same_delivery: bool,
    /// Whether something before it was found.
    found: bool,
}

impl Merge {
    /// Goes on after `cursor`. Only a task's stream has progress.
    pub(crate) fn resume(cursor: Cursor, has_progress: bool) -> Self {
        Self {
            cursor,
            has_progress,
            state: State::Head,
            ready: VecDeque::new(),
            suspect: None,
            holes: None,
        }
    }

    /// Begins with what happens after the record `head`, when `step` is the oldest step that can
    /// still go on. The head must have been read after listening began: what is newer is heard.
    pub(crate) fn now(head: u64, step: u64, has_progress: bool) -> Self {
        let cursor = Cursor { sequence: head, step: step.max(1), ..Cursor::BEGINNING };
        let state = if has_progress { State::NowProgress } else { State::Live };
        Self { state, ..Self::resume(cursor, has_progress) }
    }

    /// Whether everything that could be read has been emitted.
    pub(crate) fn is_live(&self) -> bool {
        self.ready.is_empty() && matches!(self.state, State::Live)
    }

    /// Where it stands: behind what it has given so far.
    pub(crate) const fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// What to do next. Emits first what is ready, so that memory holds one page of records and
    /// what progress is retained.
    pub(crate) fn want(&mut self) -> Want {
        if let Some((event, cursor)) = self.ready.pop_front() {
            return Want::Emit(event, cursor);
        }
        match &self.state {
            State::Head | State::Check { .. } => Want::ReadHead,
            State::NowProgress | State::Progress { .. } => Want::ReadProgress(self.seen_progress()),
            State::Records { .. } => Want::ReadRecords(self.cursor.sequence),
            State::Live => Want::Live,
        }
    }

    /// The newest record has this sequence (0: there is none). May be told unasked at the
    /// beginning, if it was read after listening began.
    pub(crate) fn on_head(&mut self, head: u64) -> Result<(), Ahead> {
        if head < self.cursor.sequence {
            return Err(Ahead);
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

    /// All retained progress after what [`Want::ReadProgress`] named, in order of step and index.
    /// Of a task that has had no step when the head was read, that is none, and need not be read.
    pub(crate) fn on_progress(&mut self, progress: Vec<Event>) {
        match self.state {
            State::NowProgress => {
                if let Some(newest) = progress.last() {
                    self.cursor.past_progress(newest.step, newest.index);
                }
                self.state = State::Live;
            }
            State::Progress { head } => self.begin_records(head, progress.into()),
            _ => {}
        }
    }

    /// Records after what [`Want::ReadRecords`] named, in order; none only if there is none.
    pub(crate) fn on_records(&mut self, records: Vec<Event>) {
        let State::Records { head, mut progress } = std::mem::replace(&mut self.state, State::Live)
        else {
            return;
        };
        if records.is_empty() {
            // Records never vanish except with their task, of which the last one stays. Don't read
            // for ever.
            self.cursor.sequence = head;
        }
        for record in records {
            let (sequence, step) = (record.sequence, record.step);
            if sequence > head && self.has_progress {
                // What is missing up to the head went with its task, while this was read.
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

    /// Something came live.
    pub(crate) fn on_live(&mut self, live: Live) {
        match live {
            Live::Lost => self.state = State::Head,
            Live::Head(head) if head > self.cursor.sequence => self.state = State::Head,
            Live::Head(_) => {}
            Live::Event(event) => match Mark::of(&event) {
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
                        Some(Suspect { event, step, index, same_delivery, found: false });
                    self.state = State::Head;
                }
            },
        }
    }

    /// Reads records while there are any up to `head`, then ends the catch-up.
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
        if suspect.same_delivery && !suspect.found {
            self.holes = Some(suspect.step);
        }
        self.push_progress(suspect.event);
    }

    /// Whether live progress follows the cursor directly. The index counts from 0 within each
    /// delivery of the command, which stands in its upper half. A new delivery or step follows
    /// nothing, because what came before may have gone on: so it leads to a catch-up, unless it is
    /// the first delivery of a step whose predecessor's end was seen.
    fn follows(&self, step: u64, index: u64) -> bool {
        let first = self.cursor.index == 0 && index == FIRST_INDEX;
        step == self.cursor.step
            && (index == self.cursor.index || first || self.holes == Some(step))
    }

    /// The newest progress that was seen, as the bus wants to know it.
    fn seen_progress(&self) -> Option<Position> {
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
            suspect.found = true;
        }
        self.cursor.past_progress(event.step, event.index);
        self.ready.push_back((event, self.cursor));
    }

    fn push_record(&mut self, event: Arc<Event>, sequence: u64, step: u64) {
        if sequence <= self.cursor.sequence {
            return;
        }
        self.cursor.past_record(sequence, step);
        self.ready.push_back((event, self.cursor));
    }
}

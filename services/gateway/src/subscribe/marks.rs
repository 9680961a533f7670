//! From where a catch-up reads the retained progress: behind what it need not look at again.
//!
//! What was read by a catch-up that came to its end is known. But most subscriptions hear
//! everything live, for hours, and the one catch-up that a lost message leads to would read all
//! that was said meanwhile, only to leave it out. So the process looks every few seconds how far
//! the streams go ([`Past::end`]), and only then how far the records do ([`Past::head`]). Progress
//! of a step is published after the record that begins the step is committed, so what is stored up
//! to that end is of steps that those records begin: of the one that is open for who has just
//! passed them, or of older ones. As soon as a record ends that step, the end is from where to
//! read.

use construct_bus::Bookmark;

use super::cursor::Cursor;

/// How far the streams went at some moment, and the records at a later one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Past {
    /// The end of the streams that keep progress.
    pub(super) end: Bookmark,
    /// The newest record's sequence.
    pub(super) head: u64,
}

/// What of the progress a subscription need not read.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// Up to here it was sent, or needs no sending.
    done: Bookmark,
    /// What the catch-up at work has read. It counts only when the catch-up is at its end: until
    /// then the merge may drop what it was told, and want to read it again.
    reading: Option<Bookmark>,
    /// An end that is to be gone on from once this step has ended.
    next: Option<(Bookmark, u64)>,
}

impl Marks {
    /// From where to read.
    pub(super) const fn start(&self) -> Bookmark {
        self.done
    }

    /// A catch-up has read so far.
    pub(super) const fn read(&mut self, until: Bookmark) {
        self.reading = Some(until);
    }

    /// Nothing is left to catch up with, and the subscription stands there.
    pub(super) fn live(&mut self, cursor: Cursor, past: Past) {
        if let Some(read) = self.reading.take() {
            (self.done, self.next) = (read, None);
        }
        if let Some((end, step)) = self.next
            && cursor.step > step
        {
            (self.done, self.next) = (end, None);
        }
        if self.next.is_none() && past.end != self.done && past.head <= cursor.sequence {
            self.next = Some((past.end, cursor.step));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(sequence: u64, step: u64) -> Cursor {
        Cursor { sequence, step, index: 7 }
    }

    fn past(end: u64, head: u64) -> Past {
        Past { end: Bookmark::of_tests(end), head }
    }

    #[test]
    fn finished_catch_up_advances_the_start() {
        let mut marks = Marks::default();
        marks.read(Bookmark::of_tests(5));
        assert_eq!(marks.start(), Bookmark::default());
        marks.read(Bookmark::of_tests(9));
        marks.live(at(3, 1), Past::default());
        assert_eq!(marks.start(), Bookmark::of_tests(9));
    }

    #[test]
    fn stream_end_counts_once_the_open_step_has_ended() {
        let mut marks = Marks::default();
        // The records that were there are not passed yet: any step may have spoken.
        marks.live(at(3, 2), past(50, 4));
        marks.live(at(3, 3), past(50, 4));
        assert_eq!(marks.start(), Bookmark::default());
        // Step 4 is open now, and may have said something before the end.
        marks.live(at(4, 4), past(50, 4));
        marks.live(at(6, 4), past(60, 6));
        assert_eq!(marks.start(), Bookmark::default());
        marks.live(at(7, 5), past(60, 6));
        assert_eq!(marks.start(), Bookmark::of_tests(50));
        // The next one is waited for from there on.
        marks.live(at(8, 5), past(60, 6));
        assert_eq!(marks.start(), Bookmark::of_tests(50));
        marks.live(at(9, 6), past(60, 6));
        assert_eq!(marks.start(), Bookmark::of_tests(60));
    }

    #[test]
    fn older_stream_end_does_not_replace_a_catch_up() {
        let mut marks = Marks::default();
        marks.live(at(4, 4), past(50, 4));
        marks.read(Bookmark::of_tests(70));
        marks.live(at(9, 6), past(50, 4));
        assert_eq!(marks.start(), Bookmark::of_tests(70));
    }
}

//! Where a catch-up begins to read the retained progress: after everything that it can skip.
//!
//! Progress that a completed catch-up has read can be skipped. But most subscriptions receive
//! everything live, for hours. The one catch-up after a lost message would read all progress since
//! then, only to discard it. So the process reads every few seconds the end of the streams
//! ([`StreamEnds::progress`]), and after it the newest record ([`StreamEnds::head`]).
//!
//! Progress of a step is published after the record that begins the step is committed. So all
//! progress stored up to that end belongs to steps that these records begin: for a subscriber that
//! has just passed the records, to the open step or to older ones. As soon as a record ends the
//! open step, a catch-up can begin at that end.

use construct_bus::Bookmark;

use super::cursor::Cursor;

/// The end of the streams with progress at some moment, and the newest record at a later moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct StreamEnds {
    /// The end of the streams that retain progress.
    pub(super) progress: Bookmark,
    /// The sequence of the newest record.
    pub(super) head: u64,
}

/// The progress that a subscription need not read.
#[derive(Debug, Default)]
pub(super) struct ReplayStart {
    /// Up to here progress was sent, or need not be sent.
    done: Bookmark,
    /// How far the current catch-up has read. It counts only when the catch-up is complete: until
    /// then the merge may discard what was read, and read it again.
    reading: Option<Bookmark>,
    /// An end that becomes the start once this step has ended.
    next: Option<(Bookmark, u64)>,
}

impl ReplayStart {
    /// Where to begin to read.
    pub(super) const fn position(&self) -> Bookmark {
        self.done
    }

    /// A catch-up has read up to here.
    pub(super) const fn on_read(&mut self, until: Bookmark) {
        self.reading = Some(until);
    }

    /// The catch-up is complete, and the subscription is at this cursor.
    pub(super) fn on_live(&mut self, cursor: Cursor, ends: StreamEnds) {
        if let Some(read) = self.reading.take() {
            (self.done, self.next) = (read, None);
        }
        if let Some((end, step)) = self.next
            && cursor.step > step
        {
            (self.done, self.next) = (end, None);
        }
        if self.next.is_none() && ends.progress != self.done && ends.head <= cursor.sequence {
            self.next = Some((ends.progress, cursor.step));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn cursor(sequence: u64, step: u64) -> Cursor {
        Cursor { sequence, step, index: 7 }
    }

    fn ends(progress: u64, head: u64) -> StreamEnds {
        StreamEnds { progress: Bookmark::for_tests(progress), head }
    }

    #[test]
    fn finished_catch_up_advances_the_start() {
        let mut start = ReplayStart::default();
        start.on_read(Bookmark::for_tests(5));
        assert_eq!(start.position(), Bookmark::default());
        start.on_read(Bookmark::for_tests(9));
        start.on_live(cursor(3, 1), StreamEnds::default());
        assert_eq!(start.position(), Bookmark::for_tests(9));
    }

    #[test]
    fn stream_end_counts_once_the_open_step_has_ended() {
        let mut start = ReplayStart::default();
        // The subscriber has not passed all records yet: any step may have progress before the end.
        start.on_live(cursor(3, 2), ends(50, 4));
        start.on_live(cursor(3, 3), ends(50, 4));
        assert_eq!(start.position(), Bookmark::default());
        // Step 4 is open now, and may have progress before the end.
        start.on_live(cursor(4, 4), ends(50, 4));
        start.on_live(cursor(6, 4), ends(60, 6));
        assert_eq!(start.position(), Bookmark::default());
        start.on_live(cursor(7, 5), ends(60, 6));
        assert_eq!(start.position(), Bookmark::for_tests(50));
        // The next end counts after the step that is open now.
        start.on_live(cursor(8, 5), ends(60, 6));
        assert_eq!(start.position(), Bookmark::for_tests(50));
        start.on_live(cursor(9, 6), ends(60, 6));
        assert_eq!(start.position(), Bookmark::for_tests(60));
    }

    #[test]
    fn older_stream_end_does_not_replace_a_catch_up() {
        let mut start = ReplayStart::default();
        start.on_live(cursor(4, 4), ends(50, 4));
        start.on_read(Bookmark::for_tests(70));
        start.on_live(cursor(9, 6), ends(50, 4));
        assert_eq!(start.position(), Bookmark::for_tests(70));
    }
}

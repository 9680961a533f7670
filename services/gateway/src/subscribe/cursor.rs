//! The position of a subscriber in a stream of events.

use std::{fmt, str::FromStr};

/// A position between two events: after record `sequence`, and before progress `index` of step
/// `step`.
///
/// Its text is `<sequence>.<step>.<index>`; clients treat it as opaque. `0` is the beginning.
/// Everything before the position has been seen, everything after it has not. So one triple says
/// which events of both kinds are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// The last record seen; 0 when none.
    pub(crate) sequence: u64,
    /// The first step that can still have progress. Steps count from 1.
    pub(crate) step: u64,
    /// The first unseen index of that step's progress.
    pub(crate) index: u64,
}

/// The text is not a cursor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "is not a cursor: pass the `cursor` of an event, `0` for the beginning, or nothing for new events only"
)]
pub(crate) struct Invalid;

impl Cursor {
    /// Before everything.
    pub(crate) const BEGINNING: Self = Self { sequence: 0, step: 1, index: 0 };

    /// Moves past progress `index` of `step`.
    pub(crate) fn advance_to_progress(&mut self, step: u64, index: u64) {
        self.step = step;
        self.index = index.saturating_add(1);
    }

    /// Moves past record `sequence`. If it names a `step`, that step and its progress have ended.
    pub(crate) fn advance_to_record(&mut self, sequence: u64, step: u64) {
        self.sequence = sequence;
        if step >= self.step {
            self.step = step.saturating_add(1);
            self.index = 0;
        }
    }

    /// Whether progress `index` of `step` lies before this position.
    pub(crate) fn is_past(&self, step: u64, index: u64) -> bool {
        (step, index) < (self.step, self.index)
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.sequence, self.step, self.index)
    }
}

impl FromStr for Cursor {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        if text == "0" {
            return Ok(Self::BEGINNING);
        }
        let mut parts = text.splitn(3, '.').map(|part| part.parse::<u64>().map_err(|_| Invalid));
        let mut next = || parts.next().unwrap_or(Err(Invalid));
        let cursor = Self { sequence: next()?, step: next()?, index: next()? };
        // Only cursors as `Display` prints them: no signs, no leading zeros, no step 0.
        if cursor.step == 0 || cursor.to_string() != text { Err(Invalid) } else { Ok(cursor) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_issued_cursors_are_accepted() {
        assert_eq!("0".parse(), Ok(Cursor::BEGINNING));
        assert_eq!(
            "7.2.4294967300".parse(),
            Ok(Cursor { sequence: 7, step: 2, index: 4_294_967_300 })
        );
        for text in [
            "",
            "1",
            "00",
            "1.1",
            "1.1.1.1",
            "+1.1.1",
            "01.1.1",
            "1.0.0",
            "a.b.c",
            "1.1.-1",
            "1.1.18446744073709551616",
        ] {
            assert_eq!(text.parse::<Cursor>(), Err(Invalid), "{text}");
        }
    }

    #[test]
    fn record_that_ends_a_step_ends_its_progress() {
        let mut cursor = Cursor::BEGINNING;
        cursor.advance_to_record(1, 0);
        cursor.advance_to_progress(1, 5);
        assert!(cursor.is_past(1, 5) && !cursor.is_past(1, 6));
        cursor.advance_to_record(2, 1);
        assert_eq!(cursor, Cursor { sequence: 2, step: 2, index: 0 });
        assert!(cursor.is_past(1, u64::MAX));
        cursor.advance_to_progress(4, 0);
        cursor.advance_to_record(3, 2);
        assert_eq!(cursor, Cursor { sequence: 3, step: 4, index: 1 });
    }

    proptest! {
        #[test]
        fn cursor_round_trips_as_text(sequence: u64, step in 1_u64.., index: u64) {
            let cursor = Cursor { sequence, step, index };
            prop_assert_eq!(cursor.to_string().parse(), Ok(cursor));
        }
    }
}

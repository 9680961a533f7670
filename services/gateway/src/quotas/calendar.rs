//! Days and months that quotas are counted in.

use construct_store::Periods;
use jiff::Timestamp;

/// Whose days and months they are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Calendar {
    /// Those of UTC.
    #[default]
    Utc,
    /// One day and one month that nothing leaves: what a test does must not be of two days because
    /// it runs at midnight.
    #[cfg(test)]
    Fixed(Periods),
}

impl Calendar {
    /// The day and the month that a time is in.
    pub(crate) fn periods(self, now: Timestamp) -> Periods {
        match self {
            Self::Utc => Periods::containing(now),
            #[cfg(test)]
            Self::Fixed(periods) => periods,
        }
    }

    /// A day that began twelve hours ago, in a month that began twelve days ago.
    #[cfg(test)]
    pub(crate) fn around(now: Timestamp) -> Self {
        let hours = jiff::SignedDuration::from_hours;
        Self::Fixed(Periods {
            day: now - hours(12),
            next_day: now + hours(12),
            month: now - hours(12 * 24),
            next_month: now + hours(12 * 24),
        })
    }
}

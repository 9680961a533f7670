//! The days and months of quotas.

use construct_store::Periods;
use jiff::Timestamp;

/// Determines days and months.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Calendar {
    /// Days and months of UTC.
    #[default]
    Utc,
    /// One fixed day and month, so that a test does not depend on whether it runs at midnight.
    #[cfg(test)]
    Fixed(Periods),
}

impl Calendar {
    /// The day and the month of a time.
    pub(crate) fn periods(self, now: Timestamp) -> Periods {
        match self {
            Self::Utc => Periods::containing(now),
            #[cfg(test)]
            Self::Fixed(periods) => periods,
        }
    }

    /// A day that started twelve hours ago, in a month that started twelve days ago.
    #[cfg(test)]
    pub(crate) fn fixed_around(now: Timestamp) -> Self {
        let hours = jiff::SignedDuration::from_hours;
        Self::Fixed(Periods {
            day: now - hours(12),
            next_day: now + hours(12),
            month: now - hours(12 * 24),
            next_month: now + hours(12 * 24),
        })
    }
}

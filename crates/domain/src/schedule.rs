//! When scheduled messages are due: pure arithmetic of time zones, patterns and missed runs.

use std::{collections::VecDeque, time::Duration};

use cronexpr::{Crontab, MakeTimestamp};
use jiff::{SignedDuration, Timestamp, civil, tz::TimeZone};
use serde::{Deserialize, Serialize};

#[cfg(test)]
mod tests;

/// A run that comes later than this after its time was missed. Longer than any usual restart, so
/// that those cost nothing.
pub const LATE: Duration = Duration::from_secs(60);
/// Missed runs that are made up for at most; older ones are passed over.
pub const CATCH_UP: usize = 100;
/// Longest pattern, in bytes.
pub const PATTERN_BYTES: usize = 256;

/// How far back the runs that were missed are looked for, from the present: the first span that
/// holds enough of them ends the search, so that a year's absence of a schedule that runs every
/// minute costs no more than an hour's.
const SPANS: [SignedDuration; 4] = [
    SignedDuration::from_hours(1),
    SignedDuration::from_hours(24),
    SignedDuration::from_hours(31 * 24),
    SignedDuration::MAX,
];
/// More than clocks are ever turned by.
const TURNED: SignedDuration = SignedDuration::from_hours(3);

/// Why a pattern or time zone cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// The pattern.
    #[error("{0}")]
    Pattern(String),
    /// The time zone.
    #[error("there is no time zone `{0}`; names are those of IANA, e.g. `Europe/Berlin`")]
    TimeZone(String),
}

/// What becomes of runs that were missed because nobody was there to make them, or the database was
/// away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Missed {
    /// Nothing.
    Skip,
    /// However many were missed, one is made.
    #[default]
    Once,
    /// Each is made, the newest [`CATCH_UP`] of them.
    All,
}

impl Missed {
    /// As stored.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Skip => "skip",
            Self::Once => "once",
            Self::All => "all",
        }
    }

    /// Reads what [`Missed::as_str`] wrote.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Skip, Self::Once, Self::All].into_iter().find(|missed| missed.as_str() == text)
    }
}

/// When something is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Timing {
    /// Once.
    At(Timestamp),
    /// Again and again.
    Cron {
        /// Minute, hour, day of the month, month, day of the week.
        pattern: String,
        /// Its name, e.g. `Europe/Berlin`.
        time_zone: String,
    },
}

/// What is to be done about a schedule that is due.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// The runs to make, in order.
    pub make: Vec<Timestamp>,
    /// The first of those that are passed over.
    pub passed_over: Option<Timestamp>,
    /// When to look again; none: it is over.
    pub next: Option<Timestamp>,
}

/// A pattern in its time zone.
///
/// Clocks that are turned are treated as cron does: a run at a fixed hour happens once on each day
/// that the pattern names, an hour later when its time is left out, and at the first of the two
/// when its time comes twice. A run at every so-many minutes or hours follows real time.
#[derive(Debug)]
struct Pattern {
    crontab: Crontab,
    zone: TimeZone,
    /// Whether the hours are named one by one.
    fixed: bool,
}

impl Pattern {
    fn read(pattern: &str, time_zone: &str) -> Result<Self, Invalid> {
        let zone = TimeZone::get(time_zone).map_err(|_| Invalid::TimeZone(time_zone.to_owned()))?;
        let fields: Vec<&str> = pattern.split_ascii_whitespace().collect();
        let [_, hours, ..] = fields.as_slice() else { return Err(shape(fields.len())) };
        if fields.len() != 5 || pattern.len() > PATTERN_BYTES {
            return Err(shape(fields.len()));
        }
        let fixed = !hours.contains('*');
        // Fixed hours are found on a clock that is never turned, and then looked up in the zone.
        let of = if fixed { "UTC" } else { time_zone };
        let crontab = cronexpr::parse_crontab(&format!("{} {of}", fields.join(" ")))
            .map_err(|error| Invalid::Pattern(error.to_string()))?;
        Ok(Self { crontab, zone, fixed })
    }

    /// The first run after `time`. None when there is none within four years.
    fn after(&self, time: Timestamp) -> Option<Timestamp> {
        if !self.fixed {
            return Some(self.crontab.find_next(MakeTimestamp(time)).ok()?.timestamp());
        }
        let civil = self.zone.to_datetime(time.checked_sub(TURNED).ok()?);
        let mut clock = civil_to_utc(civil)?;
        loop {
            let next = self.crontab.find_next(MakeTimestamp(clock)).ok()?;
            clock = next.timestamp();
            let found = self.zone.to_timestamp(next.datetime()).ok()?;
            if found > time {
                return Some(found);
            }
        }
    }
}

fn shape(fields: usize) -> Invalid {
    Invalid::Pattern(format!(
        "must have five fields, minute hour day-of-month month day-of-week, in at most {PATTERN_BYTES} bytes; has {fields}"
    ))
}

fn civil_to_utc(civil: civil::DateTime) -> Option<Timestamp> {
    TimeZone::UTC.to_timestamp(civil).ok()
}

impl Timing {
    /// The first run after `time`; none when there is none any more (of a pattern: none within four
    /// years).
    ///
    /// # Errors
    /// When the pattern or the time zone cannot be used.
    pub fn after(&self, time: Timestamp) -> Result<Option<Timestamp>, Invalid> {
        match self {
            Self::At(at) => Ok(Some(*at).filter(|at| *at > time)),
            Self::Cron { pattern, time_zone } => Ok(Pattern::read(pattern, time_zone)?.after(time)),
        }
    }

    /// What to do at `now` about a schedule whose next run is `due`.
    ///
    /// # Errors
    /// When the pattern or the time zone cannot be used (any more).
    pub fn plan(&self, missed: Missed, due: Timestamp, now: Timestamp) -> Result<Plan, Invalid> {
        if due > now {
            return Ok(Plan { next: Some(due), ..Plan::default() });
        }
        let wanted = if missed == Missed::All { CATCH_UP } else { 1 };
        let (mut runs, next) = match self {
            Self::At(_) => (VecDeque::from([due]), None),
            Self::Cron { pattern, time_zone } => {
                let pattern = Pattern::read(pattern, time_zone)?;
                (newest(&pattern, due, now, wanted), pattern.after(now))
            }
        };
        let is_late = |run: &Timestamp| {
            now.duration_since(*run) > SignedDuration::try_from(LATE).unwrap_or_default()
        };
        if missed == Missed::Skip {
            runs.retain(|run| !is_late(run));
        }
        let passed_over = Some(due).filter(|due| runs.front() != Some(due));
        Ok(Plan { make: runs.into(), passed_over, next })
    }
}

/// The newest `wanted` runs from `due` to `now`.
fn newest(pattern: &Pattern, due: Timestamp, now: Timestamp, wanted: usize) -> VecDeque<Timestamp> {
    let mut runs = VecDeque::new();
    for span in SPANS {
        runs.clear();
        let begin = now.checked_sub(span).unwrap_or(Timestamp::MIN).max(due);
        // Patterns know minutes, so that nothing lies between a run and the moment before it.
        let mut at = begin.checked_sub(SignedDuration::from_nanos(1)).unwrap_or(begin);
        while let Some(run) = pattern.after(at).filter(|run| *run <= now) {
            if runs.len() == wanted {
                runs.pop_front();
            }
            runs.push_back(run);
            at = run;
        }
        if runs.len() == wanted || begin == due {
            break;
        }
    }
    runs
}

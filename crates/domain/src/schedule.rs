//! When scheduled runs are due: pure arithmetic of time zones, patterns and missed runs.

use std::{collections::VecDeque, time::Duration};

use cronexpr::{Crontab, MakeTimestamp};
use jiff::{SignedDuration, Timestamp, civil, tz::TimeZone};
use serde::{Deserialize, Serialize};

#[cfg(test)]
mod tests;

/// A run that starts later than this after its time counts as missed. Longer than a usual restart,
/// so that restarts miss no runs.
pub const MISSED_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of missed runs that are caught up; older ones are skipped.
pub const MAX_CATCH_UP_RUNS: usize = 100;
/// Maximum length of a pattern in bytes.
pub const MAX_PATTERN_BYTES: usize = 256;

/// Time spans before the present that are searched for missed runs. The first span with enough runs
/// ends the search, so that a year's absence of a schedule that runs every minute costs no more
/// than an hour's.
const SEARCH_SPANS: [SignedDuration; 4] = [
    SignedDuration::from_hours(1),
    SignedDuration::from_hours(24),
    SignedDuration::from_hours(31 * 24),
    SignedDuration::MAX,
];
/// Longer than any clock change, such as daylight saving time.
const MAX_CLOCK_CHANGE: SignedDuration = SignedDuration::from_hours(3);

/// Why a pattern or time zone is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTiming {
    /// The pattern is invalid.
    #[error("{0}")]
    Pattern(String),
    /// The time zone is unknown.
    #[error("there is no time zone `{0}`; names are those of IANA, e.g. `Europe/Berlin`")]
    TimeZone(String),
}

/// What happens to runs that were missed because no reconciler was running, or the database was
/// down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissedRunPolicy {
    /// They are skipped.
    Skip,
    /// One run is made for all of them.
    #[default]
    Once,
    /// Every run is made, at most the newest [`MAX_CATCH_UP_RUNS`].
    All,
}

impl MissedRunPolicy {
    /// As stored.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Skip => "skip",
            Self::Once => "once",
            Self::All => "all",
        }
    }

    /// Reads what [`MissedRunPolicy::as_str`] wrote.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Skip, Self::Once, Self::All].into_iter().find(|missed| missed.as_str() == text)
    }
}

/// When a schedule is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Timing {
    /// Once, at this time.
    At(Timestamp),
    /// Repeatedly, by a cron pattern.
    Cron {
        /// Minute, hour, day of the month, month, day of the week.
        pattern: String,
        /// The IANA name of the time zone, e.g. `Europe/Berlin`.
        time_zone: String,
    },
}

/// What to do about a schedule that is due.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// The runs to make, in order.
    pub runs: Vec<Timestamp>,
    /// The time of the first skipped run.
    pub first_skipped: Option<Timestamp>,
    /// Time of the next run; `None`: the schedule has ended.
    pub next: Option<Timestamp>,
}

/// A pattern in its time zone.
///
/// Clock changes are handled as cron does. A run at fixed hours happens once on each day that the
/// pattern names: an hour later when its time is skipped, and at the first of the two when its time
/// occurs twice. A run every so many minutes or hours follows real time.
#[derive(Debug)]
struct Pattern {
    crontab: Crontab,
    zone: TimeZone,
    /// Whether the pattern lists fixed hours.
    has_fixed_hours: bool,
}

impl Pattern {
    fn parse(pattern: &str, time_zone: &str) -> Result<Self, InvalidTiming> {
        let zone =
            TimeZone::get(time_zone).map_err(|_| InvalidTiming::TimeZone(time_zone.to_owned()))?;
        let fields: Vec<&str> = pattern.split_ascii_whitespace().collect();
        let [_, hours, ..] = fields.as_slice() else { return Err(invalid_shape(fields.len())) };
        if fields.len() != 5 || pattern.len() > MAX_PATTERN_BYTES {
            return Err(invalid_shape(fields.len()));
        }
        let fixed = !hours.contains('*');
        // Fixed hours are computed on a clock without changes, and then converted to the zone.
        let zone_name = if fixed { "UTC" } else { time_zone };
        let crontab = cronexpr::parse_crontab(&format!("{} {zone_name}", fields.join(" ")))
            .map_err(|error| InvalidTiming::Pattern(error.to_string()))?;
        Ok(Self { crontab, zone, has_fixed_hours: fixed })
    }

    /// The first run after `time`. `None` when there is none within four years.
    fn next_after(&self, time: Timestamp) -> Option<Timestamp> {
        if !self.has_fixed_hours {
            return Some(self.crontab.find_next(MakeTimestamp(time)).ok()?.timestamp());
        }
        let civil = self.zone.to_datetime(time.checked_sub(MAX_CLOCK_CHANGE).ok()?);
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

fn invalid_shape(fields: usize) -> InvalidTiming {
    InvalidTiming::Pattern(format!(
        "must have five fields, minute hour day-of-month month day-of-week, in at most {MAX_PATTERN_BYTES} bytes; has {fields}"
    ))
}

fn civil_to_utc(civil: civil::DateTime) -> Option<Timestamp> {
    TimeZone::UTC.to_timestamp(civil).ok()
}

impl Timing {
    /// The first run after `time`; `None` when there is no further run (of a pattern: within four
    /// years).
    ///
    /// # Errors
    /// When the pattern or the time zone is invalid.
    pub fn next_after(&self, time: Timestamp) -> Result<Option<Timestamp>, InvalidTiming> {
        match self {
            Self::At(at) => Ok(Some(*at).filter(|at| *at > time)),
            Self::Cron { pattern, time_zone } => {
                Ok(Pattern::parse(pattern, time_zone)?.next_after(time))
            }
        }
    }

    /// Plans what to do at `now` about a schedule whose next run is `due`.
    ///
    /// # Errors
    /// When the pattern or the time zone is invalid, or no longer valid.
    pub fn plan(
        &self,
        missed: MissedRunPolicy,
        due: Timestamp,
        now: Timestamp,
    ) -> Result<Plan, InvalidTiming> {
        if due > now {
            return Ok(Plan { next: Some(due), ..Plan::default() });
        }
        let limit = if missed == MissedRunPolicy::All { MAX_CATCH_UP_RUNS } else { 1 };
        let (mut runs, next) = match self {
            Self::At(_) => (VecDeque::from([due]), None),
            Self::Cron { pattern, time_zone } => {
                let pattern = Pattern::parse(pattern, time_zone)?;
                (newest_runs(&pattern, due, now, limit), pattern.next_after(now))
            }
        };
        let is_late = |run: &Timestamp| {
            now.duration_since(*run) > SignedDuration::try_from(MISSED_AFTER).unwrap_or_default()
        };
        if missed == MissedRunPolicy::Skip {
            runs.retain(|run| !is_late(run));
        }
        let first_skipped = Some(due).filter(|due| runs.front() != Some(due));
        Ok(Plan { runs: runs.into(), first_skipped, next })
    }
}

/// The newest `limit` runs from `due` to `now`.
fn newest_runs(
    pattern: &Pattern,
    due: Timestamp,
    now: Timestamp,
    limit: usize,
) -> VecDeque<Timestamp> {
    let mut runs = VecDeque::new();
    for span in SEARCH_SPANS {
        runs.clear();
        let begin = now.checked_sub(span).unwrap_or(Timestamp::MIN).max(due);
        // Patterns have minute resolution, so nothing lies between a run and the moment before it.
        let mut at = begin.checked_sub(SignedDuration::from_nanos(1)).unwrap_or(begin);
        while let Some(run) = pattern.next_after(at).filter(|run| *run <= now) {
            if runs.len() == limit {
                runs.pop_front();
            }
            runs.push_back(run);
            at = run;
        }
        if runs.len() == limit || begin == due {
            break;
        }
    }
    runs
}

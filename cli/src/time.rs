//! Parses and formats times and durations for people.

use std::time::Duration;

use jiff::{Timestamp, tz::TimeZone};

/// Reads a protobuf time. None when it is unset or out of range.
pub(crate) fn read(time: Option<&prost_types::Timestamp>) -> Option<Timestamp> {
    time.and_then(|time| Timestamp::new(time.seconds, time.nanos).ok())
}

/// Converts a time to protobuf.
pub(crate) fn write(time: Timestamp) -> prost_types::Timestamp {
    prost_types::Timestamp { seconds: time.as_second(), nanos: time.subsec_nanosecond() }
}

/// Parses a time, `2026-11-21T22:55:00Z`, or how long ago it was: `2h`, `7d`.
///
/// # Errors
/// A message for people.
pub(crate) fn parse_past(text: &str) -> Result<Timestamp, String> {
    if let Ok(time) = text.parse() {
        return Ok(time);
    }
    let ago = parse_duration(text).map_err(|_| {
        "write a time like 2026-11-21T22:55:00Z, or how long ago: 2h, 7d".to_owned()
    })?;
    Timestamp::now().checked_sub(ago).map_err(|_| "that is too long ago".to_owned())
}

/// Parses a duration: `500ms`, `60s`, `5m`, `2h`, `7d`.
///
/// # Errors
/// A message for people.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    const INVALID: &str = "write a number and its unit: 500ms, 60s, 5m, 2h or 7d";
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| INVALID)?;
    let millis = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(INVALID.to_owned()),
    };
    // A bound with which no clock overflows.
    const MAX_MILLIS: u64 = 100 * 365 * 86_400_000;
    number
        .checked_mul(millis)
        .filter(|&millis| millis <= MAX_MILLIS)
        .map(Duration::from_millis)
        .ok_or_else(|| INVALID.to_owned())
}

/// Formats the coarse distance between two times in any order: `5s`, `12m`, `3h`, `8d`.
pub(crate) fn distance(a: Timestamp, b: Timestamp) -> String {
    match a.duration_since(b).unsigned_abs().as_secs() {
        seconds @ 0..120 => format!("{seconds}s"),
        seconds @ 120..7_200 => format!("{}m", seconds / 60),
        seconds @ 7_200..172_800 => format!("{}h", seconds / 3_600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

/// Formats a time relative to now: `5s ago`, `in 3m`, `now`.
pub(crate) fn relative(time: Timestamp, now: Timestamp) -> String {
    let text = distance(time, now);
    match time.cmp(&now) {
        _ if text == "0s" => "now".to_owned(),
        std::cmp::Ordering::Less => format!("{text} ago"),
        std::cmp::Ordering::Equal | std::cmp::Ordering::Greater => format!("in {text}"),
    }
}

/// Formats a time in the system's time zone, to the second.
pub(crate) fn local(time: Timestamp) -> String {
    time.to_zoned(TimeZone::system()).strftime("%Y-%m-%d %H:%M:%S").to_string()
}

/// Formats the time of day in the system's time zone, to the millisecond.
pub(crate) fn clock(time: Timestamp) -> String {
    time.to_zoned(TimeZone::system()).strftime("%H:%M:%S%.3f").to_string()
}

/// Formats a measured duration: `820 µs`, `12 ms`, `1.2 s`, `2 min 5 s`.
pub(crate) fn measured(micros: i64) -> String {
    match micros {
        ..1_000 => format!("{micros} µs"),
        1_000..1_000_000 => format!("{} ms", micros / 1_000),
        1_000_000..60_000_000 => {
            format!("{}.{} s", micros / 1_000_000, micros % 1_000_000 / 100_000)
        }
        _ => format!("{} min {} s", micros / 60_000_000, micros % 60_000_000 / 1_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("5m"), Ok(Duration::from_secs(300)));
        for text in ["", "5", "s", "-1s", "1.5s", "5 s", "99999999999999999999d", "999999999d"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_formatted_by_distance() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let before = |seconds: i64| Timestamp::from_second(1_000_000 - seconds).unwrap();
        assert_eq!(relative(now, now), "now");
        assert_eq!(relative(before(90), now), "90s ago");
        assert_eq!(relative(before(-600), now), "in 10m");
        assert_eq!(distance(before(9_000), now), "2h");
        assert_eq!(distance(before(200_000), now), "2d");
    }

    #[test]
    fn measured_durations_have_a_suitable_unit() {
        assert_eq!(
            [820, 12_345, 1_234_567, 125_000_000].map(measured),
            ["820 µs", "12 ms", "1.2 s", "2 min 5 s"]
        );
    }
}

//! Times and durations as people read and write them.

use std::time::Duration;

use jiff::{Timestamp, tz::TimeZone};

/// The time a field holds, if it is set and a time at all.
pub(crate) fn read(time: Option<&prost_types::Timestamp>) -> Option<Timestamp> {
    time.and_then(|time| Timestamp::new(time.seconds, time.nanos).ok())
}

/// For a field.
pub(crate) fn write(time: Timestamp) -> prost_types::Timestamp {
    prost_types::Timestamp { seconds: time.as_second(), nanos: time.subsec_nanosecond() }
}

/// A point in time as text: `2026-11-21T22:55:00Z`, or how long ago: `2h`, `7d`.
///
/// # Errors
/// What is wrong with the text, for a person.
pub(crate) fn parse_past(text: &str) -> Result<Timestamp, String> {
    if let Ok(time) = text.parse() {
        return Ok(time);
    }
    let ago = parse_duration(text).map_err(|_| {
        "write a time like 2026-11-21T22:55:00Z, or how long ago: 2h, 7d".to_owned()
    })?;
    Timestamp::now().checked_sub(ago).map_err(|_| "that is too long ago".to_owned())
}

/// A duration as text: `500ms`, `60s`, `5m`, `2h`, `7d`.
///
/// # Errors
/// What is wrong with the text, for a person.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    const WRONG: &str = "write a number and its unit: 500ms, 60s, 5m, 2h or 7d";
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| WRONG)?;
    let millis = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(WRONG.to_owned()),
    };
    // A bound that no clock overflows with.
    const LONGEST: u64 = 100 * 365 * 86_400_000;
    number
        .checked_mul(millis)
        .filter(|&millis| millis <= LONGEST)
        .map(Duration::from_millis)
        .ok_or_else(|| WRONG.to_owned())
}

/// The coarse distance between two times, whatever their order: `5s`, `12m`, `3h`, `8d`.
pub(crate) fn distance(a: Timestamp, b: Timestamp) -> String {
    match a.duration_since(b).unsigned_abs().as_secs() {
        seconds @ 0..120 => format!("{seconds}s"),
        seconds @ 120..7_200 => format!("{}m", seconds / 60),
        seconds @ 7_200..172_800 => format!("{}h", seconds / 3_600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

/// `5s ago`, `in 3m`, `now`.
pub(crate) fn relative(time: Timestamp, now: Timestamp) -> String {
    let away = distance(time, now);
    match time.cmp(&now) {
        _ if away == "0s" => "now".to_owned(),
        std::cmp::Ordering::Less => format!("{away} ago"),
        std::cmp::Ordering::Equal | std::cmp::Ordering::Greater => format!("in {away}"),
    }
}

/// In the person's time zone, to the second.
pub(crate) fn local(time: Timestamp) -> String {
    time.to_zoned(TimeZone::system()).strftime("%Y-%m-%d %H:%M:%S").to_string()
}

/// The time of day in the person's time zone, to the millisecond.
pub(crate) fn clock(time: Timestamp) -> String {
    time.to_zoned(TimeZone::system()).strftime("%H:%M:%S%.3f").to_string()
}

/// A measured duration: `820 µs`, `12 ms`, `1.2 s`, `2 min 5 s`.
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
    fn times_are_told_by_their_distance() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let before = |seconds: i64| Timestamp::from_second(1_000_000 - seconds).unwrap();
        assert_eq!(relative(now, now), "now");
        assert_eq!(relative(before(90), now), "90s ago");
        assert_eq!(relative(before(-600), now), "in 10m");
        assert_eq!(distance(before(9_000), now), "2h");
        assert_eq!(distance(before(200_000), now), "2d");
    }

    #[test]
    fn measured_times_have_a_fitting_unit() {
        assert_eq!(
            [820, 12_345, 1_234_567, 125_000_000].map(measured),
            ["820 µs", "12 ms", "1.2 s", "2 min 5 s"]
        );
    }
}

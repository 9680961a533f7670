//! The rest of a vendor's limits, as reported in response headers.

use std::{fmt::Debug, time::Duration};

use jiff::{SignedDuration, Timestamp};
use reqwest::header::HeaderMap;

/// Pairs of header names: what is left, and when the limit is fully available again.
pub(crate) type LimitHeaders = &'static [(&'static str, &'static str)];

/// The rest of a vendor's limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Headroom {
    /// For how long nothing is left; none while something is.
    pub(crate) exhausted_for: Option<Duration>,
}

/// Receives the rest of the limits with every response.
pub(crate) trait HeadroomObserver: Send + Sync + Debug {
    fn on_headroom(&self, headroom: Headroom);
}

/// Reads the headers of a response. Of several exhausted limits, the one that lasts longest counts.
pub(super) fn read(limits: LimitHeaders, headers: &HeaderMap, now: Timestamp) -> Headroom {
    let text = |name: &str| headers.get(name)?.to_str().ok().map(str::trim);
    let exhausted = limits.iter().filter_map(|(remaining, reset)| {
        let is_none_left = text(remaining)?.parse::<f64>().ok()? <= 0.0;
        is_none_left.then(|| text(reset).and_then(|reset| parse_reset(reset, now))).flatten()
    });
    Headroom { exhausted_for: exhausted.max() }
}

/// The duration until a reset: a time (RFC 3339), a duration such as `6m0s`, or seconds.
fn parse_reset(reset: &str, now: Timestamp) -> Option<Duration> {
    if let Ok(seconds) = reset.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    if let Ok(at) = reset.parse::<Timestamp>() {
        return Duration::try_from(at.duration_since(now)).ok();
    }
    Duration::try_from(reset.parse::<SignedDuration>().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderName;

    use super::*;

    #[test]
    fn limit_resets_are_parsed_in_every_form() {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
        let read = |remaining: &str, reset: &str| {
            let headers = [("left", remaining), ("reset", reset)];
            let headers = headers.into_iter().map(|(name, value)| {
                (HeaderName::from_static(name), value.parse().expect("a header value"))
            });
            read(&[("left", "reset")], &headers.collect(), now)
                .exhausted_for
                .map(|wait| wait.as_millis())
        };
        assert_eq!(read("0", "2026-01-01T00:00:07Z"), Some(7_000));
        assert_eq!(read("0", "6m0s"), Some(360_000));
        assert_eq!(read("0", "20ms"), Some(20));
        assert_eq!(read("0", "1m1.5s"), Some(61_500));
        assert_eq!(read("0", "1.5"), Some(1_500));
        assert_eq!(read("0", "2025-12-31T00:00:00Z"), None, "it is over");
        assert_eq!(read("1", "6m0s"), None, "there is something left");
        assert_eq!(read("0", "soon"), None);
        assert_eq!(read("x", "6m0s"), None);
    }
}

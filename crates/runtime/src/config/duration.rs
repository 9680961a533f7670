//! Durations in configuration: `5s`, `250ms`, `1m 30s`. To be used with `#[serde(with =
//! "…::config::duration")]`.

use std::time::Duration;

use jiff::SignedDuration;
use serde::{Deserialize, Deserializer, Serializer, de::Error as _, ser::Error as _};

/// Writes the duration as people read it: `1m 30s`.
///
/// # Errors
/// A duration beyond 290 billion years.
pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    let duration = SignedDuration::try_from(*duration).map_err(S::Error::custom)?;
    serializer.collect_str(&format_args!("{duration:#}"))
}

/// Reads a duration with its unit. A bare number is refused, because it does not say whether it
/// means seconds.
///
/// # Errors
/// Text that is no duration, has no unit, or is negative.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum DurationInput {
        Text(String),
        Number(serde_json::Number),
    }
    let expectation = "is not a duration; give a number and a unit, such as 5s, 250ms or 1m 30s";
    let text = match DurationInput::deserialize(deserializer) {
        Ok(DurationInput::Text(text)) => text,
        Ok(DurationInput::Number(number)) => number.to_string(),
        Err(_) => return Err(D::Error::custom(format!("the value {expectation}"))),
    };
    text.parse::<SignedDuration>()
        .ok()
        .and_then(|duration| Duration::try_from(duration).ok())
        .ok_or_else(|| D::Error::custom(format!("`{text}` {expectation}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: serde_json::Value) -> Result<Duration, String> {
        deserialize(json).map_err(|error| error.to_string())
    }

    #[test]
    fn durations_are_read_with_their_unit() {
        assert_eq!(parse("5s".into()), Ok(Duration::from_secs(5)));
        assert_eq!(parse("250ms".into()), Ok(Duration::from_millis(250)));
        assert_eq!(parse("1m 30s".into()), Ok(Duration::from_secs(90)));
        assert_eq!(parse("0s".into()), Ok(Duration::ZERO));
    }

    #[test]
    fn duration_without_unit_or_below_zero_is_refused() {
        for bad in [
            serde_json::json!(5),
            "5".into(),
            "-5s".into(),
            "soon".into(),
            "".into(),
            serde_json::json!([1]),
        ] {
            let error = parse(bad).unwrap_err();
            assert!(error.contains("such as 5s"), "{error}");
        }
    }

    #[test]
    fn written_duration_is_read_back() {
        let written =
            serialize(&Duration::from_millis(90_250), serde_json::value::Serializer).unwrap();
        assert_eq!(parse(written), Ok(Duration::from_millis(90_250)));
    }
}

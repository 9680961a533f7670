//! Durations in configuration: `5s`, `250ms`, `1m 30s`. For `#[serde(with =
//! "…::config::duration")]`.

use std::time::Duration;

use jiff::SignedDuration;
use serde::{Deserialize, Deserializer, Serializer, de::Error as _, ser::Error as _};

/// Serializes a duration in readable form: `1m 30s`.
///
/// # Errors
/// When the duration exceeds 290 billion years.
pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    let duration = SignedDuration::try_from(*duration).map_err(S::Error::custom)?;
    serializer.collect_str(&format_args!("{duration:#}"))
}

/// Deserializes a duration with a unit. A bare number is rejected, because its unit is unclear.
///
/// # Errors
/// When the text is not a duration, has no unit, or is negative.
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
    fn duration_with_unit_is_parsed() {
        assert_eq!(parse("5s".into()), Ok(Duration::from_secs(5)));
        assert_eq!(parse("250ms".into()), Ok(Duration::from_millis(250)));
        assert_eq!(parse("1m 30s".into()), Ok(Duration::from_secs(90)));
        assert_eq!(parse("0s".into()), Ok(Duration::ZERO));
    }

    #[test]
    fn duration_without_unit_or_negative_is_rejected() {
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
    fn serialized_duration_parses() {
        let written =
            serialize(&Duration::from_millis(90_250), serde_json::value::Serializer).unwrap();
        assert_eq!(parse(written), Ok(Duration::from_millis(90_250)));
    }
}

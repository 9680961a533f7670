//! What callers are told of their quotas: with every answer how much is left, and what is used up.
//!
//! The fields are those of draft-ietf-httpapi-ratelimit-headers-11 (a policy's name as a string, as
//! since its eighth version); to gRPC they are metadata.

use std::{fmt::Write as _, time::Duration};

use tonic::{
    Code, Status,
    codegen::http::{HeaderMap, HeaderName, HeaderValue},
    metadata::MetadataMap,
};
use tonic_types::{ErrorDetails, QuotaViolation, StatusExt as _};

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const LEFT: HeaderName = HeaderName::from_static("ratelimit");

/// A quota, and how much is left of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Left {
    /// As in `QuotaLimits`.
    pub(crate) id: &'static str,
    /// What it counts, when that isn't requests.
    pub(crate) unit: Option<&'static str>,
    pub(crate) limit: i64,
    /// What it is counted in; none: it isn't.
    pub(crate) window: Option<Duration>,
    pub(crate) remaining: i64,
    /// How long until there is all of it again, or, when nothing is left, until there is some.
    pub(crate) reset: Duration,
}

/// What a call was counted against. Goes with a request that was counted already, and with its
/// answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Metered(pub(crate) Vec<Left>);

impl Metered {
    /// Says it in an answer.
    pub(crate) fn tell(&self, headers: &mut HeaderMap) {
        if self.0.is_empty() {
            return;
        }
        let (mut policy, mut left) = (String::new(), String::new());
        for quota in &self.0 {
            let separator = if policy.is_empty() { "" } else { ", " };
            // Writing to a string cannot fail.
            _ = write!(policy, "{separator}\"{}\";q={}", quota.id, structured(quota.limit));
            if let Some(unit) = quota.unit {
                _ = write!(policy, ";qu=\"{unit}\"");
            }
            if let Some(window) = quota.window {
                _ = write!(policy, ";w={}", window.as_secs());
            }
            let (remaining, reset) = (structured(quota.remaining), seconds(quota.reset));
            _ = write!(left, "{separator}\"{}\";r={remaining};t={reset}", quota.id);
        }
        for (name, text) in [(POLICY, policy), (LEFT, left)] {
            if let Ok(value) = HeaderValue::try_from(text) {
                headers.append(name, value);
            }
        }
    }
}

/// Whole seconds, none of which is over too early.
pub(crate) fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// A structured field's integer has 15 digits at most.
fn structured(number: i64) -> i64 {
    number.clamp(0, 999_999_999_999_999)
}

/// A quota that is used up.
#[derive(Debug, Clone)]
pub(crate) struct Refusal {
    /// Whose, as `organization:organization_…`.
    pub(crate) subject: String,
    /// What is said.
    pub(crate) words: String,
    pub(crate) left: Left,
}

impl Refusal {
    pub(crate) fn status(&self) -> Status {
        let left = &self.left;
        let violation = QuotaViolation {
            subject: self.subject.clone(),
            description: self.words.clone(),
            api_service: "construct.v1".to_owned(),
            quota_metric: left.unit.unwrap_or("requests").to_owned(),
            quota_id: left.id.to_owned(),
            quota_value: left.limit,
            ..QuotaViolation::default()
        };
        let mut details = ErrorDetails::with_quota_failure(vec![violation]);
        details.set_retry_info(Some(left.reset));
        let mut status =
            Status::with_error_details(Code::ResourceExhausted, self.words.clone(), details);
        let mut headers = HeaderMap::new();
        Metered(vec![left.clone()]).tell(&mut headers);
        *status.metadata_mut() = MetadataMap::from_headers(headers);
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(id: &'static str) -> Left {
        let (window, reset) = (Some(Duration::from_secs(60)), Duration::from_millis(1500));
        Left { id, unit: None, limit: 600, window, remaining: 598, reset }
    }

    #[test]
    fn what_is_left_is_told_in_structured_fields() {
        let tokens =
            Left { unit: Some("tokens"), limit: i64::MAX, window: None, ..left("tokens_per_day") };
        let mut headers = HeaderMap::new();
        Metered(vec![left("requests_per_minute"), tokens]).tell(&mut headers);
        assert_eq!(
            headers[POLICY],
            "\"requests_per_minute\";q=600;w=60, \"tokens_per_day\";q=999999999999999;qu=\"tokens\""
        );
        assert_eq!(
            headers[LEFT],
            "\"requests_per_minute\";r=598;t=2, \"tokens_per_day\";r=598;t=2"
        );
        let mut none = HeaderMap::new();
        Metered::default().tell(&mut none);
        assert!(none.is_empty());
    }

    #[test]
    fn a_refusal_names_the_quota_and_when_to_come_back() {
        let refusal = Refusal {
            subject: "organization:organization_1".into(),
            words: "too much".into(),
            left: left("requests_per_minute"),
        };
        let status = refusal.status();
        assert_eq!(status.code(), Code::ResourceExhausted);
        let details = status.get_error_details();
        let violation = &details.quota_failure().expect("it is told").violations[0];
        assert_eq!(
            (violation.quota_id.as_str(), violation.quota_value),
            ("requests_per_minute", 600)
        );
        assert_eq!(
            details.retry_info().and_then(|info| info.retry_delay),
            Some(Duration::from_millis(1500))
        );
        assert!(status.metadata().contains_key("ratelimit"));
    }
}

//! Quota information in responses: the remaining amounts, and exhausted quotas.
//!
//! The fields are those of draft-ietf-httpapi-ratelimit-headers-11 (with the name of a policy as a
//! string, as since its eighth version). For gRPC they are metadata.

use std::{fmt::Write as _, time::Duration};

use tonic::{
    Code, Status,
    codegen::http::{HeaderMap, HeaderName, HeaderValue},
    metadata::MetadataMap,
};
use tonic_types::{ErrorDetails, QuotaViolation, StatusExt as _};

const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// The state of a quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct QuotaState {
    /// As in `QuotaLimits`.
    pub(crate) id: &'static str,
    /// What it counts, if not requests.
    pub(crate) unit: Option<&'static str>,
    pub(crate) limit: i64,
    /// Its period; `None` if it has none.
    pub(crate) window: Option<Duration>,
    pub(crate) remaining: i64,
    /// Time until it is full again or, if nothing remains, until something does.
    pub(crate) reset: Duration,
}

/// The quotas that a call was counted for. An extension of a counted request, and of its response.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct QuotaStates(pub(crate) Vec<QuotaState>);

impl QuotaStates {
    /// Writes the headers of a response.
    pub(crate) fn write_headers(&self, headers: &mut HeaderMap) {
        if self.0.is_empty() {
            return;
        }
        let (mut policy, mut state) = (String::new(), String::new());
        for quota in &self.0 {
            let separator = if policy.is_empty() { "" } else { ", " };
            // Writing to a string cannot fail.
            _ = write!(
                policy,
                "{separator}\"{}\";q={}",
                quota.id,
                clamp_structured_integer(quota.limit)
            );
            if let Some(unit) = quota.unit {
                _ = write!(policy, ";qu=\"{unit}\"");
            }
            if let Some(window) = quota.window {
                _ = write!(policy, ";w={}", window.as_secs());
            }
            let (remaining, reset) =
                (clamp_structured_integer(quota.remaining), seconds(quota.reset));
            _ = write!(state, "{separator}\"{}\";r={remaining};t={reset}", quota.id);
        }
        for (name, text) in [(RATELIMIT_POLICY, policy), (RATELIMIT, state)] {
            if let Ok(value) = HeaderValue::try_from(text) {
                headers.append(name, value);
            }
        }
    }
}

/// Rounds up to whole seconds.
pub(crate) fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// Limits a number to the 15 digits of an integer in structured fields.
fn clamp_structured_integer(number: i64) -> i64 {
    number.clamp(0, 999_999_999_999_999)
}

/// An exhausted quota.
#[derive(Debug, Clone)]
pub(crate) struct Refusal {
    /// The subject, such as `organization:organization_…`.
    pub(crate) subject: String,
    /// The text for the caller.
    pub(crate) description: String,
    pub(crate) state: QuotaState,
}

impl Refusal {
    pub(crate) fn status(&self) -> Status {
        let state = &self.state;
        let violation = QuotaViolation {
            subject: self.subject.clone(),
            description: self.description.clone(),
            api_service: "construct.v1".to_owned(),
            quota_metric: state.unit.unwrap_or("requests").to_owned(),
            quota_id: state.id.to_owned(),
            quota_value: state.limit,
            ..QuotaViolation::default()
        };
        let mut details = ErrorDetails::with_quota_failure(vec![violation]);
        details.set_retry_info(Some(state.reset));
        let mut status =
            Status::with_error_details(Code::ResourceExhausted, self.description.clone(), details);
        let mut headers = HeaderMap::new();
        QuotaStates(vec![state.clone()]).write_headers(&mut headers);
        *status.metadata_mut() = MetadataMap::from_headers(headers);
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(id: &'static str) -> QuotaState {
        let (window, reset) = (Some(Duration::from_secs(60)), Duration::from_millis(1500));
        QuotaState { id, unit: None, limit: 600, window, remaining: 598, reset }
    }

    #[test]
    fn quota_headers_are_structured_fields() {
        let tokens = QuotaState {
            unit: Some("tokens"),
            limit: i64::MAX,
            window: None,
            ..state("tokens_per_day")
        };
        let mut headers = HeaderMap::new();
        QuotaStates(vec![state("requests_per_minute"), tokens]).write_headers(&mut headers);
        assert_eq!(
            headers[RATELIMIT_POLICY],
            "\"requests_per_minute\";q=600;w=60, \"tokens_per_day\";q=999999999999999;qu=\"tokens\""
        );
        assert_eq!(
            headers[RATELIMIT],
            "\"requests_per_minute\";r=598;t=2, \"tokens_per_day\";r=598;t=2"
        );
        let mut none = HeaderMap::new();
        QuotaStates::default().write_headers(&mut none);
        assert!(none.is_empty());
    }

    #[test]
    fn refusal_has_the_quota_and_a_retry_delay() {
        let refusal = Refusal {
            subject: "organization:organization_1".into(),
            description: "too much".into(),
            state: state("requests_per_minute"),
        };
        let status = refusal.status();
        assert_eq!(status.code(), Code::ResourceExhausted);
        let details = status.get_error_details();
        let violation = &details.quota_failure().expect("the quota failure").violations[0];
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

//! Why a request is not answered, independent of the client's protocol.

use axum::http::{HeaderMap, HeaderValue, header::RETRY_AFTER};
use construct_proto::mesh::v1::FailureClass;
use jiff::Timestamp;

use crate::failure::Failure;

/// The kinds of refusals that clients distinguish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The request is invalid.
    Invalid,
    /// The conversation exceeds the context window.
    TooLong,
    /// The vendor refuses the content.
    Refused,
    /// No valid token.
    Unauthenticated,
    /// The token is not valid for the model, or no such model exists.
    NoModel,
    /// No such address.
    NoRoute,
    /// The body is too large.
    TooLarge,
    /// A budget is exhausted.
    Budget,
    RateLimited,
    Overloaded,
    /// The vendor, or the connection to it, failed.
    Vendor,
    /// The answer took too long.
    Timeout,
    /// A bug of this service, or a part of the mesh is unavailable.
    Internal,
}

/// Why a request is not answered.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Refusal {
    pub(crate) kind: Kind,
    /// For people; contains no secret.
    pub(crate) message: String,
    /// When the client may retry.
    pub(crate) retry_at: Option<Timestamp>,
}

impl Refusal {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), retry_at: None }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, message)
    }

    /// The HTTP status, where the protocol has none of its own.
    pub(crate) const fn status(&self) -> u16 {
        match self.kind {
            Kind::Invalid | Kind::TooLong | Kind::Refused => 400,
            Kind::Unauthenticated => 401,
            Kind::Budget => 402,
            Kind::NoModel | Kind::NoRoute => 404,
            Kind::TooLarge => 413,
            Kind::RateLimited => 429,
            Kind::Internal => 500,
            Kind::Vendor => 502,
            Kind::Overloaded => 503,
            Kind::Timeout => 504,
        }
    }

    /// The headers of the error response. The vendors' SDKs retry by themselves. They are told not
    /// to where the proxy has retried already, or a retry is of no use.
    pub(crate) fn headers(&self, now: Timestamp) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let again = matches!(self.kind, Kind::RateLimited | Kind::Overloaded);
        headers.insert(
            "x-should-retry",
            HeaderValue::from_static(if again { "true" } else { "false" }),
        );
        if let Some(wait) = self.retry_at.map(|at| at.duration_since(now).as_millis().max(0)) {
            headers.insert(
                RETRY_AFTER,
                HeaderValue::from(u64::try_from(wait).unwrap_or(0).div_ceil(1_000)),
            );
        }
        headers
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        let kind = match failure.class {
            FailureClass::InvalidRequest => Kind::Invalid,
            FailureClass::ContextTooLong => Kind::TooLong,
            FailureClass::ContentRefused => Kind::Refused,
            FailureClass::RateLimited => Kind::RateLimited,
            FailureClass::Overloaded => Kind::Overloaded,
            FailureClass::DeadlineExceeded => Kind::Timeout,
            // The vendor's key, not the client's token.
            FailureClass::Authentication
            | FailureClass::Transient
            | FailureClass::Configuration => Kind::Vendor,
            FailureClass::Internal | FailureClass::Unspecified => Kind::Internal,
        };
        Self { kind, message: failure.to_string(), retry_at: failure.retry_at }
    }
}

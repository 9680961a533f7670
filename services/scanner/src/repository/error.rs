//! Errors of sources. Their texts contain no address and no header: both can carry a credential.

use jiff::Timestamp;

/// Why a source cannot provide a repository.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The repository or reference does not exist, or the credential may not see it: forges do not
    /// tell which.
    #[error("{subject} was not found, or the connection has no access")]
    NotFound {
        /// What was requested.
        subject: String,
    },
    /// It was removed for legal reasons (HTTP 451), or permanently.
    #[error("{subject} is no longer available: {reason}")]
    Gone {
        /// What was requested.
        subject: String,
        /// The forge's reason.
        reason: String,
    },
    /// The credential is rejected, or lacks a permission.
    #[error("the forge denied access: {reason}")]
    Denied {
        /// The forge's reason.
        reason: String,
    },
    /// The forge's rate limit is exhausted.
    #[error("the forge's rate limit is exhausted until {until}")]
    RateLimited {
        /// When requests are allowed again.
        until: Timestamp,
    },
    /// The host may not be contacted: not public, not https, or not the configured one.
    #[error("{subject} may not be contacted: {reason}")]
    Forbidden {
        /// The host.
        subject: String,
        /// The reason.
        reason: String,
    },
    /// The forge cannot be reached or fails; the same request may succeed later.
    #[error("the forge is unavailable: {reason}")]
    Unavailable {
        /// What happened.
        reason: String,
    },
    /// The forge's response does not match its documentation.
    #[error("unexpected response of the forge: {reason}")]
    Unexpected {
        /// What is wrong with it.
        reason: String,
    },
    /// The request is invalid: a malformed name or reference, or a folder that is none.
    #[error("{subject} cannot be used: {reason}")]
    Invalid {
        /// The invalid value.
        subject: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl SourceError {
    /// Whether the same request may succeed later without any change.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        matches!(self, Self::RateLimited { .. } | Self::Unavailable { .. })
    }
}

/// An address as it may be shown: without parts that can be a credential, and not long.
pub(super) fn redact_address(address: &str) -> String {
    let address = address.rsplit('@').next().unwrap_or(address);
    let address = address.split(['?', '#']).next().unwrap_or(address);
    address.chars().filter(|c| !c.is_control()).take(100).collect()
}

//! Why a scan cannot be processed, and whether another attempt may help.

use construct_runtime::telemetry::Chain;
use construct_store::SealError;
use jiff::Timestamp;

use crate::repository::{SnapshotError, SourceError};

/// Why a scan cannot be processed now, or at all.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// Another attempt may succeed.
    #[error("{reason}")]
    Retryable {
        /// What failed.
        reason: String,
        /// The earliest time of the next attempt.
        not_before: Option<Timestamp>,
    },
    /// A permanent failure.
    #[error("{0}")]
    Failed(String),
    /// Another process holds the lease.
    #[error("another process holds the lease")]
    LeaseLost,
}

impl Error {
    /// A failure that may pass.
    pub(crate) fn retryable(error: &(dyn std::error::Error + 'static)) -> Self {
        Self::Retryable { reason: Chain(error).to_string(), not_before: None }
    }

    /// A secret cannot be unsealed. A missing key may be restored; until then the scan waits, and
    /// its task can still be ended.
    pub(crate) fn from_seal_error(error: SealError) -> Self {
        match error {
            error @ SealError::UnknownKey { .. } => Self::retryable(&error),
            error => Self::Failed(error.to_string()),
        }
    }
}

impl From<construct_store::Error> for Error {
    fn from(error: construct_store::Error) -> Self {
        match error {
            construct_store::Error::Conflict => Self::LeaseLost,
            error => Self::retryable(&error),
        }
    }
}

impl From<SourceError> for Error {
    fn from(error: SourceError) -> Self {
        match error {
            SourceError::RateLimited { until } => {
                Self::Retryable { reason: error.to_string(), not_before: Some(until) }
            }
            error if error.is_transient() => Self::retryable(&error),
            error => Self::Failed(error.to_string()),
        }
    }
}

impl From<SnapshotError> for Error {
    fn from(error: SnapshotError) -> Self {
        match error {
            SnapshotError::Source(error) => error.into(),
            error if error.is_transient() => Self::retryable(&error),
            error => Self::Failed(error.to_string()),
        }
    }
}

//! Why a delivery or a mention cannot be processed, and whether another attempt may help.

use std::time::Duration;

use construct_runtime::telemetry::Chain;

use crate::{gateway::is_transient, texts, web};

/// Why a delivery or a mention cannot be processed now, or at all.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// Another attempt may succeed.
    #[error("{reason}")]
    Retryable {
        /// What failed.
        reason: String,
        /// The minimum delay before the next attempt.
        retry_after: Option<Duration>,
    },
    /// A permanent failure. The user is told this text.
    #[error("{0}")]
    Failed(String),
    /// A permanent failure that cannot be reported to a user.
    #[error("{0}")]
    Silent(String),
    /// Another process holds the lease.
    #[error("another process holds the lease")]
    LeaseLost,
}

impl From<construct_store::Error> for Error {
    fn from(error: construct_store::Error) -> Self {
        match error {
            construct_store::Error::Conflict => Self::LeaseLost,
            error => Self::Retryable { reason: Chain(&error).to_string(), retry_after: None },
        }
    }
}

impl From<web::Error> for Error {
    fn from(error: web::Error) -> Self {
        match &error {
            web::Error::Stopped { .. } => Self::LeaseLost,
            web::Error::Limited { retry_after: after, .. } => {
                Self::Retryable { reason: error.to_string(), retry_after: Some(*after) }
            }
            error if error.is_transient() => {
                Self::Retryable { reason: error.to_string(), retry_after: None }
            }
            error if error.is_revoked() => Self::Silent(error.to_string()),
            error => match error.code() {
                Some(
                    "not_in_channel"
                    | "channel_not_found"
                    | "is_archived"
                    | "message_not_found"
                    | "thread_not_found"
                    | "cannot_reply_to_message"
                    | "restricted_action"
                    | "missing_scope",
                ) => Self::Silent(format!("{error}: {}", texts::slack_error(error))),
                _ => Self::Failed(texts::slack_error(error)),
            },
        }
    }
}

impl From<tonic::Status> for Error {
    fn from(status: tonic::Status) -> Self {
        if is_transient(&status) {
            Self::Retryable {
                reason: format!("the gateway: {}", status.message()),
                retry_after: None,
            }
        } else {
            Self::Failed(texts::gateway_error(&status))
        }
    }
}

//! When work on a blocking thread must end early.

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::definition::Definition;
use super::error::ToolError;

/// Asked between files and between blocks of a file.
#[derive(Debug)]
pub(super) struct Stop {
    cancel: CancellationToken,
    deadline: Option<Instant>,
}

/// Why work ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stopped {
    /// The caller gave up.
    Cancelled,
    /// It took longer than the tool may.
    TimedOut,
}

impl Stop {
    pub(super) fn new(cancel: CancellationToken, limit: Duration) -> Self {
        Self { cancel, deadline: Some(Instant::now() + limit) }
    }

    /// For a call of this tool that begins now.
    pub(super) fn of(tool: &Definition, cancel: CancellationToken) -> Self {
        Self { cancel, deadline: tool.limits.wall.map(|limit| Instant::now() + limit) }
    }

    /// Whether to end now.
    pub(super) fn check(&self) -> Result<(), Stopped> {
        if self.cancel.is_cancelled() {
            Err(Stopped::Cancelled)
        } else if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            Err(Stopped::TimedOut)
        } else {
            Ok(())
        }
    }
}

impl Stopped {
    /// The error for a tool that has nothing to show for its work.
    pub(super) fn into_error(self, tool: &'static str) -> ToolError {
        match self {
            Self::Cancelled => ToolError::cancelled(tool),
            Self::TimedOut => {
                ToolError::new("Timeout", format!("{tool} took too long and was ended."))
            }
        }
    }
}

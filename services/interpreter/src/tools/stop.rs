//! Early end of work on blocking threads.

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::definition::Definition;
use super::error::ToolError;

/// Tells work when to end. It is checked between files and between blocks of a file.
#[derive(Debug)]
pub(super) struct Stop {
    cancel: CancellationToken,
    deadline: Option<Instant>,
}

/// The reason why work ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopReason {
    /// The call was canceled.
    Cancelled,
    /// The tool's time limit was reached.
    TimedOut,
}

impl Stop {
    pub(super) fn new(cancel: CancellationToken, limit: Duration) -> Self {
        Self { cancel, deadline: Some(Instant::now() + limit) }
    }

    /// The stop of a call of this tool that begins now.
    pub(super) fn for_tool(tool: &Definition, cancel: CancellationToken) -> Self {
        Self { cancel, deadline: tool.limits.wall.map(|limit| Instant::now() + limit) }
    }

    /// Fails if the work must end now.
    pub(super) fn check(&self) -> Result<(), StopReason> {
        if self.cancel.is_cancelled() {
            Err(StopReason::Cancelled)
        } else if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            Err(StopReason::TimedOut)
        } else {
            Ok(())
        }
    }
}

impl StopReason {
    /// The error of a tool that has no partial result.
    pub(super) fn into_error(self, tool: &'static str) -> ToolError {
        match self {
            Self::Cancelled => ToolError::cancelled(tool),
            Self::TimedOut => {
                ToolError::new("Timeout", format!("{tool} took too long and was stopped."))
            }
        }
    }
}

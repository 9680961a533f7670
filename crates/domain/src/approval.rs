//! Approvals: a person's decisions about calls of a script before they are made.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ApprovalId;

/// Time that people have to decide about the calls of one execution, from its start. Journals of
/// executions are kept longer than that (a test of the bus compares the two): a script without its
/// journal would repeat its calls.
pub const APPROVAL_TIMEOUT: Duration = Duration::from_secs(21 * 24 * 60 * 60);

/// Maximum number of pending approvals of one execution. A script that needs more requests the rest
/// when it resumes.
pub const MAX_PENDING_APPROVALS: usize = 100;

/// A call that needs an approval: which call, and exactly what it would do. An approval holds only
/// for both together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApprovalCall {
    /// Index of the script in its step, from 0.
    pub script: u32,
    /// Number of the call in that script, from 1.
    pub number: u32,
    /// SHA-256 of the tool and its canonical arguments, in hexadecimal.
    pub hash: String,
}

impl ApprovalCall {
    /// Whether the two are the same call of the script, whatever their arguments.
    pub fn is_same_call(&self, other: &Self) -> bool {
        (self.script, self.number) == (other.script, other.number)
    }
}

/// A request for a person's approval.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApprovalRequest {
    /// The call.
    pub call: ApprovalCall,
    /// The tool's name.
    pub tool: String,
    /// The canonical arguments as JSON. Truncated where an earlier version requested the approval
    /// of long ones.
    pub arguments: String,
    /// Size of the complete arguments in bytes.
    pub arguments_size: u64,
    /// The reason of the rule that requires the approval.
    pub reason: String,
}

/// The state of an approval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ApprovalState {
    /// Not decided.
    Pending,
    /// A person has approved the call.
    Approved,
    /// A person has rejected the call.
    Rejected,
    /// Not decided in time.
    Expired,
    /// The script has ended, or no longer asks for it.
    Cancelled,
}

impl ApprovalState {
    /// All states.
    pub const ALL: [Self; 5] =
        [Self::Pending, Self::Approved, Self::Rejected, Self::Expired, Self::Cancelled];

    /// As stored.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Approved => "approved",
            Self::Rejected => "rejected",
            Self::Expired => "expired",
            Self::Cancelled => "cancelled",
        }
    }

    /// Reads what [`ApprovalState::as_str`] wrote.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == text)
    }
}

/// An approval, as far as decisions need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Approval {
    /// Its id.
    pub id: ApprovalId,
    /// The call.
    pub call: ApprovalCall,
    /// Its state.
    pub state: ApprovalState,
}

/// An approval that was closed without a person's decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClosedApproval {
    /// Its id.
    pub id: ApprovalId,
    /// [`ApprovalState::Expired`] or [`ApprovalState::Cancelled`].
    pub state: ApprovalState,
    /// The reason, for people and for the script.
    pub reason: String,
}

//! Approvals: what a person is asked before a call of a script is made.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ApprovalId;

/// How long people have to decide about the calls of one execution, counted from its beginning.
/// Journals of executions are kept longer than that (a test of the bus compares the two): a script
/// whose journal is gone would repeat itself.
pub const APPROVAL_LIMIT: Duration = Duration::from_secs(21 * 24 * 60 * 60);

/// Calls of one execution that people can be asked about at once. A script that wants more has the
/// rest asked about when it goes on.
pub const ASKED_AT_ONCE: usize = 100;

/// A call that needs an approval: which one, and exactly what it would do. An approval holds for
/// both or for nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskedCall {
    /// Which of the step's scripts, from 0.
    pub script: u32,
    /// Its number in that script, from 1.
    pub number: u32,
    /// SHA-256 of the tool and its canonical arguments, in hexadecimal.
    pub hash: String,
}

impl AskedCall {
    /// Whether the two stand in the same place, whatever they would do.
    pub fn is_at(&self, other: &Self) -> bool {
        (self.script, self.number) == (other.script, other.number)
    }
}

/// What a person is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// About which call.
    pub call: AskedCall,
    /// The tool.
    pub tool: String,
    /// The canonical arguments as JSON; a part of them where an earlier version has asked about
    /// long ones.
    pub arguments: String,
    /// Bytes of the whole arguments.
    pub arguments_size: u64,
    /// Why it is asked: what the rule says.
    pub reason: String,
}

/// What became of the question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ApprovalState {
    /// Nobody has decided.
    Pending,
    /// A person wants the call to be made.
    Approved,
    /// A person does not.
    Rejected,
    /// Nobody decided in time.
    Expired,
    /// The script is over, or does not ask for it any more.
    Cancelled,
}

impl ApprovalState {
    /// Every state.
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

/// A question that was asked, as far as decisions need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Approval {
    /// Its id.
    pub id: ApprovalId,
    /// About which call.
    pub call: AskedCall,
    /// What became of it.
    pub state: ApprovalState,
}

/// A question that is over without a person's decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Closed {
    /// Which.
    pub id: ApprovalId,
    /// [`ApprovalState::Expired`] or [`ApprovalState::Cancelled`].
    pub state: ApprovalState,
    /// Why, for people and for the script.
    pub words: String,
}

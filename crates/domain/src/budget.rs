//! How much may be spent, by whom and in what time.

use std::fmt;

use crate::{AgentId, TaskId, money::dollars};

/// Whose spending a budget bounds.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Everything the organization spends.
    Organization,
    /// What an agent spends, in all its tasks.
    Agent(AgentId),
    /// What a task spends, with its subtasks.
    Task(TaskId),
    /// What is spent with a token for the proxy.
    Token(String),
}

/// In what time it may be spent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Period {
    /// Ever.
    Total,
    /// In a day of UTC.
    Day,
    /// In a calendar month of UTC.
    Month,
    /// By each single call. Nothing is summed up.
    Call,
}

impl Period {
    /// Every period.
    pub const ALL: [Self; 4] = [Self::Total, Self::Day, Self::Month, Self::Call];

    /// As stored.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Total => "total",
            Self::Day => "day",
            Self::Month => "month",
            Self::Call => "call",
        }
    }

    /// Reads what [`Period::as_str`] wrote.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|period| period.as_str() == text)
    }
}

/// Why money could not be set aside: the budget that has not got it. Amounts are in 10⁻¹² US
/// dollars.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exhausted {
    /// Whose budget.
    pub scope: Scope,
    /// The agent's name, when it is an agent's.
    pub agent_name: String,
    /// In what time.
    pub period: Period,
    /// How much may be spent.
    pub limit: i64,
    /// How much is.
    pub spent: i64,
    /// How much is set aside for other calls.
    pub reserved: i64,
    /// How much the call may cost.
    pub needed: i64,
}

impl std::error::Error for Exhausted {}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.period {
            Period::Total => "the budget of ",
            Period::Day => "the budget for a day of ",
            Period::Month => "the budget for a month of ",
            Period::Call => "the budget for a single call of ",
        })?;
        match &self.scope {
            Scope::Organization => f.write_str("the organization")?,
            Scope::Agent(id) if self.agent_name.is_empty() => write!(f, "{id}")?,
            Scope::Agent(_) => write!(f, "the agent `{}`", self.agent_name)?,
            Scope::Task(_) => f.write_str("the task")?,
            Scope::Token(_) => f.write_str("the token")?,
        }
        write!(f, " is exhausted: {} limit", dollars(self.limit))?;
        if self.period != Period::Call {
            write!(f, ", {} spent", dollars(self.spent))?;
        }
        if self.period != Period::Call && self.reserved > 0 {
            write!(f, ", {} set aside for calls under way", dollars(self.reserved))?;
        }
        write!(f, ", up to {} needed", dollars(self.needed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exhausted_budget_says_whose_it_is_and_what_is_missing() {
        let dollar = 1_000_000_000_000;
        let exhausted = Exhausted {
            scope: Scope::Agent(AgentId::from_uuid(uuid::Uuid::nil())),
            agent_name: "coder".into(),
            period: Period::Month,
            limit: 5 * dollar,
            spent: dollar * 498 / 100,
            reserved: 0,
            needed: dollar / 10,
        };
        assert_eq!(
            exhausted.to_string(),
            "the budget for a month of the agent `coder` is exhausted: $5.00 limit, $4.98 spent, up to $0.10 needed"
        );
        let call = Exhausted {
            scope: Scope::Organization,
            period: Period::Call,
            reserved: dollar,
            ..exhausted.clone()
        };
        assert_eq!(
            call.to_string(),
            "the budget for a single call of the organization is exhausted: $5.00 limit, up to $0.10 needed"
        );
        let busy = Exhausted {
            scope: Scope::Token("t".into()),
            period: Period::Total,
            reserved: dollar,
            ..exhausted
        };
        assert!(
            busy.to_string()
                .ends_with("$4.98 spent, $1.00 set aside for calls under way, up to $0.10 needed")
        );
    }
}

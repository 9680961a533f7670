//! Budgets: limits on spending per scope and period.

use std::fmt;

use crate::{AgentId, TaskId, money::format_dollars};

/// Whose spending a budget limits.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Scope {
    /// All spending of the organization.
    Organization,
    /// The spending of an agent in all its tasks.
    Agent(AgentId),
    /// The spending of a task with its subtasks.
    Task(TaskId),
    /// The spending with a token for the proxy.
    Token(String),
}

/// The period that a budget applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Period {
    /// All time.
    Total,
    /// A UTC day.
    Day,
    /// A UTC calendar month.
    Month,
    /// Each single call. Nothing is accumulated.
    Call,
}

impl Period {
    /// All periods.
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

/// Why a reservation was rejected: the budget that cannot cover it. Amounts are in pico-dollars
/// (10⁻¹² US dollars).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExhaustedBudget {
    /// The scope of the budget.
    pub scope: Scope,
    /// The agent's name, if the budget is an agent's.
    pub agent_name: String,
    /// The period of the budget.
    pub period: Period,
    /// The limit.
    pub limit: i64,
    /// Amount spent.
    pub spent: i64,
    /// Amount reserved for other calls.
    pub reserved: i64,
    /// Maximum cost of the call.
    pub needed: i64,
}

impl std::error::Error for ExhaustedBudget {}

impl fmt::Display for ExhaustedBudget {
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
        write!(f, " is exhausted: {} limit", format_dollars(self.limit))?;
        if self.period != Period::Call {
            write!(f, ", {} spent", format_dollars(self.spent))?;
        }
        if self.period != Period::Call && self.reserved > 0 {
            write!(f, ", {} reserved for calls in flight", format_dollars(self.reserved))?;
        }
        write!(f, ", up to {} needed", format_dollars(self.needed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exhausted_budget_names_scope_period_and_amounts() {
        let dollar = 1_000_000_000_000;
        let exhausted = ExhaustedBudget {
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
        let call = ExhaustedBudget {
            scope: Scope::Organization,
            period: Period::Call,
            reserved: dollar,
            ..exhausted.clone()
        };
        assert_eq!(
            call.to_string(),
            "the budget for a single call of the organization is exhausted: $5.00 limit, up to $0.10 needed"
        );
        let busy = ExhaustedBudget {
            scope: Scope::Token("t".into()),
            period: Period::Total,
            reserved: dollar,
            ..exhausted
        };
        assert!(
            busy.to_string()
                .ends_with("$4.98 spent, $1.00 reserved for calls in flight, up to $0.10 needed")
        );
    }
}

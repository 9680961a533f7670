//! Model calls outside a turn: the model, the budget and the spending.

use construct_domain::OrganizationId;
use construct_proto::mesh::v1 as mesh;

use super::{Address, Invalid, Question, StreamAddress, agree, tokens::ROOT, tokens::Tokens};
use crate::topology::Stream;

/// Asks any reconciler how to reach a model; the answer is a `ModelFound`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Models;

impl Address for Models {
    type Message = mesh::ModelLookup;

    fn subject(&self) -> String {
        format!("{ROOT}.ctl.reconciler.models")
    }

    fn pattern() -> String {
        Self.subject()
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "ctl.reconciler")?;
        tokens.word("models")?;
        tokens.end()?;
        Ok(Self)
    }

    fn check(&self, lookup: &mesh::ModelLookup) -> Result<(), Invalid> {
        organization(&lookup.organization_id).map(|_| ())
    }
}

impl Question for Models {
    type Answer = mesh::ResolvedModel;

    const GROUP: Option<&'static str> = Some("models");
}

/// Asks any reconciler for a reservation; the answer is a `BudgetReserved`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budgets;

impl Address for Budgets {
    type Message = mesh::BudgetReserve;

    fn subject(&self) -> String {
        format!("{ROOT}.ctl.reconciler.budgets")
    }

    fn pattern() -> String {
        Self.subject()
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "ctl.reconciler")?;
        tokens.word("budgets")?;
        tokens.end()?;
        Ok(Self)
    }

    fn check(&self, reserve: &mesh::BudgetReserve) -> Result<(), Invalid> {
        organization(&reserve.organization_id).map(|_| ())
    }
}

impl Question for Budgets {
    type Answer = mesh::BudgetReserved;

    const GROUP: Option<&'static str> = Some("budgets");
}

/// A report of the spending outside a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spending {
    /// The organization that pays.
    pub organization: OrganizationId,
}

impl Address for Spending {
    type Message = mesh::SpendingReport;

    fn subject(&self) -> String {
        format!("{ROOT}.cmd.spending.{}", self.organization)
    }

    fn pattern() -> String {
        format!("{ROOT}.cmd.spending.*")
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "cmd.spending")?;
        let organization = tokens.value()?;
        tokens.end()?;
        Ok(Self { organization })
    }

    fn check(&self, report: &mesh::SpendingReport) -> Result<(), Invalid> {
        agree(
            "the report is about another organization",
            self.organization,
            &report.organization_id,
        )
    }
}

impl StreamAddress for Spending {
    const STREAM: Stream = Stream::Spending;

    fn duplicate_key(report: &mesh::SpendingReport) -> Option<String> {
        Some(format!("spending.{}", report.call_id))
    }
}

fn organization(id: &str) -> Result<OrganizationId, Invalid> {
    id.parse().map_err(|_| Invalid::new("the payload's organization id is malformed", id))
}

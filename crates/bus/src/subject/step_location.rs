//! The location of a step's command, and the reconcile failures of its task.

use construct_domain::{OrganizationId, StepId, TaskId};
use construct_proto::mesh::v1 as mesh;

use super::{Address, Invalid, Pool, Question, tokens::ROOT, tokens::Tokens};

/// Asks the reconciler of a task where the command of its step is, and whether reconciles of the
/// task fail; the answer is a `Whereabouts`. Reconcilers of other tasks receive the question too
/// and do not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLocation;

impl Address for StepLocation {
    type Message = mesh::StepLocationQuery;

    fn subject(&self) -> String {
        format!("{ROOT}.ctl.reconciler.step_location")
    }

    fn pattern() -> String {
        Self.subject()
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "ctl.reconciler")?;
        tokens.word("step_location")?;
        tokens.end()?;
        Ok(Self)
    }

    fn check(&self, question: &mesh::StepLocationQuery) -> Result<(), Invalid> {
        let invalid = |id: &str| Invalid::new("an id of the question is malformed", id);
        question
            .organization_id
            .parse::<OrganizationId>()
            .map_err(|_| invalid(&question.organization_id))?;
        question.task_id.parse::<TaskId>().map_err(|_| invalid(&question.task_id))?;
        if !question.step_id.is_empty() {
            question.step_id.parse::<StepId>().map_err(|_| invalid(&question.step_id))?;
        }
        if question.pool.is_empty() { Ok(()) } else { question.pool.parse::<Pool>().map(drop) }
    }
}

impl Question for StepLocation {
    type Answer = mesh::StepLocation;

    const GROUP: Option<&'static str> = None;
}

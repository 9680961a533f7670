//! Questions of scripts about subtasks.

use construct_domain::{OrganizationId, StepId, TaskId};
use construct_proto::mesh::v1 as mesh;

use super::{Address, Invalid, Question, tokens::ROOT, tokens::Tokens};

/// Asks any reconciler for a script about subtasks; the answer is a `SubtaskAnswer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subtasks;

impl Address for Subtasks {
    type Message = mesh::SubtaskRequest;

    fn subject(&self) -> String {
        format!("{ROOT}.ctl.reconciler.subtasks")
    }

    fn pattern() -> String {
        Self.subject()
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "ctl.reconciler")?;
        tokens.word("subtasks")?;
        tokens.end()?;
        Ok(Self)
    }

    fn check(&self, question: &mesh::SubtaskRequest) -> Result<(), Invalid> {
        let invalid = |id: &str| Invalid::new("an id of the question is malformed", id);
        question
            .organization_id
            .parse::<OrganizationId>()
            .map_err(|_| invalid(&question.organization_id))?;
        question.task_id.parse::<TaskId>().map_err(|_| invalid(&question.task_id))?;
        question.step_id.parse::<StepId>().map_err(|_| invalid(&question.step_id))?;
        Ok(())
    }
}

impl Question for Subtasks {
    type Answer = mesh::SubtaskResponse;

    const GROUP: Option<&'static str> = Some("subtasks");
}

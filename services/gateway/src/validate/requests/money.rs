//! Budgets.

use construct_domain::TaskId;
use construct_proto::v1::CreateBudgetRequest;
use tonic::Status;

use crate::validate::{Violations, optional_id};

/// Returns the task of the budget, if it has one.
pub(crate) fn create_budget(request: &CreateBudgetRequest) -> Result<Option<TaskId>, Status> {
    let mut violations = Violations::in_request(request);
    let spec = request.spec.clone().unwrap_or_default();
    violations.require(spec.agent.is_empty() || spec.task.is_empty(), "spec.task", || {
        "must be empty when `agent` is set: a budget has one scope".into()
    });
    violations.require(spec.token_id.is_empty(), "spec.token_id", || {
        "must be empty: the budget of a token is set when the token is created".into()
    });
    violations.finish()?;
    optional_id(&spec.task)
}

//! Budgets, costs, and the catalog of models.

use construct_domain::{BudgetId, OrganizationId, TaskId};
use construct_proto::v1::{
    BudgetSpec, CostGroup, CreateBudgetRequest, GetCostsRequest, ListBudgetsRequest,
    ListCatalogModelsRequest, ModelProviderType, UpdateBudgetRequest,
};
use construct_store::Cursor;
use jiff::Timestamp;
use tonic::Status;

use crate::{
    convert,
    page::{Column, Page},
    validate::Violations,
};

/// Nine million dollars: beyond that sums saturate.
pub(super) const MAX_LIMIT: i64 = 9_000_000_000_000_000_000;

/// Returns the task it is for.
pub(crate) fn create_budget(request: &CreateBudgetRequest) -> Result<Option<TaskId>, Status> {
    let mut violations = Violations::new();
    let default = BudgetSpec::default();
    violations.require(request.spec.is_some(), "spec", || "is required".into());
    let spec = request.spec.as_ref().unwrap_or(&default);
    violations.require(spec.agent.is_empty() || spec.task.is_empty(), "spec.task", || {
        "must be empty when `agent` is given: a budget is for one of them".into()
    });
    if !spec.agent.is_empty() {
        violations.reference("spec.agent", &spec.agent, "an agent");
    }
    let task = if spec.task.is_empty() { None } else { violations.id("spec.task", &spec.task) };
    violations.require(spec.token_id.is_empty(), "spec.token_id", || {
        "must be empty: the budget of a token is given when the token is made".into()
    });
    violations.require(convert::to_period(spec.period()).is_some(), "spec.period", || {
        "is required: `TOTAL`, `DAY`, `MONTH` or `CALL`".into()
    });
    violations.range("spec.limit_pico_usd", spec.limit_pico_usd, 0..=MAX_LIMIT);
    violations.idempotency_key(&request.idempotency_key);
    violations.finish().map(|()| task)
}

/// A request that only names a budget.
pub(crate) fn budget(budget: &str, idempotency_key: &str) -> Result<BudgetId, Status> {
    let mut violations = Violations::new();
    let id = violations.id("budget", budget);
    violations.idempotency_key(idempotency_key);
    violations.finish().map(|()| id.unwrap_or(BudgetId::from_uuid(uuid::Uuid::nil())))
}

pub(crate) fn update_budget(request: &UpdateBudgetRequest) -> Result<BudgetId, Status> {
    let mut violations = Violations::new();
    let id = violations.id("budget", &request.budget);
    violations.range("limit_pico_usd", request.limit_pico_usd, 0..=MAX_LIMIT);
    violations.revision(request.revision);
    violations.idempotency_key(&request.idempotency_key);
    violations.finish().map(|()| id.unwrap_or(BudgetId::from_uuid(uuid::Uuid::nil())))
}

/// Returns the page and the task to filter by.
pub(crate) fn list_budgets(
    organization: OrganizationId,
    request: &ListBudgetsRequest,
) -> Result<(Page<Cursor>, Option<TaskId>), Status> {
    let mut violations = Violations::new();
    let filter = request.filter.clone().unwrap_or_default();
    if !filter.agent.is_empty() {
        violations.reference("filter.agent", &filter.agent, "an agent");
    }
    let task =
        if filter.task.is_empty() { None } else { violations.id("filter.task", &filter.task) };
    let orders = [Column::CreatedAt, Column::UpdatedAt];
    let page = Page::read(
        request.page.as_ref(),
        "ListBudgets",
        organization,
        &filter,
        &orders,
        &mut violations,
    );
    violations.finish().map(|()| (page, task))
}

/// What is understood of a request for costs.
pub(crate) struct Costs {
    pub(crate) task: Option<TaskId>,
    pub(crate) since: Option<Timestamp>,
    pub(crate) until: Option<Timestamp>,
}

pub(crate) fn get_costs(request: &GetCostsRequest) -> Result<Costs, Status> {
    let mut violations = Violations::new();
    violations.require(CostGroup::try_from(request.group).is_ok(), "group", || {
        "is not a known group".into()
    });
    for (field, reference, what) in
        [("agent", &request.agent, "an agent"), ("model", &request.model, "a model")]
    {
        if !reference.is_empty() {
            violations.reference(field, reference, what);
        }
    }
    let task = if request.task.is_empty() { None } else { violations.id("task", &request.task) };
    let mut time = |field: &str, time: Option<prost_types::Timestamp>| {
        let read = time.and_then(convert::to_time);
        violations.require(time.is_none() || read.is_some(), field, || "is not a time".into());
        read
    };
    let (since, until) = (time("since", request.since), time("until", request.until));
    violations.finish().map(|()| Costs { task, since, until })
}

pub(crate) fn list_catalog_models(request: &ListCatalogModelsRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    let known = ModelProviderType::try_from(request.r#type).is_ok();
    violations.require(known, "type", || "is not a known type".into());
    violations.finish()
}

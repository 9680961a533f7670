//! `BudgetService`: budgets and costs.

use construct_domain::{
    AgentId, BudgetId, ModelId, TaskId,
    budget::{Period, Scope},
};
use construct_proto::v1::{
    self, CreateBudgetRequest, DeleteBudgetRequest, DeleteBudgetResponse, GetBudgetRequest,
    GetCostsRequest, GetCostsResponse, ListBudgetsRequest, ListBudgetsResponse,
    UpdateBudgetRequest, budget_service_server::BudgetService, event::Payload,
};
use construct_runtime::clock;
use construct_store::{Budget, BudgetFilter, CostFilter, CostGroup, NewBudget, WriteOutput};
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{
    api::{Api, CallerContext, ReferenceResolver, no_wake},
    convert, events,
    page::Column,
    status,
    validate::{self, optional_id, requests},
};

/// Maximum number of cost rows, as the contract says.
const MAX_COST_ROWS: u32 = 1000;

fn render(kind: &'static str) -> impl FnOnce(&Budget) -> WriteOutput + Send {
    move |budget| {
        let budget = convert::budget(budget);
        events::write_output(kind, Payload::Budget(budget.clone()), &budget)
    }
}

#[tonic::async_trait]
impl BudgetService for Api {
    async fn create_budget(
        &self,
        request: Request<CreateBudgetRequest>,
    ) -> Result<Response<v1::Budget>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        let task = requests::create_budget(&request)?;
        let write = context.write("CreateBudget", &mut request);
        let spec = request.spec.unwrap_or_default();
        let mut resolver = ReferenceResolver::new(&write);
        let period = convert::to_period(spec.period()).unwrap_or(Period::Total);
        let scope = match (spec.agent.as_str(), task) {
            (_, Some(task)) => {
                // The row can refer to a task that is deleted but not erased yet.
                let found = context.store().task_get(context.organization(), task).await;
                Scope::Task(resolver.resolve(
                    &spec.task,
                    found.map(|task| task.state.id),
                    TaskId::from_uuid,
                )?)
            }
            ("", None) => Scope::Organization,
            (agent, None) => {
                let found = context.store().agent_resolve(context.organization(), agent).await;
                Scope::Agent(resolver.resolve(agent, found, AgentId::from_uuid)?)
            }
        };
        let new = NewBudget {
            id: BudgetId::from_uuid(Uuid::now_v7()),
            scope,
            period,
            limit: spec.limit_pico_usd,
        };
        let written = resolver
            .finish(context.store().budget_create(&write, new, render("budget.created")).await)?;
        context.answer(written, no_wake, convert::budget).await
    }

    async fn get_budget(
        &self,
        request: Request<GetBudgetRequest>,
    ) -> Result<Response<v1::Budget>, Status> {
        let (context, request) = self.begin_request(request)?;
        let id = validate::id(&request.budget)?;
        let found = context.store().budget_get(context.organization(), id, clock::now()).await;
        let budget = found.map_err(|error| status::for_reference(&request.budget, error))?;
        Ok(Response::new(convert::budget(&budget)))
    }

    async fn list_budgets(
        &self,
        request: Request<ListBudgetsRequest>,
    ) -> Result<Response<ListBudgetsResponse>, Status> {
        let (context, request, page) = self.begin_list_request(request, &Column::TIMES)?;
        let filter = request.filter.unwrap_or_default();
        let agent = match filter.agent.as_str() {
            "" => None,
            agent => {
                let found = context.store().agent_resolve(context.organization(), agent).await;
                Some(found.map_err(|error| status::for_reference(agent, error))?)
            }
        };
        let filter = BudgetFilter { agent, task: optional_id(&filter.task)? };
        let found = context
            .store()
            .budget_list(context.organization(), &filter, &page.query(), clock::now())
            .await;
        let budgets = found.map_err(status::from_store)?;
        let (budgets, info) =
            page.cut(&budgets, convert::budget, |budget| budget.cursor(page.key()));
        Ok(Response::new(ListBudgetsResponse { budgets, page: Some(info) }))
    }

    async fn update_budget(
        &self,
        request: Request<UpdateBudgetRequest>,
    ) -> Result<Response<v1::Budget>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let id = validate::id(&request.budget)?;
        let write = context.write("UpdateBudget", &mut request);
        let expected = (request.revision != 0).then_some(request.revision);
        let (limit, render) = (request.limit_pico_usd, render("budget.updated"));
        let updated = context.store().budget_update(&write, id, expected, limit, render).await;
        let updated = updated.map_err(|error| status::for_reference(&request.budget, error))?;
        context.answer(updated, no_wake, convert::budget).await
    }

    async fn delete_budget(
        &self,
        request: Request<DeleteBudgetRequest>,
    ) -> Result<Response<DeleteBudgetResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let id = validate::id(&request.budget)?;
        let write = context.write("DeleteBudget", &mut request);
        let render = |budget: &Budget| events::deletion_output("budget.deleted", budget.id);
        let deleted = context.store().budget_delete(&write, id, render).await;
        let deleted = deleted.map_err(|error| status::for_reference(&request.budget, error))?;
        context.answer(deleted, no_wake, |_| DeleteBudgetResponse {}).await
    }

    async fn get_costs(
        &self,
        request: Request<GetCostsRequest>,
    ) -> Result<Response<GetCostsResponse>, Status> {
        let (context, request) = self.begin_request(request)?;
        let filter = CostFilter {
            agent: agent(&context, &request.agent).await?,
            task: optional_id(&request.task)?,
            model: model(&context, &request.model).await?,
            since: request.since.and_then(convert::to_time),
            until: request.until.and_then(convert::to_time),
        };
        let organization = context.organization();
        // The costs of one task are a fast query.
        let _permit = if filter.task.is_none() {
            Some(self.acquire_sum_permit(organization).await?)
        } else {
            None
        };
        let total = context.store().cost_list(organization, &filter, CostGroup::All, 1).await;
        let total =
            total.map_err(status::from_store)?.first().map(convert::cost).unwrap_or_default();
        let costs = match group(request.group()) {
            None => Vec::new(),
            Some(group) => {
                let costs =
                    context.store().cost_list(organization, &filter, group, MAX_COST_ROWS).await;
                costs.map_err(status::from_store)?.iter().map(convert::cost).collect()
            }
        };
        Ok(Response::new(GetCostsResponse { total: Some(total), costs }))
    }
}

fn group(group: v1::CostGroup) -> Option<CostGroup> {
    match group {
        v1::CostGroup::Unspecified => None,
        v1::CostGroup::Agent => Some(CostGroup::Agent),
        v1::CostGroup::Model => Some(CostGroup::Model),
        v1::CostGroup::Task => Some(CostGroup::Task),
        v1::CostGroup::Day => Some(CostGroup::Day),
        v1::CostGroup::Purpose => Some(CostGroup::Purpose),
    }
}

/// An agent by name or id. Deleted agents have costs too, so an id need not exist.
pub(crate) async fn agent(
    context: &CallerContext,
    reference: &str,
) -> Result<Option<AgentId>, Status> {
    if reference.is_empty() {
        return Ok(None);
    }
    if let Ok(id) = reference.parse() {
        return Ok(Some(id));
    }
    let found = context.store().agent_resolve(context.organization(), reference).await;
    found.map(Some).map_err(|error| status::for_reference(reference, error))
}

/// A model by name or id; see [`agent`].
pub(crate) async fn model(
    context: &CallerContext,
    reference: &str,
) -> Result<Option<ModelId>, Status> {
    if reference.is_empty() {
        return Ok(None);
    }
    if let Ok(id) = reference.parse() {
        return Ok(Some(id));
    }
    let found = context.store().model_resolve(context.organization(), reference).await;
    found.map(Some).map_err(|error| status::for_reference(reference, error))
}

//! `ApprovalService`. A decision is an intent: what becomes of the script is the reconciler's
//! business.

use construct_proto::v1::{
    self, DecideApprovalRequest, GetApprovalRequest, ListApprovalsRequest, ListApprovalsResponse,
    approval_service_server::ApprovalService, decide_approval_request::Decision, event::Payload,
};
use construct_store::{ApprovalDecision, ApprovalFilter, StoredApproval, WriteOutput};
use tonic::{Request, Response, Status};

use crate::{
    api::Api,
    convert, events,
    page::Column,
    status,
    validate::{self, optional_id},
};

fn render(approval: &StoredApproval) -> WriteOutput {
    let approval = convert::approval(approval);
    events::rendered("approval.decided", Payload::Approval(approval.clone()), &approval)
}

#[tonic::async_trait]
impl ApprovalService for Api {
    async fn get_approval(
        &self,
        request: Request<GetApprovalRequest>,
    ) -> Result<Response<v1::Approval>, Status> {
        let (entry, request) = self.enter(request)?;
        let id = validate::id(&request.approval)?;
        let found = entry.store().approval_get(entry.organization(), id).await;
        let approval = found.map_err(|error| status::about(&request.approval, error))?;
        Ok(Response::new(convert::approval(&approval)))
    }

    async fn list_approvals(
        &self,
        request: Request<ListApprovalsRequest>,
    ) -> Result<Response<ListApprovalsResponse>, Status> {
        let (entry, request, page) = self.enter_list(request, &Column::TIMES)?;
        let organization = entry.organization();
        let filter = request.filter.unwrap_or_default();
        let filter = ApprovalFilter {
            task: optional_id(&filter.task)?,
            state: convert::to_approval_state(filter.state()),
            tree: optional_id(&filter.tree)?,
        };
        let found = entry.store().approval_list(organization, &filter, &page.query()).await;
        let approvals = found.map_err(status::of_store)?;
        let (approvals, info) =
            page.cut(&approvals, convert::approval, |approval| approval.cursor(page.key()));
        Ok(Response::new(ListApprovalsResponse { approvals, page: Some(info) }))
    }

    async fn decide_approval(
        &self,
        request: Request<DecideApprovalRequest>,
    ) -> Result<Response<v1::Approval>, Status> {
        let (entry, mut request) = self.enter(request)?;
        let id = validate::id(&request.approval)?;
        let write = entry.write("DecideApproval", &mut request);
        let decision = ApprovalDecision {
            approved: request.decision() == Decision::Approve,
            decided_by: entry.name(),
            comment: request.words,
            arguments_hash: (!request.arguments_hash.is_empty()).then_some(request.arguments_hash),
        };
        let decided = entry.store().approval_decide(&write, id, decision, render).await;
        let decided = decided.map_err(|error| status::about(&request.approval, error))?;
        let wake = |approval: &StoredApproval| Some((approval.task, "an approval was decided"));
        entry.answer(decided, wake, convert::approval).await
    }
}

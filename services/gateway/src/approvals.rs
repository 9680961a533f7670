//! `ApprovalService`. A decision is an intent; the reconciler continues the script.

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
    events::write_output("approval.decided", Payload::Approval(approval.clone()), &approval)
}

#[tonic::async_trait]
impl ApprovalService for Api {
    async fn get_approval(
        &self,
        request: Request<GetApprovalRequest>,
    ) -> Result<Response<v1::Approval>, Status> {
        let (context, request) = self.begin_request(request)?;
        let id = validate::id(&request.approval)?;
        let found = context.store().approval_get(context.organization(), id).await;
        let approval = found.map_err(|error| status::for_reference(&request.approval, error))?;
        Ok(Response::new(convert::approval(&approval)))
    }

    async fn list_approvals(
        &self,
        request: Request<ListApprovalsRequest>,
    ) -> Result<Response<ListApprovalsResponse>, Status> {
        let (context, request, page) = self.begin_list_request(request, &Column::TIMES)?;
        let organization = context.organization();
        let filter = request.filter.unwrap_or_default();
        let filter = ApprovalFilter {
            task: optional_id(&filter.task)?,
            state: convert::to_approval_state(filter.state()),
            tree: optional_id(&filter.tree)?,
        };
        let found = context.store().approval_list(organization, &filter, &page.query()).await;
        let approvals = found.map_err(status::from_store)?;
        let (approvals, info) =
            page.cut(&approvals, convert::approval, |approval| approval.cursor(page.key()));
        Ok(Response::new(ListApprovalsResponse { approvals, page: Some(info) }))
    }

    async fn decide_approval(
        &self,
        request: Request<DecideApprovalRequest>,
    ) -> Result<Response<v1::Approval>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let id = validate::id(&request.approval)?;
        let write = context.write("DecideApproval", &mut request);
        let decision = ApprovalDecision {
            approved: request.decision() == Decision::Approve,
            decided_by: context.name(),
            comment: request.comment,
            arguments_hash: (!request.arguments_hash.is_empty()).then_some(request.arguments_hash),
        };
        let decided = context.store().approval_decide(&write, id, decision, render).await;
        let decided = decided.map_err(|error| status::for_reference(&request.approval, error))?;
        let wake = |approval: &StoredApproval| Some((approval.task, "an approval was decided"));
        context.answer(decided, wake, convert::approval).await
    }
}

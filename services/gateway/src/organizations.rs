//! `OrganizationService`.

use std::time::Duration;

use construct_domain::{OrganizationId, access::Role};
use construct_proto::v1::{
    self, CreateInvitationRequest, CreateOrganizationRequest, CreateOrganizationResponse,
    DeleteOrganizationRequest, DeleteOrganizationResponse, GetOrganizationRequest,
    ListInvitationsRequest, ListInvitationsResponse, ListMembersRequest, ListMembersResponse,
    ListOrganizationsRequest, ListOrganizationsResponse, RemoveMemberRequest, RemoveMemberResponse,
    RevokeInvitationRequest, UpdateMemberRequest, UpdateOrganizationRequest, WhoAmIRequest,
    WhoAmIResponse, organization_service_server::OrganizationService,
};
use construct_store::{
    Error, NewEvent, WriteOutput,
    identity::{NewInvitation, NewOrganization, NewSetupCode, Organization, OrganizationChanges},
};
use construct_wire::identity as show;
use prost::Message;
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{
    api::{Api, CallerContext, no_wake},
    api_keys::SETUP_CODE_LIFETIME,
    convert,
    identity::credential,
    page::Column,
    status, validate,
};

/// Default lifetime of an invitation.
const INVITATION_LIFETIME: Duration = Duration::from_secs(14 * 24 * 3600);

/// The role of a validated request, which requires one.
fn role(role: v1::Role) -> Result<Role, Status> {
    show::to_role(role).ok_or_else(|| Status::invalid_argument("role: is required"))
}

/// The response only: changes of organizations publish no event, and the store drops this one.
pub(crate) fn response_output(response: &impl Message) -> WriteOutput {
    let event = NewEvent { kind: String::new(), payload: Vec::new(), step: None };
    WriteOutput { event, response: response.encode_to_vec() }
}

/// Checks that a request names the organization it works in: changes and deletions name it twice.
async fn check_reference(context: &CallerContext, reference: &str) -> Result<(), Status> {
    let found = context.store().organization_find(context.user(), reference).await;
    let found = found.map_err(|error| status::for_reference(reference, error))?;
    if found.id == context.organization() {
        return Ok(());
    }
    Err(status::for_reference(reference, Error::NotFound { what: "organization" }))
}

/// The organization to delete: the one that the call works in or, for the operator's, any.
async fn deletion_target(
    context: &CallerContext,
    reference: &str,
) -> Result<OrganizationId, Status> {
    if context.organization() == OrganizationId::LOCAL {
        let found = context.store().organization_resolve(reference).await;
        return found.map_err(|error| status::for_reference(reference, error));
    }
    check_reference(context, reference).await.map(|()| context.organization())
}

#[tonic::async_trait]
impl OrganizationService for Api {
    async fn create_organization(
        &self,
        request: Request<CreateOrganizationRequest>,
    ) -> Result<Response<CreateOrganizationResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let write = context.write("CreateOrganization", &mut request);
        let spec = request.spec.unwrap_or_default();
        let code = match context.caller().key {
            Some(_) => {
                crate::api_keys::ensure_unlimited_key(&context)?;
                let (text, secret) = credential::mint(credential::CODE)?;
                let code = NewSetupCode {
                    secret,
                    name: "first key".to_owned(),
                    role: Role::Owner,
                    scopes: vec![construct_domain::access::Scope::Admin],
                    user: context.user(),
                    made_by: context.caller().key,
                    key_expires_at: context.caller().until,
                    expires_at: write.now + SETUP_CODE_LIFETIME,
                    limits: construct_store::Limits::default(),
                };
                Some((text, code))
            }
            None => None,
        };
        let new = NewOrganization {
            id: OrganizationId::from_uuid(Uuid::now_v7()),
            name: spec.name,
            slug: spec.slug,
            avatar_url: spec.avatar_url,
            owner: context.user(),
        };
        let answer = |organization: &Organization, setup_code: Option<v1::SetupCode>| {
            CreateOrganizationResponse {
                organization: Some(show::organization(organization)),
                setup_code,
            }
        };
        // A repeated request gets no code: the code is not stored.
        let render = |organization: &Organization| response_output(&answer(organization, None));
        let stored = code.as_ref().map(|(_, code)| code);
        // Each organization has its own quotas, which the operator assigns.
        let limit = (context.organization() != OrganizationId::LOCAL)
            .then_some(self.max_organizations_per_user());
        let written = context.store().organization_create(&write, new, stored, limit, render).await;
        let given = code.map(|(code, stored)| v1::SetupCode {
            code,
            expires_at: Some(convert::time(stored.expires_at)),
        });
        context
            .answer(written.map_err(status::from_store)?, no_wake, |made| answer(made, given))
            .await
    }

    async fn get_organization(
        &self,
        request: Request<GetOrganizationRequest>,
    ) -> Result<Response<v1::Organization>, Status> {
        let (context, request) = self.begin_request(request)?;
        let own = context.organization().to_string();
        let reference = if request.organization.is_empty() { &own } else { &request.organization };
        let found = context.store().organization_find(context.user(), reference).await;
        let found = found.map_err(|error| status::for_reference(reference, error))?;
        if context.caller().key.is_some() && found.id != context.organization() {
            return Err(status::for_reference(reference, Error::NotFound { what: "organization" }));
        }
        Ok(Response::new(show::organization(&visible_organization(found, &context))))
    }

    async fn list_organizations(
        &self,
        request: Request<ListOrganizationsRequest>,
    ) -> Result<Response<ListOrganizationsResponse>, Status> {
        let (context, _, page) = self.begin_list_request(request, &[Column::CreatedAt])?;
        if context.caller().key.is_some() {
            let own = context
                .store()
                .organization_find(context.user(), &context.organization().to_string())
                .await;
            let own = show::organization(&visible_organization(
                own.map_err(status::from_store)?,
                &context,
            ));
            let organizations = if page.after.is_some() { Vec::new() } else { vec![own] };
            return Ok(Response::new(ListOrganizationsResponse {
                organizations,
                page: Some(v1::PageInfo::default()),
            }));
        }
        let found = context
            .store()
            .organization_list(context.user(), &page.query())
            .await
            .map_err(status::from_store)?;
        let (organizations, info) =
            page.cut(&found, show::organization, |found| found.cursor(page.key()));
        Ok(Response::new(ListOrganizationsResponse { organizations, page: Some(info) }))
    }

    async fn update_organization(
        &self,
        request: Request<UpdateOrganizationRequest>,
    ) -> Result<Response<v1::Organization>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        check_reference(&context, &request.organization).await?;
        let write = context.write("UpdateOrganization", &mut request);
        let changes = OrganizationChanges {
            name: request.name,
            slug: request.slug,
            avatar_url: request.avatar_url,
        };
        let expected = (request.revision != 0).then_some(request.revision);
        let render =
            |organization: &Organization| response_output(&show::organization(organization));
        let written = context
            .store()
            .organization_update(&write, context.user(), expected, changes, render)
            .await;
        context.answer(written.map_err(status::from_store)?, no_wake, show::organization).await
    }

    async fn delete_organization(
        &self,
        request: Request<DeleteOrganizationRequest>,
    ) -> Result<Response<DeleteOrganizationResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let target = deletion_target(&context, &request.organization).await?;
        let write = context.write("DeleteOrganization", &mut request);
        let render = |_: &Organization| response_output(&DeleteOrganizationResponse {});
        let written = context.store().organization_delete(&write, target, render).await;
        let written = written.map_err(|error| status::for_reference(&target.to_string(), error))?;
        tracing::info!(organization = %target, by = context.name(), "organization deleted");
        context.answer(written, no_wake, |_| DeleteOrganizationResponse {}).await
    }

    async fn list_members(
        &self,
        request: Request<ListMembersRequest>,
    ) -> Result<Response<ListMembersResponse>, Status> {
        let (context, _, page) = self.begin_list_request(request, &[Column::CreatedAt])?;
        let found = context
            .store()
            .member_list(context.organization(), &page.query())
            .await
            .map_err(status::from_store)?;
        let (members, info) = page.cut(&found, show::member, |member| member.cursor(page.key()));
        Ok(Response::new(ListMembersResponse { members, page: Some(info) }))
    }

    async fn update_member(
        &self,
        request: Request<UpdateMemberRequest>,
    ) -> Result<Response<v1::Member>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let (user, role) = (validate::id(&request.user)?, role(request.role())?);
        let write = context.write("UpdateMember", &mut request);
        let expected = (request.revision != 0).then_some(request.revision);
        let render = |member: &_| response_output(&show::member(member));
        let written = context
            .store()
            .member_update(&write, (user, role), context.caller().role, expected, render)
            .await;
        context
            .answer(
                written.map_err(|error| status::for_reference(&request.user, error))?,
                no_wake,
                show::member,
            )
            .await
    }

    async fn remove_member(
        &self,
        request: Request<RemoveMemberRequest>,
    ) -> Result<Response<RemoveMemberResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let user = validate::id(&request.user)?;
        let write = context.write("RemoveMember", &mut request);
        let render = |_: &_| response_output(&RemoveMemberResponse {});
        let written =
            context.store().member_remove(&write, user, context.caller().role, render).await;
        let written = written.map_err(|error| status::for_reference(&request.user, error))?;
        context.answer(written, no_wake, |_| RemoveMemberResponse {}).await
    }

    async fn create_invitation(
        &self,
        request: Request<CreateInvitationRequest>,
    ) -> Result<Response<v1::Invitation>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let role = role(request.role())?;
        if !context.caller().may_grant(role, &[]) {
            return Err(status::from_store(Error::InsufficientRole));
        }
        let write = context.write("CreateInvitation", &mut request);
        let new = NewInvitation {
            id: construct_domain::InvitationId::from_uuid(Uuid::now_v7()),
            email: request.email.trim().to_lowercase(),
            role,
            invited_by: context.name(),
            expires_at: write.now
                + request
                    .expires_in
                    .and_then(|life| life.try_into().ok())
                    .unwrap_or(INVITATION_LIFETIME),
        };
        let render = |invitation: &_| response_output(&show::invitation(invitation));
        let written = context.store().invitation_create(&write, new, render).await;
        context.answer(written.map_err(status::from_store)?, no_wake, show::invitation).await
    }

    async fn list_invitations(
        &self,
        request: Request<ListInvitationsRequest>,
    ) -> Result<Response<ListInvitationsResponse>, Status> {
        let (context, _, page) = self.begin_list_request(request, &[Column::CreatedAt])?;
        let found = context.store().invitation_list(context.organization(), &page.query()).await;
        let found = found.map_err(status::from_store)?;
        let (invitations, info) =
            page.cut(&found, show::invitation, |found| found.cursor(page.key()));
        Ok(Response::new(ListInvitationsResponse { invitations, page: Some(info) }))
    }

    async fn revoke_invitation(
        &self,
        request: Request<RevokeInvitationRequest>,
    ) -> Result<Response<v1::Invitation>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let id = validate::id(&request.invitation)?;
        let write = context.write("RevokeInvitation", &mut request);
        let render = |invitation: &_| response_output(&show::invitation(invitation));
        let written = context.store().invitation_revoke(&write, id, render).await;
        let written = written.map_err(|error| status::for_reference(&request.invitation, error))?;
        context.answer(written, no_wake, show::invitation).await
    }

    async fn who_am_i(
        &self,
        request: Request<WhoAmIRequest>,
    ) -> Result<Response<WhoAmIResponse>, Status> {
        let (context, WhoAmIRequest {}) = self.begin_request(request)?;
        let user = context.store().user_get(context.user()).await.map_err(status::from_store)?;
        let caller = context.caller();
        Ok(Response::new(WhoAmIResponse {
            user_id: user.id.to_string(),
            name: user.name,
            email: user.email,
            api_key_id: caller.key.map(|key| key.to_string()).unwrap_or_default(),
            organization_id: caller.organization.to_string(),
            role: show::role(caller.role).into(),
            scopes: show::scopes(&caller.scopes),
        }))
    }
}

/// An organization with the caller's role: a key may have a lower role than its user.
fn visible_organization(organization: Organization, context: &CallerContext) -> Organization {
    let role =
        if context.caller().key.is_some() { context.caller().role } else { organization.role };
    Organization { role, ..organization }
}

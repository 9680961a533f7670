//! Organizations, members, invitations, keys.

use std::time::Duration;

use construct_domain::{
    ApiKeyId, InvitationId, OrganizationId, UserId,
    access::{Role, Scope},
};
use construct_proto::v1::{
    ApiKeyLimits, ApiKeySpec, CreateApiKeyRequest, CreateInvitationRequest,
    CreateOrganizationRequest, CreateSetupCodeRequest, DeleteOrganizationRequest,
    ExchangeSetupCodeRequest, GetApiKeyRequest, GetOrganizationRequest, ListApiKeysRequest,
    ListInvitationsRequest, ListMembersRequest, ListOrganizationsRequest, OrganizationSpec,
    PageRequest, RemoveMemberRequest, RevokeApiKeyRequest, RevokeInvitationRequest,
    UpdateApiKeyRequest, UpdateMemberRequest, UpdateOrganizationRequest,
};
use construct_store::{Cursor, Limits};
use construct_wire::identity::to_role;
use tonic::Status;

use super::tasks::checked;
use crate::{
    page::{Column, Page},
    quotas::tiers,
    validate::Violations,
};

/// Characters of an organization's name.
const NAME_CHARS: usize = 200;
/// Characters of a key's name.
const KEY_NAME_CHARS: usize = 100;
/// Bytes of the address of a picture.
const AVATAR_BYTES: usize = 2048;
/// Bytes of an e-mail address, as SMTP has it.
const EMAIL_BYTES: usize = 254;
/// Bytes of a set-up code; ours are shorter.
const CODE_BYTES: usize = 128;
const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(24 * 3600);

pub(crate) fn create_organization(request: &CreateOrganizationRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    violations.require(request.spec.is_some(), "spec", || "is required".into());
    let default = OrganizationSpec::default();
    let spec = request.spec.as_ref().unwrap_or(&default);
    title(&mut violations, "spec.name", &spec.name, NAME_CHARS);
    violations.name("spec.slug", &spec.slug);
    avatar(&mut violations, "spec.avatar_url", &spec.avatar_url);
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

pub(crate) fn get_organization(request: &GetOrganizationRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    if !request.organization.is_empty() {
        violations.reference("organization", &request.organization, "an organization");
    }
    violations.finish()
}

pub(crate) fn update_organization(request: &UpdateOrganizationRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    violations.reference("organization", &request.organization, "an organization");
    if let Some(new) = &request.name {
        title(&mut violations, "name", new, NAME_CHARS);
    }
    if let Some(new) = &request.slug {
        violations.name("slug", new);
    }
    avatar(&mut violations, "avatar_url", request.avatar_url());
    violations.revision(request.revision);
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

pub(crate) fn delete_organization(request: &DeleteOrganizationRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    violations.reference("organization", &request.organization, "an organization");
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

pub(crate) fn list_organizations(
    organization: OrganizationId,
    request: &ListOrganizationsRequest,
) -> Result<Page<Cursor>, Status> {
    list(organization, request.page.as_ref(), "ListOrganizations")
}

pub(crate) fn list_members(
    organization: OrganizationId,
    request: &ListMembersRequest,
) -> Result<Page<Cursor>, Status> {
    list(organization, request.page.as_ref(), "ListMembers")
}

pub(crate) fn list_invitations(
    organization: OrganizationId,
    request: &ListInvitationsRequest,
) -> Result<Page<Cursor>, Status> {
    list(organization, request.page.as_ref(), "ListInvitations")
}

pub(crate) fn list_api_keys(
    organization: OrganizationId,
    request: &ListApiKeysRequest,
) -> Result<Page<Cursor>, Status> {
    list(organization, request.page.as_ref(), "ListApiKeys")
}

fn list(
    organization: OrganizationId,
    page: Option<&PageRequest>,
    method: &'static str,
) -> Result<Page<Cursor>, Status> {
    let mut violations = Violations::new();
    let page = Page::read(page, method, organization, &(), &[Column::CreatedAt], &mut violations);
    violations.finish().map(|()| page)
}

pub(crate) fn update_member(request: &UpdateMemberRequest) -> Result<(UserId, Role), Status> {
    let mut violations = Violations::new();
    let user = violations.id("user", &request.user);
    let role = to_role(request.role());
    violations.require(role.is_some(), "role", || "is required".into());
    violations.revision(request.revision);
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, user.zip(role))
}

pub(crate) fn remove_member(request: &RemoveMemberRequest) -> Result<UserId, Status> {
    let mut violations = Violations::new();
    let user = violations.id("user", &request.user);
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, user)
}

/// What is asked for by a valid invitation.
pub(crate) struct CheckedInvitation {
    /// In lower case.
    pub(crate) email: String,
    pub(crate) role: Role,
    pub(crate) life: Duration,
}

pub(crate) fn create_invitation(
    request: &CreateInvitationRequest,
) -> Result<CheckedInvitation, Status> {
    let mut violations = Violations::new();
    let email = request.email.trim().to_lowercase();
    let whole =
        email.split_once('@').is_some_and(|(name, host)| !name.is_empty() && !host.is_empty());
    let plain = !email.chars().any(|c| c.is_whitespace() || c.is_control());
    violations.require(whole && plain && email.len() <= EMAIL_BYTES, "email", || {
        format!("must be an e-mail address of at most {EMAIL_BYTES} characters")
    });
    let role = to_role(request.role());
    violations.require(role.is_some(), "role", || "is required".into());
    let life =
        life(&mut violations, "expires_in", request.expires_in, 90 * DAY, "one minute to 90 days");
    violations.idempotency_key(&request.idempotency_key);
    checked(
        violations,
        role.map(|role| CheckedInvitation { email, role, life: life.unwrap_or(14 * DAY) }),
    )
}

pub(crate) fn revoke_invitation(request: &RevokeInvitationRequest) -> Result<InvitationId, Status> {
    let mut violations = Violations::new();
    let id = violations.id("invitation", &request.invitation);
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, id)
}

/// How long the key holds, and its limits.
pub(crate) fn create_api_key(
    request: &CreateApiKeyRequest,
) -> Result<(Option<Duration>, Limits), Status> {
    let mut violations = Violations::new();
    let limits = key(&mut violations, request.spec.as_ref());
    let life = key_life(&mut violations, "expires_in", request.expires_in);
    violations.finish().map(|()| (life, limits))
}

/// How long the code holds, how long the key, and its limits.
pub(crate) fn create_setup_code(
    request: &CreateSetupCodeRequest,
) -> Result<(Option<Duration>, Option<Duration>, Limits), Status> {
    let mut violations = Violations::new();
    let limits = key(&mut violations, request.spec.as_ref());
    let key_life = key_life(&mut violations, "key_expires_in", request.key_expires_in);
    let life =
        life(&mut violations, "expires_in", request.expires_in, DAY, "one minute to one day");
    violations.finish().map(|()| (life, key_life, limits))
}

pub(crate) fn exchange_setup_code(request: &ExchangeSetupCodeRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    violations
        .require((1..=CODE_BYTES).contains(&request.code.len()), "code", || "is required".into());
    violations.finish()
}

pub(crate) fn revoke_api_key(request: &RevokeApiKeyRequest) -> Result<ApiKeyId, Status> {
    let mut violations = Violations::new();
    let id = violations.id("api_key", &request.api_key);
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, id)
}

/// The key it is about, and its limits from now on.
pub(crate) fn update_api_key(request: &UpdateApiKeyRequest) -> Result<(ApiKeyId, Limits), Status> {
    let mut violations = Violations::new();
    let id = violations.id("api_key", &request.api_key);
    let limits = limits(&mut violations, "limits", request.limits.as_ref());
    violations.revision(request.revision);
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, id.map(|id| (id, limits)))
}

pub(crate) fn get_api_key(request: &GetApiKeyRequest) -> Result<ApiKeyId, Status> {
    let mut violations = Violations::new();
    let id = violations.id("api_key", &request.api_key);
    checked(violations, id)
}

fn limits(violations: &mut Violations, field: &str, limits: Option<&ApiKeyLimits>) -> Limits {
    let limits = limits.copied().unwrap_or_default();
    let limits = Limits {
        requests_per_minute: limits.requests_per_minute,
        tasks_per_day: limits.tasks_per_day,
        runs_per_day: limits.runs_per_day,
        tokens_per_day: limits.tokens_per_day,
        spend_per_month_pico_usd: limits.spend_per_month_pico_usd,
        storage_bytes: limits.storage_bytes,
        ..Limits::default()
    };
    if let Some((limit, words)) = tiers::wrong(&limits) {
        violations.add(format!("{field}.{limit}"), words);
    }
    limits
}

fn key(violations: &mut Violations, spec: Option<&ApiKeySpec>) -> Limits {
    violations.require(spec.is_some(), "spec", || "is required".into());
    let default = ApiKeySpec::default();
    let spec = spec.unwrap_or(&default);
    title(violations, "spec.name", &spec.name, KEY_NAME_CHARS);
    let most = Scope::ALL.len();
    violations.require((1..=most).contains(&spec.scopes.len()), "spec.scopes", || {
        format!("must have 1 to {most} entries, has {}", spec.scopes.len())
    });
    for (at, scope) in spec.scopes.iter().take(most).enumerate() {
        violations.require(Scope::parse(scope).is_some(), &format!("spec.scopes[{at}]"), || {
            let known =
                Scope::ALL.iter().map(|scope| scope.as_str()).collect::<Vec<_>>().join(", ");
            format!("must be one of {known}")
        });
    }
    limits(violations, "spec.limits", spec.limits.as_ref())
}

fn title(violations: &mut Violations, field: &str, text: &str, most: usize) {
    violations.require(!text.trim().is_empty(), field, || "is required".into());
    violations.chars(field, text, most);
    violations.one_line(field, text);
}

fn avatar(violations: &mut Violations, field: &str, url: &str) {
    let fits = url.is_empty()
        || (url.len() <= AVATAR_BYTES
            && reqwest::Url::parse(url)
                .is_ok_and(|url| url.scheme() == "https" && url.host().is_some()));
    violations.require(fits, field, || {
        format!("must be empty or an `https` address of at most {AVATAR_BYTES} characters")
    });
}

fn key_life(
    violations: &mut Violations,
    field: &str,
    life_: Option<prost_types::Duration>,
) -> Option<Duration> {
    life(violations, field, life_, 3653 * DAY, "one minute to 10 years")
}

fn life(
    violations: &mut Violations,
    field: &str,
    life: Option<prost_types::Duration>,
    longest: Duration,
    words: &str,
) -> Option<Duration> {
    let life = Duration::try_from(life?).ok().filter(|life| (MINUTE..=longest).contains(life));
    violations.require(life.is_some(), field, || format!("must be {words}"));
    life
}

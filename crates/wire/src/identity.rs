//! Organizations and keys for clients. Credentials never leave the store.

use construct_domain::{UserId, access};
use construct_proto::v1;
use construct_store::{
    Limits,
    identity::{ApiKey, Invitation, InvitationState, Member, Organization, OrganizationKind},
};

use crate::convert::{metadata, time};

/// A role for clients.
pub fn role(role: access::Role) -> v1::Role {
    match role {
        access::Role::Viewer => v1::Role::Viewer,
        access::Role::Member => v1::Role::Member,
        access::Role::Admin => v1::Role::Admin,
        access::Role::Owner => v1::Role::Owner,
    }
}

/// A role from clients; `None` for `UNSPECIFIED`.
pub fn to_role(role: v1::Role) -> Option<access::Role> {
    match role {
        v1::Role::Unspecified => None,
        v1::Role::Viewer => Some(access::Role::Viewer),
        v1::Role::Member => Some(access::Role::Member),
        v1::Role::Admin => Some(access::Role::Admin),
        v1::Role::Owner => Some(access::Role::Owner),
    }
}

/// The names of scopes.
pub fn scopes(scopes: &[access::Scope]) -> Vec<String> {
    scopes.iter().map(|scope| scope.as_str().to_owned()).collect()
}

/// An organization for one of its members.
pub fn organization(organization: &Organization) -> v1::Organization {
    let times = (organization.created_at, organization.updated_at);
    v1::Organization {
        metadata: metadata(organization.id, organization.id, times, organization.revision),
        spec: Some(v1::OrganizationSpec {
            name: organization.name.clone(),
            slug: organization.slug.clone(),
            avatar_url: organization.avatar_url.clone(),
        }),
        status: Some(v1::OrganizationStatus {
            kind: match organization.kind {
                OrganizationKind::Personal => v1::OrganizationKind::Personal,
                OrganizationKind::Team => v1::OrganizationKind::Team,
            }
            .into(),
            role: role(organization.role).into(),
        }),
    }
}

/// A member for clients.
pub fn member(member: &Member) -> v1::Member {
    v1::Member {
        metadata: metadata(
            member.user,
            member.organization,
            (member.created_at, member.updated_at),
            member.revision,
        ),
        name: member.name.clone(),
        email: member.email.clone(),
        role: role(member.role).into(),
    }
}

/// An invitation for clients.
pub fn invitation(invitation: &Invitation) -> v1::Invitation {
    let times = (invitation.created_at, invitation.updated_at);
    v1::Invitation {
        metadata: metadata(invitation.id, invitation.organization, times, invitation.revision),
        email: invitation.email.clone(),
        role: role(invitation.role).into(),
        state: match invitation.state {
            InvitationState::Pending => v1::InvitationState::Pending,
            InvitationState::Accepted => v1::InvitationState::Accepted,
            InvitationState::Revoked => v1::InvitationState::Revoked,
        }
        .into(),
        invited_by: invitation.invited_by.clone(),
        expires_at: Some(time(invitation.expires_at)),
        accepted_by: invitation.accepted_by.as_ref().map(UserId::to_string).unwrap_or_default(),
    }
}

/// The limits of a key; `None` without a limit.
fn limits(limits: &Limits) -> Option<v1::ApiKeyLimits> {
    let shown = v1::ApiKeyLimits {
        requests_per_minute: limits.requests_per_minute,
        tasks_per_day: limits.tasks_per_day,
        runs_per_day: limits.runs_per_day,
        tokens_per_day: limits.tokens_per_day,
        spend_per_month_pico_usd: limits.spend_per_month_pico_usd,
        storage_bytes: limits.storage_bytes,
    };
    (shown != v1::ApiKeyLimits::default()).then_some(shown)
}

/// An API key for clients, without its secret.
pub fn api_key(key: &ApiKey) -> v1::ApiKey {
    v1::ApiKey {
        metadata: metadata(
            key.id,
            key.organization,
            (key.created_at, key.updated_at),
            key.revision,
        ),
        spec: Some(v1::ApiKeySpec {
            name: key.name.clone(),
            role: role(key.role).into(),
            scopes: scopes(&key.scopes),
            limits: limits(&key.limits),
        }),
        prefix: key.prefix.clone(),
        user_id: key.user.to_string(),
        expires_at: key.expires_at.map(time),
        revoked_at: key.revoked_at.map(time),
        last_used_at: key.last_used_at.map(time),
        used: None,
    }
}

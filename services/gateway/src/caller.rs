//! The caller of a request, for the methods. `identity` authenticates it.

use std::sync::Arc;

use construct_domain::{
    ApiKeyId, OrganizationId, TaskId, UserId,
    access::{Role, Scope},
};
use construct_store::Limits;
use jiff::Timestamp;
use tonic::{Extensions, Status};

/// An authenticated caller and its organization. Every access to data names the organization of a
/// caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    /// The organization whose data the caller accesses.
    pub(crate) organization: OrganizationId,
    /// The user that the caller acts for.
    pub(crate) user: UserId,
    /// The API key of the caller.
    pub(crate) key: Option<ApiKeyId>,
    /// The limits of the key.
    pub(crate) limits: Limits,
    /// The key whose usage is counted: the caller's, or the one that requested the scan.
    pub(crate) counted_for: Option<ApiKeyId>,
    /// The role in the organization.
    pub(crate) role: Role,
    /// The scopes of the key.
    pub(crate) scopes: Arc<[Scope]>,
    /// When the credential expires.
    pub(crate) until: Option<Timestamp>,
    /// The only task that the token of a scan may access; it may call few methods.
    pub(crate) confined: Option<TaskId>,
}

impl Caller {
    /// The name of the caller in records.
    pub(crate) fn name(&self) -> String {
        match (self.key, self.user) {
            (Some(key), _) => key.to_string(),
            (None, UserId::LOCAL) => "local".to_owned(),
            (None, user) => user.to_string(),
        }
    }

    /// Whether the caller may access this task. If not, the task is reported as missing.
    pub(crate) fn may_see(&self, task: TaskId) -> bool {
        self.confined.is_none_or(|only| only == task)
    }

    /// Whether the caller may grant this role and these scopes.
    pub(crate) fn may_grant(&self, role: Role, scopes: &[Scope]) -> bool {
        role <= self.role && scopes.iter().all(|scope| scope.is_within(&self.scopes))
    }
}

/// The caller of a request, set by the layer of `identity`. A request that did not pass the layer
/// has none.
pub(crate) fn identify(extensions: &Extensions) -> Result<Caller, Status> {
    extensions
        .get::<Caller>()
        .cloned()
        .ok_or_else(|| Status::unauthenticated("the request was not authenticated"))
}

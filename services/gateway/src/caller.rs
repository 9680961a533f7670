//! Who calls, as the methods know it. `identity` finds it out.

use std::sync::Arc;

use construct_domain::{
    ApiKeyId, OrganizationId, TaskId, UserId,
    access::{Role, Scope},
};
use construct_store::Limits;
use jiff::Timestamp;
use tonic::{Extensions, Status};

/// Who calls, and on behalf of which organization. Every access to data names the organization of a
/// caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    /// Whose data the caller works with.
    pub(crate) organization: OrganizationId,
    /// In whose name they act.
    pub(crate) user: UserId,
    /// The key they presented.
    pub(crate) key: Option<ApiKeyId>,
    /// How much may be done with it.
    pub(crate) limits: Limits,
    /// The key that is counted for what they ask: the one they presented, or the one that a scan
    /// was asked for with.
    pub(crate) counted_for: Option<ApiKeyId>,
    /// What they are in the organization.
    pub(crate) role: Role,
    /// What their key is good for.
    pub(crate) scopes: Arc<[Scope]>,
    /// When what they presented ends by itself.
    pub(crate) until: Option<Timestamp>,
    /// The one task they may speak to, when they came with the token of a scan; they may call few
    /// methods then.
    pub(crate) confined: Option<TaskId>,
}

impl Caller {
    /// What the caller is called where it is written down who did something.
    pub(crate) fn name(&self) -> String {
        match (self.key, self.user) {
            (Some(key), _) => key.to_string(),
            (None, UserId::LOCAL) => "local".to_owned(),
            (None, user) => user.to_string(),
        }
    }

    /// Whether the caller may have to do with this task at all: it is answered as if there were
    /// none.
    pub(crate) fn may_see(&self, task: TaskId) -> bool {
        self.confined.is_none_or(|only| only == task)
    }

    /// Whether the caller may give somebody else this role and these scopes.
    pub(crate) fn may_grant(&self, role: Role, scopes: &[Scope]) -> bool {
        role <= self.role && scopes.iter().all(|scope| scope.is_within(&self.scopes))
    }
}

/// The caller of a request, as the layer of `identity` left it. A request that did not come through
/// the layer has none.
pub(crate) fn identify(extensions: &Extensions) -> Result<Caller, Status> {
    extensions
        .get::<Caller>()
        .cloned()
        .ok_or_else(|| Status::unauthenticated("nobody has looked at who calls"))
}

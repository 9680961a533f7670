//! Users, organizations, members, invitations and API keys. The gateway decides about permissions.
//! The store enforces the invariants: no organization without an owner, no key with more rights
//! than its creator.
//!
//! These entities have no events: not everyone who can watch an organization may see its members.

mod erase;
mod invitation;
mod key;
mod member;
mod organization;
mod user;

use construct_domain::access::{Role, Scope};

pub use erase::ErasureProgress;
#[cfg(test)]
pub(crate) use erase::TABLES as ERASED;
pub use invitation::{Invitation, InvitationState, NewInvitation};
pub use key::{ApiKey, KeyHolder, NewApiKey, NewSetupCode, SecretHash};
pub use member::Member;
pub use organization::{NewOrganization, Organization, OrganizationChanges, OrganizationKind};
pub use user::{Profile, User};

use crate::Error;

/// Decodes a role.
fn parse_role(text: &str) -> Result<Role, Error> {
    Role::parse(text).ok_or_else(|| Error::internal(format!("unknown role `{text}`")))
}

/// Decodes scopes. Unknown scopes are ignored.
fn parse_scopes(texts: &[String]) -> Vec<Scope> {
    texts.iter().filter_map(|text| Scope::parse(text)).collect()
}

/// Encodes scopes.
fn scope_names(scopes: &[Scope]) -> Vec<String> {
    scopes.iter().map(|scope| scope.as_str().to_owned()).collect()
}

/// Lists rows by time of creation, in either direction. `$select` is the module's macro that
/// selects the columns.
macro_rules! list_by_time {
    ($store:expr, $select:ident, $condition:literal, $created:literal, $id:literal, $page:expr, [$($argument:expr),*], $numbers:tt) => {{
        let (time, id) = $page.after_time()?;
        if $page.order.descending {
            crate::identity::list_by_time!(@rows $store, $select, $condition, $created, $id, "<", " DESC", $page, [$($argument),*], time, id, $numbers)
        } else {
            crate::identity::list_by_time!(@rows $store, $select, $condition, $created, $id, ">", "", $page, [$($argument),*], time, id, $numbers)
        }
    }};
    (@rows $store:expr, $select:ident, $condition:literal, $created:literal, $id:literal, $comparison:literal, $direction:literal, $page:expr,
     [$($argument:expr),*], $time:expr, $row:expr, ($first:literal, $second:literal, $third:literal)) => {
        $select!(
            [$condition " AND (" $created ", " $id ") " $comparison " ($" $first ", $" $second ")
              ORDER BY " $created $direction ", " $id $direction " LIMIT $" $third],
            $($argument,)*
            $time,
            $row,
            $page.limit(),
        )
        .fetch_all(&$store.pool)
        .await?
    };
}
pub(crate) use list_by_time;

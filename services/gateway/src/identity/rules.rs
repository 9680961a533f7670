//! What each method needs, as the contract's option `access` says. A method that does not say is
//! refused.

use std::{collections::HashMap, sync::LazyLock};

use construct_domain::{
    OrganizationId,
    access::{Role, Scope},
};
use construct_proto::{
    options,
    v1::{self, access::Grant},
};
use construct_wire::identity::to_role;
use tonic::Status;

use crate::caller::Caller;

/// What a method needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Nothing: it tells nothing of anybody, or looks at credentials itself.
    Public,
    /// Somebody, whoever it is.
    Caller,
    /// At least this role, and this scope.
    Role(Role, Scope),
    /// An owner of the operator's organization with every scope, because it reaches beyond one
    /// organization.
    Operator,
}

/// Methods of gRPC's own services. Which methods there are, and whether they can be called, is no
/// secret.
const PUBLIC: [&str; 5] = [
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/List",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

/// What each method needs, and whether it can be called with the token of a scan, by path. A method
/// whose option `access` is missing or incomplete is not there.
static BY_PATH: LazyLock<HashMap<String, (Access, bool)>> = LazyLock::new(|| {
    let ours = construct_proto::methods().filter_map(|method| {
        let option = options::access(&method)?;
        Some((
            path(method.parent_service().full_name(), method.name()),
            (Access::read(&option)?, option.scan_token),
        ))
    });
    PUBLIC.map(|path| (path.to_owned(), (Access::Public, false))).into_iter().chain(ours).collect()
});

/// What the method of this path needs. `None`: there is no such method, or it does not say.
pub(crate) fn of(path: &str) -> Option<Access> {
    BY_PATH.get(path).map(|(access, _)| *access)
}

/// Whether the method of this path can be called with the token of a scan, for the scan's own task.
/// The method itself checks that the call is about that task.
pub(crate) fn is_of_scans(path: &str) -> bool {
    BY_PATH.get(path).is_some_and(|(_, scan_token)| *scan_token)
}

/// As HTTP knows the method of a service with this full name.
pub(crate) fn path(service: &str, method: &str) -> String {
    format!("/{service}/{method}")
}

impl Access {
    /// Reads the option. `None`: it grants nothing to anybody, or names a scope that does not
    /// exist.
    fn read(option: &v1::Access) -> Option<Self> {
        let scope = if option.scope.is_empty() { None } else { Some(Scope::parse(&option.scope)?) };
        match (option.grant?, scope) {
            (Grant::Public(true), None) => Some(Self::Public),
            (Grant::Authenticated(true), None) => Some(Self::Caller),
            (Grant::Operator(true), None) => Some(Self::Operator),
            (Grant::Role(role), Some(scope)) => {
                Some(Self::Role(to_role(v1::Role::try_from(role).ok()?)?, scope))
            }
            _ => None,
        }
    }

    /// # Errors
    /// `PERMISSION_DENIED`, with words that say what is missing.
    pub(crate) fn check(self, caller: &Caller) -> Result<(), Status> {
        let (role, scope) = match self {
            Self::Public | Self::Caller => return Ok(()),
            Self::Role(role, scope) => (role, scope),
            Self::Operator if caller.organization == OrganizationId::LOCAL => {
                (Role::Owner, Scope::Admin)
            }
            Self::Operator => {
                return Err(Status::permission_denied(
                    "this is for the operator of the installation",
                ));
            }
        };
        if caller.role < role {
            let (needed, is) = (role.as_str(), caller.role.as_str());
            return Err(Status::permission_denied(format!(
                "this needs the role `{needed}`; the caller is `{is}`"
            )));
        }
        if !scope.is_within(&caller.scopes) {
            let words = format!("this needs a key with the scope `{}`", scope.as_str());
            return Err(Status::permission_denied(words));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_of_the_contract_says_who_may_call_it() {
        for method in construct_proto::methods() {
            let path = path(method.parent_service().full_name(), method.name());
            assert!(of(&path).is_some(), "{path} needs the option `access`");
        }
    }

    #[test]
    fn option_that_grants_nothing_or_half_a_rule_refuses_the_method() {
        let option =
            |grant, scope: &str| v1::Access { grant, scope: scope.into(), scan_token: true };
        let member = Some(Grant::Role(v1::Role::Member.into()));
        assert_eq!(
            Access::read(&option(member, "tasks:write")),
            Some(Access::Role(Role::Member, Scope::TasksWrite))
        );
        for (grant, scope) in [
            (None, ""),
            (None, "tasks:write"),
            (member, ""),
            (member, "task:write"),
            (Some(Grant::Role(v1::Role::Unspecified.into())), "tasks:write"),
            (Some(Grant::Role(99)), "tasks:write"),
            (Some(Grant::Public(false)), ""),
            (Some(Grant::Public(true)), "tasks:write"),
            (Some(Grant::Operator(true)), "admin"),
        ] {
            assert_eq!(Access::read(&option(grant, scope)), None, "{grant:?} {scope}");
        }
        assert_eq!(of("/construct.v1.AgentService/Nothing"), None);
    }

    /// What people read is what holds.
    #[test]
    fn the_documentation_has_this_table() {
        let mut rules: Vec<_> = construct_proto::methods()
            .map(|method| {
                let service = method.parent_service();
                let access = of(&path(service.full_name(), method.name()))
                    .expect("a test of its own finds it");
                (service.name().to_owned(), method.name().to_owned(), access)
            })
            .collect();
        rules.sort_by(|one, other| (&one.0, &one.1).cmp(&(&other.0, &other.1)));
        let mut groups: Vec<(String, String, Vec<String>)> = Vec::new();
        for (service, method, access) in rules {
            let needs = match access {
                Access::Public => "nobody has to be anybody | ".to_owned(),
                Access::Caller => "anybody | ".to_owned(),
                Access::Role(role, scope) => format!("{} | `{}`", role.as_str(), scope.as_str()),
                Access::Operator => "owner of the operator's organization | `admin`".to_owned(),
            };
            match groups.iter_mut().find(|(known, like, _)| *known == service && *like == needs) {
                Some((.., methods)) => methods.push(method),
                None => groups.push((service, needs, vec![method])),
            }
        }
        let rows = groups.iter().map(|(service, needs, methods)| {
            format!("| {service} | {} | {needs} |\n", methods.join(", "))
        });
        let table: String = rows.collect();
        let documentation = include_str!("../../../../docs/identity.md");
        assert!(documentation.ends_with(&table), "docs/identity.md has to end with:\n{table}");
        for scope in Scope::ALL {
            assert!(documentation.contains(&format!("`{}`", scope.as_str())), "{}", scope.as_str());
        }
    }

    /// A rule that lets viewers write would be a slip of the pen.
    #[test]
    fn nothing_is_written_by_viewers_and_nothing_read_needs_a_scope_for_writing() {
        for descriptor in construct_proto::methods() {
            let (service, method) = (descriptor.parent_service(), descriptor.name());
            let access =
                of(&path(service.full_name(), method)).expect("a test of its own finds it");
            let reads = ["Get", "List", "Explain", "Subscribe", "Watch", "Compare", "Download"]
                .iter()
                .any(|verb| method.starts_with(verb));
            let Access::Role(role, scope) = access else { continue };
            assert!(reads || role > Role::Viewer, "{method}");
            assert!(!reads || !scope.as_str().ends_with(":write"), "{method}");
        }
    }

    #[test]
    fn operators_are_owners_of_the_operators_organization() {
        let caller = |organization, role, scopes: &[Scope]| Caller {
            organization,
            user: construct_domain::UserId::LOCAL,
            key: None,
            limits: construct_store::Limits::default(),
            counted_for: None,
            role,
            scopes: scopes.into(),
            until: None,
            confined: None,
        };
        let other = OrganizationId::from_uuid(uuid::Uuid::max());
        for (caller, may) in [
            (caller(OrganizationId::LOCAL, Role::Owner, &[Scope::Admin]), true),
            (caller(OrganizationId::LOCAL, Role::Owner, &[Scope::TasksWrite]), false),
            (caller(OrganizationId::LOCAL, Role::Admin, &[Scope::Admin]), false),
            (caller(other, Role::Owner, &[Scope::Admin]), false),
        ] {
            assert_eq!(Access::Operator.check(&caller).is_ok(), may, "{caller:?}");
        }
    }
}

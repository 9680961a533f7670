//! The permissions that each method needs, from the contract's option `access`. A method without
//! the option is refused.

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

/// The permission that a method needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// None: the method reveals nothing confidential, or checks credentials itself.
    Public,
    /// Any authenticated caller.
    Caller,
    /// At least this role, and this scope.
    Role(Role, Scope),
    /// An owner of the operator's organization with every scope, for methods that reach beyond one
    /// organization.
    Operator,
}

/// Methods of gRPC's own services. Which methods exist, and whether they can be called, is public.
const PUBLIC: [&str; 5] = [
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/List",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

/// The permission of each method by path, and whether the token of a scan can call it. Methods
/// without a complete option `access` are missing.
static BY_PATH: LazyLock<HashMap<String, (Access, bool)>> = LazyLock::new(|| {
    let ours = construct_proto::methods().filter_map(|method| {
        let option = options::access(&method)?;
        Some((
            method_path(method.parent_service().full_name(), method.name()),
            (Access::parse(&option)?, option.scan_token),
        ))
    });
    PUBLIC.map(|path| (path.to_owned(), (Access::Public, false))).into_iter().chain(ours).collect()
});

/// The permission for the method of this path. `None` if there is no such method, or it has no
/// complete option.
pub(crate) fn access(path: &str) -> Option<Access> {
    BY_PATH.get(path).map(|(access, _)| *access)
}

/// Whether the token of a scan can call the method of this path, for the task of the scan. The
/// method itself checks the task.
pub(crate) fn allows_scan_token(path: &str) -> bool {
    BY_PATH.get(path).is_some_and(|(_, scan_token)| *scan_token)
}

/// The HTTP path of a method of the service with this full name.
pub(crate) fn method_path(service: &str, method: &str) -> String {
    format!("/{service}/{method}")
}

impl Access {
    /// Parses the option. `None` if it grants nothing, or names an unknown scope.
    fn parse(option: &v1::Access) -> Option<Self> {
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
    /// `PERMISSION_DENIED`, with the missing permission.
    pub(crate) fn check(self, caller: &Caller) -> Result<(), Status> {
        let (role, scope) = match self {
            Self::Public | Self::Caller => return Ok(()),
            Self::Role(role, scope) => (role, scope),
            Self::Operator if caller.organization == OrganizationId::LOCAL => {
                (Role::Owner, Scope::Admin)
            }
            Self::Operator => {
                return Err(Status::permission_denied(
                    "only the operator of the installation may do this",
                ));
            }
        };
        if caller.role < role {
            let (required, actual) = (role.as_str(), caller.role.as_str());
            return Err(Status::permission_denied(format!(
                "this needs the role `{required}`; the caller is `{actual}`"
            )));
        }
        if !scope.is_within(&caller.scopes) {
            let message = format!("this needs a key with the scope `{}`", scope.as_str());
            return Err(Status::permission_denied(message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_has_an_access_rule() {
        for method in construct_proto::methods() {
            let path = method_path(method.parent_service().full_name(), method.name());
            assert!(access(&path).is_some(), "{path} needs the option `access`");
        }
    }

    #[test]
    fn option_that_grants_nothing_or_half_a_rule_refuses_the_method() {
        let option =
            |grant, scope: &str| v1::Access { grant, scope: scope.into(), scan_token: true };
        let member = Some(Grant::Role(v1::Role::Member.into()));
        assert_eq!(
            Access::parse(&option(member, "tasks:write")),
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
            assert_eq!(Access::parse(&option(grant, scope)), None, "{grant:?} {scope}");
        }
        assert_eq!(access("/construct.v1.AgentService/Nothing"), None);
    }

    /// The documented table is the effective one.
    #[test]
    fn documentation_matches_the_table() {
        let mut rules: Vec<_> = construct_proto::methods()
            .map(|method| {
                let service = method.parent_service();
                let access = access(&method_path(service.full_name(), method.name()))
                    .expect("a test of its own finds it");
                (service.name().to_owned(), method.name().to_owned(), access)
            })
            .collect();
        rules.sort_by(|one, other| (&one.0, &one.1).cmp(&(&other.0, &other.1)));
        let mut groups: Vec<(String, String, Vec<String>)> = Vec::new();
        for (service, method, access) in rules {
            let needs = match access {
                Access::Public => "anyone, without credentials | ".to_owned(),
                Access::Caller => "any caller | ".to_owned(),
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

    /// A rule that lets viewers write would be a mistake.
    #[test]
    fn viewers_only_read_and_reads_need_no_write_scope() {
        for descriptor in construct_proto::methods() {
            let (service, method) = (descriptor.parent_service(), descriptor.name());
            let access = access(&method_path(service.full_name(), method))
                .expect("a test of its own finds it");
            let reads = ["Get", "List", "Explain", "Subscribe", "Watch", "Compare", "Download"]
                .iter()
                .any(|verb| method.starts_with(verb));
            let Access::Role(role, scope) = access else { continue };
            assert!(reads || role > Role::Viewer, "{method}");
            assert!(!reads || !scope.as_str().ends_with(":write"), "{method}");
        }
    }

    #[test]
    fn operator_is_an_owner_of_the_operators_organization() {
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

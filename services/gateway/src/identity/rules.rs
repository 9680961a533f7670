//! What each method needs. A test compares this table with the contract; a method that is missing
//! here is refused.

use std::{
    collections::{HashMap, HashSet},
    sync::LazyLock,
};

use construct_domain::{
    OrganizationId,
    access::{Role, Scope},
};
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

use Access::{Caller as Anybody, Operator, Public};

const fn viewer(scope: Scope) -> Access {
    Access::Role(Role::Viewer, scope)
}

const fn member(scope: Scope) -> Access {
    Access::Role(Role::Member, scope)
}

const fn admin(scope: Scope) -> Access {
    Access::Role(Role::Admin, scope)
}

const fn owner(scope: Scope) -> Access {
    Access::Role(Role::Owner, scope)
}

/// Service, method, what it needs. Services without a package are those of `construct.v1`.
#[rustfmt::skip]
pub(crate) const RULES: &[(&str, &str, Access)] = &[
    ("AgentService", "CreateAgent", member(Scope::AgentsWrite)),
    ("AgentService", "DeleteAgent", member(Scope::AgentsWrite)),
    ("AgentService", "GetAgent", viewer(Scope::AgentsRead)),
    ("AgentService", "ListAgents", viewer(Scope::AgentsRead)),
    ("AgentService", "UpdateAgent", member(Scope::AgentsWrite)),
    ("ApprovalService", "DecideApproval", member(Scope::TasksWrite)),
    ("ApprovalService", "GetApproval", viewer(Scope::TasksRead)),
    ("ApprovalService", "ListApprovals", viewer(Scope::TasksRead)),
    ("AuditService", "ExportAuditEntries", admin(Scope::Admin)),
    ("AuditService", "ListAuditEntries", admin(Scope::Admin)),
    ("BudgetService", "CreateBudget", admin(Scope::BudgetsWrite)),
    ("BudgetService", "DeleteBudget", admin(Scope::BudgetsWrite)),
    ("BudgetService", "GetBudget", viewer(Scope::BudgetsRead)),
    ("BudgetService", "GetCosts", viewer(Scope::BudgetsRead)),
    ("BudgetService", "ListBudgets", viewer(Scope::BudgetsRead)),
    ("BudgetService", "UpdateBudget", admin(Scope::BudgetsWrite)),
    ("DiagnosisService", "Diagnose", Operator),
    ("DiagnosisService", "GetOverview", Operator),
    ("EventService", "Subscribe", viewer(Scope::TasksRead)),
    ("FileService", "CreateFile", member(Scope::FilesWrite)),
    ("FileService", "DeleteFile", member(Scope::FilesWrite)),
    ("FileService", "DownloadFile", viewer(Scope::FilesRead)),
    ("FileService", "GetFile", viewer(Scope::FilesRead)),
    ("FileService", "ListFiles", viewer(Scope::FilesRead)),
    ("FileService", "UpdateFile", member(Scope::FilesWrite)),
    ("FileService", "UploadPart", member(Scope::FilesWrite)),
    ("KeyService", "CreateApiKey", member(Scope::Admin)),
    ("KeyService", "CreateSetupCode", member(Scope::Admin)),
    ("KeyService", "ExchangeSetupCode", Public),
    ("KeyService", "GetApiKey", member(Scope::Admin)),
    ("KeyService", "ListApiKeys", member(Scope::Admin)),
    ("KeyService", "RevokeApiKey", member(Scope::Admin)),
    ("KeyService", "UpdateApiKey", member(Scope::Admin)),
    ("MessageService", "CreateMessage", member(Scope::TasksWrite)),
    ("MessageService", "DeleteMessage", member(Scope::TasksWrite)),
    ("MessageService", "EditMessage", member(Scope::TasksWrite)),
    ("MessageService", "GetMessage", viewer(Scope::TasksRead)),
    ("MessageService", "ListMessages", viewer(Scope::TasksRead)),
    ("MessageService", "UpdateMessage", member(Scope::TasksWrite)),
    ("ModelProviderService", "CheckModelProvider", admin(Scope::ModelsWrite)),
    ("ModelProviderService", "CreateModelProvider", admin(Scope::ModelsWrite)),
    ("ModelProviderService", "DeleteModelProvider", admin(Scope::ModelsWrite)),
    ("ModelProviderService", "GetModelProvider", viewer(Scope::ModelsRead)),
    ("ModelProviderService", "ListModelProviders", viewer(Scope::ModelsRead)),
    ("ModelProviderService", "ListVendorModels", viewer(Scope::ModelsRead)),
    ("ModelProviderService", "UpdateModelProvider", admin(Scope::ModelsWrite)),
    ("ModelService", "CreateModel", admin(Scope::ModelsWrite)),
    ("ModelService", "DeleteModel", admin(Scope::ModelsWrite)),
    ("ModelService", "GetModel", viewer(Scope::ModelsRead)),
    ("ModelService", "ListCatalogModels", viewer(Scope::ModelsRead)),
    ("ModelService", "ListModels", viewer(Scope::ModelsRead)),
    ("ModelService", "UpdateModel", admin(Scope::ModelsWrite)),
    ("ModelTokenService", "CreateModelToken", member(Scope::ModelsWrite)),
    ("OrganizationService", "CreateInvitation", admin(Scope::Admin)),
    ("OrganizationService", "CreateOrganization", member(Scope::Admin)),
    ("OrganizationService", "DeleteOrganization", owner(Scope::Admin)),
    ("OrganizationService", "GetOrganization", Anybody),
    ("OrganizationService", "ListInvitations", admin(Scope::Admin)),
    ("OrganizationService", "ListMembers", viewer(Scope::Admin)),
    ("OrganizationService", "ListOrganizations", Anybody),
    ("OrganizationService", "RemoveMember", admin(Scope::Admin)),
    ("OrganizationService", "RevokeInvitation", admin(Scope::Admin)),
    ("OrganizationService", "UpdateMember", admin(Scope::Admin)),
    ("OrganizationService", "UpdateOrganization", admin(Scope::Admin)),
    ("OrganizationService", "WhoAmI", Anybody),
    ("RecoveryService", "DropDeadLetter", Operator),
    ("RecoveryService", "GetDeadLetter", Operator),
    ("RecoveryService", "ListDeadLetters", Operator),
    ("RecoveryService", "RedriveDeadLetter", Operator),
    ("RecoveryService", "RetryTask", member(Scope::TasksWrite)),
    ("ScanService", "CancelScan", member(Scope::TasksWrite)),
    ("ScanService", "CompareScans", viewer(Scope::TasksRead)),
    ("ScanService", "CreateScan", member(Scope::TasksWrite)),
    ("ScanService", "CreateScanConnection", admin(Scope::SecretsWrite)),
    ("ScanService", "CreateTools", member(Scope::TasksWrite)),
    ("ScanService", "DeleteScanConnection", admin(Scope::SecretsWrite)),
    ("ScanService", "GetScan", viewer(Scope::TasksRead)),
    ("ScanService", "ListCandidates", viewer(Scope::TasksRead)),
    ("ScanService", "ListRepositories", member(Scope::SecretsRead)),
    ("ScanService", "ListScanConnections", viewer(Scope::SecretsRead)),
    ("ScanService", "ListScans", viewer(Scope::TasksRead)),
    ("ScanService", "ReviewCandidate", member(Scope::TasksWrite)),
    ("ScanService", "WatchScan", viewer(Scope::TasksRead)),
    ("ScheduleService", "CreateSchedule", member(Scope::TasksWrite)),
    ("ScheduleService", "DeleteSchedule", member(Scope::TasksWrite)),
    ("ScheduleService", "GetSchedule", viewer(Scope::TasksRead)),
    ("ScheduleService", "ListScheduleRuns", viewer(Scope::TasksRead)),
    ("ScheduleService", "ListSchedules", viewer(Scope::TasksRead)),
    ("ScheduleService", "PauseSchedule", member(Scope::TasksWrite)),
    ("ScheduleService", "ResumeSchedule", member(Scope::TasksWrite)),
    ("ScheduleService", "UpdateSchedule", member(Scope::TasksWrite)),
    ("SecretService", "CreateSecret", admin(Scope::SecretsWrite)),
    ("SecretService", "DeleteSecret", admin(Scope::SecretsWrite)),
    ("SecretService", "GetSecret", viewer(Scope::SecretsRead)),
    ("SecretService", "ListSecrets", viewer(Scope::SecretsRead)),
    ("SecretService", "UpdateSecret", admin(Scope::SecretsWrite)),
    ("StateService", "DeleteState", member(Scope::StatesWrite)),
    ("StateService", "GetState", viewer(Scope::StatesRead)),
    ("StateService", "ListStateVersions", viewer(Scope::StatesRead)),
    ("StateService", "ListStates", viewer(Scope::StatesRead)),
    ("StateService", "PutState", member(Scope::StatesWrite)),
    ("StateService", "WatchStates", viewer(Scope::StatesRead)),
    ("TaskService", "CancelTask", member(Scope::TasksWrite)),
    ("TaskService", "CreateTask", member(Scope::TasksWrite)),
    ("TaskService", "DeleteTask", member(Scope::TasksWrite)),
    ("TaskService", "ExplainTask", viewer(Scope::TasksRead)),
    ("TaskService", "ForkTask", member(Scope::TasksWrite)),
    ("TaskService", "GetTask", viewer(Scope::TasksRead)),
    ("TaskService", "ListTasks", viewer(Scope::TasksRead)),
    ("TaskService", "ResumeTask", member(Scope::TasksWrite)),
    ("TaskService", "RewindTask", member(Scope::TasksWrite)),
    ("TaskService", "SuspendTask", member(Scope::TasksWrite)),
    ("TaskService", "UpdateTask", member(Scope::TasksWrite)),
    ("UsageService", "GetQuota", viewer(Scope::BudgetsRead)),
    ("UsageService", "ListUsage", viewer(Scope::BudgetsRead)),
    ("UsageService", "UpdateQuota", Operator),
    // Which methods there are, and whether they can be called, is no secret.
    ("grpc.health.v1.Health", "Check", Public),
    ("grpc.health.v1.Health", "List", Public),
    ("grpc.health.v1.Health", "Watch", Public),
    ("grpc.reflection.v1.ServerReflection", "ServerReflectionInfo", Public),
    ("grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo", Public),
];

/// What whoever comes with the token of a scan may call, for the scan's own task; each method looks
/// whether it is that one.
pub(crate) const OF_SCANS: &[(&str, &str)] = &[
    ("MessageService", "CreateMessage"),
    ("MessageService", "GetMessage"),
    ("MessageService", "ListMessages"),
    ("TaskService", "CancelTask"),
    ("TaskService", "GetTask"),
];

static SCANS_BY_PATH: LazyLock<HashSet<String>> =
    LazyLock::new(|| OF_SCANS.iter().map(|(service, method)| path(service, method)).collect());

/// Whether the method of this path can be called with the token of a scan.
pub(crate) fn is_of_scans(path: &str) -> bool {
    SCANS_BY_PATH.contains(path)
}

static BY_PATH: LazyLock<HashMap<String, Access>> = LazyLock::new(|| {
    RULES.iter().map(|(service, method, access)| (path(service, method), *access)).collect()
});

/// What the method of this path needs, if there is such a method.
pub(crate) fn of(path: &str) -> Option<Access> {
    BY_PATH.get(path).copied()
}

/// As HTTP knows the method.
pub(crate) fn path(service: &str, method: &str) -> String {
    let package = if service.contains('.') { "" } else { "construct.v1." };
    format!("/{package}{service}/{method}")
}

impl Access {
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
    use std::collections::BTreeSet;

    use construct_proto::DESCRIPTORS;

    use super::*;

    #[test]
    fn the_table_names_the_methods_of_the_contract_and_no_others() {
        let contract: BTreeSet<String> = DESCRIPTORS
            .services()
            .filter(|service| service.parent_file().package_name() == "construct.v1")
            .flat_map(|service| {
                service
                    .methods()
                    .map(|method| path(service.full_name(), method.name()))
                    .collect::<Vec<_>>()
            })
            .collect();
        let table: BTreeSet<String> = RULES
            .iter()
            .filter(|(service, ..)| !service.contains('.'))
            .map(|(service, method, _)| path(service, method))
            .collect();
        assert_eq!(table, contract);
        assert_eq!(BY_PATH.len(), RULES.len(), "no method stands there twice");
    }

    /// What people read is what holds.
    #[test]
    fn the_documentation_has_this_table() {
        let mut groups: Vec<(String, String, Vec<&str>)> = Vec::new();
        for (service, method, access) in RULES.iter().filter(|(service, ..)| !service.contains('.'))
        {
            let needs = match access {
                Public => "nobody has to be anybody | ".to_owned(),
                Access::Caller => "anybody | ".to_owned(),
                Access::Role(role, scope) => format!("{} | `{}`", role.as_str(), scope.as_str()),
                Operator => "owner of the operator's organization | `admin`".to_owned(),
            };
            match groups.iter_mut().find(|(known, like, _)| known == service && *like == needs) {
                Some((.., methods)) => methods.push(method),
                None => groups.push(((*service).to_owned(), needs, vec![method])),
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
        for (service, method, access) in RULES {
            let reads = ["Get", "List", "Explain", "Subscribe", "Watch", "Compare", "Download"]
                .iter()
                .any(|verb| method.starts_with(verb));
            let Access::Role(role, scope) = access else { continue };
            assert!(reads || *role > Role::Viewer, "{service}/{method}");
            assert!(!reads || !scope.as_str().ends_with(":write"), "{service}/{method}");
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
            assert_eq!(Operator.check(&caller).is_ok(), may, "{caller:?}");
        }
    }
}

//! Every route of REST, in one table: which method it calls, and where the fields of the request
//! stand.

use tonic::codegen::http::Method as Verb;

/// One route.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) verb: Verb,
    /// `{field}` stands for a field of the request.
    pub(crate) path: &'static str,
    /// `Service/Method`, of `construct.v1`.
    pub(crate) method: &'static str,
    pub(crate) body: Content,
}

/// What the body of a request holds. Fields that stand neither in it nor in the path are parameters
/// of the query; the idempotency key is a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    None,
    /// All fields that don't stand in the path, with an example.
    All(&'static str),
    /// One field, with an example.
    Field(&'static str, &'static str),
}

const fn get(path: &'static str, method: &'static str) -> Route {
    Route { verb: Verb::GET, path, method, body: Content::None }
}

const fn delete(path: &'static str, method: &'static str) -> Route {
    Route { verb: Verb::DELETE, path, method, body: Content::None }
}

/// Makes something: the body is its specification.
const fn create(path: &'static str, method: &'static str, example: &'static str) -> Route {
    Route { verb: Verb::POST, path, method, body: Content::Field("spec", example) }
}

const fn patch(path: &'static str, method: &'static str, example: &'static str) -> Route {
    Route { verb: Verb::PATCH, path, method, body: Content::All(example) }
}

/// Puts something at its place, whether there is something or not.
const fn put(path: &'static str, method: &'static str, example: &'static str) -> Route {
    Route { verb: Verb::PUT, path, method, body: Content::All(example) }
}

const fn post(path: &'static str, method: &'static str, example: &'static str) -> Route {
    Route { verb: Verb::POST, path, method, body: Content::All(example) }
}

/// The table. A test compares it with the contract: every method stands here.
pub(crate) static ROUTES: [Route; 118] = [
    create(
        "/v1/agents",
        "AgentService/CreateAgent",
        r#"{"name": "ada", "model": "sonnet", "instructions": "You keep the ledger."}"#,
    ),
    get("/v1/agents", "AgentService/ListAgents"),
    get("/v1/agents/{agent}", "AgentService/GetAgent"),
    patch(
        "/v1/agents/{agent}",
        "AgentService/UpdateAgent",
        r#"{"model": "opus", "revision": "3"}"#,
    ),
    delete("/v1/agents/{agent}", "AgentService/DeleteAgent"),
    get("/v1/approvals", "ApprovalService/ListApprovals"),
    get("/v1/approvals/{approval}", "ApprovalService/GetApproval"),
    post(
        "/v1/approvals/{approval}/decide",
        "ApprovalService/DecideApproval",
        r#"{"decision": "DECISION_APPROVE", "words": "Only this once."}"#,
    ),
    post(
        "/v1/api-keys",
        "KeyService/CreateApiKey",
        r#"{"spec": {"name": "nightly build", "scopes": ["tasks:write"]}, "expiresIn": "2592000s"}"#,
    ),
    get("/v1/api-keys", "KeyService/ListApiKeys"),
    get("/v1/api-keys/{api_key}", "KeyService/GetApiKey"),
    patch(
        "/v1/api-keys/{api_key}",
        "KeyService/UpdateApiKey",
        r#"{"limits": {"tasksPerDay": "100", "spendPerMonthPicoUsd": "20000000000000"}}"#,
    ),
    post("/v1/api-keys/{api_key}/revoke", "KeyService/RevokeApiKey", "{}"),
    get("/v1/audit-entries", "AuditService/ListAuditEntries"),
    get("/v1/audit-entries/export", "AuditService/ExportAuditEntries"),
    create(
        "/v1/budgets",
        "BudgetService/CreateBudget",
        r#"{"agent": "ada", "limitPicoUsd": "5000000000000"}"#,
    ),
    get("/v1/budgets", "BudgetService/ListBudgets"),
    get("/v1/budgets/{budget}", "BudgetService/GetBudget"),
    patch(
        "/v1/budgets/{budget}",
        "BudgetService/UpdateBudget",
        r#"{"limitPicoUsd": "9000000000000"}"#,
    ),
    delete("/v1/budgets/{budget}", "BudgetService/DeleteBudget"),
    get("/v1/costs", "BudgetService/GetCosts"),
    get("/v1/dead-letters", "RecoveryService/ListDeadLetters"),
    get("/v1/dead-letters/{letter}", "RecoveryService/GetDeadLetter"),
    post("/v1/dead-letters/{letter}/redrive", "RecoveryService/RedriveDeadLetter", "{}"),
    delete("/v1/dead-letters/{letter}", "RecoveryService/DropDeadLetter"),
    get("/v1/diagnosis", "DiagnosisService/Diagnose"),
    get("/v1/overview", "DiagnosisService/GetOverview"),
    get("/v1/events", "EventService/Subscribe"),
    create(
        "/v1/files",
        "FileService/CreateFile",
        r#"{"name": "report.pdf", "mediaType": "application/pdf", "size": "1048576"}"#,
    ),
    get("/v1/files", "FileService/ListFiles"),
    get("/v1/files/{file}", "FileService/GetFile"),
    patch("/v1/files/{file}", "FileService/UpdateFile", r#"{"name": "May.pdf"}"#),
    delete("/v1/files/{file}", "FileService/DeleteFile"),
    post(
        "/v1/files/{file}/parts",
        "FileService/UploadPart",
        r#"{"offset": "0", "data": "SGVsbG8="}"#,
    ),
    // Answered as what it says, by `files`.
    get("/v1/files/{file}/content", "FileService/DownloadFile"),
    post(
        "/v1/invitations",
        "OrganizationService/CreateInvitation",
        r#"{"email": "ada@example.com", "role": "ROLE_MEMBER"}"#,
    ),
    get("/v1/invitations", "OrganizationService/ListInvitations"),
    post("/v1/invitations/{invitation}/revoke", "OrganizationService/RevokeInvitation", "{}"),
    get("/v1/members", "OrganizationService/ListMembers"),
    patch("/v1/members/{user}", "OrganizationService/UpdateMember", r#"{"role": "ROLE_ADMIN"}"#),
    delete("/v1/members/{user}", "OrganizationService/RemoveMember"),
    create(
        "/v1/tasks/{spec.task}/messages",
        "MessageService/CreateMessage",
        r#"{"blocks": [{"text": {"text": "What did we spend in May?"}}]}"#,
    ),
    get("/v1/tasks/{task}/messages", "MessageService/ListMessages"),
    get("/v1/messages/{message}", "MessageService/GetMessage"),
    patch(
        "/v1/messages/{message}",
        "MessageService/UpdateMessage",
        r#"{"blocks": [{"text": {"text": "What did we spend in June?"}}]}"#,
    ),
    delete("/v1/messages/{message}", "MessageService/DeleteMessage"),
    post(
        "/v1/messages/{message}/edit",
        "MessageService/EditMessage",
        r#"{"blocks": [{"text": {"text": "And in July?"}}]}"#,
    ),
    create(
        "/v1/models",
        "ModelService/CreateModel",
        r#"{"name": "sonnet", "provider": "anthropic", "vendorModel": "claude-sonnet-4-5"}"#,
    ),
    get("/v1/models", "ModelService/ListModels"),
    get("/v1/models/{model}", "ModelService/GetModel"),
    patch("/v1/models/{model}", "ModelService/UpdateModel", r#"{"maxOutputTokens": "32000"}"#),
    delete("/v1/models/{model}", "ModelService/DeleteModel"),
    get("/v1/model-catalog", "ModelService/ListCatalogModels"),
    create(
        "/v1/model-providers",
        "ModelProviderService/CreateModelProvider",
        r#"{"name": "scripted", "type": "MODEL_PROVIDER_TYPE_SCRIPTED"}"#,
    ),
    get("/v1/model-providers", "ModelProviderService/ListModelProviders"),
    get("/v1/model-providers/{model_provider}", "ModelProviderService/GetModelProvider"),
    patch(
        "/v1/model-providers/{model_provider}",
        "ModelProviderService/UpdateModelProvider",
        r#"{"requestsPerMinute": "60"}"#,
    ),
    delete("/v1/model-providers/{model_provider}", "ModelProviderService/DeleteModelProvider"),
    post(
        "/v1/model-providers/{model_provider}/check",
        "ModelProviderService/CheckModelProvider",
        "{}",
    ),
    get("/v1/model-providers/{model_provider}/models", "ModelProviderService/ListVendorModels"),
    post(
        "/v1/model-tokens",
        "ModelTokenService/CreateModelToken",
        r#"{"models": ["sonnet"], "budgetPicoUsd": "1000000000000", "expiresIn": "3600s"}"#,
    ),
    create(
        "/v1/organizations",
        "OrganizationService/CreateOrganization",
        r#"{"name": "The ledger's team", "slug": "ledger"}"#,
    ),
    get("/v1/organizations", "OrganizationService/ListOrganizations"),
    get("/v1/organizations/{organization}", "OrganizationService/GetOrganization"),
    patch(
        "/v1/organizations/{organization}",
        "OrganizationService/UpdateOrganization",
        r#"{"name": "The ledger"}"#,
    ),
    delete("/v1/organizations/{organization}", "OrganizationService/DeleteOrganization"),
    create(
        "/v1/scans",
        "ScanService/CreateScan",
        r#"{"github": "octocat/reports", "budgetPicoUsd": "1000000000000"}"#,
    ),
    get("/v1/scans", "ScanService/ListScans"),
    get("/v1/scans/{scan}", "ScanService/GetScan"),
    post(
        "/v1/scans/{scan}/cancel",
        "ScanService/CancelScan",
        r#"{"reason": "It is no longer needed."}"#,
    ),
    get("/v1/scans/{scan}/events", "ScanService/WatchScan"),
    get("/v1/scans/{scan}/candidates", "ScanService/ListCandidates"),
    post("/v1/scans/{scan}/tools", "ScanService/CreateTools", "{}"),
    get("/v1/scans/{after}/changes", "ScanService/CompareScans"),
    post(
        "/v1/candidates/{candidate}/review",
        "ScanService/ReviewCandidate",
        r#"{"state": "CANDIDATE_STATE_ACCEPTED", "revision": "1"}"#,
    ),
    create(
        "/v1/scan-connections",
        "ScanService/CreateScanConnection",
        r#"{"name": "github", "host": "SCAN_HOST_GITHUB", "token": "github_pat_…"}"#,
    ),
    get("/v1/scan-connections", "ScanService/ListScanConnections"),
    delete("/v1/scan-connections/{connection}", "ScanService/DeleteScanConnection"),
    get("/v1/scan-connections/{connection}/repositories", "ScanService/ListRepositories"),
    create(
        "/v1/schedules",
        "ScheduleService/CreateSchedule",
        r#"{"name": "nightly", "agent": "ada", "cron": "0 3 * * *", "blocks": [{"text": {"text": "Check the ledger."}}]}"#,
    ),
    get("/v1/schedules", "ScheduleService/ListSchedules"),
    get("/v1/schedules/{schedule}", "ScheduleService/GetSchedule"),
    patch("/v1/schedules/{schedule}", "ScheduleService/UpdateSchedule", r#"{"cron": "0 4 * * *"}"#),
    delete("/v1/schedules/{schedule}", "ScheduleService/DeleteSchedule"),
    post("/v1/schedules/{schedule}/pause", "ScheduleService/PauseSchedule", "{}"),
    post("/v1/schedules/{schedule}/resume", "ScheduleService/ResumeSchedule", "{}"),
    get("/v1/schedules/{schedule}/runs", "ScheduleService/ListScheduleRuns"),
    create(
        "/v1/secrets",
        "SecretService/CreateSecret",
        r#"{"name": "LEDGER_TOKEN", "value": "s3cret", "bindings": {"hosts": ["ledger.example"]}}"#,
    ),
    get("/v1/secrets", "SecretService/ListSecrets"),
    get("/v1/secrets/{secret}", "SecretService/GetSecret"),
    patch(
        "/v1/secrets/{secret}",
        "SecretService/UpdateSecret",
        r#"{"description": "Reads the ledger."}"#,
    ),
    delete("/v1/secrets/{secret}", "SecretService/DeleteSecret"),
    post(
        "/v1/setup-codes",
        "KeyService/CreateSetupCode",
        r#"{"spec": {"name": "Ada's laptop", "scopes": ["tasks:write"]}, "expiresIn": "600s"}"#,
    ),
    post("/v1/setup-codes/exchange", "KeyService/ExchangeSetupCode", r#"{"code": "cs_…"}"#),
    get("/v1/states", "StateService/ListStates"),
    get("/v1/states/events", "StateService/WatchStates"),
    get("/v1/states/{state}", "StateService/GetState"),
    put(
        "/v1/states/{state}",
        "StateService/PutState",
        r#"{"json": "{\"theme\": \"dark\"}", "expectedVersion": "3"}"#,
    ),
    delete("/v1/states/{state}", "StateService/DeleteState"),
    get("/v1/states/{state}/versions", "StateService/ListStateVersions"),
    create(
        "/v1/tasks",
        "TaskService/CreateTask",
        r#"{"agent": "ada", "title": "The books of May"}"#,
    ),
    get("/v1/tasks", "TaskService/ListTasks"),
    get("/v1/tasks/{task}", "TaskService/GetTask"),
    patch("/v1/tasks/{task}", "TaskService/UpdateTask", r#"{"title": "The books of June"}"#),
    delete("/v1/tasks/{task}", "TaskService/DeleteTask"),
    post("/v1/tasks/{task}/suspend", "TaskService/SuspendTask", "{}"),
    post("/v1/tasks/{task}/resume", "TaskService/ResumeTask", "{}"),
    post(
        "/v1/tasks/{task}/cancel",
        "TaskService/CancelTask",
        r#"{"reason": "It is no longer needed."}"#,
    ),
    post("/v1/tasks/{task}/retry", "RecoveryService/RetryTask", "{}"),
    get("/v1/tasks/{task}/explanation", "TaskService/ExplainTask"),
    post(
        "/v1/tasks/{task}/rewind",
        "TaskService/RewindTask",
        r#"{"message": "message_01890a5d-ac96-774b-bcce-b302099a8057", "keep": true}"#,
    ),
    post(
        "/v1/tasks/{task}/fork",
        "TaskService/ForkTask",
        r#"{"message": "message_01890a5d-ac96-774b-bcce-b302099a8057"}"#,
    ),
    get("/v1/tasks/{task}/events", "EventService/Subscribe"),
    get("/v1/quota", "UsageService/GetQuota"),
    get("/v1/organizations/{organization}/quota", "UsageService/GetQuota"),
    patch(
        "/v1/organizations/{organization}/quota",
        "UsageService/UpdateQuota",
        r#"{"tier": "unlimited", "overrides": {"tasksPerDay": "1000"}}"#,
    ),
    get("/v1/usage", "UsageService/ListUsage"),
    get("/v1/whoami", "OrganizationService/WhoAmI"),
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use construct_proto::DESCRIPTORS;

    use super::*;

    #[test]
    fn every_method_of_the_contract_has_a_route() {
        let routed: HashSet<_> = ROUTES.iter().map(|route| route.method.to_owned()).collect();
        for service in DESCRIPTORS
            .services()
            .filter(|service| service.parent_file().package_name() == "construct.v1")
        {
            for method in service.methods() {
                let name = format!("{}/{}", service.name(), method.name());
                assert!(routed.contains(&name), "{name} has no route");
            }
        }
    }
}

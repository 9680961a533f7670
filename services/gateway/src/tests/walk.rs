//! Calls every method of the contract: with every role, without valid credentials, and with ids of
//! another organization. The methods come from the descriptor set, so a new method whose access
//! was not considered fails here.

mod contract;
mod foreign;
mod protocols;

use std::collections::BTreeMap;

use construct_domain::{
    ApiKeyId, CandidateId, OrganizationId, UserId,
    access::{Role, Scope},
};
use construct_proto::v1;
use construct_store::{
    AuditEntry, AuditFilter, Key, Order, Page, WriteOutcome,
    identity::{NewApiKey, NewInvitation, NewOrganization},
    scan::{NewCandidate, ScanChanges},
};
use jiff::Timestamp;
use prost::{
    Message as _,
    bytes::{Buf as _, BufMut as _, Bytes},
};
use prost_reflect::{DynamicMessage, MethodDescriptor};
use serde_json::{Value, json};
use tonic::{
    Code, Request, Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::http::uri::PathAndQuery,
    metadata::MetadataValue,
};
use uuid::Uuid;

use super::{approvals::request_approval_for, harness::*};
use crate::{
    Config, Login,
    identity::{
        credential,
        rules::{self, Access},
    },
};

/// An id of each kind of resource that a request can name.
type Ids = BTreeMap<&'static str, String>;

/// A codec that passes encoded messages through.
#[derive(Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        let length = buffer.remaining();
        Ok(Some(buffer.copy_to_bytes(length)))
    }
}

pub(super) fn login_required() -> Config {
    // All failures of these tests come from one address.
    Config {
        gateway_login: Login::Required,
        gateway_login_failures: 1_000_000,
        gateway_scans_dir: Some("/scans".into()),
        ..Config::default()
    }
}

/// Creates an API key; returns its id and its text.
pub(super) async fn create_key(
    gateway: &Gateway,
    (organization, user): (OrganizationId, UserId),
    role: Role,
    scopes: &[Scope],
    expires_at: Option<Timestamp>,
) -> (ApiKeyId, String) {
    let (text, secret) = credential::mint(credential::KEY).expect("there is randomness");
    let id = ApiKeyId::from_uuid(Uuid::now_v7());
    let (scopes, limits) = (scopes.to_vec(), construct_store::Limits::default());
    let new = NewApiKey { id, name: "test".into(), secret, role, scopes, user, expires_at, limits };
    gateway.store().api_key_create(&write(organization), new).await.expect("the key is made");
    (id, text)
}

pub(super) fn write(organization: OrganizationId) -> construct_store::Write {
    construct_store::Write::new(organization, Timestamp::now())
}

/// Creates a second organization; returns its id and its owner.
pub(super) async fn create_organization(gateway: &Gateway, slug: &str) -> (OrganizationId, UserId) {
    let profile = construct_store::identity::Profile {
        issuer: "https://test".into(),
        subject: slug.into(),
        email: format!("{slug}@example.com"),
        email_verified: true,
        name: slug.into(),
    };
    let (owner, _) = gateway
        .store()
        .user_sign_in(&profile, None, Timestamp::now())
        .await
        .expect("they are signed in");
    let id = OrganizationId::from_uuid(Uuid::now_v7());
    let new = NewOrganization {
        id,
        name: slug.into(),
        slug: slug.into(),
        avatar_url: String::new(),
        owner,
    };
    let render = crate::organizations::response_output(&());
    let made = gateway
        .store()
        .organization_create(&write(OrganizationId::LOCAL), new, None, None, |_| render)
        .await;
    made.expect("it is made");
    (id, owner)
}

pub(super) fn with_key<T>(message: T, key: Option<&str>) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(key) = key {
        let value = MetadataValue::try_from(format!("Bearer {key}")).expect("a header");
        request.metadata_mut().insert("authorization", value);
    }
    request
}

fn methods() -> Vec<(MethodDescriptor, Access)> {
    construct_proto::methods()
        .map(|method| {
            let path = rules::method_path(method.parent_service().full_name(), method.name());
            let access =
                rules::access(&path).unwrap_or_else(|| panic!("{path} needs the option `access`"));
            (method, access)
        })
        .collect()
}

/// The method whose name ends like this.
fn method_named(name: &str) -> MethodDescriptor {
    let mut all = methods().into_iter().map(|(method, _)| method);
    all.find(|known| known.full_name().ends_with(name)).expect("a method")
}

/// Calls a method; returns the first answer.
async fn call(
    gateway: &Gateway,
    method: &MethodDescriptor,
    body: &Value,
    key: Option<&str>,
) -> Result<Bytes, Status> {
    let message = DynamicMessage::deserialize(method.input(), body.clone())
        .unwrap_or_else(|error| panic!("{}: {error}: {body}", method.full_name()));
    send(gateway, method, message.encode_to_vec(), key).await
}

/// Calls a method with an encoded request; returns the first answer.
async fn send(
    gateway: &Gateway,
    method: &MethodDescriptor,
    message: Vec<u8>,
    key: Option<&str>,
) -> Result<Bytes, Status> {
    let request = with_key(Bytes::from(message), key);
    let path = rules::method_path(method.parent_service().full_name(), method.name());
    let path: PathAndQuery = path.parse().expect("a path");
    let mut client = Grpc::new(gateway.channel());
    client.ready().await.expect("the gateway is there");
    if method.is_server_streaming() {
        client.server_streaming(request, path, Raw).await.map(|_| Bytes::new())
    } else {
        client.unary(request, path, Raw).await.map(tonic::Response::into_inner)
    }
}

/// The audit entries that the calls of a test must leave.
#[derive(Default)]
struct ExpectedEntries {
    /// Refused calls.
    refused: u64,
    /// Failed writes of callers that are not known.
    failed: u64,
    /// Other calls of methods that write, with any outcome, by method.
    written: BTreeMap<String, u64>,
}

impl ExpectedEntries {
    fn count(&mut self, method: &MethodDescriptor, answer: &Result<Bytes, Status>) {
        let path = rules::method_path(method.parent_service().full_name(), method.name());
        let audited = crate::audit::methods::find_method(&path).expect("it is one of ours");
        match code(answer) {
            Code::Unauthenticated | Code::PermissionDenied => self.refused += 1,
            code if audited.writes
                && code != Code::Ok
                && rules::access(&path) == Some(Access::Public) =>
            {
                self.failed += 1
            }
            _ if audited.writes => *self.written.entry(audited.name.clone()).or_default() += 1,
            _ => {}
        }
    }

    /// Stops the gateway, so that it writes all entries, and compares them.
    async fn compare(&self, gateway: &Gateway, organizations: &[OrganizationId]) {
        gateway.context.lifecycle().stop("the calls are over");
        let (store, filter) = (gateway.store(), AuditFilter::default());
        let everything = Page {
            limit: 1_000_000,
            order: Order { key: Key::CreatedAt, descending: false },
            after: None,
        };
        let entries = async || {
            let mut all = Vec::new();
            for organization in organizations {
                all.extend(
                    store
                        .audit_list(*organization, &filter, &everything)
                        .await
                        .expect("it is read"),
                );
            }
            all
        };
        let refusal = |entry: &AuditEntry| entry.code == 16 || entry.code == 7;
        let refused = async || {
            entries()
                .await
                .iter()
                .filter(|entry| refusal(entry))
                .map(|entry| entry.count)
                .sum::<u64>()
        };
        let what = format!("each of {} refusals is counted", self.refused);
        wait_until(&what, refused, |refused| *refused == self.refused).await;
        let mut written: BTreeMap<String, u64> = BTreeMap::new();
        let mut failed = 0;
        for entry in entries().await.into_iter().filter(|entry| !refusal(entry)) {
            if entry.code != 0 && entry.user.is_none() {
                failed += entry.count;
                continue;
            }
            assert_eq!(entry.count, 1, "{entry:?}");
            *written.entry(entry.method).or_default() += 1;
        }
        assert_eq!((written, failed), (self.written.clone(), self.failed));
        let rows = entries().await.iter().filter(|entry| refusal(entry)).count();
        assert!(rows < 2000, "{} refusals are {rows} rows", self.refused);
    }
}

fn code(answer: &Result<Bytes, Status>) -> Code {
    answer.as_ref().map_or_else(Status::code, |_| Code::Ok)
}

#[tokio::test]
async fn every_method_enforces_its_role_and_scope() {
    let gateway = Gateway::start_with(login_required()).await;
    let local = (OrganizationId::LOCAL, UserId::LOCAL);
    let all = [Scope::Admin];
    let mut keys = BTreeMap::new();
    for role in Role::ALL {
        keys.insert(*role, create_key(&gateway, local, *role, &all, None).await.1);
    }
    let (id, revoked) = create_key(&gateway, local, Role::Owner, &all, None).await;
    let (store, local_write) = (gateway.store(), write(OrganizationId::LOCAL));
    let silent = crate::organizations::response_output(&());
    store
        .api_key_revoke(&local_write, id, None, Role::Owner, |_| silent)
        .await
        .expect("it is revoked");
    let past = Timestamp::now() - jiff::SignedDuration::from_secs(1);
    let expired = create_key(&gateway, local, Role::Owner, &all, Some(past)).await.1;
    let elsewhere = create_organization(&gateway, "elsewhere").await;
    let foreign = create_key(&gateway, elsewhere, Role::Owner, &all, None).await.1;
    let unknown = credential::mint(credential::KEY).expect("there is randomness").0;
    let strangers = [
        ("no credentials", None),
        ("a revoked key", Some(&revoked)),
        ("an expired key", Some(&expired)),
        ("an unknown key", Some(&unknown)),
    ];
    let nothing = json!({});
    let (mut walked, mut scoped) = (0, 0);
    // The check for readiness presented an invalid key.
    let mut expected = ExpectedEntries { refused: 1, ..ExpectedEntries::default() };
    for (method, access) in methods() {
        let name = method.full_name().to_owned();
        let mut answer = async |key| {
            let answer = call(&gateway, &method, &nothing, key).await;
            expected.count(&method, &answer);
            answer
        };
        if access != Access::Public {
            for (who, stranger) in &strangers {
                let answer = answer(stranger.map(String::as_str)).await;
                assert_eq!(code(&answer), Code::Unauthenticated, "{name} for {who}: {answer:?}");
                walked += 1;
            }
        }
        for (role, key) in &keys {
            let answer = answer(Some(key)).await;
            let may = match access {
                Access::Public | Access::Caller => true,
                Access::Role(needed, _) => *role >= needed,
                Access::Operator => *role == Role::Owner,
            };
            let refused = code(&answer) == Code::PermissionDenied;
            assert_eq!(refused, !may, "{name} for {}: {answer:?}", role.as_str());
            if access != Access::Public {
                assert_ne!(code(&answer), Code::Unauthenticated, "{name} for {}", role.as_str());
            }
            walked += 1;
        }
        if access == Access::Operator {
            let answer = answer(Some(&foreign)).await;
            assert_eq!(
                code(&answer),
                Code::PermissionDenied,
                "{name} for the owner of another organization"
            );
        }
    }
    // The needed scope suffices; of the others only `admin` does.
    for scope in Scope::ALL {
        let (_, key) = create_key(&gateway, local, Role::Owner, &[*scope], None).await;
        for (method, access) in methods() {
            let Access::Role(_, needed) = access else { continue };
            let answer = call(&gateway, &method, &nothing, Some(&key)).await;
            expected.count(&method, &answer);
            let refused = code(&answer) == Code::PermissionDenied;
            assert_eq!(
                refused,
                !needed.is_within(&[*scope]),
                "{} with {}: {answer:?}",
                method.full_name(),
                scope.as_str()
            );
            scoped += 1;
        }
    }
    assert!(walked > 500 && scoped > 800, "{walked} and {scoped} calls");
    let stranger = call(&gateway, &methods()[0].0, &nothing, Some("ct_short")).await;
    assert_eq!(code(&stranger), Code::Unauthenticated);
    expected.count(&methods()[0].0, &stranger);
    expected.compare(&gateway, &[OrganizationId::LOCAL, elsewhere.0]).await;
}

/// Requests that name resources of another organization, by method.
fn reference_requests(ids: &BTreeMap<&str, String>) -> Vec<(&'static str, Value)> {
    let id = |what: &str| ids[what].clone();
    let text = json!([{"text": {"text": "hello"}}]);
    vec![
        ("AgentService.CreateAgent", json!({"spec": {"name": "thief", "model": id("model")}})),
        ("AgentService.DeleteAgent", json!({"agent": id("agent")})),
        ("AgentService.GetAgent", json!({"agent": id("agent")})),
        ("AgentService.UpdateAgent", json!({"agent": id("agent"), "description": "mine"})),
        (
            "ApprovalService.DecideApproval",
            json!({"approval": id("approval"), "decision": "DECISION_APPROVE"}),
        ),
        ("ApprovalService.GetApproval", json!({"approval": id("approval")})),
        (
            "BudgetService.CreateBudget",
            json!({"spec": {"agent": id("agent"), "period": "BUDGET_PERIOD_MONTH", "limitPicoUsd": "5"}}),
        ),
        ("BudgetService.DeleteBudget", json!({"budget": id("budget")})),
        ("BudgetService.GetBudget", json!({"budget": id("budget")})),
        ("BudgetService.UpdateBudget", json!({"budget": id("budget"), "limitPicoUsd": "7"})),
        ("EventService.Subscribe", json!({"task": id("task"), "cursor": "0"})),
        ("FileService.DeleteFile", json!({"file": id("file")})),
        ("FileService.DownloadFile", json!({"file": id("file")})),
        ("FileService.GetFile", json!({"file": id("file")})),
        ("FileService.UpdateFile", json!({"file": id("file"), "name": "mine"})),
        ("FileService.UploadPart", json!({"file": id("file"), "offset": "0", "data": "bWluZQ=="})),
        ("KeyService.GetApiKey", json!({"apiKey": id("api_key")})),
        ("KeyService.RevokeApiKey", json!({"apiKey": id("api_key")})),
        (
            "KeyService.UpdateApiKey",
            json!({"apiKey": id("api_key"), "limits": {"tasksPerDay": "1"}}),
        ),
        ("MessageService.CreateMessage", json!({"spec": {"task": id("task"), "blocks": text}})),
        ("MessageService.DeleteMessage", json!({"message": id("message")})),
        ("MessageService.EditMessage", json!({"message": id("message"), "blocks": text})),
        ("MessageService.GetMessage", json!({"message": id("message")})),
        ("MessageService.ListMessages", json!({"task": id("task")})),
        ("MessageService.UpdateMessage", json!({"message": id("message"), "blocks": text})),
        ("ModelProviderService.CheckModelProvider", json!({"modelProvider": id("provider")})),
        ("ModelProviderService.DeleteModelProvider", json!({"modelProvider": id("provider")})),
        ("ModelProviderService.GetModelProvider", json!({"modelProvider": id("provider")})),
        ("ModelProviderService.ListVendorModels", json!({"modelProvider": id("provider")})),
        (
            "ModelProviderService.UpdateModelProvider",
            json!({"modelProvider": id("provider"), "name": "mine"}),
        ),
        (
            "ModelService.CreateModel",
            json!({"spec": {"name": "thief", "provider": id("provider")}}),
        ),
        ("ModelService.DeleteModel", json!({"model": id("model")})),
        ("ModelService.GetModel", json!({"model": id("model")})),
        ("ModelService.UpdateModel", json!({"model": id("model"), "name": "mine"})),
        ("ModelTokenService.CreateModelToken", json!({"models": [id("model")]})),
        ("OrganizationService.DeleteOrganization", json!({"organization": id("organization")})),
        ("OrganizationService.GetOrganization", json!({"organization": id("organization")})),
        ("OrganizationService.RemoveMember", json!({"user": id("user")})),
        ("OrganizationService.RevokeInvitation", json!({"invitation": id("invitation")})),
        ("OrganizationService.UpdateMember", json!({"user": id("user"), "role": "ROLE_VIEWER"})),
        (
            "OrganizationService.UpdateOrganization",
            json!({"organization": id("organization"), "name": "mine"}),
        ),
        ("RecoveryService.RetryTask", json!({"task": id("task")})),
        ("ScanService.CancelScan", json!({"scan": id("scan")})),
        ("ScanService.CompareScans", json!({"before": id("scan"), "after": id("scan")})),
        ("ScanService.CreateScan", json!({"spec": {"github": "a/b", "model": id("model")}})),
        ("ScanService.CreateTools", json!({"scan": id("scan")})),
        ("ScanService.DeleteScanConnection", json!({"connection": id("connection")})),
        ("ScanService.GetScan", json!({"scan": id("scan")})),
        ("ScanService.ListCandidates", json!({"scan": id("scan")})),
        ("ScanService.ListRepositories", json!({"connection": id("connection")})),
        (
            "ScanService.ReviewCandidate",
            json!({"candidate": id("candidate"), "state": "CANDIDATE_STATE_ACCEPTED"}),
        ),
        ("ScanService.WatchScan", json!({"scan": id("scan")})),
        (
            "ScheduleService.CreateSchedule",
            json!({"spec": {"name": "thief", "agent": id("agent"), "blocks": text, "cron": "0 9 * * *"}}),
        ),
        ("ScheduleService.DeleteSchedule", json!({"schedule": id("schedule")})),
        ("ScheduleService.GetSchedule", json!({"schedule": id("schedule")})),
        ("ScheduleService.ListScheduleRuns", json!({"schedule": id("schedule")})),
        ("ScheduleService.PauseSchedule", json!({"schedule": id("schedule")})),
        ("ScheduleService.ResumeSchedule", json!({"schedule": id("schedule")})),
        ("ScheduleService.UpdateSchedule", json!({"schedule": id("schedule"), "name": "mine"})),
        ("SecretService.DeleteSecret", json!({"secret": id("secret")})),
        ("SecretService.GetSecret", json!({"secret": id("secret")})),
        ("SecretService.UpdateSecret", json!({"secret": id("secret"), "description": "mine"})),
        ("StateService.DeleteState", json!({"state": "settings"})),
        ("StateService.GetState", json!({"state": "settings"})),
        ("StateService.ListStateVersions", json!({"state": "settings", "shared": true})),
        ("TaskService.CancelTask", json!({"task": id("task")})),
        ("TaskService.CreateTask", json!({"spec": {"agent": id("agent")}})),
        ("TaskService.DeleteTask", json!({"task": id("task")})),
        ("TaskService.ExplainTask", json!({"task": id("task")})),
        ("TaskService.ForkTask", json!({"task": id("task"), "message": id("message")})),
        ("TaskService.GetTask", json!({"task": id("task")})),
        ("TaskService.ResumeTask", json!({"task": id("task")})),
        ("TaskService.RewindTask", json!({"task": id("task"), "message": id("message")})),
        ("TaskService.SuspendTask", json!({"task": id("task")})),
        ("TaskService.UpdateTask", json!({"task": id("task"), "title": "mine"})),
        ("UsageService.GetQuota", json!({"organization": id("organization")})),
    ]
}

/// An id of the same kind that does not exist.
fn unknown_id(id: &str) -> String {
    let (kind, _) = id.split_once('_').expect("an id");
    format!("{kind}_{}", Uuid::from_u128(0x0199_0000_0000_7000_8000_0000_0000_0000))
}

/// Methods whose requests name no resource of an organization, or only in a filter.
const METHODS_WITHOUT_REFERENCES: &[&str] = &[
    "AgentService.ListAgents",
    "ApprovalService.ListApprovals",
    "AuditService.ExportAuditEntries",
    "AuditService.ListAuditEntries",
    "BudgetService.GetCosts",
    "BudgetService.ListBudgets",
    "DiagnosisService.Diagnose",
    "DiagnosisService.GetOverview",
    // Content that another organization has is uploaded like any other.
    "FileService.CreateFile",
    "FileService.ListFiles",
    "KeyService.CreateApiKey",
    "KeyService.CreateSetupCode",
    "KeyService.ExchangeSetupCode",
    "KeyService.ListApiKeys",
    "ModelProviderService.CreateModelProvider",
    "ModelProviderService.ListModelProviders",
    "ModelService.ListCatalogModels",
    "ModelService.ListModels",
    "OrganizationService.CreateInvitation",
    "OrganizationService.CreateOrganization",
    "OrganizationService.ListInvitations",
    "OrganizationService.ListMembers",
    "OrganizationService.ListOrganizations",
    "OrganizationService.WhoAmI",
    "RecoveryService.DropDeadLetter",
    "RecoveryService.GetDeadLetter",
    "RecoveryService.ListDeadLetters",
    "RecoveryService.RedriveDeadLetter",
    "ScanService.CreateScanConnection",
    "ScanService.ListScanConnections",
    "ScanService.ListScans",
    "ScheduleService.ListSchedules",
    "SecretService.CreateSecret",
    "SecretService.ListSecrets",
    "StateService.ListStates",
    "StateService.PutState",
    "StateService.WatchStates",
    "TaskService.ListTasks",
    "UsageService.ListUsage",
    // For the operator, who sets it for other organizations.
    "UsageService.UpdateQuota",
];

#[tokio::test]
async fn resources_of_another_organization_are_not_found() {
    let gateway = Gateway::start_with(login_required()).await;
    let local = (OrganizationId::LOCAL, UserId::LOCAL);
    let (own_key_id, own) = create_key(&gateway, local, Role::Owner, &[Scope::Admin], None).await;
    let ids = create_resources(&gateway, &own, own_key_id, local).await;
    let elsewhere = create_organization(&gateway, "elsewhere").await;
    let (_, foreign) = create_key(&gateway, elsewhere, Role::Owner, &[Scope::Admin], None).await;
    // A caller whose own audit entries name nothing of other organizations.
    let silent = create_key(
        &gateway,
        create_organization(&gateway, "silent").await,
        Role::Owner,
        &[Scope::Admin],
        None,
    )
    .await
    .1;
    let requests = reference_requests(&ids);
    for (method, access) in methods() {
        let short = method.full_name().trim_start_matches("construct.v1.");
        let Some((_, body)) = requests.iter().find(|(name, _)| *name == short) else {
            assert!(
                METHODS_WITHOUT_REFERENCES.contains(&short),
                "{short} must be in one of the two tables"
            );
            if access != Access::Operator
                && [".List", ".Get", ".Who"].iter().any(|reads| short.contains(reads))
            {
                let filters = [
                    json!({}),
                    json!({"filter": {"task": ids["task"]}}),
                    json!({"filter": {"tree": ids["task"]}}),
                    json!({"filter": {"parent": ids["task"]}}),
                    json!({"filter": {"agent": ids["agent"]}}),
                    json!({"filter": {"model": ids["model"]}}),
                    json!({"filter": {"provider": ids["provider"]}}),
                ];
                for filter in filters {
                    if DynamicMessage::deserialize(method.input(), filter.clone()).is_err() {
                        continue;
                    }
                    let caller =
                        if short.starts_with("AuditService.") { &silent } else { &foreign };
                    let answer = call(&gateway, &method, &filter, Some(caller)).await;
                    assert_hides(short, &answer, &ids);
                }
            }
            continue;
        };
        let answer = call(&gateway, &method, body, Some(&foreign)).await;
        assert_eq!(code(&answer), Code::NotFound, "{short}: {answer:?}");
        // The answer equals the one for an id that does not exist.
        let (mut unknown, mut expected) =
            (body.to_string(), answer.expect_err("not found").message().to_owned());
        for id in ids.values() {
            let other = unknown_id(id);
            unknown = unknown.replace(id, &other);
            expected = expected.replace(id, &other);
        }
        let unknown: Value = serde_json::from_str(&unknown).expect("JSON");
        let other = call(&gateway, &method, &unknown, Some(&foreign)).await.expect_err("not found");
        assert_eq!((other.code(), other.message()), (Code::NotFound, expected.as_str()), "{short}");
    }
    // All resources still exist.
    for (what, method, field) in [
        ("task", "TaskService.GetTask", "task"),
        ("agent", "AgentService.GetAgent", "agent"),
        ("model", "ModelService.GetModel", "model"),
        ("provider", "ModelProviderService.GetModelProvider", "modelProvider"),
        ("secret", "SecretService.GetSecret", "secret"),
        ("scan", "ScanService.GetScan", "scan"),
        ("schedule", "ScheduleService.GetSchedule", "schedule"),
        ("budget", "BudgetService.GetBudget", "budget"),
        ("file", "FileService.GetFile", "file"),
        ("approval", "ApprovalService.GetApproval", "approval"),
        ("message", "MessageService.GetMessage", "message"),
        ("organization", "OrganizationService.GetOrganization", "organization"),
    ] {
        let answer =
            call(&gateway, &method_named(method), &json!({field: ids[what]}), Some(&own)).await;
        assert_eq!(code(&answer), Code::Ok, "{what}: {answer:?}");
    }
    // The decisions that others could not make were open: the owner's same requests succeed.
    for decides in ["ApprovalService.DecideApproval", "ScanService.ReviewCandidate"] {
        let (_, body) =
            requests.iter().find(|(name, _)| *name == decides).expect("it is in the table");
        let answer = call(&gateway, &method_named(decides), body, Some(&own)).await;
        assert_eq!(code(&answer), Code::Ok, "{decides}: {answer:?}");
    }
}

/// Creates one resource of each kind, with an owner's key.
async fn create_resources(
    gateway: &Gateway,
    own: &str,
    key: ApiKeyId,
    (organization, user): (OrganizationId, UserId),
) -> Ids {
    let make = async |method: &str, body: Value| {
        let method = method_named(method);
        let answer = call(gateway, &method, &body, Some(own))
            .await
            .unwrap_or_else(|status| panic!("{method:?}: {status:?}"));
        let answer = DynamicMessage::decode(method.output(), answer).expect("it can be read");
        let answer = serde_json::to_value(&answer).expect("JSON");
        answer["metadata"]["id"].as_str().unwrap_or_default().to_owned()
    };
    let text = json!([{"text": {"text": "tenant-a"}}]);
    let mut ids = BTreeMap::new();
    let provider = json!({"spec": {"name": "tenant-a-p", "type": "MODEL_PROVIDER_TYPE_SCRIPTED"}});
    ids.insert("provider", make("CreateModelProvider", provider).await);
    ids.insert(
        "model",
        make("CreateModel", json!({"spec": {"name": "tenant-a-m", "provider": "tenant-a-p"}}))
            .await,
    );
    ids.insert(
        "agent",
        make("CreateAgent", json!({"spec": {"name": "tenant-a-a", "model": "tenant-a-m"}})).await,
    );
    ids.insert(
        "task",
        make("CreateTask", json!({"spec": {"agent": "tenant-a-a", "title": "tenant-a-t"}})).await,
    );
    let message = json!({"spec": {"task": ids["task"], "blocks": text}});
    ids.insert("message", make("CreateMessage", message).await);
    let budget = json!({"spec": {"agent": "tenant-a-a", "period": "BUDGET_PERIOD_MONTH", "limitPicoUsd": "5000000000000"}});
    ids.insert("budget", make("CreateBudget", budget).await);
    let secret = json!({"spec": {"name": "TENANT_A", "value": "tenant-a-value", "bindings": {"hosts": ["a.example.com"]}}});
    ids.insert("secret", make("CreateSecret", secret).await);
    let schedule = json!({"spec": {"name": "tenant-a-s", "agent": "tenant-a-a", "blocks": text, "cron": "0 9 * * *"}});
    ids.insert("schedule", make("CreateSchedule", schedule).await);
    let connection = json!({"spec": {"name": "tenant-a-c", "host": "SCAN_HOST_GITHUB", "token": "tenant-a-token"}});
    ids.insert("connection", make("CreateScanConnection", connection).await);
    let scan = json!({"spec": {"github": "tenant-a/x", "connection": "tenant-a-c", "model": "tenant-a-m"}});
    ids.insert("scan", make("CreateScan", scan).await);
    ids.insert(
        "file",
        make("CreateFile", json!({"spec": {"name": "tenant-a-f", "size": "4"}})).await,
    );
    make("UploadPart", json!({"file": ids["file"], "offset": "0", "data": "bWluZQ=="})).await;
    // Documents have no ids: every organization has its own under the same name.
    for shared in [false, true] {
        make(
            "PutState",
            json!({"state": "settings", "shared": shared, "json": r#"{"who": "tenant-a"}"#}),
        )
        .await;
    }
    // The scanner creates candidates and the reconciler creates approvals. Neither runs here, so
    // the test writes both as they would.
    let (store, scan) = (gateway.store(), ids["scan"].parse().expect("an id"));
    let mut scan = store.scan_get(organization, scan).await.expect("it is there");
    let (id, name) = (CandidateId::from_uuid(Uuid::now_v7()), "tenant-a-n");
    let candidate =
        NewCandidate { id, name: name.into(), score: 50, content: json!({"name": name}) };
    let changes = ScanChanges { candidates: vec![candidate], ..ScanChanges::default() };
    store.scan_save(&mut scan, &changes, Timestamp::now()).await.expect("it is saved");
    ids.insert("candidate", id.to_string());
    let approval =
        request_approval_for(gateway, &ids["task"], &ids["message"], &"ab".repeat(32)).await;
    ids.insert("approval", approval);
    let new = NewInvitation {
        id: construct_domain::InvitationId::from_uuid(Uuid::now_v7()),
        email: "tenant-a@example.com".into(),
        role: Role::Viewer,
        invited_by: "local".into(),
        expires_at: Timestamp::now() + jiff::SignedDuration::from_hours(1),
    };
    let silent = crate::organizations::response_output(&());
    let made = store.invitation_create(&write(organization), new, |_| silent).await;
    let WriteOutcome::Applied { entity, .. } = made.expect("it is made") else {
        panic!("it has no idempotency key")
    };
    ids.insert("invitation", entity.id.to_string());
    ids.insert("api_key", key.to_string());
    ids.insert("user", user.to_string());
    ids.insert("organization", organization.to_string());
    ids
}

/// Asserts that an answer shows nothing of another organization.
fn assert_hides(method: &str, answer: &Result<Bytes, Status>, ids: &Ids) {
    let shown = match answer {
        Ok(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Err(status) => {
            assert_eq!(status.code(), Code::NotFound, "{method}: {status:?}");
            return;
        }
    };
    for hidden in ids.values().map(String::as_str).chain(["tenant-a", "TENANT_A"]) {
        assert!(!shown.contains(hidden), "{method} shows {hidden}: {shown}");
    }
}

/// Every field of the contract that names a resource is in the tables above.
#[test]
fn every_reference_field_is_covered() {
    let ids: BTreeMap<&str, String> = [
        "provider",
        "model",
        "agent",
        "task",
        "file",
        "message",
        "budget",
        "secret",
        "schedule",
        "scan",
        "connection",
        "candidate",
        "approval",
        "invitation",
        "api_key",
        "user",
        "organization",
    ]
    .into_iter()
    .map(|what| (what, format!("{what}_x")))
    .collect();
    let named = reference_requests(&ids);
    for (method, access) in methods() {
        let short = method.full_name().trim_start_matches("construct.v1.").to_owned();
        let names = method
            .input()
            .fields()
            .any(|field| ids.contains_key(field.name()) || field.name() == "model_provider");
        let filters = short == "BudgetService.GetCosts" || access == Access::Operator;
        assert!(!names || filters || named.iter().any(|(name, _)| *name == short), "{short}");
    }
}

/// The token of a scan allows a few methods, for the scan's own task, until the scan is over.
#[tokio::test]
async fn scan_token_opens_only_its_own_task() {
    use construct_runtime::{MasterKeys, ScanToken};

    let gateway = Gateway::start_with(login_required()).await;
    let local = (OrganizationId::LOCAL, UserId::LOCAL);
    let (own_key_id, own) = create_key(&gateway, local, Role::Owner, &[Scope::Admin], None).await;
    let ids = create_resources(&gateway, &own, own_key_id, local).await;
    let all = methods();
    let method = |name: &str| {
        &all.iter().find(|(known, _)| known.full_name().ends_with(name)).expect("a method").0
    };
    let scan = call(&gateway, method("GetScan"), &json!({"scan": ids["scan"]}), Some(&own))
        .await
        .expect("it is there");
    let scan = v1::Scan::decode(scan).expect("it can be read");
    let task = scan.status.expect("it has one").task_id;
    let sign = |scan: &str, task: &str, organization: &str, seconds: i64| {
        let token = ScanToken {
            scan: scan.to_owned(),
            organization: organization.to_owned(),
            task: task.to_owned(),
            user: UserId::LOCAL.to_string(),
            expires_at: Timestamp::now() + jiff::SignedDuration::from_secs(seconds),
        };
        token.sign(&MasterKeys::parse(TOKEN_KEY).expect("a key")).expose().to_owned()
    };
    let organization = ids["organization"].clone();
    let token = sign(&ids["scan"], &task, &organization, 60);
    let text = json!([{"text": {"text": "look"}}]);
    let message = json!({"spec": {"task": task, "blocks": text}});
    let created = call(&gateway, method("CreateMessage"), &message, Some(&token))
        .await
        .expect("it is for this task");
    let created =
        v1::Message::decode(created).expect("it can be read").metadata.expect("it has some").id;
    // Its usage counts for the key that requested the scan.
    let used = construct_store::StepUsage {
        call: Uuid::now_v7(),
        step: construct_domain::StepId::from_uuid(Uuid::now_v7()),
        model: construct_domain::ModelId::from_uuid(Uuid::now_v7()),
        purpose: construct_store::Purpose::Turn,
        usage: construct_domain::money::Usage { input_tokens: 7, ..Default::default() },
    };
    let (now, explores) = (Timestamp::now(), task.parse().expect("an id"));
    gateway
        .store()
        .step_usage_record(OrganizationId::LOCAL, explores, None, &used, now)
        .await
        .expect("it is recorded");
    let counted = construct_store::CountSelection::ALL;
    let counts = gateway
        .store()
        .quota_key_counts(
            OrganizationId::LOCAL,
            counted,
            &construct_store::Periods::containing(now),
        )
        .await;
    assert_eq!(counts.expect("counted").get(&own_key_id).map(|counts| counts.tokens), Some(7));
    for (name, body, fine) in [
        ("GetTask", json!({"task": task}), true),
        ("GetTask", json!({"task": ids["task"]}), false),
        ("CreateMessage", json!({"spec": {"task": ids["task"], "blocks": text}}), false),
        ("GetMessage", json!({"message": created}), true),
        ("GetMessage", json!({"message": ids["message"]}), false),
        ("ListMessages", json!({"task": task}), true),
        ("ListMessages", json!({"task": ids["task"]}), false),
        ("CancelTask", json!({"task": ids["task"]}), false),
        ("CancelTask", json!({"task": task}), true),
    ] {
        let answer = call(&gateway, method(name), &body, Some(&token)).await;
        let expected = if fine { Code::Ok } else { Code::NotFound };
        assert_eq!(code(&answer), expected, "{name} {body}: {answer:?}");
    }
    for (method, access) in &all {
        let path = rules::method_path(method.parent_service().full_name(), method.name());
        if *access == Access::Public || rules::allows_scan_token(&path) {
            continue;
        }
        let answer = call(&gateway, method, &json!({}), Some(&token)).await;
        assert_eq!(code(&answer), Code::PermissionDenied, "{path}: {answer:?}");
    }
    // Expired, of another organization, of an unknown scan, altered; last, of a scan that is over.
    let elsewhere = create_organization(&gateway, "elsewhere").await.0.to_string();
    let unknown = format!("scan_{}", Uuid::now_v7());
    for token in [
        sign(&ids["scan"], &task, &organization, -1),
        sign(&ids["scan"], &task, &elsewhere, 60),
        sign(&unknown, &task, &organization, 60),
        format!("{token}x"),
        "cscan_".to_owned(),
    ] {
        let answer = call(&gateway, method("GetTask"), &json!({"task": task}), Some(&token)).await;
        assert_eq!(code(&answer), Code::Unauthenticated, "{answer:?}");
    }
    let lease = std::time::Duration::from_secs(60);
    let mut claimed = gateway
        .store()
        .scans_claim(1, &[], lease, Timestamp::now())
        .await
        .expect("it is claimed")
        .remove(0);
    claimed.phase = construct_store::scan::ScanPhase::Review;
    gateway
        .store()
        .scan_save(&mut claimed, &Default::default(), Timestamp::now())
        .await
        .expect("it is over");
    let answer = call(&gateway, method("GetTask"), &json!({"task": task}), Some(&token)).await;
    assert_eq!(code(&answer), Code::Unauthenticated, "{answer:?}");
}

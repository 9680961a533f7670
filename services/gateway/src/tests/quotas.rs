//! Quotas over every protocol, and usage. The counts come from PostgreSQL.

use std::collections::BTreeMap;

use construct_domain::{
    OrganizationId, UserId,
    access::{Role, Scope},
};
use construct_proto::v1::{
    self, QuotaLimits, agent_service_client::AgentServiceClient,
    key_service_client::KeyServiceClient, message_service_client::MessageServiceClient,
    task_service_client::TaskServiceClient, usage_service_client::UsageServiceClient,
};
use construct_store::Limits;
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
};
use tonic::{Code, Response, Status, transport::Channel};
use tonic_types::StatusExt as _;

use super::{
    harness::*,
    walk::{create_key, create_organization, login_required, with_key},
};
use crate::{Config, quotas::Calendar};

const LOCAL: (OrganizationId, UserId) = (OrganizationId::LOCAL, UserId::LOCAL);

/// A gateway whose default tier has these limits.
async fn gateway(limits: Limits) -> Gateway {
    let gateway_tiers = BTreeMap::from([("free".to_owned(), limits)]);
    // The test stays within one day of quotas, whatever the time is.
    let gateway_calendar = Calendar::fixed_around(jiff::Timestamp::now());
    Gateway::start_with(Config {
        gateway_tiers,
        gateway_tier: "free".into(),
        gateway_calendar,
        ..login_required()
    })
    .await
}

/// Creates an organization and an owner's key.
async fn create_team(gateway: &Gateway, name: &str) -> (OrganizationId, String) {
    let (organization, owner) = create_organization(gateway, name).await;
    let (_, key) =
        create_key(gateway, (organization, owner), Role::Owner, &[Scope::Admin], None).await;
    (organization, key)
}

/// Creates a provider, a model and the agent `ada` with this key.
async fn create_agent_for(gateway: &Gateway, key: &str) {
    let channel = gateway.channel();
    let mut providers =
        v1::model_provider_service_client::ModelProviderServiceClient::new(channel.clone());
    providers.create_model_provider(with_key(provider("p"), Some(key))).await.expect("it is made");
    let mut models = v1::model_service_client::ModelServiceClient::new(channel.clone());
    models.create_model(with_key(model("m"), Some(key))).await.expect("it is made");
    AgentServiceClient::new(channel)
        .create_agent(with_key(agent("ada"), Some(key)))
        .await
        .expect("it is made");
}

fn usage(gateway: &Gateway) -> UsageServiceClient<Channel> {
    UsageServiceClient::new(gateway.channel())
}

async fn create_task(
    gateway: &Gateway,
    caller: &str,
    idempotency_key: &str,
) -> Result<Response<v1::Task>, Status> {
    let spec = v1::TaskSpec { agent: "ada".into(), ..v1::TaskSpec::default() };
    let request =
        v1::CreateTaskRequest { spec: Some(spec), idempotency_key: idempotency_key.into() };
    TaskServiceClient::new(gateway.channel()).create_task(with_key(request, Some(caller))).await
}

async fn list_tasks(
    gateway: &Gateway,
    caller: &str,
) -> Result<Response<v1::ListTasksResponse>, Status> {
    let request = with_key(v1::ListTasksRequest::default(), Some(caller));
    TaskServiceClient::new(gateway.channel()).list_tasks(request).await
}

/// The exhausted quota, and the seconds until a retry.
#[track_caller]
fn exhausted_quota<T: std::fmt::Debug>(result: Result<T, Status>) -> (String, u64) {
    let status = expect_error(result, Code::ResourceExhausted);
    let details = status.get_error_details();
    let violation = &details.quota_failure().expect("a violation").violations[0];
    let delay = details.retry_info().and_then(|info| info.retry_delay).expect("a retry delay");
    (violation.quota_id.clone(), delay.as_secs())
}

fn requests(requests: i64) -> Limits {
    Limits { requests_per_minute: Some(requests), ..Limits::default() }
}

#[tokio::test]
async fn flooding_organization_does_not_affect_others() {
    let gateway = gateway(Limits { key_requests_per_minute: Some(4), ..requests(6) }).await;
    let ((flooding, flood), (_, calm)) =
        (create_team(&gateway, "flood").await, create_team(&gateway, "calm").await);
    let mut outcomes = Vec::new();
    for _ in 0..20 {
        outcomes.push(list_tasks(&gateway, &flood).await.map(drop));
    }
    let admitted = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    // On a slow machine the bucket may refill meanwhile, by one in 15 seconds.
    assert!((4..8).contains(&admitted), "{admitted}");
    let last = outcomes.into_iter().rfind(Result::is_err).expect("most of them");
    let (id, seconds) = exhausted_quota(last);
    assert!(id == "key_requests_per_minute" && seconds < 60, "{id} {seconds}");
    let answer = list_tasks(&gateway, &calm).await.expect("its quota is its own");
    let header =
        answer.metadata().get("ratelimit").expect("a header").to_str().expect("text").to_owned();
    assert!(header.starts_with("\"requests_per_minute\";r=5;t="), "{header}");
    assert!(header.contains(", \"key_requests_per_minute\";r=3;t="), "{header}");
    assert_eq!(
        answer.metadata().get("ratelimit-policy").expect("a header"),
        "\"requests_per_minute\";q=6;w=60, \"key_requests_per_minute\";q=4;w=60"
    );
    // The operator's own organization cannot be limited to no requests: only it could undo that.
    let request = |limits: QuotaLimits| v1::UpdateQuotaRequest {
        organization: OrganizationId::LOCAL.to_string(),
        overrides: Some(limits),
        ..v1::UpdateQuotaRequest::default()
    };
    let (_, operator) = create_key(&gateway, LOCAL, Role::Owner, &[Scope::Admin], None).await;
    let none = QuotaLimits { requests_per_minute: Some(0), ..QuotaLimits::default() };
    expect_error(
        usage(&gateway).update_quota(with_key(request(none), Some(&operator))).await,
        Code::InvalidArgument,
    );
    // The operator has no limits unless they are set.
    let (_, operator) = create_key(&gateway, LOCAL, Role::Owner, &[Scope::Admin], None).await;
    for _ in 0..20 {
        let answer = list_tasks(&gateway, &operator).await.expect("not limited");
        assert!(answer.metadata().get("ratelimit").is_none());
    }
    // An override by the operator takes effect at once.
    let overrides = QuotaLimits {
        requests_per_minute: Some(1000),
        key_requests_per_minute: Some(1000),
        ..QuotaLimits::default()
    };
    let request = v1::UpdateQuotaRequest {
        organization: flooding.to_string(),
        overrides: Some(overrides),
        ..v1::UpdateQuotaRequest::default()
    };
    let updated = usage(&gateway)
        .update_quota(with_key(request, Some(&operator)))
        .await
        .expect("it is updated");
    let updated = updated.into_inner();
    assert_eq!(
        (updated.tier.as_str(), updated.assigned_tier.as_str(), updated.revision),
        ("free", "", 1)
    );
    for _ in 0..20 {
        list_tasks(&gateway, &flood).await.expect("the limit is higher now");
    }
}

#[tokio::test]
async fn every_protocol_reports_refusals_and_remaining_quota() {
    _ = rustls::crypto::ring::default_provider().install_default();
    let gateway = gateway(Limits { tasks_per_day: Some(0), ..requests(1000) }).await;
    let (organization, key) = create_team(&gateway, "team").await;
    create_agent_for(&gateway, &key).await;
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    let url = |path: &str| format!("http://{}{path}", gateway.address);
    let header = |response: &reqwest::Response, name: &str| {
        let fields = response.headers().get_all(name).iter();
        fields.map(|value| value.to_str().expect("text").to_owned()).collect::<Vec<_>>().join(", ")
    };
    // REST: a success, and a refusal.
    let fine = client.get(url("/v1/tasks")).bearer_auth(&key).send().await.expect("it answers");
    assert_eq!(fine.status(), StatusCode::OK);
    let before = header(&fine, "ratelimit");
    assert!(before.starts_with("\"requests_per_minute\";r="), "{before}");
    assert_eq!(header(&fine, "ratelimit-policy"), "\"requests_per_minute\";q=1000;w=60");
    let request = client.post(url("/v1/tasks")).bearer_auth(&key).json(&json!({"agent": "ada"}));
    let refused = request.send().await.expect("it answers");
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let left = header(&refused, "ratelimit");
    assert!(
        left.contains("\"tasks_per_day\";r=0;t=") && left.contains("\"requests_per_minute\";r="),
        "{left}"
    );
    assert!(
        header(&refused, "ratelimit-policy").contains("\"tasks_per_day\";q=0;qu=\"tasks\";w=86400")
    );
    let after: u64 = header(&refused, "retry-after").parse().expect("seconds");
    assert!((1..=86_400).contains(&after), "{after}");
    let problem: Value = refused.json().await.expect("JSON");
    assert_eq!((&problem["code"], &problem["status"]), (&json!("RESOURCE_EXHAUSTED"), &json!(429)));
    assert_eq!(
        (
            &problem["quotas"][0]["quota"],
            &problem["quotas"][0]["limit"],
            &problem["quotas"][0]["subject"]
        ),
        (&json!("tasks_per_day"), &json!("0"), &json!(format!("organization:{organization}")))
    );
    // A call is counted once, although several layers check it.
    let again = client.get(url("/v1/tasks")).bearer_auth(&key).send().await.expect("it answers");
    let number = |text: &str| -> u64 {
        let digits =
            text.split(";r=").nth(1).and_then(|rest| rest.split(';').next()).expect("a number");
        digits.parse().expect("a number")
    };
    assert!(number(&header(&again, "ratelimit")) >= number(&before) - 2, "{before}");
    // Connect.
    let request = client.post(url("/construct.v1.TaskService/CreateTask")).bearer_auth(&key);
    let refused =
        request.json(&json!({"spec": {"agent": "ada"}})).send().await.expect("it answers");
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(header(&refused, "ratelimit").contains("\"tasks_per_day\";r=0"));
    assert!(header(&refused, "retry-after").parse::<u64>().is_ok());
    let error: Value = refused.json().await.expect("JSON");
    let kinds: Vec<_> = error["details"]
        .as_array()
        .expect("details")
        .iter()
        .map(|detail| detail["type"].clone())
        .collect();
    assert_eq!(error["code"], "resource_exhausted");
    assert!(
        kinds.contains(&json!("google.rpc.QuotaFailure"))
            && kinds.contains(&json!("google.rpc.RetryInfo"))
    );
    let fine =
        client.post(url("/construct.v1.TaskService/ListTasks")).bearer_auth(&key).json(&json!({}));
    let fine = fine.send().await.expect("it answers");
    assert!(header(&fine, "ratelimit").starts_with("\"requests_per_minute\";r="));
    // A request whose body is no JSON never reaches the services, and is counted as well.
    let broken = client.post(url("/construct.v1.TaskService/ListTasks")).bearer_auth(&key);
    let broken = broken
        .header("content-type", "application/json")
        .body("{")
        .send()
        .await
        .expect("it answers");
    assert_eq!(broken.status(), StatusCode::BAD_REQUEST);
    assert!(header(&broken, "ratelimit").starts_with("\"requests_per_minute\";r="));
    // gRPC-Web.
    let request = client.post(url("/construct.v1.TaskService/ListTasks")).bearer_auth(&key);
    let request = request.header("content-type", "application/grpc-web+proto").body(vec![0; 5]);
    let fine = request.send().await.expect("it answers");
    assert!(header(&fine, "ratelimit").starts_with("\"requests_per_minute\";r="));
    // gRPC.
    let status = create_task(&gateway, &key, "").await.expect_err("the quota is zero");
    assert!(status.metadata().contains_key("ratelimit"));
    let (id, seconds) = exhausted_quota(Err::<(), _>(status));
    assert!(id == "tasks_per_day" && seconds <= 86_400, "{id} {seconds}");
    // The operator protocol.
    let (reader, mut writer) =
        TcpStream::connect(gateway.operator).await.expect("it listens").into_split();
    let mut lines = BufReader::new(reader).lines();
    let text = json!([{"type": "text", "text": "hello"}]);
    for line in [
        json!({"id": "1", "type": "auth", "key": key}),
        json!({"id": "2", "type": "dispatch", "agentID": "ada", "content": "hello"}),
        json!({"id": "3", "type": "query", "agentID": "ada", "messages": [{"role": "user", "content": text}]}),
    ] {
        writer.write_all(format!("{line}\n").as_bytes()).await.expect("it reads");
    }
    let (mut errors, mut limit) = (BTreeMap::new(), Value::Null);
    while errors.len() < 2 {
        let line = wait_for("an answer", lines.next_line())
            .await
            .expect("it is open")
            .expect("it continues");
        let line: Value = serde_json::from_str(&line).expect("JSON");
        if line["type"] == "authenticated" {
            limit = line["rateLimit"]["requests_per_minute"].clone();
        }
        let error = if line["type"] == "error" { line.clone() } else { line["content"][0].clone() };
        if error["type"] == "error" {
            errors.insert(line["id"].as_str().expect("an id").to_owned(), error);
        }
    }
    let number = |name: &str| limit[name].as_i64().unwrap_or_else(|| panic!("{name}: {limit}"));
    assert!(
        (0..number("limit")).contains(&number("remaining")) && number("window") == 60,
        "{limit}"
    );
    for (id, error) in errors {
        assert_eq!(error["code"], "RATE_LIMIT_EXCEEDED", "{id}: {error}");
        let details = &error["details"];
        assert_eq!(
            (&details["quota"], &details["limit"]),
            (&json!("tasks_per_day"), &json!(0)),
            "{id}: {error}"
        );
        assert!(details["retryAfter"].as_u64().is_some_and(|after| after > 0), "{id}: {error}");
    }
}

#[tokio::test]
async fn exhausted_daily_quota_still_answers_repeated_requests() {
    let limits = Limits { tasks_per_day: Some(2), tokens_per_day: Some(10), ..Limits::default() };
    let gateway = gateway(limits).await;
    let (organization, key) = create_team(&gateway, "team").await;
    create_agent_for(&gateway, &key).await;
    let first = create_task(&gateway, &key, "k").await.expect("the first").into_inner();
    create_task(&gateway, &key, "").await.expect("the second");
    assert_eq!(exhausted_quota(create_task(&gateway, &key, "").await).0, "tasks_per_day");
    let again = create_task(&gateway, &key, "k").await.expect("it is repeated").into_inner();
    assert_eq!(id(again.metadata), id(first.metadata.clone()));
    // A deleted task still counts.
    let task = id(first.metadata);
    let delete = v1::DeleteTaskRequest { task: task.clone(), ..v1::DeleteTaskRequest::default() };
    TaskServiceClient::new(gateway.channel())
        .delete_task(with_key(delete, Some(&key)))
        .await
        .expect("deleted");
    assert_eq!(exhausted_quota(create_task(&gateway, &key, "").await).0, "tasks_per_day");
    // Another organization has its own limits.
    let (owner, calm) = create_team(&gateway, "calm").await;
    create_agent_for(&gateway, &calm).await;
    // A request that fails after it was admitted uses nothing.
    let spec = v1::TaskSpec { agent: "unknown".into(), ..v1::TaskSpec::default() };
    for _ in 0..3 {
        let wrong =
            v1::CreateTaskRequest { spec: Some(spec.clone()), ..v1::CreateTaskRequest::default() };
        let wrong = TaskServiceClient::new(gateway.channel())
            .create_task(with_key(wrong, Some(&calm)))
            .await;
        expect_error(wrong, Code::NotFound);
    }
    let task = id(create_task(&gateway, &calm, "").await.expect("its first").into_inner().metadata);
    let send = async |text: &str| {
        let request = with_key(message(&task, text), Some(&calm));
        MessageServiceClient::new(gateway.channel()).create_message(request).await
    };
    send("hello").await.expect("nothing is used yet");
    let store = gateway.store();
    let step_usage = construct_store::StepUsage {
        call: uuid::Uuid::now_v7(),
        step: construct_domain::StepId::from_uuid(uuid::Uuid::now_v7()),
        model: construct_domain::ModelId::from_uuid(uuid::Uuid::now_v7()),
        purpose: construct_store::Purpose::Turn,
        usage: construct_domain::money::Usage {
            input_tokens: 9,
            output_tokens: 1,
            ..Default::default()
        },
    };
    let now = jiff::Timestamp::now();
    store
        .step_usage_record(owner, task.parse().expect("an id"), None, &step_usage, now)
        .await
        .expect("it is recorded");
    // Counts are cached for a moment.
    let refusal = wait_until("the tokens are counted", || send("again"), Result::is_err).await;
    let resume = v1::ResumeTaskRequest { task: task.clone(), ..v1::ResumeTaskRequest::default() };
    let resume =
        TaskServiceClient::new(gateway.channel()).resume_task(with_key(resume, Some(&calm))).await;
    assert_eq!(exhausted_quota(resume).0, "tokens_per_day");
    assert_eq!(exhausted_quota(refusal).0, "tokens_per_day");
    let shown = v1::GetQuotaRequest::default();
    let shown =
        usage(&gateway).get_quota(with_key(shown, Some(&calm))).await.expect("shown").into_inner();
    let used = shown.used.expect("it is counted");
    assert_eq!((shown.tier.as_str(), used.tasks, used.tokens), ("free", 1, 10));
    assert_eq!(shown.limits.expect("set").tokens_per_day, Some(10));
    let counted =
        usage(&gateway).get_quota(with_key(v1::GetQuotaRequest::default(), Some(&key))).await;
    assert_eq!(counted.expect("shown").into_inner().used.expect("counted").tasks, 2);
    // Usage of models, over REST.
    _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    let url = format!(
        "http://{}/v1/usage?dimensions=USAGE_DIMENSION_DAY&dimensions=USAGE_DIMENSION_AGENT",
        gateway.address
    );
    let answer = client.get(url).bearer_auth(&calm).send().await.expect("it answers");
    let answer: Value = answer.json().await.expect("JSON");
    assert_eq!(
        (&answer["usage"][0]["agent"], &answer["usage"][0]["calls"]),
        (&json!("ada"), &json!("1")),
        "{answer}"
    );
    assert_eq!(answer["usage"][0]["usage"]["inputTokens"], "9");
    // Only the operator can read the quota of another organization.
    let (_, operator) = create_key(&gateway, LOCAL, Role::Owner, &[Scope::Admin], None).await;
    let request = v1::GetQuotaRequest { organization: organization.to_string() };
    let shown =
        usage(&gateway).get_quota(with_key(request.clone(), Some(&operator))).await.expect("shown");
    assert_eq!(shown.into_inner().used.expect("counted").tasks, 2);
    expect_error(usage(&gateway).get_quota(with_key(request, Some(&calm))).await, Code::NotFound);
}

#[tokio::test]
async fn usage_is_listed_in_pages() {
    let gateway = Gateway::start().await.with_agent().await;
    let task: construct_domain::TaskId = gateway.task().await.parse().expect("an id");
    for day in 1..=5 {
        let entry = construct_store::StepUsage {
            call: uuid::Uuid::now_v7(),
            step: construct_domain::StepId::from_uuid(uuid::Uuid::now_v7()),
            model: construct_domain::ModelId::from_uuid(uuid::Uuid::now_v7()),
            purpose: construct_store::Purpose::Turn,
            usage: construct_domain::money::Usage { input_tokens: day, ..Default::default() },
        };
        let at = format!("2026-05-0{day}T12:00:00Z").parse().expect("a time");
        let booked =
            gateway.store().step_usage_record(OrganizationId::LOCAL, task, None, &entry, at).await;
        booked.expect("it is recorded");
    }
    let time = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
    let filter = v1::list_usage_request::Filter {
        since: time(1_777_593_600),
        until: time(1_780_272_000),
        ..v1::list_usage_request::Filter::default()
    };
    let mut request = v1::ListUsageRequest {
        page: Some(v1::PageRequest {
            page_size: 2,
            order_by: "day asc".into(),
            ..v1::PageRequest::default()
        }),
        filter: Some(filter),
        dimensions: vec![v1::UsageDimension::Day.into()],
    };
    let mut days = Vec::new();
    loop {
        let answer =
            usage(&gateway).list_usage(request.clone()).await.expect("listed").into_inner();
        days.extend(
            answer
                .usage
                .into_iter()
                .map(|row| (row.day, row.usage.expect("of models").input_tokens)),
        );
        let next = answer.page.expect("it says").next_page_token;
        if next.is_empty() {
            break;
        }
        // A page token is valid for its own list only.
        let other = v1::ListUsageRequest {
            page: Some(v1::PageRequest { page_token: next.clone(), ..v1::PageRequest::default() }),
            ..v1::ListUsageRequest::default()
        };
        expect_error(usage(&gateway).list_usage(other).await, Code::InvalidArgument);
        request.page.as_mut().expect("it has one").page_token = next;
    }
    let expected: Vec<_> = (1..=5).map(|day| (format!("2026-05-0{day}"), day)).collect();
    assert_eq!(days, expected);
    let bad = v1::ListUsageRequest { dimensions: vec![7], ..v1::ListUsageRequest::default() };
    expect_error(usage(&gateway).list_usage(bad).await, Code::InvalidArgument);
}

fn key_request(name: &str, limits: v1::ApiKeyLimits) -> v1::CreateApiKeyRequest {
    let scopes = vec!["admin".into()];
    let spec = v1::ApiKeySpec {
        name: name.into(),
        scopes,
        limits: Some(limits),
        ..v1::ApiKeySpec::default()
    };
    v1::CreateApiKeyRequest { spec: Some(spec), expires_in: None }
}

/// Creates a key with these limits by another key; returns its id and its text.
async fn create_limited_key(
    gateway: &Gateway,
    by: &str,
    limits: v1::ApiKeyLimits,
) -> (String, String) {
    let made = keys(gateway).create_api_key(with_key(key_request("bot", limits), Some(by))).await;
    let made = made.expect("it is made").into_inner();
    (id(made.api_key.expect("set").metadata), made.key)
}

fn keys(gateway: &Gateway) -> KeyServiceClient<Channel> {
    KeyServiceClient::new(gateway.channel())
}

/// Records tokens that a model used for a task.
async fn record_usage(gateway: &Gateway, organization: OrganizationId, task: &str, tokens: i64) {
    let step_usage = construct_store::StepUsage {
        call: uuid::Uuid::now_v7(),
        step: construct_domain::StepId::from_uuid(uuid::Uuid::now_v7()),
        model: construct_domain::ModelId::from_uuid(uuid::Uuid::now_v7()),
        purpose: construct_store::Purpose::Turn,
        usage: construct_domain::money::Usage { input_tokens: tokens, ..Default::default() },
    };
    let (task, now) = (task.parse().expect("an id"), jiff::Timestamp::now());
    gateway
        .store()
        .step_usage_record(organization, task, None, &step_usage, now)
        .await
        .expect("it is recorded");
}

#[tokio::test]
async fn limits_of_a_key_apply_to_that_key_only() {
    let gateway =
        gateway(Limits { key_requests_per_minute: Some(2000), ..Limits::default() }).await;
    let (organization, owner) = create_team(&gateway, "team").await;
    create_agent_for(&gateway, &owner).await;
    let limits = v1::ApiKeyLimits {
        requests_per_minute: Some(1000),
        tasks_per_day: Some(1),
        tokens_per_day: Some(10),
        ..v1::ApiKeyLimits::default()
    };
    let (key_id, bot) = create_limited_key(&gateway, &owner, limits).await;
    let (_, other) = create_limited_key(&gateway, &owner, limits).await;
    let first = create_task(&gateway, &bot, "k").await.expect("the first");
    let header = first.metadata().get("ratelimit-policy").expect("a header");
    assert_eq!(header, "\"key_requests_per_minute\";q=1000;w=60", "the lower of the two");
    let task = id(first.into_inner().metadata);
    let status = create_task(&gateway, &bot, "").await.expect_err("the limit is one a day");
    let subject = status.get_error_details().quota_failure().expect("a violation").violations[0]
        .subject
        .clone();
    assert_eq!(subject, format!("api_key:{key_id}"));
    assert!(
        status
            .metadata()
            .get("ratelimit")
            .is_some_and(|left| left.to_str().is_ok_and(|left| left.contains("r=0")))
    );
    assert_eq!(exhausted_quota(Err::<(), _>(status)).0, "key_tasks_per_day");
    let again = create_task(&gateway, &bot, "k").await.expect("it is repeated").into_inner();
    assert_eq!(id(again.metadata), task);
    for caller in [&other, &owner] {
        create_task(&gateway, caller, "").await.expect("it has its own limits, or none");
    }

    // A limited key cannot raise limits or create other credentials. A raised limit holds from the
    // next call.
    let raise = |revision| v1::UpdateApiKeyRequest {
        api_key: key_id.clone(),
        limits: Some(v1::ApiKeyLimits { tasks_per_day: Some(2), ..limits }),
        revision,
        ..v1::UpdateApiKeyRequest::default()
    };
    expect_error(
        keys(&gateway).update_api_key(with_key(raise(0), Some(&bot))).await,
        Code::PermissionDenied,
    );
    let escape = key_request("free", v1::ApiKeyLimits::default());
    expect_error(
        keys(&gateway).create_api_key(with_key(escape, Some(&bot))).await,
        Code::PermissionDenied,
    );
    let spec = key_request("free", limits).spec;
    let code = v1::CreateSetupCodeRequest { spec, ..v1::CreateSetupCodeRequest::default() };
    expect_error(
        keys(&gateway).create_setup_code(with_key(code, Some(&bot))).await,
        Code::PermissionDenied,
    );
    let spec = v1::OrganizationSpec {
        name: "free".into(),
        slug: "free".into(),
        ..v1::OrganizationSpec::default()
    };
    let create = v1::CreateOrganizationRequest {
        spec: Some(spec),
        ..v1::CreateOrganizationRequest::default()
    };
    let created =
        v1::organization_service_client::OrganizationServiceClient::new(gateway.channel())
            .create_organization(with_key(create, Some(&bot)))
            .await;
    expect_error(created, Code::PermissionDenied);
    expect_error(
        keys(&gateway).update_api_key(with_key(raise(7), Some(&owner))).await,
        Code::Aborted,
    );
    let raised = keys(&gateway)
        .update_api_key(with_key(raise(1), Some(&owner)))
        .await
        .expect("it is updated")
        .into_inner();
    assert_eq!(raised.metadata.expect("it has some").revision, 2);
    create_task(&gateway, &bot, "").await.expect("the second");

    // The usage of a task counts for the key of its last message: here the limited key, and then
    // one without limits.
    let send = async |key: &str| {
        let request = with_key(message(&task, "go on"), Some(key));
        MessageServiceClient::new(gateway.channel()).create_message(request).await
    };
    send(&bot).await.expect("nothing is used yet");
    record_usage(&gateway, organization, &task, 10).await;
    // Counts are cached for a moment.
    let refusal = wait_until("the tokens are counted", || send(&bot), Result::is_err).await;
    assert_eq!(exhausted_quota(refusal).0, "key_tokens_per_day");
    let mut tokens =
        v1::model_token_service_client::ModelTokenServiceClient::new(gateway.channel());
    let token = v1::CreateModelTokenRequest {
        models: vec!["m".into()],
        ..v1::CreateModelTokenRequest::default()
    };
    assert_eq!(
        exhausted_quota(tokens.create_model_token(with_key(token.clone(), Some(&bot))).await).0,
        "key_tokens_per_day"
    );
    send(&owner).await.expect("it is not limited");
    record_usage(&gateway, organization, &task, 1000).await;
    let signed = tokens
        .create_model_token(with_key(token, Some(&other)))
        .await
        .expect("it is made")
        .into_inner();
    let master = construct_runtime::MasterKeys::parse(TOKEN_KEY).expect("a key");
    let signed =
        construct_runtime::ModelToken::verify(&signed.token, &master, jiff::Timestamp::now());
    let other_id = signed.expect("it is valid").key;
    assert!(other_id.starts_with("key_") && other_id != key_id, "{other_id}");

    let get =
        |key: &str, by: &str| with_key(v1::GetApiKeyRequest { api_key: key.to_owned() }, Some(by));
    let shown = keys(&gateway)
        .get_api_key(get(&key_id, &bot))
        .await
        .expect("it may see itself")
        .into_inner();
    assert_eq!(
        shown.used,
        Some(v1::ApiKeyUsage { tasks: 2, tokens: 10, ..v1::ApiKeyUsage::default() })
    );
    assert_eq!(
        shown.spec.expect("it has one").limits.expect("it is limited").tasks_per_day,
        Some(2)
    );
    let (_, stranger) = create_team(&gateway, "stranger").await;
    expect_error(keys(&gateway).get_api_key(get(&key_id, &stranger)).await, Code::NotFound);

    // Usage by key, over REST.
    _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    let url = format!(
        "http://{}/v1/usage?dimensions=USAGE_DIMENSION_KEY&apiKey={key_id}",
        gateway.address
    );
    let answer = client.get(url).bearer_auth(&owner).send().await.expect("it answers");
    let answer: Value = answer.json().await.expect("JSON");
    let row = &answer["usage"][0];
    assert_eq!((&row["apiKeyId"], &row["apiKey"]), (&json!(key_id), &json!("bot")), "{answer}");
    assert_eq!(
        (&row["usage"]["inputTokens"], answer["usage"].as_array().map(Vec::len)),
        (&json!("10"), Some(1))
    );
    let url = format!("http://{}/v1/api-keys/{key_id}", gateway.address);
    let limits = json!({"limits": {"requestsPerMinute": "0"}});
    let answer =
        client.patch(&url).bearer_auth(&owner).json(&limits).send().await.expect("it answers");
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(exhausted_quota(list_tasks(&gateway, &bot).await).0, "key_requests_per_minute");
    let wrong = json!({"limits": {"tasksPerDay": "-1"}});
    let wrong =
        client.patch(&url).bearer_auth(&owner).json(&wrong).send().await.expect("it answers");
    let problem: Value = wrong.json().await.expect("JSON");
    assert_eq!(problem["violations"][0]["field"], "limits.tasks_per_day", "{problem}");
}

#[tokio::test]
async fn storage_limit_of_a_key_holds_and_its_files_outlive_it() {
    let gateway = gateway(Limits::default()).await;
    let (_, owner) = create_team(&gateway, "team").await;
    let limits = v1::ApiKeyLimits { storage_bytes: Some(20), ..v1::ApiKeyLimits::default() };
    let (key_id, bot) = create_limited_key(&gateway, &owner, limits).await;
    let (_, other) = create_limited_key(&gateway, &owner, limits).await;
    let files = || v1::file_service_client::FileServiceClient::new(gateway.channel());
    let create = async |key: &str, size: i64| {
        let spec = v1::FileSpec { name: "notes".into(), size, ..v1::FileSpec::default() };
        let request =
            v1::CreateFileRequest { spec: Some(spec), ..v1::CreateFileRequest::default() };
        files().create_file(with_key(request, Some(key))).await
    };
    let put = async |key: &str, json: &str| {
        let request = v1::PutStateRequest {
            state: "settings".into(),
            json: json.into(),
            ..Default::default()
        };
        let mut states = v1::state_service_client::StateServiceClient::new(gateway.channel());
        states.put_state(with_key(request, Some(key))).await
    };
    put(&bot, "{\"abc\": 123}").await.expect("12 of 20");
    let status = create(&bot, 9).await.expect_err("8 bytes are left");
    let violation =
        status.get_error_details().quota_failure().expect("a violation").violations[0].clone();
    assert_eq!((violation.subject, violation.quota_value), (format!("api_key:{key_id}"), 20));
    assert_eq!(exhausted_quota(Err::<(), _>(status)), ("key_storage_bytes".to_owned(), 60));
    let file = id(create(&bot, 8).await.expect("20 of 20").into_inner().metadata);
    put(&bot, "{\"abc\": 123}").await.expect("the same adds nothing");
    assert_eq!(exhausted_quota(put(&bot, "{}").await).0, "key_storage_bytes");
    for caller in [&other, &owner] {
        create(caller, 9).await.expect("it has its own limit, or none");
    }
    let get = v1::GetApiKeyRequest { api_key: key_id.clone() };
    let shown = keys(&gateway)
        .get_api_key(with_key(get, Some(&bot)))
        .await
        .expect("it may see itself")
        .into_inner();
    assert_eq!(
        shown.used,
        Some(v1::ApiKeyUsage { storage_bytes: 20, ..v1::ApiKeyUsage::default() })
    );
    assert_eq!(shown.spec.expect("it has one").limits, Some(limits));
    // Deletion by anyone frees the storage of the key.
    let delete = v1::DeleteFileRequest { file, ..v1::DeleteFileRequest::default() };
    files().delete_file(with_key(delete, Some(&owner))).await.expect("deleted");
    // Counts are cached for a moment.
    let again = wait_until("the storage is freed", || create(&bot, 8), Result::is_ok)
        .await
        .expect("20 of 20");
    // What a key has stored belongs to its organization.
    let revoke = v1::RevokeApiKeyRequest { api_key: key_id, ..v1::RevokeApiKeyRequest::default() };
    keys(&gateway).revoke_api_key(with_key(revoke, Some(&owner))).await.expect("revoked");
    let get = v1::GetFileRequest { file: id(again.into_inner().metadata) };
    files().get_file(with_key(get, Some(&owner))).await.expect("it stays");
    let quota =
        usage(&gateway).get_quota(with_key(v1::GetQuotaRequest::default(), Some(&owner))).await;
    let used = quota.expect("shown").into_inner().used.expect("it is counted");
    assert_eq!(used.storage_bytes, 12 + 8 + 2 * 9);
}

#[tokio::test]
async fn document_is_charged_for_the_bytes_it_adds() {
    let gateway = gateway(Limits { storage_bytes: Some(20), ..Limits::default() }).await;
    let (_, key) = create_team(&gateway, "team").await;
    let mut client = v1::state_service_client::StateServiceClient::new(gateway.channel());
    let mut put = async |json: &str| {
        let request = v1::PutStateRequest {
            state: "settings".into(),
            json: json.into(),
            ..Default::default()
        };
        client.put_state(with_key(request, Some(&key))).await
    };
    put("{\"abc\": 123}").await.expect("12 of 20");
    put("{\"abc\": 123}").await.expect("the same adds nothing");
    // The replaced content is kept as an earlier version.
    put("{\"a\": 1}").await.expect("20 of 20");
    assert_eq!(exhausted_quota(put("{}").await).0, "storage_bytes");
}

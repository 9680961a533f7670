//! The audit trail, over every protocol.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use construct_domain::{OrganizationId, UserId, access::Role, access::Scope};
use construct_proto::v1::{
    self, audit_service_client::AuditServiceClient, key_service_client::KeyServiceClient,
    model_token_service_client::ModelTokenServiceClient,
    secret_service_client::SecretServiceClient,
};
use construct_store::{AgentFilter, AuditEntry, AuditFilter, Key, Order, Page, PoolOptions, Store};
use futures::{SinkExt as _, StreamExt as _};
use jiff::{SignedDuration, Timestamp};
use prost::Message as _;
use tokio::io::AsyncBufReadExt as _;
use tokio_tungstenite::tungstenite::{Message as Frame, client::IntoClientRequest as _};
use tonic::{Code, Request};

use super::*;
use crate::{
    Config,
    tests::{
        issuer::{AUDIENCE, Issuer, Key as IssuerKey},
        walk::{create_key, create_organization, login_required, with_key},
    },
};

/// The audit entries of an organization, the oldest first.
async fn entries_of(gateway: &Gateway, organization: OrganizationId) -> Vec<AuditEntry> {
    let page = Page {
        limit: 10_000,
        order: Order { key: Key::CreatedAt, descending: false },
        after: None,
    };
    gateway
        .store()
        .audit_list(organization, &AuditFilter::default(), &page)
        .await
        .expect("it is read")
}

async fn entries(gateway: &Gateway) -> Vec<AuditEntry> {
    entries_of(gateway, OrganizationId::LOCAL).await
}

/// The entry of the call that was just answered. It must exist by now: a gateway that is killed
/// now writes no more.
async fn last_entry(gateway: &Gateway) -> AuditEntry {
    entries(gateway).await.pop().expect("there is an entry")
}

fn local() -> (OrganizationId, UserId) {
    (OrganizationId::LOCAL, UserId::LOCAL)
}

async fn list(
    gateway: &Gateway,
    filter: v1::AuditFilter,
    key: Option<&str>,
) -> Vec<v1::AuditEntry> {
    let page = Some(v1::PageRequest { page_size: 100, ..v1::PageRequest::default() });
    let request = v1::ListAuditEntriesRequest { page, filter: Some(filter) };
    let listed =
        AuditServiceClient::new(gateway.channel()).list_audit_entries(with_key(request, key)).await;
    listed.expect("it is listed").into_inner().audit_entries
}

#[tokio::test]
async fn answered_write_has_entry_with_caller_objects_and_protocol() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let made = last_entry(&gateway).await;
    assert_eq!(
        (made.method.as_str(), made.protocol.as_str(), made.code),
        ("TaskService/CreateTask", "grpc", 0)
    );
    assert_eq!(
        (made.user, made.api_key, made.peer.as_str()),
        (Some(UserId::LOCAL), None, "127.0.0.1")
    );
    assert_eq!(made.objects, ["ada", &task]);
    assert!(made.user_agent.starts_with("tonic/"), "{}", made.user_agent);

    let message = gateway.send_message(&task, "hello").await;
    assert_eq!(last_entry(&gateway).await.objects, [task.clone(), id(message.metadata)]);

    let answer = http()
        .patch(gateway.url(&format!("/v1/tasks/{task}")))
        .header("user-agent", "curl/8")
        .header("x-request-id", "r-7")
        .json(&json!({"title": "a title that says much"}))
        .send()
        .await
        .expect("it answers");
    assert_eq!(answer.status(), 200);
    let patched = last_entry(&gateway).await;
    assert_eq!(
        (patched.method.as_str(), patched.protocol.as_str()),
        ("TaskService/UpdateTask", "rest")
    );
    assert_eq!((patched.user_agent.as_str(), patched.request_id.as_str()), ("curl/8", "r-7"));
    assert_eq!(patched.objects, [task.as_str()]);

    let answer = http()
        .post(gateway.url("/construct.v1.TaskService/SuspendTask"))
        .json(&json!({"task": task}))
        .send()
        .await
        .expect("it answers");
    assert_eq!(answer.status(), 200);
    assert_eq!(last_entry(&gateway).await.protocol, "connect");

    let message = v1::ResumeTaskRequest { task: task.clone(), ..v1::ResumeTaskRequest::default() }
        .encode_to_vec();
    let length = u32::try_from(message.len()).expect("it is small");
    let web = http().post(gateway.url("/construct.v1.TaskService/ResumeTask"));
    let web = web.header("content-type", "application/grpc-web+proto");
    web.body([&[0][..], &length.to_be_bytes(), &message].concat())
        .send()
        .await
        .expect("it answers");
    assert_eq!(last_entry(&gateway).await.protocol, "grpc-web");

    let mut operator =
        tokio::io::BufReader::new(TcpStream::connect(gateway.operator).await.expect("it listens"));
    let line = json!({"type": "dispatch", "agentID": "ada", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]});
    operator.write_all(format!("{line}\n").as_bytes()).await.expect("it reads");
    let mut answer = String::new();
    wait_for("an answer", operator.read_line(&mut answer)).await.expect("it answers");
    let stream = TcpStream::connect(gateway.operator).await.expect("it listens");
    let socket =
        tokio_tungstenite::client_async(format!("ws://{}/", gateway.operator), stream).await;
    let (mut socket, _) = socket.expect("it connects");
    socket.send(Frame::text(line.to_string())).await.expect("it reads");
    wait_for("an answer", socket.next()).await.expect("it answers").expect("it is open");
    for protocol in ["operator", "websocket"] {
        let entries: Vec<_> = entries(&gateway)
            .await
            .into_iter()
            .filter(|entry| entry.protocol == protocol)
            .collect();
        let methods: Vec<_> = entries.iter().map(|entry| entry.method.as_str()).collect();
        assert_eq!(
            methods,
            ["TaskService/CreateTask", "MessageService/CreateMessage"],
            "{protocol}"
        );
        assert_eq!(entries[0].peer, "127.0.0.1");
    }

    // Failed and repeated writes are audited as well. Reads are not.
    let before = entries(&gateway).await.len();
    expect_error(gateway.agents().create_agent(agent("ada")).await, Code::AlreadyExists);
    assert_eq!((last_entry(&gateway).await.code, entries(&gateway).await.len()), (6, before + 1));
    for count in 2..=3 {
        let again = v1::CreateAgentRequest { idempotency_key: "k".into(), ..agent("bob") };
        gateway.agents().create_agent(again).await.expect("it is made, or repeated");
        assert_eq!(
            (last_entry(&gateway).await.code, entries(&gateway).await.len()),
            (0, before + count)
        );
    }
    gateway.agents().list_agents(v1::ListAgentsRequest::default()).await.expect("it is listed");
    assert_eq!(entries(&gateway).await.len(), before + 3);
}

#[tokio::test]
async fn sign_in_and_key_changes_are_audited_without_secrets() {
    let rsa = IssuerKey::ec("e");
    let issuer = Issuer::start(&[&rsa]).await;
    let config = Config {
        gateway_oidc_issuer: Some(issuer.url().to_owned()),
        gateway_oidc_audience: Some(AUDIENCE.to_owned()),
        ..login_required()
    };
    let gateway = Gateway::start_with(config).await;
    let (id, owner) = create_key(&gateway, local(), Role::Owner, &[Scope::Admin], None).await;
    let mut keys = KeyServiceClient::new(gateway.channel());
    let spec = v1::ApiKeySpec {
        name: "k".into(),
        scopes: vec!["tasks:read".into()],
        ..v1::ApiKeySpec::default()
    };
    let request = v1::CreateApiKeyRequest { spec: Some(spec.clone()), expires_in: None };
    let made = keys
        .create_api_key(with_key(request, Some(&owner)))
        .await
        .expect("it is made")
        .into_inner();
    let made_id = made.api_key.as_ref().and_then(|key| key.metadata.clone()).expect("an id").id;
    let entry = last_entry(&gateway).await;
    assert_eq!((entry.api_key, entry.objects), (Some(id), vec![made_id.clone()]));
    let request =
        v1::RevokeApiKeyRequest { api_key: made_id.clone(), idempotency_key: String::new() };
    keys.revoke_api_key(with_key(request, Some(&owner))).await.expect("it is revoked");
    assert_eq!(last_entry(&gateway).await.objects, [made_id]);

    let request =
        v1::CreateSetupCodeRequest { spec: Some(spec), ..v1::CreateSetupCodeRequest::default() };
    let code = keys
        .create_setup_code(with_key(request, Some(&owner)))
        .await
        .expect("it is made")
        .into_inner()
        .code;
    let request = || v1::ExchangeSetupCodeRequest { code: code.clone() };
    let exchanged =
        keys.exchange_setup_code(request()).await.expect("it is exchanged").into_inner();
    let entry = last_entry(&gateway).await;
    let new = exchanged.api_key.and_then(|key| key.metadata).expect("an id").id;
    assert_eq!(
        (entry.method.as_str(), entry.user),
        ("KeyService/ExchangeSetupCode", Some(UserId::LOCAL))
    );
    assert_eq!(entry.objects, [new]);
    expect_error(keys.exchange_setup_code(request()).await, Code::Unauthenticated);

    let token = rsa.sign(&issuer.claims("ada", "ada@example.com"));
    let mut client =
        v1::organization_service_client::OrganizationServiceClient::new(gateway.channel());
    for _ in 0..2 {
        client
            .who_am_i(with_key(v1::WhoAmIRequest {}, Some(&token)))
            .await
            .expect("she is authenticated");
    }
    let ada = client
        .who_am_i(with_key(v1::WhoAmIRequest {}, Some(&token)))
        .await
        .expect("she is authenticated")
        .into_inner();
    let own = entries_of(&gateway, ada.organization_id.parse().expect("an id")).await;
    assert_eq!(own.len(), 1, "{own:?}");
    assert_eq!((own[0].method.as_str(), &own[0].objects), ("SignIn", &vec![ada.user_id]));

    let spec = v1::SecretSpec {
        name: "TOKEN".into(),
        value: "hunter2-x7Qw9Zk2Lm4Vt8".into(),
        bindings: Some(v1::SecretBindings {
            hosts: vec!["a.example.com".into()],
            ..v1::SecretBindings::default()
        }),
        ..v1::SecretSpec::default()
    };
    let request =
        v1::CreateSecretRequest { spec: Some(spec), idempotency_key: "idempotent".into() };
    let mut secrets = SecretServiceClient::new(gateway.channel());
    secrets.create_secret(with_key(request, Some(&owner))).await.expect("it is made");
    gateway.context.lifecycle().stop("all entries are written");
    wait_until(
        "the refusal is written",
        async || entries(&gateway).await,
        |all| all.iter().any(|entry| entry.code == 16),
    )
    .await;
    let all = format!("{:?} {own:?}", entries(&gateway).await);
    for secret in [
        &owner,
        &made.key,
        &code,
        &exchanged.key,
        &token,
        "hunter2",
        "idempotent",
        "ada@example.com",
    ] {
        assert!(!all.contains(secret), "{secret}: {all}");
    }
}

#[tokio::test]
async fn organization_reads_only_its_own_audit_entries() {
    let gateway = Gateway::start_with(login_required()).await;
    let (_, owner) = create_key(&gateway, local(), Role::Owner, &[Scope::Admin], None).await;
    let elsewhere = create_organization(&gateway, "elsewhere").await;
    let (_, foreign) = create_key(&gateway, elsewhere, Role::Admin, &[Scope::Admin], None).await;
    let (viewer_id, viewer) =
        create_key(&gateway, elsewhere, Role::Viewer, &[Scope::Admin], None).await;
    let make = async |name: &str, key: &str| {
        let made =
            gateway.providers().create_model_provider(with_key(provider(name), Some(key))).await;
        id(made.expect("it is made").into_inner().metadata)
    };
    let made = make("local-p", &owner).await;
    make("foreign-p", &foreign).await;
    // A call without credentials, and a member without permission.
    expect_error(
        gateway.agents().list_agents(v1::ListAgentsRequest::default()).await,
        Code::Unauthenticated,
    );
    expect_error(
        gateway.agents().create_agent(with_key(agent("x"), Some(&viewer))).await,
        Code::PermissionDenied,
    );

    let listed = async || list(&gateway, v1::AuditFilter::default(), Some(&foreign)).await;
    let listed = wait_until("the refusal is written", listed, |all| all.len() == 2).await;
    let outcomes: Vec<_> =
        listed.iter().map(|entry| (entry.method.as_str(), entry.outcome.as_str())).collect();
    let expected = [
        ("AgentService/CreateAgent", "PERMISSION_DENIED"),
        ("ModelProviderService/CreateModelProvider", "OK"),
    ];
    assert_eq!(outcomes, expected);
    assert_eq!(listed[0].api_key, viewer_id.to_string());
    for filter in [
        v1::AuditFilter { object: made.clone(), ..v1::AuditFilter::default() },
        v1::AuditFilter { outcome: "UNAUTHENTICATED".into(), ..v1::AuditFilter::default() },
        v1::AuditFilter { user: UserId::LOCAL.to_string(), ..v1::AuditFilter::default() },
    ] {
        assert_eq!(list(&gateway, filter, Some(&foreign)).await, []);
    }
    let unauthenticated =
        v1::AuditFilter { outcome: "UNAUTHENTICATED".into(), ..v1::AuditFilter::default() };
    let refusals = async || list(&gateway, unauthenticated.clone(), Some(&owner)).await;
    let anonymous = wait_until("the refusal is written", refusals, |all| !all.is_empty()).await;
    assert!(
        anonymous.iter().all(|entry| entry.user.is_empty() && entry.peer == "127.0.0.1"),
        "{anonymous:?}"
    );
    let filter = v1::AuditFilter {
        method: "*/CreateModelP*".into(),
        object: made,
        ..v1::AuditFilter::default()
    };
    assert_eq!(list(&gateway, filter, Some(&owner)).await.len(), 1);

    // Pages, and the export as lines.
    let request = v1::ListAuditEntriesRequest {
        page: Some(v1::PageRequest { page_size: 1, ..v1::PageRequest::default() }),
        filter: None,
    };
    let mut audit = AuditServiceClient::new(gateway.channel());
    let page = audit
        .list_audit_entries(with_key(request, Some(&foreign)))
        .await
        .expect("a page")
        .into_inner();
    assert!(
        page.audit_entries == listed[..1]
            && !page.page.expect("there is more").next_page_token.is_empty()
    );
    let export =
        http().get(gateway.url("/v1/audit-entries/export?outcome=OK")).bearer_auth(&foreign);
    let export = export.send().await.expect("it answers");
    assert_eq!(export.headers()["content-type"], "application/x-ndjson");
    let text = export.text().await.expect("all of it");
    let lines: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert_eq!((&lines[0]["id"], &lines[0]["peer"]), (&json!(listed[1].id), &json!("127.0.0.1")));
    let request = v1::ExportAuditEntriesRequest::default();
    expect_error(
        audit.export_audit_entries(with_key(request, Some(&viewer))).await,
        Code::PermissionDenied,
    );
}

#[tokio::test]
async fn downloads_and_exports_are_audited() {
    let gateway = Gateway::start().await;
    let upload = http()
        .post(gateway.url("/v1/files/uploads"))
        .header("tus-resumable", "1.0.0")
        .header("upload-length", "5")
        .header("content-type", "application/offset+octet-stream")
        .body("hello");
    let upload = upload.send().await.expect("it answers");
    let location = upload.headers()["location"].to_str().expect("text").replace("/uploads/", "/");
    let content = gateway.url(&format!("{location}/content"));
    let ready =
        || async { http().head(&content).send().await.expect("it answers").status().as_u16() };
    wait_until("it is checked", ready, |status| *status == 200).await;
    let before = entries(&gateway).await.len();
    // A HEAD request is not a download.
    assert_eq!(ready().await, 200);
    assert_eq!(entries(&gateway).await.len(), before);
    let body =
        http().get(&content).send().await.expect("it answers").text().await.expect("all of it");
    let entry = last_entry(&gateway).await;
    assert_eq!(
        (body.as_str(), entry.method.as_str(), entry.code),
        ("hello", "FileService/DownloadFile", 0)
    );
    assert_eq!(entry.objects, [location.rsplit('/').next().expect("an id")]);
    let export =
        http().get(gateway.url("/v1/audit-entries/export")).send().await.expect("it answers");
    let export = export.text().await.expect("all of it");
    assert!(
        export.contains("FileService/DownloadFile") && !export.contains("ExportAuditEntries"),
        "{export}"
    );
    assert_eq!(last_entry(&gateway).await.method, "AuditService/ExportAuditEntries");
}

#[tokio::test]
async fn refused_sse_subscription_is_audited_as_sse() {
    let gateway = Gateway::start_with(login_required()).await;
    let answer = http().get(gateway.url("/v1/events")).send().await.expect("it answers");
    assert_eq!(answer.status(), 401);
    let protocols = || async {
        let entries = entries(&gateway).await.into_iter();
        entries
            .filter(|entry| entry.method == "EventService/Subscribe")
            .map(|entry| entry.protocol)
            .collect::<Vec<_>>()
    };
    let protocols =
        wait_until("the refusal is written", protocols, |protocols| !protocols.is_empty()).await;
    assert_eq!(protocols, ["sse"]);
}

#[tokio::test]
async fn audit_peer_is_the_client_only_behind_a_trusted_proxy() {
    const FORWARDED_FOR: &str = "x-forwarded-for";
    // An address that the client forged, and the one that the proxy added.
    const FORWARDED: &str = "203.0.113.66, 192.0.2.7";
    for (trusted, peer) in
        [(vec!["127.0.0.0/8".to_owned()], "192.0.2.7"), (Vec::new(), "127.0.0.1")]
    {
        let gateway =
            Gateway::start_with(Config { gateway_trusted_proxies: trusted, ..login_required() })
                .await;
        let (_, owner) = create_key(&gateway, local(), Role::Owner, &[Scope::Admin], None).await;

        let mut request = with_key(provider("p"), Some(&owner));
        request.metadata_mut().insert(FORWARDED_FOR, FORWARDED.parse().expect("a value"));
        gateway.providers().create_model_provider(request).await.expect("it is made");
        let made = last_entry(&gateway).await;
        assert_eq!((made.protocol.as_str(), made.peer.as_str()), ("grpc", peer));

        // Several lines of a header form one list.
        let upload = http()
            .post(gateway.url("/v1/files/uploads"))
            .bearer_auth(&owner)
            .header(FORWARDED_FOR, "203.0.113.66")
            .header(FORWARDED_FOR, "192.0.2.7")
            .header("tus-resumable", "1.0.0")
            .header("upload-length", "5")
            .send()
            .await
            .expect("it answers");
        assert_eq!(upload.status(), 201);
        let made = last_entry(&gateway).await;
        assert_eq!((made.protocol.as_str(), made.peer.as_str()), ("rest", peer));

        // Unauthenticated calls, whose entries are written later.
        let list =
            http().post(gateway.url("/construct.v1.ModelService/ListModels")).json(&json!({}));
        for ask in [http().get(gateway.url("/v1/events")), list] {
            let answer = ask.header(FORWARDED_FOR, FORWARDED).send().await.expect("it answers");
            assert_eq!(answer.status(), 401);
        }
        let mut request =
            format!("ws://{}/", gateway.operator).into_client_request().expect("a request");
        request.headers_mut().insert(FORWARDED_FOR, FORWARDED.parse().expect("a value"));
        let stream = TcpStream::connect(gateway.operator).await.expect("it listens");
        let (mut socket, _) =
            tokio_tungstenite::client_async(request, stream).await.expect("it connects");
        let ask = json!({"id": "1", "type": "list_sessions"});
        socket.send(Frame::text(ask.to_string())).await.expect("it reads");
        wait_for("an answer", socket.next()).await.expect("it answers").expect("it is open");
        for protocol in ["sse", "connect", "websocket"] {
            let peers = || async {
                let entries =
                    entries(&gateway).await.into_iter().filter(|entry| entry.protocol == protocol);
                entries.map(|entry| entry.peer).collect::<Vec<_>>()
            };
            let peers =
                wait_until("the refusal is written", peers, |peers| !peers.is_empty()).await;
            assert!(peers.iter().all(|actual| actual == peer), "{protocol}: {peers:?}");
        }
    }
}

#[tokio::test]
async fn long_audit_trail_is_exported_completely_and_in_order() {
    let gateway = Gateway::start().await;
    let first = Timestamp::now() - SignedDuration::from_hours(1);
    let entry = |number: u32| AuditEntry {
        id: construct_domain::AuditEntryId::from_uuid(uuid::Uuid::now_v7()),
        organization: OrganizationId::LOCAL,
        user: None,
        api_key: None,
        method: "A/B".into(),
        protocol: "grpc".into(),
        peer: String::new(),
        user_agent: String::new(),
        objects: vec![number.to_string()],
        code: 0,
        count: 1,
        request_id: String::new(),
        trace_id: String::new(),
        // Several entries have the same time.
        created_at: first + SignedDuration::from_secs(i64::from(number / 7)),
    };
    let entries: Vec<_> = (0..1501).map(entry).collect();
    gateway.store().audit_append(&entries).await.expect("they are written");
    let request = Request::new(v1::ExportAuditEntriesRequest::default());
    let exported = AuditServiceClient::new(gateway.channel()).export_audit_entries(request).await;
    let mut exported = exported.expect("it is exported").into_inner();
    let mut count = 0;
    while let Some(entry) =
        wait_for("the next entry", exported.message()).await.expect("it continues")
    {
        assert_eq!(entry.objects, [count.to_string()]);
        count += 1;
    }
    assert_eq!(count, 1501);
}

#[tokio::test]
async fn flood_of_refusals_writes_two_rows() {
    let gateway = Gateway::start_with(login_required()).await;
    let before = entries(&gateway).await.iter().map(|entry| entry.count).sum::<u64>();
    for _ in 0..200 {
        let request = with_key(v1::ListModelsRequest::default(), Some("ct_x"));
        expect_error(gateway.models().list_models(request).await, Code::Unauthenticated);
    }
    let counts = async || {
        let all = entries(&gateway)
            .await
            .into_iter()
            .filter(|entry| entry.method == "ModelService/ListModels");
        all.map(|entry| entry.count).collect::<Vec<_>>()
    };
    let at_once = wait_until("the first is written", counts, |counts| !counts.is_empty()).await;
    assert_eq!(at_once, [1]);
    gateway.context.lifecycle().stop("the count is written");
    assert_eq!(
        wait_until("the others are counted", counts, |counts| counts.len() > 1).await,
        [1, 199]
    );
    assert!(before <= 1, "{before}");
}

#[tokio::test]
async fn write_without_audit_entry_is_not_done() {
    let gateway = Gateway::start().await.with_agent().await;
    gateway.database.refuse_audit(true).await;
    gateway.agents().create_agent(agent("bob")).await.expect_err("it cannot be audited");
    let request = v1::CreateModelTokenRequest {
        models: vec!["m".into()],
        ..v1::CreateModelTokenRequest::default()
    };
    let token = ModelTokenServiceClient::new(gateway.channel()).create_model_token(request).await;
    expect_error(token, Code::Unavailable);
    let stranger = with_key(v1::ListAgentsRequest::default(), Some("ct_x"));
    expect_error(gateway.agents().list_agents(stranger).await, Code::Unauthenticated);
    expect_error(gateway.agents().create_agent(agent("ada")).await, Code::AlreadyExists);
    gateway.agents().list_agents(v1::ListAgentsRequest::default()).await.expect("reads succeed");
    gateway.database.refuse_audit(false).await;
    // The write without an entry was not done. Refusals are written later.
    let bob = v1::GetAgentRequest { agent: "bob".into() };
    expect_error(gateway.agents().get_agent(bob).await, Code::NotFound);
    let codes =
        async || entries(&gateway).await.into_iter().map(|entry| entry.code).collect::<Vec<_>>();
    wait_until("the refusals are written", codes, |codes| {
        codes.contains(&16) && codes.contains(&6)
    })
    .await;
}

/// A statement sent to PostgreSQL continues when its client disconnects: it may complete later, or
/// not at all.
#[tokio::test]
async fn abandoned_call_is_audited_once_its_outcome_is_known() {
    let gateway = Gateway::start().await.with_agent().await;
    let abandoned = async || {
        let task = gateway.task().await;
        let locked = gateway.database.lock_task(task.parse().expect("an id")).await;
        let mut messages = gateway.messages();
        let call =
            tokio::spawn(async move { messages.create_message(message(&task, "hello")).await });
        wait_until(
            "the statement waits",
            async || gateway.database.waiting_statements("Lock").await,
            |waiting| *waiting == 1,
        )
        .await;
        call.abort();
        // On the same connection: when this is answered, the gateway knows that the other call
        // ended.
        gateway
            .agents()
            .list_agents(v1::ListAgentsRequest::default())
            .await
            .expect("they are listed");
        locked
    };
    let codes = async || {
        let creates = entries(&gateway)
            .await
            .into_iter()
            .filter(|entry| entry.method == "MessageService/CreateMessage");
        creates.map(|entry| entry.code).collect::<Vec<_>>()
    };
    let locked = abandoned().await;
    let early = wait_until("no outcome is known yet", codes, |codes| !codes.is_empty());
    let early = tokio::time::timeout(std::time::Duration::from_millis(500), early).await;
    assert!(early.is_err(), "an outcome was recorded before it was certain: {early:?}");
    locked.release().await;
    wait_until("the change is made", codes, |codes| *codes == [0]).await;
    // This one waits longer than PostgreSQL allows.
    let locked = abandoned().await;
    wait_until("the other is canceled", codes, |codes| *codes == [0, 1]).await;
    locked.release().await;
    assert_eq!(codes().await, [0, 1]);
}

/// The gateway's runtime is dropped with all its tasks, like a process that is killed.
#[tokio::test(flavor = "multi_thread")]
async fn killed_gateway_leaves_entry_for_every_answered_write() {
    let dying = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let handle = dying.handle().clone();
    let start = move || handle.block_on(async { Gateway::start().await.with_agent().await });
    let gateway = tokio::task::spawn_blocking(start).await.expect("it starts");
    let answered = Arc::new(Mutex::new(BTreeSet::new()));
    let clients: Vec<_> = (0..8)
        .map(|client| {
            let (url, answered) = (gateway.url("/v1/agents"), Arc::clone(&answered));
            tokio::spawn(async move {
                let http = http();
                for number in 0.. {
                    let agent = json!({"name": format!("a-{client}-{number}"), "model": "m"});
                    // The gateway ended before or while it answered.
                    let Ok(answer) = http.post(&url).json(&agent).send().await else { return };
                    let Ok(made) = answer.json::<Value>().await else { return };
                    let id = made["metadata"]["id"].as_str().expect("it is made").to_owned();
                    answered.lock().expect("no panic").insert(id);
                }
            })
        })
        .collect();
    let count = async || answered.lock().expect("no panic").len();
    wait_until("some are answered", count, |count| *count >= 50).await;
    dying.shutdown_background();
    for client in clients {
        wait_for("the clients notice", client).await.expect("no panic");
    }
    let answered = answered.lock().expect("no panic").clone();
    // The existing store uses connections of the runtime that ended.
    let store = Store::connect(gateway.database.url(), PoolOptions::default())
        .await
        .expect("the database is there");
    let page = |key| Page { limit: 100_000, order: Order { key, descending: false }, after: None };
    let sets = async || {
        let agents = store
            .agent_list(OrganizationId::LOCAL, &AgentFilter::default(), &page(Key::CreatedAt))
            .await;
        let agents = agents.expect("they are read").into_iter().map(|agent| agent.id.to_string());
        let trail = store
            .audit_list(OrganizationId::LOCAL, &AuditFilter::default(), &page(Key::CreatedAt))
            .await;
        let trail = trail.expect("it is read").into_iter();
        let made =
            trail.filter(|entry| entry.method == "AgentService/CreateAgent" && entry.code == 0);
        let made = made.map(|entry| entry.objects.last().cloned().unwrap_or_default());
        (agents.collect::<BTreeSet<_>>(), made.collect::<BTreeSet<_>>())
    };
    // PostgreSQL may still execute the last statements.
    let (agents, trail) =
        wait_until("the two agree", sets, |(agents, trail)| agents == trail).await;
    assert!(
        answered.len() >= 50 && answered.is_subset(&trail),
        "{} of {}",
        answered.len(),
        agents.len()
    );
}

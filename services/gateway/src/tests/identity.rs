//! Authentication, organizations, members, invitations, API keys.

use std::os::unix::fs::PermissionsExt as _;

use construct_domain::{
    OrganizationId, UserId,
    access::{Role, Scope},
};
use construct_proto::v1::{
    self, agent_service_client::AgentServiceClient, event_service_client::EventServiceClient,
    key_service_client::KeyServiceClient, organization_service_client::OrganizationServiceClient,
    schedule_service_client::ScheduleServiceClient, task_service_client::TaskServiceClient,
};
use tonic::{
    Code, Request, Status,
    transport::{Channel, Endpoint},
};

use super::{
    harness::*,
    issuer::{AUDIENCE, Issuer, Key},
    walk::{create_key, create_organization, login_required, with_key},
};
use crate::{Config, Login};

fn organizations(channel: Channel) -> OrganizationServiceClient<Channel> {
    OrganizationServiceClient::new(channel)
}

fn keys(gateway: &Gateway) -> KeyServiceClient<Channel> {
    KeyServiceClient::new(gateway.channel())
}

async fn who_am_i(
    channel: Channel,
    credential: Option<&str>,
    organization: Option<&str>,
) -> Result<v1::WhoAmIResponse, Status> {
    let mut request = with_key(v1::WhoAmIRequest {}, credential);
    if let Some(organization) = organization {
        request.metadata_mut().insert("x-organization-id", organization.parse().expect("a header"));
    }
    organizations(channel).who_am_i(request).await.map(tonic::Response::into_inner)
}

/// Names the organization of a request, where it is not the caller's usual one.
fn in_organization<T>(mut request: Request<T>, organization: &str) -> Request<T> {
    request.metadata_mut().insert("x-organization-id", organization.parse().expect("a header"));
    request
}

fn spec(role: v1::Role, scopes: &[&str]) -> Option<v1::ApiKeySpec> {
    let scopes = scopes.iter().map(|scope| (*scope).to_owned()).collect();
    Some(v1::ApiKeySpec { name: "k".into(), role: role.into(), scopes, limits: None })
}

fn organization_spec(slug: &str) -> v1::CreateOrganizationRequest {
    let spec = v1::OrganizationSpec {
        name: "A team".into(),
        slug: slug.into(),
        avatar_url: String::new(),
    };
    v1::CreateOrganizationRequest { spec: Some(spec), idempotency_key: String::new() }
}

#[tokio::test]
async fn local_mode_trusts_absent_but_not_wrong_credentials() {
    let gateway = Gateway::start().await;
    let me = who_am_i(gateway.channel(), None, None).await.expect("it is the operator");
    assert_eq!(
        (me.organization_id.clone(), me.role()),
        (OrganizationId::LOCAL.to_string(), v1::Role::Owner)
    );
    expect_error(who_am_i(gateway.channel(), Some("ct_wrong"), None).await, Code::Unauthenticated);
    expect_error(who_am_i(gateway.channel(), Some("eyJ.x.y"), None).await, Code::Unauthenticated);
    let mut basic = Request::new(v1::WhoAmIRequest {});
    basic.metadata_mut().insert("authorization", "Basic b3duZXI6".parse().expect("a header"));
    expect_error(organizations(gateway.channel()).who_am_i(basic).await, Code::Unauthenticated);
    // A foreign web page in a browser of this machine.
    let mut page = Request::new(v1::WhoAmIRequest {});
    page.metadata_mut().insert("origin", "https://evil.example".parse().expect("a header"));
    expect_error(organizations(gateway.channel()).who_am_i(page).await, Code::PermissionDenied);

    // The operator can choose an organization of their own, but not one of others.
    let made = organizations(gateway.channel())
        .create_organization(organization_spec("team"))
        .await
        .expect("it is made");
    let made = made.into_inner();
    assert!(made.setup_code.is_none(), "the operator needs no code");
    let id = id(made.organization.expect("set").metadata);
    let me = who_am_i(gateway.channel(), None, Some(&id)).await.expect("they own it");
    assert_eq!((me.organization_id.as_str(), me.role()), (id.as_str(), v1::Role::Owner));
    let (others, _) = create_organization(&gateway, "others").await;
    expect_error(
        who_am_i(gateway.channel(), None, Some(&others.to_string())).await,
        Code::PermissionDenied,
    );
    expect_error(who_am_i(gateway.channel(), None, Some("others")).await, Code::PermissionDenied);
    // Only the operator's organization may name directories of the machine.
    let request = v1::CreateTaskRequest { spec: Some(task_spec()), idempotency_key: String::new() };
    let mut tasks = TaskServiceClient::new(gateway.channel());
    expect_error(
        tasks.create_task(in_organization(Request::new(request), &id)).await,
        Code::PermissionDenied,
    );
}

#[tokio::test]
async fn organizations_of_one_user_are_limited() {
    let gateway =
        Gateway::start_with(Config { gateway_organizations_of_one: 2, ..login_required() }).await;
    let (organization, owner) = create_organization(&gateway, "first").await;
    let (_, mine) =
        create_key(&gateway, (organization, owner), Role::Owner, &[Scope::Admin], None).await;
    let make = async |key: &str, slug: &str| {
        organizations(gateway.channel())
            .create_organization(with_key(organization_spec(slug), Some(key)))
            .await
    };
    make(&mine, "second").await.expect("within the limit");
    let status = expect_error(make(&mine, "third").await, Code::ResourceExhausted);
    assert!(status.message().contains("already owns 2 organizations"), "{status:?}");
    let (_, operator) = create_key(
        &gateway,
        (OrganizationId::LOCAL, UserId::LOCAL),
        Role::Owner,
        &[Scope::Admin],
        None,
    )
    .await;
    for slug in ["a", "b", "c"] {
        make(&operator, &format!("team-{slug}")).await.expect("the operator is not limited");
    }
}

#[tokio::test]
async fn socket_of_the_same_user_needs_no_login() {
    let directory =
        std::env::temp_dir().join(format!("construct-gateway-{}", uuid::Uuid::now_v7()));
    std::fs::create_dir(&directory).expect("a directory");
    let path = directory.join("socket");
    let gateway =
        Gateway::start_with(Config { gateway_socket: Some(path.clone()), ..login_required() })
            .await;
    expect_error(who_am_i(gateway.channel(), None, None).await, Code::Unauthenticated);
    let mode = std::fs::metadata(&path).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let channel = Endpoint::from_shared(format!("unix:{}", path.display()))
        .expect("an address")
        .connect_lazy();
    let me = who_am_i(channel.clone(), None, None).await.expect("it is the operator");
    assert_eq!(me.user_id, UserId::LOCAL.to_string());
    expect_error(who_am_i(channel, Some("ct_wrong"), None).await, Code::Unauthenticated);
    std::fs::remove_dir_all(directory).expect("it can be removed");
}

#[tokio::test]
async fn api_key_is_limited_to_its_grants_until_revoked() {
    let gateway = Gateway::start().await;
    let request =
        v1::CreateApiKeyRequest { spec: spec(v1::Role::Member, &["admin"]), expires_in: None };
    let made = keys(&gateway).create_api_key(request).await.expect("it is made").into_inner();
    assert!(!format!("{made:?}").contains(&made.key));
    let shown = made.api_key.clone().expect("set");
    assert!(made.key.starts_with(&shown.prefix) && made.key.len() > 40);
    let me = who_am_i(gateway.channel(), Some(&made.key), None).await.expect("it is valid");
    assert_eq!(
        (me.role(), me.scopes.as_slice()),
        (v1::Role::Member, ["admin".to_owned()].as_slice())
    );
    // A member's key cannot create an admin's key, and a key cannot grant scopes that it lacks.
    let create = async |credential: &str, role, scopes: &[&str]| {
        let request = v1::CreateApiKeyRequest { spec: spec(role, scopes), expires_in: None };
        keys(&gateway)
            .create_api_key(with_key(request, Some(credential)))
            .await
            .map(tonic::Response::into_inner)
    };
    expect_error(create(&made.key, v1::Role::Admin, &["admin"]).await, Code::PermissionDenied);
    let lesser =
        create(&made.key, v1::Role::Unspecified, &["tasks:read"]).await.expect("it is less").key;
    let me = who_am_i(gateway.channel(), Some(&lesser), None).await.expect("it is valid");
    assert_eq!((me.role(), me.scopes), (v1::Role::Member, vec!["tasks:read".to_owned()]));
    expect_error(create(&lesser, v1::Role::Viewer, &["tasks:read"]).await, Code::PermissionDenied);
    // A key is valid for one organization.
    let (others, _) = create_organization(&gateway, "others").await;
    expect_error(
        who_am_i(gateway.channel(), Some(&made.key), Some(&others.to_string())).await,
        Code::PermissionDenied,
    );
    who_am_i(gateway.channel(), Some(&made.key), Some(&OrganizationId::LOCAL.to_string()))
        .await
        .expect("its own");

    let listed = keys(&gateway)
        .list_api_keys(v1::ListApiKeysRequest::default())
        .await
        .expect("listed")
        .into_inner();
    assert_eq!(listed.api_keys.len(), 2);
    assert!(listed.api_keys.iter().all(|key| key.last_used_at.is_some()), "{listed:?}");
    // Of several uses in one minute the first is recorded.
    let recorded = listed.api_keys[0].last_used_at;
    who_am_i(gateway.channel(), Some(&lesser), None).await.expect("it is valid");
    let again = keys(&gateway)
        .list_api_keys(v1::ListApiKeysRequest::default())
        .await
        .expect("listed")
        .into_inner();
    assert_eq!(again.api_keys[0].last_used_at, recorded);

    let revoke =
        v1::RevokeApiKeyRequest { api_key: id(shown.metadata), idempotency_key: "once".into() };
    let revoked =
        keys(&gateway).revoke_api_key(revoke.clone()).await.expect("it is revoked").into_inner();
    assert_eq!(
        keys(&gateway).revoke_api_key(revoke).await.expect("it is repeated").into_inner(),
        revoked
    );
    expect_error(who_am_i(gateway.channel(), Some(&made.key), None).await, Code::Unauthenticated);
    let contents = gateway.database.contents().await;
    assert!(
        !contents.contains(&made.key) && !contents.contains(&lesser),
        "keys are stored nowhere"
    );
}

#[tokio::test]
async fn setup_code_is_exchanged_only_once() {
    let gateway =
        Gateway::start_with(Config { gateway_login_failures: 20, ..login_required() }).await;
    let (_, owner) = create_key(
        &gateway,
        (OrganizationId::LOCAL, UserId::LOCAL),
        Role::Owner,
        &[Scope::Admin],
        None,
    )
    .await;
    let request = v1::CreateSetupCodeRequest {
        spec: spec(v1::Role::Viewer, &["tasks:read"]),
        ..Default::default()
    };
    let code = keys(&gateway)
        .create_setup_code(with_key(request, Some(&owner)))
        .await
        .expect("it is made")
        .into_inner();
    assert!(!format!("{code:?}").contains(&code.code));
    let exchange = || async {
        let request = v1::ExchangeSetupCodeRequest { code: code.code.clone() };
        keys(&gateway).exchange_setup_code(request).await.map(tonic::Response::into_inner)
    };
    let tries = futures::future::join_all((0..8).map(|_| exchange())).await;
    let made: Vec<_> = tries.into_iter().filter_map(Result::ok).collect();
    assert_eq!(made.len(), 1);
    let me = who_am_i(gateway.channel(), Some(&made[0].key), None).await.expect("it is valid");
    assert_eq!((me.role(), me.scopes), (v1::Role::Viewer, vec!["tasks:read".to_owned()]));
    // A program that creates an organization gets a setup code for it. A repeated request does not
    // get it again.
    let mut request = organization_spec("team");
    request.idempotency_key = "once".into();
    let create = || async {
        let made = organizations(gateway.channel())
            .create_organization(with_key(request.clone(), Some(&owner)))
            .await;
        made.expect("it is made").into_inner()
    };
    let (made, again) = (create().await, create().await);
    assert_eq!((&made.organization, again.setup_code), (&again.organization, None));
    let request =
        v1::ExchangeSetupCodeRequest { code: made.setup_code.expect("a key needs one").code };
    let new_key = keys(&gateway)
        .exchange_setup_code(request)
        .await
        .expect("it is exchanged")
        .into_inner()
        .key;
    let me = who_am_i(gateway.channel(), Some(&new_key), None).await.expect("it is valid");
    assert_eq!(
        (me.organization_id.clone(), me.role()),
        (id(made.organization.expect("set").metadata), v1::Role::Owner)
    );
}

#[tokio::test]
async fn repeated_failures_limit_tokens_but_not_valid_keys() {
    let config =
        Config { gateway_login: Login::Required, gateway_login_failures: 5, ..Config::default() };
    let gateway = Gateway::start_with(config).await;
    let (_, good) = create_key(
        &gateway,
        (OrganizationId::LOCAL, UserId::LOCAL),
        Role::Owner,
        &[Scope::Admin],
        None,
    )
    .await;
    let guess = || async {
        who_am_i(gateway.channel(), Some("eyJ.x.y"), None).await.expect_err("it is wrong").code()
    };
    _ = wait_until("guessing is stopped", guess, |code| *code == Code::ResourceExhausted).await;
    // Keys and setup codes are always checked, also new ones.
    who_am_i(gateway.channel(), Some(&good), None).await.expect("it is valid");
    let (_, fresh) = create_key(
        &gateway,
        (OrganizationId::LOCAL, UserId::LOCAL),
        Role::Owner,
        &[Scope::Admin],
        None,
    )
    .await;
    who_am_i(gateway.channel(), Some(&fresh), None).await.expect("it is valid");
    for _ in 0..10 {
        expect_error(
            who_am_i(gateway.channel(), Some("ct_guess"), None).await,
            Code::Unauthenticated,
        );
        let request = v1::ExchangeSetupCodeRequest { code: format!("cs_{}", "A".repeat(43)) };
        expect_error(keys(&gateway).exchange_setup_code(request).await, Code::Unauthenticated);
    }
}

#[tokio::test]
async fn failures_behind_trusted_proxy_count_per_client() {
    let gateway_trusted_proxies = vec!["127.0.0.1".to_owned()];
    let config = Config { gateway_login_failures: 5, gateway_trusted_proxies, ..login_required() };
    let gateway = Gateway::start_with(config).await;
    let guess = async |client: &str| {
        let mut request = with_key(v1::WhoAmIRequest {}, Some("eyJ.x.y"));
        request.metadata_mut().insert("x-forwarded-for", client.parse().expect("a value"));
        organizations(gateway.channel()).who_am_i(request).await.expect_err("it is wrong").code()
    };
    let repeated = || guess("203.0.113.66, 192.0.2.7");
    _ = wait_until("guessing is stopped", repeated, |code| *code == Code::ResourceExhausted).await;
    // A forged address in the header changes nothing.
    assert_eq!(guess("198.51.100.9, 192.0.2.7").await, Code::ResourceExhausted);
    assert_eq!(guess("192.0.2.8").await, Code::Unauthenticated);
}

#[tokio::test]
async fn local_mode_requires_login_through_a_trusted_proxy() {
    let gateway_trusted_proxies = vec!["127.0.0.1".to_owned()];
    let gateway =
        Gateway::start_local(Config { gateway_trusted_proxies, ..Config::default() }).await;
    for client in ["127.0.0.1", "192.0.2.7", "nonsense", ""] {
        let mut request = with_key(v1::WhoAmIRequest {}, None);
        request.metadata_mut().insert("x-forwarded-for", client.parse().expect("a value"));
        expect_error(
            organizations(gateway.channel()).who_am_i(request).await,
            Code::Unauthenticated,
        );
    }
    who_am_i(gateway.channel(), None, None).await.expect("a direct connection is the operator");
}

#[tokio::test]
async fn user_signs_in_and_joins_by_invitation() {
    let (rsa, ec) = (Key::rsa("r", 0), Key::ec("e"));
    let issuer = Issuer::start(&[&rsa, &ec]).await;
    let config = Config {
        gateway_oidc_issuer: Some(issuer.url().to_owned()),
        gateway_oidc_audience: Some(AUDIENCE.to_owned()),
        ..login_required()
    };
    let gateway = Gateway::start_with(config).await;
    let ada = rsa.sign(&issuer.claims("ada", "ada@example.com"));
    let first = who_am_i(gateway.channel(), Some(&ada), None).await.expect("she is signed in");
    assert_eq!(
        (first.role(), first.name.as_str(), first.email.as_str()),
        (v1::Role::Owner, "Ada", "ada@example.com")
    );
    let again =
        who_am_i(gateway.channel(), Some(&ec.sign(&issuer.claims("ada", "ada@example.com"))), None)
            .await;
    assert_eq!(again.expect("she signs in again"), first);

    let mut client = organizations(gateway.channel());
    let team = client
        .create_organization(with_key(organization_spec("team"), Some(&ada)))
        .await
        .expect("it is made");
    let team = id(team.into_inner().organization.expect("set").metadata);
    let duplicate =
        client.create_organization(with_key(organization_spec("team"), Some(&ada))).await;
    expect_error(duplicate, Code::AlreadyExists);
    let invite = v1::CreateInvitationRequest {
        email: "Bob@Example.com ".into(),
        role: v1::Role::Admin.into(),
        ..Default::default()
    };
    let invitation = client
        .create_invitation(in_organization(with_key(invite.clone(), Some(&ada)), &team))
        .await;
    let invitation = invitation.expect("he is invited").into_inner();
    assert_eq!(
        (invitation.email.as_str(), invitation.state()),
        ("bob@example.com", v1::InvitationState::Pending)
    );
    expect_error(
        client.create_invitation(in_organization(with_key(invite, Some(&ada)), &team)).await,
        Code::AlreadyExists,
    );

    // An unverified e-mail address does not match an invitation.
    let mut claims = issuer.claims("mallory", "bob@example.com");
    claims["email_verified"] = false.into();
    let mallory = ec.sign(&claims);
    expect_error(
        who_am_i(gateway.channel(), Some(&mallory), Some(&team)).await,
        Code::PermissionDenied,
    );
    let bob = ec.sign(&issuer.claims("bob", "bob@example.com"));
    let entered =
        who_am_i(gateway.channel(), Some(&bob), Some(&team)).await.expect("he is a member");
    assert_eq!(entered.role(), v1::Role::Admin);
    let listed = client
        .list_invitations(in_organization(
            with_key(v1::ListInvitationsRequest::default(), Some(&ada)),
            &team,
        ))
        .await;
    let listed = listed.expect("listed").into_inner().invitations;
    assert_eq!(
        (listed[0].state(), &listed[0].accepted_by),
        (v1::InvitationState::Accepted, &entered.user_id)
    );

    // Members cannot grant or revoke roles above their own, and the last owner stays.
    let set = |user: &str, role: v1::Role| v1::UpdateMemberRequest {
        user: user.into(),
        role: role.into(),
        ..Default::default()
    };
    let owner = first.user_id.as_str();
    let by_bob = client
        .update_member(in_organization(with_key(set(owner, v1::Role::Viewer), Some(&bob)), &team))
        .await;
    expect_error(by_bob, Code::PermissionDenied);
    let by_bob = client
        .update_member(in_organization(
            with_key(set(&entered.user_id, v1::Role::Owner), Some(&bob)),
            &team,
        ))
        .await;
    expect_error(by_bob, Code::PermissionDenied);
    let by_ada = client
        .update_member(in_organization(with_key(set(owner, v1::Role::Admin), Some(&ada)), &team))
        .await;
    expect_error(by_ada, Code::FailedPrecondition);
    let remove = |user: &str| v1::RemoveMemberRequest { user: user.into(), ..Default::default() };
    expect_error(
        client.remove_member(in_organization(with_key(remove(owner), Some(&ada)), &team)).await,
        Code::FailedPrecondition,
    );

    // A key never has a higher role than its user, and is revoked with the membership.
    let request =
        v1::CreateApiKeyRequest { spec: spec(v1::Role::Admin, &["admin"]), expires_in: None };
    let made = keys(&gateway)
        .create_api_key(in_organization(with_key(request, Some(&bob)), &team))
        .await
        .expect("it is made");
    let program = made.into_inner().key;
    assert_eq!(
        who_am_i(gateway.channel(), Some(&program), None).await.expect("it is valid").role(),
        v1::Role::Admin
    );
    let lowered = client
        .update_member(in_organization(
            with_key(set(&entered.user_id, v1::Role::Viewer), Some(&ada)),
            &team,
        ))
        .await;
    lowered.expect("she may");
    assert_eq!(
        who_am_i(gateway.channel(), Some(&program), None).await.expect("it is valid").role(),
        v1::Role::Viewer
    );
    let removed = client
        .remove_member(in_organization(with_key(remove(&entered.user_id), Some(&ada)), &team))
        .await;
    removed.expect("she may");
    expect_error(who_am_i(gateway.channel(), Some(&program), None).await, Code::Unauthenticated);
    expect_error(
        who_am_i(gateway.channel(), Some(&bob), Some(&team)).await,
        Code::PermissionDenied,
    );
    who_am_i(gateway.channel(), Some(&bob), None).await.expect("he still has his own");
    let contents = gateway.database.contents().await;
    assert!(
        !contents.contains(&ada) && !contents.contains(&program),
        "credentials are stored nowhere"
    );
}

#[tokio::test]
async fn deleted_organization_refuses_everyone_and_is_erased() {
    let gateway = Gateway::start().await;
    let mut client = organizations(gateway.channel());
    let team = client
        .create_organization(organization_spec("team"))
        .await
        .expect("it is made")
        .into_inner();
    let team = id(team.organization.expect("set").metadata);
    let delete = |organization: &str| v1::DeleteOrganizationRequest {
        organization: organization.into(),
        ..Default::default()
    };
    expect_error(client.delete_organization(delete("unknown")).await, Code::NotFound);
    expect_error(client.delete_organization(delete("local")).await, Code::FailedPrecondition);
    // A task with a message that was not processed yet.
    gateway
        .providers()
        .create_model_provider(in_organization(Request::new(provider("p")), &team))
        .await
        .expect("made");
    gateway
        .models()
        .create_model(in_organization(Request::new(model("m")), &team))
        .await
        .expect("made");
    gateway
        .agents()
        .create_agent(in_organization(Request::new(agent("ada")), &team))
        .await
        .expect("made");
    let spec = v1::TaskSpec { workspace: String::new(), ..task_spec() };
    let request = v1::CreateTaskRequest { spec: Some(spec), idempotency_key: String::new() };
    let task = gateway
        .tasks()
        .create_task(in_organization(Request::new(request), &team))
        .await
        .expect("made")
        .into_inner();
    let task = id(task.metadata);
    gateway
        .messages()
        .create_message(in_organization(Request::new(message(&task, "hello")), &team))
        .await
        .expect("accepted");
    let request =
        v1::CreateApiKeyRequest { spec: self::spec(v1::Role::Owner, &["admin"]), expires_in: None };
    let program = keys(&gateway)
        .create_api_key(in_organization(Request::new(request), &team))
        .await
        .expect("made")
        .into_inner()
        .key;
    client
        .delete_organization(in_organization(Request::new(delete("team")), &team))
        .await
        .expect("it is closed");
    expect_error(who_am_i(gateway.channel(), Some(&program), None).await, Code::Unauthenticated);
    expect_error(who_am_i(gateway.channel(), None, Some(&team)).await, Code::PermissionDenied);
    client.create_organization(organization_spec("team")).await.expect("the slug is free");
    // The operator can delete other organizations.
    client.create_organization(organization_spec("other")).await.expect("it is made");
    client.delete_organization(delete("other")).await.expect("the operator may");
    expect_error(client.delete_organization(delete("other")).await, Code::NotFound);
    let trail = || async { gateway.database.contents().await };
    _ = wait_until("the audit trail has the erasure", trail, |trail| {
        trail.contains("EraseOrganization")
    })
    .await;
    let listed = client
        .list_organizations(v1::ListOrganizationsRequest::default())
        .await
        .expect("listed")
        .into_inner();
    assert_eq!(listed.organizations.len(), 2);
}

#[tokio::test]
async fn subscription_ends_when_its_key_is_revoked() {
    let gateway = Gateway::start().await;
    let owner = (OrganizationId::LOCAL, UserId::LOCAL);
    let (key_id, credential) =
        create_key(&gateway, owner, Role::Viewer, &[Scope::TasksRead], None).await;
    let request = with_key(v1::SubscribeRequest::default(), Some(&credential));
    let opened =
        EventServiceClient::new(gateway.channel()).subscribe(request).await.expect("it is opened");
    let mut stream = opened.into_inner();
    let revoke =
        v1::RevokeApiKeyRequest { api_key: key_id.to_string(), idempotency_key: String::new() };
    keys(&gateway).revoke_api_key(revoke).await.expect("it is revoked");
    let end = wait_for("the subscription ends", stream.message()).await;
    expect_error(end, Code::Unavailable);
    let request = with_key(v1::SubscribeRequest::default(), Some(&credential));
    expect_error(
        EventServiceClient::new(gateway.channel()).subscribe(request).await,
        Code::Unauthenticated,
    );
    let request = with_key(v1::ListAgentsRequest::default(), Some(&credential));
    expect_error(
        AgentServiceClient::new(gateway.channel()).list_agents(request).await,
        Code::Unauthenticated,
    );
}

#[tokio::test]
async fn created_key_does_not_outlive_its_creator() {
    let gateway = Gateway::start().await;
    let end = jiff::Timestamp::now() + std::time::Duration::from_secs(3600);
    let owner = (OrganizationId::LOCAL, UserId::LOCAL);
    let (_, credential) =
        create_key(&gateway, owner, Role::Owner, &[Scope::Admin], Some(end)).await;
    for seconds in [None, Some(7200), Some(60)] {
        let expires_in = seconds.map(|seconds| prost_types::Duration { seconds, nanos: 0 });
        let request =
            v1::CreateApiKeyRequest { spec: spec(v1::Role::Viewer, &["tasks:read"]), expires_in };
        let made = keys(&gateway)
            .create_api_key(with_key(request, Some(&credential)))
            .await
            .expect("it is made");
        let until = made.into_inner().api_key.expect("set").expires_at.expect("it ends").seconds;
        assert!(until <= end.as_second(), "{seconds:?}: {until}");
        assert_eq!(seconds == Some(60), until < end.as_second(), "{seconds:?}: {until}");
    }
}

#[tokio::test]
async fn only_the_operator_may_set_provider_addresses() {
    let gateway = Gateway::start().await;
    let made =
        organizations(gateway.channel()).create_organization(organization_spec("team")).await;
    let team = id(made.expect("it is made").into_inner().organization.expect("set").metadata);
    let request = |name: &str, kind: v1::ModelProviderType, base_url: &str| {
        let spec = v1::ModelProviderSpec {
            name: name.into(),
            r#type: kind.into(),
            base_url: base_url.into(),
            api_key: if kind == v1::ModelProviderType::Local { String::new() } else { "k".into() },
            ..v1::ModelProviderSpec::default()
        };
        v1::CreateModelProviderRequest {
            spec: Some(spec),
            ..v1::CreateModelProviderRequest::default()
        }
    };
    use v1::ModelProviderType as Kind;
    let internal = "http://127.0.0.1:5432";
    for (kind, base_url) in [
        (Kind::Openai, internal),
        (Kind::Ollama, ""),
        (Kind::Ollama, internal),
        (Kind::Local, ""),
        (Kind::Bedrock, "http://127.0.0.1:5432/?region=eu-west-1"),
    ] {
        let foreign = in_organization(Request::new(request("foreign", kind, base_url)), &team);
        expect_error(
            gateway.providers().create_model_provider(foreign).await,
            Code::PermissionDenied,
        );
        let name = format!("{kind:?}{}", base_url.len()).to_lowercase();
        gateway
            .providers()
            .create_model_provider(request(&name, kind, base_url))
            .await
            .expect("the operator may");
    }
    let foreign = in_organization(Request::new(request("foreign", Kind::Openai, "")), &team);
    gateway
        .providers()
        .create_model_provider(foreign)
        .await
        .expect("every organization may use a vendor's address");
    let change = v1::UpdateModelProviderRequest {
        model_provider: "foreign".into(),
        base_url: Some(internal.into()),
        api_key: Some("k2".into()),
        ..v1::UpdateModelProviderRequest::default()
    };
    let changed = gateway
        .providers()
        .update_model_provider(in_organization(Request::new(change), &team))
        .await;
    expect_error(changed, Code::PermissionDenied);
}

#[tokio::test]
async fn subscription_shows_only_events_within_the_scopes() {
    let gateway = Gateway::start().await;
    let owner = (OrganizationId::LOCAL, UserId::LOCAL);
    let (_, credential) =
        create_key(&gateway, owner, Role::Viewer, &[Scope::TasksRead], None).await;
    let request = with_key(v1::SubscribeRequest::default(), Some(&credential));
    let narrow =
        EventServiceClient::new(gateway.channel()).subscribe(request).await.expect("it is opened");
    let (mut narrow, mut wide) = (narrow.into_inner(), gateway.subscribe("", "").await);
    let gateway = gateway.with_agent().await;
    let block = v1::block::Block::Text(v1::Text { text: "hello".into() });
    let spec = v1::ScheduleSpec {
        name: "daily".into(),
        agent: "ada".into(),
        blocks: vec![v1::Block { block: Some(block) }],
        cron: "0 9 * * *".into(),
        ..v1::ScheduleSpec::default()
    };
    let request =
        v1::CreateScheduleRequest { spec: Some(spec), ..v1::CreateScheduleRequest::default() };
    ScheduleServiceClient::new(gateway.channel())
        .create_schedule(request)
        .await
        .expect("it is made");
    let seen: Vec<String> =
        next_events(&mut wide, 4).await.into_iter().map(|event| event.r#type).collect();
    assert_eq!(seen, ["provider.created", "model.created", "agent.created", "schedule.created"]);
    assert_eq!(next_events(&mut narrow, 1).await[0].r#type, "schedule.created");
}

//! Agents, models and providers.

use std::process::Command;

use construct_domain::{ModelProviderId, OrganizationId, TaskId};
use construct_proto::v1;
use construct_store::{Keyring, NewEvent, NewModelProvider, Stream, Write, WriteOutput};
use jiff::Timestamp;
use prost::Message as _;
use tonic::Code;
use tonic_types::StatusExt as _;
use uuid::Uuid;

use super::harness::*;
use crate::validate::tests::fields;

#[tokio::test]
async fn agent_can_be_created_updated_and_deleted() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut agents = gateway.agents();
    let get = |agent: &str| v1::GetAgentRequest { agent: agent.into() };
    let by_name = agents.get_agent(get("ada")).await.expect("it is there").into_inner();
    let metadata = by_name.metadata.clone().expect("set");
    let by_id = agents
        .get_agent(get(&metadata.id))
        .await
        .expect("names and ids are equivalent")
        .into_inner();
    assert_eq!(by_name, by_id);
    assert_eq!(metadata.organization_id, OrganizationId::LOCAL.to_string());

    let request = v1::UpdateAgentRequest {
        agent: "ada".into(),
        name: Some("grace".into()),
        instructions: Some("Be brief.".into()),
        revision: metadata.revision,
        ..v1::UpdateAgentRequest::default()
    };
    let updated =
        agents.update_agent(request.clone()).await.expect("the revision is right").into_inner();
    let spec = updated.spec.expect("set");
    assert_eq!(
        (spec.name.as_str(), spec.instructions.as_str(), spec.model.as_str()),
        ("grace", "Be brief.", "m")
    );
    assert!(updated.metadata.expect("set").revision > metadata.revision);
    let by_id = v1::UpdateAgentRequest { agent: metadata.id.clone(), ..request };
    expect_error(agents.update_agent(by_id).await, Code::Aborted);

    agents
        .delete_agent(v1::DeleteAgentRequest { agent: "grace".into(), ..Default::default() })
        .await
        .expect("nothing uses it");
    let status = expect_error(agents.get_agent(get(&metadata.id)).await, Code::NotFound);
    let details = status.get_error_details();
    assert_eq!(details.resource_info().expect("it is named").resource_name, metadata.id);
}

#[tokio::test]
async fn name_taken_in_use_and_missing_have_different_codes() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    expect_error(gateway.agents().create_agent(agent("ada")).await, Code::AlreadyExists);
    expect_error(gateway.models().create_model(model("m")).await, Code::AlreadyExists);
    expect_error(
        gateway.providers().create_model_provider(provider("p")).await,
        Code::AlreadyExists,
    );
    let delete = v1::DeleteAgentRequest { agent: "ada".into(), ..Default::default() };
    let status =
        expect_error(gateway.agents().delete_agent(delete.clone()).await, Code::FailedPrecondition);
    assert!(status.get_error_details().precondition_failure().is_some());
    let model_delete = v1::DeleteModelRequest { model: "m".into(), ..Default::default() };
    expect_error(gateway.models().delete_model(model_delete).await, Code::FailedPrecondition);
    let provider_delete =
        v1::DeleteModelProviderRequest { model_provider: "p".into(), ..Default::default() };
    expect_error(
        gateway.providers().delete_model_provider(provider_delete).await,
        Code::FailedPrecondition,
    );
    let mut unknown = agent("eve");
    unknown.spec.as_mut().expect("set").model = "no-such-model".into();
    let status = expect_error(gateway.agents().create_agent(unknown).await, Code::NotFound);
    assert_eq!(status.message(), "model `no-such-model` not found");
    let status = expect_error(
        gateway.agents().create_agent(agent("Not A Name")).await,
        Code::InvalidArgument,
    );
    assert_eq!(fields(&status), ["spec.name"]);
    let found = gateway
        .agents()
        .get_agent(v1::GetAgentRequest { agent: "ada".into() })
        .await
        .expect("it is there");
    assert_eq!(found.into_inner().status.expect("set").task_count, 1);
    gateway
        .tasks()
        .delete_task(v1::DeleteTaskRequest { task, ..Default::default() })
        .await
        .expect("it can be deleted");
}

#[tokio::test]
async fn provider_key_is_sealed_at_rest_and_never_shown() {
    const SECRET: &str = "sk-very-secret";
    let gateway = Gateway::start().await;
    let mut request = provider("vendor");
    let spec = request.spec.as_mut().expect("set");
    spec.set_type(v1::ModelProviderType::Openai);
    spec.api_key = SECRET.into();
    request.idempotency_key = "key".into();
    let created = gateway
        .providers()
        .create_model_provider(request.clone())
        .await
        .expect("it is made")
        .into_inner();
    let again = gateway
        .providers()
        .create_model_provider(request)
        .await
        .expect("it is repeated")
        .into_inner();
    assert_eq!(created, again);
    let status = created.status.clone().expect("set");
    assert_eq!((status.api_key_set, status.encryption_key_id.as_str()), (true, "test"));
    assert!(!contains(&created.encode_to_vec(), SECRET));

    let id: ModelProviderId = id(created.metadata).parse().expect("an id");
    let stored =
        gateway.store().model_provider_get(OrganizationId::LOCAL, id).await.expect("it is stored");
    let key: [u8; 32] = std::array::from_fn(|index| index as u8);
    let keyring = Keyring::new("test", [("test".to_owned(), key)]).expect("a keyring");
    let opened =
        keyring.open(&id.to_string(), &stored.key.expect("it has a key")).expect("it decrypts");
    assert_eq!(secrecy::ExposeSecret::expose_secret(&opened), SECRET.as_bytes());
    let events = gateway
        .store()
        .events_after(Stream::organization(OrganizationId::LOCAL), 0, 100, u64::MAX)
        .await
        .expect("they are read");
    assert!(!events.is_empty() && events.iter().all(|event| !contains(&event.payload, SECRET)));

    let clear = v1::UpdateModelProviderRequest {
        model_provider: "vendor".into(),
        api_key: Some(String::new()),
        ..Default::default()
    };
    let cleared =
        gateway.providers().update_model_provider(clear).await.expect("it is cleared").into_inner();
    assert!(!cleared.status.expect("set").api_key_set);
}

#[tokio::test]
async fn provider_moved_to_another_address_needs_a_new_key() {
    let gateway = Gateway::start().await;
    let mut request = provider("vendor");
    let spec = request.spec.as_mut().expect("set");
    spec.set_type(v1::ModelProviderType::Openai);
    (spec.base_url, spec.api_key) = ("https://vendor.example/v1".into(), "sk-1".into());
    gateway.providers().create_model_provider(request).await.expect("it is made");
    let steal = v1::UpdateModelProviderRequest {
        model_provider: "vendor".into(),
        base_url: Some("https://elsewhere.example/v1".into()),
        ..Default::default()
    };
    // With an idempotency key the refusal comes only after the check for a repeated request.
    for idempotency_key in ["", "k"] {
        let steal = v1::UpdateModelProviderRequest {
            idempotency_key: idempotency_key.into(),
            ..steal.clone()
        };
        let status = expect_error(
            gateway.providers().update_model_provider(steal).await,
            Code::InvalidArgument,
        );
        assert_eq!(fields(&status), ["api_key"]);
    }
    let get = v1::GetModelProviderRequest { model_provider: "vendor".into() };
    let unchanged =
        gateway.providers().get_model_provider(get).await.expect("it is there").into_inner();
    assert_eq!(unchanged.spec.expect("set").base_url, "https://vendor.example/v1");
    let same_origin = v1::UpdateModelProviderRequest {
        base_url: Some("https://vendor.example/v2".into()),
        ..steal.clone()
    };
    gateway
        .providers()
        .update_model_provider(same_origin)
        .await
        .expect("the key stays where it was");
    let with_key = v1::UpdateModelProviderRequest {
        api_key: Some("sk-2".into()),
        idempotency_key: "moved".into(),
        ..steal
    };
    let moved = gateway
        .providers()
        .update_model_provider(with_key.clone())
        .await
        .expect("it has a new key");
    let moved = moved.into_inner();
    assert!(moved.status.clone().expect("set").api_key_set);
    let again = gateway
        .providers()
        .update_model_provider(with_key)
        .await
        .expect("it is repeated")
        .into_inner();
    assert_eq!(again, moved);
}

#[tokio::test]
async fn list_of_providers_omits_scripts() {
    let gateway = Gateway::start().await;
    let mut request = provider("p");
    request.spec.as_mut().expect("set").script = "[]".into();
    gateway.providers().create_model_provider(request).await.expect("it is made");
    let list = v1::ListModelProvidersRequest::default();
    let list = gateway.providers().list_model_providers(list).await.expect("a list").into_inner();
    assert_eq!(list.model_providers[0].spec.clone().expect("set").script, "");
    let get = v1::GetModelProviderRequest { model_provider: "p".into() };
    let found =
        gateway.providers().get_model_provider(get).await.expect("it is there").into_inner();
    assert_eq!(found.spec.expect("set").script, "[]");
}

pub(super) fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

#[tokio::test]
async fn pages_show_every_agent_once_while_others_are_created() {
    let gateway = Gateway::start().await.with_agent().await;
    for name in ["b", "d", "f", "h"] {
        gateway.agents().create_agent(agent(name)).await.expect("it is made");
    }
    let mut page =
        v1::PageRequest { page_size: 2, order_by: "name".into(), page_token: String::new() };
    let (mut seen, mut tokens) = (Vec::new(), Vec::new());
    for added in ["a", "g", "none"] {
        let request = v1::ListAgentsRequest { page: Some(page.clone()), filter: None };
        let answer =
            gateway.agents().list_agents(request).await.expect("it is a page").into_inner();
        seen.extend(answer.agents.into_iter().map(|agent| agent.spec.expect("set").name));
        page.page_token = answer.page.expect("set").next_page_token;
        tokens.push(page.page_token.clone());
        // An agent before the cursor is not shown; one behind it is shown in its place.
        gateway.agents().create_agent(agent(added)).await.expect("it is made");
    }
    assert_eq!(seen, ["ada", "b", "d", "f", "g", "h"]);
    assert_eq!(tokens[2], "", "the third page was the last");
    page.page_token = tokens.swap_remove(0);
    let filter = v1::list_agents_request::Filter { name_prefix: "a".into(), ..Default::default() };
    let refusal = gateway
        .agents()
        .list_agents(v1::ListAgentsRequest { page: Some(page), filter: Some(filter) })
        .await;
    assert_eq!(fields(&expect_error(refusal, Code::InvalidArgument)), ["page.page_token"]);
}

#[tokio::test]
async fn lists_filter_by_referenced_entity() {
    let gateway = Gateway::start().await.with_agent().await;
    gateway.models().create_model(model("other")).await.expect("it is made");
    let mut eve = agent("eve");
    eve.spec.as_mut().expect("set").model = "other".into();
    gateway.agents().create_agent(eve).await.expect("it is made");
    let list = async |model: &str| {
        let filter = v1::list_agents_request::Filter { model: model.into(), ..Default::default() };
        gateway
            .agents()
            .list_agents(v1::ListAgentsRequest { page: None, filter: Some(filter) })
            .await
    };
    let names = |agents: Vec<v1::Agent>| {
        agents.into_iter().map(|agent| agent.spec.expect("set").name).collect::<Vec<_>>()
    };
    assert_eq!(names(list("other").await.expect("a list").into_inner().agents), ["eve"]);
    assert_eq!(names(list("").await.expect("a list").into_inner().agents), ["eve", "ada"]);
    expect_error(list("none").await, Code::NotFound);
    let filter = v1::list_model_providers_request::Filter {
        r#type: v1::ModelProviderType::Openai.into(),
        ..Default::default()
    };
    let request = v1::ListModelProvidersRequest { page: None, filter: Some(filter) };
    assert_eq!(
        gateway
            .providers()
            .list_model_providers(request)
            .await
            .expect("a list")
            .into_inner()
            .model_providers,
        []
    );
}

#[tokio::test]
async fn created_model_has_defaults() {
    let gateway = Gateway::start().await.with_agent().await;
    let found = gateway
        .models()
        .get_model(v1::GetModelRequest { model: "m".into() })
        .await
        .expect("it is there")
        .into_inner();
    let spec = found.spec.expect("set");
    assert_eq!(
        (spec.vendor_model.as_str(), spec.context_window, spec.max_output_tokens),
        ("m", 128_000, 8192)
    );
    let request = v1::UpdateModelRequest {
        model: "m".into(),
        prices: Some(v1::Prices { input: 3_000_000, ..Default::default() }),
        ..Default::default()
    };
    let updated = gateway.models().update_model(request).await.expect("it is changed").into_inner();
    assert_eq!(updated.spec.expect("set").prices.expect("set").input, 3_000_000);
}

#[tokio::test]
async fn model_used_as_fallback_cannot_be_deleted() {
    let gateway = Gateway::start().await.with_agent().await;
    for name in ["x", "y"] {
        gateway.models().create_model(model(name)).await.expect("it is made");
    }
    let update = |fallbacks: &[(&str, u32)]| {
        let named =
            |&(model, weight): &(&str, u32)| v1::ModelFallback { model: model.to_owned(), weight };
        let fallbacks = v1::ModelFallbacks { fallbacks: fallbacks.iter().map(named).collect() };
        let hedge_after = Some(prost_types::Duration { seconds: 1, nanos: 500_000_000 });
        let request = v1::UpdateModelRequest {
            model: "m".into(),
            fallbacks: Some(fallbacks),
            hedge_after,
            ..Default::default()
        };
        let mut models = gateway.models();
        async move { models.update_model(request).await }
    };
    let spec =
        update(&[("y", 0), ("x", 7)]).await.expect("it is changed").into_inner().spec.expect("set");
    let named: Vec<_> =
        spec.fallbacks.iter().map(|fallback| (fallback.model.as_str(), fallback.weight)).collect();
    assert_eq!(named, [("y", 0), ("x", 7)]);
    assert_eq!(spec.hedge_after, Some(prost_types::Duration { seconds: 1, nanos: 500_000_000 }));
    expect_error(update(&[("m", 0)]).await, Code::InvalidArgument);
    expect_error(update(&[("x", 0), ("x", 1)]).await, Code::InvalidArgument);
    expect_error(update(&[("unknown", 0)]).await, Code::NotFound);

    let delete = || v1::DeleteModelRequest { model: "x".into(), ..Default::default() };
    expect_error(gateway.models().delete_model(delete()).await, Code::FailedPrecondition);
    update(&[]).await.expect("it is changed");
    gateway.models().delete_model(delete()).await.expect("it is unused");
}

#[tokio::test]
async fn provider_check_needs_the_providers_service() {
    let gateway = Gateway::start().await.with_agent().await;
    let get = v1::GetModelRequest { model: "m".into() };
    let status = gateway
        .models()
        .get_model(get)
        .await
        .expect("it is there")
        .into_inner()
        .status
        .expect("set");
    assert_eq!(status.breaker, None);
    let check = v1::CheckModelProviderRequest { model_provider: "p".into() };
    expect_error(gateway.providers().check_model_provider(check).await, Code::Unavailable);
    let list = v1::ListVendorModelsRequest { model_provider: "p".into() };
    expect_error(gateway.providers().list_vendor_models(list).await, Code::Unavailable);
}

#[tokio::test]
async fn additional_keys_are_sealed_and_never_shown() {
    let gateway = Gateway::start().await;
    let mut request = provider("keys");
    if let Some(spec) = &mut request.spec {
        spec.r#type = v1::ModelProviderType::Anthropic.into();
        spec.script.clear();
        spec.api_key = "sk-1".into();
        spec.additional_api_keys = vec!["sk-2".into(), "sk-3".into()];
        spec.requests_per_minute = 50;
    }
    let made =
        gateway.providers().create_model_provider(request).await.expect("it is made").into_inner();
    let (spec, status) = (made.spec.expect("set"), made.status.expect("set"));
    assert_eq!((spec.additional_api_keys, spec.requests_per_minute), (Vec::new(), 50));
    assert_eq!(status.additional_api_keys, 2);
    let moved = v1::UpdateModelProviderRequest {
        model_provider: "keys".into(),
        base_url: Some("https://elsewhere.example".into()),
        api_key: Some("sk-1".into()),
        ..Default::default()
    };
    expect_error(
        gateway.providers().update_model_provider(moved.clone()).await,
        Code::InvalidArgument,
    );
    let moved = v1::UpdateModelProviderRequest {
        additional_api_keys: Some(v1::ApiKeys::default()),
        ..moved
    };
    let moved =
        gateway.providers().update_model_provider(moved).await.expect("it is changed").into_inner();
    assert_eq!(moved.status.expect("set").additional_api_keys, 0);
}

#[tokio::test]
async fn repeated_idempotency_key_returns_the_first_answer() {
    let gateway = Gateway::start().await.with_agent().await;
    let keyed = |name: &str| v1::CreateAgentRequest { idempotency_key: "k1".into(), ..agent(name) };
    // Of concurrent requests one is carried out, and the others get its answer.
    let answers = futures::future::join_all((0..8).map(|_| {
        let mut agents = gateway.agents();
        async move { agents.create_agent(keyed("twin")).await }
    }));
    let answers = answers.await;
    let first = answers[0].as_ref().expect("it is made").get_ref().clone();
    for answer in &answers {
        assert_eq!(answer.as_ref().expect("it is made").get_ref(), &first);
    }
    let status =
        expect_error(gateway.agents().create_agent(keyed("another")).await, Code::InvalidArgument);
    assert_eq!(fields(&status), ["idempotency_key"]);
    // The answer stays the same even when the entity was deleted or renamed.
    let rename = v1::UpdateAgentRequest {
        agent: "twin".into(),
        name: Some("single".into()),
        idempotency_key: "k2".into(),
        ..Default::default()
    };
    let renamed =
        gateway.agents().update_agent(rename.clone()).await.expect("it is renamed").into_inner();
    assert_eq!(
        gateway.agents().update_agent(rename).await.expect("it is repeated").into_inner(),
        renamed
    );
    let delete = v1::DeleteAgentRequest { agent: "single".into(), idempotency_key: "k3".into() };
    for _ in 0..2 {
        gateway.agents().delete_agent(delete.clone()).await.expect("it is gone");
    }
    let other = v1::DeleteAgentRequest { agent: "single".into(), idempotency_key: "k4".into() };
    expect_error(gateway.agents().delete_agent(other).await, Code::NotFound);
    let create_deleted = v1::CreateAgentRequest { idempotency_key: "k1".into(), ..agent("twin") };
    assert_eq!(
        gateway.agents().create_agent(create_deleted).await.expect("it is repeated").into_inner(),
        first
    );
}

#[tokio::test]
async fn entities_of_other_organizations_are_not_found() {
    let gateway = Gateway::start().await.with_agent().await;
    let other = OrganizationId::from_uuid(Uuid::now_v7());
    let sql = format!(
        "INSERT INTO organizations (id, name, slug, created_at, updated_at) VALUES ('{}', 'other', 'other', now(), now())",
        other.uuid()
    );
    // psql does not understand sqlx's parameters of the address.
    let address = gateway.database.url().split('?').next().expect("an address");
    let status = Command::new("psql").args(["--quiet", "--command", &sql, address]).status();
    assert!(status.expect("psql is installed with PostgreSQL").success());
    let write = Write::new(other, Timestamp::now());
    let id = ModelProviderId::from_uuid(Uuid::now_v7());
    let new = NewModelProvider {
        id,
        name: "foreign".into(),
        kind: construct_store::ModelProviderKind::Scripted,
        base_url: String::new(),
        script: None,
        key: None,
        additional_keys: Vec::new(),
        limits: construct_store::KeyLimits::default(),
    };
    let event = || NewEvent { kind: "provider.created".into(), payload: Vec::new(), step: None };
    let render = |_: &_| WriteOutput { event: event(), response: Vec::new() };
    gateway.store().model_provider_create(&write, new, render).await.expect("it is made");
    for reference in [id.to_string(), "foreign".to_owned()] {
        let get = v1::GetModelProviderRequest { model_provider: reference.clone() };
        expect_error(gateway.providers().get_model_provider(get).await, Code::NotFound);
        let delete = v1::DeleteModelProviderRequest {
            model_provider: reference.clone(),
            ..Default::default()
        };
        expect_error(gateway.providers().delete_model_provider(delete).await, Code::NotFound);
        let mut request = model("mine");
        request.spec.as_mut().expect("set").provider = reference;
        expect_error(gateway.models().create_model(request).await, Code::NotFound);
    }
    let all = gateway
        .providers()
        .list_model_providers(v1::ListModelProvidersRequest::default())
        .await
        .expect("a list");
    assert_eq!(all.into_inner().model_providers.len(), 1);
    // A name is unique within an organization only.
    gateway
        .providers()
        .create_model_provider(provider("foreign"))
        .await
        .expect("the name is free here");
    // A subscription of this organization shows no events of the other.
    let mut events = gateway.subscribe("", "0").await;
    for event in next_events(&mut events, 4).await {
        assert_eq!(event.organization_id, OrganizationId::LOCAL.to_string());
    }
    let unknown = TaskId::from_uuid(Uuid::now_v7()).to_string();
    expect_error(
        gateway.tasks().get_task(v1::GetTaskRequest { task: unknown }).await,
        Code::NotFound,
    );
}

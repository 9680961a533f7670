//! Providers, models and agents.

use secrecy::ExposeSecret as _;

use super::*;
use crate::{
    AgentChanges, Fallback, KeyLimits, Keyring, ModelChanges, ModelProviderChanges, NewTask, Stream,
};

#[tokio::test]
async fn provider_model_and_agent_are_created_updated_and_deleted() {
    let f = Fixture::new().await;
    let agent = f.store.agent_find(ORG, "a").await.expect("found by name");
    assert_eq!(agent, f.store.agent_find(ORG, &f.agent.to_string()).await.expect("found by id"));
    assert_eq!(agent, f.store.agent_get(ORG, f.agent).await.expect("got"));
    assert_eq!(f.store.agent_resolve(ORG, "a").await.expect("resolved"), f.agent);
    assert_eq!((agent.model, agent.model_name.as_str(), agent.task_count), (f.model, "m", 0));
    f.task().await;
    let changes = AgentChanges {
        name: Some("b".into()),
        max_turns: Some(7),
        parameters: Some(ModelParameters { temperature: Some(0.5), ..ModelParameters::default() }),
        ..AgentChanges::default()
    };
    let (changed, event) = applied_with_event(
        f.store
            .agent_update(&write(), f.agent, Some(1), changes, rendered("agent.updated"))
            .await
            .expect("changed"),
    );
    assert_eq!(
        (changed.name.as_str(), changed.max_turns, changed.revision, changed.task_count),
        ("b", 7, 2, 1)
    );
    assert_eq!(changed.parameters.temperature, Some(0.5));
    assert_eq!(changed.instructions, agent.instructions);
    assert_eq!(event.expect("there is an event").sequence, 4);
    assert_eq!(f.store.model_resolve(ORG, "m").await.expect("resolved"), f.model);
    assert_eq!(f.store.model_provider_resolve(ORG, "p").await.expect("resolved"), f.provider);
    let prices = Prices { input: 9, ..Prices::default() };
    let model = applied(
        f.store
            .model_update(
                &write(),
                f.model,
                None,
                ModelChanges {
                    prices: Some(prices),
                    tool_calling: Some(false),
                    ..ModelChanges::default()
                },
                rendered("model.updated"),
            )
            .await
            .expect("changed"),
    );
    assert_eq!((model.prices, model.provider_name.as_str()), (prices, "p"));
}

#[tokio::test]
async fn duplicate_name_stale_revision_missing_reference_are_refused() {
    let f = Fixture::new().await;
    let taken =
        f.store.agent_create(&write(), new_agent(f.model, "a"), rendered("agent.created")).await;
    assert!(
        matches!(taken, Err(Error::AlreadyExists { what: "agent", field: "name" })),
        "{taken:?}"
    );
    let changes = AgentChanges { description: Some("x".into()), ..AgentChanges::default() };
    let old = f
        .store
        .agent_update(&write(), f.agent, Some(9), changes.clone(), rendered("agent.updated"))
        .await;
    assert!(matches!(old, Err(Error::Conflict)), "{old:?}");
    let missing = AgentId::from_uuid(Uuid::now_v7());
    assert_not_found(
        f.store.agent_update(&write(), missing, Some(1), changes, rendered("agent.updated")).await,
    );
    let model = ModelId::from_uuid(Uuid::now_v7());
    let created =
        f.store.agent_create(&write(), new_agent(model, "b"), rendered("agent.created")).await;
    assert!(matches!(created, Err(Error::NotFound { what: "model" })), "{created:?}");
    let head = f.store.event_head(Stream::organization(ORG)).await.expect("read");
    assert_eq!(head, 3, "what was refused left no event");
}

#[tokio::test]
async fn referenced_entity_cannot_be_deleted() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let provider =
        f.store.model_provider_delete(&write(), f.provider, rendered("provider.deleted")).await;
    assert!(
        matches!(provider, Err(Error::InUse { what: "model provider", by: "model" })),
        "{provider:?}"
    );
    let model = f.store.model_delete(&write(), f.model, rendered("model.deleted")).await;
    assert!(matches!(model, Err(Error::InUse { what: "model", by: "agent" })), "{model:?}");
    let agent = f.store.agent_delete(&write(), f.agent, rendered("agent.deleted")).await;
    assert!(matches!(agent, Err(Error::InUse { what: "agent", by: "task" })), "{agent:?}");
    applied(f.store.task_delete(&write(), task, rendered("task.deleted")).await.expect("deleted"));
    assert!(f.store.task_purge(task, deleted_event, now()).await.expect("purged").is_some());
    applied(
        f.store.agent_delete(&write(), f.agent, rendered("agent.deleted")).await.expect("deleted"),
    );
    applied(
        f.store.model_delete(&write(), f.model, rendered("model.deleted")).await.expect("deleted"),
    );
    applied(
        f.store
            .model_provider_delete(&write(), f.provider, rendered("provider.deleted"))
            .await
            .expect("deleted"),
    );
    assert_not_found(f.store.model_provider_get(ORG, f.provider).await);
}

#[tokio::test]
async fn catalog_rows_of_another_organization_are_not_found() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let message = f.message(task, "hello").await.id;
    let other = other_organization(&f.store).await;
    assert_not_found(f.store.model_provider_get(other, f.provider).await);
    assert_not_found(f.store.model_provider_find(other, "p").await);
    assert_not_found(f.store.model_get(other, f.model).await);
    assert_not_found(f.store.agent_get(other, f.agent).await);
    assert_not_found(f.store.agent_resolve(other, &f.agent.to_string()).await);
    assert_not_found(f.store.task_get(other, task).await);
    assert_not_found(f.store.message_get(other, message).await);
    assert_eq!(f.store.event_head(Stream::task(other, task)).await.expect("read"), 0);
    assert!(
        f.store
            .events_after(Stream::task(other, task), 0, 9, u64::MAX)
            .await
            .expect("read")
            .is_empty()
    );
    let theirs = Write { organization: other, ..write() };
    assert_not_found(
        f.store.model_create(&theirs, new_model(f.provider, "m"), rendered("x")).await,
    );
    assert_not_found(f.store.agent_create(&theirs, new_agent(f.model, "a"), rendered("x")).await);
    assert_not_found(f.store.task_create(&theirs, new_task(f.agent), rendered("x")).await);
    assert_not_found(
        f.store.agent_update(&theirs, f.agent, None, AgentChanges::default(), rendered("x")).await,
    );
    assert_not_found(f.store.agent_delete(&theirs, f.agent, rendered("x")).await);
    assert_not_found(f.store.task_cancel(&theirs, task, "no", rendered("x")).await);
    assert_not_found(f.store.task_suspend(&theirs, task, rendered("x")).await);
    assert_not_found(f.store.task_delete(&theirs, task, rendered("x")).await);
    assert_not_found(f.store.message_delete(&theirs, message, rendered("x")).await);
    assert_not_found(
        f.store.message_update(&theirs, message, None, text("x"), rendered("x")).await,
    );
    let new = NewUserMessage { id: message_id(), task, content: text("x"), interrupts: false };
    assert_not_found(f.store.message_create(&theirs, new, rendered("x")).await);
    let unknown = Write { organization: OrganizationId::from_uuid(Uuid::now_v7()), ..write() };
    assert_not_found(
        f.store.model_provider_create(&unknown, new_provider("q"), rendered("x")).await,
    );
}

#[tokio::test]
async fn key_rotation_reseals_provider_keys_and_reports_failures() {
    let f = Fixture::new().await;
    let old = Keyring::new("old", [("old".to_owned(), [1; 32])]).expect("valid");
    let lost = Keyring::new("lost", [("lost".to_owned(), [9; 32])]).expect("valid");
    let new = Keyring::new("new", [("old".to_owned(), [1; 32]), ("new".to_owned(), [2; 32])])
        .expect("valid");
    let mut ids = Vec::new();
    for (name, keyring) in [("x", &old), ("y", &old), ("z", &lost)] {
        let mut provider = new_provider(name);
        provider.key = Some(keyring.seal(&provider.id.to_string(), b"sk-1").expect("sealed"));
        provider.additional_keys =
            vec![keyring.seal(&provider.id.to_string(), b"sk-2").expect("sealed")];
        ids.push(
            applied(
                f.store
                    .model_provider_create(&write(), provider, rendered("provider.created"))
                    .await
                    .expect("created"),
            )
            .id,
        );
    }
    let report = f.store.model_provider_reseal_all(&new, now()).await.expect("rotated");
    assert_eq!((report.resealed, report.failed), (4, vec![ids[2], ids[2]]));
    let provider = f.store.model_provider_get(ORG, ids[0]).await.expect("got");
    let key = provider.key.expect("there is a key");
    assert_eq!(key.key_id, "new");
    assert_eq!(new.open(&ids[0].to_string(), &key).expect("opened").expose_secret(), b"sk-1");
    assert_eq!(
        new.open(&ids[0].to_string(), &provider.additional_keys[0])
            .expect("opened")
            .expose_secret(),
        b"sk-2"
    );
    assert!(new.open(&ids[1].to_string(), &key).is_err(), "it opens for its own record only");
    let again = f.store.model_provider_reseal_all(&new, now()).await.expect("rotated");
    assert_eq!(again.resealed, 0);
    let cleared = ModelProviderChanges {
        key: Some(None),
        script: Some(None),
        additional_keys: Some(Vec::new()),
        requests_per_minute: Some(60),
        ..ModelProviderChanges::default()
    };
    let provider = applied(
        f.store
            .model_provider_update(&write(), ids[0], None, cleared, rendered("provider.updated"))
            .await
            .expect("changed"),
    );
    assert_eq!((provider.key, provider.script, provider.additional_keys), (None, None, Vec::new()));
    assert_eq!(provider.limits, KeyLimits { requests_per_minute: 60, ..KeyLimits::default() });
}

#[tokio::test]
async fn fallbacks_keep_order_and_prevent_model_deletion() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let mut made = Vec::new();
    for name in ["x", "y"] {
        let new = new_model(f.provider, name);
        made.push(
            applied(
                f.store
                    .model_create(&write(), new, rendered("model.created"))
                    .await
                    .expect("created"),
            )
            .id,
        );
    }
    let fallback = |model: ModelId, weight| Fallback { model, name: String::new(), weight };
    let change = async |fallbacks: Vec<Fallback>| {
        let changes = ModelChanges {
            fallbacks: Some(fallbacks),
            hedge_after_ms: Some(1500),
            ..ModelChanges::default()
        };
        f.store.model_update(&write(), f.model, None, changes, rendered("model.updated")).await
    };
    let model =
        applied(change(vec![fallback(made[1], 0), fallback(made[0], 7)]).await.expect("changed"));
    let named: Vec<_> =
        model.fallbacks.iter().map(|fallback| (fallback.name.as_str(), fallback.weight)).collect();
    assert_eq!((named, model.hedge_after_ms), (vec![("y", 0), ("x", 7)], 1500));
    let invocation = f.store.invocation(task).await.expect("read").expect("there");
    let routes: Vec<_> =
        invocation.fallbacks.iter().map(|route| (route.model.id, route.weight)).collect();
    assert_eq!((routes, invocation.hedge_after_ms), (vec![(made[1], 0), (made[0], 7)], 1500));
    assert_eq!(invocation.fallbacks[0].provider, invocation.provider);

    let used = f.store.model_delete(&write(), made[0], rendered("model.deleted")).await;
    assert!(matches!(used, Err(Error::InUse { what: "model", by: "model" })), "{used:?}");
    let missing = change(vec![fallback(ModelId::from_uuid(Uuid::now_v7()), 0)]).await;
    assert!(matches!(missing, Err(Error::NotFound { what: "model" })), "{missing:?}");
    applied(change(Vec::new()).await.expect("changed"));
    applied(
        f.store.model_delete(&write(), made[0], rendered("model.deleted")).await.expect("deleted"),
    );
}

#[tokio::test]
async fn invocation_has_agent_model_provider_and_fallbacks() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let invocation = f.store.invocation(task).await.expect("read").expect("there");
    assert_eq!((invocation.agent.id, invocation.agent.instructions.as_str()), (f.agent, "be good"));
    assert_eq!((invocation.model.id, invocation.model.prices.cache_write), (f.model, 4));
    assert_eq!(
        (invocation.provider.id, invocation.provider.script.as_deref()),
        (f.provider, Some("{}"))
    );
    assert!(f.store.invocation(TaskId::from_uuid(Uuid::now_v7())).await.expect("read").is_none());
}

#[tokio::test]
async fn task_keeps_the_compute_pool_of_its_creation() {
    let f = Fixture::new().await;
    let made = async |compute: Option<&str>| {
        let new = NewTask { compute: compute.map(str::to_owned), ..new_task(f.agent) };
        applied(f.store.task_create(&write(), new, rendered("task.created")).await.expect("made"))
    };
    let (first, own) = (made(None).await, made(Some("cpu-8")).await);
    let changes = AgentChanges { compute: Some("cpu-4".into()), ..AgentChanges::default() };
    let agent = applied(
        f.store
            .agent_update(&write(), f.agent, None, changes, rendered("agent.updated"))
            .await
            .expect("ok"),
    );
    assert_eq!(agent.compute, "cpu-4");
    let second = made(None).await;
    for (task, pool) in [(first, "cpu-2"), (own, "cpu-8"), (second, "cpu-4")] {
        assert_eq!(task.compute, pool);
        let loaded = f.store.task_load(task.state.id).await.expect("asked").expect("it is there");
        assert_eq!(loaded.compute, pool);
    }
}

//! Lists, page by page.

use construct_domain::task::Phase;

use super::*;
use crate::{
    AgentFilter, CursorValue, Key, ModelFilter, ModelProviderFilter, Order, Page, TaskFilter,
};

const ORDERS: [(Key, bool); 6] = [
    (Key::CreatedAt, false),
    (Key::CreatedAt, true),
    (Key::UpdatedAt, false),
    (Key::UpdatedAt, true),
    (Key::Name, false),
    (Key::Name, true),
];

fn page(key: Key, descending: bool) -> Page {
    Page { limit: 3, order: Order { key, descending }, after: None }
}

#[tokio::test]
async fn pages_are_stable_during_inserts() {
    let f = Fixture::new().await;
    for n in 0..10 {
        let new = new_agent(f.model, &format!("a{n}"));
        // Several with one time: their ids distinguish them.
        let at = Write {
            now: Timestamp::from_second(1_700_000_000 + n / 3).expect("in range"),
            ..write()
        };
        applied(f.store.agent_create(&at, new, rendered("agent.created")).await.expect("created"));
    }
    let filter = AgentFilter { name_prefix: "a".into(), ..AgentFilter::default() };
    for (round, (key, descending)) in ORDERS.into_iter().enumerate() {
        let before = f
            .store
            .agent_list(ORG, &filter, &Page { limit: 100, ..page(key, descending) })
            .await
            .expect("listed");
        let mut part = page(key, descending);
        let mut seen = Vec::new();
        for insert in 0.. {
            let agents = f.store.agent_list(ORG, &filter, &part).await.expect("listed");
            assert!(agents.len() <= 3);
            let Some(last) = agents.last() else { break };
            part.after = Some(last.cursor(key));
            seen.extend(agents.iter().map(|agent| agent.id));
            // Before the first and after the last row of every order.
            for (name, second) in [("a", 1_600_000_000), ("azz", 1_800_000_000)] {
                if insert < 3 {
                    let at =
                        Write { now: Timestamp::from_second(second).expect("in range"), ..write() };
                    let new = new_agent(f.model, &format!("{name}-{round}-{insert}"));
                    applied(
                        f.store
                            .agent_create(&at, new, rendered("agent.created"))
                            .await
                            .expect("created"),
                    );
                }
            }
        }
        let old: Vec<AgentId> = before.iter().map(|agent| agent.id).collect();
        let seen_old: Vec<AgentId> = seen.iter().copied().filter(|id| old.contains(id)).collect();
        assert_eq!(seen_old, old, "{key:?} {descending}: each once, in order");
        let distinct: std::collections::BTreeSet<_> = seen.iter().collect();
        assert_eq!(distinct.len(), seen.len(), "nothing twice");
    }
}

#[tokio::test]
async fn every_list_supports_every_order() {
    let f = Fixture::new().await;
    f.task().await;
    f.task().await;
    for (key, descending) in ORDERS {
        let page = page(key, descending);
        assert_eq!(
            f.store
                .model_provider_list(ORG, &ModelProviderFilter::default(), &page)
                .await
                .expect("listed")
                .len(),
            1
        );
        assert_eq!(
            f.store.model_list(ORG, &ModelFilter::default(), &page).await.expect("listed").len(),
            1
        );
        assert_eq!(
            f.store.agent_list(ORG, &AgentFilter::default(), &page).await.expect("listed").len(),
            1
        );
        let tasks = f.store.task_list(ORG, &TaskFilter::default(), &page).await.expect("listed");
        assert_eq!(tasks[0].created_at > tasks[1].created_at, descending);
        let rest = Page { after: Some(tasks[0].cursor(key)), ..page };
        assert_eq!(
            f.store.task_list(ORG, &TaskFilter::default(), &rest).await.expect("listed"),
            tasks[1..]
        );
    }
}

#[tokio::test]
async fn list_filters_restrict_the_rows() {
    let f = Fixture::new().await;
    let task = f.stored_task().await;
    let page = page(Key::CreatedAt, true);
    let other_agent = AgentId::from_uuid(Uuid::now_v7());
    for (filter, expected) in [
        (TaskFilter { agent: Some(f.agent), ..TaskFilter::default() }, 1),
        (TaskFilter { agent: Some(other_agent), ..TaskFilter::default() }, 0),
        (TaskFilter { phase: Some(Phase::AwaitInput), ..TaskFilter::default() }, 1),
        (TaskFilter { phase: Some(Phase::Suspended), ..TaskFilter::default() }, 0),
        (TaskFilter { workspace: Some("/w".into()), ..TaskFilter::default() }, 1),
        (TaskFilter { workspace: Some("/".into()), ..TaskFilter::default() }, 0),
        (TaskFilter { created_after: Some(task.created_at), ..TaskFilter::default() }, 0),
        (TaskFilter { created_before: Some(task.created_at), ..TaskFilter::default() }, 0),
    ] {
        assert_eq!(
            f.store.task_list(ORG, &filter, &page).await.expect("listed").len(),
            expected,
            "{filter:?}"
        );
    }
    let filter =
        ModelProviderFilter { kind: Some(ModelProviderKind::Openai), name_prefix: String::new() };
    assert!(f.store.model_provider_list(ORG, &filter, &page).await.expect("listed").is_empty());
    let filter = ModelFilter { provider: Some(f.provider), name_prefix: "%".into() };
    assert!(
        f.store.model_list(ORG, &filter, &page).await.expect("listed").is_empty(),
        "a prefix is no pattern"
    );
}

#[tokio::test]
async fn cursor_of_another_order_is_refused() {
    let f = Fixture::new().await;
    let mut page = page(Key::Name, true);
    page.after = Some(crate::Cursor { value: CursorValue::Time(now()), id: Uuid::nil() });
    let result = f.store.agent_list(ORG, &AgentFilter::default(), &page).await;
    assert!(matches!(result, Err(Error::Internal(_))), "{result:?}");
}

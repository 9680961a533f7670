//! The audit trail.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use construct_domain::{ApiKeyId, AuditEntryId, UserId};
use jiff::SignedDuration;

use super::*;
use crate::{Audit, AuditEntry, AuditFilter, Key, Order, Page};

fn entry(method: &str) -> AuditEntry {
    AuditEntry {
        id: AuditEntryId::from_uuid(Uuid::now_v7()),
        organization: ORG,
        user: Some(UserId::LOCAL),
        api_key: Some(ApiKeyId::from_uuid(Uuid::from_u128(7))),
        method: method.into(),
        protocol: "grpc".into(),
        peer: "192.0.2.1".into(),
        user_agent: "test\0".into(),
        objects: vec!["ada".into()],
        code: 7,
        count: 3,
        request_id: "r".into(),
        trace_id: "t".into(),
        created_at: now(),
    }
}

fn days_ago(days: i64, method: &str) -> AuditEntry {
    AuditEntry { created_at: now() - SignedDuration::from_hours(24 * days), ..entry(method) }
}

fn page(limit: u32, descending: bool, after: Option<crate::Cursor>) -> Page {
    Page { limit, order: Order { key: Key::CreatedAt, descending }, after }
}

async fn methods(store: &Store, organization: OrganizationId, filter: &AuditFilter) -> Vec<String> {
    let found =
        store.audit_list(organization, filter, &page(100, false, None)).await.expect("it is read");
    found.into_iter().map(|entry| entry.method).collect()
}

fn audit(method: &str) -> (Audit, Arc<AtomicBool>) {
    let written = Arc::new(AtomicBool::new(false));
    let answered = |method: &str, response: &[u8]| {
        vec![format!("{method} {}", !response.is_empty()), "ada".into()]
    };
    (
        Audit { entry: entry(method), response_objects: answered, written: Arc::clone(&written) },
        written,
    )
}

#[tokio::test]
async fn audit_entry_is_listed_once_and_only_in_its_organization() {
    let database = Database::new().await;
    let store = database.store();
    let (one, two) = (entry("A/One"), days_ago(2, "A/Two"));
    store.audit_append(&[one.clone(), two.clone()]).await.expect("it is appended");
    store
        .audit_append(&[AuditEntry { code: 0, ..one.clone() }])
        .await
        .expect("it is there already");
    let all = store
        .audit_list(ORG, &AuditFilter::default(), &page(100, true, None))
        .await
        .expect("it is read");
    let shown = |entry: AuditEntry| AuditEntry { user_agent: "test\u{FFFD}".into(), ..entry };
    assert_eq!(all, [shown(one.clone()), shown(two)]);
    let next = store
        .audit_list(ORG, &AuditFilter::default(), &page(1, true, Some(one.cursor(Key::CreatedAt))))
        .await;
    assert_eq!(next.expect("it is read").len(), 1);
    let elsewhere = OrganizationId::from_uuid(Uuid::now_v7());
    assert_eq!(methods(&store, elsewhere, &AuditFilter::default()).await, Vec::<String>::new());
    let filters = [
        (
            AuditFilter {
                since: Some(now() - SignedDuration::from_hours(1)),
                ..AuditFilter::default()
            },
            vec!["A/One"],
        ),
        (
            AuditFilter {
                until: Some(now() - SignedDuration::from_hours(1)),
                ..AuditFilter::default()
            },
            vec!["A/Two"],
        ),
        (
            AuditFilter { user: Some(UserId::LOCAL), ..AuditFilter::default() },
            vec!["A/Two", "A/One"],
        ),
        (
            AuditFilter { user: Some(UserId::from_uuid(Uuid::now_v7())), ..AuditFilter::default() },
            vec![],
        ),
        (
            AuditFilter {
                api_key: Some(ApiKeyId::from_uuid(Uuid::now_v7())),
                ..AuditFilter::default()
            },
            vec![],
        ),
        (AuditFilter { method: Some("%/T%".into()), ..AuditFilter::default() }, vec!["A/Two"]),
        (
            AuditFilter { object: Some("ada".into()), ..AuditFilter::default() },
            vec!["A/Two", "A/One"],
        ),
        (AuditFilter { object: Some("bob".into()), ..AuditFilter::default() }, vec![]),
        (AuditFilter { code: Some(0), ..AuditFilter::default() }, vec![]),
    ];
    for (filter, expected) in filters {
        assert_eq!(methods(&store, ORG, &filter).await, expected, "{filter:?}");
    }
}

#[tokio::test]
async fn audit_entries_are_immutable_until_they_expire() {
    let database = Database::new().await;
    let store = database.store();
    let entries =
        [entry("A/New"), days_ago(31, "A/Month"), days_ago(500, "A/Old"), days_ago(501, "A/Older")];
    store.audit_append(&entries).await.expect("they are appended");
    for statement in [
        "UPDATE audit_entries SET method = 'x'",
        "DELETE FROM audit_entries",
        "DELETE FROM audit_entries WHERE created_at < now() - interval '400 days'",
        "TRUNCATE audit_entries",
        "SELECT audit_entries_expire(now(), 100)",
    ] {
        let refused = sqlx::query(statement).execute(&store.pool).await.expect_err(statement);
        assert!(
            refused.to_string().contains("neither changed nor removed"),
            "{statement}: {refused}"
        );
    }
    assert_eq!(methods(&store, ORG, &AuditFilter::default()).await.len(), 4);
    let before = now() - SignedDuration::from_hours(24 * 400);
    assert_eq!(store.audit_expire(before, 1).await.expect("one is removed"), 1);
    assert_eq!(store.audit_expire(before, 10).await.expect("the other is removed"), 1);
    assert_eq!(store.audit_expire(before, 10).await.expect("there is nothing left"), 0);
    assert_eq!(methods(&store, ORG, &AuditFilter::default()).await, ["A/Month", "A/New"]);
}

#[tokio::test]
async fn write_and_audit_entry_are_stored_atomically() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let list = async || {
        let found = f
            .store
            .audit_list(ORG, &AuditFilter::default(), &page(100, false, None))
            .await
            .expect("it is read");
        found.into_iter().map(|entry| (entry.method, entry.objects)).collect::<Vec<_>>()
    };
    let mut expected = Vec::new();
    // Each way in which a write can end, with and without an idempotency key.
    for (number, keyed) in [(1_u8, false), (2, true)] {
        let with = |method: &str| {
            let (audit, written) = audit(method);
            let base =
                if keyed { write_with_key(&format!("{method} {number}"), number) } else { write() };
            (Write { audit: Some(audit), now: now(), ..base }, written)
        };
        let (create, written) = with("Message");
        let new =
            NewUserMessage { id: message_id(), task, content: text("hello"), interrupts: false };
        f.store
            .message_create(&create, new, rendered("message.created"))
            .await
            .expect("it is accepted");
        assert!(written.load(Ordering::Acquire));
        expected.push("Message");
        let (agent, written) = with("Agent");
        let new = || new_agent(f.model, &format!("agent-{number}"));
        f.store.agent_create(&agent, new(), rendered("agent.created")).await.expect("it is made");
        assert!(written.load(Ordering::Acquire));
        expected.push("Agent");
        if keyed {
            // Executed once, answered twice: the repeated request stores no entry in this
            // transaction.
            let (audit, written) = audit("Agent");
            let again = Write { audit: Some(audit), ..agent };
            f.store
                .agent_create(&again, new(), rendered("agent.created"))
                .await
                .expect("it is answered");
            assert!(!written.load(Ordering::Acquire));
        }
        let (audit, written) = audit("Taken");
        let taken = Write { audit: Some(audit), ..write() };
        f.store
            .agent_create(&taken, new(), rendered("agent.created"))
            .await
            .expect_err("the name is taken");
        assert!(!written.load(Ordering::Acquire));
    }
    let found = list().await;
    assert_eq!(found.iter().map(|(method, _)| method.as_str()).collect::<Vec<_>>(), expected);
    for (method, objects) in found {
        assert_eq!(objects, ["ada".to_owned(), format!("{method} true")]);
    }
}

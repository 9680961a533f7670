//! Writes of users on tasks, and how the sweep finds them.

use std::time::Duration;

use construct_domain::{
    BudgetId,
    budget::{Period, Scope},
    money::tokens_of_bytes,
    policy::Rule,
    task::{DEFAULT_MAX_TURNS, Task},
};

use super::*;
use crate::{AgentChanges, NewBudget, Purpose, StepUsage, Stream, TaskChanges, TaskCommit};

async fn due(f: &Fixture, at: Timestamp) -> Vec<TaskId> {
    f.store.sweep_due(at, None, 10).await.expect("read").into_iter().map(|due| due.task).collect()
}

#[tokio::test]
async fn written_task_equals_the_read_task() {
    let f = Fixture::new().await;
    let task = f.stored_task().await;
    let id = task.state.id;
    assert_eq!(f.store.task_get(ORG, id).await.expect("got"), task);
    let suspended = applied(
        f.store.task_suspend(&write(), id, rendered("task.updated")).await.expect("suspended"),
    );
    assert!(suspended.state.suspend);
    assert_eq!((suspended.revision, suspended.event_sequence), (2, 2));
    assert_eq!(f.store.task_get(ORG, id).await.expect("got"), suspended);
    let (again, event) = applied_with_event(
        f.store.task_suspend(&write(), id, rendered("task.updated")).await.expect("nothing to do"),
    );
    assert_eq!((again, event), (suspended, None));
    let resumed = applied(
        f.store.task_resume(&write(), id, rendered("task.updated")).await.expect("resumed"),
    );
    assert!(!resumed.state.suspend);
    let missing =
        TaskChanges { agent: Some(AgentId::from_uuid(Uuid::now_v7())), ..TaskChanges::default() };
    assert_not_found(
        f.store.task_update(&write(), id, None, missing, rendered("task.updated")).await,
    );
    let old = f
        .store
        .task_update(&write(), id, Some(1), TaskChanges::default(), rendered("task.updated"))
        .await;
    assert!(matches!(old, Err(Error::Conflict)), "{old:?}");
}

#[tokio::test]
async fn max_turns_of_task_override_agent_and_default() {
    let f = Fixture::new().await;
    let id = f.task().await;
    let limit = async || f.store.task_load(id).await.expect("read").expect("there").task.max_turns;
    assert_eq!(limit().await, DEFAULT_MAX_TURNS);
    let changes = AgentChanges { max_turns: Some(7), ..AgentChanges::default() };
    applied(
        f.store
            .agent_update(&write(), f.agent, None, changes, rendered("agent.updated"))
            .await
            .expect("changed"),
    );
    assert_eq!(limit().await, 7);
    let changes = TaskChanges { max_turns_override: Some(3), ..TaskChanges::default() };
    applied(
        f.store
            .task_update(&write(), id, None, changes, rendered("task.updated"))
            .await
            .expect("changed"),
    );
    assert_eq!(limit().await, 3);
}

#[tokio::test]
async fn created_task_equals_the_stored_task() {
    let f = Fixture::new().await;
    let changes = AgentChanges { max_turns: Some(7), ..AgentChanges::default() };
    applied(
        f.store
            .agent_update(&write(), f.agent, None, changes, rendered("agent.updated"))
            .await
            .expect("changed"),
    );
    let rule: Rule =
        serde_json::from_str(r#"{"action": "ask", "tools": ["a\u0000b"]}"#).expect("a rule");
    for new in [
        new_task(f.agent),
        NewTask {
            title: "a\0 title".to_owned(),
            workspace: "/a\0".to_owned(),
            policy: vec![rule],
            pinned: vec!["\0".to_owned()],
            compute: Some("cpu-4".to_owned()),
            max_turns_override: 3,
            ..new_task(f.agent)
        },
    ] {
        let told = applied(
            f.store
                .task_create(&write(), new.clone(), rendered("task.created"))
                .await
                .expect("created"),
        );
        assert_eq!(f.store.task_get(ORG, new.id).await.expect("stored"), told);
        let again = NewTask { id: TaskId::from_uuid(Uuid::now_v7()), ..new };
        let key = write_with_key(&again.id.to_string(), 1);
        let told = applied(
            f.store
                .task_create(&key, again.clone(), rendered("task.created"))
                .await
                .expect("created"),
        );
        assert_eq!(f.store.task_get(ORG, again.id).await.expect("stored"), told);
    }
}

#[tokio::test]
async fn pinned_facts_persist_and_count_like_instructions() {
    let f = Fixture::new().await;
    let new =
        NewTask { pinned: vec!["It rains.".to_owned(), "a\0b".to_owned()], ..new_task(f.agent) };
    let created = applied(
        f.store.task_create(&write(), new, rendered("task.created")).await.expect("created"),
    );
    let id = created.state.id;
    assert_eq!(created.pinned, ["It rains.", "a\u{FFFD}b"]);
    let load = async || f.store.task_load(id).await.expect("read").expect("there");
    let loaded = load().await;
    assert_eq!(
        (loaded.task.context.base, &loaded.pinned),
        (tokens_of_bytes("be good".len() + 9 + 5), &created.pinned)
    );

    let change = async |changes: TaskChanges| {
        let done = f.store.task_update(&write(), id, None, changes, rendered("task.updated")).await;
        applied(done.expect("changed")).pinned
    };
    let titled = TaskChanges { title: Some("Weather".to_owned()), ..TaskChanges::default() };
    assert_eq!(change(titled).await, created.pinned, "what is not said does not change");
    let pinned = |facts: &[&str]| {
        let pinned = Some(facts.iter().map(|fact| (*fact).to_owned()).collect());
        TaskChanges { pinned, ..TaskChanges::default() }
    };
    assert_eq!(change(pinned(&["Ann decides."])).await, ["Ann decides."]);
    let new = NewBudget {
        id: BudgetId::from_uuid(Uuid::now_v7()),
        scope: Scope::Task(id),
        period: Period::Total,
        limit: 7,
    };
    applied(
        f.store.budget_create(&write(), new, rendered("budget.created")).await.expect("created"),
    );
    let spending = load().await.cost_inputs.expect("a budget applies");
    assert_eq!(spending.instructions_bytes, 7 + 12, "it is paid for with every call");
    assert!(change(pinned(&[])).await.is_empty());
    assert_eq!(load().await.task.context.base, tokens_of_bytes(7));
}

#[tokio::test]
async fn sweep_finds_tasks_with_lost_wakes() {
    let f = Fixture::new().await;
    let (idle, waiting, asked) = (f.task().await, f.task().await, f.task().await);
    let loaded = f.store.task_load(waiting).await.expect("read").expect("there");
    let mut state = loaded.task.clone();
    let wake = now() + Duration::from_secs(60);
    state.next_wake = Some(wake);
    f.store.task_commit(TaskCommit::new(&loaded, &state, now())).await.expect("committed");
    f.message(asked, "hello").await;
    let soon = now() + Duration::from_secs(2);
    assert!(due(&f, now() - Duration::from_secs(1)).await.is_empty(), "the wake is given a second");
    assert_eq!(due(&f, soon).await, [asked]);
    assert_eq!(due(&f, wake).await, [asked, waiting], "the longest waiting first");
    let first = f.store.sweep_due(wake, None, 1).await.expect("read");
    let second = f.store.sweep_due(wake, first.last(), 1).await.expect("read");
    let third = f.store.sweep_due(wake, second.last(), 1).await.expect("read");
    assert_eq!(
        (first.len(), second.len(), third.len()),
        (1, 1, 0),
        "each look goes on behind the one before it"
    );
    assert_ne!(first, second);
    let loaded = f.store.task_load(asked).await.expect("read").expect("there");
    f.store.task_intents_mark_seen(&loaded).await.expect("noted");
    assert!(due(&f, soon).await.is_empty());
    assert!(!due(&f, wake).await.contains(&idle));
}

#[tokio::test]
async fn seen_intents_count_only_for_the_loaded_version() {
    let f = Fixture::new().await;
    let id = f.task().await;
    let before = f.store.task_load(id).await.expect("read").expect("there");
    f.message(id, "hello").await;
    // One reconciler sees the message and decides that it is too early. Another one commits a
    // decision from before the message.
    let after = f.store.task_load(id).await.expect("read").expect("there");
    f.store.task_intents_mark_seen(&after).await.expect("noted");
    let state = Task { steps: before.task.steps + 1, ..before.task.clone() };
    let committed =
        f.store.task_commit(TaskCommit::new(&before, &state, now())).await.expect("committed");
    assert!(committed.has_new_intents, "the message may be next now");
    // Conversely, intents that were seen with an outdated state stay unseen.
    f.store.task_intents_mark_seen(&after).await.expect("asked");
    assert_eq!(due(&f, now() + Duration::from_secs(2)).await, [id]);
}

#[tokio::test]
async fn deleted_task_is_hidden_and_swept_until_purged() {
    let f = Fixture::new().await;
    let id = f.task().await;
    let message = f.message(id, "hello").await;
    let entry = StepUsage {
        call: Uuid::now_v7(),
        step: step_id(),
        model: f.model,
        purpose: Purpose::Turn,
        usage: usage(1),
    };
    f.store.step_usage_record(ORG, id, Some(f.agent), &entry, now()).await.expect("booked");
    let purged = f.store.task_purge(id, deleted_event, now()).await.expect("asked");
    assert_eq!(purged, None, "only what is deleted is purged");
    let (_, event) = applied_with_event(
        f.store.task_delete(&write(), id, rendered("task.deleted")).await.expect("deleted"),
    );
    let event = event.expect("there is an event");
    assert_not_found(f.store.task_get(ORG, id).await);
    assert_not_found(f.store.message_get(ORG, message.id).await);
    assert_not_found(f.store.task_delete(&write(), id, rendered("task.deleted")).await);
    assert_not_found(f.store.task_resume(&write(), id, rendered("task.updated")).await);
    let new = NewUserMessage { id: message_id(), task: id, content: text("x"), interrupts: false };
    assert_not_found(f.store.message_create(&write(), new, rendered("message.created")).await);
    assert_not_found(
        f.store.message_delete(&write(), message.id, rendered("message.deleted")).await,
    );
    let loaded =
        f.store.task_load(id).await.expect("read").expect("still there for the reconciler");
    assert!(loaded.deleted);
    f.store.task_intents_mark_seen(&loaded).await.expect("noted");
    assert_eq!(due(&f, now() + Duration::from_secs(2)).await, [id]);
    assert!(f.store.task_purge(id, deleted_event, now()).await.expect("purged").is_some());
    assert_eq!(f.store.task_purge(id, deleted_event, now()).await.expect("asked"), None);
    let other = f.task().await;
    assert_eq!(
        f.store.tasks_purged(&[id, other, TaskId::from_uuid(Uuid::now_v7())]).await.expect("asked"),
        [id]
    );
    assert_eq!(f.store.task_load(id).await.expect("read"), None);
    assert_eq!(
        f.store.events_after(Stream::task(ORG, id), 0, 10, u64::MAX).await.expect("read"),
        [event]
    );
    assert!(due(&f, now() + Duration::from_secs(2)).await.is_empty());
    assert!(
        !f.store.step_usage_record(ORG, id, Some(f.agent), &entry, now()).await.expect("asked"),
        "the ledger remembers"
    );
    let result = f.store.task_commit(TaskCommit::new(&loaded, &loaded.task, now())).await;
    assert!(matches!(result, Err(Error::Conflict)), "{result:?}");
}

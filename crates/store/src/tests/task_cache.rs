//! The cached task of a commit: the next decision uses it without loading the task, if nothing has
//! changed.

use construct_domain::{
    BudgetId,
    budget::{Period, Scope},
    message::Source,
    task::{Phase, UNREADABLE},
};

use super::{
    commit::{admit, admitting, load},
    *,
};
use crate::{
    AgentChanges, AppendedMessage, CommittedTask, EndedMessage, Key, LoadedTask, NewBudget, Order,
    Page, Purpose, StepUsage, TaskChanges, TaskCommit, TaskFilter,
};

/// The cached task of a commit, and the loaded one.
async fn cached_and_loaded(
    f: &Fixture,
    task: TaskId,
    committed: CommittedTask,
) -> (Option<LoadedTask>, LoadedTask) {
    let left = committed.cached_task.map(|left| LoadedTask { is_cached: false, ..*left });
    (left, load(f, task).await)
}

#[tokio::test]
async fn cached_task_of_a_commit_equals_the_loaded_task() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let first = f.message(task, "hello").await;
    let second = f.message(task, "and then").await;

    let loaded = load(&f, task).await;
    let (state, admitted) = admitting(&loaded);
    let commit = TaskCommit {
        admitted,
        trace_id: Some("t1".into()),
        events: vec![event("task.phase_changed")],
        ..TaskCommit::new(&loaded, &state, now())
    };
    let committed = f.store.task_commit(commit).await.expect("committed");
    let (left, loaded) = cached_and_loaded(&f, task, committed.clone()).await;
    assert_eq!(left.as_ref(), Some(&loaded));
    assert_eq!(loaded.queued.map(|queued| queued.message), Some(second.id));

    // Decided from the cache, twice in a row.
    let cached = committed.cached_task.expect("it is known");
    let mut state = cached.task.clone();
    let step = state.step.take().expect("a step runs").id;
    state.turn = None;
    state.phase = Phase::AwaitInput;
    state.next_wake = Some(now());
    state.last_position += 1;
    let answer = AppendedMessage {
        id: message_id(),
        position: state.last_position,
        source: Source::Assistant,
        content: text("hi"),
        agent: Some(f.agent),
        usage: usage(5),
        step: Some(step),
    };
    let commit = TaskCommit {
        appended: vec![answer],
        ended_message: Some(EndedMessage { message: first.id, error: None }),
        usage: vec![StepUsage {
            call: Uuid::now_v7(),
            step,
            model: f.model,
            purpose: Purpose::Turn,
            usage: usage(5),
        }],
        tool_uses: [("grep".to_owned(), 2)].into(),
        title: Some("A title".into()),
        events: vec![event("message.created"), event("turn.completed")],
        ..TaskCommit::new(&cached, &state, now())
    };
    let committed = f.store.task_commit(commit).await.expect("committed");
    let (left, loaded) = cached_and_loaded(&f, task, committed.clone()).await;
    assert_eq!(left.as_ref(), Some(&loaded));
    assert!(loaded.task.titled);

    let cached = committed.cached_task.expect("it is known");
    let (state, admitted) = admitting(&cached);
    assert_eq!(admitted.map(|(message, _)| message), Some(second.id));
    let committed = f
        .store
        .task_commit(TaskCommit { admitted, ..TaskCommit::new(&cached, &state, now()) })
        .await
        .expect("committed");
    let (left, loaded) = cached_and_loaded(&f, task, committed).await;
    assert_eq!(left, Some(loaded));
}

/// The cached task after a message was admitted.
async fn cached_task(f: &Fixture) -> LoadedTask {
    let task = f.task().await;
    f.message(task, "hello").await;
    *admit(f, task).await.cached_task.expect("it is known")
}

async fn commit_again(f: &Fixture, cached: &LoadedTask) -> Result<CommittedTask, Error> {
    f.store.task_commit(TaskCommit::new(cached, &cached.task, now())).await
}

/// Any change between two decisions invalidates the cached task.
#[tokio::test]
async fn commit_from_a_stale_cached_task_conflicts() {
    let f = Fixture::new().await;
    let unchanged = cached_task(&f).await;
    commit_again(&f, &unchanged).await.expect("nothing has changed");

    let mut before = Vec::new();
    for _ in 0..7 {
        before.push(cached_task(&f).await);
    }
    let id = |number: usize| before[number].task.id;
    f.message(id(0), "more").await;
    f.store.task_suspend(&write(), id(1), rendered("task.updated")).await.expect("suspended");
    f.store
        .task_cancel(&write(), id(2), "no more", rendered("task.updated"))
        .await
        .expect("cancelled");
    let changes = TaskChanges { policy: Some(Vec::new()), ..TaskChanges::default() };
    f.store
        .task_update(&write(), id(3), None, changes, rendered("task.updated"))
        .await
        .expect("changed");
    f.store.task_delete(&write(), id(4), rendered("task.deleted")).await.expect("deleted");
    let new = NewBudget {
        id: BudgetId::from_uuid(Uuid::now_v7()),
        scope: Scope::Task(id(5)),
        period: Period::Total,
        limit: 1,
    };
    f.store.budget_create(&write(), new, rendered("budget.created")).await.expect("created");
    for (number, before) in before[..6].iter().enumerate() {
        let done = commit_again(&f, before).await;
        assert!(matches!(done, Err(Error::Conflict)), "change {number}: {done:?}");
    }
    let changes = AgentChanges { policy: Some(Vec::new()), ..AgentChanges::default() };
    f.store
        .agent_update(&write(), f.agent, None, changes, rendered("agent.updated"))
        .await
        .expect("changed");
    let done = commit_again(&f, &before[6]).await;
    assert!(matches!(done, Err(Error::Conflict)), "{done:?}");
    let loaded = load(&f, id(6)).await;
    commit_again(&f, &loaded).await.expect("what is loaded is as it is");
}

#[tokio::test]
async fn task_with_a_budget_or_new_intents_is_not_cached() {
    let f = Fixture::new().await;
    let task = f.task().await;
    f.message(task, "hello").await;
    let loaded = load(&f, task).await;
    f.message(task, "more").await;
    let (state, admitted) = admitting(&loaded);
    let commit = TaskCommit { admitted, ..TaskCommit::new(&loaded, &state, now()) };
    let committed = f.store.task_commit(commit).await.expect("committed");
    assert_eq!((committed.has_new_intents, committed.cached_task), (true, None));

    let new = NewBudget {
        id: BudgetId::from_uuid(Uuid::now_v7()),
        scope: Scope::Organization,
        period: Period::Total,
        limit: 1,
    };
    f.store.budget_create(&write(), new, rendered("budget.created")).await.expect("created");
    let loaded = load(&f, task).await;
    let committed = commit_again(&f, &loaded).await.expect("committed");
    assert_eq!(committed.cached_task, None);
}

/// The content of a message is read beside the commit that admits it.
#[tokio::test]
async fn commit_conflicts_when_the_queued_message_was_edited() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let message = f.message(task, "hello").await;
    let loaded = load(&f, task).await;
    let write = write();
    let changed = f.store.message_update(
        &write,
        message.id,
        None,
        text("good-bye"),
        rendered("message.updated"),
    );
    changed.await.expect("it still waits");
    let (state, admitted) = admitting(&loaded);
    let commit = TaskCommit { admitted, ..TaskCommit::new(&loaded, &state, now()) };
    let done = f.store.task_commit(commit).await;
    assert!(matches!(done, Err(Error::Conflict)), "{done:?}");
}

#[tokio::test]
async fn quarantine_ends_with_a_new_intent_or_a_commit() {
    let f = Fixture::new().await;
    let task = f.task().await;
    f.message(task, "hello").await;
    let before = f.store.task_intents(task).await.expect("read").expect("there");
    f.message(task, "more").await;
    assert!(
        !f.store.task_quarantine(task, before, "broken", now()).await.expect("written"),
        "nobody has looked at that yet"
    );
    let intents = f.store.task_intents(task).await.expect("read").expect("there");
    assert!(f.store.task_quarantine(task, intents, "broken", now()).await.expect("written"));
    let later = now() + std::time::Duration::from_secs(3600);
    let due = async || {
        f.store.sweep_due(later, None, 10).await.expect("read").iter().any(|due| due.task == task)
    };
    assert!(!due().await);
    let since = f.store.task_quarantine_get(ORG, task).await.expect("read").expect("it is").since;
    // A repeated failure does not start a new quarantine.
    assert!(f.store.task_quarantine(task, intents, "still broken", later).await.expect("written"));
    let still = f.store.task_quarantine_get(ORG, task).await.expect("read").expect("it is");
    assert_eq!((still.since, still.reason.as_str()), (since, "still broken"));
    let quarantined = f.store.tasks_quarantined().await.expect("read");
    assert!(quarantined.count == 1 && quarantined.since.is_some(), "{quarantined:?}");
    admit(&f, task).await;
    assert_eq!(f.store.task_quarantine_get(ORG, task).await.expect("read"), None);
    assert_eq!(f.store.tasks_quarantined().await.expect("read").count, 0);
    assert!(due().await, "the next look is due");
}

#[tokio::test]
async fn stuck_tasks_are_reported_to_tests() {
    let f = Fixture::new().await;
    let (task, idle) = (f.task().await, f.task().await);
    f.message(task, "hello").await;
    let forgotten = async || f.database.stuck_tasks().await.expect("read");
    assert!(forgotten().await.is_empty(), "the sweep finds what was not seen");
    let set = async |what: &str| {
        f.database.execute(&format!("UPDATE tasks SET {what} WHERE id = '{}'", task.uuid())).await;
    };
    set("intents_seen = intents").await;
    let found = forgotten().await;
    assert!(found.len() == 1 && found[0].contains(&task.uuid().to_string()), "{found:?}");
    for reason in
        ["next_wake = now()", "parked_intents = intents", "phase = 'suspended', suspend = true"]
    {
        set(reason).await;
        assert!(forgotten().await.is_empty(), "{reason}");
        set("next_wake = NULL, parked_intents = NULL, phase = 'await_input', suspend = false")
            .await;
        assert_eq!(forgotten().await.len(), 1, "{reason}");
    }
    f.database.execute("DELETE FROM messages").await;
    assert!(forgotten().await.is_empty(), "both are idle");
    for busy in ["phase = 'await_approval'", "turn = '{}'", "step = '{}'"] {
        f.database.execute(&format!("UPDATE tasks SET {busy} WHERE id = '{}'", idle.uuid())).await;
        assert_eq!(forgotten().await.len(), 1, "{busy}");
        f.database
            .execute("UPDATE tasks SET phase = 'await_input', turn = NULL, step = NULL")
            .await;
    }
}

#[tokio::test]
async fn unreadable_columns_are_reported_and_the_rest_is_shown() {
    let f = Fixture::new().await;
    let (task, whole) = (f.task().await, f.task().await);
    f.message(task, "hello").await;
    f.database.corrupt_task(task, true).await;
    f.database
        .execute(&format!("UPDATE tasks SET phase = 'dreams' WHERE id = '{}'", task.uuid()))
        .await;
    let loaded = f.store.task_load(task).await;
    assert!(
        matches!(loaded, Err(Error::Internal(_))),
        "nothing is decided about half a task: {loaded:?}"
    );

    let found = f.store.task_get(ORG, task).await.expect("read");
    assert_eq!((found.phase(), found.unreadable.as_slice()), (None, &["phase", "turn"][..]));
    assert_eq!((found.queued_count, found.agent_name.as_str()), (1, "a"));
    let error = found.state.last_error.as_ref().expect("it says so");
    assert_eq!(error.code, UNREADABLE);
    assert!(error.message.contains("`dreams`") && error.message.contains("turn"), "{error:?}");
    let page =
        Page { limit: 10, order: Order { key: Key::CreatedAt, descending: false }, after: None };
    let listed = f.store.task_list(ORG, &TaskFilter::default(), &page).await.expect("listed");
    assert_eq!(listed.iter().map(|task| task.state.id).collect::<Vec<_>>(), [task, whole]);
    assert_eq!((&listed[0], listed[1].phase()), (&found, Some(Phase::AwaitInput)));

    let intents = f.store.task_intents(task).await.expect("read").expect("there");
    assert!(f.store.task_quarantine(task, intents, "broken", now()).await.expect("written"));
    let retried = f
        .store
        .task_retry(&write(), task, rendered("task.updated"))
        .await
        .expect("it is asked for");
    assert_eq!(applied(retried).unreadable, ["phase", "turn"]);
    assert_eq!(f.store.task_quarantine_get(ORG, task).await.expect("read"), None);

    f.database
        .execute(&format!("UPDATE tasks SET phase = 'await_input' WHERE id = '{}'", task.uuid()))
        .await;
    f.database.corrupt_task(task, false).await;
    let found = f.store.task_get(ORG, task).await.expect("read");
    assert_eq!(
        (found.phase(), found.unreadable.len(), found.state.last_error),
        (Some(Phase::AwaitInput), 0, None)
    );
    assert!(f.store.task_load(task).await.expect("read").is_some());
}

//! Trees of tasks: created once, bounded, awaited by parents, canceled and deleted from the root,
//! and never over budget.

use construct_domain::{
    budget::{Period, Scope},
    subtask::{AwaitedCall, CallIds, Limits, Refusal},
    task::{Phase, Stage, Step, StepState, Task, Turn, TurnOutcome},
};
use futures::future::join_all;
use jiff::SignedDuration;

use super::*;
use crate::{
    BudgetFilter, CallReport, CallReservation, CostFilter, CostGroup, EndedMessage, Key,
    LoadedTask, NewSubtask, Order, Page, ScriptCaller, SubtaskEvents, SubtaskState, SubtaskStatus,
    TaskCommit, TaskFilter,
};

const LIMITS: Limits = Limits { depth: 5, children: 8, at_work: 11 };

const DOLLAR: i64 = 1_000_000_000_000;

const EVENTS: SubtaskEvents = SubtaskEvents {
    task: |_| event("task.created"),
    spawned: |_| event("subtask.spawned"),
    changed: |_| event("task.updated"),
    message: |_| event("message.created"),
};

async fn load(f: &Fixture, task: TaskId) -> LoadedTask {
    f.store.task_load(task).await.expect("read").expect("there")
}

fn in_flight(id: StepId) -> Step {
    let state = StepState::InFlight { deadline: now() + SignedDuration::from_mins(30) };
    Step { id, number: 1, attempt: 1, since: now(), round: 0, resumed: None, state }
}

/// Admits the queued message, and starts a script.
pub(super) async fn start_script(f: &Fixture, task: TaskId) -> ScriptCaller {
    let loaded = load(f, task).await;
    let step = step_id();
    let position = loaded.task.last_position + 1;
    let message = loaded.queued.expect("a message waits").message;
    let turn = Turn { calls: 1, ..Turn::new(message, Stage::Code { calls: vec!["a".to_owned()] }) };
    let state = Task {
        last_position: position,
        turn: Some(turn),
        step: Some(in_flight(step)),
        phase: Phase::ExecuteTools,
        next_wake: Some(now() + SignedDuration::from_mins(1)),
        ..loaded.task.clone()
    };
    let commit = TaskCommit {
        admitted: Some((message, position)),
        ..TaskCommit::new(&loaded, &state, now())
    };
    f.store.task_commit(commit).await.expect("committed");
    ScriptCaller { organization: ORG, task, step }
}

/// Ends the running turn.
async fn end_turn(f: &Fixture, task: TaskId) {
    let loaded = load(f, task).await;
    let message = loaded.task.turn.as_ref().expect("a turn runs").message;
    let state = Task {
        turn: None,
        step: None,
        phase: Phase::AwaitInput,
        next_wake: None,
        last_outcome: Some(TurnOutcome::Completed),
        ..loaded.task.clone()
    };
    let ended_message = Some(EndedMessage { message, error: None });
    f.store
        .task_commit(TaskCommit { ended_message, ..TaskCommit::new(&loaded, &state, now()) })
        .await
        .expect("committed");
}

/// A task with a running script.
async fn parent(f: &Fixture) -> ScriptCaller {
    let task = f.task().await;
    f.message(task, "go").await;
    start_script(f, task).await
}

async fn try_spawn(
    f: &Fixture,
    caller: ScriptCaller,
    number: u32,
    budget: Option<i64>,
) -> Result<TaskId, Refusal> {
    let ids = CallIds::for_call(caller.step, 0, number);
    let new = NewSubtask { ids, agent: None, content: text("work"), title: String::new(), budget };
    let spawned =
        f.store.subtask_spawn(caller, new, LIMITS, EVENTS, now()).await.expect("it can be asked");
    spawned.map(|change| change.task)
}

pub(super) async fn spawn(f: &Fixture, caller: ScriptCaller, number: u32) -> TaskId {
    try_spawn(f, caller, number, None).await.expect("it is begun")
}

async fn states(
    f: &Fixture,
    caller: ScriptCaller,
    which: &[TaskId],
) -> Result<Vec<SubtaskState>, Refusal> {
    f.store.subtasks(ORG, caller.task, which).await.expect("read")
}

/// Suspends the script until these tasks have ended.
async fn suspend_for(f: &Fixture, caller: ScriptCaller, tasks: Vec<TaskId>) {
    let loaded = load(f, caller.task).await;
    let until = now() + SignedDuration::from_hours(1);
    let awaits = vec![AwaitedCall { script: 0, number: 9, tasks, until }];
    let step = Step {
        state: StepState::Suspended { waits: Vec::new(), awaits, results: Vec::new() },
        ..loaded.task.step.clone().expect("it runs")
    };
    let state = Task {
        step: Some(step),
        phase: Phase::AwaitSubtasks,
        next_wake: Some(until),
        ..loaded.task.clone()
    };
    let committed =
        f.store.task_commit(TaskCommit::new(&loaded, &state, now())).await.expect("committed");
    assert_eq!(committed.cached_task, None, "it has to be looked at again");
}

async fn is_due(f: &Fixture, task: TaskId) -> bool {
    let due =
        f.store.sweep_due(now() + SignedDuration::from_secs(2), None, 100).await.expect("read");
    due.iter().any(|due| due.task == task)
}

#[tokio::test]
async fn repeated_spawn_call_creates_one_subtask() {
    let f = Fixture::new().await;
    let caller = parent(&f).await;
    let child = spawn(&f, caller, 1).await;
    let again = join_all((0..4).map(|_| spawn(&f, caller, 1))).await;
    assert!(again.iter().all(|task| *task == child), "{again:?}");
    let other = spawn(&f, caller, 2).await;
    assert_ne!(other, child);
    let stored = f.store.task_get(ORG, child).await.expect("there");
    assert_eq!((stored.ancestors.as_slice(), stored.queued_count), (&[caller.task][..], 1));
    let above = f.store.task_get(ORG, caller.task).await.expect("there");
    assert_eq!((above.subtasks.as_slice(), above.ancestors.len()), (&[child, other][..], 0));
    let filter = TaskFilter { parent: Some(caller.task), ..TaskFilter::default() };
    let page =
        Page { limit: 10, order: Order { key: Key::CreatedAt, descending: false }, after: None };
    let listed = f.store.task_list(ORG, &filter, &page).await.expect("listed");
    assert_eq!(listed.iter().map(|task| task.state.id).collect::<Vec<_>>(), [child, other]);
    // A subtask that was deleted and purged meanwhile is not created again.
    applied(f.store.task_delete(&write(), child, rendered("task.deleted")).await.expect("deleted"));
    assert_eq!(
        f.store.task_purge(child, deleted_event, now()).await.expect("purged"),
        Some(Vec::new())
    );
    assert_eq!(spawn(&f, caller, 1).await, child);
    assert!(f.store.task_load(child).await.expect("read").is_none());
    assert_eq!(
        states(&f, caller, &[child]).await.expect("known")[0].status,
        SubtaskStatus::Deleted
    );
}

#[tokio::test]
async fn only_a_running_script_spawns_and_messages_its_subtasks() {
    let f = Fixture::new().await;
    let caller = parent(&f).await;
    let child = spawn(&f, caller, 1).await;
    let stale = ScriptCaller { step: step_id(), ..caller };
    assert_eq!(try_spawn(&f, stale, 2, None).await, Err(Refusal::ScriptOver));
    let foreign = f.database.create_tenant("other").await;
    assert_eq!(
        try_spawn(&f, ScriptCaller { organization: foreign, ..caller }, 2, None).await,
        Err(Refusal::ScriptOver)
    );
    let send = async |to, id| {
        f.store.subtask_send(caller, to, id, text("more"), EVENTS, now()).await.expect("asked")
    };
    let id = message_id();
    for expected in [1, 0] {
        assert_eq!(send(child, id).await.expect("it is sent").events.len(), expected);
    }
    assert_eq!(f.store.task_get(ORG, child).await.expect("there").queued_count, 2);
    let stranger = f.task().await;
    assert_eq!(send(stranger, message_id()).await, Err(Refusal::NotASubtask(stranger.to_string())));
    assert_eq!(
        states(&f, caller, &[stranger]).await,
        Err(Refusal::NotASubtask(stranger.to_string()))
    );
    let tell = async |caller| {
        let content = |title: &str| text(&format!("from {title:?}"));
        f.store
            .subtask_message_parent(caller, message_id(), content, EVENTS, now())
            .await
            .expect("asked")
    };
    assert_eq!(tell(caller).await, Err(Refusal::NoParent));
    let below = start_script(&f, child).await;
    assert_eq!(tell(below).await.expect("it is told").task, caller.task);
    assert_eq!(f.store.task_get(ORG, caller.task).await.expect("there").queued_count, 1);
    // An unseen cancel suffices.
    f.store
        .task_cancel(&write(), caller.task, "enough", rendered("task.updated"))
        .await
        .expect("cancelled");
    assert_eq!(try_spawn(&f, caller, 2, None).await, Err(Refusal::ScriptOver));
}

#[tokio::test]
async fn task_tree_is_bounded_in_depth_and_width() {
    let f = Fixture::new().await;
    let root = parent(&f).await;
    let mut caller = root;
    for _ in 0..LIMITS.depth {
        let child = spawn(&f, caller, 1).await;
        caller = start_script(&f, child).await;
    }
    assert_eq!(load(&f, caller.task).await.root, root.task);
    assert_eq!(try_spawn(&f, caller, 1, None).await, Err(Refusal::TooDeep { limit: 5 }));
    // Five are active already; all calls are concurrent.
    let made = join_all((2..20).map(|number| try_spawn(&f, root, number, None))).await;
    assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 6, "{made:?}");
    let refused = Err(Refusal::TooManyAtWork { limit: 11 });
    assert!(made.iter().all(|made| made.is_ok() || *made == refused), "{made:?}");
    for child in f.store.task_get(ORG, root.task).await.expect("there").subtasks {
        if f.store.task_get(ORG, child).await.expect("there").state.turn.is_none() {
            start_script(&f, child).await;
        }
        end_turn(&f, child).await;
    }
    spawn(&f, root, 20).await;
    assert_eq!(try_spawn(&f, root, 21, None).await, Err(Refusal::TooMany { limit: 8 }));
}

#[tokio::test]
async fn waiting_parent_is_due_when_its_subtask_ends() {
    let f = Fixture::new().await;
    let caller = parent(&f).await;
    let child = spawn(&f, caller, 1).await;
    suspend_for(&f, caller, vec![child]).await;
    assert_eq!(load(&f, caller.task).await.task.subtasks, Some(vec![child]));
    start_script(&f, child).await;
    assert!(!is_due(&f, caller.task).await, "nothing has happened that it waits for");
    end_turn(&f, child).await;
    assert!(is_due(&f, caller.task).await);
    let loaded = load(&f, caller.task).await;
    assert_eq!(loaded.task.subtasks, Some(Vec::new()));
    // It ends again before its first end is marked as seen.
    f.message(child, "again").await;
    start_script(&f, child).await;
    end_turn(&f, child).await;
    f.store.subtasks_mark_seen(&loaded).await.expect("noted");
    assert!(is_due(&f, caller.task).await, "what has come since is not lost");
    f.store.subtasks_mark_seen(&load(&f, caller.task).await).await.expect("noted");
    assert!(!is_due(&f, caller.task).await);
    let state = states(&f, caller, &[child]).await.expect("known").remove(0);
    assert_eq!(state.status, SubtaskStatus::Ended(TurnOutcome::Completed));
}

#[tokio::test]
async fn subtask_cost_includes_its_descendants() {
    let f = Fixture::new().await;
    let root = parent(&f).await;
    let (first, second) = (spawn(&f, root, 1).await, spawn(&f, root, 2).await);
    let middle = start_script(&f, first).await;
    let below = start_script(&f, spawn(&f, middle, 1).await).await;
    let deepest = spawn(&f, below, 1).await;
    for (task, cost) in
        [(root.task, 1), (first, 10), (second, 100), (below.task, 1000), (deepest, 10_000)]
    {
        let paid = sqlx::query("UPDATE tasks SET cost_pico_usd = $2 WHERE id = $1")
            .bind(task.uuid())
            .bind(cost);
        paid.execute(&f.store.pool).await.expect("paid");
    }
    let costs = |states: Vec<SubtaskState>| -> Vec<(TaskId, i64)> {
        states.into_iter().map(|state| (state.task, state.cost_pico_usd)).collect()
    };
    let asked = states(&f, root, &[second, first, second]).await.expect("known");
    assert_eq!(costs(asked), [(second, 100), (first, 11_010), (second, 100)]);
    assert_eq!(
        costs(states(&f, middle, &[below.task]).await.expect("known")),
        [(below.task, 11_000)]
    );
    let page = async |after, limit| {
        costs(f.store.subtask_list(ORG, root.task, after, limit).await.expect("listed"))
    };
    assert_eq!(page(None, 10).await, [(first, 11_010), (second, 100)]);
    assert_eq!(page(None, 1).await, [(first, 11_010)]);
    assert_eq!(page(Some(first), 1).await, [(second, 100)]);
    assert_eq!(page(Some(second), 1).await, []);
}

#[tokio::test]
async fn wait_continues_while_a_subtask_is_at_work() {
    let f = Fixture::new().await;
    let caller = parent(&f).await;
    let (one, other) = (spawn(&f, caller, 1).await, spawn(&f, caller, 2).await);
    let waits = async |which: &[TaskId]| {
        f.store.subtasks_at_work(ORG, caller.task, which).await.expect("asked")
    };
    assert!(waits(&[one, other, one]).await);
    start_script(&f, one).await;
    end_turn(&f, one).await;
    assert!(!waits(&[one]).await && waits(&[one, other]).await);
    let stranger = f.task().await;
    assert!(!waits(&[other, stranger]).await, "that it is no subtask is said at once");
    applied(f.store.task_delete(&write(), other, rendered("task.deleted")).await.expect("deleted"));
    assert!(!waits(&[one, other]).await);
}

#[tokio::test]
async fn cancel_reaches_active_descendants() {
    let f = Fixture::new().await;
    let root = parent(&f).await;
    let (busy, idle) = (spawn(&f, root, 1).await, spawn(&f, root, 2).await);
    let idle_one = start_script(&f, idle).await;
    let below = spawn(&f, idle_one, 1).await;
    end_turn(&f, idle).await;
    let apart = parent(&f).await;
    let cancel = async || {
        f.store.subtasks_cancel(&load(&f, root.task).await, "enough", now()).await.expect("done")
    };
    let mut cancelled = cancel().await;
    cancelled.sort();
    let mut expected = vec![busy, below];
    expected.sort();
    assert_eq!(cancelled, expected, "what is at rest stays, what lies below it does not");
    assert_eq!(load(&f, busy).await.task.cancel.as_deref(), Some("enough"));
    assert_eq!(load(&f, apart.task).await.task.cancel, None);
    assert!(cancel().await.is_empty(), "once");
    assert!(is_due(&f, below).await);
}

#[tokio::test]
async fn deleted_task_deletes_descendants_level_by_level() {
    let f = Fixture::new().await;
    let root = parent(&f).await;
    let child = spawn(&f, root, 1).await;
    let below = start_script(&f, child).await;
    let grandchild = spawn(&f, below, 1).await;
    applied(
        f.store.task_delete(&write(), root.task, rendered("task.deleted")).await.expect("deleted"),
    );
    assert_eq!(
        f.store.task_purge(root.task, deleted_event, now()).await.expect("purged"),
        Some(vec![child])
    );
    assert!(load(&f, child).await.deleted && !load(&f, grandchild).await.deleted);
    assert_eq!(
        f.store.task_purge(child, deleted_event, now()).await.expect("purged"),
        Some(vec![grandchild])
    );
    assert_eq!(
        f.store.task_purge(grandchild, deleted_event, now()).await.expect("purged"),
        Some(Vec::new())
    );
    let mut left = f.store.tasks_purged(&[root.task, child, grandchild]).await.expect("asked");
    left.sort();
    let mut all = vec![root.task, child, grandchild];
    all.sort();
    assert_eq!(left, all);
}

#[tokio::test]
async fn concurrent_subtasks_exceed_neither_tree_nor_own_budget() {
    let f = Fixture::new().await;
    let root = parent(&f).await;
    let new = crate::NewBudget {
        id: construct_domain::BudgetId::from_uuid(Uuid::now_v7()),
        scope: Scope::Task(root.task),
        period: Period::Total,
        limit: 10 * DOLLAR,
    };
    applied(
        f.store.budget_create(&write(), new, rendered("budget.created")).await.expect("created"),
    );
    let bounded = try_spawn(&f, root, 1, Some(3 * DOLLAR)).await.expect("begun");
    let free = spawn(&f, root, 2).await;
    let below = spawn(&f, start_script(&f, bounded).await, 1).await;
    let call = |task| CallReservation {
        id: Uuid::now_v7(),
        organization: ORG,
        task: Some(task),
        token: None,
        amount_pico_usd: DOLLAR,
        expires_at: now() + SignedDuration::from_mins(5),
    };
    // The subtask with a budget and its descendants have three together.
    let calls: Vec<_> = (0..20).map(|n| call(if n % 2 == 0 { bounded } else { below })).collect();
    let made = join_all(calls.iter().map(|call| f.store.call_reserve(call, now()))).await;
    let reserved: Vec<_> =
        calls.iter().zip(&made).filter(|(_, made)| made.is_ok()).map(|(call, _)| call).collect();
    assert_eq!(reserved.len(), 3, "{made:?}");
    // The whole tree has ten.
    let calls: Vec<_> = (0..20).map(|n| call(if n % 2 == 0 { free } else { root.task })).collect();
    let made = join_all(calls.iter().map(|call| f.store.call_reserve(call, now()))).await;
    assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 7, "{made:?}");
    for call in reserved {
        let report = CallReport {
            id: Uuid::now_v7(),
            reservation: Some(call.id),
            organization: ORG,
            task: call.task,
            key: None,
            model: f.model,
            purpose: "llm.ask".into(),
            usage: Usage { input_tokens: 1, cost_pico_usd: DOLLAR / 2, ..Usage::default() },
        };
        assert!(f.store.call_book(&report, now()).await.expect("booked"));
    }
    let sums = async |task| {
        let filter = BudgetFilter { task: Some(task), agent: None };
        let page = Page {
            limit: 10,
            order: Order { key: Key::CreatedAt, descending: false },
            after: None,
        };
        let budgets = f.store.budget_list(ORG, &filter, &page, now()).await.expect("listed");
        (budgets[0].spent, budgets[0].reserved)
    };
    assert_eq!(sums(bounded).await, (3 * DOLLAR / 2, 0));
    assert_eq!(sums(root.task).await, (3 * DOLLAR / 2, 7 * DOLLAR));
    // A recount from the ledger gives the same.
    sqlx::query("SELECT budgets_count(id, now()) FROM budgets")
        .execute(&f.store.pool)
        .await
        .expect("counted");
    assert_eq!(sums(bounded).await, (3 * DOLLAR / 2, 0));
    assert_eq!(sums(root.task).await, (3 * DOLLAR / 2, 7 * DOLLAR));
    let state = states(&f, root, &[bounded]).await.expect("known").remove(0);
    assert_eq!(state.cost_pico_usd, 3 * DOLLAR / 2, "with what is below it");
    let ledger = async |task| {
        let filter = CostFilter { task: Some(task), ..CostFilter::default() };
        let rows = f.store.cost_list(ORG, &filter, CostGroup::All, 1).await.expect("listed");
        rows.first().map_or(0, |row| row.usage.cost_pico_usd)
    };
    assert_eq!((ledger(root.task).await, ledger(bounded).await), (3 * DOLLAR / 2, 3 * DOLLAR / 2));
    assert_eq!(ledger(free).await, 0);
    applied(
        f.store.task_delete(&write(), bounded, rendered("task.deleted")).await.expect("deleted"),
    );
    f.store.task_purge(bounded, deleted_event, now()).await.expect("purged");
    assert_eq!(ledger(bounded).await, 3 * DOLLAR / 2, "what is gone has spent nevertheless");
}

#[tokio::test]
async fn script_hands_off_its_task_to_another_agent() {
    let f = Fixture::new().await;
    let caller = parent(&f).await;
    let new = new_agent(f.model, "other");
    let other = applied(
        f.store.agent_create(&write(), new, rendered("agent.created")).await.expect("created"),
    )
    .id;
    for events in [1, 0] {
        let change = f
            .store
            .task_hand_off(caller, other, EVENTS, now())
            .await
            .expect("asked")
            .expect("done");
        assert_eq!(change.events.len(), events);
    }
    let loaded = load(&f, caller.task).await;
    assert!(loaded.task.agent == other && loaded.has_new_intents());
    let stale = ScriptCaller { step: step_id(), ..caller };
    assert_eq!(
        f.store.task_hand_off(stale, f.agent, EVENTS, now()).await.expect("asked"),
        Err(Refusal::ScriptOver)
    );
}

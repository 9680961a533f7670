//! Reservations, settlements and sums: concurrent calls never exceed a budget.

use construct_domain::{
    BudgetId,
    budget::{ExhaustedBudget, Period, Scope},
    task::{Phase, Stage, Step, StepState, Task, Turn},
};
use futures::future::join_all;
use jiff::SignedDuration;

use super::*;
use crate::{
    Budget, BudgetFilter, CallReport, CallReservation, CleanupReport, CostFilter, CostGroup, Key,
    LoadedTask, NewBudget, Order, Page, Purpose, StepReservation, StepUsage, TaskCommit,
};

const DOLLAR: i64 = 1_000_000_000_000;

async fn budget(f: &Fixture, scope: Scope, period: Period, limit: i64) -> Budget {
    budget_at(f, scope, period, limit, now()).await
}

async fn budget_at(f: &Fixture, scope: Scope, period: Period, limit: i64, at: Timestamp) -> Budget {
    let new = NewBudget { id: BudgetId::from_uuid(Uuid::now_v7()), scope, period, limit };
    let write = Write { now: at, ..write() };
    applied(f.store.budget_create(&write, new, rendered("budget.created")).await.expect("created"))
}

async fn spent_and_reserved(f: &Fixture, budget: &Budget) -> (i64, i64) {
    spent_and_reserved_at(f, budget, now()).await
}

/// The spent and the reserved money.
async fn spent_and_reserved_at(f: &Fixture, budget: &Budget, at: Timestamp) -> (i64, i64) {
    let budget = f.store.budget_get(ORG, budget.id, at).await.expect("got");
    (budget.spent, budget.reserved)
}

fn call(task: Option<TaskId>, amount: i64) -> CallReservation {
    CallReservation {
        id: Uuid::now_v7(),
        organization: ORG,
        task,
        token: None,
        amount_pico_usd: amount,
        expires_at: now() + SignedDuration::from_mins(5),
    }
}

fn report(f: &Fixture, reservation: &CallReservation, cost: i64) -> CallReport {
    CallReport {
        id: Uuid::now_v7(),
        reservation: Some(reservation.id),
        organization: ORG,
        task: reservation.task,
        key: None,
        model: f.model,
        purpose: "llm.ask".into(),
        usage: Usage { input_tokens: 1, cost_pico_usd: cost, ..Usage::default() },
    }
}

fn expect_exhausted(result: Result<impl std::fmt::Debug, Error>) -> ExhaustedBudget {
    match result {
        Err(Error::Exhausted(exhausted)) => *exhausted,
        other => panic!("it is not refused: {other:?}"),
    }
}

/// A task with a step that is about to start, the new state, and its reservation.
async fn step_about_to_start(f: &Fixture, task: TaskId) -> (LoadedTask, Task, StepReservation) {
    let loaded = f.store.task_load(task).await.expect("read").expect("there");
    let mut state = loaded.task.clone();
    state.steps += 1;
    state.phase = Phase::InvokeModel;
    state.turn = Some(Turn { calls: 1, ..Turn::new(message_id(), Stage::Model) });
    let deadline = now() + SignedDuration::from_mins(10);
    let step = step_id();
    state.step = Some(Step {
        id: step,
        number: state.steps,
        attempt: 1,
        since: now(),
        round: 0,
        resumed: None,
        state: StepState::InFlight { deadline },
    });
    (loaded, state, StepReservation { step, amount_pico_usd: DOLLAR, expires_at: deadline })
}

#[tokio::test]
async fn concurrent_call_reservations_never_exceed_the_budget() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let organization = budget(&f, Scope::Organization, Period::Month, 20 * DOLLAR).await;
    let own = budget(&f, Scope::Task(task), Period::Total, 10 * DOLLAR).await;
    let agents = budget(&f, Scope::Agent(f.agent), Period::Day, 11 * DOLLAR).await;
    let calls: Vec<CallReservation> = (0..50).map(|_| call(Some(task), DOLLAR)).collect();
    let results = join_all(calls.iter().map(|call| f.store.call_reserve(call, now()))).await;
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 10, "{results:?}");
    for result in results.into_iter().filter(Result::is_err) {
        let exhausted = expect_exhausted(result);
        assert_eq!(
            (exhausted.scope, exhausted.reserved, exhausted.needed),
            (Scope::Task(task), 10 * DOLLAR, DOLLAR)
        );
    }
    for budget in [&organization, &own, &agents] {
        assert_eq!(
            spent_and_reserved(&f, budget).await,
            (0, 10 * DOLLAR),
            "all of them count, or none: {:?}",
            budget.scope
        );
    }
}

#[tokio::test]
async fn concurrent_step_reservations_never_exceed_the_budget() {
    let f = Fixture::new().await;
    let total = budget(&f, Scope::Organization, Period::Total, 10 * DOLLAR).await;
    let mut begun = Vec::new();
    for _ in 0..25 {
        let task = f.task().await;
        begun.push(step_about_to_start(&f, task).await);
    }
    let commits = begun.iter().map(|(loaded, state, reservation)| {
        let commit = TaskCommit {
            reservation: Some(reservation.clone()),
            events: vec![event("task.phase_changed")],
            ..TaskCommit::new(loaded, state, now())
        };
        f.store.task_commit(commit)
    });
    let results = join_all(commits).await;
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 10, "{results:?}");
    assert_eq!(spent_and_reserved(&f, &total).await, (0, 10 * DOLLAR));
    for (result, (before, state, _)) in results.into_iter().zip(&begun) {
        let after = f.store.task_load(before.task.id).await.expect("read").expect("there");
        match result {
            Ok(_) => assert_eq!(
                after.task.step.map(|step| step.id),
                state.step.as_ref().map(|step| step.id)
            ),
            Err(error) => {
                assert_eq!(expect_exhausted(Err::<(), _>(error)).scope, Scope::Organization);
                assert_eq!(
                    (after.version, after.event_sequence),
                    (before.version, 1),
                    "nothing of it is written"
                );
            }
        }
    }
}

#[tokio::test]
async fn losing_commit_reserves_nothing() {
    let f = Fixture::new().await;
    let total = budget(&f, Scope::Organization, Period::Total, 10 * DOLLAR).await;
    let task = f.task().await;
    let (loaded, state, reservation) = step_about_to_start(&f, task).await;
    let commit = || TaskCommit {
        reservation: Some(reservation.clone()),
        ..TaskCommit::new(&loaded, &state, now())
    };
    f.store.task_commit(commit()).await.expect("committed");
    assert!(matches!(f.store.task_commit(commit()).await, Err(Error::Conflict)));
    assert_eq!(spent_and_reserved(&f, &total).await, (0, DOLLAR));
}

#[tokio::test]
async fn step_cost_replaces_its_reservation_in_the_same_commit() {
    let f = Fixture::new().await;
    let total = budget(&f, Scope::Organization, Period::Total, DOLLAR).await;
    let task = f.task().await;
    let (loaded, state, reservation) = step_about_to_start(&f, task).await;
    let spending = loaded.cost_inputs.clone().expect("a budget applies");
    assert_eq!(
        (spending.targets.len(), spending.transcript_tokens, spending.instructions_bytes),
        (1, 0, 7)
    );
    assert_eq!(spending.targets[0].prices, new_model(f.provider, "m").prices);
    assert!(!spending.has_reported_cost);
    let step = reservation.step;
    let commit =
        TaskCommit { reservation: Some(reservation), ..TaskCommit::new(&loaded, &state, now()) };
    f.store.task_commit(commit).await.expect("committed");

    // The next step starts in the commit that books the previous one.
    let (loaded, state, mut next) = step_about_to_start(&f, task).await;
    let usage = Usage { input_tokens: 1, cost_pico_usd: DOLLAR / 4, ..Usage::default() };
    next.amount_pico_usd = DOLLAR * 3 / 4;
    let commit = || TaskCommit {
        usage: vec![StepUsage {
            call: Uuid::now_v7(),
            step,
            model: f.model,
            purpose: Purpose::Turn,
            usage,
        }],
        settled_step: Some(step),
        reservation: Some(next.clone()),
        ..TaskCommit::new(&loaded, &state, now())
    };
    f.store.task_commit(commit()).await.expect("committed");
    assert_eq!(spent_and_reserved(&f, &total).await, (DOLLAR / 4, DOLLAR * 3 / 4));
    assert_eq!(f.store.task_get(ORG, task).await.expect("got").usage, usage);

    // A step that failed before the vendor call costs nothing. An abandoned step is booked late.
    let (loaded, state, last) = step_about_to_start(&f, task).await;
    let exhausted = expect_exhausted(
        f.store
            .task_commit(TaskCommit {
                reservation: Some(last.clone()),
                ..TaskCommit::new(&loaded, &state, now())
            })
            .await,
    );
    assert_eq!(
        (exhausted.limit, exhausted.spent, exhausted.reserved, exhausted.needed),
        (DOLLAR, DOLLAR / 4, DOLLAR * 3 / 4, DOLLAR)
    );
    f.store.step_release(ORG, next.step, now()).await.expect("released");
    assert_eq!(spent_and_reserved(&f, &total).await, (DOLLAR / 4, 0));
    let late = StepUsage {
        call: Uuid::now_v7(),
        step: step_id(),
        model: f.model,
        purpose: Purpose::Turn,
        usage,
    };
    for first in [true, false] {
        let booked =
            f.store.step_usage_record(ORG, task, Some(f.agent), &late, now()).await.expect("asked");
        assert_eq!(booked, first);
        assert_eq!(
            spent_and_reserved(&f, &total).await,
            (DOLLAR / 2, 0),
            "once, however often it is told"
        );
    }
    // Another worker had the same command, and made its own call.
    let second = StepUsage { call: Uuid::now_v7(), ..late.clone() };
    for first in [true, false] {
        let booked = f
            .store
            .step_usage_record(ORG, task, Some(f.agent), &second, now())
            .await
            .expect("asked");
        assert_eq!(booked, first);
        assert_eq!(spent_and_reserved(&f, &total).await, (DOLLAR * 3 / 4, 0), "each delivery once");
    }
    assert_eq!(f.store.task_get(ORG, task).await.expect("got").usage.cost_pico_usd, DOLLAR * 3 / 4);
}

#[tokio::test]
async fn cost_of_a_purged_task_is_booked_to_the_reserving_scopes() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let agents = budget(&f, Scope::Agent(f.agent), Period::Total, 5 * DOLLAR).await;
    let (loaded, state, reservation) = step_about_to_start(&f, task).await;
    let step = reservation.step;
    let commit =
        TaskCommit { reservation: Some(reservation), ..TaskCommit::new(&loaded, &state, now()) };
    f.store.task_commit(commit).await.expect("committed");
    applied(f.store.task_delete(&write(), task, rendered("task.deleted")).await.expect("deleted"));
    assert!(f.store.task_purge(task, deleted_event, now()).await.expect("purged").is_some());
    let usage = Usage { output_tokens: 1, cost_pico_usd: DOLLAR, ..Usage::default() };
    let entry =
        StepUsage { call: Uuid::now_v7(), step, model: f.model, purpose: Purpose::Turn, usage };
    assert!(f.store.step_usage_record(ORG, task, None, &entry, now()).await.expect("booked"));
    assert_eq!(spent_and_reserved(&f, &agents).await, (DOLLAR, 0));
    let rows =
        f.store.cost_list(ORG, &CostFilter::default(), CostGroup::Agent, 10).await.expect("listed");
    assert_eq!(
        (rows.len(), rows[0].key.as_str(), rows[0].name.as_str()),
        (1, f.agent.to_string().as_str(), "a")
    );
}

#[tokio::test]
async fn expired_reservation_counts_as_spent_until_a_late_report() {
    let f = Fixture::new().await;
    let total = budget(&f, Scope::Organization, Period::Total, 10 * DOLLAR).await;
    let lost = call(None, 4 * DOLLAR);
    f.store.call_reserve(&lost, now()).await.expect("reserved");
    f.store.call_reserve(&lost, now()).await.expect("the same again");
    assert_eq!(spent_and_reserved(&f, &total).await, (0, 4 * DOLLAR));

    let later = now() + SignedDuration::from_mins(6);
    let tidied = f.store.budgets_cleanup(later).await.expect("tidied");
    assert_eq!(tidied, CleanupReport { expired: 1, recounted: 1 });
    assert_eq!(spent_and_reserved(&f, &total).await, (4 * DOLLAR, 0));
    let report = report(&f, &lost, DOLLAR);
    for first in [true, false] {
        assert_eq!(f.store.call_book(&report, later).await.expect("asked"), first);
        assert_eq!(
            spent_and_reserved(&f, &total).await,
            (DOLLAR, 0),
            "once, however often it is told"
        );
    }
    assert_eq!(
        f.store.budgets_cleanup(later).await.expect("tidied"),
        CleanupReport::default(),
        "there is nothing left to do"
    );
}

#[tokio::test]
async fn abandoned_step_releases_its_reservation_after_grace_period() {
    let f = Fixture::new().await;
    let total = budget(&f, Scope::Organization, Period::Total, 10 * DOLLAR).await;
    let task = f.task().await;
    let (loaded, state, reservation) = step_about_to_start(&f, task).await;
    let step = reservation.step;
    let commit =
        TaskCommit { reservation: Some(reservation), ..TaskCommit::new(&loaded, &state, now()) };
    f.store.task_commit(commit).await.expect("committed");
    f.store.step_abandon(step, now() + SignedDuration::from_mins(1)).await.expect("noted");
    assert_eq!(f.store.budgets_cleanup(now()).await.expect("tidied").expired, 0);
    assert_eq!(spent_and_reserved(&f, &total).await, (0, DOLLAR));
    f.store.budgets_cleanup(now() + SignedDuration::from_mins(2)).await.expect("tidied");
    assert_eq!(spent_and_reserved(&f, &total).await, (0, 0));
}

#[tokio::test]
async fn token_budget_is_never_exceeded() {
    let f = Fixture::new().await;
    let token =
        |amount| CallReservation { token: Some(("tok".into(), 3 * DOLLAR)), ..call(None, amount) };
    let first = token(2 * DOLLAR);
    f.store.call_reserve(&first, now()).await.expect("reserved");
    let exhausted = expect_exhausted(f.store.call_reserve(&token(2 * DOLLAR), now()).await);
    assert_eq!(exhausted.scope, Scope::Token("tok".into()));
    assert!(f.store.call_book(&report(&f, &first, DOLLAR), now()).await.expect("booked"));
    f.store
        .call_reserve(&token(2 * DOLLAR), now())
        .await
        .expect("a dollar is spent, two are there");
    // A further report of a settled reservation still counts for its token.
    assert!(f.store.call_book(&report(&f, &first, DOLLAR), now()).await.expect("booked"));
    let page =
        Page { limit: 10, order: Order { key: Key::CreatedAt, descending: false }, after: None };
    let budgets =
        f.store.budget_list(ORG, &BudgetFilter::default(), &page, now()).await.expect("listed");
    assert_eq!(budgets.len(), 1);
    assert_eq!((budgets[0].spent, budgets[0].reserved), (2 * DOLLAR, 2 * DOLLAR));
}

#[tokio::test]
async fn call_budget_refuses_expensive_calls_and_sums_nothing() {
    let f = Fixture::new().await;
    let single = budget(&f, Scope::Agent(f.agent), Period::Call, DOLLAR).await;
    let task = f.task().await;
    for _ in 0..3 {
        f.store.call_reserve(&call(Some(task), DOLLAR), now()).await.expect("reserved");
    }
    assert_eq!(
        expect_exhausted(f.store.call_reserve(&call(Some(task), DOLLAR + 1), now()).await).period,
        Period::Call
    );
    f.store.call_reserve(&call(None, 5 * DOLLAR), now()).await.expect("it is somebody else's");
    assert_eq!(spent_and_reserved(&f, &single).await, (0, 0));
}

#[tokio::test]
async fn new_budget_period_carries_over_open_reservations() {
    let f = Fixture::new().await;
    let at = |text: &str| text.parse::<Timestamp>().expect("a time");
    let november = at("2026-11-30T23:59:00Z");
    let month =
        budget_at(&f, Scope::Organization, Period::Month, 3 * DOLLAR, at("2026-11-02T00:00:00Z"))
            .await;
    assert_eq!(month.since, Some(at("2026-11-01T00:00:00Z")));
    let (spent, open) = (call(None, DOLLAR), call(None, DOLLAR));
    f.store.call_reserve(&spent, november).await.expect("reserved");
    f.store.call_reserve(&open, november).await.expect("reserved");
    assert!(f.store.call_book(&report(&f, &spent, 2 * DOLLAR), november).await.expect("booked"));
    assert_eq!(spent_and_reserved_at(&f, &month, november).await, (2 * DOLLAR, DOLLAR));
    let december = at("2026-12-01T00:00:01Z");
    assert_eq!(spent_and_reserved_at(&f, &month, december).await, (0, DOLLAR));
    let exhausted =
        expect_exhausted(f.store.call_reserve(&call(None, 2 * DOLLAR + 1), december).await);
    assert_eq!((exhausted.spent, exhausted.reserved), (0, DOLLAR));
    assert!(f.store.call_book(&report(&f, &open, DOLLAR), december).await.expect("booked"));
    assert_eq!(spent_and_reserved_at(&f, &month, december).await, (DOLLAR, 0));
    // A replica with a slow clock does not bring the old month back.
    f.store.call_reserve(&call(None, DOLLAR), november).await.expect("reserved");
    assert_eq!(spent_and_reserved_at(&f, &month, december).await, (DOLLAR, DOLLAR));
}

#[tokio::test]
async fn new_budget_counts_earlier_and_concurrent_spending() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let usage = Usage { cost_pico_usd: DOLLAR, ..Usage::default() };
    let entry = |cost| StepUsage {
        call: Uuid::now_v7(),
        step: step_id(),
        model: f.model,
        purpose: Purpose::Turn,
        usage: Usage { cost_pico_usd: cost, ..usage },
    };
    f.store
        .step_usage_record(ORG, task, Some(f.agent), &entry(DOLLAR), now())
        .await
        .expect("booked");
    let mut budgets = Vec::new();
    for scope in [Scope::Organization, Scope::Agent(f.agent), Scope::Task(task)] {
        budgets.push(budget(&f, scope, Period::Total, 5 * DOLLAR).await);
    }
    assert!(budgets.iter().all(|budget| budget.spent == DOLLAR), "{budgets:?}");
    // Like a booking whose statement began before the budget existed.
    sqlx::query("UPDATE budgets SET spent_pico_usd = 0")
        .execute(&f.store.pool)
        .await
        .expect("forgotten");
    assert_eq!(f.store.budgets_cleanup(now()).await.expect("tidied").recounted, 0, "too early");
    let later = now() + SignedDuration::from_mins(1);
    assert_eq!(f.store.budgets_cleanup(later).await.expect("tidied").recounted, 3);
    for budget in &budgets {
        assert_eq!(spent_and_reserved(&f, budget).await, (DOLLAR, 0));
    }
    assert_eq!(
        f.store.budgets_cleanup(later).await.expect("tidied").recounted,
        0,
        "once is enough"
    );
}

#[tokio::test]
async fn budget_is_unique_per_scope_and_period_and_limit_is_mutable() {
    let f = Fixture::new().await;
    let first = budget(&f, Scope::Organization, Period::Month, DOLLAR).await;
    budget(&f, Scope::Organization, Period::Total, DOLLAR).await;
    let again = NewBudget {
        id: BudgetId::from_uuid(Uuid::now_v7()),
        scope: Scope::Organization,
        period: Period::Month,
        limit: DOLLAR,
    };
    let result = f.store.budget_create(&write(), again, rendered("budget.created")).await;
    assert!(matches!(result, Err(Error::AlreadyExists { what: "budget", .. })), "{result:?}");
    expect_exhausted(f.store.call_reserve(&call(None, 2 * DOLLAR), now()).await);
    let changed = f
        .store
        .budget_update(&write(), first.id, Some(1), 3 * DOLLAR, rendered("budget.updated"))
        .await;
    assert_eq!(applied(changed.expect("changed")).limit, 3 * DOLLAR);
    let late = f
        .store
        .budget_update(&write(), first.id, Some(1), DOLLAR, rendered("budget.updated"))
        .await;
    assert!(matches!(late, Err(Error::Conflict)), "{late:?}");
    let other = Write { organization: other_organization(&f.store).await, ..write() };
    assert_not_found(f.store.budget_delete(&other, first.id, rendered("budget.deleted")).await);
    assert_not_found(f.store.budget_get(other.organization, first.id, now()).await);
    let page =
        Page { limit: 10, order: Order { key: Key::CreatedAt, descending: true }, after: None };
    let filter = BudgetFilter { agent: Some(f.agent), task: None };
    assert_eq!(f.store.budget_list(ORG, &filter, &page, now()).await.expect("listed"), []);
    let missing = NewBudget {
        id: BudgetId::from_uuid(Uuid::now_v7()),
        scope: Scope::Agent(AgentId::from_uuid(Uuid::nil())),
        period: Period::Day,
        limit: 1,
    };
    assert_not_found(f.store.budget_create(&write(), missing, rendered("budget.created")).await);
    applied(
        f.store
            .budget_delete(&write(), first.id, rendered("budget.deleted"))
            .await
            .expect("deleted"),
    );
    assert_not_found(f.store.budget_get(ORG, first.id, now()).await);
}

#[tokio::test]
async fn costs_are_summed_by_every_group_and_filter() {
    let f = Fixture::new().await;
    let (one, two) = (f.task().await, f.task().await);
    let at = |text: &str| text.parse::<Timestamp>().expect("a time");
    let entry = |cost, purpose| StepUsage {
        call: Uuid::now_v7(),
        step: step_id(),
        model: f.model,
        purpose,
        usage: Usage {
            output_tokens: 2,
            thinking_tokens: 1,
            cost_pico_usd: cost,
            ..Usage::default()
        },
    };
    let day = at("2026-11-20T12:00:00Z");
    for (task, cost, purpose, time) in [
        (one, 1, Purpose::Turn, day),
        (one, 2, Purpose::Title, day + SignedDuration::from_hours(24)),
        (two, 4, Purpose::Turn, day + SignedDuration::from_hours(24)),
    ] {
        let booked =
            f.store.step_usage_record(ORG, task, Some(f.agent), &entry(cost, purpose), time).await;
        assert!(booked.expect("booked"));
    }
    let list = async |filter: CostFilter, group| -> Vec<(String, i64, i64)> {
        let rows = f.store.cost_list(ORG, &filter, group, 10).await.expect("listed");
        rows.into_iter().map(|row| (row.key, row.calls, row.usage.cost_pico_usd)).collect()
    };
    let all = CostFilter::default();
    assert_eq!(list(all.clone(), CostGroup::All).await, [(String::new(), 3, 7)]);
    assert_eq!(
        list(all.clone(), CostGroup::Task).await,
        [(two.to_string(), 1, 4), (one.to_string(), 2, 3)]
    );
    assert_eq!(
        list(all.clone(), CostGroup::Day).await,
        [("2026-11-20".into(), 1, 1), ("2026-11-21".into(), 2, 6)]
    );
    assert_eq!(
        list(all.clone(), CostGroup::Purpose).await,
        [("turn".into(), 2, 5), ("title".into(), 1, 2)]
    );
    assert_eq!(list(all.clone(), CostGroup::Model).await, [(f.model.to_string(), 3, 7)]);
    let recent =
        CostFilter { task: Some(one), since: Some(at("2026-11-21T00:00:00Z")), ..all.clone() };
    assert_eq!(list(recent, CostGroup::Agent).await, [(f.agent.to_string(), 1, 2)]);
    let before = CostFilter { until: Some(day), ..all.clone() };
    assert_eq!(list(before, CostGroup::All).await, []);
    let rows = f.store.cost_list(ORG, &all, CostGroup::All, 10).await.expect("listed");
    assert_eq!((rows[0].usage.output_tokens, rows[0].usage.thinking_tokens), (6, 3));
    let other = other_organization(&f.store).await;
    assert_eq!(f.store.cost_list(other, &all, CostGroup::All, 10).await.expect("listed"), []);
}

#[tokio::test]
async fn transcript_tokens_are_maintained_by_writes() {
    let f = Fixture::new().await;
    budget(&f, Scope::Organization, Period::Total, DOLLAR).await;
    let task = f.task().await;
    let message = f.message(task, "a question of some length").await;
    let loaded = f.store.task_load(task).await.expect("read").expect("there");
    let words = construct_domain::money::tokens_of_content(&message.content);
    let spending = loaded.cost_inputs.clone().expect("a budget applies");
    assert_eq!((spending.transcript_tokens, spending.queued_tokens), (0, words));
    let mut state = loaded.task.clone();
    state.last_position += 2;
    let content = text("an answer");
    let commit = TaskCommit {
        admitted: Some((message.id, 1)),
        appended: vec![crate::AppendedMessage {
            id: message_id(),
            position: 2,
            source: construct_domain::message::Source::Assistant,
            content: content.clone(),
            agent: Some(f.agent),
            usage: Usage::default(),
            step: None,
        }],
        ..TaskCommit::new(&loaded, &state, now())
    };
    f.store.task_commit(commit).await.expect("committed");
    let loaded = f.store.task_load(task).await.expect("read").expect("there");
    let spending = loaded.cost_inputs.expect("a budget applies");
    let answer = construct_domain::money::tokens_of_content(&content);
    assert_eq!((spending.transcript_tokens, spending.queued_tokens), (words + answer, 0));
}

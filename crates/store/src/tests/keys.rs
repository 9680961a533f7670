//! Limits of API keys, and what counts for which key.

use std::collections::BTreeMap;

use construct_domain::{
    ApiKeyId, ScanId, ScheduleId, UserId,
    access::{Role, Scope},
    schedule::{MissedRunPolicy, Timing},
    state::VERSIONS_KEPT,
};
use jiff::SignedDuration;

use super::{
    files::file,
    scans::new as new_scan,
    subtasks::{spawn, start_script},
    usage::{periods_around, spent, turn},
    *,
};
use crate::{
    CallReport, CountSelection, Counts, Dimensions, Limits, NewFork, NewSchedule, Periods, Purpose,
    RunEvents, ScheduleChanges, ScheduleTarget, StateContent, StateRef, StepUsage, UsageFilter,
    UsagePage, UsageTotals,
    identity::{ApiKey, NewApiKey, SecretHash},
    scan::NewScan,
};

const SETTINGS: StateRef<'static> = StateRef { owner: None, name: "settings" };

const EVENTS: RunEvents =
    RunEvents { task: |_| event("task.created"), message: |_| event("message.created") };

fn key() -> ApiKeyId {
    ApiKeyId::from_uuid(Uuid::now_v7())
}

fn write_with(key: ApiKeyId) -> Write {
    Write { key: Some(key), ..write() }
}

async fn create_task(f: &Fixture, write: &Write) -> TaskId {
    let made = f.store.task_create(write, new_task(f.agent), rendered("task.created")).await;
    applied(made.expect("created")).state.id
}

async fn send_message(f: &Fixture, write: &Write, task: TaskId) -> MessageId {
    let new = NewUserMessage { id: message_id(), task, content: text("go"), interrupts: false };
    applied(
        f.store.message_create(write, new, rendered("message.created")).await.expect("accepted"),
    )
    .id
}

async fn counts(f: &Fixture, periods: &Periods) -> BTreeMap<ApiKeyId, Counts> {
    let counts =
        f.store.quota_key_counts(ORG, CountSelection::ALL, periods).await.expect("counted");
    counts.into_iter().collect()
}

fn new_counts(tasks: i64, runs: i64, tokens: i64, spend_pico_usd: i64) -> Counts {
    Counts { tasks, runs, tokens, spend_pico_usd, storage_bytes: 0 }
}

#[tokio::test]
async fn tasks_count_for_their_creator_and_work_for_the_last_sender() {
    let f = Fixture::new().await;
    let (now, a, b) = (now(), key(), key());
    let periods = periods_around(now);
    let task = create_task(&f, &write_with(a)).await;
    send_message(&f, &write_with(b), task).await;
    turn(&f, task, &[("fetch", true)], spent(10, 100), now).await;
    assert_eq!(
        counts(&f, &periods).await,
        BTreeMap::from([(a, new_counts(1, 0, 0, 0)), (b, new_counts(0, 1, 10, 100))])
    );
    // A late result, and the usage of a token of the task's own scripts.
    let late = StepUsage {
        call: Uuid::now_v7(),
        step: step_id(),
        model: f.model,
        purpose: Purpose::Title,
        usage: spent(1, 1),
    };
    f.store.step_usage_record(ORG, task, None, &late, now).await.expect("booked");
    let report = |key, task| CallReport {
        id: Uuid::now_v7(),
        reservation: None,
        organization: ORG,
        task,
        key,
        model: f.model,
        purpose: "llm.ask".into(),
        usage: spent(2, 2),
    };
    f.store.call_book(&report(None, Some(task)), now).await.expect("booked");
    assert_eq!(counts(&f, &periods).await[&b], new_counts(0, 1, 13, 103));
    // A token that was created with a key counts for that key, also for a task of another key.
    f.store.call_book(&report(Some(a), Some(task)), now).await.expect("booked");
    f.store.call_book(&report(Some(a), None), now).await.expect("booked");
    assert_eq!(counts(&f, &periods).await[&a], new_counts(1, 0, 4, 4));
    // Calls without a key count for none.
    f.message(task, "and now?").await;
    turn(&f, task, &[], spent(1000, 1000), now).await;
    let unchanged = counts(&f, &periods).await;
    assert_eq!((unchanged[&a], unchanged[&b]), (new_counts(1, 0, 4, 4), new_counts(0, 1, 13, 103)));
    // Only the selected counts, and only of this period.
    let tokens = CountSelection { tokens: true, ..CountSelection::default() };
    let tokens = f.store.quota_key_counts(ORG, tokens, &periods).await.expect("counted");
    assert_eq!(tokens[&b], new_counts(0, 0, 13, 0));
    let tomorrow = Periods {
        day: periods.next_day,
        next_day: periods.next_day + SignedDuration::from_hours(24),
        ..periods
    };
    assert_eq!(
        counts(&f, &tomorrow).await,
        BTreeMap::from([(a, new_counts(0, 0, 0, 4)), (b, new_counts(0, 0, 0, 103))])
    );
    let other = other_organization(&f.store).await;
    let foreign =
        f.store.quota_key_counts(other, CountSelection::ALL, &periods).await.expect("counted");
    assert!(foreign.is_empty());
}

#[tokio::test]
async fn deleted_task_still_counts_for_its_key() {
    let f = Fixture::new().await;
    let (periods, a) = (periods_around(now()), key());
    let task = create_task(&f, &write_with(a)).await;
    let expected = BTreeMap::from([(a, new_counts(1, 0, 0, 0))]);
    // Whoever deletes it.
    applied(
        f.store
            .task_delete(&write_with(key()), task, rendered("task.deleted"))
            .await
            .expect("deleted"),
    );
    assert_eq!(counts(&f, &periods).await, expected);
    f.store.task_purge(task, deleted_event, now()).await.expect("purged").expect("it is gone");
    assert_eq!(counts(&f, &periods).await, expected);
}

#[tokio::test]
async fn forks_subtasks_and_schedule_runs_count_for_their_key() {
    let f = Fixture::new().await;
    let (now, a, b, c) = (now(), key(), key(), key());
    let periods = periods_around(now);
    let task = create_task(&f, &write_with(a)).await;
    let message = send_message(&f, &write_with(b), task).await;
    let caller = start_script(&f, task).await;
    let child = spawn(&f, caller, 1).await;
    turn(&f, child, &[("fetch", true)], spent(7, 70), now).await;
    assert_eq!(
        counts(&f, &periods).await,
        BTreeMap::from([(a, new_counts(1, 0, 0, 0)), (b, new_counts(1, 1, 7, 70))])
    );
    let fork = NewFork {
        id: TaskId::from_uuid(Uuid::now_v7()),
        source: task,
        message,
        title: String::new(),
        workspace: String::new(),
        workspace_notice: (message_id(), text("elsewhere")),
    };
    applied(
        f.store.task_fork(&write_with(c), fork, rendered("task.created")).await.expect("copied"),
    );
    assert_eq!(counts(&f, &periods).await[&c], new_counts(1, 0, 0, 0));
    // A schedule counts for its creator, until another key changes it.
    let new = NewSchedule {
        id: ScheduleId::from_uuid(Uuid::now_v7()),
        name: "often".into(),
        target: ScheduleTarget::Agent(f.agent),
        content: text("work"),
        interrupts: false,
        title: String::new(),
        workspace: String::new(),
        timing: Timing::Cron { pattern: "* * * * *".to_owned(), time_zone: "UTC".to_owned() },
        missed: MissedRunPolicy::Once,
        next_run: Some(Timestamp::from_second(now.as_second() / 60 * 60).expect("a minute begins")),
    };
    let schedule = applied(
        f.store
            .schedule_create(&write_with(c), new, rendered("schedule.created"))
            .await
            .expect("made"),
    );
    let fired =
        f.store.schedule_fire(now, EVENTS, &mut None).await.expect("looked").expect("it is due");
    assert_eq!(fired.failures, [""; 0]);
    turn(&f, fired.tasks[0], &[], spent(1, 10), now).await;
    assert_eq!(counts(&f, &periods).await[&c], new_counts(2, 1, 1, 10));
    let changes =
        ScheduleChanges { content: Some(text("other work")), ..ScheduleChanges::default() };
    let changed = f
        .store
        .schedule_update(&write_with(a), schedule.id, None, changes, rendered("schedule.updated"))
        .await;
    assert_eq!(applied(changed.expect("changed")).key, Some(a));
    let later = now + SignedDuration::from_mins(2);
    let fired =
        f.store.schedule_fire(later, EVENTS, &mut None).await.expect("looked").expect("it is due");
    turn(&f, fired.tasks[0], &[], spent(1, 10), now).await;
    let counted = counts(&f, &periods).await;
    assert_eq!((counted[&a], counted[&c]), (new_counts(2, 1, 1, 10), new_counts(2, 1, 1, 10)));
}

/// The stored bytes of each key.
async fn stored_bytes(f: &Fixture) -> BTreeMap<ApiKeyId, i64> {
    counts(f, &periods_around(now()))
        .await
        .into_iter()
        .map(|(key, counts)| (key, counts.storage_bytes))
        .collect()
}

async fn put(f: &Fixture, write: &Write, text: &str) {
    let content = (StateContent::Text(text), "ada");
    applied(
        f.store
            .state_put(write, SETTINGS, content, None, rendered("state.put"))
            .await
            .expect("it is put"),
    );
}

#[tokio::test]
async fn storage_counts_for_the_key_that_stored_it() {
    let f = Fixture::new().await;
    let (a, b) = (key(), key());
    let create = async |write: &Write, size| {
        applied(f.store.file_create(write, file(size), rendered("x")).await.expect("created")).id
    };
    let first = create(&write_with(a), 100).await;
    create(&write_with(b), 10).await;
    create(&write(), 1000).await;
    assert_eq!(stored_bytes(&f).await, BTreeMap::from([(a, 100), (b, 10)]));
    // Whoever deletes it.
    applied(f.store.file_delete(&write_with(b), first, rendered("x")).await.expect("deleted"));
    assert_eq!(stored_bytes(&f).await, BTreeMap::from([(b, 10)]));
    let archive = Some(format!("sha256:{};size=700", "a".repeat(64)));
    let upload = NewScan { archive, ..new_scan(ScanId::from_uuid(Uuid::now_v7())) };
    applied(f.store.scan_create(&write_with(a), upload, rendered("x")).await.expect("made"));
    assert_eq!(stored_bytes(&f).await, BTreeMap::from([(a, 700), (b, 10)]));
    // Each version of a document counts for the key that put it, also after another key put the
    // next one.
    for (write, text, of_a, of_b) in [
        (write_with(a), "{\"a\": 1}", 708, 10),
        (write_with(b), "{\"a\": 1}", 708, 10),
        (write_with(b), "{}", 708, 12),
        (write(), "{ }", 708, 12),
        (write_with(a), "{}", 710, 12),
    ] {
        put(&f, &write, text).await;
        assert_eq!(stored_bytes(&f).await, BTreeMap::from([(a, of_a), (b, of_b)]), "{text}");
    }
    for (forget, of_a, of_b) in [(false, 710, 12), (true, 700, 10)] {
        let deleted = f
            .store
            .state_delete(
                &write_with(b),
                SETTINGS,
                (None, forget),
                "ada",
                rendered("state.deleted"),
            )
            .await;
        applied(deleted.expect("deleted"));
        assert_eq!(stored_bytes(&f).await, BTreeMap::from([(a, of_a), (b, of_b)]), "{forget}");
    }
    // Only if it is selected.
    let tasks = CountSelection { tasks: true, ..CountSelection::default() };
    assert!(
        f.store
            .quota_key_counts(ORG, tasks, &periods_around(now()))
            .await
            .expect("counted")
            .is_empty()
    );
}

#[tokio::test]
async fn dropped_version_frees_storage_of_the_key_that_put_it() {
    let f = Fixture::new().await;
    let keys = [key(), key()];
    let (mut own, mut of_others) = (0, 0);
    for number in 0..VERSIONS_KEPT * 2 {
        let by = keys[usize::from(number % 3 == 0)];
        // Different lengths distinguish the dropped version from the new one.
        let text = format!("{{\"n\": \"{}\"}}", "x".repeat(if number % 2 == 0 { 500 } else { 7 }));
        let of = async || stored_bytes(&f).await.get(&by).copied().unwrap_or_default();
        let before = of().await;
        let growth = f
            .store
            .state_growth(ORG, SETTINGS, StateContent::Text(&text), Some(by))
            .await
            .expect("counted");
        put(&f, &write_with(by), &text).await;
        assert_eq!(of().await - before, growth.bytes_of_key, "{number}");
        if growth.bytes < growth.bytes_of_key {
            of_others += 1;
        } else if growth.bytes < i64::try_from(text.len()).expect("few") {
            own += 1;
        }
    }
    assert!(own > 0 && of_others > 0, "{own} {of_others}");
}

#[tokio::test]
async fn usage_is_grouped_and_filtered_by_key() {
    let f = Fixture::new().await;
    let (now, a) = (now(), key());
    let made = f.store.api_key_create(&write(), new_key(a, Limits::default())).await.expect("made");
    let b = key();
    let task = create_task(&f, &write()).await;
    for (write, tokens) in [(write_with(a), 1), (write_with(b), 2), (write(), 4)] {
        send_message(&f, &write, task).await;
        turn(&f, task, &[("fetch", true)], spent(tokens, 0), now).await;
    }
    let (since, until) = (now - SignedDuration::from_hours(1), now + SignedDuration::from_hours(1));
    let filter = UsageFilter {
        agent: None,
        model: None,
        key: None,
        tool: None,
        since,
        until,
        time_zone: "UTC".into(),
    };
    let list = async |filter: &UsageFilter, of: Dimensions| {
        let mut found: Vec<(String, Option<ApiKeyId>, i64)> = Vec::new();
        let mut after = None;
        loop {
            let page = UsagePage { limit: 2, descending: false, after: after.clone() };
            let rows = f.store.usage_list(ORG, filter, of, &page).await.expect("listed");
            let Some(last) = rows.last() else { break };
            after = Some(last.cursor.clone());
            found.extend(rows.into_iter().map(|row| {
                let count = match row.totals {
                    UsageTotals::Models { usage, .. } => usage.input_tokens,
                    UsageTotals::Tools { calls, .. } => calls,
                };
                (row.key_name, row.key, count)
            }));
        }
        found
    };
    let by_key = Dimensions { key: true, ..Dimensions::default() };
    let expected = |numbers: [i64; 3]| {
        let mut rows = vec![
            (String::new(), None, numbers[2]),
            (made.name.clone(), Some(a), numbers[0]),
            (String::new(), Some(b), numbers[1]),
        ];
        rows.sort_by_key(|(_, key, _)| key.map(|key| key.uuid().to_string()));
        rows
    };
    assert_eq!(list(&filter, by_key).await, expected([1, 2, 4]));
    assert_eq!(list(&filter, Dimensions { tool: true, ..by_key }).await, expected([1, 1, 1]));
    let of_b = UsageFilter { key: Some(b), ..filter.clone() };
    assert_eq!(list(&of_b, Dimensions::default()).await, [(String::new(), None, 2)]);
    assert_eq!(
        list(&of_b, Dimensions { tool: true, ..Dimensions::default() }).await,
        [(String::new(), None, 1)]
    );
}

pub(super) fn new_key(id: ApiKeyId, limits: Limits) -> NewApiKey {
    let mut hash = [0; 32];
    hash[..16].copy_from_slice(id.uuid().as_bytes());
    NewApiKey {
        id,
        name: "bot".into(),
        secret: SecretHash { prefix: "ct_x".into(), hash },
        role: Role::Admin,
        scopes: vec![Scope::TasksWrite],
        user: UserId::LOCAL,
        expires_at: None,
        limits,
    }
}

#[tokio::test]
async fn key_limits_update_checks_revision_and_applies_to_next_use() {
    let f = Fixture::new().await;
    let (id, first) = (key(), Limits { tasks_per_day: Some(0), ..Limits::default() });
    let new = new_key(id, first);
    let hash = new.secret.hash;
    let made = f.store.api_key_create(&write(), new).await.expect("made");
    assert_eq!((made.limits, made.revision, made.updated_at), (first, 1, made.created_at));
    assert_eq!(f.store.api_key_get(ORG, id, None).await.expect("there"), made);
    let second =
        Limits { requests_per_minute: Some(5), tokens_per_day: Some(7), ..Limits::default() };
    let change = async |write: &Write, limits, revision, user, by| {
        let which = (id, user);
        f.store
            .api_key_set_limits(write, which, (limits, revision), by, rendered::<ApiKey>("key"))
            .await
    };
    let nobody = Some(UserId::from_uuid(Uuid::now_v7()));
    assert_not_found(change(&write(), second, None, nobody, Role::Owner).await);
    assert!(matches!(
        change(&write(), second, None, None, Role::Member).await,
        Err(Error::InsufficientRole)
    ));
    assert!(matches!(
        change(&write(), second, Some(2), None, Role::Owner).await,
        Err(Error::Conflict)
    ));
    let holder =
        async || f.store.api_key_holder(&hash, now()).await.expect("read").expect("valid").limits;
    assert_eq!(holder().await, first, "what was refused changed nothing");
    let keyed = write_with_key("limits", 1);
    let changed = applied(
        change(&keyed, second, Some(1), Some(UserId::LOCAL), Role::Admin).await.expect("changed"),
    );
    assert_eq!((changed.limits, changed.revision), (second, 2));
    assert!(matches!(
        change(&keyed, second, Some(1), None, Role::Admin).await,
        Ok(WriteOutcome::Repeated { .. })
    ));
    assert_eq!(holder().await, second);
    let other = other_organization(&f.store).await;
    assert_not_found(f.store.api_key_get(other, id, None).await);
}

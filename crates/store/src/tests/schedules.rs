//! Rows of schedules and their runs.

use std::collections::BTreeMap;

use construct_domain::{
    ApiKeyId, ScheduleId,
    schedule::{MissedRunPolicy, Timing},
};
use futures::future::join_all;
use jiff::SignedDuration;

use super::{keys::new_key, *};
use crate::{
    DueSchedule, Limits, NewSchedule, Quota, RUN_HISTORY_LIMIT, RunEvents, RunOutcome, Schedule,
    ScheduleChanges, ScheduleTarget, Stream,
};

const EVENTS: RunEvents =
    RunEvents { task: |_| event("task.created"), message: |_| event("message.created") };

fn event(kind: &str) -> NewEvent {
    super::event(kind)
}

fn minutes(count: i64) -> SignedDuration {
    SignedDuration::from_mins(count)
}

async fn schedule(
    f: &Fixture,
    name: &str,
    target: ScheduleTarget,
    timing: Timing,
    missed: MissedRunPolicy,
    next: Timestamp,
) -> Schedule {
    let new = NewSchedule {
        id: ScheduleId::from_uuid(Uuid::now_v7()),
        name: name.to_owned(),
        target,
        content: text("good morning"),
        interrupts: false,
        title: "Morning".to_owned(),
        workspace: String::new(),
        timing,
        missed,
        next_run: Some(next),
    };
    applied(
        f.store
            .schedule_create(&write(), new, rendered("schedule.created"))
            .await
            .expect("created"),
    )
}

fn every_minute() -> Timing {
    Timing::Cron { pattern: "* * * * *".to_owned(), time_zone: "UTC".to_owned() }
}

async fn reload(f: &Fixture, schedule: &Schedule) -> Schedule {
    f.store.schedule_find(ORG, &schedule.id.to_string()).await.expect("found")
}

#[tokio::test]
async fn schedule_run_is_created_once_by_concurrent_replicas() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let now = now();
    let once = schedule(
        &f,
        "once",
        ScheduleTarget::Task(task),
        Timing::At(now),
        MissedRunPolicy::Once,
        now,
    )
    .await;
    let fired =
        join_all((0..8).map(async |_| f.store.schedule_fire(now, EVENTS, &mut None).await)).await;
    let fired: Vec<_> = fired.into_iter().filter_map(|fired| fired.expect("looked")).collect();
    assert_eq!(fired.len(), 1);
    assert_eq!((fired[0].tasks.as_slice(), fired[0].events.len()), ([task].as_slice(), 1));
    let stored = f.store.task_get(ORG, task).await.expect("got");
    assert_eq!(stored.queued_count, 1);
    let events =
        f.store.events_after(Stream::task(ORG, task), 0, 10, u64::MAX).await.expect("read");
    assert_eq!(events.iter().map(|event| event.sequence).collect::<Vec<_>>(), [1, 2]);
    let over = reload(&f, &once).await;
    assert_eq!((over.next_run, over.last_run), (None, Some(now)));
    let runs = f.store.schedule_runs(once.organization, once.id).await.expect("read");
    assert_eq!(
        runs.iter().map(|run| (run.due, run.outcome, run.task)).collect::<Vec<_>>(),
        [(now, RunOutcome::Sent, Some(task))]
    );
    // Even if the clock is set back: the run exists.
    let timing = Some((Timing::At(now), Some(now)));
    let changes = ScheduleChanges { timing, ..ScheduleChanges::default() };
    applied(
        f.store
            .schedule_update(&write(), once.id, None, changes, rendered("x"))
            .await
            .expect("changed"),
    );
    f.store.schedule_fire(now, EVENTS, &mut None).await.expect("looked");
    assert_eq!(f.store.task_get(ORG, task).await.expect("got").queued_count, 1);
}

#[tokio::test]
async fn agent_schedule_creates_tasks_and_honors_the_missed_policy() {
    let f = Fixture::new().await;
    let start: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
    let target = ScheduleTarget::Agent(f.agent);
    let all = schedule(&f, "all", target, every_minute(), MissedRunPolicy::All, start).await;
    let skip = schedule(&f, "skip", target, every_minute(), MissedRunPolicy::Skip, start).await;
    let paused = schedule(&f, "paused", target, every_minute(), MissedRunPolicy::All, start).await;
    applied(
        f.store
            .schedule_pause(&write(), paused.id, true, None, None, rendered("x"))
            .await
            .expect("paused"),
    );
    let late = start + minutes(2) + SignedDuration::from_secs(90);
    let mut fired = Vec::new();
    while let Some(one) = f.store.schedule_fire(late, EVENTS, &mut None).await.expect("looked") {
        fired.push(one);
    }
    assert_eq!(
        fired.iter().map(|fired| (fired.schedule.id, fired.tasks.len())).collect::<Vec<_>>(),
        [(all.id, 4), (skip.id, 1)]
    );
    let runs = f.store.schedule_runs(skip.organization, skip.id).await.expect("read");
    let outcomes: Vec<_> = runs.iter().map(|run| (run.due, run.outcome)).collect();
    assert_eq!(outcomes, [(start + minutes(3), RunOutcome::Sent), (start, RunOutcome::PassedOver)]);
    let begun = f.store.task_get(ORG, fired[1].tasks[0]).await.expect("got");
    assert_eq!((begun.title.as_str(), begun.queued_count, begun.event_sequence), ("Morning", 1, 2));
    assert_eq!(reload(&f, &skip).await.next_run, Some(start + minutes(4)));
    let stale = f
        .store
        .schedule_pause(&write(), paused.id, false, Some(late), Some(0), rendered("x"))
        .await;
    assert!(matches!(stale, Err(Error::Conflict)), "{stale:?}");
    let resumed =
        f.store.schedule_pause(&write(), paused.id, false, Some(late), None, rendered("x")).await;
    assert_eq!(applied(resumed.expect("resumed")).next_run, Some(late));
    // Deleting the agent would leave its schedules without a target.
    let refused = f.store.agent_delete(&write(), f.agent, rendered("x")).await;
    assert!(matches!(refused, Err(Error::InUse { .. })), "{refused:?}");
}

#[tokio::test]
async fn failed_run_is_recorded_and_the_next_one_runs() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let start: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
    let daily =
        schedule(&f, "s", ScheduleTarget::Task(task), every_minute(), MissedRunPolicy::All, start)
            .await;
    applied(f.store.task_delete(&write(), task, rendered("task.deleted")).await.expect("deleted"));
    let fired =
        f.store.schedule_fire(start, EVENTS, &mut None).await.expect("looked").expect("one is due");
    assert_eq!(
        (fired.tasks.len(), fired.failures.as_slice()),
        (0, ["task not found".to_owned()].as_slice())
    );
    let after = reload(&f, &daily).await;
    assert_eq!(
        (after.next_run, after.last_error.as_deref()),
        (Some(start + minutes(1)), Some("task not found"))
    );
    let runs = f.store.schedule_runs(daily.organization, daily.id).await.expect("read");
    assert_eq!(runs[0].outcome, RunOutcome::Failed);
    f.store.task_purge(task, deleted_event, now()).await.expect("purged");
    assert_not_found(f.store.schedule_find(ORG, "s").await);
}

#[tokio::test]
async fn blocked_schedule_does_not_delay_others() {
    let f = Fixture::new().await;
    let start: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
    let first = schedule(
        &f,
        "first",
        ScheduleTarget::Agent(f.agent),
        every_minute(),
        MissedRunPolicy::Once,
        start,
    )
    .await;
    let second = schedule(
        &f,
        "second",
        ScheduleTarget::Agent(f.agent),
        every_minute(),
        MissedRunPolicy::Once,
        start + minutes(1),
    )
    .await;
    // Like a run that waits for a lock that is never released.
    let refuse = format!(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN RAISE EXCEPTION 'not now' USING ERRCODE = 'lock_not_available'; END $$;
         CREATE TRIGGER refuse BEFORE INSERT ON schedule_runs FOR EACH ROW WHEN (NEW.schedule_id = '{}') EXECUTE FUNCTION refuse()",
        first.id.uuid()
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(refuse)).execute(&f.store.pool).await.expect("made");
    let now = start + minutes(2);
    let mut after = None;
    let failed = f.store.schedule_fire(now, EVENTS, &mut after).await.expect_err("it is refused");
    assert!(failed.is_retryable(), "{failed:?}");
    assert_eq!(after, Some(DueSchedule { at: start, schedule: first.id }));
    let fired = f
        .store
        .schedule_fire(now, EVENTS, &mut after)
        .await
        .expect("looked")
        .expect("the other one is due");
    assert_eq!((fired.schedule.id, fired.tasks.len()), (second.id, 1));
    assert_eq!(f.store.schedule_fire(now, EVENTS, &mut after).await.expect("looked"), None);
    // It stays due, and is the first one again in the next pass.
    f.store.schedule_fire(now, EVENTS, &mut None).await.expect_err("it is refused");
    assert_eq!(reload(&f, &first).await.next_run, Some(start));
}

#[tokio::test]
async fn run_history_is_bounded() {
    let f = Fixture::new().await;
    let start: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
    let one = schedule(
        &f,
        "s",
        ScheduleTarget::Agent(f.agent),
        every_minute(),
        MissedRunPolicy::All,
        start,
    )
    .await;
    f.store.schedule_fire(start + minutes(90), EVENTS, &mut None).await.expect("looked");
    f.store.schedule_fire(start + minutes(150), EVENTS, &mut None).await.expect("looked");
    let count: i64 = sqlx::query_scalar("SELECT count(*) FROM schedule_runs")
        .fetch_one(&f.store.pool)
        .await
        .expect("counted");
    assert_eq!(count, i64::from(RUN_HISTORY_LIMIT));
    let runs = f.store.schedule_runs(one.organization, one.id).await.expect("read");
    assert_eq!((runs[0].due, runs.len()), (start + minutes(150), RUN_HISTORY_LIMIT as usize));
}

#[tokio::test]
async fn run_over_quota_fails_and_names_the_quota() {
    let f = Fixture::new().await;
    let noon: Timestamp = "2027-03-10T12:00:00Z".parse().expect("a time");
    let tier = |limits: Limits| BTreeMap::from([("free".to_owned(), limits)]);
    let free = tier(Limits { tasks_per_day: Some(2), ..Limits::default() });
    let limited = async |overrides: Limits| {
        let write = write();
        let quota =
            f.store.quota_set(&write, ORG, "free", overrides, None, rendered::<Quota>("quota"));
        applied(quota.await.expect("set"));
    };
    limited(Limits::default()).await;
    let timing = || Timing::Cron { pattern: "0 * * * *".to_owned(), time_zone: "UTC".to_owned() };
    let hourly = schedule(
        &f,
        "hourly",
        ScheduleTarget::Agent(f.agent),
        timing(),
        MissedRunPolicy::All,
        noon,
    )
    .await;
    let fire = async |now: Timestamp| {
        let fired = f
            .store
            .schedule_fire(now, EVENTS, &mut None)
            .await
            .expect("looked")
            .expect("one was due");
        (fired.tasks.len(), fired.failures)
    };
    // Without configured tiers there is no limit. Some counted tasks were created when the test
    // runs, and not on this day.
    assert_eq!(fire(noon).await, (1, vec![]));
    f.store.tiers_set(&free, "unlimited").await.expect("set");
    let used_up = || vec!["tasks_per_day of the organization is used up".to_owned()];
    assert_eq!(fire(noon + SignedDuration::from_hours(2)).await, (1, used_up()));
    assert_eq!(fire(noon + SignedDuration::from_hours(3)).await, (0, used_up()));
    let runs = f.store.schedule_runs(hourly.organization, hourly.id).await.expect("read");
    assert_eq!(runs.iter().filter(|run| run.outcome == RunOutcome::Failed).count(), 2);
    assert_eq!(reload(&f, &hourly).await.last_error.as_deref(), Some(used_up()[0].as_str()));
    // A message to an existing task creates none.
    let task = f.task().await;
    let once = Timing::At(noon + SignedDuration::from_hours(3));
    schedule(
        &f,
        "once",
        ScheduleTarget::Task(task),
        once,
        MissedRunPolicy::Once,
        noon + SignedDuration::from_hours(3),
    )
    .await;
    assert_eq!(fire(noon + SignedDuration::from_hours(3)).await, (1, vec![]));
    // The operator's overrides replace the limits of the tier. The next day has a new quota.
    let more = Limits { tasks_per_day: Some(3), ..Limits::default() };
    limited(more).await;
    assert_eq!(fire(noon + SignedDuration::from_hours(4)).await, (1, vec![]));
    assert_eq!(fire(noon + SignedDuration::from_hours(5)).await, (0, used_up()));
    f.store
        .tiers_set(&tier(Limits { tasks_per_day: Some(0), ..Limits::default() }), "free")
        .await
        .expect("set");
    assert_eq!(
        fire(noon + SignedDuration::from_hours(13)).await,
        (3, (0..5).flat_map(|_| used_up()).collect::<Vec<_>>())
    );
    f.store.tiers_set(&BTreeMap::new(), "unlimited").await.expect("set");
}

#[tokio::test]
async fn run_over_the_api_keys_quota_fails() {
    let f = Fixture::new().await;
    let noon: Timestamp = "2027-03-10T12:00:00Z".parse().expect("a time");
    let key = ApiKeyId::from_uuid(Uuid::now_v7());
    let limits = Limits { spend_per_month_pico_usd: Some(0), ..Limits::default() };
    f.store.api_key_create(&write(), new_key(key, limits)).await.expect("made");
    let hourly = Timing::Cron { pattern: "0 * * * *".to_owned(), time_zone: "UTC".to_owned() };
    let of_key = Write { key: Some(key), ..write() };
    let new = NewSchedule {
        id: ScheduleId::from_uuid(Uuid::now_v7()),
        name: "hourly".to_owned(),
        target: ScheduleTarget::Agent(f.agent),
        content: text("good morning"),
        interrupts: false,
        title: String::new(),
        workspace: String::new(),
        timing: hourly,
        missed: MissedRunPolicy::Once,
        next_run: Some(noon),
    };
    applied(
        f.store.schedule_create(&of_key, new, rendered("schedule.created")).await.expect("created"),
    );
    let fired =
        f.store.schedule_fire(noon, EVENTS, &mut None).await.expect("looked").expect("one was due");
    assert_eq!((fired.tasks.len(), fired.failures.len()), (0, 1));
    assert_eq!(fired.failures[0], "key_spend_per_month of its API key is used up");
}

//! Quotas and usage, counted from the source tables.

use construct_domain::{
    message::{CodeCall, CodeResult, Source, ToolUse},
    task::Phase,
};
use jiff::{SignedDuration, civil, tz::TimeZone};

use super::{
    commit::{admit, load},
    *,
};
use crate::{
    AppendedMessage, CountSelection, Counts, Dimensions, Limits, NewFork, Periods, Purpose, Quota,
    StateContent, StepUsage, TaskCommit, UsageFilter, UsagePage, UsageRow, UsageTotals,
};

/// Parses a time.
fn time(text: &str) -> Timestamp {
    text.parse().expect("a time")
}

/// A day and a month that are not about to end, whatever the time is.
pub(super) fn periods_around(now: Timestamp) -> Periods {
    let hours = SignedDuration::from_hours;
    let (day, next_day) = (now - hours(12), now + hours(12));
    Periods { day, next_day, month: now - hours(12 * 24), next_month: now + hours(12 * 24) }
}

async fn counts(f: &Fixture, organization: OrganizationId, periods: &Periods) -> Counts {
    f.store.quota_counts(organization, CountSelection::ALL, periods).await.expect("counted")
}

/// Sends a message, and commits the turn that answers it.
async fn run(f: &Fixture, task: TaskId, tools: &[(&str, bool)], used: Usage, now: Timestamp) {
    f.message(task, "go").await;
    turn(f, task, tools, used, now).await;
}

/// Commits a turn whose script calls these tools, with the usage of the model.
pub(super) async fn turn(
    f: &Fixture,
    task: TaskId,
    tools: &[(&str, bool)],
    used: Usage,
    now: Timestamp,
) {
    admit(f, task).await;
    let loaded = load(f, task).await;
    let mut state = loaded.task.clone();
    let asked = state.step.as_ref().expect("a step runs").id;
    let message = |position, source, block, step| AppendedMessage {
        id: message_id(),
        position,
        source,
        content: Content { blocks: vec![block] },
        agent: (source == Source::Assistant).then_some(f.agent),
        usage: Usage::default(),
        step: Some(step),
    };
    let uses = tools.iter().zip(1..).map(|((name, succeeded), number)| ToolUse {
        number,
        name: (*name).to_owned(),
        succeeded: *succeeded,
        duration_micros: 1500,
        ..ToolUse::default()
    });
    let call = CodeCall { id: "call_1".into(), code: "1".into() };
    let result =
        CodeResult { id: "call_1".into(), tool_uses: uses.collect(), ..CodeResult::default() };
    state.last_position += 1;
    let script =
        message(state.last_position, Source::Assistant, Block::CodeInterpreterCall(call), asked);
    state.last_position += 1;
    let told = message(
        state.last_position,
        Source::System,
        Block::CodeInterpreterResult(result),
        step_id(),
    );
    (state.step, state.turn, state.next_wake) = (None, None, None);
    state.phase = Phase::AwaitInput;
    let usage = vec![StepUsage {
        call: Uuid::now_v7(),
        step: asked,
        model: f.model,
        purpose: Purpose::Turn,
        usage: used,
    }];
    let commit =
        TaskCommit { appended: vec![script, told], usage, ..TaskCommit::new(&loaded, &state, now) };
    f.store.task_commit(commit).await.expect("committed");
}

pub(super) fn spent(tokens: i64, cost_pico_usd: i64) -> Usage {
    Usage { input_tokens: tokens, cost_pico_usd, ..Usage::default() }
}

async fn sql(f: &Fixture, statement: &str) {
    sqlx::raw_sql(sqlx::AssertSqlSafe(statement.to_owned()))
        .execute(&f.store.pool)
        .await
        .expect("it is done");
}

#[tokio::test]
async fn quota_counts_are_computed_from_source_tables() {
    let f = Fixture::new().await;
    let (now, other) = (now(), other_organization(&f.store).await);
    let periods = periods_around(now);
    let (task, gone) = (f.task().await, f.task().await);
    run(&f, task, &[("fetch", true)], spent(10, 500), now).await;
    run(&f, task, &[], spent(5, 100), now).await;
    let expected = Counts { tasks: 2, runs: 2, tokens: 15, spend_pico_usd: 600, storage_bytes: 0 };
    assert_eq!(counts(&f, ORG, &periods).await, expected);
    assert_eq!(counts(&f, other, &periods).await, Counts::default());
    // A deleted task still counts, before and after it is purged.
    applied(f.store.task_delete(&write(), gone, rendered("task.deleted")).await.expect("deleted"));
    assert_eq!(counts(&f, ORG, &periods).await, expected);
    f.store.task_purge(gone, deleted_event, now).await.expect("purged");
    assert_eq!(counts(&f, ORG, &periods).await, expected);
    // A fork has neither run nor spent anything.
    let transcript = f.store.transcript(task, i64::MAX, None).await.expect("read");
    let last = transcript.last().expect("there are some").id;
    let workspace_notice = (message_id(), text("elsewhere"));
    let (id, workspace) = (TaskId::from_uuid(Uuid::now_v7()), String::new());
    let new = NewFork {
        id,
        source: task,
        message: last,
        title: String::new(),
        workspace,
        workspace_notice,
    };
    applied(f.store.task_fork(&write(), new, rendered("task.created")).await.expect("copied"));
    assert_eq!(counts(&f, ORG, &periods).await, Counts { tasks: 3, ..expected });
    // Only the selection is counted.
    let some = CountSelection { tokens: true, ..CountSelection::default() };
    let some = f.store.quota_counts(ORG, some, &periods).await.expect("counted");
    assert_eq!(some, Counts { tokens: 15, ..Counts::default() });
    // Nothing counts for tomorrow; the month still has the same.
    let next_day = periods.next_day + SignedDuration::from_hours(24);
    let tomorrow = Periods { day: periods.next_day, next_day, ..periods };
    assert_eq!(
        counts(&f, ORG, &tomorrow).await,
        Counts { spend_pico_usd: 600, ..Counts::default() }
    );
}

#[tokio::test]
async fn uploads_count_as_storage_while_kept() {
    let f = Fixture::new().await;
    let archive = |size: u64| format!("sha256:{};size={size}", "a".repeat(64));
    for (size, cleaned) in [(700, "NULL"), (50, "NULL"), (9000, "now()")] {
        let (id, archive) = (Uuid::now_v7(), archive(size));
        sql(
            &f,
            &format!(
                "INSERT INTO scans (id, organization_id, kind, location, repository, connection_name, archive, reference, model,
                     budget_pico_usd, max_bytes, max_files, max_turns, timeout_seconds, created_by, task, deadline, phase_since,
                     leased_until, next_wake, cleaned_at, created_at, updated_at)
                 VALUES ('{id}', '{}', 'upload', 'a', 'upload:a', '', '{archive}', '', 'm', 0, 0, 0, 0, 0, 'local', '', now(), now(),
                     now(), now(), {cleaned}, now(), now())",
                ORG.uuid()
            ),
        )
        .await;
    }
    assert_eq!(counts(&f, ORG, &periods_around(now())).await.storage_bytes, 750);
    // Documents count with their earlier versions.
    let settings = crate::StateRef { owner: None, name: "settings" };
    for (text, expected) in [("{}", 752), ("{\"a\": 1}", 760)] {
        let put = f
            .store
            .state_put(
                &write(),
                settings,
                (StateContent::Text(text), "ada"),
                None,
                rendered("state.put"),
            )
            .await;
        assert_eq!(applied(put.expect("it is put")).bytes, i64::try_from(text.len()).expect("few"));
        assert_eq!(counts(&f, ORG, &periods_around(now())).await.storage_bytes, expected);
    }
}

#[tokio::test]
async fn quota_set_by_the_operator_persists() {
    let f = Fixture::new().await;
    let other = other_organization(&f.store).await;
    let nothing = f.store.quota_get(other).await.expect("read");
    assert_eq!(
        (nothing.tier.as_str(), nothing.overrides, nothing.revision),
        ("", Limits::default(), 0)
    );
    let limits = Limits { tasks_per_day: Some(7), storage_bytes: Some(0), ..Limits::default() };
    let set = async |write: &Write, tier: &str, limits, revision| {
        f.store.quota_set(write, other, tier, limits, revision, rendered::<Quota>("quota")).await
    };
    assert!(
        matches!(set(&write(), "free", limits, Some(1)).await, Err(Error::Conflict)),
        "there is none to change"
    );
    let first = applied(set(&write_with_key("k", 1), "free", limits, None).await.expect("said"));
    assert_eq!((first.revision, f.store.quota_get(other).await.expect("read")), (1, first.clone()));
    assert!(matches!(
        set(&write_with_key("k", 1), "free", limits, None).await,
        Ok(WriteOutcome::Repeated { .. })
    ));
    assert!(matches!(set(&write(), "paid", limits, Some(2)).await, Err(Error::Conflict)));
    let second = applied(set(&write(), "", Limits::default(), Some(1)).await.expect("said"));
    assert_eq!(
        (second.revision, second.tier.as_str(), second.overrides),
        (2, "", Limits::default())
    );
    // Other organizations have no quota, and unknown ones cannot have one.
    assert_eq!(f.store.quota_get(ORG).await.expect("read").revision, 0);
    let nobody = OrganizationId::from_uuid(Uuid::now_v7());
    assert_not_found(f.store.quota_get(nobody).await);
    let said =
        f.store.quota_set(&write(), nobody, "", limits, None, rendered::<Quota>("quota")).await;
    assert_not_found(said);
    assert!(f.store.idempotent_response(&write_with_key("k", 1)).await.expect("read").is_some());
    assert!(
        f.store.idempotent_response(&write_with_key("other", 1)).await.expect("read").is_none()
    );
    assert!(f.store.idempotent_response(&write()).await.expect("read").is_none());
}

/// Everything in 2026.
fn filter() -> UsageFilter {
    let (since, until) = (time("2026-01-01T00:00:00Z"), time("2027-01-01T00:00:00Z"));
    UsageFilter {
        agent: None,
        model: None,
        key: None,
        tool: None,
        since,
        until,
        time_zone: "UTC".into(),
    }
}

fn first(limit: u32, descending: bool) -> UsagePage {
    UsagePage { limit, descending, after: None }
}

async fn list(f: &Fixture, filter: &UsageFilter, of: Dimensions) -> Vec<UsageRow> {
    f.store.usage_list(ORG, filter, of, &first(1000, false)).await.expect("listed")
}

fn tokens(row: &UsageRow) -> i64 {
    match row.totals {
        UsageTotals::Models { usage, .. } => usage.input_tokens,
        UsageTotals::Tools { calls, .. } => calls,
    }
}

/// Two days of work of two agents, the second day's late in the evening.
async fn two_days_of_work() -> (Fixture, AgentId) {
    let f = Fixture::new().await;
    let second = new_agent(f.model, "b");
    let (task, other) = (f.task().await, second.id);
    applied(
        f.store.agent_create(&write(), second, rendered("agent.created")).await.expect("created"),
    );
    let (monday, tuesday) = (time("2026-11-16T12:00:00Z"), time("2026-11-17T23:30:00Z"));
    run(&f, task, &[("fetch", true), ("fetch", false), ("read_file", true)], spent(1, 10), monday)
        .await;
    run(&f, task, &[("read_file", true)], spent(2, 20), tuesday).await;
    let entry = StepUsage {
        call: Uuid::now_v7(),
        step: step_id(),
        model: f.model,
        purpose: Purpose::Title,
        usage: spent(4, 40),
    };
    f.store.step_usage_record(ORG, task, Some(other), &entry, tuesday).await.expect("booked");
    (f, other)
}

#[tokio::test]
async fn model_usage_is_summed_by_day_agent_and_model() {
    let (f, other) = two_days_of_work().await;
    let everything = list(&f, &filter(), Dimensions::default()).await;
    let [all] = everything.as_slice() else { panic!("{everything:?}") };
    let UsageTotals::Models { calls, usage } = all.totals else { panic!("{all:?}") };
    assert_eq!((calls, usage.input_tokens, usage.cost_pico_usd), (3, 7, 70));
    let days = list(&f, &filter(), Dimensions { day: true, ..Dimensions::default() }).await;
    let days: Vec<_> = days.iter().map(|row| (row.cursor.day.as_str(), tokens(row))).collect();
    assert_eq!(days, [("2026-11-16", 1), ("2026-11-17", 6)]);
    // Half an hour before midnight UTC is the next day in Berlin.
    let berlin = UsageFilter { time_zone: "Europe/Berlin".into(), ..filter() };
    let days = list(&f, &berlin, Dimensions { day: true, ..Dimensions::default() }).await;
    assert_eq!(
        days.iter().map(|row| row.cursor.day.as_str()).collect::<Vec<_>>(),
        ["2026-11-16", "2026-11-18"]
    );
    let agents =
        list(&f, &filter(), Dimensions { agent: true, model: true, ..Dimensions::default() }).await;
    let mut agents: Vec<_> = agents
        .iter()
        .map(|row| (row.agent_name.as_str(), row.model_name.as_str(), tokens(row)))
        .collect();
    agents.sort_unstable();
    assert_eq!(agents, [("a", "m", 3), ("b", "m", 4)]);
    let of_other = UsageFilter { agent: Some(other), ..filter() };
    assert_eq!(tokens(&list(&f, &of_other, Dimensions::default()).await[0]), 4);
    let of_nothing = UsageFilter { model: Some(ModelId::from_uuid(Uuid::now_v7())), ..filter() };
    assert_eq!(list(&f, &of_nothing, Dimensions::default()).await, []);
    let monday = UsageFilter { until: time("2026-11-17T00:00:00Z"), ..filter() };
    assert_eq!(tokens(&list(&f, &monday, Dimensions::default()).await[0]), 1);
    let organization = other_organization(&f.store).await;
    let foreign =
        f.store.usage_list(organization, &filter(), Dimensions::default(), &first(10, false)).await;
    assert_eq!(foreign.expect("listed"), []);
}

#[tokio::test]
async fn tool_calls_are_summed_from_script_results() {
    let (f, _) = two_days_of_work().await;
    let of = Dimensions { tool: true, ..Dimensions::default() };
    let shown = |rows: &[UsageRow]| -> Vec<(String, String, String, UsageTotals)> {
        let row = |row: &UsageRow| {
            (row.cursor.day.clone(), row.agent_name.clone(), row.cursor.item.clone(), row.totals)
        };
        rows.iter().map(row).collect()
    };
    let none = String::new;
    let calls = |calls, failed| UsageTotals::Tools { calls, failed, micros: calls * 1500 };
    assert_eq!(
        shown(&list(&f, &filter(), of).await),
        [
            (none(), none(), "fetch".into(), calls(2, 1)),
            (none(), none(), "read_file".into(), calls(2, 0))
        ]
    );
    let all = Dimensions { day: true, agent: true, ..of };
    let day = |day: &str| format!("2026-11-{day}");
    assert_eq!(
        shown(&list(&f, &filter(), all).await),
        [
            (day("16"), "a".into(), "fetch".into(), calls(2, 1)),
            (day("16"), "a".into(), "read_file".into(), calls(1, 0)),
            (day("17"), "a".into(), "read_file".into(), calls(1, 0)),
        ]
    );
    let fetch = UsageFilter { tool: Some("fetch".into()), agent: Some(f.agent), ..filter() };
    assert_eq!(shown(&list(&f, &fetch, of).await), [(none(), none(), "fetch".into(), calls(2, 1))]);
    let nobody = UsageFilter { agent: Some(AgentId::from_uuid(Uuid::now_v7())), ..filter() };
    assert_eq!(list(&f, &nobody, of).await, []);
}

#[tokio::test]
async fn usage_pages_cover_every_row_once_in_both_directions() {
    let f = Fixture::new().await;
    let task = f.task().await;
    for day in 1..=7 {
        let noon = civil::date(2026, 3, day)
            .at(12, 0, 0, 0)
            .to_zoned(TimeZone::UTC)
            .expect("a time")
            .timestamp();
        for _ in 0..3 {
            let entry = StepUsage {
                call: Uuid::now_v7(),
                step: step_id(),
                model: ModelId::from_uuid(Uuid::now_v7()),
                purpose: Purpose::Turn,
                usage: spent(1, 1),
            };
            f.store.step_usage_record(ORG, task, None, &entry, noon).await.expect("booked");
        }
        run(
            &f,
            task,
            &[("a", true), ("b", true), ("c", true)],
            Usage::default(),
            noon + SignedDuration::from_secs(1),
        )
        .await;
    }
    for of in [
        Dimensions { day: true, model: true, ..Dimensions::default() },
        Dimensions { day: true, tool: true, agent: true, ..Dimensions::default() },
    ] {
        for descending in [false, true] {
            let (mut seen, mut after) = (Vec::new(), None);
            loop {
                let page = UsagePage { limit: 4, descending, after: after.clone() };
                let rows = f.store.usage_list(ORG, &filter(), of, &page).await.expect("listed");
                let Some(last) = rows.last() else { break };
                after = Some(last.cursor.clone());
                seen.extend(rows.into_iter().map(|row| row.cursor));
            }
            let whole = f
                .store
                .usage_list(ORG, &filter(), of, &first(1000, descending))
                .await
                .expect("listed");
            let whole: Vec<_> = whole.into_iter().map(|row| row.cursor).collect();
            assert!(seen == whole && seen.len() >= 21, "{of:?} {descending}: {seen:?} {whole:?}");
            let days: Vec<_> = seen.iter().map(|place| place.day.clone()).collect();
            assert!(
                days.is_sorted_by(|one, next| if descending { one >= next } else { one <= next }),
                "{days:?}"
            );
        }
    }
}

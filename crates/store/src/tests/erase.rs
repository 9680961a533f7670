//! Erasure removes everything of an organization, and nothing of others.

use std::{collections::BTreeSet, time::Duration};

use construct_domain::{AuditEntryId, OrganizationId, TaskId, UserId};
use jiff::{SignedDuration, Timestamp};
use sqlx::Row as _;
use uuid::Uuid;

use super::*;
use crate::{
    AuditEntry,
    identity::{ERASED, ErasureProgress, NewOrganization},
};

/// Tables that are kept: the audit trail, until it expires. The ids of erased tasks are kept too,
/// without their organization.
const KEPT_TABLES: [&str; 1] = ["audit_entries"];
/// Tables that are emptied by separate statements.
const SEPARATE_TABLES: [&str; 2] = ["erased_tasks", "events"];

fn silent<T>(_: &T) -> WriteOutput {
    WriteOutput {
        event: NewEvent { kind: String::new(), payload: Vec::new(), step: None },
        response: Vec::new(),
    }
}

fn record() -> AuditEntry {
    AuditEntry {
        id: AuditEntryId::from_uuid(Uuid::now_v7()),
        organization: ORG,
        user: None,
        api_key: None,
        method: "EraseOrganization".into(),
        protocol: "housekeeping".into(),
        peer: String::new(),
        user_agent: String::new(),
        objects: Vec::new(),
        code: 0,
        count: 1,
        request_id: String::new(),
        trace_id: String::new(),
        created_at: now(),
    }
}

async fn team(store: &Store) -> OrganizationId {
    let id = OrganizationId::from_uuid(Uuid::now_v7());
    let (name, slug) = (format!("Team {id}"), id.to_string().replace('_', "-"));
    let new = NewOrganization { id, name, slug, avatar_url: String::new(), owner: UserId::LOCAL };
    store.organization_create(&write(), new, None, None, silent).await.expect("it is made");
    id
}

/// A value for a required column, such that the rows of one organization refer to each other.
fn value(organization: OrganizationId, table: &str, column: &str, kind: &str) -> String {
    let own = |table: &str| format!("md5('{organization}{table}')::uuid");
    match (table, column, kind) {
        (_, "organization_id", _) => format!("'{}'::uuid", organization.uuid()),
        (_, "user_id", "uuid") => format!("'{}'::uuid", UserId::LOCAL.uuid()),
        (_, "agent_id", "uuid") => own("agents"),
        (_, "model_id", "uuid") => own("models"),
        (_, "provider_id", "uuid") => own("model_providers"),
        (_, "secret_id", "uuid") => own("secrets"),
        (_, "task_id" | "root_id", "uuid") => own("tasks"),
        (_, "scan_id", "uuid") => own("scans"),
        (_, "schedule_id", "uuid") => own("schedules"),
        (_, "state_id", "uuid") => own("states"),
        (_, "file_id", "uuid") => own("files"),
        ("files", "state", _) => "'ready'".into(),
        ("states", "owner", _) => format!("'{}'::uuid", Uuid::nil()),
        (_, "fallback_id", "uuid") => own("models_fallback"),
        (table, _, "uuid") => own(table),
        ("model_providers", "kind", _) => "'openai'".into(),
        ("members" | "api_keys" | "setup_codes" | "invitations", "role", _) => "'viewer'".into(),
        ("scans", "kind", _) => "'github'".into(),
        ("scans", "phase", _) => "'review'".into(),
        ("scan_connections", "host", _) => "'github'".into(),
        ("scan_connections", "credential", _) => "'token'".into(),
        ("budgets", "period", _) => "'total'".into(),
        ("schedules", "missed", _) => "'skip'".into(),
        ("schedule_runs", "outcome", _) => "'sent'".into(),
        ("slack_mentions", "state", _) => "'answered'".into(),
        ("slack_grants", "may", _) => "'use'".into(),
        ("compactions", "replaced_tokens", _) => "2".into(),
        ("secrets", "hosts", _) => "'{example.com}'".into(),
        (_, "team", _) => format!("'{organization}'"),
        (_, _, "bytea") => format!("sha256('{organization}'::bytea)"),
        (_, _, "timestamp with time zone") => "now()".into(),
        (_, _, "jsonb") => "'{}'".into(),
        (_, _, "ARRAY") => "'{}'".into(),
        (_, _, "boolean") => "true".into(),
        (_, _, "bigint" | "integer" | "smallint") => "1".into(),
        _ => "'x'".into(),
    }
}

/// A row in every table that holds data of organizations.
async fn fill(store: &Store, organization: OrganizationId) {
    let further = [
        ("schedules", "task_id", "uuid"),
        ("schedules", "run_at", "timestamp with time zone"),
        ("scans", "phase", "text"),
        ("scans", "cleaned_at", "timestamp with time zone"),
    ];
    for (table, _) in ERASED.iter().rev().filter(|(table, _)| *table != "members") {
        let columns = sqlx::query(
            "SELECT column_name::text, data_type::text FROM information_schema.columns
             WHERE table_schema = 'public' AND table_name = $1 AND is_nullable = 'NO' AND column_default IS NULL",
        );
        let rows =
            columns.bind(table).fetch_all(&store.pool).await.expect("the columns can be read");
        let mut columns: Vec<(String, String)> =
            rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        let more = further.iter().filter(|(of, ..)| of == table);
        columns.extend(more.map(|(_, column, kind)| ((*column).to_owned(), (*kind).to_owned())));
        let names: Vec<&str> = columns.iter().map(|(name, _)| name.as_str()).collect();
        let values = |table| {
            columns
                .iter()
                .map(|(name, kind)| value(organization, table, name, kind))
                .collect::<Vec<_>>()
        };
        let mut statement = format!(
            "INSERT INTO {table} ({}) VALUES ({})",
            names.join(", "),
            values(table).join(", ")
        );
        if *table == "models" {
            // A second one, which is the fallback of the first.
            let other = values(table).join(", ").replace(
                &format!("md5('{organization}models')"),
                &format!("md5('{organization}models_fallback')"),
            );
            statement.push_str(&format!(", ({})", other.replace("'x'", "'y'")));
        }
        let done = sqlx::raw_sql(sqlx::AssertSqlSafe(statement.clone())).execute(&store.pool).await;
        done.unwrap_or_else(|error| panic!("{statement}: {error}"));
    }
    let task = format!("md5('{organization}tasks')::uuid");
    let (own, gone) = (organization.uuid(), format!("md5('{organization}gone')::uuid"));
    let events = format!(
        "INSERT INTO events (organization_id, stream_id, sequence, type, payload, created_at)
         SELECT '{own}', stream, number, type, '', now() FROM (VALUES
             ({task}, 1, 'task.created'), ({task}, 2, 'message.created'), ('{own}'::uuid, 1, 'agent.created'),
             ('{own}'::uuid, 2, 'model.created'), ({gone}, 9, 'task.deleted')) AS new (stream, number, type);
         UPDATE tasks SET event_sequence = 2 WHERE id = {task}"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(events))
        .execute(&store.pool)
        .await
        .expect("the events are made");
    store
        .audit_append(&[AuditEntry { organization, ..record() }])
        .await
        .expect("the trail is written");
}

async fn tables_of_organizations(store: &Store) -> BTreeSet<String> {
    let tables = "SELECT table_name::text FROM information_schema.columns
         WHERE table_schema = 'public' AND column_name = 'organization_id'";
    let tables: Vec<String> =
        sqlx::query_scalar(tables).fetch_all(&store.pool).await.expect("they can be read");
    tables.into_iter().collect()
}

/// The rows of an organization, by table.
async fn rows(store: &Store, organization: OrganizationId) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for table in tables_of_organizations(store).await {
        let rows = format!("SELECT t::text FROM {table} t WHERE organization_id = $1 ORDER BY 1");
        let rows = sqlx::query_scalar(sqlx::AssertSqlSafe(rows))
            .bind(organization.uuid())
            .fetch_all(&store.pool)
            .await;
        found.push((table, rows.expect("they can be read")));
    }
    found
}

/// One part of an erasure. If it is blocked, plays the reconciler.
async fn part(store: &Store, limit: u32, now: Timestamp) -> Option<ErasureProgress> {
    let part = store.organization_erase(record(), limit, now).await.expect("a part is erased");
    if let Some(ErasureProgress::Blocked(organization)) = part {
        let tasks = sqlx::query_scalar("SELECT id FROM tasks WHERE organization_id = $1")
            .bind(organization.uuid());
        let tasks: Vec<Uuid> = tasks.fetch_all(&store.pool).await.expect("they can be read");
        for task in tasks {
            store
                .task_purge(TaskId::from_uuid(task), deleted_event, now)
                .await
                .expect("it is purged");
        }
    }
    part
}

#[tokio::test]
async fn erasure_removes_all_rows_of_one_organization_only() {
    let database = Database::new().await;
    let store = database.store();
    let emptied: BTreeSet<String> = ERASED.iter().map(|(table, _)| (*table).to_owned()).collect();
    let known: BTreeSet<String> = emptied
        .iter()
        .cloned()
        .chain(SEPARATE_TABLES.into_iter().chain(KEPT_TABLES).map(str::to_owned))
        .collect();
    let missing: Vec<String> =
        tables_of_organizations(&store).await.difference(&known).cloned().collect();
    assert!(missing.is_empty(), "say in `identity::erase` what becomes of {missing:?}");

    let (mine, others) = (team(&store).await, team(&store).await);
    for organization in [mine, others] {
        fill(&store, organization).await;
    }
    for (table, rows) in rows(&store, mine).await {
        assert!(
            !rows.is_empty() || table == "erased_tasks",
            "{table} has no row that could be left"
        );
    }
    let before = rows(&store, others).await;
    let (posts, grants) = ("SELECT count(*) FROM slack_posts", "SELECT count(*) FROM slack_grants");
    assert_eq!(
        part(&store, 1, now()).await,
        None,
        "an organization that is not deleted is left alone"
    );
    store.organization_delete(&write(), mine, silent).await.expect("it is deleted");
    // The process is killed again and again, at any moment; each time another one continues.
    let left = async || {
        let left = "SELECT count(*) FROM organizations WHERE erasing_since IS NOT NULL";
        let left: i64 = sqlx::query_scalar(left).fetch_one(&store.pool).await.expect("counted");
        left > 0
    };
    let mut killed = 0;
    while left().await {
        let moment = Duration::from_micros(killed * 731 % 30_000);
        if tokio::time::timeout(moment, part(&store, 1, now())).await.is_err() {
            killed += 1;
        }
        // None: the server still executes the canceled statement.
        part(&store, 1, now()).await;
    }
    assert!(killed > 0, "somebody was killed");
    for (table, rows) in rows(&store, mine).await {
        assert!(rows.is_empty() || KEPT_TABLES.contains(&&*table), "{table}: {rows:?}");
    }
    for count in [posts, grants] {
        let left: i64 = sqlx::query_scalar(count).fetch_one(&store.pool).await.expect("counted");
        assert_eq!(left, 1, "{count}: the others'");
    }
    assert_eq!(rows(&store, others).await, before);
    assert_eq!(part(&store, 1, now()).await, None);
    // Interpreters remove workspaces by these ids.
    let own = |what: &str| format!("SELECT md5('{mine}{what}')::uuid");
    for what in ["tasks", "gone"] {
        let id: Uuid = sqlx::query_scalar(sqlx::AssertSqlSafe(own(what)))
            .fetch_one(&store.pool)
            .await
            .expect("an id");
        let task = TaskId::from_uuid(id);
        assert_eq!(store.tasks_purged(&[task]).await.expect("asked"), [task], "{what}");
    }
    let trail: Vec<Vec<String>> = sqlx::query_scalar(
        "SELECT objects FROM audit_entries WHERE method = 'EraseOrganization' AND cardinality(objects) > 0",
    )
    .fetch_all(&store.pool)
    .await
    .expect("the trail");
    assert_eq!(trail.len(), 1, "it is written down once: {trail:?}");
    for object in [
        mine.to_string(),
        "tasks=1".into(),
        "messages=1".into(),
        "events=4".into(),
        "secrets=1".into(),
        "cost_pico_usd=1".into(),
    ] {
        assert!(trail[0].contains(&object), "{object} is missing: {trail:?}");
    }
}

#[tokio::test]
async fn concurrent_organization_deletes_do_not_deadlock() {
    let database = Database::new().await;
    let store = database.store();
    for _ in 0..20 {
        let team = team(&store).await;
        let own = Write::new(team, now());
        let (one, other) = tokio::join!(
            store.organization_delete(&own, team, silent),
            store.organization_delete(&own, team, silent)
        );
        let answers = [&one, &other];
        assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 1, "{answers:?}");
        assert!(
            answers.iter().any(|answer| matches!(answer, Err(Error::NotFound { .. }))),
            "{answers:?}"
        );
    }
}

#[tokio::test]
async fn concurrent_erasures_share_work_and_audit_once() {
    let database = Database::new().await;
    let store = database.store();
    let teams = [team(&store).await, team(&store).await, team(&store).await];
    for team in teams {
        fill(&store, team).await;
        store.organization_delete(&write(), team, silent).await.expect("it is deleted");
    }
    let worker = || async {
        let mut done = 0;
        loop {
            match part(&store, 10, now()).await {
                Some(ErasureProgress::Done(_)) => done += 1,
                Some(_) => {}
                None => {
                    let left = "SELECT count(*) FROM organizations WHERE erasing_since IS NOT NULL";
                    let left: i64 =
                        sqlx::query_scalar(left).fetch_one(&store.pool).await.expect("counted");
                    if left == 0 {
                        return done;
                    }
                }
            }
        }
    };
    let (one, two, three) = tokio::join!(worker(), worker(), worker());
    assert_eq!(one + two + three, 3);
}

#[tokio::test]
async fn quarantined_task_and_abandoned_scan_do_not_block_erasure() {
    let database = Database::new().await;
    let store = database.store();
    let team = team(&store).await;
    fill(&store, team).await;
    // A scan that no scanner ends, and a task that is quarantined again with every reconcile.
    let spoil = format!(
        "UPDATE scans SET phase = 'queued', next_wake = now(), cleaned_at = NULL WHERE organization_id = '{}'",
        team.uuid()
    );
    database.execute(&spoil).await;
    store.organization_delete(&write(), team, silent).await.expect("it is deleted");
    let erase = async |now: Timestamp| {
        store.organization_erase(record(), 100, now).await.expect("a part is erased")
    };
    assert_eq!(erase(now()).await, Some(ErasureProgress::More(team)), "tasks are deleted");
    assert_eq!(
        erase(now()).await,
        Some(ErasureProgress::Blocked(team)),
        "the reconciler has to purge them"
    );
    database.execute("UPDATE tasks SET parked_intents = intents, parked_at = now(), parked_reason = 'spoilt'").await;
    assert_eq!(erase(now()).await, Some(ErasureProgress::Blocked(team)));
    let later = now() + SignedDuration::from_mins(2);
    assert_eq!(
        erase(later).await,
        Some(ErasureProgress::Blocked(team)),
        "the scanner has to end the scan"
    );
    let mut parts = 0;
    while erase(now() + SignedDuration::from_hours(2)).await != Some(ErasureProgress::Done(team)) {
        parts += 1;
        assert!(parts < 200, "it comes to an end");
    }
}

#[tokio::test]
async fn erasure_statements_use_indexes() {
    let database = Database::new().await;
    let store = database.store();
    let tables: Vec<String> = ERASED
        .iter()
        .filter(|(_, by)| by.starts_with("organization_id"))
        .map(|(table, _)| (*table).to_owned())
        .collect();
    assert!(tables.len() > 20, "{tables:?}");
    let without: Vec<String> = sqlx::query_scalar(
        "SELECT t FROM unnest($1::text[]) AS t WHERE NOT EXISTS (
             SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
             WHERE i.indrelid = t::regclass AND a.attname = 'organization_id' AND i.indpred IS NULL)",
    )
    .bind(tables)
    .fetch_all(&store.pool)
    .await
    .expect("the catalog can be read");
    assert!(without.is_empty(), "they would be read as a whole for every part: {without:?}");
}

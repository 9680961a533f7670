//! Checks of PostgreSQL, and of the tasks in it.

use std::time::{Duration, Instant};

use construct_runtime::clock;
use construct_store::{Error, Store};
use jiff::{SignedDuration, Timestamp};

use super::Findings;
use crate::status::chain;

/// How long a task may be due before it counts as overdue: the sweep runs every two seconds.
pub(super) const OVERDUE_AFTER: SignedDuration = SignedDuration::from_secs(30);
/// The most tasks that are counted.
pub(super) const MAX_COUNTED_TASKS: u32 = 1000;
/// The allowed difference between the clocks of this machine and of the server: a row has times of
/// both.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_secs(1);

/// The ids of the keys that credentials are sealed with.
pub(super) struct Keys<'a> {
    pub(super) active: &'a str,
    pub(super) secrets: Option<&'a str>,
}

/// All checks of the database.
pub(super) async fn check(store: &Store, keys: &Keys<'_>) -> Findings {
    let mut findings = Findings::default();
    if let Err(error) = check_server(store, &mut findings).await {
        findings.problem(
            "postgresql",
            chain(&error),
            "see docs/runbook.md; until it is available nothing is accepted, and nothing that was accepted is lost",
        );
        return findings;
    }
    check_tasks(store, &mut findings).await;
    check_credentials(store, keys, &mut findings).await;
    findings
}

async fn check_server(store: &Store, findings: &mut Findings) -> Result<(), Error> {
    // The first ping may have to open a connection.
    store.ping().await?;
    let began = Instant::now();
    store.ping().await?;
    let took = began.elapsed();
    let before = Timestamp::now();
    let state = store.database_state().await?;
    // The server's clock was read between these two times.
    let after = Timestamp::now();
    if state.is_standby {
        let remedy = "CONSTRUCT_DATABASE_URL has to name the primary";
        findings.problem("postgresql", "the server is a standby and accepts no writes", remedy);
    } else {
        let size = state.size / (1024 * 1024);
        findings.ok(
            "postgresql",
            format!("PostgreSQL {} answers in {}; {size} MiB", state.version, millis(took)),
        );
    }
    match state.applied_migration.cmp(&state.latest_migration) {
        std::cmp::Ordering::Equal => findings.ok("postgresql.schema", format!("migration {}", state.applied_migration)),
        std::cmp::Ordering::Greater => findings.warn(
            "postgresql.schema",
            format!("migration {} is applied, and this gateway knows up to {}", state.applied_migration, state.latest_migration),
            "finish the upgrade or the rollback: this version works with the newer schema, without what it adds",
        ),
        std::cmp::Ordering::Less => findings.problem(
            "postgresql.schema",
            format!("migration {} is applied, and this gateway needs {}", state.applied_migration, state.latest_migration),
            "the database was replaced or restored while services were running: restart them",
        ),
    }
    let skew = if state.now < before {
        before.duration_since(state.now)
    } else {
        state.now.duration_since(after)
    };
    if skew > MAX_CLOCK_SKEW {
        findings.warn(
            "postgresql.clock",
            format!("its clock and this gateway's are {:.1} s apart", skew.as_secs_f64()),
            "synchronize the clocks of both machines (NTP)",
        );
    } else {
        findings.ok("postgresql.clock", "its clock and this gateway's agree");
    }
    let used = format!("{} of {} connections are in use", state.connections, state.max_connections);
    if state.connections * 10 > state.max_connections * 8 {
        let remedy = "raise max_connections, or run fewer replicas: each opens up to 20 (docs/operations.md)";
        findings.warn("postgresql.connections", used, remedy);
    } else {
        findings.ok("postgresql.connections", used);
    }
    Ok(())
}

async fn check_tasks(store: &Store, findings: &mut Findings) {
    match store.sweep_due(clock::now() - OVERDUE_AFTER, None, MAX_COUNTED_TASKS).await {
        Ok(due) => match due.first() {
            None => findings.ok("tasks.overdue", "no task is overdue"),
            Some(first) => {
                let many = if due.len() == MAX_COUNTED_TASKS as usize { "at least " } else { "" };
                findings.problem(
                    "tasks.overdue",
                    format!(
                        "overdue tasks that no reconciler handles: {many}{}, the first since {}",
                        due.len(),
                        to_seconds(first.since)
                    ),
                    format!(
                        "check that reconcilers run, and their logs; `construct explain {}`",
                        first.task
                    ),
                );
            }
        },
        Err(error) => findings.problem(
            "tasks.overdue",
            chain(&error),
            "PostgreSQL is unavailable or overloaded",
        ),
    }
    match store.tasks_quarantined().await {
        Ok(quarantined) => match quarantined.since {
            None => findings.ok("tasks.quarantined", "no task is quarantined"),
            Some(since) => findings.warn(
                "tasks.quarantined",
                format!("quarantined tasks, whose reconciles failed: {}, the first since {}", quarantined.count, to_seconds(since)),
                "the reconciler's log names them; `construct explain TASK` explains one, `construct task retry TASK` retries it",
            ),
        },
        Err(error) => findings.problem("tasks.quarantined", chain(&error), "PostgreSQL is unavailable or overloaded"),
    }
}

async fn check_credentials(store: &Store, keys: &Keys<'_>, findings: &mut Findings) {
    match store.sealed_with_other_keys(keys.active, keys.secrets).await {
        Ok(0) if keys.secrets.is_none() => findings.warn(
            "credentials",
            "there is no key for secrets, so scripts have none",
            "set CONSTRUCT_SECRETS_KEY for the gateway and the interpreter, if scripts are to use secrets",
        ),
        Ok(0) => findings.ok("credentials", "all can be decrypted with the keys of this installation"),
        Ok(count) => findings.problem(
            "credentials",
            format!("credentials encrypted with a key that this gateway does not have: {count}"),
            "add the key to CONSTRUCT_MASTER_KEY or CONSTRUCT_SECRETS_KEY, after the active one, and restart the gateway; or enter \
             the credentials again",
        ),
        Err(error) => findings.problem("credentials", chain(&error), "PostgreSQL is unavailable or overloaded"),
    }
}

/// A duration in milliseconds.
pub(super) fn millis(took: Duration) -> String {
    format!("{:.1} ms", took.as_secs_f64() * 1000.0)
}

/// The time without fractions of a second.
pub(super) fn to_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

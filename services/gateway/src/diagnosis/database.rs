//! PostgreSQL, and what the tasks in it say.

use std::time::{Duration, Instant};

use construct_runtime::clock;
use construct_store::{Error, Store};
use jiff::{SignedDuration, Timestamp};

use super::Findings;
use crate::status::chain;

/// How long a task may be due before it is a stall: the sweep looks every two seconds.
pub(super) const OVERDUE: SignedDuration = SignedDuration::from_secs(30);
/// Tasks that are counted; beyond it there are `many`.
pub(super) const COUNTED: u32 = 1000;
/// How far the clocks of this machine and of the server may be apart: times of both stand in one
/// row.
const SKEW: SignedDuration = SignedDuration::from_secs(1);

/// The ids of the keys that credentials are sealed with.
pub(super) struct Keys<'a> {
    pub(super) active: &'a str,
    pub(super) secrets: Option<&'a str>,
}

pub(super) async fn look(store: &Store, keys: &Keys<'_>) -> Findings {
    let mut findings = Findings::default();
    if let Err(error) = server(store, &mut findings).await {
        findings.problem(
            "postgresql",
            chain(&error),
            "see docs/runbook.md; until it is back nothing is accepted, and nothing that was accepted is lost",
        );
        return findings;
    }
    tasks(store, &mut findings).await;
    credentials(store, keys, &mut findings).await;
    findings
}

async fn server(store: &Store, findings: &mut Findings) -> Result<(), Error> {
    // A connection may have to be opened for the first.
    store.ping().await?;
    let began = Instant::now();
    store.ping().await?;
    let took = began.elapsed();
    let before = Timestamp::now();
    let state = store.database_state().await?;
    // The server's clock was read at some moment between.
    let after = Timestamp::now();
    if state.is_standby {
        let remedy = "CONSTRUCT_DATABASE_URL has to name the primary";
        findings.problem(
            "postgresql",
            "the server only follows another one and takes no writes",
            remedy,
        );
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
            "end the upgrade, or the way back: this version works on the newer schema without what that adds",
        ),
        std::cmp::Ordering::Less => findings.problem(
            "postgresql.schema",
            format!("migration {} is applied, and this gateway needs {}", state.applied_migration, state.latest_migration),
            "the database was exchanged or restored under running services: restart them",
        ),
    }
    let skew = if state.now < before {
        before.duration_since(state.now)
    } else {
        state.now.duration_since(after)
    };
    if skew > SKEW {
        findings.warn(
            "postgresql.clock",
            format!("its clock and this gateway's are {:.1} s apart", skew.as_secs_f64()),
            "synchronize the clocks of both machines (NTP)",
        );
    } else {
        findings.ok("postgresql.clock", "its clock and this gateway's agree");
    }
    let used = format!("{} of {} connections are used", state.connections, state.max_connections);
    if state.connections * 10 > state.max_connections * 8 {
        let remedy = "raise max_connections, or run fewer replicas: each opens up to 20 (docs/operations.md)";
        findings.warn("postgresql.connections", used, remedy);
    } else {
        findings.ok("postgresql.connections", used);
    }
    Ok(())
}

async fn tasks(store: &Store, findings: &mut Findings) {
    match store.sweep_due(clock::now() - OVERDUE, None, COUNTED).await {
        Ok(due) => match due.first() {
            None => findings.ok("tasks.overdue", "no task waits for somebody to look at it"),
            Some(first) => {
                let many = if due.len() == COUNTED as usize { "at least " } else { "" };
                findings.problem(
                    "tasks.overdue",
                    format!(
                        "tasks that are due and nobody looks at: {many}{}, the first since {}",
                        due.len(),
                        whole(first.since)
                    ),
                    format!(
                        "see whether reconcilers run and what they log; `construct why {}`",
                        first.task
                    ),
                );
            }
        },
        Err(error) => {
            findings.problem("tasks.overdue", chain(&error), "PostgreSQL is away or overloaded")
        }
    }
    match store.tasks_quarantined().await {
        Ok(parked) => match parked.since {
            None => findings.ok("tasks.parked", "no task is put aside"),
            Some(since) => findings.warn(
                "tasks.parked",
                format!("tasks put aside because looking at them failed: {}, the first since {}", parked.count, whole(since)),
                "the reconciler's log names them; `construct why TASK` says why, `construct task retry TASK` has it looked at again",
            ),
        },
        Err(error) => findings.problem("tasks.parked", chain(&error), "PostgreSQL is away or overloaded"),
    }
}

async fn credentials(store: &Store, keys: &Keys<'_>, findings: &mut Findings) {
    match store.sealed_with_other_keys(keys.active, keys.secrets).await {
        Ok(0) if keys.secrets.is_none() => findings.warn(
            "credentials",
            "there is no key for secrets, so scripts have none",
            "set CONSTRUCT_SECRETS_KEY for the gateway and the interpreter, if scripts are to use secrets",
        ),
        Ok(0) => findings.ok("credentials", "all can be opened with the keys of this installation"),
        Ok(count) => findings.problem(
            "credentials",
            format!("credentials sealed with a key that this gateway does not have: {count}"),
            "add the key to CONSTRUCT_MASTER_KEY or CONSTRUCT_SECRETS_KEY, behind the active one, and restart the gateway; or enter \
             the credentials anew",
        ),
        Err(error) => findings.problem("credentials", chain(&error), "PostgreSQL is away or overloaded"),
    }
}

/// In milliseconds.
pub(super) fn millis(took: Duration) -> String {
    format!("{:.1} ms", took.as_secs_f64() * 1000.0)
}

/// Without fractions of a second, which nobody needs here.
pub(super) fn whole(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

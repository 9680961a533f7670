//! End-to-end tests: the four services as processes, on real PostgreSQL and NATS.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails with what it met")]

mod activation;
mod api;
mod approvals;
mod architecture;
mod attachments;
mod backup;
mod cli;
mod compute;
mod content;
mod context;
mod control;
mod crash;
mod demo;
mod durable;
mod erasure;
mod events;
mod fairness;
mod files;
mod flood;
mod hostile;
mod identity;
mod metrics;
mod money;
mod outage;
mod passivation;
mod protocols;
mod proxy;
mod quotas;
mod recovery;
mod scale;
mod scanner;
mod schedules;
mod secrets;
mod slack;
mod states;
mod subtasks;
mod traces;
mod turn;
mod vendors;

use std::path::Path;

/// Whether a process of this machine has `marker` in its command line.
fn is_running(marker: &str) -> bool {
    let Ok(entries) = std::fs::read_dir("/proc") else { return false };
    entries.flatten().any(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(marker)
    })
}

/// Waits until no process has `marker` in its command line.
async fn wait_for_process_end(marker: &str) {
    construct_tests::wait::until(
        &format!("the process {marker} to be killed"),
        construct_tests::client::TURN_TIMEOUT,
        async || {
            if is_running(marker) { Err("it runs") } else { Ok(()) }
        },
    )
    .await;
}

/// The text of a file that must exist.
fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

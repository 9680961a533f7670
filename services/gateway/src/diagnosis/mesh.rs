//! Checks of NATS: the streams, and the consumers of the workers.

use std::time::Duration;

use construct_bus::{
    Bus, Pool,
    inspect::{ConsumerState, Error},
    topology::{self, ConsumerRow, Stream, WhenFull},
};
use construct_domain::{compute, partition};
use construct_proto::v1::WorkerLoad;
use futures::future;

use super::{
    CHECK_TIMEOUT, Findings,
    database::{millis, to_seconds},
};
use crate::status::chain;

/// How often a consumer is inspected that seems unserved: between two requests of a worker there is
/// a moment without one.
const INSPECT_ATTEMPTS: usize = 4;
/// The delay between two inspections.
const INSPECT_RETRY_DELAY: Duration = Duration::from_millis(250);

/// Checks the server and the streams.
pub(super) async fn check(bus: &Bus) -> Findings {
    let mut findings = Findings::default();
    let states = match bus.round_trip(CHECK_TIMEOUT).await {
        Ok(took) => {
            findings
                .ok("nats", format!("NATS {} answers in {}", bus.server_version(), millis(took)));
            bus.inspect_streams().await
        }
        Err(error) => Err(error),
    };
    let states = match states {
        Ok(states) => states,
        Err(error) => {
            report_outage("nats", &error, &mut findings);
            return findings;
        }
    };
    let (mut wrong, mut behind) = (0, 0);
    for (row, state) in &states {
        let name = row.stream.name();
        let Some(state) = state else {
            wrong += 1;
            findings.problem(
                "nats.streams",
                format!("there is no stream {name}"),
                "a reconciler creates the streams, at its start, after each reconnect and within half a minute: check its log, and the free space of JetStream",
            );
            continue;
        };
        if !state.behind.is_empty() {
            behind += 1;
            findings.warn(
                "nats.replicas",
                format!("{name} is behind at {}", state.behind.join(", ")),
                "check these servers; losing one more may lose the stream",
            );
        }
        let full = u128::from(state.bytes) * 100
            / u128::try_from(state.max_bytes).unwrap_or(u128::MAX).max(1);
        if row.when_full == WhenFull::Refuse && full >= 80 {
            wrong += 1;
            let since = state
                .oldest
                .map(|oldest| format!(", the oldest from {}", to_seconds(oldest)))
                .unwrap_or_default();
            findings.problem(
                "nats.streams",
                format!("{name} is {full} % full: {} messages{since}", state.messages),
                "a full stream accepts no messages: see below for its consumers",
            );
        }
    }
    if wrong == 0 {
        findings.ok("nats.streams", format!("all {} exist and have free space", states.len()));
    }
    let replicas = states
        .iter()
        .filter_map(|(_, state)| Some(state.as_ref()?.replicas))
        .min()
        .unwrap_or_default();
    if behind == 0 {
        findings.ok("nats.replicas", format!("{replicas} of each stream"));
    }
    let dead = states
        .iter()
        .find(|(row, _)| row.stream == Stream::DeadLetters)
        .and_then(|(_, state)| state.as_ref());
    match dead.map_or(0, |dead| dead.messages) {
        0 => findings.ok("nats.dead", "there are no dead letters"),
        count => findings.warn(
            "nats.dead",
            format!("dead letters: {count}"),
            "`construct deadletter list` shows them; they are kept for 30 days",
        ),
    }
    findings
}

/// A service that consumes messages.
struct Workers {
    /// The name of its check.
    check: String,
    consumers: Vec<ConsumerRow>,
    /// The name of the service in texts.
    name: &'static str,
    /// Whether the mesh does not work without it.
    is_needed: bool,
    /// What does not work without it.
    consequence: String,
}

/// All services that should be running.
fn expected_workers(pools: &[String], scans: bool) -> Vec<Workers> {
    let mut workers = vec![
        Workers {
            check: "reconciler".to_owned(),
            consumers: (0..partition::COUNT)
                .map(topology::task_consumer)
                .chain([topology::spending_consumer()])
                .collect(),
            name: "reconciler",
            is_needed: true,
            consequence: "no task makes progress".to_owned(),
        },
        Workers {
            check: "providers".to_owned(),
            consumers: vec![topology::model_consumer(&Pool::model_default())],
            name: "providers service",
            is_needed: true,
            consequence: "no model is called".to_owned(),
        },
    ];
    workers.extend(pools.iter().filter_map(|name| {
        Some(Workers {
            check: format!("interpreter.{name}"),
            consumers: vec![topology::code_consumer(&Pool::new(name).ok()?)],
            name: "interpreter",
            is_needed: name == compute::DEFAULT,
            consequence: format!("scripts of tasks in the pool `{name}` wait"),
        })
    }));
    if scans {
        workers.push(Workers {
            check: "scanner".to_owned(),
            consumers: vec![topology::scan_consumer()],
            name: "scanner",
            is_needed: true,
            consequence: "scans wait".to_owned(),
        });
    }
    workers
}

/// Checks which services are running and keep up, by the state of their consumers.
pub(super) async fn check_services(bus: &Bus, pools: &[String], scans: bool) -> Findings {
    let all = expected_workers(pools, scans);
    let findings = future::join_all(all.iter().map(async |workers| {
        let mut findings = Findings::default();
        if let Err(error) = check_workers(bus, workers, &mut findings).await {
            report_outage(&workers.check, &error, &mut findings);
        }
        findings.0
    }));
    Findings(findings.await.concat())
}

/// The load of each kind of worker.
pub(super) async fn worker_loads(
    bus: &Bus,
    pools: &[String],
    scans: bool,
) -> Result<Vec<WorkerLoad>, Error> {
    let load = async |workers: Workers| {
        let states = future::try_join_all(
            workers.consumers.iter().map(|consumer| inspect_with_retries(bus, consumer)),
        )
        .await?;
        let served =
            states.iter().all(|state| state.as_ref().is_some_and(ConsumerState::is_served));
        let states = || states.iter().flatten();
        Ok(WorkerLoad {
            worker: workers.check,
            served,
            waiting: states().map(|state| state.pending).sum(),
            in_flight: states().map(|state| state.taken as u64).sum(),
            redelivered: states().map(|state| state.redelivered as u64).sum(),
            delivered: states().map(|state| state.delivered).sum(),
        })
    };
    future::try_join_all(expected_workers(pools, scans).into_iter().map(load)).await
}

/// The number of dead letters.
pub(super) async fn dead_letters(bus: &Bus) -> Result<u64, Error> {
    let states = bus.inspect_streams().await?;
    let dead = states
        .into_iter()
        .find(|(row, _)| row.stream == Stream::DeadLetters)
        .and_then(|(_, state)| state);
    Ok(dead.map_or(0, |dead| dead.messages))
}

async fn check_workers(bus: &Bus, workers: &Workers, findings: &mut Findings) -> Result<(), Error> {
    let Workers { check, consumers, name, is_needed, consequence } = workers;
    let (mut unserved, mut pending, mut busy) = (0_usize, 0, 0);
    for state in
        future::try_join_all(consumers.iter().map(|consumer| inspect_with_retries(bus, consumer)))
            .await?
    {
        match state {
            Some(state) if state.is_served() => {
                // All its workers are at capacity.
                if state.pending > 0 && state.waiting == 0 {
                    busy += state.pending;
                }
            }
            state => {
                unserved += 1;
                pending += state.map_or(0, |state| state.pending);
            }
        }
    }
    let which = if consumers.len() > 1 {
        format!("{unserved} of its {} consumers", consumers.len())
    } else {
        "its consumer".to_owned()
    };
    if unserved > 0 {
        let summary =
            format!("no {name} serves {which}, so {consequence}; pending messages: {pending}");
        let remedy = "start one; if one is running, see its log and its /readyz for the reason";
        if *is_needed || pending > 0 {
            findings.problem(check, summary, remedy);
        } else {
            findings.warn(check, summary, remedy);
        }
    } else if busy > 0 {
        findings.warn(
            check,
            format!("every {name} is at capacity; waiting messages: {busy}"),
            "if this lasts, start more replicas, or raise the concurrency of each (docs/operations.md)",
        );
    } else {
        findings.ok(check, "running, and keeps up");
    }
    Ok(())
}

/// The state of a consumer, read several times if it seems unserved.
async fn inspect_with_retries(
    bus: &Bus,
    consumer: &ConsumerRow,
) -> Result<Option<ConsumerState>, Error> {
    let mut state = bus.inspect_consumer(consumer).await?;
    for _ in 1..INSPECT_ATTEMPTS {
        if state.as_ref().is_some_and(ConsumerState::is_served) {
            break;
        }
        tokio::time::sleep(INSPECT_RETRY_DELAY).await;
        state = bus.inspect_consumer(consumer).await?;
    }
    Ok(state)
}

fn report_outage(check: &str, error: &Error, findings: &mut Findings) {
    findings.problem(
        check,
        chain(error),
        "see docs/runbook.md; what is written meanwhile is in PostgreSQL, and continues when NATS is back",
    );
}

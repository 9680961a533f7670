//! NATS: the streams, and who takes from the queues.

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
    Findings, PATIENCE,
    database::{millis, whole},
};
use crate::status::chain;

/// How often a queue is asked about that nobody seems to take from: between two requests of a
/// worker there is a moment without one.
const LOOKS: usize = 4;
/// How long between two looks.
const PAUSE: Duration = Duration::from_millis(250);

/// The server and the streams.
pub(super) async fn look(bus: &Bus) -> Findings {
    let mut findings = Findings::default();
    let states = match bus.round_trip(PATIENCE).await {
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
            away("nats", &error, &mut findings);
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
                "a reconciler makes the streams, at its start, after each reconnect and within half a minute: look at its log, and whether JetStream has room",
            );
            continue;
        };
        if !state.behind.is_empty() {
            behind += 1;
            findings.warn(
                "nats.replicas",
                format!("{name} is behind at {}", state.behind.join(", ")),
                "look at these servers; one more that is lost may take the stream with it",
            );
        }
        let full = u128::from(state.bytes) * 100
            / u128::try_from(state.max_bytes).unwrap_or(u128::MAX).max(1);
        if row.when_full == WhenFull::Refuse && full >= 80 {
            wrong += 1;
            let since = state
                .oldest
                .map(|oldest| format!(", the oldest from {}", whole(oldest)))
                .unwrap_or_default();
            findings.problem(
                "nats.streams",
                format!("{name} is full to {full} %: {} messages{since}", state.messages),
                "when it is full nothing is accepted into it: see below who is to take from it",
            );
        }
    }
    if wrong == 0 {
        findings.ok("nats.streams", format!("all {} are there and have room", states.len()));
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
        .find(|(row, _)| row.stream == Stream::Dead)
        .and_then(|(_, state)| state.as_ref());
    match dead.map_or(0, |dead| dead.messages) {
        0 => findings.ok("nats.dead", "no messages were given up"),
        count => findings.warn(
            "nats.dead",
            format!("messages that could not be read and were given up: {count}"),
            "`construct dead list` shows them; they are kept for 30 days",
        ),
    }
    findings
}

/// A service that takes from queues.
struct Workers {
    /// What its findings are called.
    check: String,
    queues: Vec<ConsumerRow>,
    /// Who it is, in words.
    name: &'static str,
    /// Whether the mesh does nothing without it.
    is_needed: bool,
    /// What does not work without it.
    without: String,
}

/// Those that there should be.
fn all(pools: &[String], scans: bool) -> Vec<Workers> {
    let mut all = vec![
        Workers {
            check: "reconciler".to_owned(),
            queues: (0..partition::COUNT)
                .map(topology::task_consumer)
                .chain([topology::spending_consumer()])
                .collect(),
            name: "reconciler",
            is_needed: true,
            without: "no task goes on".to_owned(),
        },
        Workers {
            check: "providers".to_owned(),
            queues: vec![topology::model_consumer(&Pool::model_default())],
            name: "providers service",
            is_needed: true,
            without: "no model is called".to_owned(),
        },
    ];
    all.extend(pools.iter().filter_map(|name| {
        Some(Workers {
            check: format!("interpreter.{name}"),
            queues: vec![topology::code_consumer(&Pool::new(name).ok()?)],
            name: "interpreter",
            is_needed: name == compute::DEFAULT,
            without: format!("scripts of tasks in the pool `{name}` wait"),
        })
    }));
    if scans {
        all.push(Workers {
            check: "scanner".to_owned(),
            queues: vec![topology::scan_consumer()],
            name: "scanner",
            is_needed: true,
            without: "scans wait".to_owned(),
        });
    }
    all
}

/// Which services are there, and whether they can keep up, as their queues tell.
pub(super) async fn services(bus: &Bus, pools: &[String], scans: bool) -> Findings {
    let all = all(pools, scans);
    let judged = future::join_all(all.iter().map(async |workers| {
        let mut findings = Findings::default();
        if let Err(error) = judge(bus, workers, &mut findings).await {
            away(&workers.check, &error, &mut findings);
        }
        findings.0
    }));
    Findings(judged.await.concat())
}

/// How much the workers of each kind have to do.
pub(super) async fn loads(
    bus: &Bus,
    pools: &[String],
    scans: bool,
) -> Result<Vec<WorkerLoad>, Error> {
    let load = async |workers: Workers| {
        let states =
            future::try_join_all(workers.queues.iter().map(|queue| settled(bus, queue))).await?;
        let served =
            states.iter().all(|state| state.as_ref().is_some_and(ConsumerState::is_served));
        let states = || states.iter().flatten();
        Ok(WorkerLoad {
            worker: workers.check,
            served,
            waiting: states().map(|state| state.pending).sum(),
            taken: states().map(|state| state.taken as u64).sum(),
            redelivered: states().map(|state| state.redelivered as u64).sum(),
            delivered: states().map(|state| state.delivered).sum(),
        })
    };
    future::try_join_all(all(pools, scans).into_iter().map(load)).await
}

/// How many messages were given up.
pub(super) async fn dead_letters(bus: &Bus) -> Result<u64, Error> {
    let states = bus.inspect_streams().await?;
    let dead =
        states.into_iter().find(|(row, _)| row.stream == Stream::Dead).and_then(|(_, state)| state);
    Ok(dead.map_or(0, |dead| dead.messages))
}

async fn judge(bus: &Bus, workers: &Workers, findings: &mut Findings) -> Result<(), Error> {
    let Workers { check, queues, name, is_needed, without } = workers;
    let (mut unserved, mut pending, mut busy) = (0_usize, 0, 0);
    for state in future::try_join_all(queues.iter().map(|queue| settled(bus, queue))).await? {
        match state {
            Some(state) if state.is_served() => {
                // Those whose workers all have as much as they can do.
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
    let of = if queues.len() > 1 {
        format!(" {unserved} of its {} queues", queues.len())
    } else {
        " its queue".to_owned()
    };
    if unserved > 0 {
        let summary = format!("no {name} takes from{of}, so {without}; messages there: {pending}");
        let remedy = "start one; where one runs, its log and its /readyz say why it does not take";
        if *is_needed || pending > 0 {
            findings.problem(check, summary, remedy);
        } else {
            findings.warn(check, summary, remedy);
        }
    } else if busy > 0 {
        findings.warn(
            check,
            format!("every {name} has as much as it can do; messages that wait: {busy}"),
            "if this lasts, start more replicas, or raise what each does at a time (docs/operations.md)",
        );
    } else {
        findings.ok(check, "there, and keeps up");
    }
    Ok(())
}

/// How a queue stands, looked at more than once when nobody seems to take from it.
async fn settled(bus: &Bus, queue: &ConsumerRow) -> Result<Option<ConsumerState>, Error> {
    let mut state = bus.inspect_consumer(queue).await?;
    for _ in 1..LOOKS {
        if state.as_ref().is_some_and(ConsumerState::is_served) {
            break;
        }
        tokio::time::sleep(PAUSE).await;
        state = bus.inspect_consumer(queue).await?;
    }
    Ok(state)
}

fn away(check: &str, error: &Error, findings: &mut Findings) {
    findings.problem(
        check,
        chain(error),
        "see docs/runbook.md; what is written meanwhile stands in PostgreSQL, and goes on when NATS is back",
    );
}

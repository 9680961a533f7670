//! Metrics of reconciles, steps, turns and the sweep. `deploy/observability/metrics.txt` lists the
//! metrics of every service. No metric has a task or organization attribute.

use std::{sync::LazyLock, time::Duration};

use construct_domain::{
    decide::Decision,
    task::{BUDGET_EXHAUSTED, Outcome, Stage, Task, TurnOutcome},
};
use construct_runtime::clock;
use construct_store::Error;
use jiff::Timestamp;
use opentelemetry::{
    KeyValue,
    metrics::{Counter, Gauge, Histogram},
};

const ERROR: &str = "error.type";
const KIND: &str = "construct.step.kind";
const OUTCOME: &str = "construct.outcome";

/// Buckets of reconciles, in seconds.
const RECONCILE_BUCKETS_SECONDS: [f64; 12] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];
/// Buckets of steps, in seconds: from a script that adds two numbers to a model that thinks until
/// its deadline.
const STEP_BUCKETS_SECONDS: [f64; 14] =
    [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0];

/// Created on first use, after the process has set up its telemetry.
static INSTRUMENTS: LazyLock<Instruments> = LazyLock::new(Instruments::new);

struct Instruments {
    reconciles: Histogram<f64>,
    steps: Histogram<f64>,
    turns: Counter<u64>,
    quarantined: Counter<u64>,
    actors: Gauge<u64>,
    queued_commands: Gauge<u64>,
    due: Gauge<u64>,
    delay: Gauge<f64>,
    failures: Counter<u64>,
}

impl Instruments {
    fn new() -> Self {
        let meter = opentelemetry::global::meter("construct-reconciler");
        let seconds = |name: &'static str, description: &'static str, boundaries: &[f64]| {
            let histogram = meter.f64_histogram(name).with_unit("s").with_description(description);
            histogram.with_boundaries(boundaries.to_vec()).build()
        };
        let count = |name: &'static str, unit: &'static str, description: &'static str| {
            meter.u64_counter(name).with_unit(unit).with_description(description).build()
        };
        Self {
            reconciles: seconds("construct.reconciler.reconcile", "Reconciles of a task: load, decide, commit, perform", &RECONCILE_BUCKETS_SECONDS),
            steps: seconds(
                "construct.reconciler.step",
                "From the request of a step until its result was committed",
                &STEP_BUCKETS_SECONDS,
            ),
            turns: count("construct.reconciler.turns", "{turn}", "Turns that ended"),
            quarantined: count("construct.reconciler.quarantined", "{task}", "Tasks quarantined, because they fail to reconcile"),
            actors: meter
                .u64_gauge("construct.reconciler.actors")
                .with_unit("{actor}")
                .with_description(
                    "Tasks with an actor: recently reconciled, or due soon",
                )
                .build(),
            queued_commands: meter
                .u64_gauge("construct.reconciler.queued_commands")
                .with_unit("{command}")
                .with_description(
                    "Commands that wait because their organizations have reached the in-flight limit",
                )
                .build(),
            due: meter
                .u64_gauge("construct.reconciler.sweep.due")
                .with_unit("{task}")
                .with_description("Tasks that were due and not woken, at the last sweep")
                .build(),
            delay: meter
                .f64_gauge("construct.reconciler.sweep.delay")
                .with_unit("s")
                .with_description("How long the first of them had been due")
                .build(),
            failures: count("construct.reconciler.sweep.failures", "{sweep}", "Sweeps that could not read PostgreSQL"),
        }
    }
}

/// Initializes counters with zero, so that the first event shows as a rise.
pub(crate) fn init() {
    INSTRUMENTS.quarantined.add(0, &[]);
    INSTRUMENTS.failures.add(0, &[]);
    INSTRUMENTS.turns.add(0, &[KeyValue::new(OUTCOME, TurnOutcome::Completed.as_str())]);
    let failed = KeyValue::new(OUTCOME, TurnOutcome::Failed.as_str());
    INSTRUMENTS.turns.add(0, &[failed, KeyValue::new(ERROR, BUDGET_EXHAUSTED)]);
    record_actors(0);
    record_sweep(0, None);
    record_queued_commands(0, 0);
}

/// Records a reconcile.
pub(crate) fn record_reconcile(took: Duration, error: Option<&Error>) {
    let error = error.map(|error| match error {
        Error::Conflict => "conflict",
        error if error.is_retryable() => "unavailable",
        _ => "lasting",
    });
    match error {
        None => INSTRUMENTS.reconciles.record(took.as_secs_f64(), &[]),
        Some(error) => {
            INSTRUMENTS.reconciles.record(took.as_secs_f64(), &[KeyValue::new(ERROR, error)])
        }
    }
}

/// Records a committed decision about a task with the state `before`. `outcome` is that of its
/// step.
pub(crate) fn record_decision(
    before: &Task,
    outcome: Option<&Outcome>,
    decision: &Decision,
    now: Timestamp,
) {
    if let (Some(outcome), Some(step), Some(turn)) = (outcome, &before.step, &before.turn) {
        let kind = match turn.stage {
            Stage::Model => "model",
            Stage::Code { .. } => "code",
            Stage::Compact { .. } => "compaction",
        };
        let mut labels = vec![KeyValue::new(KIND, kind)];
        match outcome {
            Outcome::Model(..) | Outcome::Code(_) => {
                labels.push(KeyValue::new(OUTCOME, "completed"))
            }
            Outcome::Cancelled(_) | Outcome::Interrupted(_) => {
                labels.push(KeyValue::new(OUTCOME, "cancelled"))
            }
            Outcome::Suspended { .. } => labels.push(KeyValue::new(OUTCOME, "waits")),
            Outcome::Failed(failure) => {
                labels.push(KeyValue::new(OUTCOME, "failed"));
                labels.push(KeyValue::new(ERROR, failure.class.code()));
            }
        }
        let took = Duration::try_from(now.duration_since(step.requested_at())).unwrap_or_default();
        INSTRUMENTS.steps.record(took.as_secs_f64(), &labels);
    }
    if let Some(ended) = &decision.ended {
        let mut labels = vec![KeyValue::new(OUTCOME, ended.outcome.as_str())];
        if let (true, Some(error)) =
            (ended.outcome == TurnOutcome::Failed, &decision.task.last_error)
        {
            labels.push(KeyValue::new(ERROR, error.code.clone()));
        }
        INSTRUMENTS.turns.add(1, &labels);
    }
}

/// Records a quarantined task.
pub(crate) fn record_quarantine() {
    INSTRUMENTS.quarantined.add(1, &[]);
}

/// Records the number of tasks with an actor.
pub(crate) fn record_actors(count: usize) {
    INSTRUMENTS.actors.record(count as u64, &[]);
}

/// Records a sweep: the number of due tasks, and since when the first of them was due.
pub(crate) fn record_sweep(due: usize, since: Option<Timestamp>) {
    let delay = since.and_then(|since| Duration::try_from(clock::now().duration_since(since)).ok());
    INSTRUMENTS.due.record(due as u64, &[]);
    INSTRUMENTS.delay.record(delay.unwrap_or_default().as_secs_f64(), &[]);
}

/// Records the number of model calls and scripts that wait for a slot in their work queue.
pub(crate) fn record_queued_commands(model_calls: usize, scripts: usize) {
    for (kind, count) in [("model", model_calls), ("code", scripts)] {
        INSTRUMENTS.queued_commands.record(count as u64, &[KeyValue::new(KIND, kind)]);
    }
}

/// Records a failed sweep.
pub(crate) fn record_sweep_failure() {
    INSTRUMENTS.failures.add(1, &[]);
}

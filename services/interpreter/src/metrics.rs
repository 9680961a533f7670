//! Metrics of scripts and their host calls. `deploy/observability/metrics.txt` lists the metrics of
//! every service. No label names a task or an organization.

use std::{sync::LazyLock, time::Duration};

use opentelemetry::{
    KeyValue,
    metrics::{Histogram, UpDownCounter},
};

use crate::sandbox::{Limit, Outcome, Status};

const ERROR: &str = "error.type";
const OUTCOME: &str = "construct.outcome";
const TOOL: &str = "gen_ai.tool.name";

/// From a call answered from memory to a command that runs until its step's deadline.
const BUCKET_BOUNDARIES_SECONDS: [f64; 14] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1200.0];

/// Created on first use, after the process has set up its telemetry.
static INSTRUMENTS: LazyLock<Instruments> = LazyLock::new(Instruments::new);

struct Instruments {
    running: UpDownCounter<i64>,
    script_duration: Histogram<f64>,
    script_cpu: Histogram<f64>,
    call_duration: Histogram<f64>,
}

impl Instruments {
    fn new() -> Self {
        let meter = opentelemetry::global::meter("construct-interpreter");
        let seconds = |name: &'static str, description: &'static str| {
            let histogram = meter.f64_histogram(name).with_unit("s").with_description(description);
            histogram.with_boundaries(BUCKET_BOUNDARIES_SECONDS.to_vec()).build()
        };
        Self {
            running: meter
                .i64_up_down_counter("construct.interpreter.running")
                .with_unit("{step}")
                .with_description("Steps whose scripts are running")
                .build(),
            script_duration: seconds(
                "construct.interpreter.script",
                "Time of each run of a script, from start to end",
            ),
            script_cpu: seconds(
                "construct.interpreter.script.cpu",
                "Processor time of each run of a script",
            ),
            call_duration: seconds(
                "construct.interpreter.call",
                "Host calls of scripts, except those answered from the journal",
            ),
        }
    }
}

/// Adds to the number of running steps.
pub(crate) fn add_running(change: i64) {
    INSTRUMENTS.running.add(change, &[]);
}

/// Records a finished run of a script.
pub(crate) fn record_run(outcome: &Outcome, took: Duration) {
    let label = match &outcome.status {
        Status::Completed { .. } => "completed",
        Status::Threw { .. } => "threw",
        Status::LimitExceeded { limit: Limit::Cpu, .. } => "limit_cpu",
        Status::LimitExceeded { limit: Limit::Wall, .. } => "limit_time",
        Status::LimitExceeded { limit: Limit::Memory, .. } => "limit_memory",
        Status::LimitExceeded { .. } => "limit_other",
        // Includes scripts that were suspended or handed back.
        Status::Cancelled => "cancelled",
        Status::Internal(_) => "internal",
    };
    let labels = [KeyValue::new(OUTCOME, label)];
    INSTRUMENTS.script_duration.record(took.as_secs_f64(), &labels);
    INSTRUMENTS.script_cpu.record(outcome.cpu.as_secs_f64(), &labels);
}

/// Records a finished call of a tool.
pub(crate) fn record_call(tool: &str, took: Duration, error: Option<&str>) {
    let tool = KeyValue::new(TOOL, tool.to_owned());
    match error {
        None => INSTRUMENTS.call_duration.record(took.as_secs_f64(), &[tool]),
        Some(error) => INSTRUMENTS
            .call_duration
            .record(took.as_secs_f64(), &[tool, KeyValue::new(ERROR, error.to_owned())]),
    }
}

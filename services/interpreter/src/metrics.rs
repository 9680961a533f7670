//! What is counted of scripts and their calls. `deploy/observability/metrics.txt` lists what every
//! service counts. Nothing is told apart by task or organization.

use std::{sync::LazyLock, time::Duration};

use opentelemetry::{
    KeyValue,
    metrics::{Histogram, UpDownCounter},
};

use crate::sandbox::{Limit, Outcome, Status};

const ERROR: &str = "error.type";
const OUTCOME: &str = "construct.outcome";
const TOOL: &str = "gen_ai.tool.name";

/// In seconds: from a call that is answered from memory to a command that runs until its step's
/// deadline.
const SECONDS: [f64; 14] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1200.0];

/// Made when first used, which is after the process has set its telemetry up.
static INSTRUMENTS: LazyLock<Instruments> = LazyLock::new(Instruments::new);

struct Instruments {
    running: UpDownCounter<i64>,
    scripts: Histogram<f64>,
    processor: Histogram<f64>,
    calls: Histogram<f64>,
}

impl Instruments {
    fn new() -> Self {
        let meter = opentelemetry::global::meter("construct-interpreter");
        let seconds = |name: &'static str, description: &'static str| {
            let histogram = meter.f64_histogram(name).with_unit("s").with_description(description);
            histogram.with_boundaries(SECONDS.to_vec()).build()
        };
        Self {
            running: meter
                .i64_up_down_counter("construct.interpreter.running")
                .with_unit("{step}")
                .with_description("Steps whose scripts are being run")
                .build(),
            scripts: seconds(
                "construct.interpreter.script",
                "Each run of a script, from start to end",
            ),
            processor: seconds(
                "construct.interpreter.script.cpu",
                "Processor time of each run of a script",
            ),
            calls: seconds(
                "construct.interpreter.call",
                "Calls that scripts make of their host, those from the journal left out",
            ),
        }
    }
}

/// A step is begun, or over.
pub(crate) fn running(change: i64) {
    INSTRUMENTS.running.add(change, &[]);
}

/// A run of a script is over.
pub(crate) fn ran(outcome: &Outcome, took: Duration) {
    let word = match &outcome.status {
        Status::Completed { .. } => "completed",
        Status::Threw { .. } => "threw",
        Status::LimitExceeded { limit: Limit::Cpu, .. } => "limit_cpu",
        Status::LimitExceeded { limit: Limit::Wall, .. } => "limit_time",
        Status::LimitExceeded { limit: Limit::Memory, .. } => "limit_memory",
        Status::LimitExceeded { .. } => "limit_other",
        // Also put away until a person has decided, or handed back.
        Status::Cancelled => "cancelled",
        Status::Internal(_) => "internal",
    };
    let labels = [KeyValue::new(OUTCOME, word)];
    INSTRUMENTS.scripts.record(took.as_secs_f64(), &labels);
    INSTRUMENTS.processor.record(outcome.cpu.as_secs_f64(), &labels);
}

/// A call of a tool is over.
pub(crate) fn called(tool: &str, took: Duration, error: Option<&str>) {
    let tool = KeyValue::new(TOOL, tool.to_owned());
    match error {
        None => INSTRUMENTS.calls.record(took.as_secs_f64(), &[tool]),
        Some(error) => INSTRUMENTS
            .calls
            .record(took.as_secs_f64(), &[tool, KeyValue::new(ERROR, error.to_owned())]),
    }
}

//! Metrics of scans. `deploy/observability/metrics.txt` lists the metrics of all services. No label
//! names an organization or repository.

use std::{sync::Arc, time::Duration};

use construct_store::scan::ScanPhase;
use opentelemetry::{
    KeyValue,
    metrics::{Counter, Histogram, Meter, UpDownCounter},
};

const OUTCOME: &str = "construct.outcome";
const PHASE: &str = "construct.scan.phase";

/// The phases in which a scan is active.
const ACTIVE_PHASES: [ScanPhase; 5] = [
    ScanPhase::Queued,
    ScanPhase::Snapshot,
    ScanPhase::Survey,
    ScanPhase::Exploring,
    ScanPhase::Checking,
];

/// Histogram buckets, in seconds.
const DURATION_BUCKETS: [f64; 10] = [0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 180.0, 600.0, 1800.0, 7200.0];

/// The instruments. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Metrics(Arc<Instruments>);

#[derive(Debug)]
struct Instruments {
    scans: Counter<u64>,
    phases: Histogram<f64>,
    waits: Counter<u64>,
    running: UpDownCounter<i64>,
    cost: Counter<f64>,
    candidates: Counter<u64>,
}

impl Metrics {
    /// Creates the instruments of a process with this number of work slots.
    pub(crate) fn new(meter: &Meter, slots: usize) -> Self {
        let count = |name: &'static str, unit: &'static str, description: &'static str| {
            meter.u64_counter(name).with_unit(unit).with_description(description).build()
        };
        let instruments = Instruments {
            scans: count(
                "construct.scanner.scans",
                "{scan}",
                "Scans that ended, by outcome and last phase",
            ),
            phases: meter
                .f64_histogram("construct.scanner.phase.duration")
                .with_unit("s")
                .with_boundaries(DURATION_BUCKETS.to_vec())
                .with_description("How long scans were in each phase")
                .build(),
            waits: count(
                "construct.scanner.waits",
                "{wait}",
                "How often a scan had to wait, by phase",
            ),
            running: meter
                .i64_up_down_counter("construct.scanner.running")
                .with_unit("{scan}")
                .with_description("Scans that are being processed")
                .build(),
            cost: meter
                .f64_counter("construct.scanner.cost")
                .with_unit("{USD}")
                .with_description(
                    "Cost of the explorations of ended scans, in dollars; providers count it, too",
                )
                .build(),
            candidates: count(
                "construct.scanner.candidates",
                "{candidate}",
                "Candidates that models proposed, by the result of the check",
            ),
        };
        meter
            .u64_gauge("construct.scanner.slots")
            .with_unit("{scan}")
            .with_description("Scans that this process handles at a time, at most")
            .build()
            .record(slots as u64, &[]);
        let metrics = Self(Arc::new(instruments));
        metrics.initialize();
        metrics
    }

    /// Starts every series at zero, so that the first increment is visible.
    fn initialize(&self) {
        for phase in ACTIVE_PHASES {
            self.0.waits.add(0, &[KeyValue::new(PHASE, phase.as_str())]);
            self.0.scans.add(0, &end_labels(ScanPhase::Failed, phase));
        }
        self.0.scans.add(0, &end_labels(ScanPhase::Review, ScanPhase::Checking));
        self.0.running.add(0, &[]);
        self.0.cost.add(0.0, &[]);
        self.record_candidates(0, 0);
    }

    /// Counts a scan that ended, by its last phase, with its cost in 10⁻¹² dollars.
    pub(crate) fn record_end(&self, outcome: ScanPhase, from: ScanPhase, cost_pico_usd: i64) {
        self.0.scans.add(1, &end_labels(outcome, from));
        self.0.cost.add(cost_pico_usd.max(0) as f64 / 1e12, &[]);
    }

    /// Records the duration of a phase.
    pub(crate) fn record_phase(&self, phase: ScanPhase, duration: Duration) {
        self.0.phases.record(duration.as_secs_f64(), &[KeyValue::new(PHASE, phase.as_str())]);
    }

    /// Counts a scan that has to wait.
    pub(crate) fn record_wait(&self, phase: ScanPhase) {
        self.0.waits.add(1, &[KeyValue::new(PHASE, phase.as_str())]);
    }

    /// Counts the candidates of a checked answer.
    pub(crate) fn record_candidates(&self, accepted: u64, refused: u64) {
        self.0.candidates.add(accepted, &[KeyValue::new(OUTCOME, "accepted")]);
        self.0.candidates.add(refused, &[KeyValue::new(OUTCOME, "refused")]);
    }

    /// Counts a scan as running, until the returned guard is dropped.
    pub(crate) fn track_running(&self) -> RunningGuard {
        self.0.running.add(1, &[]);
        RunningGuard(self.clone())
    }
}

fn end_labels(outcome: ScanPhase, from: ScanPhase) -> [KeyValue; 2] {
    [KeyValue::new(OUTCOME, outcome.as_str()), KeyValue::new(PHASE, from.as_str())]
}

/// A scan that this process handles.
#[derive(Debug)]
pub(crate) struct RunningGuard(Metrics);

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.0.0.running.add(-1, &[]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scan_metrics_cover_running_waits_end_and_cost() {
        let counted = construct_runtime::metrics::Metrics::new("construct-scanner").unwrap();
        let metrics = Metrics::new(&counted.meter("construct-scanner"), 2);
        let has = |line: &str| {
            let page = counted.text().unwrap();
            assert!(page.lines().any(|found| found == line), "{line}\n{page}");
        };
        has("construct_scanner_slots 2");
        has("construct_scanner_running 0");
        has(
            r#"construct_scanner_scans_total{construct_outcome="failed",construct_scan_phase="queued"} 0"#,
        );
        let one = metrics.track_running();
        has("construct_scanner_running 1");
        metrics.record_wait(ScanPhase::Exploring);
        metrics.record_end(ScanPhase::Failed, ScanPhase::Exploring, 1_500_000_000_000);
        drop(one);
        has("construct_scanner_running 0");
        has(r#"construct_scanner_waits_total{construct_scan_phase="exploring"} 1"#);
        has(
            r#"construct_scanner_scans_total{construct_outcome="failed",construct_scan_phase="exploring"} 1"#,
        );
        has("construct_scanner_cost_total 1.5");
    }
}

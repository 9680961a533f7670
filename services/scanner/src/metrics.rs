//! What is counted of scans. `deploy/observability/metrics.txt` lists what every service counts.
//! Nothing is told apart by organization or repository.

use std::{sync::Arc, time::Duration};

use construct_store::scan::ScanPhase;
use opentelemetry::{
    KeyValue,
    metrics::{Counter, Histogram, Meter, UpDownCounter},
};

const OUTCOME: &str = "construct.outcome";
const PHASE: &str = "construct.scan.phase";

/// The phases a scan is worked on in.
const ACTIVE_PHASES: [ScanPhase; 5] = [
    ScanPhase::Queued,
    ScanPhase::Snapshot,
    ScanPhase::Survey,
    ScanPhase::Exploring,
    ScanPhase::Checking,
];

/// In seconds.
const DURATION_BUCKETS: [f64; 10] = [0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 180.0, 600.0, 1800.0, 7200.0];

/// Counts. Clones count together.
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
    /// Makes the instruments of a process that works on so many scans at a time.
    pub(crate) fn new(meter: &Meter, slots: usize) -> Self {
        let count = |name: &'static str, unit: &'static str, description: &'static str| {
            meter.u64_counter(name).with_unit(unit).with_description(description).build()
        };
        let instruments = Instruments {
            scans: count(
                "construct.scanner.scans",
                "{scan}",
                "Scans whose work is over, by how they ended and from which phase",
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
                "How often a scan could not be gone on with and had to wait, by phase",
            ),
            running: meter
                .i64_up_down_counter("construct.scanner.running")
                .with_unit("{scan}")
                .with_description("Scans that are being worked on")
                .build(),
            cost: meter
                .f64_counter("construct.scanner.cost")
                .with_unit("{USD}")
                .with_description(
                    "What the explorations of scans that are over have cost, in dollars; providers count it, too",
                )
                .build(),
            candidates: count(
                "construct.scanner.candidates",
                "{candidate}",
                "What models proposed, by what the check said",
            ),
        };
        meter
            .u64_gauge("construct.scanner.slots")
            .with_unit("{scan}")
            .with_description("Scans that this process works on at a time, at most")
            .build()
            .record(slots as u64, &[]);
        let metrics = Self(Arc::new(instruments));
        metrics.initialize();
        metrics
    }

    /// What is counted stands at zero from the start, so that the first one shows as a rise.
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

    /// A scan's work is over, which was in this phase and has cost so much, in 10⁻¹² dollars.
    pub(crate) fn record_end(&self, outcome: ScanPhase, from: ScanPhase, cost_pico_usd: i64) {
        self.0.scans.add(1, &end_labels(outcome, from));
        self.0.cost.add(cost_pico_usd.max(0) as f64 / 1e12, &[]);
    }

    /// A scan has left a phase.
    pub(crate) fn record_phase(&self, phase: ScanPhase, took: Duration) {
        self.0.phases.record(took.as_secs_f64(), &[KeyValue::new(PHASE, phase.as_str())]);
    }

    /// A scan cannot be gone on with for a while.
    pub(crate) fn record_wait(&self, phase: ScanPhase) {
        self.0.waits.add(1, &[KeyValue::new(PHASE, phase.as_str())]);
    }

    /// A model's answer is checked.
    pub(crate) fn record_candidates(&self, accepted: u64, refused: u64) {
        self.0.candidates.add(accepted, &[KeyValue::new(OUTCOME, "accepted")]);
        self.0.candidates.add(refused, &[KeyValue::new(OUTCOME, "refused")]);
    }

    /// A scan is worked on, until what this gives is dropped.
    pub(crate) fn track_running(&self) -> RunningGuard {
        self.0.running.add(1, &[]);
        RunningGuard(self.clone())
    }
}

fn end_labels(outcome: ScanPhase, from: ScanPhase) -> [KeyValue; 2] {
    [KeyValue::new(OUTCOME, outcome.as_str()), KeyValue::new(PHASE, from.as_str())]
}

/// A scan in the hands of this process.
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
    fn a_scan_counts_as_running_until_it_is_put_down_and_its_end_by_phase_with_its_cost() {
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

//! What is counted of those who watch. `deploy/observability/metrics.txt` lists what every service counts.

use std::sync::LazyLock;

use construct_proto::v1::Event;
use jiff::Timestamp;
use opentelemetry::metrics::{Histogram, UpDownCounter};

/// In seconds: from an event that is passed on at once to one that a busy mesh held up.
const DELAYS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];

/// Made when first used, which is after the process has set its telemetry up.
static INSTRUMENTS: LazyLock<Instruments> = LazyLock::new(Instruments::new);

struct Instruments {
    subscriptions: UpDownCounter<i64>,
    delays: Histogram<f64>,
}

impl Instruments {
    fn new() -> Self {
        let meter = opentelemetry::global::meter("construct-gateway");
        Self {
            subscriptions: meter
                .i64_up_down_counter("construct.gateway.subscriptions")
                .with_unit("{subscription}")
                .with_description("Clients that watch events")
                .build(),
            delays: meter
                .f64_histogram("construct.gateway.event.delay")
                .with_unit("s")
                .with_description("From when a record was written until the feeds of those who watch had it live")
                .with_boundaries(DELAYS.to_vec())
                .build(),
        }
    }
}

/// Somebody watches, until this is dropped.
pub(crate) struct Watching(());

impl Watching {
    pub(crate) fn begin() -> Self {
        INSTRUMENTS.subscriptions.add(1, &[]);
        Self(())
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        INSTRUMENTS.subscriptions.add(-1, &[]);
    }
}

/// A feed has heard of a record as it was published.
pub(crate) fn heard(event: &Event) {
    if let Some(time) = &event.time {
        let written = i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanos);
        // The clocks of two machines may differ a little.
        let nanos = (Timestamp::now().as_nanosecond() - written).max(0);
        INSTRUMENTS.delays.record(nanos as f64 / 1e9, &[]);
    }
}

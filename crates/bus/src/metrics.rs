//! Metrics of the connection and the work queues. `deploy/observability/metrics.txt` lists the
//! metrics of every service.

use std::sync::LazyLock;

use jiff::Timestamp;
use opentelemetry::{
    KeyValue,
    metrics::{Counter, Gauge, Histogram, Meter},
};
use tokio::sync::watch;

use crate::{
    Connection,
    topology::{ConsumerRow, Stream},
};

const STREAM: &str = "messaging.destination.name";
const CONSUMER: &str = "messaging.consumer.group.name";

/// Histogram boundaries in seconds: from immediate delivery to a wait of minutes.
const WAIT_BOUNDARIES: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0];

/// Created on first use, after the process has set up its telemetry.
static INSTRUMENTS: LazyLock<Instruments> = LazyLock::new(Instruments::new);

struct Instruments {
    wait: Histogram<f64>,
    pending: Gauge<u64>,
    redeliveries: Counter<u64>,
    dead: Counter<u64>,
}

impl Instruments {
    fn new() -> Self {
        let meter = meter();
        Self {
            wait: meter
                .f64_histogram("construct.bus.wait")
                .with_unit("s")
                .with_description("Time from the publication of a message to its first delivery")
                .with_boundaries(WAIT_BOUNDARIES.to_vec())
                .build(),
            pending: meter
                .u64_gauge("construct.bus.pending")
                .with_unit("{message}")
                .with_description(
                    "Messages of a work queue that wait for a worker, as last reported",
                )
                .build(),
            redeliveries: meter
                .u64_counter("construct.bus.redeliveries")
                .with_unit("{message}")
                .with_description("Redelivered messages, which a worker did not settle")
                .build(),
            dead: meter
                .u64_counter("construct.bus.dead.letters")
                .with_unit("{message}")
                .with_description("Messages that became dead letters")
                .build(),
        }
    }
}

fn meter() -> Meter {
    opentelemetry::global::meter("construct-bus")
}

/// Reports whether the connection is up, for as long as the bus exists.
pub(crate) fn connection(state: watch::Receiver<Connection>) {
    meter()
        .u64_observable_gauge("construct.bus.connected")
        .with_description("Whether the process is connected to NATS: 1, or 0")
        .with_callback(move |gauge| {
            // A dropped connection reports nothing: there may be another one.
            if state.has_changed().is_ok() {
                gauge.observe(u64::from(*state.borrow() != Connection::Down), &[]);
            }
        })
        .build();
}

/// Initializes a consumer's metrics with zero, so that the first event shows as a rise.
pub(crate) fn consuming(row: &ConsumerRow) {
    INSTRUMENTS.redeliveries.add(0, &[stream(row.stream)]);
    INSTRUMENTS.dead.add(0, &[stream(row.stream)]);
    pending(row, 0);
}

/// Records how many messages wait for a worker.
pub(crate) fn pending(row: &ConsumerRow, messages: u64) {
    INSTRUMENTS
        .pending
        .record(messages, &[stream(row.stream), KeyValue::new(CONSUMER, row.durable.clone())]);
}

/// Records a delivery. `delivery` counts from 1; `published` is in nanoseconds since 1970.
pub(crate) fn delivered(row: &ConsumerRow, delivery: u32, published: i64) {
    if delivery > 1 {
        return INSTRUMENTS.redeliveries.add(1, &[stream(row.stream)]);
    }
    // The clocks of the server and this machine may differ a little.
    let nanos = (Timestamp::now().as_nanosecond() - i128::from(published)).max(0);
    INSTRUMENTS.wait.record(nanos as f64 / 1e9, &[stream(row.stream)]);
}

/// Counts a dead letter.
pub(crate) fn dead_letter(from: Stream) {
    INSTRUMENTS.dead.add(1, &[stream(from)]);
}

fn stream(stream: Stream) -> KeyValue {
    KeyValue::new(STREAM, stream.name())
}

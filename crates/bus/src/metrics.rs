//! What is counted of the connection and of the work queues. `deploy/observability/metrics.txt`
//! lists what every service counts.

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

/// In seconds: from a message that is taken at once to one that nobody took for minutes.
const WAIT_BOUNDARIES: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0];

/// Made when first used, which is after the process has set its telemetry up.
static INSTRUMENTS: LazyLock<Instruments> = LazyLock::new(Instruments::new);

struct Instruments {
    waits: Histogram<f64>,
    pending: Gauge<u64>,
    redeliveries: Counter<u64>,
    dead: Counter<u64>,
}

impl Instruments {
    fn new() -> Self {
        let meter = meter();
        Self {
            waits: meter
                .f64_histogram("construct.bus.wait")
                .with_unit("s")
                .with_description(
                    "How long messages waited in a work queue until a worker had them first",
                )
                .with_boundaries(WAIT_BOUNDARIES.to_vec())
                .build(),
            pending: meter
                .u64_gauge("construct.bus.pending")
                .with_unit("{message}")
                .with_description(
                    "Messages of a work queue that no worker had when this one last heard of it",
                )
                .build(),
            redeliveries: meter
                .u64_counter("construct.bus.redeliveries")
                .with_unit("{message}")
                .with_description(
                    "Messages that came again, because whoever had them did not settle them",
                )
                .build(),
            dead: meter
                .u64_counter("construct.bus.dead.letters")
                .with_unit("{message}")
                .with_description("Messages that could not be read and were given up")
                .build(),
        }
    }
}

fn meter() -> Meter {
    opentelemetry::global::meter("construct-bus")
}

/// Shows whether there is a connection, for as long as somebody keeps it up.
pub(crate) fn connection(state: watch::Receiver<Connection>) {
    meter()
        .u64_observable_gauge("construct.bus.connected")
        .with_description("Whether the process is connected to NATS: 1, or 0")
        .with_callback(move |gauge| {
            // One that was given up says nothing any more: there may be another one.
            if state.has_changed().is_ok() {
                gauge.observe(u64::from(*state.borrow() != Connection::Down), &[]);
            }
        })
        .build();
}

/// A consumer is about to take messages. What is counted of it stands at zero from now on, so that
/// the first one shows as a rise.
pub(crate) fn consuming(row: &ConsumerRow) {
    INSTRUMENTS.redeliveries.add(0, &[stream(row.stream)]);
    INSTRUMENTS.dead.add(0, &[stream(row.stream)]);
    pending(row, 0);
}

/// So many messages wait for a worker.
pub(crate) fn pending(row: &ConsumerRow, messages: u64) {
    INSTRUMENTS
        .pending
        .record(messages, &[stream(row.stream), KeyValue::new(CONSUMER, row.durable.clone())]);
}

/// A worker has a message: the `delivery`th delivery of what was published at this time, in
/// nanoseconds since 1970.
pub(crate) fn delivered(row: &ConsumerRow, delivery: u32, published: i64) {
    if delivery > 1 {
        return INSTRUMENTS.redeliveries.add(1, &[stream(row.stream)]);
    }
    // The clocks of the server and of this machine may differ a little.
    let nanos = (Timestamp::now().as_nanosecond() - i128::from(published)).max(0);
    INSTRUMENTS.waits.record(nanos as f64 / 1e9, &[stream(row.stream)]);
}

/// A message has become a dead letter.
pub(crate) fn dead_letter(from: Stream) {
    INSTRUMENTS.dead.add(1, &[stream(from)]);
}

fn stream(stream: Stream) -> KeyValue {
    KeyValue::new(STREAM, stream.name())
}

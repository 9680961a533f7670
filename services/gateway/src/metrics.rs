//! Metrics of calls and subscriptions. `deploy/observability/metrics.txt` lists the metrics of
//! every service.

use std::{
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use construct_proto::v1::Event;
use construct_runtime::clock;
use opentelemetry::{
    KeyValue,
    metrics::{Counter, Histogram, UpDownCounter},
};
use tonic::Code;

use crate::{audit::origin::Protocol, quotas::tiers::QUOTAS};

/// Bucket boundaries in seconds, from an event passed on at once to one delayed by a busy mesh.
const DELAY_BUCKETS: [f64; 12] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];

/// Bucket boundaries in seconds, from a single index lookup to the longest call.
const DURATION_BUCKETS: [f64; 11] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0];

/// Created at first use, which is after the process has initialized its telemetry.
static INSTRUMENTS: LazyLock<Instruments> = LazyLock::new(Instruments::new);

struct Instruments {
    subscriptions: UpDownCounter<i64>,
    delays: Histogram<f64>,
    calls: Histogram<f64>,
    audit_entries_lost: Counter<u64>,
    quotas_exceeded: Counter<u64>,
}

impl Instruments {
    fn new() -> Self {
        let meter = opentelemetry::global::meter("construct-gateway");
        Self {
            subscriptions: meter
                .i64_up_down_counter("construct.gateway.subscriptions")
                .with_unit("{subscription}")
                .with_description("Active event subscriptions")
                .build(),
            delays: meter
                .f64_histogram("construct.gateway.event.delay")
                .with_unit("s")
                .with_description("Delay between the write of a record and its arrival at live subscriptions")
                .with_boundaries(DELAY_BUCKETS.to_vec())
                .build(),
            calls: meter
                .f64_histogram("construct.gateway.request")
                .with_unit("s")
                .with_description("Duration from the acceptance of a call until its response, or response stream, began")
                .with_boundaries(DURATION_BUCKETS.to_vec())
                .build(),
            audit_entries_lost: meter
                .u64_counter("construct.gateway.audit.lost")
                .with_unit("{entry}")
                .with_description("Audit entries that could not be written")
                .build(),
            quotas_exceeded: meter
                .u64_counter("construct.gateway.quota.refused")
                .with_unit("{request}")
                .with_description("Calls refused because a quota of the organization or key is exhausted")
                .build(),
        }
    }
}

/// An active subscription, until it is dropped.
pub(crate) struct ActiveSubscription(());

impl ActiveSubscription {
    pub(crate) fn begin() -> Self {
        INSTRUMENTS.subscriptions.add(1, &[]);
        Self(())
    }
}

impl Drop for ActiveSubscription {
    fn drop(&mut self) {
        INSTRUMENTS.subscriptions.add(-1, &[]);
    }
}

/// Records the delay of an event that a feed received.
pub(crate) fn record_delay(event: &Event) {
    if let Some(time) = &event.time {
        let written = i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanos);
        // The clocks of two machines may differ slightly.
        let nanos = (clock::now().as_nanosecond() - written).max(0);
        INSTRUMENTS.delays.record(nanos as f64 / 1e9, &[]);
    }
}

/// Measures a call of a contract method until its response begins.
pub(crate) struct Call {
    /// `None`: the call is not counted.
    method: Option<&'static str>,
    protocol: Protocol,
    started_at: Instant,
    code: Code,
    /// Set when the services have the call, which then count it.
    transcoded: Option<Transcoded>,
}

/// An extension of a transcoded request that tells whether the services have it. A request that
/// does not get so far is counted by the protocol.
#[derive(Debug, Clone, Default)]
pub(crate) struct Transcoded(Arc<AtomicBool>);

impl Transcoded {
    /// Called when the services have the request.
    pub(crate) fn reached(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Call {
    /// Begins a call. Unless a code is set, it counts as canceled by the client.
    pub(crate) fn begin(method: Option<&'static str>, protocol: Protocol) -> Self {
        Self {
            method,
            protocol,
            started_at: Instant::now(),
            code: Code::Cancelled,
            transcoded: None,
        }
    }

    /// Begins a transcoded call, which is counted here unless the services get it.
    pub(crate) fn transcoded(
        method: Option<&'static str>,
        protocol: Protocol,
        transcoded: Transcoded,
    ) -> Self {
        let mut call = Self::begin(method, protocol);
        call.transcoded = Some(transcoded);
        call
    }

    /// Sets the code of the call.
    pub(crate) const fn set_code(&mut self, code: Code) {
        self.code = code;
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        // All labels have few values: the contract's methods, gRPC's codes, and the protocols.
        let Some(method) = self.method else { return };
        if self.transcoded.as_ref().is_some_and(|transcoded| transcoded.0.load(Ordering::Acquire)) {
            return;
        }
        let labels = [
            KeyValue::new("rpc.method", method),
            KeyValue::new("rpc.response.status_code", code_name(self.code)),
            KeyValue::new("construct.protocol", self.protocol.as_str()),
        ];
        INSTRUMENTS.calls.record(self.started_at.elapsed().as_secs_f64(), &labels);
    }
}

/// Counts audit entries that could not be written.
pub(crate) fn audit_entries_lost(count: usize) {
    INSTRUMENTS.audit_entries_lost.add(count as u64, &[]);
}

/// Counts a call that was refused because of a quota.
pub(crate) fn quota_exceeded(quota: &'static str) {
    INSTRUMENTS.quotas_exceeded.add(1, &[KeyValue::new("construct.quota", quota)]);
}

/// Initializes counters with zero, so that the first increment is visible as a rise.
pub(crate) fn initialize() {
    audit_entries_lost(0);
    for quota in QUOTAS {
        INSTRUMENTS.quotas_exceeded.add(0, &[KeyValue::new("construct.quota", quota)]);
    }
}

/// The gRPC name of a code.
pub(crate) const fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

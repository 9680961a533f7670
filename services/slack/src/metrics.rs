//! Metrics of mentions and of calls. `deploy/observability/metrics.txt` lists the metrics of all
//! services. No label names a workspace, user or task.

use std::{sync::Arc, time::Duration};

use construct_store::slack::MentionState;
use opentelemetry::{
    KeyValue,
    metrics::{Counter, Histogram, Meter},
};

/// Histogram buckets, in seconds.
const DURATION_BUCKETS: [f64; 10] = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6];

/// The instruments. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Metrics(Arc<Instruments>);

#[derive(Debug)]
struct Instruments {
    mentions: Counter<u64>,
    calls: Histogram<f64>,
}

impl Metrics {
    pub(crate) fn new(meter: &Meter) -> Self {
        let metrics = Self(Arc::new(Instruments {
            mentions: meter
                .u64_counter("construct.slack.mentions")
                .with_unit("{mention}")
                .with_description("Mentions that reached a final state, by outcome")
                .build(),
            calls: meter
                .f64_histogram("construct.slack.call.duration")
                .with_unit("s")
                .with_boundaries(DURATION_BUCKETS.to_vec())
                .with_description("Calls of Slack's Web API, by method and error")
                .build(),
        }));
        // Starts every series at zero, so that the first increment is visible.
        for state in [MentionState::Answered, MentionState::Refused, MentionState::Failed] {
            metrics.0.mentions.add(0, &[outcome(state)]);
        }
        metrics
    }

    /// Counts a mention that reached a final state.
    pub(crate) fn record_mention(&self, state: MentionState) {
        self.0.mentions.add(1, &[outcome(state)]);
    }

    /// Records a call of a method; `error` is empty on success.
    pub(crate) fn record_call(
        &self,
        method: &'static str,
        error: &'static str,
        duration: Duration,
    ) {
        let mut labels = vec![KeyValue::new("rpc.method", method)];
        if !error.is_empty() {
            labels.push(KeyValue::new("error.type", error));
        }
        self.0.calls.record(duration.as_secs_f64(), &labels);
    }
}

fn outcome(state: MentionState) -> KeyValue {
    KeyValue::new("construct.outcome", state.as_str())
}

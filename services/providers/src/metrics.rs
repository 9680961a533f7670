//! Metrics of model calls, under the names of OpenTelemetry's semantic conventions for generative
//! AI where those exist (docs/providers.md lists them).
//!
//! Most metrics have the provider and the model as attributes. Operators create both, so their
//! number is small, and the SDK bounds it. No metric has an attribute for a task, an organization
//! or a key.

use std::{sync::Arc, time::Duration};

use construct_domain::money::Usage;
use construct_proto::{mesh::v1::FailureClass, v1::ModelProviderType};
use opentelemetry::{
    KeyValue,
    metrics::{Counter, Histogram, Meter, UpDownCounter},
};

use crate::{
    breaker::{Breakers, state::State},
    router::Target,
    vendor::{Origin, Request},
};

const OPERATION: &str = "gen_ai.operation.name";
const PROVIDER: &str = "gen_ai.provider.name";
const PROVIDER_ID: &str = "construct.provider.id";
const MODEL: &str = "gen_ai.request.model";
const TOKEN_TYPE: &str = "gen_ai.token.type";
const ERROR: &str = "error.type";

/// Buckets in seconds, as the semantic conventions recommend.
const DURATION_BUCKETS_SECONDS: [f64; 14] =
    [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92];
/// Buckets in tokens, as the semantic conventions recommend.
const TOKEN_BUCKETS: [f64; 14] = [
    1.0,
    4.0,
    16.0,
    64.0,
    256.0,
    1_024.0,
    4_096.0,
    16_384.0,
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
];
/// Picodollars per dollar.
const PICO_PER_USD: f64 = 1e12;

/// The metrics of model calls. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Metrics(Arc<Instruments>);

#[derive(Debug)]
struct Instruments {
    duration: Histogram<f64>,
    first_chunk: Histogram<f64>,
    tokens: Histogram<u64>,
    cost: Counter<f64>,
    retries: Counter<u64>,
    fallbacks: Counter<u64>,
    key_wait: Histogram<f64>,
    key_waiting: UpDownCounter<i64>,
}

/// The attributes of a model call.
#[derive(Debug, Clone)]
pub(crate) struct Labels([KeyValue; 4]);

/// A call that waits for a key, until it is dropped.
pub(crate) struct KeyWait<'a> {
    metrics: &'a Metrics,
    labels: &'a Labels,
}

/// How a vendor call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VendorCallEnd {
    Answered,
    Failed(FailureClass),
    /// The rest was not needed: the call was canceled or handed back, or another model was quicker.
    Abandoned,
}

impl Metrics {
    pub(crate) fn new(meter: &Meter, breakers: &Breakers) -> Self {
        let breakers = breakers.clone();
        meter
            .u64_observable_gauge("construct.providers.breaker.state")
            .with_description(
                "How the circuit breaker of a model stands: 0 closed, 1 half open, 2 open",
            )
            .with_callback(move |gauge| {
                for (key, state) in breakers.states() {
                    let value = match state {
                        State::Closed => 0,
                        State::HalfOpen => 1,
                        State::Open { .. } => 2,
                    };
                    gauge.observe(
                        value,
                        &[
                            KeyValue::new(PROVIDER_ID, key.provider_id),
                            KeyValue::new(MODEL, key.vendor_model),
                        ],
                    );
                }
            })
            .build();
        let seconds = |name: &'static str, description: &'static str| {
            let histogram = meter.f64_histogram(name).with_unit("s").with_description(description);
            histogram.with_boundaries(DURATION_BUCKETS_SECONDS.to_vec()).build()
        };
        let count = |name: &'static str, description: &'static str| {
            meter.u64_counter(name).with_unit("{call}").with_description(description).build()
        };
        Self(Arc::new(Instruments {
            duration: seconds(
                "gen_ai.client.operation.duration",
                "Each call of a vendor, retries apart",
            ),
            first_chunk: seconds(
                "gen_ai.client.operation.time_to_first_chunk",
                "From sending a request to the first piece of the answer",
            ),
            tokens: meter
                .u64_histogram("gen_ai.client.token.usage")
                .with_unit("{token}")
                .with_description("Tokens of each call")
                .with_boundaries(TOKEN_BUCKETS.to_vec())
                .build(),
            cost: meter
                .f64_counter("construct.providers.cost")
                .with_unit("{USD}")
                .with_description("What calls have cost, in dollars")
                .build(),
            retries: count(
                "construct.providers.retries",
                "Calls that failed and are tried again at the same model",
            ),
            fallbacks: count(
                "construct.providers.fallbacks",
                "Calls that a model cannot answer and its fallback is asked",
            ),
            key_wait: seconds(
                "construct.providers.key.wait",
                "How long calls waited for a key that was at its limits",
            ),
            key_waiting: meter
                .i64_up_down_counter("construct.providers.key.waiting")
                .with_unit("{call}")
                .with_description("Calls that wait for a key that is at its limits")
                .build(),
        }))
    }

    /// The answer of a call has begun.
    pub(crate) fn record_first_chunk(&self, labels: &Labels, after: Duration) {
        self.0.first_chunk.record(after.as_secs_f64(), &labels.0);
    }

    /// A call has ended with this usage.
    pub(crate) fn record_call(
        &self,
        labels: &Labels,
        end: VendorCallEnd,
        after: Duration,
        usage: &Usage,
    ) {
        match end.error_type() {
            None => self.0.duration.record(after.as_secs_f64(), &labels.0),
            Some(word) => {
                self.0.duration.record(after.as_secs_f64(), &labels.with_attribute(ERROR, word))
            }
        }
        for (kind, tokens) in [
            ("input", usage.input_tokens),
            ("output", usage.output_tokens),
            ("cache_read", usage.cache_read_tokens),
            ("cache_write", usage.cache_write_tokens),
        ] {
            if let Ok(tokens @ 1..) = u64::try_from(tokens) {
                self.0.tokens.record(tokens, &labels.with_attribute(TOKEN_TYPE, kind));
            }
        }
        if usage.cost_pico_usd > 0 {
            // A counter for dashboards; the ledger is exact.
            self.0.cost.add(usage.cost_pico_usd as f64 / PICO_PER_USD, &labels.0);
        }
    }

    /// A failed call is retried.
    pub(crate) fn record_retry(&self, labels: &Labels, class: FailureClass) {
        self.0.retries.add(1, &labels.with_attribute(ERROR, class_name(class)));
    }

    /// A call moves to the fallback model.
    pub(crate) fn record_fallback(&self, labels: &Labels, class: FailureClass) {
        self.0.fallbacks.add(1, &labels.with_attribute(ERROR, class_name(class)));
    }

    /// A call starts to wait for a key.
    pub(crate) fn start_key_wait<'a>(&'a self, labels: &'a Labels) -> KeyWait<'a> {
        self.0.key_waiting.add(1, &labels.0);
        KeyWait { metrics: self, labels }
    }
}

impl KeyWait<'_> {
    /// The call got a key.
    pub(crate) fn finish(self, after: Duration) {
        self.metrics.0.key_wait.record(after.as_secs_f64(), &self.labels.0);
    }
}

impl Drop for KeyWait<'_> {
    fn drop(&mut self) {
        self.metrics.0.key_waiting.add(-1, &self.labels.0);
    }
}

impl Labels {
    pub(crate) fn new(target: &Target, request: &Request) -> Self {
        let (operation, vendor) = Self::operation_and_vendor(target, request);
        Self([
            KeyValue::new(OPERATION, operation),
            KeyValue::new(PROVIDER, vendor),
            KeyValue::new(PROVIDER_ID, target.provider.id.clone()),
            KeyValue::new(MODEL, target.model.vendor_model.clone()),
        ])
    }

    /// The names of the operation and the vendor in the semantic conventions.
    pub(crate) fn operation_and_vendor(
        target: &Target,
        request: &Request,
    ) -> (&'static str, String) {
        let operation = if request.embed.is_some() { "embeddings" } else { "chat" };
        let vendor = match target.provider.r#type() {
            ModelProviderType::Bedrock => "aws.bedrock".to_owned(),
            ModelProviderType::Gemini => "gcp.gemini".to_owned(),
            ModelProviderType::Xai => "x_ai".to_owned(),
            ModelProviderType::OpenaiResponses => "openai".to_owned(),
            // The semantic conventions use our names, or don't mention these vendors.
            ModelProviderType::Anthropic
            | ModelProviderType::Openai
            | ModelProviderType::Deepseek
            | ModelProviderType::Ollama
            | ModelProviderType::Openrouter
            | ModelProviderType::Local
            | ModelProviderType::Scripted
            | ModelProviderType::Unspecified => Origin::from_provider(&target.provider).vendor,
        };
        (operation, vendor)
    }

    fn with_attribute(&self, name: &'static str, value: &'static str) -> Vec<KeyValue> {
        self.0.iter().cloned().chain([KeyValue::new(name, value)]).collect()
    }
}

impl VendorCallEnd {
    /// The error as an attribute value; none for an answer.
    pub(crate) fn error_type(self) -> Option<&'static str> {
        match self {
            Self::Answered => None,
            Self::Failed(class) => Some(class_name(class)),
            Self::Abandoned => Some("given_up"),
        }
    }
}

/// A failure class as an attribute value.
pub(crate) const fn class_name(class: FailureClass) -> &'static str {
    match class {
        FailureClass::Transient => "transient",
        FailureClass::RateLimited => "rate_limited",
        FailureClass::Overloaded => "overloaded",
        FailureClass::Authentication => "authentication",
        FailureClass::InvalidRequest => "invalid_request",
        FailureClass::ContextTooLong => "context_too_long",
        FailureClass::ContentRefused => "content_refused",
        FailureClass::DeadlineExceeded => "deadline_exceeded",
        FailureClass::Configuration => "configuration",
        FailureClass::Internal => "internal",
        FailureClass::Unspecified => "unspecified",
    }
}

//! Metrics of a process: counters, gauges and histograms of OpenTelemetry, served to Prometheus at
//! `/metrics` on the health port, and pushed over OTLP if an address for that is configured.
//!
//! A service creates its instruments with `opentelemetry::global::meter` once it runs. Attributes
//! of an instrument must have few values, such as models and kinds of failure, and never a task:
//! the SDK keeps at most 2,000 combinations of an instrument's attributes and merges the rest into
//! one.

use std::{env, sync::OnceLock};

use opentelemetry::metrics::{Meter, MeterProvider as _};
use opentelemetry_otlp::{ExporterBuildError, MetricExporter};
use opentelemetry_sdk::{Resource, error::OTelSdkError, metrics::SdkMeterProvider};
use prometheus::{Registry, TextEncoder};

/// The media type of [`Metrics::text`].
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

static PROCESS: OnceLock<Metrics> = OnceLock::new();

/// Why metrics are unavailable.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The OTLP exporter cannot be created, for example because of its address.
    #[error("metrics cannot be exported to the address in OTEL_EXPORTER_OTLP_ENDPOINT")]
    Exporter(#[from] ExporterBuildError),
    /// The Prometheus exporter cannot be created.
    #[error("metrics cannot be served")]
    Page(#[from] OTelSdkError),
}

/// The instruments of a process or a test. Clones share them.
#[derive(Debug, Clone)]
pub struct Metrics {
    provider: SdkMeterProvider,
    registry: Registry,
}

impl Metrics {
    /// Metrics for the `/metrics` page only, for tests.
    ///
    /// # Errors
    /// [`Error::Page`], which has no known cause.
    pub fn new(service: &'static str) -> Result<Self, Error> {
        Self::build(Resource::builder_empty().with_service_name(service).build(), None)
    }

    /// Metrics for the page, and for a collector if the environment names one. Must be called
    /// inside a tokio runtime, which the exporter uses.
    ///
    /// # Errors
    /// [`Error::Exporter`]: a malformed address.
    pub(crate) fn from_environment(resource: Resource) -> Result<Self, Error> {
        let is_set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
        let push =
            is_set("OTEL_EXPORTER_OTLP_ENDPOINT") || is_set("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT");
        // The exporter reads the address, headers and timeouts, and its reader the interval, from
        // the variables of the specification.
        let exporter =
            if push { Some(MetricExporter::builder().with_tonic().build()?) } else { None };
        Self::build(resource, exporter)
    }

    fn build(resource: Resource, push: Option<MetricExporter>) -> Result<Self, Error> {
        let registry = Registry::new();
        // The meter's name identifies the code.
        let page = opentelemetry_prometheus::exporter()
            .with_registry(registry.clone())
            .scope_info_enabled(false);
        let mut builder =
            SdkMeterProvider::builder().with_resource(resource).with_reader(page.build()?);
        if let Some(exporter) = push {
            builder = builder.with_periodic_exporter(exporter);
        }
        Ok(Self { provider: builder.build(), registry })
    }

    /// Creates instruments.
    pub fn meter(&self, name: &'static str) -> Meter {
        self.provider.meter(name)
    }

    /// All metrics in Prometheus' text format; see [`CONTENT_TYPE`].
    ///
    /// # Errors
    /// When encoding fails, which has no known cause.
    pub fn text(&self) -> Result<String, prometheus::Error> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }

    /// Makes these the metrics of the process. A second call has no effect.
    pub(crate) fn install(self) {
        opentelemetry::global::set_meter_provider(PROCESS.get_or_init(|| self).provider.clone());
    }

    /// Pushes pending metrics. Blocks for up to five seconds when a collector does not answer.
    pub(crate) fn shutdown(&self) -> Result<(), OTelSdkError> {
        self.provider.shutdown()
    }
}

/// The metrics of the process; `None` without telemetry, as in tests.
pub(crate) fn process() -> Option<&'static Metrics> {
    PROCESS.get()
}

#[cfg(test)]
mod tests {
    use opentelemetry::KeyValue;

    use super::*;

    #[test]
    fn page_shows_counted_values() {
        let metrics = Metrics::new("construct-sample").unwrap();
        let calls = metrics.meter("sample").u64_counter("sample.calls").with_unit("{call}").build();
        calls.add(2, &[KeyValue::new("error.type", "none")]);
        calls.add(1, &[KeyValue::new("error.type", "none")]);
        let text = metrics.text().unwrap();
        assert!(text.contains("sample_calls_total{error_type=\"none\"} 3"), "{text}");
        assert!(text.contains("target_info{service_name=\"construct-sample\"} 1"), "{text}");
    }
}

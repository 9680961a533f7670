//! Logs, traces and metrics of a process.
//!
//! One filter (`CONSTRUCT_LOG`) applies to log lines and spans: per-layer filters lose spans
//! together with sqlx (tokio-rs/tracing#2519). Log lines go to standard error. Spans are exported
//! over OTLP when `OTEL_EXPORTER_OTLP_ENDPOINT` (or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`) is set.
//! Without it they are not recorded, but still have trace ids, so that log lines of one task can be
//! joined across services. Metrics: [`crate::metrics`].

mod format;
mod panic;

use std::{
    env, fmt,
    io::{self, IsTerminal as _},
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use opentelemetry::{KeyValue, global, trace::TracerProvider as _};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter};
use opentelemetry_sdk::{
    Resource,
    propagation::TraceContextPropagator,
    trace::{Sampler, SdkTracerProvider},
};
use tracing::{Dispatch, dispatcher};
use tracing_subscriber::{EnvFilter, Layer as _, fmt::MakeWriter, layer::SubscriberExt as _};

use crate::{
    config::LogFormat,
    metrics::{self, Metrics},
};

/// Timeout for exporting the last spans. The grace period of the process is over by then.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Options of telemetry.
#[derive(Debug, Clone)]
pub struct Options<'a> {
    /// Name of the service, such as `gateway`; in traces `construct-gateway`.
    pub service: &'a str,
    /// Name of this process among its replicas.
    pub instance_id: &'a str,
    /// Version of the product.
    pub version: &'a str,
    /// Filter of log lines and spans.
    pub log: &'a str,
    /// Format of log lines.
    pub format: LogFormat,
}

/// Why telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The filter cannot be parsed.
    #[error("the log filter {0}")]
    Filter(String),
    /// The exporter of spans cannot be created, for example because of its address.
    #[error("spans cannot be exported to the address in OTEL_EXPORTER_OTLP_ENDPOINT")]
    Exporter(#[from] ExporterBuildError),
    /// Metrics are unavailable.
    #[error("metrics cannot be set up")]
    Metrics(#[from] metrics::Error),
    /// Telemetry was already set up in this process.
    #[error("telemetry is already set up")]
    Twice(#[from] dispatcher::SetGlobalDefaultError),
}

/// Telemetry of this process, until [`shutdown`](Self::shutdown).
#[must_use = "spans that are not flushed at the end are lost"]
pub struct Telemetry {
    provider: SdkTracerProvider,
    metrics: Metrics,
}

impl Telemetry {
    /// Exports pending data for at most 2 s. Blocks; the runtime must still exist.
    pub fn shutdown(self) {
        let (sender, sent) = mpsc::channel();
        let metrics = self.metrics;
        // In a thread of its own, because a silent collector blocks it for longer than the timeout.
        thread::spawn(move || sender.send(metrics.shutdown()));
        let began = Instant::now();
        if let Err(error) = self.provider.shutdown_with_timeout(FLUSH_TIMEOUT) {
            tracing::warn!(%error, "the last spans may be lost");
        }
        match sent.recv_timeout(FLUSH_TIMEOUT.saturating_sub(began.elapsed())) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "the last metrics may be lost"),
            Err(error) => tracing::warn!(%error, "the last metrics may be lost"),
        }
    }
}

/// Sets up telemetry for the whole process: subscriber, W3C propagation, panic hook. Must be called
/// inside a tokio runtime, which the exporter uses.
///
/// # Errors
/// [`Error`]: a malformed filter or address, or a second call.
pub fn init(options: &Options<'_>) -> Result<Telemetry, Error> {
    let filter = parse_filter(options.log).map_err(Error::Filter)?;
    let provider = provider(options)?;
    let metrics = Metrics::from_environment(resource(options))?;
    let is_colored =
        io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let dispatch = dispatch(options, filter, &provider, io::stderr, is_colored);
    dispatcher::set_global_default(dispatch)?;
    global::set_text_map_propagator(TraceContextPropagator::new());
    global::set_tracer_provider(provider.clone());
    metrics.clone().install();
    panic::install();
    Ok(Telemetry { provider, metrics })
}

/// An error with all its causes in one line, for logs.
pub struct Chain<'a>(pub &'a (dyn std::error::Error + 'a));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

/// Describes what is wrong with a filter, as the continuation of a sentence.
pub(crate) fn check_filter(filter: &str) -> Result<(), String> {
    parse_filter(filter).map(drop)
}

fn parse_filter(filter: &str) -> Result<EnvFilter, String> {
    EnvFilter::try_new(filter).map_err(|error| {
        format!("is not a filter such as `info` or `warn,construct_bus=debug`: {error}")
    })
}

fn resource(options: &Options<'_>) -> Resource {
    Resource::builder()
        .with_service_name(format!("construct-{}", options.service))
        .with_attribute(KeyValue::new("service.version", options.version.to_owned()))
        .with_attribute(KeyValue::new("service.instance.id", options.instance_id.to_owned()))
        .build()
}

/// Whether spans are exported.
fn is_exported() -> bool {
    let is_set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
    is_set("OTEL_EXPORTER_OTLP_ENDPOINT") || is_set("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
}

fn provider(options: &Options<'_>) -> Result<SdkTracerProvider, Error> {
    let builder = SdkTracerProvider::builder().with_resource(resource(options));
    if is_exported() {
        // The exporter reads the address, headers and timeouts from the variables of the
        // specification.
        let exporter = SpanExporter::builder().with_tonic().build()?;
        Ok(builder.with_batch_exporter(exporter).build())
    } else {
        // Unexported spans have ids and cost nothing else.
        Ok(builder.with_sampler(Sampler::AlwaysOff).build())
    }
}

fn dispatch<W>(
    options: &Options<'_>,
    filter: EnvFilter,
    provider: &SdkTracerProvider,
    writer: W,
    is_colored: bool,
) -> Dispatch
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let own_dispatch = Arc::new(OnceLock::new());
    let lines = tracing_subscriber::fmt::layer().with_writer(writer);
    let lines = match options.format {
        LogFormat::Text => lines.with_ansi(is_colored).boxed(),
        LogFormat::Json => lines
            .json()
            .with_current_span(false)
            .with_span_list(true)
            .map_event_format(|json| {
                format::Annotated::new(
                    json,
                    options.service,
                    options.instance_id,
                    Arc::clone(&own_dispatch),
                )
            })
            .boxed(),
    };
    // Location, thread and idle time of spans are not determined when they are not exported.
    let details = is_exported();
    let spans = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("construct"))
        .with_location(details)
        .with_threads(details)
        .with_tracked_inactivity(details);
    let subscriber = tracing_subscriber::registry().with(filter).with(spans).with(lines);
    let dispatch = Dispatch::new(subscriber);
    own_dispatch.get_or_init(|| dispatch.downgrade());
    dispatch
}

#[cfg(test)]
mod tests;

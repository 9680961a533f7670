use opentelemetry::trace::{TraceContextExt as _, TracerProvider as _};
use opentelemetry_sdk::{propagation::TraceContextPropagator, trace::SdkTracerProvider};
use tracing::Instrument as _;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::layer::SubscriberExt as _;

use super::{invoke, next, options, task};
use crate::{Pool, subject, testing::NatsServer};

#[tokio::test]
async fn consumer_span_continues_the_publisher_trace() {
    opentelemetry::global::set_text_map_propagator(TraceContextPropagator::new());
    let provider = SdkTracerProvider::builder().build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));

    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let publisher = tracing::info_span!("publisher");
    let address = subject::ModelInvoke::new(Pool::model_default(), task(1));
    bus.publish_once(&address, &invoke(task(1), 1))
        .instrument(publisher.clone())
        .await
        .expect("sent");

    let mut consumer = bus.consume_model(&Pool::model_default(), options(1));
    let delivery = next(&mut consumer).await;
    let span = tracing::info_span!("consumer");
    delivery.receipt.continue_trace(&span);
    let (published, consumed) = (publisher.context(), span.context());
    let (published, consumed) =
        (published.span().span_context().clone(), consumed.span().span_context().clone());
    assert!(published.is_valid());
    assert_eq!(consumed.trace_id(), published.trace_id());
    assert_ne!(consumed.span_id(), published.span_id());
    assert_eq!(delivery.receipt.parent().span().span_context().span_id(), published.span_id());
}

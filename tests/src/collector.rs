//! A real OTLP receiver over gRPC that keeps every span of a mesh.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{AnyValue, KeyValue, any_value::Value},
    trace::v1::{Span as Exported, span::SpanKind, status::StatusCode},
};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, Response, Status, transport::Server, transport::server::TcpIncoming};

/// An exported span.
#[derive(Debug, Clone)]
pub struct Span {
    /// `service.name` of the process.
    pub service: String,
    /// The span's name.
    pub name: String,
    /// In hexadecimal digits.
    pub trace: String,
    /// In hexadecimal digits.
    pub id: String,
    /// In hexadecimal digits; empty at a root.
    pub parent: String,
    /// Its side of an exchange, such as `SPAN_KIND_CLIENT`.
    pub kind: &'static str,
    /// Whether its status is an error.
    pub failed: bool,
    /// Its attributes as text.
    pub attributes: BTreeMap<String, String>,
}

impl Span {
    /// An attribute; empty when it is missing.
    pub fn attribute(&self, name: &str) -> &str {
        self.attributes.get(name).map_or("", String::as_str)
    }
}

/// The receiver. It stops when it is dropped.
#[derive(Debug)]
pub struct Collector {
    address: SocketAddr,
    spans: Arc<Mutex<Vec<Span>>>,
    _stop: DropGuard,
}

impl Collector {
    /// Starts a receiver on a free port.
    pub async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port is free");
        let address = listener.local_addr().expect("it has an address");
        let (spans, stop) = (Arc::<Mutex<Vec<Span>>>::default(), CancellationToken::new());
        let receiver = TraceServiceServer::new(Receiver(Arc::clone(&spans)))
            .max_decoding_message_size(64 << 20);
        let stopped = stop.clone().cancelled_owned();
        tokio::spawn(async move {
            let serving = Server::builder().add_service(receiver);
            serving
                .serve_with_incoming_shutdown(TcpIncoming::from(listener), stopped)
                .await
                .expect("it serves");
        });
        Self { address, spans, _stop: stop.drop_guard() }
    }

    /// The endpoint that processes export to (`OTEL_EXPORTER_OTLP_ENDPOINT`).
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All spans received so far.
    pub fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The received spans of one trace.
    pub fn trace(&self, trace: &str) -> Vec<Span> {
        self.spans().into_iter().filter(|span| span.trace == trace).collect()
    }
}

struct Receiver(Arc<Mutex<Vec<Span>>>);

#[tonic::async_trait]
impl TraceService for Receiver {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = Vec::new();
        for resource in request.into_inner().resource_spans {
            let attributes = attributes(
                resource.resource.map(|resource| resource.attributes).unwrap_or_default(),
            );
            let service = attributes.get("service.name").cloned().unwrap_or_default();
            let exported = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            spans.extend(exported.map(|span| convert_span(&service, span)));
        }
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(spans);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn convert_span(service: &str, span: Exported) -> Span {
    Span {
        service: service.to_owned(),
        kind: SpanKind::try_from(span.kind).unwrap_or_default().as_str_name(),
        failed: span.status.is_some_and(|status| status.code() == StatusCode::Error),
        name: span.name,
        trace: hex(&span.trace_id),
        id: hex(&span.span_id),
        parent: hex(&span.parent_span_id),
        attributes: attributes(span.attributes),
    }
}

fn attributes(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    attributes.into_iter().map(|attribute| (attribute.key, text(attribute.value))).collect()
}

fn text(value: Option<AnyValue>) -> String {
    match value.and_then(|value| value.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::BoolValue(value)) => value.to_string(),
        Some(Value::IntValue(value)) => value.to_string(),
        Some(Value::DoubleValue(value)) => value.to_string(),
        Some(Value::ArrayValue(list)) => {
            let texts: Vec<String> =
                list.values.into_iter().map(|value| text(Some(value))).collect();
            texts.join(", ")
        }
        Some(other) => format!("{other:?}"),
        None => String::new(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

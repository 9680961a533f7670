//! The server: gRPC's services with limits, health and reflection, and the other faces before them.

use std::time::Duration;

use construct_proto::{
    FILE_DESCRIPTOR_SET,
    v1::{
        agent_service_server::AgentServiceServer, approval_service_server::ApprovalServiceServer,
        audit_service_server::AuditServiceServer, budget_service_server::BudgetServiceServer,
        diagnosis_service_server::DiagnosisServiceServer, event_service_server::EventServiceServer,
        file_service_server::FileServiceServer, key_service_server::KeyServiceServer,
        message_service_server::MessageServiceServer,
        model_provider_service_server::ModelProviderServiceServer,
        model_service_server::ModelServiceServer,
        model_token_service_server::ModelTokenServiceServer,
        organization_service_server::OrganizationServiceServer,
        recovery_service_server::RecoveryServiceServer, scan_service_server::ScanServiceServer,
        schedule_service_server::ScheduleServiceServer, secret_service_server::SecretServiceServer,
        state_service_server::StateServiceServer, task_service_server::TaskServiceServer,
        usage_service_server::UsageServiceServer,
    },
};
use construct_runtime::Context;
use futures::{StreamExt as _, stream};
use opentelemetry::{global, propagation::Extractor};
use tokio::net::TcpListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{
    codec::CompressionEncoding,
    codegen::http,
    server::NamedService,
    service::Routes,
    transport::{
        Server,
        server::{Router, TcpIncoming},
    },
};
use tonic_health::{ServingStatus, server::HealthReporter};
use tower::layer::util::{Identity, Stack};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::{
    Config,
    api::Api,
    faces::Faces,
    identity::guard::GuardLayer,
    places::Places,
    socket::Socket,
    tls::{Tls, accept},
};

/// Bytes of a request at most, after decompression. The largest valid one is a message of 1 MiB.
pub(crate) const MAX_REQUEST: usize = 4 * 1024 * 1024;
/// After which time a request that has no answer yet is given up, whatever it is for. Later than
/// the deadlines of all faces, which answer in their own words.
const TIMEOUT: Duration = Duration::from_secs(31);
/// Calls of one connection worked on at the same time; further ones wait.
const CALLS_PER_CONNECTION: usize = 256;
/// Calls and subscriptions open on one connection at the same time.
const STREAMS_PER_CONNECTION: u32 = 1024;
/// How often a silent connection is asked whether it is alive, and how long it may take to answer:
/// a client that is gone holds its subscriptions no longer than both together.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// After how long a silent connection is asked by TCP whether it is alive. HTTP/1, which has no
/// such question, depends on it; so does the operator protocol.
pub(crate) const SILENCE: Duration = Duration::from_secs(60);

const SERVICES: [&str; 20] = [
    AgentServiceServer::<Api>::NAME,
    ApprovalServiceServer::<Api>::NAME,
    AuditServiceServer::<Api>::NAME,
    BudgetServiceServer::<Api>::NAME,
    DiagnosisServiceServer::<Api>::NAME,
    EventServiceServer::<Api>::NAME,
    FileServiceServer::<Api>::NAME,
    KeyServiceServer::<Api>::NAME,
    MessageServiceServer::<Api>::NAME,
    ModelProviderServiceServer::<Api>::NAME,
    ModelServiceServer::<Api>::NAME,
    ModelTokenServiceServer::<Api>::NAME,
    OrganizationServiceServer::<Api>::NAME,
    RecoveryServiceServer::<Api>::NAME,
    ScanServiceServer::<Api>::NAME,
    ScheduleServiceServer::<Api>::NAME,
    SecretServiceServer::<Api>::NAME,
    StateServiceServer::<Api>::NAME,
    TaskServiceServer::<Api>::NAME,
    UsageServiceServer::<Api>::NAME,
];

macro_rules! limited {
    ($server:ident, $api:expr) => {
        $server::new($api.clone())
            .max_decoding_message_size(MAX_REQUEST)
            .accept_compressed(CompressionEncoding::Gzip)
            .send_compressed(CompressionEncoding::Gzip)
    };
}

/// Serves `api` until the process drains, on a port and, where there is one, on a socket. Gives the
/// faces, for those with ports of their own.
pub(crate) async fn spawn(
    api: Api,
    listener: TcpListener,
    tls: Option<(Tls, Places)>,
    socket: Option<Socket>,
    config: &Config,
    context: &Context,
) -> anyhow::Result<Faces> {
    let address = listener.local_addr()?;
    let faces = Faces::new(api.clone(), address.ip().is_loopback(), config)?;
    let (reporter, health) = tonic_health::server::health_reporter();
    report(&reporter, false).await;
    // Both versions, which tell the same: clients that are still about ask for the one before.
    let describe = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(
                tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
            )
            .include_reflection_service(false)
    };
    let (reflection, reflection_before) = (describe().build_v1()?, describe().build_v1alpha()?);
    // A client that compresses does so whatever it calls.
    let routes = Routes::new(health.accept_compressed(CompressionEncoding::Gzip))
        .add_service(reflection.accept_compressed(CompressionEncoding::Gzip))
        .add_service(reflection_before.accept_compressed(CompressionEncoding::Gzip))
        .add_service(limited!(AgentServiceServer, api))
        .add_service(limited!(ApprovalServiceServer, api))
        .add_service(limited!(AuditServiceServer, api))
        .add_service(limited!(BudgetServiceServer, api))
        .add_service(limited!(DiagnosisServiceServer, api))
        .add_service(limited!(KeyServiceServer, api))
        .add_service(limited!(MessageServiceServer, api))
        .add_service(limited!(ModelProviderServiceServer, api))
        .add_service(limited!(ModelServiceServer, api))
        .add_service(limited!(ModelTokenServiceServer, api))
        .add_service(limited!(OrganizationServiceServer, api))
        .add_service(limited!(RecoveryServiceServer, api))
        .add_service(limited!(ScanServiceServer, api))
        .add_service(limited!(ScheduleServiceServer, api))
        .add_service(limited!(SecretServiceServer, api))
        .add_service(limited!(StateServiceServer, api))
        .add_service(limited!(TaskServiceServer, api))
        .add_service(limited!(UsageServiceServer, api))
        // Files are compressed already, as likely as not.
        .add_service(
            FileServiceServer::new(api.clone())
                .max_decoding_message_size(MAX_REQUEST)
                .accept_compressed(CompressionEncoding::Gzip),
        )
        // Deltas are small and wanted at once: compressing them one by one would cost time and save
        // nothing.
        .add_service(
            EventServiceServer::new(api.clone())
                .max_decoding_message_size(MAX_REQUEST)
                .accept_compressed(CompressionEncoding::Gzip),
        );
    // Around the routes themselves, so that whatever leads to them passes it.
    let routes = Routes::from(routes.into_axum_router().layer(GuardLayer::new(api)));
    let lifecycle = context.lifecycle();
    let incoming =
        TcpIncoming::from(listener).with_nodelay(Some(true)).with_keepalive(Some(SILENCE));
    let secure = tls.is_some();
    let incoming = accept::connections(incoming, tls, faces.proxies().clone(), lifecycle);
    let serving = router(routes.clone(), &faces);
    lifecycle.spawn(
        "grpc",
        serving.serve_with_incoming_shutdown(incoming, lifecycle.draining().cancelled_owned()),
    );
    if let Some(Socket { listener, passed }) = socket {
        let serving = router(routes, &faces.on_socket());
        let readiness = context.readiness().clone();
        let begun = async move {
            if passed {
                readiness.wait_ready().await;
            }
            UnixListenerStream::new(listener)
        };
        let incoming = stream::once(begun).flatten();
        let draining = lifecycle.draining().cancelled_owned();
        lifecycle
            .spawn("grpc on the socket", serving.serve_with_incoming_shutdown(incoming, draining));
    }
    let (mut changes, draining) = (context.readiness().subscribe(), lifecycle.draining());
    lifecycle.spawn_job("grpc health", async move {
        loop {
            let ready = changes.next().await.ready;
            report(&reporter, ready).await;
            if draining.is_cancelled() {
                return;
            }
        }
    });
    tracing::info!(%address, tls = secure, "serving gRPC and the other faces");
    Ok(faces)
}

/// The limits of a connection, and what lies around every call.
fn router(routes: Routes, faces: &Faces) -> Router<Stack<Faces, Identity>> {
    Server::builder()
        .timeout(TIMEOUT)
        .concurrency_limit_per_connection(CALLS_PER_CONNECTION)
        .max_concurrent_streams(STREAMS_PER_CONNECTION)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .http2_adaptive_window(Some(true))
        .accept_http1(true)
        .trace_fn(span)
        .layer(faces.clone())
        .add_routes(routes)
}

/// Tells who asks for the health of the whole server (the empty name) or of one service. All need
/// the same to work.
async fn report(reporter: &HealthReporter, ready: bool) {
    let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
    for service in SERVICES.into_iter().chain([""]) {
        reporter.set_service_status(service, status).await;
    }
}

/// The span of a request. It continues the caller's trace, if there is one; everything the request
/// causes on the mesh belongs to it.
fn span(request: &http::Request<()>) -> tracing::Span {
    let is_grpc = request
        .headers()
        .get(http::header::CONTENT_TYPE)
        .is_some_and(|it| it.as_bytes().starts_with(b"application/grpc"));
    let span = if is_grpc {
        let mut path = request.uri().path().trim_start_matches('/').splitn(2, '/');
        let (service, method) = (path.next().unwrap_or_default(), path.next().unwrap_or_default());
        tracing::info_span!(
            "gateway.request",
            rpc.system = "grpc",
            rpc.service = service,
            rpc.method = method
        )
    } else {
        // The face says which method it is, once it knows.
        let empty = tracing::field::Empty;
        tracing::info_span!(
            "gateway.request",
            rpc.system = "http",
            rpc.service = empty,
            rpc.method = empty
        )
    };
    let parent = global::get_text_map_propagator(|propagator| {
        propagator.extract(&Headers(request.headers()))
    });
    // Fails only when no trace is recorded at all.
    _ = span.set_parent(parent);
    span
}

struct Headers<'a>(&'a http::HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(|value| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

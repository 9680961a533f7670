//! The server: gRPC services with limits, health and reflection, and the other protocols in front
//! of them.

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
use futures::{StreamExt as _, TryStreamExt as _, stream};
use tokio::net::TcpListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{codec::CompressionEncoding, service::Routes, transport::server::TcpIncoming};
use tonic_health::{ServingStatus, server::HealthReporter};
use tower::Layer as _;

use crate::{
    Config,
    api::Api,
    identity::guard::GuardLayer,
    limit::{Limit, connection::Connection},
    protocols::ProtocolLayer,
    serve::serve,
    socket::Socket,
    tls::{Tls, accept},
};

/// Maximum size of a request in bytes, after decompression. The largest valid one is a message of 1
/// MiB.
pub(crate) const MAX_REQUEST: usize = 4 * 1024 * 1024;
/// Maximum size of a request to the services that need no credentials, in bytes: names and symbols.
const MAX_PUBLIC_REQUEST: usize = 8 * 1024;
/// Idle time after which TCP keepalive probes a connection. HTTP/1, which has no keepalive of its
/// own, depends on it; so does the operator protocol.
pub(crate) const TCP_KEEPALIVE_TIME: Duration = Duration::from_secs(60);

macro_rules! limited {
    ($server:ident, $api:expr) => {
        $server::new($api.clone())
            .max_decoding_message_size(MAX_REQUEST)
            .accept_compressed(CompressionEncoding::Gzip)
            .send_compressed(CompressionEncoding::Gzip)
    };
}

/// Serves `api` until the process drains, on a port and, if configured, on a socket. Returns the
/// protocols, for those with ports of their own.
pub(crate) async fn spawn(
    api: Api,
    listener: TcpListener,
    tls: Option<(Tls, Limit)>,
    socket: Option<Socket>,
    config: &Config,
    context: &Context,
) -> anyhow::Result<ProtocolLayer> {
    let address = listener.local_addr()?;
    let protocols = ProtocolLayer::new(api.clone(), address.ip().is_loopback(), config)?;
    let (reporter, health) = tonic_health::server::health_reporter();
    report_health(&reporter, false).await;
    // Both versions of reflection: older clients use the previous one.
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
    // Clients compress requests to any service.
    macro_rules! public {
        ($server:expr) => {
            $server
                .max_decoding_message_size(MAX_PUBLIC_REQUEST)
                .accept_compressed(CompressionEncoding::Gzip)
        };
    }
    let routes = Routes::new(public!(health))
        .add_service(public!(reflection))
        .add_service(public!(reflection_before))
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
        // Files are usually compressed already.
        .add_service(
            FileServiceServer::new(api.clone())
                .max_decoding_message_size(MAX_REQUEST)
                .accept_compressed(CompressionEncoding::Gzip),
        )
        // Deltas are small and urgent: compressing them individually would cost time without saving
        // anything.
        .add_service(
            EventServiceServer::new(api.clone())
                .max_decoding_message_size(MAX_REQUEST)
                .accept_compressed(CompressionEncoding::Gzip),
        );
    // Around the routes themselves, so that every path to them passes it.
    let routes = Routes::from(routes.into_axum_router().layer(GuardLayer::new(api)));
    let lifecycle = context.lifecycle();
    let incoming = TcpIncoming::from(listener)
        .with_nodelay(Some(true))
        .with_keepalive(Some(TCP_KEEPALIVE_TIME));
    let secure = tls.is_some();
    let incoming = accept::connections(incoming, tls, protocols.proxies().clone(), lifecycle);
    let routes = routes.prepare();
    lifecycle.spawn("grpc", serve(protocols.layer(routes.clone()), incoming, lifecycle.draining()));
    if let Some(Socket { listener, passed }) = socket {
        let readiness = context.readiness().clone();
        let begun = async move {
            if passed {
                readiness.wait_ready().await;
            }
            UnixListenerStream::new(listener)
        };
        let incoming =
            stream::once(begun).flatten().map_ok(|stream| (stream, Connection::uncounted()));
        let serving = serve(protocols.on_socket().layer(routes), incoming, lifecycle.draining());
        lifecycle.spawn("grpc on the socket", serving);
    }
    let (mut changes, draining) = (context.readiness().subscribe(), lifecycle.draining());
    lifecycle.spawn_job("grpc health", async move {
        loop {
            let ready = changes.next().await.ready;
            report_health(&reporter, ready).await;
            if draining.is_cancelled() {
                return;
            }
        }
    });
    tracing::info!(%address, tls = secure, "serving gRPC and the other protocols");
    Ok(protocols)
}

/// Reports the health of the whole server (the empty name) and of each service. All need the same
/// to work.
async fn report_health(reporter: &HealthReporter, ready: bool) {
    let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
    let services = construct_proto::services().map(|service| service.full_name().to_owned());
    for service in services.chain([String::new()]) {
        reporter.set_service_status(service, status).await;
    }
}

//! HTTP/1.1 and HTTP/2 connections, and what each may use of the process before its client is
//! known.
//!
//! tonic's own server is not used: it has no limit for the buffers of a connection.

use std::{convert::Infallible, io, pin::pin, sync::Arc, time::Duration};

use futures::{Stream, StreamExt as _};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use opentelemetry::{global, propagation::Extractor};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Semaphore,
    time::{Instant, MissedTickBehavior},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{body::Body, codegen::http, transport::server::Connected};
use tower::{Service, ServiceExt as _};
use tracing::Instrument as _;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::limit::connection::Connection;

/// Maximum number of concurrent calls per connection; further ones wait.
const CALLS_PER_CONNECTION: usize = 256;
/// Maximum number of open streams per HTTP/2 connection.
const STREAMS_PER_CONNECTION: u32 = 1024;
/// The interval and timeout of HTTP/2 keepalive: a client that is gone holds its subscriptions no
/// longer than both together.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
/// The timeout of the headers of an HTTP/1.1 request, which is also the idle timeout of such a
/// connection.
const HEADERS_TIMEOUT: Duration = Duration::from_secs(30);
/// Read and write buffer of an HTTP/1.1 connection, in bytes. The request line and headers must
/// fit.
const HTTP1_BUFFER: usize = 64 * 1024;
/// Flow-control windows of HTTP/2 request bodies, in bytes: per stream, and per connection.
const STREAM_WINDOW: u32 = 128 * 1024;
const CONNECTION_WINDOW: u32 = 256 * 1024;
/// Send buffer of an HTTP/2 stream, in bytes.
const SEND_BUFFER: usize = 64 * 1024;
/// Maximum number of server resets that a client may cause per connection by breaking the protocol;
/// then the connection is closed. A correct client causes none.
const SERVER_RESETS: usize = 100;
/// How often a connection is checked for misuse.
const MISUSE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Serves connections until the process drains, and returns when all have ended.
pub(crate) async fn serve<S, I, IO>(
    service: S,
    incoming: I,
    draining: CancellationToken,
) -> io::Result<()>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    I: Stream<Item = io::Result<(IO, Arc<Connection>)>>,
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let builder = builder();
    let running = TaskTracker::new();
    {
        // Dropped with the listener when the process drains.
        let mut incoming = pin!(incoming);
        loop {
            let next = tokio::select! {
                () = draining.cancelled() => break,
                next = incoming.next() => next,
            };
            match next {
                Some(Ok((io, connection))) => {
                    running.spawn(serve_connection(
                        builder.clone(),
                        service.clone(),
                        io,
                        connection,
                        draining.clone(),
                    ));
                }
                Some(Err(error)) => tracing::debug!(%error, "a connection could not be accepted"),
                None => break,
            }
        }
    }
    running.close();
    running.wait().await;
    Ok(())
}

fn builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_TIMEOUT)
        .max_buf_size(HTTP1_BUFFER);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_PER_CONNECTION)
        .keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_INTERVAL)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER)
        .max_local_error_reset_streams(SERVER_RESETS);
    builder
}

/// Serves one connection until it ends, or has to be closed.
async fn serve_connection<S, IO>(
    builder: Builder<TokioExecutor>,
    service: S,
    io: IO,
    connection: Arc<Connection>,
    draining: CancellationToken,
) where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let (info, calls) = (io.connect_info(), Arc::new(Semaphore::new(CALLS_PER_CONNECTION)));
    let service = service_fn({
        let connection = Arc::clone(&connection);
        move |mut request: http::Request<Incoming>| {
            let span = span(&request);
            let extensions = request.extensions_mut();
            extensions.insert(info.clone());
            extensions.insert(Arc::clone(&connection));
            let (running, service, calls) =
                (connection.begin(), service.clone(), Arc::clone(&calls));
            async move {
                let _running = running;
                // The semaphore is never closed.
                let _call = calls.acquire_owned().await;
                service.oneshot(request.map(Body::new)).await
            }
            .instrument(span)
        }
    });
    let mut serving = pin!(builder.serve_connection(TokioIo::new(io), service));
    let mut checks =
        tokio::time::interval_at(Instant::now() + MISUSE_CHECK_INTERVAL, MISUSE_CHECK_INTERVAL);
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_draining = false;
    loop {
        tokio::select! {
            served = &mut serving => {
                if let Err(error) = served {
                    tracing::debug!(error, "connection failed");
                }
                return;
            }
            _ = checks.tick() => {
                if let Some(reason) = connection.misuse() {
                    return tracing::debug!(reason, "connection closed");
                }
            }
            () = draining.cancelled(), if !is_draining => {
                is_draining = true;
                serving.as_mut().graceful_shutdown();
            }
        }
    }
}

/// The span of a request. It continues the caller's trace, if any; everything the request causes on
/// the mesh belongs to it.
fn span<B>(request: &http::Request<B>) -> tracing::Span {
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
        // The protocol sets the method, once it knows it.
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
    // Fails only when tracing is off.
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

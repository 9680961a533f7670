//! Accepts connections, and secures them if TLS is configured.

use std::{io, sync::Arc, time::Duration};

use construct_runtime::Lifecycle;
use futures::{Stream as Incoming, StreamExt as _, future, stream};
use rustls::ServerConfig;
use tokio::{net::TcpStream, sync::mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;

use super::{
    Tls,
    stream::{Stream, Transport},
};
use crate::{
    identity::proxies::Proxies,
    limit::{
        Limit, Permit,
        connection::{Connection, Connections},
    },
};

/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Concurrent handshakes, on all ports. Further connections are closed at once: their clients are
/// unknown, and slow ones must not use up many slots.
const MAX_HANDSHAKES: usize = 1024;
/// Concurrent handshakes of one network. Trusted proxies belong to no network, here and below: they
/// serve many clients.
const MAX_HANDSHAKES_PER_NETWORK: usize = 128;
/// Connections of gRPC's port on which no credentials were accepted yet, in total and of one
/// network. Further ones are closed at once.
const MAX_NEW_CONNECTIONS: usize = 4096;
const MAX_NEW_CONNECTIONS_PER_NETWORK: usize = 256;
/// Connections of gRPC's port on which credentials were accepted, in total and of one network. All
/// clients behind an untrusted proxy share one network.
const MAX_CONNECTIONS: usize = 16_384;
const MAX_CONNECTIONS_PER_NETWORK: usize = 8_192;
/// Secured connections that the server has not accepted yet.
const READY_BUFFER: usize = 64;

/// The limit of concurrent handshakes, for all ports.
pub(crate) fn handshake_limit() -> Limit {
    Limit::new(MAX_HANDSHAKES, MAX_HANDSHAKES_PER_NETWORK)
}

/// Secures a connection.
///
/// # Errors
/// When the client does not speak TLS, lacks a required certificate, or takes too long.
pub(crate) async fn secure(
    stream: TcpStream,
    config: Arc<ServerConfig>,
    _handshake: Permit,
) -> io::Result<Transport> {
    let secured =
        tokio::time::timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(config).accept(stream)).await;
    let secured = secured
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the handshake timed out"))??;
    Ok(Transport::Tls(Box::new(secured)))
}

/// The connections of gRPC's port, secured if TLS is configured. A slow handshake does not delay
/// other connections.
pub(crate) fn connections(
    incoming: TcpIncoming,
    tls: Option<(Tls, Limit)>,
    proxies: Proxies,
    lifecycle: &Lifecycle,
) -> stream::BoxStream<'static, io::Result<(Stream, Arc<Connection>)>> {
    let new = Limit::new(MAX_NEW_CONNECTIONS, MAX_NEW_CONNECTIONS_PER_NETWORK);
    let authenticated = Limit::new(MAX_CONNECTIONS, MAX_CONNECTIONS_PER_NETWORK);
    let connections = Connections::new(new, authenticated);
    let trusted = proxies.clone();
    let incoming = incoming.filter_map(move |accepted| {
        let accepted = accepted.map(|stream| {
            // Fails when the client has disconnected already.
            let peer = stream.peer_addr().ok()?;
            match connections.accept(trusted.holder(peer)) {
                Ok(connection) => Some((stream, connection)),
                Err(full) => {
                    tracing::debug!(?full, "a connection is closed because there are too many");
                    None
                }
            }
        });
        future::ready(accepted.transpose())
    });
    match tls {
        None => incoming
            .map(|accepted| {
                accepted
                    .map(|(stream, connection)| (Stream::new(Transport::Plain(stream)), connection))
            })
            .boxed(),
        Some((tls, handshakes)) => {
            let (sender, receiver) = mpsc::channel(READY_BUFFER);
            let running = lifecycle.clone();
            let draining = lifecycle.draining();
            lifecycle.spawn_job("handshakes", async move {
                tokio::select! {
                    () = draining.cancelled() => {}
                    () = handshake_all(incoming, &tls, &handshakes, &proxies, &running, &sender) => {}
                }
            });
            ReceiverStream::new(receiver).boxed()
        }
    }
}

async fn handshake_all(
    mut incoming: impl Incoming<Item = io::Result<(TcpStream, Arc<Connection>)>> + Unpin,
    tls: &Tls,
    handshakes: &Limit,
    proxies: &Proxies,
    running: &Lifecycle,
    ready: &mpsc::Sender<io::Result<(Stream, Arc<Connection>)>>,
) {
    while let Some(accepted) = incoming.next().await {
        let (stream, connection) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // For example out of file descriptors: another attempt now would fail as well.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let peer = stream.peer_addr().ok();
        let Some(handshake) =
            peer.and_then(|peer| handshakes.acquire(proxies.holder(peer), 1).ok())
        else {
            tracing::debug!("a connection is closed because there are too many handshakes");
            continue;
        };
        let (config, ready, draining) = (tls.web(), ready.clone(), running.draining());
        running.spawn_job("handshake", async move {
            let secured = tokio::select! {
                () = draining.cancelled() => return,
                secured = secure(stream, config, handshake) => secured,
            };
            match secured {
                // Fails when the server has stopped.
                Ok(transport) => _ = ready.send(Ok((Stream::new(transport), connection))).await,
                Err(error) => tracing::debug!(%error, "a connection could not be secured"),
            }
        });
    }
}

//! Connections that come in, until they can be spoken over.

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
    stream::{Over, Stream},
};
use crate::{
    identity::proxies::Proxies,
    places::{Place, Places},
};

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes under way at the same time, on all ports. Further connections are closed at once:
/// nothing is known of them, and who connects slowly must not hold many places.
const HANDSHAKES: usize = 1024;
/// Those of one network. Those of trusted proxies are of none, here and below: they are for many.
const HANDSHAKES_OF_ONE: usize = 128;
/// Connections of gRPC's port at the same time. Further ones are closed at once.
const CONNECTIONS: usize = 16_384;
/// Those of one network. Behind a proxy that is not trusted all are.
const CONNECTIONS_OF_ONE: usize = 8_192;
/// Connections that are ready and not yet taken.
const READY: usize = 64;

/// Places for handshakes.
pub(crate) fn handshakes() -> Places {
    Places::new(HANDSHAKES, HANDSHAKES_OF_ONE)
}

/// Secures a connection.
///
/// # Errors
/// When the client speaks something else, has no certificate that is asked for, or takes too long.
pub(crate) async fn secure(
    stream: TcpStream,
    config: Arc<ServerConfig>,
    _shaking: Place,
) -> io::Result<Over> {
    let secured = tokio::time::timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)).await;
    let secured = secured
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the handshake takes too long"))??;
    Ok(Over::Tls(Box::new(secured)))
}

/// The connections of gRPC's port, as they can be spoken over. One that is slow to get there does
/// not hold up the others.
pub(crate) fn connections(
    incoming: TcpIncoming,
    tls: Option<(Tls, Places)>,
    proxies: Proxies,
    lifecycle: &Lifecycle,
) -> stream::BoxStream<'static, io::Result<Stream>> {
    let places = Places::new(CONNECTIONS, CONNECTIONS_OF_ONE);
    let trusted = proxies.clone();
    let incoming = incoming.filter_map(move |accepted| {
        let accepted = accepted.map(|stream| {
            let place = stream.peer_addr().ok().and_then(|peer| places.take(trusted.counted(peer)));
            if place.is_none() {
                tracing::debug!("a connection is closed because there are too many");
            }
            place.map(|place| (stream, place))
        });
        future::ready(accepted.transpose())
    });
    match tls {
        None => incoming
            .map(|accepted| {
                accepted.map(|(stream, place)| Stream::holding(Over::Plain(stream), place))
            })
            .boxed(),
        Some((tls, handshakes)) => {
            let (sender, receiver) = mpsc::channel(READY);
            let running = lifecycle.clone();
            let draining = lifecycle.draining();
            lifecycle.spawn_job("handshakes", async move {
                tokio::select! {
                    () = draining.cancelled() => {}
                    () = shake(incoming, &tls, &handshakes, &proxies, &running, &sender) => {}
                }
            });
            ReceiverStream::new(receiver).boxed()
        }
    }
}

async fn shake(
    mut incoming: impl Incoming<Item = io::Result<(TcpStream, Place)>> + Unpin,
    tls: &Tls,
    handshakes: &Places,
    proxies: &Proxies,
    running: &Lifecycle,
    ready: &mpsc::Sender<io::Result<Stream>>,
) {
    while let Some(accepted) = incoming.next().await {
        let (stream, place) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of file descriptors, for one: the next attempt would fail at once as well.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(shaking) =
            stream.peer_addr().ok().and_then(|peer| handshakes.take(proxies.counted(peer)))
        else {
            tracing::debug!("a connection is closed because too many begin at the moment");
            continue;
        };
        let (config, ready, draining) = (tls.web(), ready.clone(), running.draining());
        running.spawn_job("handshake", async move {
            let secured = tokio::select! {
                () = draining.cancelled() => return,
                secured = secure(stream, config, shaking) => secured,
            };
            match secured {
                // The server takes it, or is gone.
                Ok(over) => _ = ready.send(Ok(Stream::holding(over, place))).await,
                Err(error) => tracing::debug!(%error, "a connection could not be secured"),
            }
        });
    }
}

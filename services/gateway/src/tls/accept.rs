//! Connections that come in, until they can be spoken over.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use construct_runtime::Lifecycle;
use futures::{Stream as Incoming, StreamExt as _, stream};
use rustls::ServerConfig;
use tokio::{net::TcpStream, sync::mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;

use super::{Tls, stream::Stream};
use crate::identity::failures::network;

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes under way at the same time, on all ports. Further connections are closed at once: nothing is known of them, and who
/// connects slowly must not hold many places.
const HANDSHAKES: usize = 1024;
/// Those of one network.
const OF_ONE: usize = 128;
/// Connections that are ready and not yet taken.
const READY: usize = 64;

/// Handshakes that are under way, by network. Clones are the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Handshakes(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// A handshake's place.
#[derive(Debug)]
pub(crate) struct Place {
    all: Handshakes,
    network: IpAddr,
}

impl Handshakes {
    /// A place, unless there are too many.
    pub(crate) fn begin(&self, peer: SocketAddr) -> Option<Place> {
        let network = network(peer.ip());
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.values().sum::<usize>() >= HANDSHAKES || counts.get(&network).is_some_and(|count| *count >= OF_ONE) {
            return None;
        }
        *counts.entry(network).or_default() += 1;
        drop(counts);
        Some(Place { all: self.clone(), network })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.network) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.network);
            }
        }
    }
}

/// Secures a connection.
///
/// # Errors
/// When the client speaks something else, has no certificate that is asked for, or takes too long.
pub(crate) async fn secure(stream: TcpStream, config: Arc<ServerConfig>, _place: Place) -> io::Result<Stream> {
    let secured = tokio::time::timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)).await;
    let secured = secured.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the handshake takes too long"))??;
    Ok(Stream::Tls(Box::new(secured)))
}

/// The connections of gRPC's port, as they can be spoken over. One that is slow to get there does not hold up the others.
pub(crate) fn connections(
    incoming: TcpIncoming,
    tls: Option<(Tls, Handshakes)>,
    lifecycle: &Lifecycle,
) -> stream::BoxStream<'static, io::Result<Stream>> {
    match tls {
        None => incoming.map(|accepted| accepted.map(Stream::Plain)).boxed(),
        Some((tls, handshakes)) => {
            let (sender, receiver) = mpsc::channel(READY);
            let running = lifecycle.clone();
            let draining = lifecycle.draining();
            lifecycle.spawn_job("handshakes", async move {
                tokio::select! {
                    () = draining.cancelled() => {}
                    () = shake(incoming, &tls, &handshakes, &running, &sender) => {}
                }
            });
            ReceiverStream::new(receiver).boxed()
        }
    }
}

async fn shake(
    mut incoming: impl Incoming<Item = io::Result<TcpStream>> + Unpin,
    tls: &Tls,
    handshakes: &Handshakes,
    running: &Lifecycle,
    ready: &mpsc::Sender<io::Result<Stream>>,
) {
    while let Some(accepted) = incoming.next().await {
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                // Out of file descriptors, for one: the next attempt would fail at once as well.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(place) = stream.peer_addr().ok().and_then(|peer| handshakes.begin(peer)) else {
            tracing::debug!("a connection is closed because too many begin at the moment");
            continue;
        };
        let (config, ready, draining) = (tls.web(), ready.clone(), running.draining());
        running.spawn_job("handshake", async move {
            let secured = tokio::select! {
                () = draining.cancelled() => return,
                secured = secure(stream, config, place) => secured,
            };
            match secured {
                // The server takes it, or is gone.
                Ok(stream) => _ = ready.send(Ok(stream)).await,
                Err(error) => tracing::debug!(%error, "a connection could not be secured"),
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshakes_are_bounded_in_all_and_for_each_network() {
        let handshakes = Handshakes::default();
        let peer = |network: u32| SocketAddr::from((network.to_be_bytes(), 1));
        let places: Vec<_> = (0..OF_ONE).map(|_| handshakes.begin(peer(1)).expect("there is a place")).collect();
        assert!(handshakes.begin(peer(1)).is_none());
        let others: Vec<_> =
            (2..).map(|network| handshakes.begin(peer(network))).take_while(Option::is_some).take(HANDSHAKES).collect();
        assert_eq!(places.len() + others.len(), HANDSHAKES);
        drop(places);
        assert!(handshakes.begin(peer(1)).is_some());
    }
}

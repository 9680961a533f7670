//! The operator protocol: lines of JSON over TCP or WebSocket, on a port of its own.
//!
//! A session is a task: what is said here is seen on every other face. Requests of one connection
//! are worked on side by side, so a cancel never waits behind a stream. What a line may say is in
//! `request`, what is answered in `answer` and `events`.
//!
//! Like the other faces it is a transcoder before the gRPC services, and knows nothing of who may
//! do what.

mod answer;
mod calls;
mod connection;
mod events;
mod line;
mod request;
mod session;
mod tools;
mod wire;

use std::{sync::Arc, time::Duration};

use construct_runtime::Lifecycle;
use tokio::{net::TcpListener, sync::Semaphore};

use self::{calls::Calls, connection::Connection};
use super::{Faces, guard::Guard};
use crate::{
    Config,
    places::Places,
    tls::{
        Tls, accept,
        stream::{Over, Stream},
    },
};

/// Connections at the same time. Further ones are closed at once, with the reason.
const CONNECTIONS: usize = 1024;
/// Those of one network. Behind a proxy that is not trusted all are. Of a trusted one, WebSockets
/// are counted by whom it asks for as soon as it has said that; lines as they are say nothing of
/// it.
const CONNECTIONS_OF_ONE: usize = 512;
/// Bytes of a line at most: as for a request of gRPC.
const MAX_LINE: usize = crate::server::MAX_REQUEST;
/// Requests of one connection that are worked on at the same time, streams among them. Further ones
/// are refused.
const RUNNING: usize = 64;
/// Cancels that are worked on beside them: what is to be ended must not stand in the way of what
/// ends it.
const CANCELS: usize = 16;
/// Lines of one connection that are read at once, and how many more each second. Further ones are
/// refused.
const BURST: u32 = 100;
const PER_SECOND: u32 = 50;
/// How long a client may take to send the first line of a connection.
const FIRST: Duration = Duration::from_secs(10);
/// How long a connection with nothing to do may say nothing.
const IDLE: Duration = Duration::from_secs(600);
/// How long a client may leave what it is sent unread, when it is time to close the connection.
const LINGER: Duration = Duration::from_secs(5);

/// Whole sessions that are in memory at the same time, of all connections, and how long one waits
/// for a place.
const SESSIONS: usize = 64;
const ROOM: Duration = Duration::from_secs(10);

/// What the operator protocol needs to know.
struct Options {
    /// Who answers when a request names no agent.
    agent: Option<String>,
    /// Which pages may open a WebSocket.
    guard: Guard,
    /// Places for sessions that are shown whole.
    room: Arc<Semaphore>,
    /// Places for WebSockets that come by trusted proxies.
    proxied: Places,
}

/// Serves the protocol until the process drains.
///
/// # Errors
/// When the listener has no address.
pub(crate) fn spawn(
    listener: TcpListener,
    tls: Option<(Tls, Places)>,
    faces: &Faces,
    config: &Config,
    lifecycle: &Lifecycle,
) -> std::io::Result<()> {
    let address = listener.local_addr()?;
    let guard =
        Guard::new(address.ip().is_loopback(), &config.gateway_origins, &config.gateway_hosts);
    let room = Arc::new(Semaphore::new(SESSIONS));
    let proxied = Places::new(CONNECTIONS, CONNECTIONS_OF_ONE);
    let options =
        Arc::new(Options { agent: config.gateway_operator_agent.clone(), guard, room, proxied });
    let proxies = faces.proxies().clone();
    let calls = Calls::new(faces);
    tracing::info!(%address, tls = tls.is_some(), "serving the operator protocol");
    let (draining, running) = (lifecycle.draining(), lifecycle.clone());
    lifecycle.spawn_job("operator protocol", async move {
        let places = Places::new(CONNECTIONS, CONNECTIONS_OF_ONE);
        loop {
            let accepted = tokio::select! {
                () = draining.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of file descriptors, for one: the next attempt would fail at once as
                    // well.
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            // Who is gone already needs none.
            let Ok(peer) = stream.peer_addr() else { continue };
            let counted = proxies.counted(peer);
            let place = places.take(counted);
            let connection =
                Connection::new(&stream, calls.clone(), Arc::clone(&options), draining.clone());
            let Some((tls, handshakes)) = &tls else {
                running.spawn_job("operator connection", async move {
                    match place {
                        Some(place) => {
                            connection.run(Stream::holding(Over::Plain(stream), place)).await
                        }
                        None => connection.refuse(stream).await,
                    }
                });
                continue;
            };
            // Who is not even secured is told nothing.
            let (Some(place), Some(shaking)) = (place, handshakes.take(counted)) else { continue };
            let (config, stopping) = (tls.lines(), draining.clone());
            running.spawn_job("operator connection", async move {
                let secured = tokio::select! {
                    () = stopping.cancelled() => return,
                    secured = accept::secure(stream, config, shaking) => secured,
                };
                match secured {
                    Ok(over) => connection.run(Stream::holding(over, place)).await,
                    Err(error) => tracing::debug!(%error, "a connection could not be secured"),
                }
            });
        }
    });
    Ok(())
}

//! The operator protocol: lines of JSON over TCP or WebSocket, on a port of its own.
//!
//! A session is a task: what is said here is seen on every other protocol. Requests of one connection
//! are worked on side by side, so a cancel never waits behind a stream. What a line may say is in
//! `request`, what is answered in `answer` and `events`.
//!
//! Like the other protocols it is a transcoder before the gRPC services, and knows nothing of who may
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
use tokio::net::TcpListener;

use self::{calls::Calls, connection::Connection};
use super::{ProtocolLayer, guard::OriginGuard};
use crate::{
    Config,
    limit::{Limit, connection::Connections},
    tls::{
        Tls, accept,
        stream::{Transport, Stream},
    },
};

/// Connections on which nobody is known yet, and those of one network. Further ones are closed at
/// once, with the reason.
const NEWCOMERS: usize = 256;
const NEWCOMERS_OF_ONE: usize = 64;
/// Connections of who is known, and those of one network. Behind a proxy that is not trusted all
/// are. Of a trusted one, WebSockets are counted by whom it asks for as soon as it has said that;
/// lines as they are say nothing of it.
const CONNECTIONS: usize = 1024;
const CONNECTIONS_OF_ONE: usize = 512;
/// Bytes of a line at most: as for a request of gRPC. Until it is known who is there, much less
/// ([`crate::limit::Account::receive`]).
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

/// Whole sessions that are read at the same time, those of one organization, and how long one waits
/// for a place, and for room.
const SESSIONS: usize = 4;
const SESSIONS_OF_ONE: usize = 2;
const ROOM: Duration = Duration::from_secs(10);

/// What the operator protocol needs to know.
struct Options {
    /// Who answers when a request names no agent.
    agent: Option<String>,
    /// Which pages may open a WebSocket.
    guard: OriginGuard,
    /// Sessions that are read as a whole.
    sessions: Limit,
    /// WebSockets that come by trusted proxies.
    proxied: Limit,
}

/// Serves the protocol until the process drains.
///
/// # Errors
/// When the listener has no address.
pub(crate) fn spawn(
    listener: TcpListener,
    tls: Option<(Tls, Limit)>,
    protocols: &ProtocolLayer,
    config: &Config,
    lifecycle: &Lifecycle,
) -> std::io::Result<()> {
    let address = listener.local_addr()?;
    let guard =
        OriginGuard::new(address.ip().is_loopback(), &config.gateway_origins, &config.gateway_hosts);
    let sessions = Limit::new(SESSIONS, SESSIONS_OF_ONE);
    let proxied = Limit::new(CONNECTIONS, CONNECTIONS_OF_ONE);
    let options = Arc::new(Options {
        agent: config.gateway_operator_agent.clone(),
        guard,
        sessions,
        proxied,
    });
    let proxies = protocols.proxies().clone();
    let calls = Calls::new(protocols);
    tracing::info!(%address, tls = tls.is_some(), "serving the operator protocol");
    let (draining, running) = (lifecycle.draining(), lifecycle.clone());
    lifecycle.spawn_job("operator protocol", async move {
        let newcomers = Limit::new(NEWCOMERS, NEWCOMERS_OF_ONE);
        let connections = Connections::new(newcomers, Limit::new(CONNECTIONS, CONNECTIONS_OF_ONE));
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
            let network = proxies.holder(peer);
            let accepted = connections.accept(network);
            let connection =
                Connection::new(&stream, calls.clone(), Arc::clone(&options), draining.clone());
            let Some((tls, handshakes)) = &tls else {
                running.spawn_job("operator connection", async move {
                    match accepted {
                        Ok(accepted) => {
                            connection.run(Stream::new(Transport::Plain(stream)), accepted).await
                        }
                        Err(_) => connection.refuse(stream).await,
                    }
                });
                continue;
            };
            // Who is not even secured is told nothing.
            let (Ok(accepted), Ok(handshake)) = (accepted, handshakes.take(network, 1)) else {
                continue;
            };
            let (config, stopping) = (tls.lines(), draining.clone());
            running.spawn_job("operator connection", async move {
                let secured = tokio::select! {
                    () = stopping.cancelled() => return,
                    secured = accept::secure(stream, config, handshake) => secured,
                };
                match secured {
                    Ok(over) => connection.run(Stream::new(over), accepted).await,
                    Err(error) => tracing::debug!(%error, "a connection could not be secured"),
                }
            });
        }
    });
    Ok(())
}

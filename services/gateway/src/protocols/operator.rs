//! The operator protocol: lines of JSON over TCP or WebSocket, on a port of its own.
//!
//! A session is a task, and every other protocol sees its messages. Requests of one connection run
//! concurrently, so a cancel never waits behind a stream. `request` has the requests, `answer` and
//! `events` have the responses.
//!
//! Like the other protocols it is a transcoder in front of the gRPC services, and knows nothing of
//! authorization.

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
        stream::{Stream, Transport},
    },
};

/// Maximum number of unauthenticated connections, in total and per network. Further ones are closed
/// at once, with the reason.
const MAX_ANONYMOUS_CONNECTIONS: usize = 256;
const MAX_ANONYMOUS_CONNECTIONS_PER_NETWORK: usize = 64;
/// Maximum number of authenticated connections, in total and per network. All connections behind an
/// untrusted proxy count as one network. WebSockets of a trusted proxy are counted by the client it
/// names, as soon as it has named it; plain lines name none.
const MAX_CONNECTIONS: usize = 1024;
const MAX_CONNECTIONS_PER_NETWORK: usize = 512;
/// Maximum size of a line, in bytes: that of a gRPC request. Much less before authentication
/// ([`crate::limit::Account::receive`]).
const MAX_LINE: usize = crate::server::MAX_REQUEST;
/// Maximum number of running requests per connection, including streams. Further ones are refused.
const MAX_RUNNING: usize = 64;
/// Maximum number of running cancels beyond [`MAX_RUNNING`]: a full connection must still be able
/// to cancel its requests.
const MAX_CANCELS: usize = 16;
/// Maximum number of lines per connection at once, and the rate at which they are replenished.
/// Further ones are refused.
const MAX_LINE_BURST: u32 = 100;
const LINES_PER_SECOND: u32 = 50;
/// Time for a client to send the first line of a connection.
const FIRST_LINE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which a connection without running requests is closed when it is silent.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
/// Time for a client to read what it is sent when the connection is about to close.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of whole sessions read at the same time, in total and per organization, and how
/// long a request waits for a permit and for memory.
const MAX_SESSIONS: usize = 4;
const MAX_SESSIONS_PER_ORGANIZATION: usize = 2;
const SESSION_TIMEOUT: Duration = Duration::from_secs(10);

/// The configuration of the operator protocol.
struct Options {
    /// The agent of requests that name none.
    agent: Option<String>,
    /// Decides which pages may open a WebSocket.
    guard: OriginGuard,
    /// Limits whole sessions that are read at the same time.
    sessions: Limit,
    /// Limits WebSockets of trusted proxies.
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
    let guard = OriginGuard::new(
        address.ip().is_loopback(),
        &config.gateway_origins,
        &config.gateway_hosts,
    );
    let sessions = Limit::new(MAX_SESSIONS, MAX_SESSIONS_PER_ORGANIZATION);
    let proxied = Limit::new(MAX_CONNECTIONS, MAX_CONNECTIONS_PER_NETWORK);
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
        let anonymous =
            Limit::new(MAX_ANONYMOUS_CONNECTIONS, MAX_ANONYMOUS_CONNECTIONS_PER_NETWORK);
        let connections =
            Connections::new(anonymous, Limit::new(MAX_CONNECTIONS, MAX_CONNECTIONS_PER_NETWORK));
        loop {
            let accepted = tokio::select! {
                () = draining.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // The process may be out of file descriptors; the next attempt would fail at
                    // once as well.
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            // A client that is gone needs no response.
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
            // A client without TLS gets no response.
            let (Ok(accepted), Ok(handshake)) = (accepted, handshakes.acquire(network, 1)) else {
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

//! A TCP proxy that can cut a service off from what it talks to, hold everything up, slow it down, and let it through again.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::AbortHandle,
};

/// A proxy in front of one server; ends when dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    way: watch::Sender<Way>,
    abort: AbortHandle,
}

/// What becomes of what is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Open,
    /// Connections end at once.
    Cut,
    /// Connections stand, and nothing passes.
    Held,
    /// Each piece is so late.
    Slow(Duration),
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.abort.abort();
    }
}

impl Proxy {
    /// Lets everything through to `upstream` (`host:port`).
    ///
    /// # Errors
    /// When no port is free.
    pub async fn start(upstream: &str) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let (way, state) = watch::channel(Way::Open);
        let upstream = upstream.to_owned();
        let abort = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                // While cut off, a connection is closed as soon as it stands.
                if *state.borrow() != Way::Cut {
                    tokio::spawn(pass(client, upstream.clone(), state.clone()));
                }
            }
        });
        Ok(Self { address, way, abort: abort.abort_handle() })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes every connection, and each new one, until [`Proxy::restore`].
    pub fn cut(&self) {
        self.way.send_replace(Way::Cut);
    }

    /// Leaves connections standing, but lets nothing through until [`Proxy::restore`]; then everything comes, in order.
    pub fn hold(&self) {
        self.way.send_replace(Way::Held);
    }

    /// Lets everything through late, each piece by `delay`, until [`Proxy::restore`].
    pub fn slow(&self, delay: Duration) {
        self.way.send_replace(Way::Slow(delay));
    }

    /// Lets everything through again.
    pub fn restore(&self) {
        self.way.send_replace(Way::Open);
    }

    /// `url` with the proxy in the place of its server.
    ///
    /// # Panics
    /// When the address names no host and port.
    pub fn instead_of(&self, url: &str) -> String {
        url.replacen(&authority(url), &self.address.to_string(), 1)
    }
}

/// `host:port` of an address.
///
/// # Panics
/// When it names none.
pub fn authority(url: &str) -> String {
    let uri: tonic::transport::Uri = url.parse().expect("a test server has a valid address");
    let authority = uri.authority().expect("a test server's address names a host");
    authority.as_str().rsplit('@').next().unwrap_or_default().to_owned()
}

async fn pass(client: TcpStream, upstream: String, mut way: watch::Receiver<Way>) {
    let Ok(server) = TcpStream::connect(&upstream).await else { return };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        _ = copy(from_client, to_server, way.clone()) => {}
        _ = copy(from_server, to_client, way.clone()) => {}
        _ = way.wait_for(|way| *way == Way::Cut) => {}
    }
}

/// Passes on what comes, in order.
async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut way: watch::Receiver<Way>,
) -> io::Result<()> {
    let mut piece = vec![0; 64 * 1024];
    loop {
        let length = from.read(&mut piece).await?;
        if length == 0 {
            return to.shutdown().await;
        }
        let now = *way.borrow_and_update();
        match now {
            Way::Slow(delay) => tokio::time::sleep(delay).await,
            // The proxy is gone with its test.
            _ => drop(way.wait_for(|way| *way != Way::Held).await),
        }
        to.write_all(&piece[..length]).await?;
    }
}

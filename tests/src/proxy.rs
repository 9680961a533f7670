//! A TCP proxy that can cut a service off from what it talks to, and let it through again.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::AbortHandle,
};

/// A proxy in front of one server; ends when dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    open: watch::Sender<bool>,
    abort: AbortHandle,
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
        let (open, state) = watch::channel(true);
        let upstream = upstream.to_owned();
        let abort = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                // While cut off, a connection is closed as soon as it stands.
                if *state.borrow() {
                    tokio::spawn(pass(client, upstream.clone(), state.clone()));
                }
            }
        });
        Ok(Self { address, open, abort: abort.abort_handle() })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes every connection, and each new one, until [`Proxy::restore`].
    pub fn cut(&self) {
        self.open.send_replace(false);
    }

    /// Lets everything through again.
    pub fn restore(&self) {
        self.open.send_replace(true);
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

async fn pass(mut client: TcpStream, upstream: String, mut open: watch::Receiver<bool>) {
    let Ok(mut server) = TcpStream::connect(&upstream).await else { return };
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
        _ = open.wait_for(|open| !open) => {}
    }
}

//! A TCP proxy that can cut a service off from what it talks to, hold everything up, at once or at a certain piece, slow it down, and let it
//! through again.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::{oneshot, watch},
    task::AbortHandle,
};

/// A proxy in front of one server; ends when dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    way: Arc<watch::Sender<Way>>,
    pieces: Arc<Mutex<Pieces>>,
    abort: AbortHandle,
}

/// An end of the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Whoever connects to the proxy.
    Client,
    /// What stands behind it.
    Server,
}

/// How many pieces came, and where to stop. A piece is what was there when it was read: one message, a few, or a part of one.
#[derive(Debug, Default)]
struct Pieces {
    from_client: u64,
    from_server: u64,
    trap: Option<Trap>,
}

#[derive(Debug)]
struct Trap {
    end: End,
    at: u64,
    holds: Vec<Arc<watch::Sender<Way>>>,
    sprung: oneshot::Sender<()>,
}

impl Pieces {
    fn counted(&mut self, end: End) -> &mut u64 {
        match end {
            End::Client => &mut self.from_client,
            End::Server => &mut self.from_server,
        }
    }

    /// Counts a piece before it is passed on.
    fn note(&mut self, end: End) {
        *self.counted(end) += 1;
        let count = *self.counted(end);
        if let Some(trap) = self.trap.take_if(|trap| trap.end == end && trap.at <= count) {
            for way in &trap.holds {
                way.send_replace(Way::Held);
            }
            // Nobody may be waiting for it any more.
            let _ = trap.sprung.send(());
        }
    }
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
        let pieces = Arc::<Mutex<Pieces>>::default();
        let (upstream, counted) = (upstream.to_owned(), Arc::clone(&pieces));
        let abort = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                // While cut off, a connection is closed as soon as it stands.
                if *state.borrow() != Way::Cut {
                    tokio::spawn(pass(client, upstream.clone(), state.clone(), Arc::clone(&counted)));
                }
            }
        });
        Ok(Self { address, way: Arc::new(way), pieces, abort: abort.abort_handle() })
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

    /// Closes every connection with what it holds, and lets new ones through once all are closed.
    pub async fn reset(&self) {
        self.cut();
        // One is who accepts connections.
        while self.way.receiver_count() > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.restore();
    }

    /// How many pieces came from there.
    pub fn passed(&self, end: End) -> u64 {
        *count(&self.pieces).counted(end)
    }

    /// Has this proxy and `others` let nothing through any more as soon as the `nth` piece from now has come from `end`, which is not passed
    /// on either; says when. It takes the place of an earlier trap.
    pub fn trap(&self, end: End, nth: u64, others: &[&Self]) -> oneshot::Receiver<()> {
        let (sprung, heard) = oneshot::channel();
        let holds = others.iter().chain([&self]).map(|proxy| Arc::clone(&proxy.way)).collect();
        let mut pieces = count(&self.pieces);
        let at = *pieces.counted(end) + nth;
        pieces.trap = Some(Trap { end, at, holds, sprung });
        heard
    }

    /// Takes the trap away that has not sprung.
    pub fn disarm(&self) {
        count(&self.pieces).trap = None;
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

fn count(pieces: &Mutex<Pieces>) -> MutexGuard<'_, Pieces> {
    pieces.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn pass(client: TcpStream, upstream: String, mut way: watch::Receiver<Way>, pieces: Arc<Mutex<Pieces>>) {
    let Ok(server) = TcpStream::connect(&upstream).await else { return };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        _ = copy(from_client, to_server, way.clone(), || count(&pieces).note(End::Client)) => {}
        _ = copy(from_server, to_client, way.clone(), || count(&pieces).note(End::Server)) => {}
        _ = way.wait_for(|way| *way == Way::Cut) => {}
    }
}

/// Passes on what comes, in order, each piece after it was counted.
async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut way: watch::Receiver<Way>,
    noted: impl Fn(),
) -> io::Result<()> {
    let mut piece = vec![0; 64 * 1024];
    loop {
        let length = from.read(&mut piece).await?;
        if length == 0 {
            return to.shutdown().await;
        }
        noted();
        let now = *way.borrow_and_update();
        if let Way::Slow(delay) = now {
            tokio::time::sleep(delay).await;
        }
        // An error: the proxy is gone with its test.
        let now = way.wait_for(|way| *way != Way::Held).await.map_or(Way::Cut, |way| *way);
        if now == Way::Cut {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        to.write_all(&piece[..length]).await?;
    }
}

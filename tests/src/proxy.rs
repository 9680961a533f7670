//! A TCP proxy that can cut a service off from a server, hold all traffic, at once or at a given
//! piece, slow it down, and restore it. A proxy in front of NATS can also stop at a given message,
//! and delay, reorder and duplicate messages.

mod disorder;
mod frames;
mod traps;

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::{oneshot, watch},
    task::AbortHandle,
};

pub use traps::Moment;

use disorder::{Disorder, Stops};
use traps::{Catch, MessageTrap, PieceTrap, TextTrap, TrapObserver, Traps, lock};

/// A proxy in front of one server. It stops when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    mode: Arc<watch::Sender<Mode>>,
    traps: Arc<Mutex<Traps>>,
    knows_messages: bool,
    abort: AbortHandle,
}

/// A side of the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The process that connects to the proxy.
    Client,
    /// The server behind the proxy.
    Server,
}

/// How the proxy treats traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Open,
    /// Connections are closed at once.
    Cut,
    /// Connections stay open, and nothing passes.
    Held,
    /// Each piece is delayed by this time.
    Slow(Duration),
    /// Some messages are late, and some come twice; the seed selects them.
    Disordered(u64),
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.abort.abort();
    }
}

impl Proxy {
    /// Passes everything to `upstream` (`host:port`).
    ///
    /// # Errors
    /// When no port is free.
    pub async fn start(upstream: &str) -> io::Result<Self> {
        Self::start_with(upstream, false).await
    }

    /// The same in front of NATS: this proxy can [`Proxy::disorder`] messages.
    ///
    /// # Errors
    /// As [`Proxy::start`].
    pub async fn start_nats(upstream: &str) -> io::Result<Self> {
        Self::start_with(upstream, true).await
    }

    async fn start_with(upstream: &str, knows_messages: bool) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let (mode, state) = watch::channel(Mode::Open);
        let traps = Arc::<Mutex<Traps>>::default();
        let (upstream, set) = (upstream.to_owned(), Arc::clone(&traps));
        let abort = tokio::spawn(async move {
            let mut number = 0;
            while let Ok((client, _)) = listener.accept().await {
                number += 1;
                // While cut off, close a connection as soon as it is accepted.
                if *state.borrow() != Mode::Cut {
                    let connection = (number, knows_messages);
                    tokio::spawn(pass(
                        client,
                        upstream.clone(),
                        state.clone(),
                        Arc::clone(&set),
                        connection,
                    ));
                }
            }
        });
        Ok(Self {
            address,
            mode: Arc::new(mode),
            traps,
            knows_messages,
            abort: abort.abort_handle(),
        })
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes every existing and new connection until [`Proxy::restore`].
    pub fn cut(&self) {
        self.mode.send_replace(Mode::Cut);
    }

    /// Keeps connections open and lets nothing pass until [`Proxy::restore`]; then everything
    /// arrives in order.
    pub fn hold(&self) {
        self.mode.send_replace(Mode::Held);
    }

    /// Delays each piece by `delay` until [`Proxy::restore`].
    pub fn slow(&self, delay: Duration) {
        self.mode.send_replace(Mode::Slow(delay));
    }

    /// Delays some messages in both directions, while later ones of the same connection pass, and
    /// duplicates some messages of the server, until [`Proxy::restore`]. Delayed messages still
    /// arrive late after that. Everything else passes at once. A seed selects the same messages of
    /// the same input.
    ///
    /// # Panics
    /// When it was not started with [`Proxy::start_nats`].
    pub fn disorder(&self, seed: u64) {
        assert!(self.knows_messages, "the proxy cannot tell messages apart");
        self.mode.send_replace(Mode::Disordered(seed));
    }

    /// Lets everything pass again.
    pub fn restore(&self) {
        self.mode.send_replace(Mode::Open);
    }

    /// Closes every connection with its held data, and accepts new ones once all are closed.
    pub async fn reset(&self) {
        self.cut();
        // One receiver belongs to the accept loop.
        while self.mode.receiver_count() > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.restore();
    }

    /// The number of pieces that came from `end`.
    pub fn piece_count(&self, end: End) -> u64 {
        *lock(&self.traps).piece_count_mut(end)
    }

    /// Holds this proxy and `others` when the `nth` piece from now comes from `end`; that piece
    /// does not pass. The receiver reports it. Replaces an earlier trap.
    pub fn trap(&self, end: End, nth: u64, others: &[&Self]) -> oneshot::Receiver<()> {
        let (catch, sprung_receiver) = self.catch(others);
        let mut traps = lock(&self.traps);
        let at = *traps.piece_count_mut(end) + nth;
        traps.piece = Some(PieceTrap { end, at, catch });
        sprung_receiver
    }

    /// The same at the next piece of a client that contains `text`; with `after`, the next one on
    /// the connection of a piece with that text. The answer to it is the server's next piece on its
    /// connection.
    pub fn trap_text(
        &self,
        moment: Moment,
        text: &str,
        after: Option<&str>,
        others: &[&Self],
    ) -> oneshot::Receiver<()> {
        let (catch, sprung_receiver) = self.catch(others);
        let (text, after) = (text.to_owned(), after.map(str::to_owned));
        lock(&self.traps).text =
            Some(TextTrap { moment, text, after, on: None, matched_on: None, catch });
        sprung_receiver
    }

    /// The same at the `nth` message from now that a client sends to a subject with this prefix;
    /// with `after`, counted from a message to a subject with that prefix.
    ///
    /// # Panics
    /// When it was not started with [`Proxy::start_nats`].
    pub fn trap_message(
        &self,
        moment: Moment,
        (subject, nth): (&str, u64),
        after: Option<&str>,
        others: &[&Self],
    ) -> oneshot::Receiver<()> {
        assert!(self.knows_messages, "the proxy cannot tell messages apart");
        let (catch, sprung_receiver) = self.catch(others);
        let (subject, after) = (subject.to_owned(), after.map(str::to_owned));
        let trap = MessageTrap { moment, subject, after, left: nth, answer: None, catch };
        lock(&self.traps).message = Some(trap);
        sprung_receiver
    }

    fn catch(&self, others: &[&Self]) -> (Catch, oneshot::Receiver<()>) {
        let (sprung, sprung_receiver) = oneshot::channel();
        let holds = others.iter().chain([&self]).map(|proxy| Arc::clone(&proxy.mode)).collect();
        (Catch { holds, sprung }, sprung_receiver)
    }

    /// Removes the traps that have not sprung.
    pub fn disarm(&self) {
        let mut traps = lock(&self.traps);
        (traps.piece, traps.text, traps.message) = (None, None, None);
    }

    /// `url` with the proxy's address in place of its server's.
    ///
    /// # Panics
    /// When the URL has no host and port.
    pub fn proxied_url(&self, url: &str) -> String {
        url.replacen(&authority(url), &self.address.to_string(), 1)
    }
}

/// The `host:port` of a URL.
///
/// # Panics
/// When it has none.
pub fn authority(url: &str) -> String {
    let uri: tonic::transport::Uri = url.parse().expect("a test server has a valid address");
    let authority = uri.authority().expect("a test server's address names a host");
    authority.as_str().rsplit('@').next().unwrap_or_default().to_owned()
}

/// Handles one connection. It has a number, and its messages are parsed or not.
async fn pass(
    client: TcpStream,
    upstream: String,
    mut mode: watch::Receiver<Mode>,
    traps: Arc<Mutex<Traps>>,
    (connection, knows_messages): (u64, bool),
) {
    let Ok(server) = TcpStream::connect(&upstream).await else { return };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let direction = |end| {
        let observer = TrapObserver { traps: Arc::clone(&traps), end, connection };
        (observer, knows_messages.then(|| Disorder::new(connection, end)))
    };
    tokio::select! {
        _ = copy(from_client, to_server, mode.clone(), direction(End::Client)) => {}
        _ = copy(from_server, to_client, mode.clone(), direction(End::Server)) => {}
        _ = mode.wait_for(|mode| *mode == Mode::Cut) => {}
    }
}

/// Copies one direction and counts each piece before it passes. The order is kept unless messages
/// are disordered.
async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut mode: watch::Receiver<Mode>,
    (observer, mut disorder): (TrapObserver, Option<Disorder>),
) -> io::Result<()> {
    let mut piece = vec![0; 64 * 1024];
    loop {
        let read = tokio::select! {
            read = from.read(&mut piece) => Some(read?),
            () = due(disorder.as_ref()) => None,
        };
        let Some(length) = read else {
            wait_until_open(&mut mode).await?;
            let late = disorder.as_mut().map(Disorder::take_due).unwrap_or_default();
            to.write_all(&late).await?;
            continue;
        };
        if length == 0 {
            let late = disorder.as_mut().map(Disorder::take_all).unwrap_or_default();
            to.write_all(&late).await?;
            return to.shutdown().await;
        }
        observer.note(&piece[..length]);
        let now = *mode.borrow_and_update();
        if let Mode::Slow(delay) = now {
            tokio::time::sleep(delay).await;
        }
        let now = wait_until_open(&mut mode).await?;
        let Some(disorder) = &mut disorder else {
            to.write_all(&piece[..length]).await?;
            continue;
        };
        let seed = if let Mode::Disordered(seed) = now { Some(seed) } else { None };
        let stops = |message: &[u8]| observer.stops(message);
        let stops: Option<Stops<'_>> = if observer.is_set() { Some(&stops) } else { None };
        let passed = disorder.pass(&piece[..length], seed, stops)?;
        to.write_all(&passed.at_once).await?;
        if !passed.stopped.is_empty() {
            // A trap has sprung: nothing passes until the proxy is restored.
            wait_until_open(&mut mode).await?;
            to.write_all(&passed.stopped).await?;
        }
    }
}

/// Returns when a delayed message can pass.
async fn due(disorder: Option<&Disorder>) {
    match disorder {
        Some(disorder) => disorder.due().await,
        None => std::future::pending().await,
    }
}

/// Waits until traffic may pass.
async fn wait_until_open(mode: &mut watch::Receiver<Mode>) -> io::Result<Mode> {
    // An error means that the proxy was dropped with its test.
    let now = mode.wait_for(|mode| *mode != Mode::Held).await.map_or(Mode::Cut, |mode| *mode);
    if now == Mode::Cut { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(now) }
}

//! A TCP proxy that can cut a service off from what it talks to, hold everything up, at once or at
//! a certain piece, slow it down, and let it through again. One before NATS can also hold
//! everything up at a certain message, and have messages come late, in another order, and twice.

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

/// A proxy in front of one server; ends when dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    mode: Arc<watch::Sender<Mode>>,
    traps: Arc<Mutex<Traps>>,
    knows_messages: bool,
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

/// What becomes of what is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Open,
    /// Connections end at once.
    Cut,
    /// Connections stand, and nothing passes.
    Held,
    /// Each piece is so late.
    Slow(Duration),
    /// Some messages are late, and some come twice; which ones follows from the number.
    Disordered(u64),
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
        Self::start_with(upstream, false).await
    }

    /// The same before NATS: this one can [`Proxy::disorder`] messages.
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
                // While cut off, a connection is closed as soon as it stands.
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

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes every connection, and each new one, until [`Proxy::restore`].
    pub fn cut(&self) {
        self.mode.send_replace(Mode::Cut);
    }

    /// Leaves connections standing, but lets nothing through until [`Proxy::restore`]; then
    /// everything comes, in order.
    pub fn hold(&self) {
        self.mode.send_replace(Mode::Held);
    }

    /// Lets everything through late, each piece by `delay`, until [`Proxy::restore`].
    pub fn slow(&self, delay: Duration) {
        self.mode.send_replace(Mode::Slow(delay));
    }

    /// Holds back some messages, in both directions, while later ones of the same connection pass,
    /// and has some from the server come twice, until [`Proxy::restore`]; what is late then still
    /// comes late. Everything else passes at once. The same seed chooses the same of what comes in
    /// the same order.
    ///
    /// # Panics
    /// When it was not started with [`Proxy::start_nats`].
    pub fn disorder(&self, seed: u64) {
        assert!(self.knows_messages, "the proxy cannot tell messages apart");
        self.mode.send_replace(Mode::Disordered(seed));
    }

    /// Lets everything through again.
    pub fn restore(&self) {
        self.mode.send_replace(Mode::Open);
    }

    /// Closes every connection with what it holds, and lets new ones through once all are closed.
    pub async fn reset(&self) {
        self.cut();
        // One is who accepts connections.
        while self.mode.receiver_count() > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.restore();
    }

    /// How many pieces came from there.
    pub fn piece_count(&self, end: End) -> u64 {
        *lock(&self.traps).piece_count_mut(end)
    }

    /// Has this proxy and `others` let nothing through any more as soon as the `nth` piece from now
    /// has come from `end`, which is not passed on either; says when. It takes the place of an
    /// earlier trap.
    pub fn trap(&self, end: End, nth: u64, others: &[&Self]) -> oneshot::Receiver<()> {
        let (catch, sprung_receiver) = self.catch(others);
        let mut traps = lock(&self.traps);
        let at = *traps.piece_count_mut(end) + nth;
        traps.piece = Some(PieceTrap { end, at, catch });
        sprung_receiver
    }

    /// The same at a moment of the next piece from a client that has this text in it; with `after`,
    /// of the next one on the connection of a piece with that text. What is answered to it is the
    /// next piece that the server sends on its connection.
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

    /// The same at a moment of the `nth` message from now that a client sends to a subject that
    /// begins so; with `after`, from when a message was sent to one that begins like that.
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

    /// Takes the traps away that have not sprung.
    pub fn disarm(&self) {
        let mut traps = lock(&self.traps);
        (traps.piece, traps.text, traps.message) = (None, None, None);
    }

    /// `url` with the proxy in the place of its server.
    ///
    /// # Panics
    /// When the address names no host and port.
    pub fn proxied_url(&self, url: &str) -> String {
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

/// The connection has a number, and messages of it can be told apart or not.
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

/// Passes on what comes, each piece after it was counted; in order, unless messages are disordered.
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
            // A trap has sprung, and nothing passes until somebody lets it.
            wait_until_open(&mut mode).await?;
            to.write_all(&passed.stopped).await?;
        }
    }
}

/// Returns when something that is late can be passed on.
async fn due(disorder: Option<&Disorder>) {
    match disorder {
        Some(disorder) => disorder.due().await,
        None => std::future::pending().await,
    }
}

/// Waits until something may pass.
async fn wait_until_open(mode: &mut watch::Receiver<Mode>) -> io::Result<Mode> {
    // An error: the proxy is gone with its test.
    let now = mode.wait_for(|mode| *mode != Mode::Held).await.map_or(Mode::Cut, |mode| *mode);
    if now == Mode::Cut { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(now) }
}

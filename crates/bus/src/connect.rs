//! The connection to NATS. Once made it is repaired for ever; each loss and each return is said
//! once.

use std::{
    fmt, io,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_nats::{ServerAddr, jetstream};
use percent_encoding::percent_decode_str;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{blob, metrics, permissions::User, topology};

/// The longest wait between two attempts to reconnect.
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(1);

/// How soon the topology is looked after again when that failed.
const ENSURE_RETRY_DELAY: Duration = Duration::from_secs(2);

/// How often who makes the streams looks whether they are still there: nobody else can make one
/// that was taken away.
const CHECK_INTERVAL: Duration = Duration::from_secs(15);

/// How soon it looks again after the server was away, or when it has found something.
const CLOSE_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// How long one request to JetStream's API may take.
const API_TIMEOUT: Duration = Duration::from_secs(2);

/// Pipelined publishes that may wait for their acknowledgement, over the whole process.
const MAX_ACK_IN_FLIGHT: usize = 16_384;

/// Why no connection could be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address of NATS cannot be understood.
    #[error("the NATS address is not valid")]
    Address(#[source] AddressError),
    /// NATS does not answer, or refuses us.
    #[error("NATS could not be reached")]
    Nats(#[source] async_nats::ConnectError),
    /// A file with certificates or a key cannot be used.
    #[error("the certificates or the key for NATS in {file} cannot be used")]
    Certificates {
        /// Which.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The folder for large payloads cannot be used.
    #[error("the blob folder cannot be used")]
    Blobs(#[source] blob::Error),
}

impl Error {
    /// Whether another try may help, without anybody changing anything.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Nats(error) => {
                use async_nats::ConnectErrorKind as Kind;
                matches!(error.kind(), Kind::Dns | Kind::TimedOut | Kind::Io | Kind::MaxReconnects)
            }
            Self::Address(_) | Self::Certificates { .. } | Self::Blobs(_) => false,
        }
    }
}

/// What is wrong with an address. Never shows it, because a password may be part of it.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// Not an address.
    #[error("one of the servers is not given as nats://[user:password@]host[:port]")]
    Parse(#[source] io::Error),
    /// Nowhere to connect to.
    #[error("one of the servers has no host")]
    Host,
    /// Percent-encoding of something that is not text.
    #[error("user and password must be UTF-8")]
    Encoding,
    /// A connection has one identity, whichever server it is made to.
    #[error("the servers are given with different users or passwords")]
    Several,
}

/// How to connect.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    name: String,
    blobs: Option<PathBuf>,
    user: Option<User>,
    tls: Tls,
    replicas: Option<NonZeroUsize>,
}

/// What a connection over TLS goes by: an address that begins with `tls://`, or a server that asks
/// for TLS.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tls {
    /// Certificates of those who vouch for the server, in PEM. Not set: those that the system
    /// trusts.
    pub ca: Option<PathBuf>,
    /// Our own certificate and its key, in PEM, for a server that asks for one.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

impl ConnectOptions {
    /// `name` is what the server's connection list shows, e.g. the service and its instance.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), blobs: None, user: None, tls: Tls::default(), replicas: None }
    }

    /// The folder for large payloads, shared by all services. Without it large payloads can neither
    /// be sent nor read.
    #[must_use]
    pub fn blobs(mut self, dir: impl Into<PathBuf>) -> Self {
        self.blobs = Some(dir.into());
        self
    }

    /// As which service to behave: what it may not do by the table of
    /// [`permissions`](crate::permissions) it doesn't try, whoever the address says it is, and
    /// answers come to an inbox of its own. Without it everything is tried.
    #[must_use]
    pub const fn user(mut self, user: User) -> Self {
        self.user = Some(user);
        self
    }

    /// How many servers of a cluster are to keep each stream, where it is this connection that
    /// makes them. Without it streams stay as they are at the server, and new ones are kept by one.
    #[must_use]
    pub const fn replicas(mut self, replicas: Option<NonZeroUsize>) -> Self {
        self.replicas = replicas;
        self
    }

    /// What a connection over TLS goes by.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = tls;
        self
    }
}

/// The state of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connection {
    /// Connected; the generation counts connections since the start, from 1.
    Up {
        /// Rises with every reconnect: what the server kept in memory for us (waiting pulls) is
        /// gone.
        generation: u64,
    },
    /// Not connected at the moment.
    Down,
}

/// The mesh. Cheap to clone; all clones share one connection.
#[derive(Debug, Clone)]
pub struct Bus {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) client: async_nats::Client,
    pub(crate) jetstream: jetstream::Context,
    pub(crate) blobs: Option<blob::Store>,
    pub(crate) user: Option<User>,
    replicas: Option<NonZeroUsize>,
    connection: watch::Receiver<Connection>,
    refused: watch::Receiver<Option<String>>,
    topology_error: watch::Sender<Option<String>>,
    /// Random per process, so that the ids made from it and a counter are unique in the mesh.
    unique: String,
    counter: AtomicU64,
}

impl Bus {
    /// Connects to `nats://[user:password@]host[:port][,…]`, or with a token as
    /// `nats://token@host`; over TLS where it is `tls://` or the server asks for it. What the
    /// address says of the user is percent-decoded, and holds for all of its servers.
    ///
    /// # Errors
    /// When the address or a certificate is not valid, NATS cannot be reached now or refuses us, or
    /// the blob folder cannot be used. Later losses are repaired in the background.
    pub async fn connect(url: &str, options: ConnectOptions) -> Result<Self, Error> {
        let blobs = options.blobs.map(blob::Store::open).transpose().map_err(Error::Blobs)?;
        let (state, connection) = watch::channel(Connection::Down);
        let (refusals, refused) = watch::channel(None);
        let generation = Arc::new(AtomicU64::new(0));
        let (servers, login) = parse_address(url).map_err(Error::Address)?;
        options.tls.check().await?;
        let mut connect = options.tls.apply(Login::options(login));
        if let Some(user) = options.user {
            connect = connect.custom_inbox_prefix(user.inbox());
        }
        let client = connect
            .name(options.name)
            .max_reconnects(None)
            .connection_timeout(Duration::from_secs(3))
            .request_timeout(Some(API_TIMEOUT))
            // A peer that vanished without a word is noticed after two of them.
            .ping_interval(Duration::from_secs(10))
            .reconnect_delay_callback(|attempt| {
                // The first attempt at once: a restarted server is often back already.
                Duration::from_millis(20)
                    .saturating_mul(1_u32 << attempt.min(6))
                    .min(MAX_RECONNECT_DELAY)
                    * u32::from(attempt > 1)
            })
            .event_callback(move |event| {
                observe(&event, &state, &generation, &refusals);
                std::future::ready(())
            })
            .connect(servers)
            .await
            .map_err(Error::Nats)?;
        let jetstream = jetstream::context::ContextBuilder::new()
            .timeout(API_TIMEOUT)
            .max_ack_inflight(MAX_ACK_IN_FLIGHT)
            .build(client.clone());
        metrics::connection(connection.clone());
        let unique = client.new_inbox().chars().filter(char::is_ascii_alphanumeric).collect();
        let counter = AtomicU64::new(0);
        Ok(Self {
            inner: Arc::new(Inner {
                client,
                jetstream,
                blobs,
                user: options.user,
                replicas: options.replicas,
                connection,
                refused,
                topology_error: watch::Sender::new(None),
                unique,
                counter,
            }),
        })
    }

    /// Makes the server's streams and consumers what [`topology`] says, or looks whether those are
    /// there that we use, where that is another's to do. Every service does so at its start.
    ///
    /// # Errors
    /// When the server cannot be reached, or refuses (not enough storage, a change that is not
    /// possible in place); when a stream isn't there yet.
    pub async fn ensure_topology(&self) -> Result<(), topology::Error> {
        match self.inner.user {
            Some(user) if !user.makes_streams() => {
                topology::check_streams(&self.inner.jetstream, user.streams()).await
            }
            _ => topology::ensure(&self.inner.jetstream, self.inner.replicas).await,
        }
    }

    /// Ensures the topology anew after every reconnect, and now and then where it is ours to make,
    /// until `stop`: a server that comes back may have lost its data, and without its streams
    /// nothing could be said any more. Every service runs it after [`Bus::ensure_topology`].
    pub async fn maintain_topology(self, stop: CancellationToken) {
        let mut connection = self.connection();
        connection.borrow_and_update();
        let makes = self.inner.user.is_some_and(User::makes_streams);
        let (mut due, mut stuck_messages, mut failed) =
            (false, topology::StuckMessages::default(), false);
        // How many more looks follow one another closely, as after a reconnect: it takes two to
        // find what nobody gets.
        let mut close = 0_u32;
        loop {
            let pause = async {
                match (due, makes) {
                    (true, _) => tokio::time::sleep(ENSURE_RETRY_DELAY).await,
                    (false, true) => {
                        tokio::time::sleep(if close > 0 {
                            CLOSE_CHECK_INTERVAL
                        } else {
                            CHECK_INTERVAL
                        })
                        .await
                    }
                    (false, false) => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = pause => {
                    // A consumer that was taken away is made by who takes from it, but for Slack's,
                    // who may not.
                    let all = topology::Stream::ALL.map(topology::Stream::name);
                    let slack = topology::slack_consumer();
                    if !due
                        && topology::check_streams(&self.inner.jetstream, all).await.is_ok()
                        && topology::ensure_consumer(&self.inner.jetstream, &slack).await.is_ok()
                    {
                        self.inner.topology_error.send_replace(None);
                        failed = self.check_stuck_messages(&mut stuck_messages, failed).await;
                        close = if stuck_messages.is_empty() { close.saturating_sub(1) } else { 1 };
                        continue;
                    }
                }
                changed = connection.changed() => if changed.is_err() { return },
            }
            if *connection.borrow_and_update() == Connection::Down {
                continue;
            }
            due = match self.ensure_topology().await {
                Ok(()) => {
                    if self.inner.topology_error.send_replace(None).is_some() {
                        tracing::info!("the streams answer again");
                    }
                    close = 2;
                    false
                }
                Err(error) => {
                    let reason = format!("{error}, although there is a connection");
                    if self.inner.topology_error.send_replace(Some(reason)).is_none() {
                        let source = std::error::Error::source(&error);
                        tracing::error!(%error, source, "the streams could not be looked after; trying again. If NATS's disk was full, restart NATS");
                    }
                    if makes && error.is_refusal() {
                        // What is wrong with one of them keeps nothing in the others from being
                        // found.
                        failed = self.check_stuck_messages(&mut stuck_messages, failed).await;
                    }
                    true
                }
            };
        }
    }

    /// Looks for messages that nobody gets. Whether that failed; once is said, when it had not
    /// failed the last time.
    async fn check_stuck_messages(
        &self,
        stuck_messages: &mut topology::StuckMessages,
        failed_before: bool,
    ) -> bool {
        let checked = stuck_messages.check(&self.inner.jetstream).await;
        if let (Err(error), false) = (&checked, failed_before) {
            let source = std::error::Error::source(error);
            tracing::warn!(%error, source, "a queue could not be looked through for messages that nobody gets; it goes on being tried");
        }
        checked.is_err()
    }

    /// Whether there is a connection at this moment.
    pub fn is_connected(&self) -> bool {
        self.inner.client.connection_state() == async_nats::connection::State::Connected
    }

    /// Which connection there is at this moment; 0: none.
    pub(crate) fn generation(&self) -> u64 {
        match *self.inner.connection.borrow() {
            Connection::Up { generation } => generation,
            Connection::Down => 0,
        }
    }

    /// The state of the connection, as it changes.
    pub fn connection(&self) -> watch::Receiver<Connection> {
        self.inner.connection.clone()
    }

    /// Waits until the server refuses something that we are not allowed, which nothing else tells,
    /// and says what. What was refused before is said at once.
    pub async fn permission_violation(&self) -> String {
        let mut refused = self.inner.refused.clone();
        match refused.wait_for(Option::is_some).await.map(|refusal| refusal.clone()) {
            Ok(Some(refusal)) => refusal,
            // The client is gone, which ends only with the process.
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }

    /// Why the streams cannot be used although there is a connection, as [`Bus::maintain_topology`]
    /// finds it. Nothing: they can, as far as is known.
    pub fn topology_error(&self) -> watch::Receiver<Option<String>> {
        self.inner.topology_error.subscribe()
    }

    /// An id that nobody else in the mesh has.
    pub(crate) fn unique_id(&self) -> String {
        format!("{}-{}", self.inner.unique, self.inner.counter.fetch_add(1, Ordering::Relaxed))
    }
}

/// As whom to connect.
#[derive(PartialEq, Eq)]
enum Login {
    Password { user: String, password: String },
    Token(String),
}

impl Login {
    fn from_address(address: &ServerAddr) -> Result<Option<Self>, AddressError> {
        let decode = |text: &str| match percent_decode_str(text).decode_utf8() {
            Ok(text) => Ok(text.into_owned()),
            Err(_) => Err(AddressError::Encoding),
        };
        Ok(match (address.username(), address.password()) {
            (None, None) => None,
            (Some(token), None) => Some(Self::Token(decode(token)?)),
            (user, Some(password)) => Some(Self::Password {
                user: decode(user.unwrap_or_default())?,
                password: decode(password)?,
            }),
        })
    }

    fn options(login: Option<Self>) -> async_nats::ConnectOptions {
        let options = async_nats::ConnectOptions::new();
        match login {
            None => options,
            Some(Self::Token(token)) => options.token(token),
            Some(Self::Password { user, password }) => options.user_and_password(user, password),
        }
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Login(***)")
    }
}

/// The servers, and as whom to connect to them. The client neither uses what an address says of the
/// user, nor keeps it out of its log lines; so it is given addresses without.
fn parse_address(url: &str) -> Result<(Vec<ServerAddr>, Option<Login>), AddressError> {
    let mut servers = Vec::new();
    let mut login = None;
    for server in url.split(',') {
        let address: ServerAddr = server.trim().parse().map_err(AddressError::Parse)?;
        if address.host().is_empty() {
            return Err(AddressError::Host);
        }
        let Some(found) = Login::from_address(&address)? else {
            servers.push(address);
            continue;
        };
        if login.as_ref().is_some_and(|login| *login != found) {
            return Err(AddressError::Several);
        }
        login = Some(found);
        let mut bare = address.into_inner();
        bare.set_username("")
            .and_then(|()| bare.set_password(None))
            .map_err(|()| AddressError::Host)?;
        servers.push(ServerAddr::from_url(bare).map_err(AddressError::Parse)?);
    }
    Ok((servers, login))
}

fn observe(
    event: &async_nats::Event,
    state: &watch::Sender<Connection>,
    generation: &AtomicU64,
    refusals: &watch::Sender<Option<String>>,
) {
    match event {
        async_nats::Event::Connected => {
            let generation = generation.fetch_add(1, Ordering::Relaxed) + 1;
            state.send_replace(Connection::Up { generation });
            tracing::info!(generation, "connected to NATS");
        }
        async_nats::Event::Disconnected => {
            if state.send_replace(Connection::Down) != Connection::Down {
                tracing::warn!("connection to NATS lost; reconnecting");
            }
        }
        async_nats::Event::ServerError(error) if is_refusal(error) => {
            // What was wanted is in it; without this line it would show as silence alone.
            tracing::error!(%error, "NATS does not allow this to us; see deploy/nats/permissions.conf");
            refusals.send_replace(Some(error.to_string()));
        }
        async_nats::Event::SlowConsumer(subscription) => {
            tracing::warn!(subscription, "a subscription is too slow; messages to it were dropped");
        }
        other => tracing::debug!(event = %other, "NATS client event"),
    }
}

/// Whether the server refused something to a user that it has let in.
fn is_refusal(error: &async_nats::ServerError) -> bool {
    // It has no code of its own.
    matches!(error, async_nats::ServerError::Other(text) if text.to_lowercase().contains("permissions violation"))
}

impl Tls {
    /// Reads the files once: of a file that isn't there, the client would say only that the server
    /// cannot be reached.
    async fn check(&self) -> Result<(), Error> {
        let own = self.certificate.iter().flat_map(|(certificate, key)| [certificate, key]);
        for file in self.ca.iter().chain(own) {
            let read = tokio::fs::read(file).await;
            let checked = read.and_then(|content| {
                match content.windows(10).any(|part| part == b"-----BEGIN") {
                    true => Ok(()),
                    false => Err(io::Error::new(io::ErrorKind::InvalidData, "it is not PEM")),
                }
            });
            checked.map_err(|source| Error::Certificates { file: Path::to_owned(file), source })?;
        }
        Ok(())
    }

    fn apply(self, options: async_nats::ConnectOptions) -> async_nats::ConnectOptions {
        let options = match self.ca {
            Some(ca) => options.add_root_certificates(ca),
            None => options,
        };
        match self.certificate {
            Some((certificate, key)) => options.add_client_certificate(certificate, key),
            None => options,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::NatsServer;

    /// With everything that has a meaning in an address.
    const PASSWORD: &str = "p@ss:w/rd?,%20#é";
    const ENCODED: &str = "p%40ss%3Aw%2Frd%3F%2C%2520%23%C3%A9";

    fn with_login(url: &str, login: &str) -> String {
        url.replace("nats://", &format!("nats://{login}@"))
    }

    #[tokio::test]
    async fn user_and_password_of_the_address_are_used() {
        let server = NatsServer::start_guarded("construct", PASSWORD).await;
        let url = with_login(server.url(), &format!("construct:{ENCODED}"));
        let bus =
            Bus::connect(&url, ConnectOptions::new("test")).await.expect("the login is right");
        bus.ensure_topology().await.expect("the login may do everything");
    }

    #[tokio::test]
    async fn wrong_or_missing_login_is_refused_for_good_and_not_shown() {
        let server = NatsServer::start_guarded("construct", PASSWORD).await;
        for url in [server.url().to_owned(), with_login(server.url(), "construct:wrongpass")] {
            let error = Bus::connect(&url, ConnectOptions::new("test"))
                .await
                .expect_err("the login is wrong");
            assert!(!error.is_retryable(), "{error:?}");
            assert!(!format!("{error:?}").contains("wrongpass"), "{error:?}");
        }
    }

    #[test]
    fn address_is_split_into_servers_and_login() {
        let password =
            |user: &str| Some(Login::Password { user: user.into(), password: PASSWORD.into() });
        for (url, servers, login) in [
            ("nats://one:1", vec!["nats://one:1"], None),
            ("one", vec!["nats://one"], None),
            (
                "nats://a%40b:PASS@one:1,nats://two",
                vec!["nats://one:1", "nats://two"],
                password("a@b"),
            ),
            ("tls://a:PASS@one,tls://a:PASS@two", vec!["tls://one", "tls://two"], password("a")),
            ("nats://:PASS@[::1]:1", vec!["nats://[::1]:1"], password("")),
            ("nats://s3cret@one", vec!["nats://one"], Some(Login::Token("s3cret".into()))),
        ] {
            let (found, found_login) = parse_address(&url.replace("PASS", ENCODED)).expect(url);
            let found: Vec<&str> = found.iter().map(ServerAddr::as_url_str).collect();
            assert_eq!((found, found_login), (servers, login), "{url}");
        }
    }

    #[test]
    fn unusable_address_is_refused_without_showing_it() {
        for url in [
            "",
            "http://u:s3cret@one",
            "nats://u:s3cret@",
            "nats://u:s3cret%ff@one",
            "nats://u:s3cret@one,nats://u:other@two",
        ] {
            let error = parse_address(url).expect_err(url);
            assert!(!format!("{error} {error:?}").contains("s3cret"), "{error:?}");
        }
    }
}

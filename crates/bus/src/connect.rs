//! The connection to NATS. Once established, it is repaired forever. Each loss and each reconnect
//! is logged once.

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

/// The longest delay between two attempts to reconnect.
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(1);

/// The delay before the topology is ensured again after a failure.
const ENSURE_RETRY_DELAY: Duration = Duration::from_secs(2);

/// How often the creator of the streams checks that they exist. No other service can create a
/// deleted stream.
const CHECK_INTERVAL: Duration = Duration::from_secs(15);

/// The interval of these checks after a reconnect, or after a check found stuck messages.
const CLOSE_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Timeout of one request to JetStream's API.
const API_TIMEOUT: Duration = Duration::from_secs(2);

/// Pipelined publishes that may await their acknowledgement, in the whole process.
const MAX_ACK_IN_FLIGHT: usize = 16_384;

/// Why the connection failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The NATS address cannot be parsed.
    #[error("the NATS address is not valid")]
    Address(#[source] AddressError),
    /// NATS does not answer, or rejects the login.
    #[error("NATS could not be reached")]
    Nats(#[source] async_nats::ConnectError),
    /// A file with certificates or a key cannot be used.
    #[error("the certificates or the key for NATS in {file} cannot be used")]
    Certificates {
        /// The file.
        file: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The folder for large payloads cannot be used.
    #[error("the blob folder cannot be used")]
    Blobs(#[source] blob::Error),
}

impl Error {
    /// Whether another attempt may help without a change by anybody.
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

/// What is wrong with an address. Never shows the address, because it may contain a password.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// Not an address.
    #[error("one of the servers is not given as nats://[user:password@]host[:port]")]
    Parse(#[source] io::Error),
    /// The address has no host.
    #[error("one of the servers has no host")]
    Host,
    /// Percent-encoding of bytes that are not UTF-8.
    #[error("user and password must be UTF-8")]
    Encoding,
    /// A connection has one identity, whichever server it uses.
    #[error("the servers are given with different users or passwords")]
    Several,
}

/// Options of the connection.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    name: String,
    blobs: Option<PathBuf>,
    user: Option<User>,
    tls: Tls,
    replicas: Option<NonZeroUsize>,
}

/// TLS settings, for an address that begins with `tls://` or a server that requires TLS.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tls {
    /// CA certificates that authenticate the server, in PEM. `None`: the system's.
    pub ca: Option<PathBuf>,
    /// The client certificate and its key, in PEM, for a server that requires one.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

impl ConnectOptions {
    /// `name` appears in the server's connection list, e.g. the service and its instance.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), blobs: None, user: None, tls: Tls::default(), replicas: None }
    }

    /// The folder for large payloads, shared by all services. Without it, large payloads can be
    /// neither sent nor read.
    #[must_use]
    pub fn blobs(mut self, dir: impl Into<PathBuf>) -> Self {
        self.blobs = Some(dir.into());
        self
    }

    /// The service to act as. The bus does not attempt what the table of
    /// [`permissions`](crate::permissions) denies this user, whatever user the address names, and
    /// replies arrive at the user's own inbox. Without it, the bus attempts everything.
    #[must_use]
    pub const fn user(mut self, user: User) -> Self {
        self.user = Some(user);
        self
    }

    /// How many servers of a cluster store each stream, if this connection creates the streams.
    /// Without it, existing streams keep their replicas, and new ones have one.
    #[must_use]
    pub const fn replicas(mut self, replicas: Option<NonZeroUsize>) -> Self {
        self.replicas = replicas;
        self
    }

    /// Sets the TLS settings.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = tls;
        self
    }
}

/// The state of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connection {
    /// Connected. The generation counts connections since the start, from 1.
    Up {
        /// Rises with every reconnect. The server has then lost what it kept in memory for this
        /// client, such as waiting pull requests.
        generation: u64,
    },
    /// Not connected.
    Down,
}

/// The client of the mesh. Cheap to clone; all clones share one connection.
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
    /// Random per process, so that ids made from it and a counter are unique in the mesh.
    unique: String,
    counter: AtomicU64,
}

impl Bus {
    /// Connects to `nats://[user:password@]host[:port][,…]`, or with a token as
    /// `nats://token@host`. Uses TLS if the scheme is `tls://` or the server requires it. User and
    /// password in the address are percent-decoded and apply to all of its servers.
    ///
    /// # Errors
    /// When the address or a certificate is invalid, NATS is unreachable or rejects the login, or
    /// the blob folder is unusable. Later losses of the connection are repaired in the background.
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
            // Two missed pings reveal a peer that vanished silently.
            .ping_interval(Duration::from_secs(10))
            .reconnect_delay_callback(|attempt| {
                // The first attempt is immediate: a restarted server is often back already.
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

    /// Brings the server's streams and consumers into the state of the [`topology`]. A user that
    /// may not create streams only checks that the streams it needs exist. Every service calls it
    /// at its start.
    ///
    /// # Errors
    /// When the server is unreachable or refuses (not enough storage, a change that is impossible
    /// in place), or when a stream does not exist yet.
    pub async fn ensure_topology(&self) -> Result<(), topology::Error> {
        match self.inner.user {
            Some(user) if !user.makes_streams() => {
                topology::check_streams(&self.inner.jetstream, user.streams()).await
            }
            _ => topology::ensure(&self.inner.jetstream, self.inner.replicas).await,
        }
    }

    /// Ensures the topology after every reconnect until `stop`, and periodically if this user
    /// creates the streams: a server that comes back may have lost its data, and nothing can be
    /// published without the streams. Every service runs it after [`Bus::ensure_topology`].
    pub async fn maintain_topology(self, stop: CancellationToken) {
        let mut connection = self.connection();
        connection.borrow_and_update();
        let makes = self.inner.user.is_some_and(User::makes_streams);
        let (mut due, mut stuck_messages, mut failed) =
            (false, topology::StuckMessages::default(), false);
        // How many more checks follow at the short interval, as after a reconnect: finding stuck
        // messages takes two.
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
                    // A deleted consumer is recreated by its service, except Slack's, which may not
                    // create consumers.
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
                        tracing::info!("the streams are usable again");
                    }
                    close = 2;
                    false
                }
                Err(error) => {
                    let reason = format!("{error}, despite a connection");
                    if self.inner.topology_error.send_replace(Some(reason)).is_none() {
                        let source = std::error::Error::source(&error);
                        tracing::error!(%error, source, "the streams could not be ensured; retrying. If NATS's disk was full, restart NATS");
                    }
                    if makes && error.is_refusal() {
                        // A failure of one queue must not hide stuck messages in the others.
                        failed = self.check_stuck_messages(&mut stuck_messages, failed).await;
                    }
                    true
                }
            };
        }
    }

    /// Checks for stuck messages and returns whether that failed. Logs the first of several
    /// failures in a row.
    async fn check_stuck_messages(
        &self,
        stuck_messages: &mut topology::StuckMessages,
        failed_before: bool,
    ) -> bool {
        let checked = stuck_messages.check(&self.inner.jetstream).await;
        if let (Err(error), false) = (&checked, failed_before) {
            let source = std::error::Error::source(error);
            tracing::warn!(%error, source, "a queue could not be checked for stuck messages; retrying");
        }
        checked.is_err()
    }

    /// Whether the connection is up now.
    pub fn is_connected(&self) -> bool {
        self.inner.client.connection_state() == async_nats::connection::State::Connected
    }

    /// The generation of the current connection; 0 when there is none.
    pub(crate) fn generation(&self) -> u64 {
        match *self.inner.connection.borrow() {
            Connection::Up { generation } => generation,
            Connection::Down => 0,
        }
    }

    /// Watches the state of the connection.
    pub fn connection(&self) -> watch::Receiver<Connection> {
        self.inner.connection.clone()
    }

    /// Waits until the server reports a permissions violation, and returns its text. Nothing else
    /// reveals one. Returns an earlier violation at once.
    pub async fn permission_violation(&self) -> String {
        let mut refused = self.inner.refused.clone();
        match refused.wait_for(Option::is_some).await.map(|refusal| refusal.clone()) {
            Ok(Some(refusal)) => refusal,
            // The client is closed, which happens only at the end of the process.
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }

    /// Why the streams are unusable despite a connection, as [`Bus::maintain_topology`] found.
    /// `None`: no problem is known.
    pub fn topology_error(&self) -> watch::Receiver<Option<String>> {
        self.inner.topology_error.subscribe()
    }

    /// An id that is unique in the mesh.
    pub(crate) fn unique_id(&self) -> String {
        format!("{}-{}", self.inner.unique, self.inner.counter.fetch_add(1, Ordering::Relaxed))
    }
}

/// The identity to connect with.
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

/// The servers and the login. The client does not use a login in an address, and would log it. So
/// it gets addresses without one.
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
            // The error names the subject. Without this line, the violation would show as silence
            // only.
            tracing::error!(%error, "NATS denies this; see deploy/nats/permissions.conf");
            refusals.send_replace(Some(error.to_string()));
        }
        async_nats::Event::SlowConsumer(subscription) => {
            tracing::warn!(subscription, "a subscription is too slow; messages to it were dropped");
        }
        other => tracing::debug!(event = %other, "NATS client event"),
    }
}

/// Whether the server reports a permissions violation.
fn is_refusal(error: &async_nats::ServerError) -> bool {
    // This error has no code of its own.
    matches!(error, async_nats::ServerError::Other(text) if text.to_lowercase().contains("permissions violation"))
}

impl Tls {
    /// Reads the files once: for a missing file, the client would only report that the server is
    /// unreachable.
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

    /// Contains every character with a meaning in an address.
    const PASSWORD: &str = "p@ss:w/rd?,%20#é";
    const ENCODED: &str = "p%40ss%3Aw%2Frd%3F%2C%2520%23%C3%A9";

    fn with_login(url: &str, login: &str) -> String {
        url.replace("nats://", &format!("nats://{login}@"))
    }

    #[tokio::test]
    async fn address_with_login_authenticates() {
        let server = NatsServer::start_guarded("construct", PASSWORD).await;
        let url = with_login(server.url(), &format!("construct:{ENCODED}"));
        let bus =
            Bus::connect(&url, ConnectOptions::new("test")).await.expect("the login is right");
        bus.ensure_topology().await.expect("the login may do everything");
    }

    #[tokio::test]
    async fn wrong_login_is_rejected_and_not_shown() {
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
    fn address_with_servers_is_parsed() {
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
    fn invalid_address_error_hides_the_password() {
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

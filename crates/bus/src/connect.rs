//! The connection to NATS. Once made it is repaired for ever; each loss and each return is said once.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_nats::jetstream;
use tokio::sync::watch;

use crate::{blob, topology};

/// The longest wait between two attempts to reconnect.
const RECONNECT_MAX: Duration = Duration::from_secs(1);

/// How long one request to JetStream's API may take.
const API_TIMEOUT: Duration = Duration::from_secs(2);

/// Pipelined publishes that may wait for their acknowledgement, over the whole process.
const MAX_ACK_IN_FLIGHT: usize = 16_384;

/// Why no connection could be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// NATS does not answer, or refuses us.
    #[error("NATS could not be reached")]
    Nats(#[source] async_nats::ConnectError),
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
            Self::Blobs(_) => false,
        }
    }
}

/// How to connect.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    name: String,
    blobs: Option<PathBuf>,
}

impl ConnectOptions {
    /// `name` is what the server's connection list shows, e.g. the service and its instance.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), blobs: None }
    }

    /// The folder for large payloads, shared by all services. Without it large payloads can neither be sent nor read.
    #[must_use]
    pub fn blobs(mut self, dir: impl Into<PathBuf>) -> Self {
        self.blobs = Some(dir.into());
        self
    }
}

/// The state of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connection {
    /// Connected; the generation counts connections since the start, from 1.
    Up {
        /// Rises with every reconnect: what the server kept in memory for us (waiting pulls) is gone.
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
    connection: watch::Receiver<Connection>,
    /// Random per process, so that the ids made from it and a counter are unique in the mesh.
    unique: String,
    counter: AtomicU64,
}

impl Bus {
    /// Connects to `nats://[user:password@]host:port[,…]`.
    ///
    /// # Errors
    /// When NATS cannot be reached now, or the blob folder cannot be used. Later losses are repaired in the background.
    pub async fn connect(url: &str, options: ConnectOptions) -> Result<Self, Error> {
        let blobs = options.blobs.map(blob::Store::open).transpose().map_err(Error::Blobs)?;
        let (state, connection) = watch::channel(Connection::Down);
        let generation = Arc::new(AtomicU64::new(0));
        let servers: Vec<&str> = url.split(',').collect();
        let client = async_nats::ConnectOptions::new()
            .name(options.name)
            .max_reconnects(None)
            .connection_timeout(Duration::from_secs(3))
            .request_timeout(Some(API_TIMEOUT))
            // A peer that vanished without a word is noticed after two of them.
            .ping_interval(Duration::from_secs(10))
            .reconnect_delay_callback(|attempt| {
                // The first attempt at once: a restarted server is often back already.
                Duration::from_millis(20).saturating_mul(1_u32 << attempt.min(6)).min(RECONNECT_MAX)
                    * u32::from(attempt > 1)
            })
            .event_callback(move |event| {
                observe(&event, &state, &generation);
                std::future::ready(())
            })
            .connect(servers)
            .await
            .map_err(Error::Nats)?;
        let jetstream = jetstream::context::ContextBuilder::new()
            .timeout(API_TIMEOUT)
            .max_ack_inflight(MAX_ACK_IN_FLIGHT)
            .build(client.clone());
        let unique = client.new_inbox().chars().filter(char::is_ascii_alphanumeric).collect();
        let counter = AtomicU64::new(0);
        Ok(Self { inner: Arc::new(Inner { client, jetstream, blobs, connection, unique, counter }) })
    }

    /// Makes the server's streams and consumers what [`topology`] says. Every service does so at its start.
    ///
    /// # Errors
    /// When the server cannot be reached, or refuses (not enough storage, a change that is not possible in place).
    pub async fn ensure_topology(&self) -> Result<(), topology::Error> {
        topology::ensure(&self.inner.jetstream).await
    }

    /// Whether there is a connection at this moment.
    pub fn is_connected(&self) -> bool {
        self.inner.client.connection_state() == async_nats::connection::State::Connected
    }

    /// The state of the connection, as it changes.
    pub fn connection(&self) -> watch::Receiver<Connection> {
        self.inner.connection.clone()
    }

    /// An id that nobody else in the mesh has.
    pub(crate) fn unique_id(&self) -> String {
        format!("{}-{}", self.inner.unique, self.inner.counter.fetch_add(1, Ordering::Relaxed))
    }
}

fn observe(event: &async_nats::Event, state: &watch::Sender<Connection>, generation: &AtomicU64) {
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
        async_nats::Event::SlowConsumer(subscription) => {
            tracing::warn!(subscription, "a subscription is too slow; messages to it were dropped");
        }
        other => tracing::debug!(event = %other, "NATS client event"),
    }
}

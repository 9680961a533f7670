//! The state of streams and consumers at the server, for operators. Read-only.

use std::time::Duration;

use async_nats::jetstream::{
    self,
    context::{ConsumerInfoErrorKind, GetStreamErrorKind},
    stream::Info,
};
use jiff::Timestamp;

use crate::{
    Bus,
    topology::{ConsumerRow, Stream, StreamRow, streams},
};

/// The server did not answer.
#[derive(Debug, thiserror::Error)]
#[error("NATS did not answer about {what}")]
pub struct Error {
    what: String,
    source: Box<dyn std::error::Error + Send + Sync>,
}

/// A stream at the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamState {
    /// The stream of the topology table.
    pub stream: Stream,
    /// The number of messages.
    pub messages: u64,
    /// Their size in bytes.
    pub bytes: u64,
    /// The size at which the stream is full, in bytes.
    pub max_bytes: i64,
    /// When its oldest message was published.
    pub oldest: Option<Timestamp>,
    /// How many servers store it.
    pub replicas: usize,
    /// Replicas that lag or are offline.
    pub behind: Vec<String>,
}

/// A consumer at the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerState {
    /// Messages that wait for a worker.
    pub pending: u64,
    /// Delivered and unsettled messages.
    pub taken: usize,
    /// The redelivered ones among these.
    pub redelivered: usize,
    /// Waiting pull requests of workers. Zero when all workers are busy, or there are none.
    pub waiting: usize,
    /// Deliveries since the consumer was created.
    pub delivered: u64,
    /// The stream sequence of the last delivered message. Messages after it have had no worker.
    pub reached: u64,
}

impl ConsumerState {
    /// Whether there is a worker.
    pub const fn is_served(&self) -> bool {
        self.waiting > 0 || self.taken > 0
    }
}

impl Bus {
    /// The round-trip time to the server.
    ///
    /// # Errors
    /// When the server does not answer within `timeout`.
    pub async fn round_trip(&self, timeout: Duration) -> Result<Duration, Error> {
        let began = std::time::Instant::now();
        // A "not found" error is an answer too.
        let stream = streams()[0].stream.name();
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| Error {
            what: stream.to_owned(),
            source,
        };
        match tokio::time::timeout(timeout, self.inner.jetstream.get_stream(stream)).await {
            Ok(Ok(_)) => Ok(began.elapsed()),
            Ok(Err(error)) if matches!(error.kind(), GetStreamErrorKind::JetStream(_)) => {
                Ok(began.elapsed())
            }
            Ok(Err(error)) => Err(failed(error.into())),
            Err(elapsed) => Err(failed(elapsed.into())),
        }
    }

    /// The version of the connected server.
    pub fn server_version(&self) -> String {
        self.inner.client.server_info().version
    }

    /// Every stream of the topology table with its state; `None` for a missing one.
    ///
    /// # Errors
    /// When the server does not answer.
    pub async fn inspect_streams(
        &self,
    ) -> Result<Vec<(&'static StreamRow, Option<StreamState>)>, Error> {
        let mut states = Vec::new();
        for row in streams() {
            let state = match self.inner.jetstream.get_stream(row.stream.name()).await {
                Ok(stream) => Some(stream_state(row, stream.cached_info())),
                Err(error) => match error.kind() {
                    GetStreamErrorKind::JetStream(refused)
                        if refused.error_code() == jetstream::ErrorCode::STREAM_NOT_FOUND =>
                    {
                        None
                    }
                    _ => {
                        return Err(Error {
                            what: row.stream.name().to_owned(),
                            source: error.into(),
                        });
                    }
                },
            };
            states.push((row, state));
        }
        Ok(states)
    }

    /// The state of a consumer; `None` when it does not exist.
    ///
    /// # Errors
    /// When the server does not answer.
    pub async fn inspect_consumer(
        &self,
        row: &ConsumerRow,
    ) -> Result<Option<ConsumerState>, Error> {
        let stream = self.inner.jetstream.get_stream_no_info(row.stream.name()).await;
        let stream = stream
            .map_err(|error| Error { what: row.stream.name().to_owned(), source: error.into() })?;
        match stream.consumer_info(&row.durable).await {
            Ok(info) => Ok(Some(ConsumerState {
                pending: info.num_pending,
                taken: info.num_ack_pending,
                redelivered: info.num_redelivered,
                waiting: info.num_waiting,
                delivered: info.delivered.consumer_sequence,
                reached: info.delivered.stream_sequence,
            })),
            Err(error) => match error.kind() {
                ConsumerInfoErrorKind::NotFound | ConsumerInfoErrorKind::StreamNotFound => Ok(None),
                _ => Err(Error { what: row.durable.clone(), source: error.into() }),
            },
        }
    }
}

fn stream_state(row: &StreamRow, info: &Info) -> StreamState {
    let peers = info.cluster.iter().flat_map(|cluster| &cluster.replicas);
    let first = info.state.first_timestamp.unix_timestamp_nanos();
    StreamState {
        stream: row.stream,
        messages: info.state.messages,
        bytes: info.state.bytes,
        max_bytes: info.config.max_bytes,
        oldest: Some(first)
            .filter(|_| info.state.messages > 0)
            .and_then(|first| Timestamp::from_nanosecond(first).ok()),
        replicas: info.config.num_replicas,
        behind: peers
            .filter(|peer| peer.offline || !peer.current)
            .map(|peer| peer.name.clone())
            .collect(),
    }
}

//! How the streams and consumers of the table stand at the server, for who looks after a
//! deployment. Nothing is changed by it.

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

/// The server could not be asked.
#[derive(Debug, thiserror::Error)]
#[error("NATS could not be asked about {what}")]
pub struct Error {
    what: String,
    source: Box<dyn std::error::Error + Send + Sync>,
}

/// A stream at the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamState {
    /// Its row in the table.
    pub stream: Stream,
    /// Messages in it.
    pub messages: u64,
    /// Their size.
    pub bytes: u64,
    /// At how many bytes it is full.
    pub max_bytes: i64,
    /// When its oldest message was published.
    pub oldest: Option<Timestamp>,
    /// How many servers are to keep it.
    pub replicas: usize,
    /// The servers that are behind or gone.
    pub behind: Vec<String>,
}

/// A consumer at the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerState {
    /// Messages that no worker has.
    pub pending: u64,
    /// Messages that workers have and have not settled.
    pub taken: usize,
    /// Of these, those that were delivered more than once.
    pub redelivered: usize,
    /// Workers' requests for messages. None of them wait while all workers have as much as they can
    /// do, or there are none.
    pub waiting: usize,
    /// Deliveries to workers since the consumer was made.
    pub delivered: u64,
    /// The sequence in the stream up to which messages were delivered: what stands behind it no
    /// worker has had.
    pub reached: u64,
}

impl ConsumerState {
    /// Whether any worker is there.
    pub const fn is_served(&self) -> bool {
        self.waiting > 0 || self.taken > 0
    }
}

impl Bus {
    /// How long the server takes to answer.
    ///
    /// # Errors
    /// When it does not, in `patience`.
    pub async fn round_trip(&self, patience: Duration) -> Result<Duration, Error> {
        let began = std::time::Instant::now();
        // Of one that is not there the server says so, which is an answer too.
        let stream = streams()[0].stream.name();
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| Error {
            what: stream.to_owned(),
            source,
        };
        match tokio::time::timeout(patience, self.inner.jetstream.get_stream(stream)).await {
            Ok(Ok(_)) => Ok(began.elapsed()),
            Ok(Err(error)) if matches!(error.kind(), GetStreamErrorKind::JetStream(_)) => {
                Ok(began.elapsed())
            }
            Ok(Err(error)) => Err(failed(error.into())),
            Err(elapsed) => Err(failed(elapsed.into())),
        }
    }

    /// The version of the server this process is connected to.
    pub fn server_version(&self) -> String {
        self.inner.client.server_info().version
    }

    /// Every stream of the table with how it stands; none for one that is not there.
    ///
    /// # Errors
    /// When the server cannot be asked.
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

    /// How a consumer stands; none when it is not there.
    ///
    /// # Errors
    /// When the server cannot be asked.
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

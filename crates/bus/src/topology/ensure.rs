//! Brings the server's streams and consumers into the state of the table. Idempotent, and safe when
//! several services start at once: creating something that exists with the same configuration
//! succeeds, and a lost race leads to another check.

use std::{num::NonZeroUsize, time::Duration};

use async_nats::jetstream::{
    self,
    consumer::{AckPolicy, Consumer, DeliverPolicy, ReplayPolicy, pull},
    context::{CreateStreamErrorKind, GetStreamErrorKind},
    stream::{
        Config, ConsumerError, ConsumerErrorKind, DiscardPolicy, RetentionPolicy, StorageType,
    },
};
use futures::TryStreamExt as _;

use super::{
    ACK_WAIT, ConsumerRow, DUPLICATE_WINDOW, Retention, Stream, StreamRow, WhenFull, code_consumer,
    consumers, streams, stuck_messages::recreate_if_ahead,
};
use crate::subject::Pool;

/// How often a lost race is retried.
const MAX_ATTEMPTS: usize = 5;
/// The interval of checks for a stream that another service creates.
const CREATION_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A stream does not exist, and this user may not create it.
#[derive(Debug, thiserror::Error)]
#[error("it does not exist yet; the reconciler creates it")]
struct StreamMissing;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why the server could not be brought into the state of the table.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A stream could not be read, created or changed.
    #[error("stream {stream} could not be ensured")]
    Stream {
        /// The stream's name.
        stream: &'static str,
        /// Whether another attempt may help.
        retryable: bool,
        /// The error of the server or the connection.
        source: Source,
    },
    /// A consumer could not be created or changed.
    #[error("consumer {consumer} could not be ensured")]
    Consumer {
        /// The consumer's name.
        consumer: String,
        /// Whether another attempt may help.
        retryable: bool,
        /// The error of the server or the connection.
        source: Source,
    },
}

impl Error {
    /// Whether another attempt may help without a change by anybody.
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::Stream { retryable, .. } | Self::Consumer { retryable, .. } => *retryable,
        }
    }

    /// Whether the server has answered and refuses a single consumer.
    pub(crate) fn is_refusal(&self) -> bool {
        let Self::Consumer { source, .. } = self else { return false };
        let kind = source.downcast_ref().map(ConsumerError::kind);
        matches!(kind, Some(ConsumerErrorKind::JetStream(_)))
    }
}

pub(crate) async fn ensure(
    jetstream: &jetstream::Context,
    replicas: Option<NonZeroUsize>,
) -> Result<(), Error> {
    for row in streams() {
        ensure_stream(jetstream, row, replicas).await?;
    }
    let mut refusal = Ok(());
    for row in all_consumers(jetstream).await? {
        let kept = async {
            let consumer = ensure_consumer(jetstream, &row).await?;
            recreate_if_ahead(jetstream, &row, &consumer).await
        };
        match kept.await {
            // A failure of one consumer must not prevent the others.
            Err(error) if error.is_refusal() => refusal = refusal.and(Err(error)),
            done => done?,
        }
    }
    refusal
}

/// The table of consumers, and those of named pools, which their interpreters have created.
pub(super) async fn all_consumers(
    jetstream: &jetstream::Context,
) -> Result<Vec<ConsumerRow>, Error> {
    let stream = Stream::Code.name();
    let failed = |source: Source| Error::Stream { stream, retryable: true, source };
    let codes = jetstream.get_stream_no_info(stream).await.map_err(|error| failed(error.into()))?;
    let names: Vec<String> =
        codes.consumer_names().try_collect().await.map_err(|error| failed(error.into()))?;
    let mut rows = consumers();
    for name in names.iter().filter_map(|name| name.strip_prefix("code-")) {
        let Ok(pool) = Pool::new(name) else { continue };
        let row = code_consumer(&pool);
        if !rows.iter().any(|known| known.durable == row.durable) {
            rows.push(row);
        }
    }
    Ok(rows)
}

/// Checks that streams exist.
pub(crate) async fn check_streams(
    jetstream: &jetstream::Context,
    streams: impl IntoIterator<Item = &'static str>,
) -> Result<(), Error> {
    for stream in streams {
        match jetstream.get_stream(stream).await {
            Ok(_) => {}
            Err(error) => match error.kind() {
                GetStreamErrorKind::JetStream(error)
                    if error.error_code() == jetstream::ErrorCode::STREAM_NOT_FOUND =>
                {
                    return Err(Error::Stream {
                        stream,
                        retryable: true,
                        source: StreamMissing.into(),
                    });
                }
                _ => return Err(Error::Stream { stream, retryable: true, source: error.into() }),
            },
        }
    }
    Ok(())
}

async fn ensure_stream(
    jetstream: &jetstream::Context,
    row: &StreamRow,
    replicas: Option<NonZeroUsize>,
) -> Result<(), Error> {
    let stream = row.stream.name();
    let mut attempt = 0;
    loop {
        attempt += 1;
        let outcome = match jetstream.get_stream(stream).await {
            Ok(existing) => {
                let existing = &existing.cached_info().config;
                let wanted = stream_config(row, replicas, existing.clone());
                if wanted == *existing {
                    return Ok(());
                }
                tracing::info!(stream, "updating the stream's configuration");
                jetstream.update_stream(wanted).await.map(drop)
            }
            Err(error) => match error.kind() {
                GetStreamErrorKind::JetStream(error)
                    if error.error_code() == jetstream::ErrorCode::STREAM_NOT_FOUND =>
                {
                    jetstream
                        .create_stream(stream_config(row, replicas, Config::default()))
                        .await
                        .map(drop)
                }
                GetStreamErrorKind::JetStream(error) => {
                    return Err(Error::Stream {
                        stream,
                        retryable: error.code() == 503,
                        source: error.into(),
                    });
                }
                _ => return Err(Error::Stream { stream, retryable: true, source: error.into() }),
            },
        };
        let Err(error) = outcome else { return Ok(()) };
        let (raced, retryable) = match error.kind() {
            // While another service creates it, its subjects are taken before its name is. They may
            // also be another stream's.
            CreateStreamErrorKind::JetStream(error)
                if error.error_code() == jetstream::ErrorCode::STREAM_SUBJECT_OVERLAP
                    && attempt < MAX_ATTEMPTS =>
            {
                tokio::time::sleep(CREATION_POLL_INTERVAL).await;
                continue;
            }
            // Another service created or removed it between our two steps.
            CreateStreamErrorKind::JetStream(error) => (
                [jetstream::ErrorCode::STREAM_NAME_EXIST, jetstream::ErrorCode::STREAM_NOT_FOUND]
                    .contains(&error.error_code()),
                error.code() == 503,
            ),
            CreateStreamErrorKind::NotFound => (true, true),
            CreateStreamErrorKind::TimedOut | CreateStreamErrorKind::Response => (false, true),
            _ => (false, false),
        };
        if !raced || attempt >= MAX_ATTEMPTS {
            return Err(Error::Stream {
                stream,
                retryable: raced || retryable,
                source: error.into(),
            });
        }
    }
}

/// Applies our settings to `base`, so that other settings of the operator (placement, and replicas
/// unless configured) stay.
fn stream_config(row: &StreamRow, replicas: Option<NonZeroUsize>, base: Config) -> Config {
    Config {
        name: row.stream.name().to_owned(),
        description: Some(row.why.to_owned()),
        subjects: vec![row.subject.to_owned()],
        retention: match row.retention {
            Retention::WorkQueue => RetentionPolicy::WorkQueue,
            Retention::Limits => RetentionPolicy::Limits,
        },
        discard: match row.when_full {
            WhenFull::Refuse => DiscardPolicy::New,
            WhenFull::DropOldest => DiscardPolicy::Old,
        },
        storage: StorageType::File,
        max_age: row.max_age,
        max_bytes: row.max_bytes,
        // The server writes -1 where it means "no limit".
        max_messages: -1,
        max_messages_per_subject: -1,
        max_message_size: -1,
        max_consumers: -1,
        duplicate_window: DUPLICATE_WINDOW,
        // The closing entry of a journal replaces it.
        allow_rollup: row.stream == Stream::Journal,
        num_replicas: replicas.map_or(base.num_replicas.max(1), NonZeroUsize::get),
        ..base
    }
}

/// Finds a consumer that another service creates.
pub(crate) async fn find_consumer(
    jetstream: &jetstream::Context,
    row: &ConsumerRow,
) -> Result<Consumer<pull::Config>, Error> {
    let found = jetstream.get_consumer_from_stream(&row.durable, row.stream.name()).await;
    found.map_err(|error| Error::Consumer {
        consumer: row.durable.clone(),
        retryable: true,
        source: error.into(),
    })
}

/// The server's error for a consumer whose folder it has removed. Such a consumer was created while
/// another one of its name was being removed, as happens when several services recreate a consumer.
/// It continues from the position of the other one, can never be changed, and is lost at the next
/// restart of the server.
const FOLDER_MISSING: &str = "no such file or directory";

/// Creates or updates a consumer.
pub(crate) async fn ensure_consumer(
    jetstream: &jetstream::Context,
    row: &ConsumerRow,
) -> Result<Consumer<pull::Config>, Error> {
    let config = pull::Config {
        durable_name: Some(row.durable.clone()),
        description: Some(row.why.to_owned()),
        deliver_policy: DeliverPolicy::All,
        ack_policy: AckPolicy::Explicit,
        ack_wait: ACK_WAIT,
        max_deliver: -1,
        filter_subject: row.filter.clone(),
        replay_policy: ReplayPolicy::Instant,
        max_ack_pending: row.max_ack_pending,
        ..Default::default()
    };
    let mut attempt = 0;
    loop {
        attempt += 1;
        match jetstream.create_consumer_on_stream(config.clone(), row.stream.name()).await {
            Ok(consumer) => return Ok(consumer),
            Err(error) => {
                let (raced, retryable) = match error.kind() {
                    ConsumerErrorKind::JetStream(error)
                        if error.to_string().contains(FOLDER_MISSING) =>
                    {
                        // Another service may be about to recreate it.
                        if attempt > 1 {
                            let consumer = &row.durable;
                            tracing::warn!(
                                consumer,
                                "the consumer's folder is missing; recreating it"
                            );
                            // The next attempt shows whether it was removed.
                            let _ = jetstream
                                .delete_consumer_from_stream(consumer, row.stream.name())
                                .await;
                        } else {
                            tokio::time::sleep(CREATION_POLL_INTERVAL).await;
                        }
                        (true, true)
                    }
                    ConsumerErrorKind::TimedOut | ConsumerErrorKind::Request => (false, true),
                    ConsumerErrorKind::JetStream(error) => (
                        error.error_code() == jetstream::ErrorCode::CONSUMER_NAME_EXIST,
                        error.code() == 503,
                    ),
                    _ => (false, false),
                };
                if !raced || attempt >= MAX_ATTEMPTS {
                    let consumer = row.durable.clone();
                    return Err(Error::Consumer {
                        consumer,
                        retryable: raced || retryable,
                        source: error.into(),
                    });
                }
            }
        }
    }
}

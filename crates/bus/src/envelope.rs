//! What surrounds a payload: its type, the trace it belongs to, and a reference instead of the
//! payload when that is large.

use async_nats::HeaderMap;
use bytes::Bytes;
use opentelemetry::{
    Context, global,
    propagation::{Extractor, Injector},
};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::{Bus, Message, blob, subject::Invalid};

/// Full protobuf name of the payload.
pub const TYPE: &str = "Construct-Type";

/// Reference to the payload ([`blob::Reference`]); the body is empty then.
pub const BLOB: &str = "Construct-Blob";

/// The organization of a command's task. With it, the headers below and the task in its subject a
/// worker that cannot read a command can say that its step has failed.
pub const ORGANIZATION: &str = "Construct-Organization";

/// The step a message is about.
pub const STEP: &str = "Construct-Step";

/// The number of that step in its task.
pub const STEP_NUMBER: &str = "Construct-Step-Number";
/// How often that step was gone on with, on commands.
pub const STEP_ROUND: &str = "Construct-Step-Round";

/// How many milliseconds whoever asks waits for an answer, on questions. A length and not a moment,
/// because clocks differ; how long NATS takes is left out, which is little.
pub const TIMEOUT: &str = "Construct-Timeout-Ms";

/// Payloads above this many bytes become blobs. A quarter of what NATS accepts by default, so that
/// a batch of pulled messages stays small in memory.
pub const INLINE_LIMIT: usize = 256 * 1024;

/// The largest payload there can be, in bytes: bounds what one message costs a receiver in memory.
pub const PAYLOAD_LIMIT: usize = 64 * 1024 * 1024;

/// Why a payload could not be put into a message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SealError {
    #[error("the payload has {size} bytes; at most {limit} can be sent")]
    TooLarge { size: usize, limit: usize },
    #[error("the payload could not be stored as a blob")]
    Blob(#[source] blob::Error),
}

/// Why a payload could not be taken out of a message.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The header names another type than the subject allows.
    #[error("the message is of type {found}, not {expected}")]
    Type {
        /// What the subject allows.
        expected: &'static str,
        /// What the header says.
        found: String,
    },
    /// The payload is not protobuf of that type.
    #[error("the payload cannot be decoded")]
    Decode(#[source] prost::DecodeError),
    /// The subject, or the payload's ids, are wrong.
    #[error("the message is not what its subject says")]
    Invalid(#[source] Invalid),
    /// The header with the reference is malformed, or refers to more than [`PAYLOAD_LIMIT`].
    #[error("the reference to the payload is invalid")]
    Reference(#[source] Invalid),
    /// The payload's blob cannot be read.
    #[error("the payload's blob cannot be read")]
    Blob(#[source] blob::Error),
}

impl OpenError {
    /// Whether another try may help.
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::Blob(error) => error.is_retryable(),
            _ => false,
        }
    }
}

/// A message ready to be sent.
#[derive(Debug, Clone)]
pub(crate) struct SealedMessage {
    pub(crate) headers: HeaderMap,
    pub(crate) payload: Bytes,
}

impl Bus {
    /// Encodes a payload and its headers; a large one is stored as a blob first.
    pub(crate) async fn seal<M: Message>(&self, message: &M) -> Result<SealedMessage, SealError> {
        let size = message.encoded_len();
        let blobs = self.inner.blobs.as_ref();
        let limit = if blobs.is_some() { PAYLOAD_LIMIT } else { INLINE_LIMIT };
        if size > limit {
            return Err(SealError::TooLarge { size, limit });
        }
        let mut headers = HeaderMap::new();
        headers.insert(TYPE, M::NAME);
        inject(&mut headers);
        let mut payload = Bytes::from(message.encode_to_vec());
        if let (true, Some(blobs)) = (size > INLINE_LIMIT, blobs) {
            let reference = blobs.put(payload).await.map_err(SealError::Blob)?;
            headers.insert(BLOB, reference.to_string());
            payload = Bytes::new();
        }
        Ok(SealedMessage { headers, payload })
    }

    /// The payload's bytes, fetched and verified when the message only refers to them.
    pub(crate) async fn resolve(
        &self,
        headers: Option<&HeaderMap>,
        payload: Bytes,
    ) -> Result<Bytes, OpenError> {
        let Some(reference) = headers.and_then(|headers| headers.get(BLOB)) else {
            return Ok(payload);
        };
        let reference: blob::Reference =
            reference.as_str().parse().map_err(OpenError::Reference)?;
        if reference.size() > PAYLOAD_LIMIT as u64 {
            let invalid =
                Invalid::new("the blob is larger than any payload may be", reference.to_string());
            return Err(OpenError::Reference(invalid));
        }
        let blobs = self.inner.blobs.as_ref().ok_or(OpenError::Blob(blob::Error::Unconfigured))?;
        blobs.get(&reference).await.map_err(OpenError::Blob)
    }

    /// Decodes a message of which the type is known from its subject. A missing type header is
    /// accepted: people publish by hand.
    pub(crate) async fn open<M: Message>(
        &self,
        headers: Option<&HeaderMap>,
        payload: Bytes,
    ) -> Result<M, OpenError> {
        if let Some(found) =
            headers.and_then(|headers| headers.get(TYPE)).filter(|found| found.as_str() != M::NAME)
        {
            return Err(OpenError::Type { expected: M::NAME, found: found.as_str().to_owned() });
        }
        let payload = self.resolve(headers, payload).await?;
        M::decode(payload).map_err(OpenError::Decode)
    }
}

struct HeaderInjector<'a>(&'a mut HeaderMap);

impl Injector for HeaderInjector<'_> {
    fn set(&mut self, key: &str, value: String) {
        // An empty `tracestate` says nothing.
        if !value.is_empty() {
            self.0.insert(key, value);
        }
    }
}

struct HeaderExtractor<'a>(&'a HeaderMap);

impl Extractor for HeaderExtractor<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(async_nats::HeaderValue::as_str)
    }

    fn keys(&self) -> Vec<&str> {
        self.0.iter().map(|(name, _)| name.as_ref()).collect()
    }
}

/// Writes the current span's context, as `traceparent` and `tracestate`.
fn inject(headers: &mut HeaderMap) {
    let context = Span::current().context();
    global::get_text_map_propagator(|propagator| {
        propagator.inject_context(&context, &mut HeaderInjector(headers))
    });
}

/// The publisher's context; an empty one when there is none.
pub(crate) fn extract(headers: Option<&HeaderMap>) -> Context {
    match headers {
        // On an empty base: the receiver's current span, if any, is none of the publisher's
        // business.
        Some(headers) => global::get_text_map_propagator(|propagator| {
            propagator.extract_with_context(&Context::new(), &HeaderExtractor(headers))
        }),
        None => Context::new(),
    }
}

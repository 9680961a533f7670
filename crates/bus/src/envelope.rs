//! The headers around a payload: its type, its trace, and a reference in place of a large payload.

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

/// The organization of a command's task. With it, the headers below and the task in its subject, a
/// worker that cannot decode a command can report that its step has failed.
pub const ORGANIZATION: &str = "Construct-Organization";

/// The step of a message.
pub const STEP: &str = "Construct-Step";

/// The number of that step in its task.
pub const STEP_NUMBER: &str = "Construct-Step-Number";
/// The round of the step, on commands.
pub const STEP_ROUND: &str = "Construct-Step-Round";

/// The requester's timeout in milliseconds, on questions. A duration, because clocks differ. It
/// does not include the transport time, which is short.
pub const TIMEOUT: &str = "Construct-Timeout-Ms";

/// Payloads above this many bytes become blobs. A quarter of what NATS accepts by default, so that
/// a batch of pulled messages stays small in memory.
pub const INLINE_LIMIT: usize = 256 * 1024;

/// The largest payload in bytes. Bounds the memory that one message costs a receiver.
pub const PAYLOAD_LIMIT: usize = 64 * 1024 * 1024;

/// Why a payload could not be encoded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SealError {
    #[error("the payload has {size} bytes; at most {limit} can be sent")]
    TooLarge { size: usize, limit: usize },
    #[error("the payload could not be stored as a blob")]
    Blob(#[source] blob::Error),
}

/// Why a message could not be decoded.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The header names another type than that of the subject.
    #[error("the message is of type {found}, not {expected}")]
    Type {
        /// The type of the subject.
        expected: &'static str,
        /// The type in the header.
        found: String,
    },
    /// The payload is not protobuf of that type.
    #[error("the payload cannot be decoded")]
    Decode(#[source] prost::DecodeError),
    /// The subject or the payload's ids are wrong.
    #[error("the message does not match its subject")]
    Invalid(#[source] Invalid),
    /// The reference header is malformed, or refers to more than [`PAYLOAD_LIMIT`].
    #[error("the reference to the payload is invalid")]
    Reference(#[source] Invalid),
    /// The payload's blob cannot be read.
    #[error("the payload's blob cannot be read")]
    Blob(#[source] blob::Error),
}

impl OpenError {
    /// Whether another attempt may help.
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::Blob(error) => error.is_retryable(),
            _ => false,
        }
    }
}

/// An encoded message.
#[derive(Debug, Clone)]
pub(crate) struct SealedMessage {
    pub(crate) headers: HeaderMap,
    pub(crate) payload: Bytes,
}

impl Bus {
    /// Encodes a payload and its headers. A large payload is stored as a blob first.
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

    /// The payload's bytes; a referenced blob is fetched and verified.
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

    /// Decodes a message whose type is known from its subject. A missing type header is accepted,
    /// because people publish by hand.
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
        // An empty `tracestate` has no information.
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

/// Injects the current span's context as `traceparent` and `tracestate`.
fn inject(headers: &mut HeaderMap) {
    let context = Span::current().context();
    global::get_text_map_propagator(|propagator| {
        propagator.inject_context(&context, &mut HeaderInjector(headers))
    });
}

/// The publisher's trace context; empty when there is none.
pub(crate) fn extract(headers: Option<&HeaderMap>) -> Context {
    match headers {
        // Based on an empty context: the receiver's current span is unrelated to the publisher.
        Some(headers) => global::get_text_map_propagator(|propagator| {
            propagator.extract_with_context(&Context::new(), &HeaderExtractor(headers))
        }),
        None => Context::new(),
    }
}

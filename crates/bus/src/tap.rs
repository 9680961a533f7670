//! Tapping: any message on the mesh, undecoded.

use async_nats::HeaderMap;
use bytes::Bytes;
use futures::{StreamExt as _, stream::BoxStream};

use crate::{
    Bus,
    control::subscribe,
    envelope::{BLOB, TYPE},
};

/// A message as published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawMessage {
    /// The subject it was published to.
    pub subject: String,
    /// The full protobuf name of its payload, if known.
    pub type_name: Option<String>,
    /// All headers, sorted by name.
    pub headers: Vec<(String, String)>,
    /// The payload. A referenced payload is fetched; empty when that fails.
    pub payload: Bytes,
    /// The reference of the payload, if there is one.
    pub blob: Option<String>,
}

impl Bus {
    /// Subscribes to everything published from now on to subjects that match the filter (`*`: one
    /// token, `>`: all that follow).
    ///
    /// # Errors
    /// When the filter is invalid or the server is unreachable.
    pub async fn tap(
        &self,
        filter: &str,
    ) -> Result<BoxStream<'static, RawMessage>, subscribe::Error> {
        let messages = self.subscribe(filter.to_owned()).await?;
        self.flush().await?;
        let bus = self.clone();
        let raw = messages.then(move |message| {
            let bus = bus.clone();
            async move {
                let headers = message.headers.as_ref();
                let text =
                    |name: &str| headers.and_then(|headers| headers.get(name)).map(|value| value.as_str().to_owned());
                let blob = text(BLOB);
                let payload = bus.resolve(headers, message.payload).await.unwrap_or_else(|error| {
                    let error: &dyn std::error::Error = &error;
                    tracing::debug!(subject = %message.subject, error, "the payload cannot be fetched");
                    Bytes::new()
                });
                RawMessage {
                    subject: message.subject.to_string(),
                    type_name: text(TYPE),
                    headers: headers.map(sorted).unwrap_or_default(),
                    payload,
                    blob,
                }
            }
        });
        Ok(raw.boxed())
    }
}

pub(crate) fn sorted(headers: &HeaderMap) -> Vec<(String, String)> {
    let mut sorted: Vec<(String, String)> = headers
        .iter()
        .flat_map(|(name, values)| {
            values.iter().map(|value| (name.to_string(), value.as_str().to_owned()))
        })
        .collect();
    sorted.sort();
    sorted
}

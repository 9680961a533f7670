//! Recordings of vendor answers. The operator can have each call recorded. The scripted model
//! replays a recording, so that an observed answer can be reproduced without the vendor, the key or
//! the network.
//!
//! A cassette contains the request in our terms and the answer in pieces with their times. It
//! contains no key: the text is scrubbed, and of the vendor's response headers only those about
//! limits and request ids are recorded.

mod recorder;

use std::{collections::BTreeMap, time::Duration};

use construct_domain::money::Usage;
use construct_proto::mesh::v1::{FailureClass, model_completed::StopReason};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) use self::recorder::{Recorder, record_head, wrap};
use crate::{failure::Failure, vendor::Chunk};

/// The version of the format.
const FORMAT_VERSION: u32 = 1;

/// One model call and its result.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Cassette {
    /// The version of the format; distinguishes a cassette from a script.
    pub(crate) cassette: u32,
    #[serde(default)]
    pub(crate) recorded_at: String,
    /// E.g. `anthropic`.
    #[serde(default)]
    pub(crate) vendor: String,
    #[serde(default)]
    pub(crate) model: String,
    /// `turn`, `compaction` or `title`.
    #[serde(default)]
    pub(crate) purpose: String,
    /// The task of the call, to find the files of a task; calls of the proxy have steps of their
    /// own.
    #[serde(default)]
    pub(crate) task: String,
    #[serde(default)]
    pub(crate) step: String,
    /// The number of the call for the step in this process, from 1.
    #[serde(default, rename = "try")]
    pub(crate) attempt: u32,
    /// For readers; no code uses it.
    #[serde(default)]
    pub(crate) request: Value,
    /// The HTTP status of the response; 0 without one.
    #[serde(default)]
    pub(crate) status: u16,
    #[serde(default)]
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) pieces: Vec<Piece>,
    #[serde(default)]
    pub(crate) end: CassetteEnd,
}

/// A piece of the answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Piece {
    /// Milliseconds after the start of the call.
    pub(crate) ms: u64,
    #[serde(flatten)]
    pub(crate) content: PieceContent,
}

/// The content of a piece.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PieceContent {
    Text(String),
    Thinking(String),
    ThinkingData(String),
    Call { slot: u32, id: String, name: String },
    Arguments { slot: u32, json: String },
    Usage(Usage),
    Stop(String),
    Named { id: String, model: String },
    Vector(Vec<f32>),
}

/// How the answer ended.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct CassetteEnd {
    /// Milliseconds after the start of the call.
    #[serde(default)]
    pub(crate) ms: u64,
    /// The call was abandoned before the end of the answer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) given_up: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failure: Option<CassetteFailure>,
}

/// The failure of a call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct CassetteFailure {
    /// E.g. `FAILURE_CLASS_TRANSIENT`.
    class: String,
    message: String,
    http_status: u16,
    /// Counted from the failure.
    retry_after_ms: Option<u64>,
}

impl Cassette {
    /// Parses a cassette or a list of them; none when the text is something else.
    ///
    /// # Errors
    /// When it is a cassette and cannot be parsed.
    pub(crate) fn parse(text: &str) -> Result<Option<Vec<Self>>, serde_json::Error> {
        #[derive(Deserialize)]
        struct Mark {
            #[serde(rename = "cassette")]
            _cassette: u32,
        }
        let text = text.trim_start_matches('\u{FEFF}');
        if serde_json::from_str::<Mark>(text).is_ok() {
            return serde_json::from_str(text).map(|one| Some(vec![one]));
        }
        match serde_json::from_str::<Vec<Mark>>(text) {
            Ok(marks) if !marks.is_empty() => serde_json::from_str(text).map(Some),
            _ => Ok(None),
        }
    }
}

impl Cassette {
    /// Whether it is a complete answer.
    pub(crate) fn is_answer(&self) -> bool {
        self.end.failure.is_none() && !self.end.given_up
    }
}

impl PieceContent {
    fn from_chunk(chunk: &Chunk) -> Self {
        match chunk.clone() {
            Chunk::Text(text) => Self::Text(text),
            Chunk::Thinking(text) => Self::Thinking(text),
            Chunk::ThinkingData(data) => Self::ThinkingData(data),
            Chunk::Call { slot, id, name } => Self::Call { slot, id, name },
            Chunk::Arguments { slot, json } => Self::Arguments { slot, json },
            Chunk::Usage(usage) => Self::Usage(usage),
            Chunk::Stop(reason) => Self::Stop(reason.as_str_name().to_owned()),
            Chunk::Named { id, model } => Self::Named { id, model },
            Chunk::Vector(vector) => Self::Vector(vector),
        }
    }

    pub(crate) fn into_chunk(self) -> Chunk {
        match self {
            Self::Text(text) => Chunk::Text(text),
            Self::Thinking(text) => Chunk::Thinking(text),
            Self::ThinkingData(data) => Chunk::ThinkingData(data),
            Self::Call { slot, id, name } => Chunk::Call { slot, id, name },
            Self::Arguments { slot, json } => Chunk::Arguments { slot, json },
            Self::Usage(usage) => Chunk::Usage(usage),
            Self::Named { id, model } => Chunk::Named { id, model },
            Self::Stop(name) => Chunk::Stop(StopReason::from_str_name(&name).unwrap_or_default()),
            Self::Vector(vector) => Chunk::Vector(vector),
        }
    }
}

impl CassetteFailure {
    fn from_failure(failure: &Failure, now: Timestamp) -> Self {
        Self {
            class: failure.class.as_str_name().to_owned(),
            message: failure.message.clone(),
            http_status: failure.http_status,
            retry_after_ms: failure
                .requested_delay(now)
                .and_then(|wait| u64::try_from(wait.as_millis()).ok()),
        }
    }

    pub(crate) fn to_failure(&self) -> (Failure, Option<Duration>) {
        let class = FailureClass::from_str_name(&self.class).unwrap_or(FailureClass::Transient);
        let failure = Failure::new(class, self.message.clone()).with_status(self.http_status);
        (failure, self.retry_after_ms.map(Duration::from_millis))
    }
}

#[cfg(test)]
mod tests;

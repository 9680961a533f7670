//! Recordings of what vendors answered: written for each call where the operator asks for it, and
//! replayed by the scripted model, so that what a person saw can be seen again without the vendor,
//! the key or the network.
//!
//! A cassette holds the request in our words and the answer in pieces with their times. It holds no
//! key: what is written is searched for it, and of the vendor's headers only those are kept that
//! say something about limits and requests.

mod recorder;

use std::{collections::BTreeMap, time::Duration};

use construct_domain::money::Usage;
use construct_proto::mesh::v1::{FailureClass, model_completed::StopReason};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) use self::recorder::{Recorder, record_head, wrap};
use crate::{failure::Failure, vendor::Chunk};

/// Of this version of the format.
const FORMAT_VERSION: u32 = 1;

/// One call of a model and what came of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Cassette {
    /// The format's version; what tells a cassette from a script.
    pub(crate) cassette: u32,
    #[serde(default)]
    pub(crate) recorded_at: String,
    /// E.g. `anthropic`.
    #[serde(default)]
    pub(crate) vendor: String,
    #[serde(default)]
    pub(crate) model: String,
    /// `turn` or `title`.
    #[serde(default)]
    pub(crate) purpose: String,
    /// For whom it was, so that the files of one task can be found; the proxy's calls have steps of
    /// their own.
    #[serde(default)]
    pub(crate) task: String,
    #[serde(default)]
    pub(crate) step: String,
    /// The how manieth call for the step, from 1, of this process.
    #[serde(default, rename = "try")]
    pub(crate) attempt: u32,
    /// For people; nothing reads it.
    #[serde(default)]
    pub(crate) request: Value,
    /// What the vendor answered with; 0: it was not reached.
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
    /// Milliseconds after the call began.
    pub(crate) ms: u64,
    #[serde(flatten)]
    pub(crate) content: PieceContent,
}

/// What a piece is.
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
    /// Milliseconds after the call began.
    #[serde(default)]
    pub(crate) ms: u64,
    /// Nobody waited for the rest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) given_up: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failure: Option<CassetteFailure>,
}

/// Why it failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct CassetteFailure {
    /// As in `FAILURE_CLASS_TRANSIENT`.
    class: String,
    message: String,
    http_status: u16,
    /// From the failure on.
    retry_after_ms: Option<u64>,
}

impl Cassette {
    /// Reads a cassette or a list of them; none when the text is something else.
    ///
    /// # Errors
    /// When it is one and cannot be read.
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
    /// Whether it is a whole answer.
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

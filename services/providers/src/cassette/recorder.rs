//! Writes cassettes.

use std::{
    collections::BTreeMap,
    fs::OpenOptions,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use construct_proto::{mesh::v1::model_invoke::Purpose, v1::VendorModel};
use futures::{
    future::BoxFuture,
    stream::{self, BoxStream, StreamExt as _},
};
use jiff::Timestamp;
use reqwest::header::HeaderMap;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Value, json};
use tokio::time::Instant;
use uuid::Uuid;

use super::{Cassette, CassetteEnd, CassetteFailure, FORMAT_VERSION, Piece, PieceContent};
use crate::{
    failure::Failure,
    scripted::AttemptCounter,
    transcript::{Part, Role},
    vendor::{Chunk, Request, Vendor},
};

/// Substrings of the names of recorded headers.
const RECORDED_HEADERS: [&str; 6] =
    ["ratelimit", "retry-after", "request-id", "content-type", "processing-ms", "cf-ray"];
/// Pieces of one cassette at most; the rest of an endless answer is omitted.
const MAX_PIECES: usize = 100_000;

/// Writes cassettes to a folder.
#[derive(Debug)]
pub(crate) struct Recorder {
    folder: PathBuf,
    /// Calls of each step.
    calls: AttemptCounter,
}

impl Recorder {
    /// Writes into `folder`, which is created if needed.
    ///
    /// # Errors
    /// When it cannot be created.
    pub(crate) fn new(folder: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        Ok(Self { folder: folder.to_owned(), calls: AttemptCounter::default() })
    }

    /// Atomically, so that no reader sees half a file, and readable only by its owner:
    /// conversations are confidential.
    fn write(&self, name: &str, text: &str) -> io::Result<()> {
        let (part, whole) = (self.folder.join(format!(".{name}")), self.folder.join(name));
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&part)?
            .write_all(text.as_bytes())?;
        std::fs::rename(part, whole)
    }
}

/// The status and headers of the vendor's response.
type ResponseHead = Arc<Mutex<(u16, BTreeMap<String, String>)>>;

tokio::task_local! {
    /// Of the call that is being recorded.
    static HEAD: ResponseHead;
}

/// Records the head of the vendor's response, if the call is being recorded.
pub(crate) fn record_head(status: u16, headers: &HeaderMap) {
    let _ = HEAD.try_with(|head| {
        let kept = headers
            .iter()
            .filter(|(name, _)| RECORDED_HEADERS.iter().any(|kept| name.as_str().contains(kept)))
            .filter_map(|(name, value)| {
                Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned()))
            });
        *head.lock().unwrap_or_else(PoisonError::into_inner) = (status, kept.collect());
    });
}

/// Wraps `vendor` to record its calls when there is a recorder.
pub(crate) fn wrap(
    vendor: Box<dyn Vendor>,
    recorder: Option<&Arc<Recorder>>,
    key: Option<SecretString>,
) -> Box<dyn Vendor> {
    match recorder {
        Some(recorder) => Box::new(RecordingVendor { vendor, recorder: Arc::clone(recorder), key }),
        None => vendor,
    }
}

struct RecordingVendor {
    vendor: Box<dyn Vendor>,
    recorder: Arc<Recorder>,
    key: Option<SecretString>,
}

impl Vendor for RecordingVendor {
    fn models(&self) -> BoxFuture<'static, Result<Vec<VendorModel>, Failure>> {
        self.vendor.models()
    }

    fn check(&self) -> BoxFuture<'static, Result<(), Failure>> {
        self.vendor.check()
    }

    fn count(&self, request: &Request) -> BoxFuture<'static, Result<Option<i64>, Failure>> {
        self.vendor.count(request)
    }

    // Vectors are of no use to readers, and are never replayed.
    fn embed(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        self.vendor.embed(request)
    }

    fn invoke(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        let recording = Recording {
            recorder: Arc::clone(&self.recorder),
            key: self.key.clone(),
            attempt: self.recorder.calls.count(request.step_id.clone()),
            request: Arc::clone(&request),
            started_at: Instant::now(),
            head: ResponseHead::default(),
            pieces: Vec::new(),
            end: None,
        };
        let state = (self.vendor.invoke(request), recording);
        stream::unfold(state, |(mut chunks, mut recording)| async move {
            let next = HEAD.scope(Arc::clone(&recording.head), chunks.next()).await;
            recording.add(next.as_ref());
            next.map(|chunk| (chunk, (chunks, recording)))
        })
        .boxed()
    }
}

/// A call that is being recorded. Writes the cassette when it is dropped, however the call ended.
struct Recording {
    recorder: Arc<Recorder>,
    key: Option<SecretString>,
    request: Arc<Request>,
    attempt: u32,
    started_at: Instant,
    head: ResponseHead,
    pieces: Vec<Piece>,
    end: Option<CassetteEnd>,
}

impl Recording {
    fn add(&mut self, next: Option<&Result<Chunk, Failure>>) {
        let ms = self.ms();
        match next {
            Some(Ok(chunk)) if self.pieces.len() < MAX_PIECES => {
                self.pieces.push(Piece { ms, content: PieceContent::from_chunk(chunk) })
            }
            Some(Ok(_)) => {}
            Some(Err(failure)) => {
                let failure = Some(CassetteFailure::from_failure(failure, Timestamp::now()));
                self.end = Some(CassetteEnd { ms, given_up: false, failure });
            }
            None => _ = self.end.get_or_insert(CassetteEnd { ms, ..CassetteEnd::default() }),
        }
    }

    fn ms(&self) -> u64 {
        u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let end = self.end.take().unwrap_or_else(|| CassetteEnd {
            ms: self.ms(),
            given_up: true,
            failure: None,
        });
        let (status, headers) =
            std::mem::take(&mut *self.head.lock().unwrap_or_else(PoisonError::into_inner));
        let now = Timestamp::now();
        let cassette = Cassette {
            cassette: FORMAT_VERSION,
            recorded_at: now.to_string(),
            vendor: self.request.origin.vendor.clone(),
            model: self.request.model.clone(),
            purpose: match self.request.purpose {
                Purpose::Title => "title",
                Purpose::Compaction => "compaction",
                Purpose::Turn | Purpose::Unspecified => "turn",
            }
            .to_owned(),
            task: self.request.task_id.clone(),
            step: self.request.step_id.clone(),
            attempt: self.attempt,
            request: request_json(&self.request),
            status,
            headers,
            pieces: std::mem::take(&mut self.pieces),
            end,
        };
        let text = serde_json::to_string_pretty(&cassette)
            .expect("texts and numbers can be written as JSON");
        // The vendor, or a user in the conversation, may have repeated the key.
        let key = self.key.as_ref().map(|key| key.expose_secret());
        let text = Failure::internal(text).scrubbed(key).message;
        let name = format!(
            "{}-{}-{}.json",
            now.strftime("%Y%m%dT%H%M%S%3fZ"),
            cassette.vendor,
            Uuid::now_v7().simple()
        );
        let recorder = Arc::clone(&self.recorder);
        let write = move || {
            if let Err(error) = recorder.write(&name, &text) {
                tracing::error!(%error, name, "a cassette cannot be written");
            }
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(write)),
            Err(_) => write(),
        }
    }
}

/// The request in our terms.
fn request_json(request: &Request) -> Value {
    let part = |part: &Part| match part {
        Part::Text(text) => json!({"text": text}),
        // Enough to see that there was one.
        Part::Media(media) => {
            json!({"media": {"type": media.media_type, "name": media.name, "base64_bytes": media.base64.len()}})
        }
        Part::Thinking { text, .. } => json!({"thinking": text}),
        Part::Call { id, name, arguments } => {
            json!({"call": {"id": id, "name": name, "arguments": arguments}})
        }
        Part::Result { id, output, failed, .. } => {
            json!({"result": {"id": id, "output": output, "failed": failed}})
        }
    };
    let turns: Vec<Value> = request
        .turns()
        .iter()
        .map(|turn| {
            let role = if turn.role == Role::User { "user" } else { "assistant" };
            json!({"role": role, "parts": turn.parts.iter().map(part).collect::<Vec<_>>()})
        })
        .collect();
    let tools: Vec<Value> = request
        .tools
        .iter()
        .map(|tool| json!({"name": tool.name, "description": tool.description, "schema": tool.schema}))
        .collect();
    let parameters = &request.parameters;
    json!({
        "system": request.system,
        "turns": turns,
        "tools": tools,
        "max_tokens": request.max_tokens,
        "temperature": parameters.temperature,
        "top_p": parameters.top_p,
        "top_k": parameters.top_k,
        "stop_sequences": parameters.stop_sequences,
        "thinking": parameters.thinking().as_str_name(),
    })
}

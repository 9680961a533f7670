//! A model vendor for tests: a real HTTP server that speaks the vendors' wire formats, plays given
//! answers, and records its requests.
//!
//! Replies are played in the order they were queued ([`VendorServer::reply`]). When none is left,
//! the handler of [`VendorServer::answering`] decides; without one the server answers 500, which no
//! test can mistake for success.

pub mod anthropic;
pub mod bedrock;
pub mod gemini;
pub mod ollama;
pub mod openai;
pub mod responses;

use std::{
    collections::VecDeque,
    convert::Infallible,
    fmt,
    io::Write as _,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::{ConnectInfo, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode},
    response::Response,
};
use bytes::Bytes;
use futures::stream;
use serde_json::Value;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Larger requests are refused; no test sends one.
const MAX_REQUEST: usize = 64 * 1024 * 1024;
/// How long a connection waits before it breaks.
const FLUSH: Duration = Duration::from_millis(10);

/// A received request.
#[derive(Debug, Clone)]
pub struct Captured {
    /// E.g. `/v1/messages`.
    pub path: String,
    /// The query string without the question mark; may be empty.
    pub query: String,
    /// As received; names in lowercase.
    pub headers: HeaderMap,
    /// Null when it is not JSON.
    pub body: Value,
    /// The client's end of the connection, which identifies the connection.
    pub peer: SocketAddr,
}

impl Captured {
    /// A header's value; empty when it is missing.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

/// One answer of the server.
#[derive(Debug, Clone)]
pub struct Reply {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    /// Bytes of each write; 0: all at once.
    piece: usize,
    /// The delay before each write.
    pause: Duration,
    ending: BodyEnd,
    /// The first write waits until this is true.
    gate: Option<watch::Receiver<bool>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BodyEnd {
    /// The body is complete.
    Whole,
    /// The connection breaks in the middle of the body.
    Broken,
    /// Nothing more comes, and the connection stays open.
    Silent,
}

impl Reply {
    /// A stream of server-sent events in wire form.
    pub fn stream(events: impl Into<String>) -> Self {
        Self::new(200, "text/event-stream; charset=utf-8", events.into())
    }

    /// A stream of any kind in wire form.
    pub fn bytes(content_type: &'static str, body: impl Into<Bytes>) -> Self {
        Self::new(200, content_type, body)
    }

    /// A JSON body, usually an error.
    pub fn json(status: u16, body: &Value) -> Self {
        Self::new(status, "application/json", body.to_string())
    }

    /// Any other body, e.g. a proxy's page.
    pub fn text(status: u16, body: &str) -> Self {
        Self::new(status, "text/html", body.to_owned())
    }

    fn new(status: u16, content_type: &'static str, body: impl Into<Bytes>) -> Self {
        let mut headers = HeaderMap::new();
        headers.insert("content-type", HeaderValue::from_static(content_type));
        Self {
            status: StatusCode::from_u16(status).expect("a test names a valid status"),
            headers,
            body: body.into(),
            piece: 0,
            pause: Duration::ZERO,
            ending: BodyEnd::Whole,
            gate: None,
        }
    }

    /// With an additional header.
    #[must_use]
    pub fn header(mut self, name: &'static str, value: &str) -> Self {
        self.headers.insert(
            HeaderName::from_static(name),
            value.parse().expect("a test names a valid header"),
        );
        self
    }

    /// Compressed, as some proxies do unasked and all do when asked.
    #[must_use]
    pub fn gzipped(mut self) -> Self {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(&self.body).expect("memory takes everything");
        self.body = encoder.finish().expect("memory takes everything").into();
        self.header("content-encoding", "gzip")
    }

    /// Written in pieces of `bytes`, each after `pause`.
    #[must_use]
    pub fn dripping(mut self, bytes: usize, pause: Duration) -> Self {
        self.piece = bytes;
        self.pause = pause;
        self
    }

    /// The body waits until `gate` is true or dropped.
    #[must_use]
    pub fn behind(mut self, gate: watch::Receiver<bool>) -> Self {
        self.gate = Some(gate);
        self
    }

    /// The connection breaks after `bytes` of the body.
    #[must_use]
    pub fn broken_after(self, bytes: usize) -> Self {
        self.end_after(bytes, BodyEnd::Broken)
    }

    /// The body ends after `bytes`, as if it were complete.
    #[must_use]
    pub fn truncated_after(self, bytes: usize) -> Self {
        self.end_after(bytes, BodyEnd::Whole)
    }

    /// Nothing more comes after `bytes`, until the client disconnects.
    #[must_use]
    pub fn silent_after(self, bytes: usize) -> Self {
        self.end_after(bytes, BodyEnd::Silent)
    }

    fn end_after(mut self, bytes: usize, ending: BodyEnd) -> Self {
        self.body.truncate(bytes);
        self.ending = ending;
        self
    }
}

type Handler = dyn Fn(&Captured) -> Reply + Send + Sync;

/// The server. It stops when it is dropped.
pub struct VendorServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    _stop: DropGuard,
}

struct Shared {
    replies: Mutex<VecDeque<Reply>>,
    requests: Mutex<Vec<Captured>>,
    handler: Option<Box<Handler>>,
    /// The number of answers whose body is being written or waits.
    open: AtomicUsize,
}

impl fmt::Debug for VendorServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VendorServer").field("address", &self.address).finish_non_exhaustive()
    }
}

impl VendorServer {
    /// A server that plays queued answers.
    pub async fn start() -> Self {
        Self::serve(None).await
    }

    /// A server that calls `handler` when nothing is queued.
    pub async fn answering(handler: impl Fn(&Captured) -> Reply + Send + Sync + 'static) -> Self {
        Self::serve(Some(Box::new(handler))).await
    }

    async fn serve(handler: Option<Box<Handler>>) -> Self {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port on the loopback");
        let address = listener.local_addr().expect("a bound socket has an address");
        let shared = Arc::new(Shared {
            replies: Mutex::default(),
            requests: Mutex::default(),
            handler,
            open: AtomicUsize::new(0),
        });
        let router = Router::new().fallback(answer).with_state(Arc::clone(&shared));
        let service = router.into_make_service_with_connect_info::<SocketAddr>();
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = axum::serve(listener, service) => {}
                () = stopped.cancelled() => {}
            }
        });
        Self { address, shared, _stop: stop.drop_guard() }
    }

    /// The server's URL, e.g. `http://127.0.0.1:41234`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Queues the answer to the next request.
    pub fn reply(&self, reply: Reply) -> &Self {
        lock(&self.shared.replies).push_back(reply);
        self
    }

    /// Removes the next queued answer, if it has not been used.
    pub fn take(&self) -> Option<Reply> {
        lock(&self.shared.replies).pop_front()
    }

    /// The requests so far, oldest first.
    pub fn requests(&self) -> Vec<Captured> {
        lock(&self.shared.requests).clone()
    }

    /// The number of answers that are still being written: 0 once every client has disconnected or
    /// has everything.
    pub fn open_answers(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    request: Request,
) -> Response {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, MAX_REQUEST).await.unwrap_or_default();
    let captured = Captured {
        path: parts.uri.path().to_owned(),
        query: parts.uri.query().unwrap_or_default().to_owned(),
        headers: parts.headers,
        body: serde_json::from_slice(&body).unwrap_or_default(),
        peer,
    };
    lock(&shared.requests).push(captured.clone());
    let queued = lock(&shared.replies).pop_front();
    let reply = queued
        .or_else(|| shared.handler.as_ref().map(|handler| handler(&captured)))
        .unwrap_or_else(|| Reply::text(500, "the test queued no reply for this request"));
    let mut response = Response::new(body_of(reply.clone(), shared));
    *response.status_mut() = reply.status;
    *response.headers_mut() = reply.headers;
    response
}

/// Counts an answer as open until its body is dropped.
struct OpenAnswer(Arc<Shared>);

impl Drop for OpenAnswer {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

fn body_of(reply: Reply, shared: Arc<Shared>) -> Body {
    shared.open.fetch_add(1, Ordering::SeqCst);
    let open = OpenAnswer(shared);
    let state = (reply.body, reply.piece, reply.pause, reply.ending, reply.gate, open);
    Body::from_stream(stream::unfold(Some(state), async |state| {
        let (mut rest, piece, pause, ending, gate, open) = state?;
        if let Some(mut gate) = gate {
            let _ = gate.wait_for(|open| *open).await;
        }
        if rest.is_empty() {
            return match ending {
                BodyEnd::Whole => None,
                BodyEnd::Broken => {
                    // A body is flushed only while its source has nothing to give: without this
                    // delay, the part before the break would never leave the server.
                    tokio::time::sleep(FLUSH).await;
                    Some((Err(std::io::Error::other("the test breaks the connection")), None))
                }
                BodyEnd::Silent => {
                    let never: Infallible = std::future::pending().await;
                    match never {}
                }
            };
        }
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        let size = if piece == 0 { rest.len() } else { piece.min(rest.len()) };
        let bytes = rest.split_to(size);
        Some((Ok(bytes), Some((rest, piece, pause, ending, None, open))))
    }))
}

//! One connection: reads lines and runs their requests concurrently.

mod work;

use std::{collections::HashMap, sync::Arc, time::Duration};

use construct_proto::v1;
use serde_json::{Value, json};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::{AbortHandle, JoinSet},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tonic::{Status, transport::server::Connected as _};
use tracing::Instrument as _;

use self::work::Work;
use super::{
    FIRST_LINE_TIMEOUT, IDLE_TIMEOUT, LINES_PER_SECOND, MAX_CANCELS, MAX_LINE, MAX_LINE_BURST,
    MAX_RUNNING, Options, WRITE_TIMEOUT,
    answer::{Failure, Form, set_id},
    calls::Calls,
    line::Line,
    request::{Action, Request},
    wire::{self, PeekedStream, Reader, Writer},
};
use crate::{
    identity::peer::ForwardedClient,
    limit::{self, Account, Holder, Permit},
    quotas::seconds,
    server::TCP_KEEPALIVE_TIME,
    tls::stream::Stream,
};

#[cfg(test)]
mod tests;

/// Buffered lines of streams. When the buffer is full, each stream waits by itself.
const EVENT_BUFFER: usize = 16;
/// Retry delays, in seconds, when the gateway is full or a connection has too many requests. The
/// actual time is unknown.
const CONNECT_RETRY_SECONDS: u64 = 10;
const REQUEST_RETRY_SECONDS: u64 = 1;
/// When the gateway stops: how long running requests may take to end, and then how long they have
/// to send their last lines. Together less than the shutdown time of a process.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// Buffered answers. Lines of streams don't delay them.
const ANSWER_BUFFER: usize = 64;

pub(super) struct Connection {
    calls: Calls,
    options: Arc<Options>,
    draining: CancellationToken,
}

/// Sends lines to the client.
#[derive(Clone)]
pub(super) struct LineSender {
    account: Account,
    answers: mpsc::Sender<OutgoingLine>,
    events: mpsc::Sender<OutgoingLine>,
}

/// What a line with a whole session holds until it is written: the connection's session slot, and
/// memory.
pub(super) struct SessionHold {
    pub(super) slot: OwnedSemaphorePermit,
    pub(super) memory: Permit,
}

/// A line with the resources it holds.
pub(super) struct OutgoingLine {
    line: String,
    _memory: Permit,
    _slot: Option<OwnedSemaphorePermit>,
}

/// The client has disconnected.
pub(super) struct Disconnected;

impl LineSender {
    /// Sends a line that doesn't wait behind those of streams.
    pub(super) async fn answer(
        &self,
        line: Value,
        hold: Option<SessionHold>,
    ) -> Result<(), Disconnected> {
        self.answers.send(self.outgoing(line, hold)).await.map_err(|_| Disconnected)
    }

    /// Sends a line of a stream.
    pub(super) async fn event(
        &self,
        line: Value,
        hold: Option<SessionHold>,
    ) -> Result<(), Disconnected> {
        self.events.send(self.outgoing(line, hold)).await.map_err(|_| Disconnected)
    }

    /// A line, charged until the client has read it.
    fn outgoing(&self, line: Value, hold: Option<SessionHold>) -> OutgoingLine {
        let line = line.to_string();
        match hold {
            Some(SessionHold { slot, mut memory }) => {
                memory.set(line.len());
                OutgoingLine { line, _memory: memory, _slot: Some(slot) }
            }
            None => OutgoingLine { _memory: self.account.answer(line.len()), line, _slot: None },
        }
    }
}

impl Connection {
    pub(super) fn new(
        stream: &TcpStream,
        calls: Calls,
        options: Arc<Options>,
        draining: CancellationToken,
    ) -> Self {
        // Lines are small and urgent. On failure they arrive a little later.
        _ = stream.set_nodelay(true);
        // On failure, a client that vanished keeps its connection until the next write.
        _ = SockRef::from(stream)
            .set_tcp_keepalive(&TcpKeepalive::new().with_time(TCP_KEEPALIVE_TIME));
        let calls = calls.with_peer(stream.connect_info());
        Self { calls, options, draining }
    }

    /// Tells the client that there are too many connections.
    pub(super) async fn refuse(self, mut stream: TcpStream) {
        close_with_failure(&mut stream, &too_many_connections()).await;
    }

    pub(super) async fn run(
        mut self,
        mut stream: Stream,
        accepted: Arc<limit::connection::Connection>,
    ) {
        let (start, mut first) = (Instant::now(), [0]);
        let read = tokio::select! {
            () = self.draining.cancelled() => return,
            read = tokio::time::timeout(FIRST_LINE_TIMEOUT, stream.read(&mut first)) => read,
        };
        let mut first_line_timeout = FIRST_LINE_TIMEOUT.saturating_sub(start.elapsed());
        let (reader, writer, _permit) = match (read, first[0]) {
            (Ok(Ok(1)), b'{' | b' ' | b'\t' | b'\r' | b'\n') => {
                self.calls.charge(accepted);
                let (reader, writer) = wire::line_stream(
                    PeekedStream::new(first[0], stream),
                    self.calls.account().clone(),
                );
                (reader, writer, None)
            }
            (Ok(Ok(1)), b'G') => {
                let handshake = wire::accept_web_socket(
                    PeekedStream::new(first[0], stream),
                    &self.options.guard,
                );
                match tokio::time::timeout(WRITE_TIMEOUT, handshake).await {
                    Ok(Ok((socket, headers))) => {
                        first_line_timeout = IDLE_TIMEOUT;
                        let client = self.calls.adopt_headers(&headers);
                        self.calls.charge(accepted);
                        let (reader, writer) = socket.split(self.calls.account().clone());
                        match client {
                            None => (reader, writer, None),
                            Some(ForwardedClient(client)) => {
                                match self.options.proxied.acquire(Holder::network(Some(client)), 1)
                                {
                                    Ok(permit) => (reader, writer, Some(permit)),
                                    Err(_) => {
                                        return close_web_socket_with_failure(
                                            writer,
                                            &too_many_connections(),
                                        )
                                        .await;
                                    }
                                }
                            }
                        }
                    }
                    Ok(Err(error)) => return tracing::debug!(%error, "no WebSocket"),
                    Err(_) => return,
                }
            }
            // A page can make a browser post to any port, with lines of JSON as the body. A POST is
            // not answered.
            _ => {
                return close_with_failure(
                    &mut stream,
                    &Failure::invalid("expected lines of JSON, or a WebSocket"),
                )
                .await;
            }
        };
        let ((answers, answer_receiver), (events, event_receiver)) =
            (mpsc::channel(ANSWER_BUFFER), mpsc::channel(EVENT_BUFFER));
        let mut writing = tokio::spawn(write(writer, answer_receiver, event_receiver));
        let account = self.calls.account().clone();
        let mut server = Server {
            calls: self.calls,
            options: self.options,
            out: LineSender { account, answers, events },
            session_slot: Arc::new(Semaphore::new(1)),
            running: JoinSet::new(),
            stopping: CancellationToken::new(),
            by_id: HashMap::new(),
            bucket: Bucket { available: f64::from(MAX_LINE_BURST), refilled_at: Instant::now() },
        };
        let flush_timeout = tokio::select! {
            () = self.draining.cancelled() => {
                server.finish().await;
                Some(FLUSH_TIMEOUT)
            }
            _ = &mut writing => None,
            () = server.serve(reader, first_line_timeout) => Some(WRITE_TIMEOUT),
        };
        server.running.shutdown().await;
        drop(server);
        if let Some(flush_timeout) = flush_timeout
            && tokio::time::timeout(flush_timeout, &mut writing).await.is_err()
        {
            writing.abort();
        }
    }
}

fn too_many_connections() -> Failure {
    Failure::too_many("the gateway has too many connections", CONNECT_RETRY_SECONDS)
}

/// Sends the reason and closes the connection.
async fn close_with_failure(stream: &mut (impl AsyncWrite + Unpin), failure: &Failure) {
    let line = format!("{}\n", failure.line(Form::Results, None, None));
    let sending = async {
        stream.write_all(line.as_bytes()).await?;
        stream.shutdown().await
    };
    // The connection ends in any case.
    _ = tokio::time::timeout(WRITE_TIMEOUT, sending).await;
}

/// Sends the reason and closes the WebSocket.
async fn close_web_socket_with_failure(mut writer: Writer, failure: &Failure) {
    let line = failure.line(Form::Results, None, None).to_string();
    let sending = async {
        _ = writer.write(line).await;
        writer.close().await;
    };
    // The connection ends in any case.
    _ = tokio::time::timeout(WRITE_TIMEOUT, sending).await;
}

/// Writes lines until all senders are gone, or the client stops reading.
async fn write(
    mut writer: Writer,
    mut answers: mpsc::Receiver<OutgoingLine>,
    mut events: mpsc::Receiver<OutgoingLine>,
) {
    loop {
        let outgoing = tokio::select! {
            biased;
            Some(line) = answers.recv() => line,
            Some(line) = events.recv() => line,
            else => return writer.close().await,
        };
        let OutgoingLine { line, _memory, _slot } = outgoing;
        // A client that does not read breaks the connection.
        if writer.write(line).await.is_err() {
            return;
        }
    }
}

/// The ids of a request: the client's, the idempotency key, and the number of its line.
struct RequestIds {
    id: Option<String>,
    key: Option<String>,
    number: u64,
}

/// The state of a connection.
struct Server {
    calls: Calls,
    options: Arc<Options>,
    out: LineSender,
    /// One session at a time is in memory for a client that doesn't read.
    session_slot: Arc<Semaphore>,
    /// The running requests.
    running: JoinSet<()>,
    /// Canceled when running requests must end at once, with a reason.
    stopping: CancellationToken,
    by_id: HashMap<String, (AbortHandle, bool)>,
    bucket: Bucket,
}

impl Server {
    /// Serves until the client sends no more. `first_line_timeout` is the time for the first line;
    /// a WebSocket has had one.
    async fn serve(&mut self, mut lines: Reader, first_line_timeout: Duration) {
        let (mut last_activity, mut number) = (Instant::now(), 0_u64);
        loop {
            let line = tokio::select! {
                Some(done) = self.running.join_next_with_id() => {
                    let done = done.map_or_else(|error| error.id(), |(id, ())| id);
                    // Compares task ids: a canceled request may have a successor with the same
                    // request id.
                    self.by_id.retain(|_, (handle, _)| handle.id() != done);
                    last_activity = Instant::now();
                    continue;
                }
                () = tokio::time::sleep_until(last_activity + if number == 0 { first_line_timeout } else { IDLE_TIMEOUT }), if self.running.is_empty() => return,
                line = lines.next() => line,
            };
            match line {
                Ok(Some(line)) => {
                    last_activity = Instant::now();
                    number += 1;
                    if self.line(line, number).await.is_err() {
                        return;
                    }
                }
                // The client sends no more requests, but may wait for running ones. A stream has no
                // end to wait for.
                Ok(None) => {
                    for (handle, is_stream) in self.by_id.values() {
                        if *is_stream {
                            handle.abort();
                        }
                    }
                    _ = tokio::time::timeout(IDLE_TIMEOUT, self.join_running()).await;
                    return;
                }
                Err(error) => {
                    tracing::debug!(%error, "a connection broke");
                    return;
                }
            }
        }
    }

    /// Ends the running requests, each with an answer. Streams end by themselves when the gateway
    /// stops, and most other requests end soon.
    async fn finish(&mut self) {
        if tokio::time::timeout(FINISH_TIMEOUT, self.join_running()).await.is_err() {
            self.stopping.cancel();
            // Clients that don't read are not waited for.
            _ = tokio::time::timeout(FLUSH_TIMEOUT, self.join_running()).await;
        }
    }

    async fn join_running(&mut self) {
        while self.running.join_next().await.is_some() {}
    }

    async fn line(&mut self, line: Line, number: u64) -> Result<(), Disconnected> {
        let text = match line {
            Line::Text(text) => text,
            Line::TooLong => {
                let failure = Failure::too_large(format!("a line has at most {MAX_LINE} bytes"));
                return self.fail(&failure, Form::Results, None).await;
            }
            Line::NotUtf8 => {
                return self
                    .fail(&Failure::invalid("a line must be UTF-8"), Form::Results, None)
                    .await;
            }
        };
        let rejection = if self.bucket.take() {
            None
        } else {
            Some(Failure::too_many("too many requests per second", self.bucket.wait()))
        };
        let request = match (rejection, serde_json::from_str::<Request>(&text)) {
            (None, Ok(request)) => request,
            (rejection, read) => {
                let value: Value = serde_json::from_str(&text).unwrap_or_default();
                let is_events = value["content"].is_string() || value["form"] == "events";
                let form = if is_events { Form::Events } else { Form::Results };
                let parse_failure =
                    read.err().map(|error| Failure::invalid(format!("invalid request: {error}")));
                let Some(failure) = rejection.or(parse_failure) else { return Ok(()) };
                return self.fail(&failure, form, value["id"].as_str()).await;
            }
        };
        let id = request.id.clone();
        let key = match request.key() {
            Ok(key) => key,
            Err(message) => {
                return self
                    .fail(&Failure::invalid(message), request.action.form(), id.as_deref())
                    .await;
            }
        };
        match request.action {
            Action::Auth { key, organization } => {
                match self.identify(&key.0, organization.as_deref()).await {
                    Ok(()) => self.answer(json!({"type": "authenticated"}), id.as_deref()).await,
                    Err(status) => self.fail(&status.into(), Form::Results, id.as_deref()).await,
                }
            }
            Action::Cancel { request: Some(target), .. } => match self
                .by_id
                .remove(&format!("id {target}"))
            {
                Some((handle, _)) => {
                    handle.abort();
                    self.answer(json!({"type": "cancelled", "requestID": target}), id.as_deref())
                        .await
                }
                None => {
                    let failure = Failure::invalid(format!("no running request `{target}`"));
                    self.fail(&failure, Form::Results, id.as_deref()).await
                }
            },
            action => self.start(RequestIds { id, key, number }, action).await,
        }
    }

    /// Sets the key, and verifies it. Later requests use the key even if it is invalid: a client
    /// that presents a key is judged by it alone.
    async fn identify(&mut self, key: &str, organization: Option<&str>) -> Result<(), Status> {
        self.calls.identify(key, organization)?;
        let _: v1::WhoAmIResponse =
            self.calls.unary("OrganizationService/WhoAmI", &v1::WhoAmIRequest {}).await?;
        Ok(())
    }

    /// Starts a request.
    async fn start(&mut self, ids: RequestIds, action: Action) -> Result<(), Disconnected> {
        let RequestIds { id, key, number } = ids;
        let name = id.as_ref().map_or_else(|| format!("line {number}"), |id| format!("id {id}"));
        let limit = if matches!(action, Action::Cancel { .. }) {
            MAX_RUNNING + MAX_CANCELS
        } else {
            MAX_RUNNING
        };
        let failure = if self.running.len() >= limit {
            Some(Failure::too_many(
                format!("at most {MAX_RUNNING} requests may run at the same time"),
                REQUEST_RETRY_SECONDS,
            ))
        } else if self.by_id.contains_key(&name) {
            Some(Failure::invalid("a request with this id is already running"))
        } else {
            None
        };
        if let Some(failure) = failure {
            return self.fail(&failure, action.form(), id.as_deref()).await;
        }
        let is_stream = matches!(action, Action::Stream { .. });
        let empty = tracing::field::Empty;
        let span = tracing::info_span!(
            "gateway.request",
            rpc.system = "operator",
            rpc.service = empty,
            rpc.method = empty
        );
        let (calls, options) = (self.calls.clone(), Arc::clone(&self.options));
        let (out, session_slot, stopping) =
            (self.out.clone(), Arc::clone(&self.session_slot), self.stopping.clone());
        let work = Work { calls, options, out, session_slot, stopping, id, key };
        let handle = self.running.spawn(work.run(action).instrument(span));
        self.by_id.insert(name, (handle, is_stream));
        Ok(())
    }

    async fn fail(
        &self,
        failure: &Failure,
        form: Form,
        id: Option<&str>,
    ) -> Result<(), Disconnected> {
        self.out.answer(failure.line(form, id, None), None).await
    }

    async fn answer(&self, mut line: Value, id: Option<&str>) -> Result<(), Disconnected> {
        set_id(&mut line, id);
        self.calls.add_quotas(&mut line);
        self.out.answer(line, None).await
    }
}

/// The rate limit of lines.
struct Bucket {
    available: f64,
    refilled_at: Instant,
}

impl Bucket {
    fn take(&mut self) -> bool {
        let now = Instant::now();
        let gained = (now - self.refilled_at).as_secs_f64() * f64::from(LINES_PER_SECOND);
        (self.available, self.refilled_at) =
            ((self.available + gained).min(f64::from(MAX_LINE_BURST)), now);
        let is_available = self.available >= 1.0;
        if is_available {
            self.available -= 1.0;
        }
        is_available
    }

    /// Seconds until the next line is allowed, at least one.
    fn wait(&self) -> u64 {
        let missing = (1.0 - self.available).max(0.0) / f64::from(LINES_PER_SECOND);
        seconds(Duration::from_secs_f64(missing)).max(1)
    }
}

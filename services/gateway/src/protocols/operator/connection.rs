//! One connection: reads lines, and works on what they ask for side by side.

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
    BURST, CANCELS, FIRST, IDLE, LINGER, MAX_LINE, Options, PER_SECOND, RUNNING,
    answer::{Failure, Form, named},
    calls::Calls,
    line::Line,
    request::{Request, Wanted},
    wire::{self, Reader, Rewound, Writer},
};
use crate::{
    identity::peer::Forwarded,
    limit::{self, Account, Holder, Share},
    quotas::seconds,
    server::SILENCE,
    tls::stream::Stream,
};

#[cfg(test)]
mod tests;

/// Lines of streams on their way; behind them the streams wait, each by itself.
const EVENTS: usize = 16;
/// After how many seconds who finds the gateway full, or has too many requests, may come back. When
/// there is a place nobody knows.
const CROWDED: u64 = 10;
const BUSY: u64 = 1;
/// How long what is worked on may take to its end when the gateway stops, and then how long it has
/// for its last words, and these have to leave. Together less than a process has that stops.
const FINISH: Duration = Duration::from_secs(2);
const LAST: Duration = Duration::from_secs(1);
/// Answers on their way. Those of streams don't stand before them.
const ANSWERS: usize = 64;

pub(super) struct Connection {
    calls: Calls,
    options: Arc<Options>,
    draining: CancellationToken,
}

/// Where lines for the client go.
#[derive(Clone)]
pub(super) struct Out {
    account: Account,
    answers: mpsc::Sender<Told>,
    events: mpsc::Sender<Told>,
}

/// What a line with a whole session holds until it is written: the one place of its connection, and
/// room.
pub(super) struct Held {
    pub(super) place: OwnedSemaphorePermit,
    pub(super) room: Share,
}

/// A line, and what it holds.
pub(super) struct Told {
    line: String,
    _room: Share,
    _place: Option<OwnedSemaphorePermit>,
}

/// The client is gone.
pub(super) struct Gone;

impl Out {
    /// A line that doesn't wait behind those of streams.
    pub(super) async fn answer(&self, line: Value, held: Option<Held>) -> Result<(), Gone> {
        self.answers.send(self.told(line, held)).await.map_err(|_| Gone)
    }

    /// A line of a stream.
    pub(super) async fn event(&self, line: Value, held: Option<Held>) -> Result<(), Gone> {
        self.events.send(self.told(line, held)).await.map_err(|_| Gone)
    }

    /// A line as it is sent, charged until the client has read it.
    fn told(&self, line: Value, held: Option<Held>) -> Told {
        let line = line.to_string();
        match held {
            Some(Held { place, mut room }) => {
                room.set(line.len());
                Told { line, _room: room, _place: Some(place) }
            }
            None => Told { _room: self.account.answer(line.len()), line, _place: None },
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
        // Lines are small and wanted at once. If it cannot be set they come a little later.
        _ = stream.set_nodelay(true);
        // If it cannot be set, a client that vanished holds its place until it is written to.
        _ = SockRef::from(stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(SILENCE));
        let calls = calls.with_peer(stream.connect_info());
        Self { calls, options, draining }
    }

    /// Tells the client that there are too many already.
    pub(super) async fn refuse(self, mut stream: TcpStream) {
        last_words(&mut stream, &crowded()).await;
    }

    pub(super) async fn run(
        mut self,
        mut stream: Stream,
        accepted: Arc<limit::connection::Connection>,
    ) {
        let (begun, mut first) = (Instant::now(), [0]);
        let read = tokio::select! {
            () = self.draining.cancelled() => return,
            read = tokio::time::timeout(FIRST, stream.read(&mut first)) => read,
        };
        let mut patience = FIRST.saturating_sub(begun.elapsed());
        let (reader, writer, _place) = match (read, first[0]) {
            (Ok(Ok(1)), b'{' | b' ' | b'\t' | b'\r' | b'\n') => {
                self.calls.charge(accepted);
                let (reader, writer) =
                    wire::plain(Rewound::new(first[0], stream), self.calls.account().clone());
                (reader, writer, None)
            }
            (Ok(Ok(1)), b'G') => {
                let shaking = wire::web(Rewound::new(first[0], stream), &self.options.guard);
                match tokio::time::timeout(LINGER, shaking).await {
                    Ok(Ok((socket, headers))) => {
                        patience = IDLE;
                        let client = self.calls.identify_as(&headers);
                        self.calls.charge(accepted);
                        let (reader, writer) = socket.split(self.calls.account().clone());
                        match client {
                            None => (reader, writer, None),
                            Some(Forwarded(client)) => {
                                match self.options.proxied.take(Holder::network(Some(client)), 1) {
                                    Ok(place) => (reader, writer, Some(place)),
                                    Err(_) => return last_message(writer, &crowded()).await,
                                }
                            }
                        }
                    }
                    Ok(Err(error)) => return tracing::debug!(%error, "no WebSocket"),
                    Err(_) => return,
                }
            }
            // A page can make a browser post to any port, with lines of JSON as the body. Who posts
            // is not answered.
            _ => {
                return last_words(
                    &mut stream,
                    &Failure::invalid("lines of JSON are spoken here, or WebSocket"),
                )
                .await;
            }
        };
        let ((answers, answered), (events, told)) = (mpsc::channel(ANSWERS), mpsc::channel(EVENTS));
        let mut writing = tokio::spawn(write(writer, answered, told));
        let account = self.calls.account().clone();
        let mut server = Server {
            calls: self.calls,
            options: self.options,
            out: Out { account, answers, events },
            room: Arc::new(Semaphore::new(1)),
            running: JoinSet::new(),
            stopping: CancellationToken::new(),
            by_id: HashMap::new(),
            bucket: Bucket { left: f64::from(BURST), at: Instant::now() },
        };
        let linger = tokio::select! {
            () = self.draining.cancelled() => {
                server.finish().await;
                Some(LAST)
            }
            _ = &mut writing => None,
            () = server.serve(reader, patience) => Some(LINGER),
        };
        server.running.shutdown().await;
        drop(server);
        if let Some(linger) = linger
            && tokio::time::timeout(linger, &mut writing).await.is_err()
        {
            writing.abort();
        }
    }
}

fn crowded() -> Failure {
    Failure::too_many("the gateway has too many connections", CROWDED)
}

/// Tells why a connection is closed.
async fn last_words(stream: &mut (impl AsyncWrite + Unpin), failure: &Failure) {
    let line = format!("{}\n", failure.line(Form::Results, None, None));
    let telling = async {
        stream.write_all(line.as_bytes()).await?;
        stream.shutdown().await
    };
    // The connection ends in any case.
    _ = tokio::time::timeout(LINGER, telling).await;
}

/// Tells why a WebSocket is closed.
async fn last_message(mut writer: Writer, failure: &Failure) {
    let line = failure.line(Form::Results, None, None).to_string();
    let telling = async {
        _ = writer.write(line).await;
        writer.close().await;
    };
    // The connection ends in any case.
    _ = tokio::time::timeout(LINGER, telling).await;
}

/// Writes lines until nobody has any, or the client doesn't take them.
async fn write(
    mut writer: Writer,
    mut answers: mpsc::Receiver<Told>,
    mut events: mpsc::Receiver<Told>,
) {
    loop {
        let told = tokio::select! {
            biased;
            Some(told) = answers.recv() => told,
            Some(told) = events.recv() => told,
            else => return writer.close().await,
        };
        let Told { line, _room, _place } = told;
        // A client that does not read breaks the connection.
        if writer.write(line).await.is_err() {
            return;
        }
    }
}

/// What a request is known by: to the client, when it is sent again, and on its connection.
struct Asked {
    id: Option<String>,
    key: Option<String>,
    number: u64,
}

/// What is known about a connection while it lives.
struct Server {
    calls: Calls,
    options: Arc<Options>,
    out: Out,
    /// One session at a time is in memory for a client that doesn't read.
    room: Arc<Semaphore>,
    /// Requests that are worked on.
    running: JoinSet<()>,
    /// Cancelled when they have to end at once, and say why.
    stopping: CancellationToken,
    by_id: HashMap<String, (AbortHandle, bool)>,
    bucket: Bucket,
}

impl Server {
    /// Works until there is nothing more to read. `patience` is how long the first line may take; a
    /// WebSocket has had one.
    async fn serve(&mut self, mut lines: Reader, patience: Duration) {
        let (mut heard, mut number) = (Instant::now(), 0_u64);
        loop {
            let line = tokio::select! {
                Some(done) = self.running.join_next_with_id() => {
                    let done = done.map_or_else(|error| error.id(), |(id, ())| id);
                    // By what ran: a request that was cancelled may have a successor with its id.
                    self.by_id.retain(|_, (handle, _)| handle.id() != done);
                    heard = Instant::now();
                    continue;
                }
                () = tokio::time::sleep_until(heard + if number == 0 { patience } else { IDLE }), if self.running.is_empty() => return,
                line = lines.next() => line,
            };
            match line {
                Ok(Some(line)) => {
                    heard = Instant::now();
                    number += 1;
                    if self.line(line, number).await.is_err() {
                        return;
                    }
                }
                // The client asks for nothing more, but may wait for what it has asked for. A
                // stream has no end to wait for.
                Ok(None) => {
                    for (handle, endless) in self.by_id.values() {
                        if *endless {
                            handle.abort();
                        }
                    }
                    _ = tokio::time::timeout(IDLE, self.rest()).await;
                    return;
                }
                Err(error) => {
                    tracing::debug!(%error, "a connection broke");
                    return;
                }
            }
        }
    }

    /// Ends what is worked on, each request with an answer. What follows a session ends by itself
    /// when the gateway stops, and most of the rest is done soon.
    async fn finish(&mut self) {
        if tokio::time::timeout(FINISH, self.rest()).await.is_err() {
            self.stopping.cancel();
            // Whoever doesn't read them is not waited for.
            _ = tokio::time::timeout(LAST, self.rest()).await;
        }
    }

    async fn rest(&mut self) {
        while self.running.join_next().await.is_some() {}
    }

    async fn line(&mut self, line: Line, number: u64) -> Result<(), Gone> {
        let text = match line {
            Line::Text(text) => text,
            Line::TooLong => {
                let failure = Failure::too_large(format!("a line has at most {MAX_LINE} bytes"));
                return self.fail(&failure, Form::Results, None).await;
            }
            Line::NoText => {
                return self
                    .fail(&Failure::invalid("a line must be UTF-8"), Form::Results, None)
                    .await;
            }
        };
        let refused = if self.bucket.take() {
            None
        } else {
            Some(Failure::too_many("too many requests in a short time", self.bucket.wait()))
        };
        let request = match (refused, serde_json::from_str::<Request>(&text)) {
            (None, Ok(request)) => request,
            (refused, read) => {
                let value: Value = serde_json::from_str(&text).unwrap_or_default();
                let is_events = value["content"].is_string() || value["form"] == "events";
                let form = if is_events { Form::Events } else { Form::Results };
                let unread = read
                    .err()
                    .map(|error| Failure::invalid(format!("the request cannot be read: {error}")));
                let Some(failure) = refused.or(unread) else { return Ok(()) };
                return self.fail(&failure, form, value["id"].as_str()).await;
            }
        };
        let id = request.id.clone();
        let key = match request.key() {
            Ok(key) => key,
            Err(words) => {
                return self
                    .fail(&Failure::invalid(words), request.wanted.form(), id.as_deref())
                    .await;
            }
        };
        match request.wanted {
            Wanted::Auth { key, organization } => {
                match self.identify(&key.0, organization.as_deref()).await {
                    Ok(()) => self.answer(json!({"type": "authenticated"}), id.as_deref()).await,
                    Err(status) => self.fail(&status.into(), Form::Results, id.as_deref()).await,
                }
            }
            Wanted::Cancel { request: Some(target), .. } => match self
                .by_id
                .remove(&format!("id {target}"))
            {
                Some((handle, _)) => {
                    handle.abort();
                    self.answer(json!({"type": "cancelled", "requestID": target}), id.as_deref())
                        .await
                }
                None => {
                    let failure = Failure::invalid(format!("no request `{target}` is worked on"));
                    self.fail(&failure, Form::Results, id.as_deref()).await
                }
            },
            wanted => self.start(Asked { id, key, number }, wanted).await,
        }
    }

    /// Takes a key, and asks whether it opens anything. Later requests are made with it also when
    /// it does not: who presents something is judged by it alone.
    async fn identify(&mut self, key: &str, organization: Option<&str>) -> Result<(), Status> {
        self.calls.identify(key, organization)?;
        let _: v1::WhoAmIResponse =
            self.calls.unary("OrganizationService/WhoAmI", &v1::WhoAmIRequest {}).await?;
        Ok(())
    }

    /// Begins to work on a request.
    async fn start(&mut self, asked: Asked, wanted: Wanted) -> Result<(), Gone> {
        let Asked { id, key, number } = asked;
        let name = id.as_ref().map_or_else(|| format!("line {number}"), |id| format!("id {id}"));
        let most =
            if matches!(wanted, Wanted::Cancel { .. }) { RUNNING + CANCELS } else { RUNNING };
        let failure = if self.running.len() >= most {
            Some(Failure::too_many(
                format!("at most {RUNNING} requests are worked on at the same time"),
                BUSY,
            ))
        } else if self.by_id.contains_key(&name) {
            Some(Failure::invalid("a request with this id is worked on already"))
        } else {
            None
        };
        if let Some(failure) = failure {
            return self.fail(&failure, wanted.form(), id.as_deref()).await;
        }
        let endless = matches!(wanted, Wanted::Stream { .. });
        let empty = tracing::field::Empty;
        let span = tracing::info_span!(
            "gateway.request",
            rpc.system = "operator",
            rpc.service = empty,
            rpc.method = empty
        );
        let (calls, options) = (self.calls.clone(), Arc::clone(&self.options));
        let (out, room, stopping) =
            (self.out.clone(), Arc::clone(&self.room), self.stopping.clone());
        let work = Work { calls, options, out, room, stopping, id, key };
        let handle = self.running.spawn(work.run(wanted).instrument(span));
        self.by_id.insert(name, (handle, endless));
        Ok(())
    }

    async fn fail(&self, failure: &Failure, form: Form, id: Option<&str>) -> Result<(), Gone> {
        self.out.answer(failure.line(form, id, None), None).await
    }

    async fn answer(&self, mut line: Value, id: Option<&str>) -> Result<(), Gone> {
        named(&mut line, id);
        self.calls.tell_left(&mut line);
        self.out.answer(line, None).await
    }
}

/// How many lines may still be read at once.
struct Bucket {
    left: f64,
    at: Instant,
}

impl Bucket {
    fn take(&mut self) -> bool {
        let now = Instant::now();
        let gained = (now - self.at).as_secs_f64() * f64::from(PER_SECOND);
        (self.left, self.at) = ((self.left + gained).min(f64::from(BURST)), now);
        let fine = self.left >= 1.0;
        if fine {
            self.left -= 1.0;
        }
        fine
    }

    /// In how many seconds there is a line again, one at least.
    fn wait(&self) -> u64 {
        let missing = (1.0 - self.left).max(0.0) / f64::from(PER_SECOND);
        seconds(Duration::from_secs_f64(missing)).max(1)
    }
}

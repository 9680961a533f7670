//! One request of a client, from its bytes to the last of the answer.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes, HttpBody as _, to_bytes},
    extract::{Request as HttpRequest, State},
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use construct_runtime::{ModelToken, clock};
use futures::{FutureExt as _, stream};
use jiff::Timestamp;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout, timeout_at},
};
use uuid::Uuid;

use super::{
    Shared, access,
    asked::estimate,
    face::{Face, Head, Writer, json},
    gather::Gathered,
    models::Route,
    refusal::{Kind, Refusal},
    spending::Hold,
    upstream::Call,
};
use crate::{cancels::Guard, failure::Failure, vendor::Chunk};

/// Bytes of a request at most: the vendors' own bounds are about this.
const MAX_BODY: usize = 32 * 1024 * 1024;
/// What of all requests' bodies there is room for, for each call that may be under way: most are
/// much smaller than the largest, and those that are not take the room of others. Counted is what
/// arrives; while a call is under way, it is in memory several times.
const ROOM_PER_CALL: usize = 256 * 1024;
/// What room is counted in.
const UNIT: usize = 1024;
/// How long a request may take to arrive.
const BODY: Duration = Duration::from_secs(60);
/// Bytes of events that are written at once at most, when more than one has come.
const BATCH: usize = 16 * 1024;
/// Silence after which a stream shows that it lives.
const PING: Duration = Duration::from_secs(15);

/// A call whose answer is under way. Dropping it, because the client has gone, ends the call.
struct Exchange {
    call: Call,
    gathered: Gathered,
    complete: bool,
}

impl Exchange {
    async fn next(&mut self) -> Option<Result<(Chunk, super::gather::Grown), Failure>> {
        let chunk = match self.call.next().await {
            Some(Ok(chunk)) => chunk,
            Some(Err(failure)) => return Some(Err(failure)),
            None => {
                self.complete = true;
                return None;
            }
        };
        Some(self.gathered.push(&chunk).map(|grown| (chunk, grown)))
    }
}

/// Answers a request of the protocol.
pub(crate) async fn answer<F: Face>(
    State(shared): State<Arc<Shared>>,
    request: HttpRequest,
) -> Response {
    match Box::pin(begin::<F>(&shared, request)).await {
        Ok(response) => response,
        Err(refusal) => refused::<F>(&refusal),
    }
}

/// What the client is told when there is no answer.
pub(crate) fn refused<F: Face>(refusal: &Refusal) -> Response {
    tracing::debug!(kind = ?refusal.kind, "the proxy refuses a request: {}", refusal.message);
    let status =
        StatusCode::from_u16(F::status(refusal)).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = whole(status, json(&F::refused(refusal)));
    response.headers_mut().extend(refusal.headers(clock::now()));
    response
}

pub(crate) fn whole(status: StatusCode, body: String) -> Response {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// One of the requests that the proxy works on at once, and the room for its body, until it is
/// dropped.
pub(crate) struct Permit {
    _call: OwnedSemaphorePermit,
    _room: OwnedSemaphorePermit,
}

/// A request that is here as a whole, of somebody who may ask.
pub(crate) struct Arrived {
    pub(crate) token: ModelToken,
    pub(crate) permit: Permit,
    pub(crate) body: Bytes,
    pub(crate) at: Timestamp,
    pub(crate) deadline: Instant,
}

impl Arrived {
    pub(crate) async fn take(shared: &Shared, request: HttpRequest) -> Result<Self, Refusal> {
        let (parts, body) = request.into_parts();
        let at = clock::now();
        let token = access::token(&parts.headers, &shared.keys, at)?;
        let busy = |what: &str| Refusal {
            retry_at: at.checked_add(Duration::from_secs(1)).ok(),
            ..Refusal::new(
                Kind::Overloaded,
                format!("the proxy works on as {what} as it can at the moment"),
            )
        };
        let call = Arc::clone(&shared.calls).try_acquire_owned().map_err(|_| busy("many calls"))?;
        // What does not say how large it is may be as large as any.
        let announced = body
            .size_hint()
            .upper()
            .map_or(MAX_BODY, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        if announced > MAX_BODY {
            return Err(Refusal::new(
                Kind::TooLarge,
                format!("the request is larger than {MAX_BODY} bytes"),
            ));
        }
        let room = Arc::clone(&shared.bodies).try_acquire_many_owned(units(announced));
        let mut room = room.map_err(|_| busy("much"))?;
        let slow =
            |_| Refusal::invalid(format!("the request did not arrive within {} s", BODY.as_secs()));
        let body = timeout(BODY, to_bytes(body, MAX_BODY)).await.map_err(slow)?.map_err(|_| {
            Refusal::new(
                Kind::TooLarge,
                format!("the request is larger than {MAX_BODY} bytes, or broke off"),
            )
        })?;
        let unused = room.num_permits().saturating_sub(body.len().div_ceil(UNIT));
        drop(room.split(unused));
        let permit = Permit { _call: call, _room: room };
        Ok(Self { token, permit, body, at, deadline: Instant::now() + shared.timeout })
    }
}

/// Room for the bodies of so many calls, in units; for one of the largest at least.
pub(crate) fn room(concurrency: usize) -> usize {
    concurrency.saturating_mul(ROOM_PER_CALL).clamp(MAX_BODY, Semaphore::MAX_PERMITS) / UNIT
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

/// Sets aside what a call may cost.
pub(crate) async fn hold(
    shared: &Shared,
    token: &ModelToken,
    route: &Route,
    purpose: &'static str,
    amount: i64,
    deadline: Instant,
) -> Result<Hold, Refusal> {
    let holding =
        shared.spending.hold(token, &route.target.model.id, purpose, amount, shared.timeout);
    timeout_at(deadline, holding).await.map_err(|_| Refusal {
        retry_at: clock::now().checked_add(Duration::from_secs(1)).ok(),
        ..Refusal::new(Kind::Overloaded, "no money could be set aside in time")
    })?
}

/// What ends a call with the task that it is made for; none where it is made for no task.
pub(crate) fn guard(shared: &Shared, token: &ModelToken) -> Option<Guard> {
    (!token.task.is_empty()).then(|| shared.cancels.begin_outside(&token.task, &token.id))
}

async fn begin<F: Face>(shared: &Arc<Shared>, request: HttpRequest) -> Result<Response, Refusal> {
    let Arrived { token, permit, body, at, deadline } = Arrived::take(shared, request).await?;
    let mut asked = F::read(&body)?;
    drop(body);
    let name = access::model(&token, &asked.model)?;
    let route = shared.models.find(&token.organization, name).await?;
    name.clone_into(&mut asked.model);
    let head = Head {
        id: Uuid::now_v7().simple().to_string(),
        model: asked.model.clone(),
        created: at.as_second(),
        include_usage: asked.include_usage,
        provider_id: route.target.provider.id.clone(),
    };
    let streamed = asked.stream;
    let request = Arc::new(asked.request(&head.id, &token.task, &route)?);
    let amount = estimate(&request, &route);
    let hold = hold(shared, &token, &route, F::PURPOSE, amount, deadline).await?;
    let gathered = Gathered::new(&head.id, request.input_chars());
    let guard = guard(shared, &token);
    let call = Call::start(&shared.router, &route, request, deadline, hold, permit, guard);
    let mut exchange = Exchange { call, gathered, complete: false };
    if streamed {
        stream_of::<F>(exchange, head).await
    } else {
        whole_of::<F>(&mut exchange, &head).await
    }
}

async fn whole_of<F: Face>(exchange: &mut Exchange, head: &Head) -> Result<Response, Refusal> {
    while let Some(grown) = exchange.next().await {
        grown?;
    }
    Ok(whole(StatusCode::OK, json(&F::whole(head, &exchange.gathered))))
}

/// Begins to stream once there is something to stream: until then a failure has a status of its
/// own.
async fn stream_of<F: Face>(mut exchange: Exchange, head: Head) -> Result<Response, Refusal> {
    let mut writer = F::Writer::new(head);
    let mut out = String::new();
    match exchange.next().await {
        Some(Ok((chunk, grown))) => writer.push(&chunk, grown, &exchange.gathered, &mut out),
        Some(Err(failure)) => return Err(failure.into()),
        None => writer.end(&exchange.gathered, &mut out),
    }
    let live = !exchange.complete;
    let state = (live.then_some(exchange), writer, out);
    let events = stream::unfold(state, |(exchange, mut writer, mut out)| async move {
        let Some(mut exchange) = exchange else {
            return (!out.is_empty())
                .then(|| (Ok::<_, Infallible>(Bytes::from(out)), (None, writer, String::new())));
        };
        let live = fill(&mut exchange, &mut writer, &mut out).await;
        Some((Ok(Bytes::from(out)), (live.then_some(exchange), writer, String::new())))
    });
    let mut response = Response::new(Body::from_stream(events));
    let headers = response.headers_mut();
    headers
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

/// Waits for events unless some are there, and adds those that are ready. False when the answer is
/// over.
async fn fill<W: Writer>(exchange: &mut Exchange, writer: &mut W, out: &mut String) -> bool {
    loop {
        let next = if out.is_empty() {
            match timeout(PING, exchange.next()).await {
                Ok(next) => next,
                Err(_elapsed) => {
                    writer.ping(out);
                    return true;
                }
            }
        } else {
            match exchange.next().now_or_never() {
                Some(next) if out.len() < BATCH => next,
                Some(next) => return write(next, exchange, writer, out),
                None => return true,
            }
        };
        if !write(next, exchange, writer, out) {
            return false;
        }
    }
}

fn write<W: Writer>(
    next: Option<Result<(Chunk, super::gather::Grown), Failure>>,
    exchange: &Exchange,
    writer: &mut W,
    out: &mut String,
) -> bool {
    match next {
        Some(Ok((chunk, grown))) => {
            writer.push(&chunk, grown, &exchange.gathered, out);
            true
        }
        Some(Err(failure)) => {
            tracing::warn!(
                class = failure.class.as_str_name(),
                "an answer of the proxy broke off: {failure}"
            );
            writer.failed(&failure.into(), out);
            false
        }
        None => {
            writer.end(&exchange.gathered, out);
            false
        }
    }
}

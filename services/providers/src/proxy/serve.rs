//! Serves one request of a client.

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
    client_request::estimate_cost,
    partial_answer::PartialAnswer,
    protocol::{AnswerHead, ClientProtocol, Writer, to_json},
    refusal::{Kind, Refusal},
    routes::Route,
    spending::CallReservation,
    upstream::Call,
};
use crate::{cancels::StepGuard, failure::Failure, vendor::Chunk};

/// Bytes of a request at most, about as much as the vendors allow.
const MAX_BODY_BYTES: usize = 32 * 1024 * 1024;
/// Bytes of request bodies per allowed call, shared by all calls: most bodies are much smaller than
/// the largest. Counted as received; a call in flight holds its body in memory several times.
const BODY_BYTES_PER_CALL: usize = 256 * 1024;
/// The bytes of one semaphore permit.
const BYTES_PER_UNIT: usize = 1024;
/// Timeout for receiving a request.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of events per write at most, when several are ready.
const MAX_BATCH_BYTES: usize = 16 * 1024;
/// Silence after which a stream sends a ping.
const PING_INTERVAL: Duration = Duration::from_secs(15);

/// A call with its answer so far. Dropping it, when the client disconnects, ends the call.
struct Exchange {
    call: Call,
    answer: PartialAnswer,
    complete: bool,
}

impl Exchange {
    async fn next(
        &mut self,
    ) -> Option<Result<(Chunk, super::partial_answer::PieceChange), Failure>> {
        let chunk = match self.call.next().await {
            Some(Ok(chunk)) => chunk,
            Some(Err(failure)) => return Some(Err(failure)),
            None => {
                self.complete = true;
                return None;
            }
        };
        Some(self.answer.push(&chunk).map(|change| (chunk, change)))
    }
}

/// Answers a request of the protocol.
pub(crate) async fn answer<F: ClientProtocol>(
    State(shared): State<Arc<Shared>>,
    request: HttpRequest,
) -> Response {
    match Box::pin(start_exchange::<F>(&shared, request)).await {
        Ok(response) => response,
        Err(refusal) => refusal_response::<F>(&refusal),
    }
}

/// The response for a refusal.
pub(crate) fn refusal_response<F: ClientProtocol>(refusal: &Refusal) -> Response {
    tracing::debug!(kind = ?refusal.kind, "the proxy refuses a request: {}", refusal.message);
    let status =
        StatusCode::from_u16(F::status(refusal)).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json_response(status, to_json(&F::error_body(refusal)));
    response.headers_mut().extend(refusal.headers(clock::now()));
    response
}

pub(crate) fn json_response(status: StatusCode, body: String) -> Response {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The permits of a request in flight, for the call and its body.
pub(crate) struct RequestPermit {
    _call: OwnedSemaphorePermit,
    _body: OwnedSemaphorePermit,
}

/// A complete request with a valid token.
pub(crate) struct ReceivedRequest {
    pub(crate) token: ModelToken,
    pub(crate) permit: RequestPermit,
    pub(crate) body: Bytes,
    pub(crate) received_at: Timestamp,
    pub(crate) deadline: Instant,
}

impl ReceivedRequest {
    pub(crate) async fn receive(shared: &Shared, request: HttpRequest) -> Result<Self, Refusal> {
        let (parts, body) = request.into_parts();
        let at = clock::now();
        let token = access::verify_token(&parts.headers, &shared.keys, at)?;
        let busy = |what: &str| Refusal {
            retry_at: at.checked_add(Duration::from_secs(1)).ok(),
            ..Refusal::new(
                Kind::Overloaded,
                format!("the proxy works on as {what} as it can at the moment"),
            )
        };
        let call = Arc::clone(&shared.calls).try_acquire_owned().map_err(|_| busy("many calls"))?;
        // A body without a length may be as large as allowed.
        let announced = body
            .size_hint()
            .upper()
            .map_or(MAX_BODY_BYTES, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        if announced > MAX_BODY_BYTES {
            return Err(Refusal::new(
                Kind::TooLarge,
                format!("the request is larger than {MAX_BODY_BYTES} bytes"),
            ));
        }
        let room = Arc::clone(&shared.bodies).try_acquire_many_owned(units(announced));
        let mut room = room.map_err(|_| busy("much"))?;
        let slow = |_| {
            Refusal::invalid(format!(
                "the request did not arrive within {} s",
                BODY_TIMEOUT.as_secs()
            ))
        };
        let body = timeout(BODY_TIMEOUT, to_bytes(body, MAX_BODY_BYTES))
            .await
            .map_err(slow)?
            .map_err(|_| {
                Refusal::new(
                    Kind::TooLarge,
                    format!("the request is larger than {MAX_BODY_BYTES} bytes, or broke off"),
                )
            })?;
        let unused = room.num_permits().saturating_sub(body.len().div_ceil(BYTES_PER_UNIT));
        drop(room.split(unused));
        let permit = RequestPermit { _call: call, _body: room };
        Ok(Self { token, permit, body, received_at: at, deadline: Instant::now() + shared.timeout })
    }
}

/// The limit for the bodies of `concurrency` calls, in units; at least one of the largest.
pub(crate) fn body_units(concurrency: usize) -> usize {
    concurrency.saturating_mul(BODY_BYTES_PER_CALL).clamp(MAX_BODY_BYTES, Semaphore::MAX_PERMITS)
        / BYTES_PER_UNIT
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(BYTES_PER_UNIT)).unwrap_or(u32::MAX)
}

/// Reserves the upper estimate of a call's cost.
pub(crate) async fn reserve_spending(
    shared: &Shared,
    token: &ModelToken,
    route: &Route,
    purpose: &'static str,
    amount: i64,
    deadline: Instant,
) -> Result<CallReservation, Refusal> {
    let reserving = shared.spending.reserve_call(
        token,
        &route.target.model.id,
        purpose,
        amount,
        shared.timeout,
    );
    timeout_at(deadline, reserving).await.map_err(|_| Refusal {
        retry_at: clock::now().checked_add(Duration::from_secs(1)).ok(),
        ..Refusal::new(Kind::Overloaded, "no money could be set aside in time")
    })?
}

/// Ends a call with its task; none where it has no task.
pub(crate) fn cancel_guard(shared: &Shared, token: &ModelToken) -> Option<StepGuard> {
    (!token.task.is_empty()).then(|| shared.cancels.begin_for_token(&token.task, &token.id))
}

async fn start_exchange<F: ClientProtocol>(
    shared: &Arc<Shared>,
    request: HttpRequest,
) -> Result<Response, Refusal> {
    let ReceivedRequest { token, permit, body, received_at, deadline } =
        ReceivedRequest::receive(shared, request).await?;
    let mut asked = F::read(&body)?;
    drop(body);
    let name = access::allowed_model(&token, &asked.model)?;
    let route = shared.models.find(&token.organization, name).await?;
    name.clone_into(&mut asked.model);
    let head = AnswerHead {
        id: Uuid::now_v7().simple().to_string(),
        model: asked.model.clone(),
        created: received_at.as_second(),
        include_usage: asked.include_usage,
        provider_id: route.target.provider.id.clone(),
    };
    let streamed = asked.stream;
    let request = Arc::new(asked.into_request(&head.id, &token.task, &route)?);
    let amount = estimate_cost(&request, &route);
    let reservation =
        reserve_spending(shared, &token, &route, F::PURPOSE, amount, deadline).await?;
    let answer = PartialAnswer::new(&head.id, request.input_chars());
    let guard = cancel_guard(shared, &token);
    let call = Call::start(&shared.router, &route, request, deadline, reservation, permit, guard);
    let mut exchange = Exchange { call, answer, complete: false };
    if streamed {
        stream_response::<F>(exchange, head).await
    } else {
        unary_response::<F>(&mut exchange, &head).await
    }
}

async fn unary_response<F: ClientProtocol>(
    exchange: &mut Exchange,
    head: &AnswerHead,
) -> Result<Response, Refusal> {
    while let Some(change) = exchange.next().await {
        change?;
    }
    Ok(json_response(StatusCode::OK, to_json(&F::answer_body(head, &exchange.answer))))
}

/// Starts to stream with the first chunk: until then a failure has a status of its own.
async fn stream_response<F: ClientProtocol>(
    mut exchange: Exchange,
    head: AnswerHead,
) -> Result<Response, Refusal> {
    let mut writer = F::Writer::new(head);
    let mut out = String::new();
    match exchange.next().await {
        Some(Ok((chunk, change))) => writer.push(&chunk, change, &exchange.answer, &mut out),
        Some(Err(failure)) => return Err(failure.into()),
        None => writer.end(&exchange.answer, &mut out),
    }
    let live = !exchange.complete;
    let state = (live.then_some(exchange), writer, out);
    let events = stream::unfold(state, |(exchange, mut writer, mut out)| async move {
        let Some(mut exchange) = exchange else {
            return (!out.is_empty())
                .then(|| (Ok::<_, Infallible>(Bytes::from(out)), (None, writer, String::new())));
        };
        let live = next_batch(&mut exchange, &mut writer, &mut out).await;
        Some((Ok(Bytes::from(out)), (live.then_some(exchange), writer, String::new())))
    });
    let mut response = Response::new(Body::from_stream(events));
    let headers = response.headers_mut();
    headers
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

/// Waits for events unless some are buffered, and adds those that are ready. Returns false at the
/// end of the answer.
async fn next_batch<W: Writer>(exchange: &mut Exchange, writer: &mut W, out: &mut String) -> bool {
    loop {
        let next = if out.is_empty() {
            match timeout(PING_INTERVAL, exchange.next()).await {
                Ok(next) => next,
                Err(_elapsed) => {
                    writer.ping(out);
                    return true;
                }
            }
        } else {
            match exchange.next().now_or_never() {
                Some(next) if out.len() < MAX_BATCH_BYTES => next,
                Some(next) => return write_next(next, exchange, writer, out),
                None => return true,
            }
        };
        if !write_next(next, exchange, writer, out) {
            return false;
        }
    }
}

fn write_next<W: Writer>(
    next: Option<Result<(Chunk, super::partial_answer::PieceChange), Failure>>,
    exchange: &Exchange,
    writer: &mut W,
    out: &mut String,
) -> bool {
    match next {
        Some(Ok((chunk, change))) => {
            writer.push(&chunk, change, &exchange.answer, out);
            true
        }
        Some(Err(failure)) => {
            tracing::warn!(
                class = failure.class.as_str_name(),
                "an answer of the proxy broke off: {failure}"
            );
            writer.fail(&failure.into(), out);
            false
        }
        None => {
            writer.end(&exchange.answer, out);
            false
        }
    }
}

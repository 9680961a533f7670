//! Deadlines of calls.
//!
//! The client's deadline (`grpc-timeout`, `Connect-Timeout-Ms`) applies until the end of the call,
//! also of a stream. The gateway's own limit applies only until the response begins. A deadline is
//! passed on with its request, so that no service of the mesh is asked for longer than the client
//! waits. A question to the mesh carries the remaining time, and work on its answer stops then
//! ([`construct_bus::Bus::ask`]).

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body as _, Frame};
use tokio::time::{Instant, Sleep};
use tonic::{
    Status,
    body::Body,
    codegen::http::{Extensions, HeaderMap, Response},
};

/// Time until a gRPC or gRPC-Web call begins its response.
pub(crate) const GRPC_TIMEOUT: Duration = Duration::from_secs(30);

/// The deadline of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    /// The client's deadline.
    client_deadline: Option<Instant>,
    /// When the response must have begun.
    begin: Instant,
}

impl Deadline {
    /// A deadline `client_timeout` from now. The response begins within `limit` in any case.
    pub(crate) fn new(client_timeout: Option<Duration>, limit: Duration) -> Self {
        let now = Instant::now();
        let client_deadline = client_timeout.and_then(|timeout| now.checked_add(timeout));
        let begin = now + limit;
        Self {
            client_deadline,
            begin: client_deadline.map_or(begin, |deadline| deadline.min(begin)),
        }
    }

    /// The deadline of a gRPC request.
    pub(crate) fn from_grpc_headers(headers: &HeaderMap) -> Self {
        Self::new(grpc_timeout(headers), GRPC_TIMEOUT)
    }

    /// The deadline that a protocol set on a request.
    pub(crate) fn from_extensions(extensions: &Extensions) -> Option<Self> {
        extensions.get().copied()
    }

    /// The time for a question to the mesh: `max`, or what is left until the deadline.
    pub(crate) fn remaining(self, max: Duration) -> Duration {
        max.min(self.begin.saturating_duration_since(Instant::now()))
    }

    /// Whether the time to begin a response is over.
    pub(crate) fn is_over(self) -> bool {
        self.begin <= Instant::now()
    }

    /// Limits the work until a response begins.
    ///
    /// # Errors
    /// `DEADLINE_EXCEEDED`.
    pub(crate) async fn begin<T>(
        self,
        work: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        // Without this check, work that never waits would be done even without time.
        if self.is_over() {
            return Err(exceeded());
        }
        tokio::time::timeout_at(self.begin, work).await.unwrap_or_else(|_| Err(exceeded()))
    }

    /// Limits further parts of a response.
    ///
    /// # Errors
    /// `DEADLINE_EXCEEDED`.
    pub(crate) async fn limit_response<T>(
        self,
        work: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        match self.client_deadline {
            Some(end) => {
                tokio::time::timeout_at(end, work).await.unwrap_or_else(|_| Err(exceeded()))
            }
            None => work.await,
        }
    }

    /// Limits a whole gRPC call. The response itself reports an exceeded deadline.
    pub(crate) async fn enforce<E>(
        self,
        call: impl Future<Output = Result<Response<Body>, E>>,
    ) -> Result<Response<Body>, E> {
        if self.is_over() {
            return Ok(exceeded().into_http());
        }
        let Ok(result) = tokio::time::timeout_at(self.begin, call).await else {
            return Ok(exceeded().into_http());
        };
        let response = result?;
        Ok(match self.client_deadline {
            // A complete response needs no limit.
            Some(end) if !response.body().is_end_stream() => {
                let end = Box::pin(tokio::time::sleep_until(end));
                response.map(|body| Body::new(DeadlineBody { body: Some(body), end }))
            }
            _ => response,
        })
    }
}

pub(crate) fn exceeded() -> Status {
    Status::deadline_exceeded("the deadline of the call is exceeded")
}

/// The client's timeout in gRPC's format. An invalid one is ignored.
fn grpc_timeout(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(number * 3600)),
        "M" => Some(Duration::from_secs(number * 60)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

/// A response body that ends with `DEADLINE_EXCEEDED` at the client's deadline, wherever it is.
struct DeadlineBody {
    /// `None` after the end.
    body: Option<Body>,
    end: Pin<Box<Sleep>>,
}

impl http_body::Body for DeadlineBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let Some(body) = &mut this.body else { return Poll::Ready(None) };
        // Checked first: a body that always has data would never end.
        if this.end.as_mut().poll(context).is_ready() {
            // Dropping the body ends its source.
            this.body = None;
            let mut trailers = HeaderMap::new();
            return Poll::Ready(Some(
                exceeded().add_header(&mut trailers).map(|()| Frame::trailers(trailers)),
            ));
        }
        let next = ready!(Pin::new(body).poll_frame(context));
        let is_last = match &next {
            Some(Ok(frame)) => frame.is_trailers(),
            Some(Err(_)) | None => true,
        };
        if is_last {
            this.body = None;
        }
        Poll::Ready(next)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures::stream;
    use http_body_util::{BodyExt as _, StreamBody};
    use tonic::{Code, codegen::http::HeaderValue};

    use super::*;

    fn deadline(timeout: &'static str) -> Deadline {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", HeaderValue::from_static(timeout));
        Deadline::from_grpc_headers(&headers)
    }

    fn code(headers: &HeaderMap) -> Option<Code> {
        Status::from_header_map(headers).map(|status| status.code())
    }

    #[tokio::test(start_paused = true)]
    async fn grpc_timeout_header_is_parsed() {
        for (text, expected) in [
            ("1H", GRPC_TIMEOUT),
            ("99999999H", GRPC_TIMEOUT),
            ("1M", GRPC_TIMEOUT),
            ("2S", Duration::from_secs(2)),
            ("100m", Duration::from_millis(100)),
            ("5u", Duration::from_micros(5)),
            ("7n", Duration::from_nanos(7)),
            ("0m", Duration::ZERO),
            ("", GRPC_TIMEOUT),
            ("m", GRPC_TIMEOUT),
            ("10", GRPC_TIMEOUT),
            ("-1S", GRPC_TIMEOUT),
            ("+1S", GRPC_TIMEOUT),
            ("1x", GRPC_TIMEOUT),
            ("123456789n", GRPC_TIMEOUT),
        ] {
            assert_eq!(deadline(text).remaining(Duration::MAX), expected, "{text}");
        }
        assert_eq!(deadline("2S").remaining(Duration::from_secs(1)), Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn late_response_is_deadline_exceeded() {
        let begun = Instant::now();
        for (timeout, after) in
            [("1S", Duration::from_secs(1)), ("1H", Duration::from_secs(1) + GRPC_TIMEOUT)]
        {
            let never = std::future::pending::<Result<Response<Body>, Infallible>>();
            let Ok(response) = deadline(timeout).enforce(never).await;
            assert_eq!(
                (code(response.headers()), begun.elapsed()),
                (Some(Code::DeadlineExceeded), after)
            );
        }
        let at_once = async { Ok::<_, Infallible>(Status::ok("").into_http()) };
        let Ok(response) = deadline("0n").enforce(at_once).await;
        assert_eq!(
            code(response.headers()),
            Some(Code::DeadlineExceeded),
            "it was done all the same"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn stream_ends_at_the_client_deadline_only() {
        let empty_response = || async {
            // A body that never ends.
            let pieces = stream::unfold((), |()| async {
                tokio::time::sleep(Duration::from_secs(7)).await;
                Some((Ok::<_, Status>(Frame::data(Bytes::from_static(b"x"))), ()))
            });
            Ok::<_, Infallible>(Response::new(Body::new(StreamBody::new(pieces))))
        };
        let Ok(response) = deadline("20S").enforce(empty_response()).await;
        let begun = Instant::now();
        let all = response.into_body().collect().await.expect("it ends as gRPC's streams do");
        assert_eq!(begun.elapsed(), Duration::from_secs(20));
        assert_eq!(all.trailers().and_then(code), Some(Code::DeadlineExceeded));
        assert_eq!(all.to_bytes().len(), 2);

        let Ok(response) =
            Deadline::from_grpc_headers(&HeaderMap::new()).enforce(empty_response()).await;
        let mut body = response.into_body();
        for _ in 0..10 {
            assert!(
                body.frame().await.is_some_and(|frame| frame.is_ok_and(|frame| frame.is_data()))
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn ended_stream_is_not_ended_again() {
        let mut trailers = HeaderMap::new();
        Status::ok("").add_header(&mut trailers).expect("headers");
        let pieces = stream::iter([Ok::<_, Status>(Frame::<Bytes>::trailers(trailers))]);
        let empty_response =
            async { Ok::<_, Infallible>(Response::new(Body::new(StreamBody::new(pieces)))) };
        let Ok(response) = deadline("1S").enforce(empty_response).await;
        let mut body = response.into_body();
        let last = body
            .frame()
            .await
            .expect("trailers")
            .expect("they come")
            .into_trailers()
            .expect("they are");
        assert_eq!(code(&last), Some(Code::Ok));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(body.frame().await.is_none());
    }
}

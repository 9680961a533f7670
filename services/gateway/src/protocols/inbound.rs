//! Request bodies: charged to their sender, and limited in time.
//!
//! A request may be answered before its body is read. HTTP/1.1 then closes the connection, because
//! the next request begins where this body ends. The operating system of a client that is still
//! sending reports the closed connection (`EPIPE`) and discards the response. So a little of the
//! body is drained before the response: clients with small bodies can read why they were refused,
//! and keep their connection. With HTTP/2 each request ends by itself.

use std::{
    error::Error as _,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use tokio::{
    sync::oneshot,
    time::{Instant, Sleep},
};
use tonic::{
    Status,
    body::Body,
    codegen::http::{HeaderValue, Request, Response, Version, header},
};

use crate::{
    limit::{Account, BodyTimeout, Holder},
    server::MAX_REQUEST,
    status,
};

/// Maximum number of bytes drained, for anonymous and for authenticated callers. A body known to be
/// longer is not drained: its connection would be closed in any case.
const MAX_DRAIN_BYTES: u64 = 64 * 1024;
const MAX_DRAIN_BYTES_OF_CALLER: u64 = 2 * MAX_REQUEST as u64;
/// How long a slow or silent client is waited for.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// What happens to the body of a request.
pub(super) struct Inbound {
    account: Account,
    is_http1: bool,
    /// Whether the body was read to its end.
    is_read: Arc<AtomicBool>,
    /// Receives the body if it was dropped unread. `None` where there is nothing to drain: no body,
    /// HTTP/2, or a client that sends none before it is told to (`Expect`), which reading would do.
    unread: Option<oneshot::Receiver<Body>>,
}

impl Inbound {
    /// Charges the request's body to `account` from now on.
    pub(super) fn charge(request: &mut Request<Body>, account: Account) -> Self {
        let is_http1 = request.version() <= Version::HTTP_11;
        let is_read = Arc::new(AtomicBool::new(request.body().is_end_stream()));
        let mut inbound = Self {
            account: account.clone(),
            is_http1,
            is_read: Arc::clone(&is_read),
            unread: None,
        };
        if request.body().is_end_stream() {
            return inbound;
        }
        let (returned, unread) = oneshot::channel();
        let can_read_on = is_http1 && !request.headers().contains_key(header::EXPECT);
        inbound.unread = can_read_on.then_some(unread);
        let body = std::mem::take(request.body_mut());
        let returned = can_read_on.then_some(returned);
        *request.body_mut() = Body::new(ChargedBody {
            body,
            account,
            is_read,
            last_read_at: Instant::now(),
            timer: None,
            returned,
        });
        inbound
    }

    /// Completes the response to the request, after draining the body if necessary.
    pub(super) async fn complete(self, mut answer: Response<Body>) -> Response<Body> {
        if let Some(unread) = self.unread {
            let is_known = matches!(self.account.holder(), Holder::Organization(_));
            drain(
                unread,
                &self.is_read,
                if is_known { MAX_DRAIN_BYTES_OF_CALLER } else { MAX_DRAIN_BYTES },
            )
            .await;
        }
        if self.is_http1 && !self.is_read.load(Ordering::Relaxed) {
            answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        answer
    }
}

async fn drain(mut unread: oneshot::Receiver<Body>, is_read: &AtomicBool, limit: u64) {
    // A body that was read in part, or is still in use, is not drained.
    let Ok(mut body) = unread.try_recv() else { return };
    let reading = async {
        let mut remaining = limit;
        while remaining > 0 && body.size_hint().lower() <= remaining {
            match body.frame().await {
                Some(Ok(frame)) => {
                    remaining = remaining
                        .saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64))
                }
                Some(Err(_)) => return,
                None => return is_read.store(true, Ordering::Relaxed),
            }
        }
    };
    // A slow client gets its response now.
    _ = tokio::time::timeout(DRAIN_TIMEOUT, reading).await;
}

/// A body that is charged as it is read. When it is dropped unread, it is sent back.
struct ChargedBody {
    body: Body,
    account: Account,
    is_read: Arc<AtomicBool>,
    /// When the last part was read, or the request arrived.
    last_read_at: Instant,
    timer: Option<Pin<Box<Sleep>>>,
    returned: Option<oneshot::Sender<Body>>,
}

impl ChargedBody {
    /// Ready when the body arrives too slowly.
    fn poll_timeout(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let until = match self.account.body_timeout() {
            BodyTimeout::None => return Poll::Pending,
            BodyTimeout::Total(timeout) | BodyTimeout::Pause(timeout) => {
                self.last_read_at + timeout
            }
        };
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        if timer.deadline() != until {
            timer.as_mut().reset(until);
        }
        timer.as_mut().poll(context)
    }
}

impl http_body::Body for ChargedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.returned = None;
        let Poll::Ready(next) = Pin::new(&mut self.body).poll_frame(context) else {
            ready!(self.poll_timeout(context));
            // The body is read no further.
            self.body = Body::empty();
            return Poll::Ready(Some(Err(status::too_slow())));
        };
        if matches!(self.account.body_timeout(), BodyTimeout::Pause(_)) {
            self.last_read_at = Instant::now();
        }
        if next.is_none() || self.body.is_end_stream() {
            self.is_read.store(true, Ordering::Relaxed);
        }
        if let Some(Ok(frame)) = &next
            && let Some(data) = frame.data_ref()
            && let Err(refusal) = self.account.receive(data.len())
        {
            self.body = Body::empty();
            return Poll::Ready(Some(Err(refusal)));
        }
        Poll::Ready(next.map(|next| next.map_err(malformed)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for ChargedBody {
    fn drop(&mut self) {
        if let Some(returned) = self.returned.take() {
            // Fails when the receiver is gone.
            _ = returned.send(std::mem::take(&mut self.body));
        }
    }
}

/// The status of a connection error. A violation of HTTP is the client's error.
fn malformed(error: Status) -> Status {
    let mut source = error.source();
    while let Some(inner) = source {
        if let Some(broken) = inner.downcast_ref::<io::Error>()
            && matches!(broken.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData)
        {
            return Status::invalid_argument(format!("the request's body is malformed: {broken}"));
        }
        source = inner.source();
    }
    error
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use construct_domain::OrganizationId;
    use futures::{StreamExt as _, stream};
    use http_body_util::StreamBody;
    use tokio::time::Instant;
    use tonic::Code;
    use uuid::Uuid;

    use super::*;
    use crate::{
        Config,
        limit::{Capacity, connection::Connection},
    };

    const PIECE: usize = 16 * 1024;

    /// The accounts of an anonymous request and of one of an organization.
    fn accounts() -> (Account, Account) {
        let capacity = Arc::new(Capacity::new(&Config::default()));
        let [anonymous, authenticated] = [(); 2].map(|()| {
            Account::new(Arc::clone(&capacity), Connection::uncounted(), Holder::Shared, false)
        });
        authenticated
            .identify(OrganizationId::from_uuid(Uuid::from_u128(1)))
            .expect("it has nothing unread");
        (anonymous, authenticated)
    }

    /// An HTTP/1.1 request that sends `pieces` pieces, one per `pause`, and a counter of the pieces
    /// that were read.
    fn request(pieces: usize, pause: Duration) -> (Request<Body>, Arc<AtomicUsize>) {
        let read_count = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&read_count);
        let pieces = stream::iter(0..pieces).then(move |_| {
            let counter = Arc::clone(&counter);
            async move {
                tokio::time::sleep(pause).await;
                counter.fetch_add(1, Ordering::Relaxed);
                Ok::<_, Status>(Frame::data(Bytes::from_static(&[0; PIECE])))
            }
        });
        (Request::new(Body::new(StreamBody::new(pieces))), read_count)
    }

    /// A body that announces so many bytes and sends none.
    struct AnnouncedBody(u64);

    impl http_body::Body for AnnouncedBody {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Pending
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(self.0)
        }
    }

    /// How long a response takes that is ready when the request is dropped, and whether it closes
    /// the connection.
    async fn drain_time(mut request: Request<Body>) -> (Duration, bool) {
        let begun = Instant::now();
        let inbound = Inbound::charge(&mut request, accounts().0);
        drop(request);
        let answer = inbound.complete(Response::new(Body::empty())).await;
        (begun.elapsed(), answer.headers().contains_key(header::CONNECTION))
    }

    /// The first error of a body, and the time until then.
    async fn first_error(mut request: Request<Body>, account: Account) -> (Code, Duration) {
        let begun = Instant::now();
        _ = Inbound::charge(&mut request, account);
        let failure = request.into_body().collect().await.expect_err("it is refused");
        (failure.code(), begun.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn small_unread_body_is_drained() {
        let millis = Duration::from_millis;
        for (pieces, pause, expected, took, closes) in [
            (3, millis(100), 3, millis(300), false),
            // Beyond the maximum.
            (100, millis(10), 4, millis(40), true),
            // Too slow.
            (3, millis(400), 2, DRAIN_TIMEOUT, true),
            (1, millis(60_000), 0, DRAIN_TIMEOUT, true),
        ] {
            let (request, read_count) = request(pieces, pause);
            let (elapsed, closed) = drain_time(request).await;
            assert!(
                elapsed >= took && elapsed < took + millis(9),
                "{pieces} {pause:?}: {elapsed:?}"
            );
            assert_eq!(
                (read_count.load(Ordering::Relaxed), closed),
                (expected, closes),
                "{pieces} {pause:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn read_or_unsent_body_is_not_drained() {
        let pause = Duration::from_millis(10);
        let (mut http2_request, read_count) = request(3, pause);
        *http2_request.version_mut() = Version::HTTP_2;
        assert!(!drain_time(http2_request).await.1, "other streams go on");
        assert_eq!(read_count.load(Ordering::Relaxed), 0);
        let (mut expecting_request, read_count) = request(3, pause);
        expecting_request
            .headers_mut()
            .insert(header::EXPECT, "100-continue".parse().expect("a value"));
        assert!(drain_time(expecting_request).await.1);
        assert_eq!(read_count.load(Ordering::Relaxed), 0);
        // A reader of the body decides itself how far to read it.
        let (mut read_request, read_count) = request(3, pause);
        let inbound = Inbound::charge(&mut read_request, accounts().1);
        read_request.body_mut().frame().await.expect("there is one").expect("it is read");
        drop(read_request);
        inbound.complete(Response::new(Body::empty())).await;
        assert_eq!(read_count.load(Ordering::Relaxed), 1);
        let (mut held_request, read_count) = request(3, pause);
        let inbound = Inbound::charge(&mut held_request, accounts().0);
        inbound.complete(Response::new(Body::empty())).await;
        assert_eq!(read_count.load(Ordering::Relaxed), 0);
        assert!(!drain_time(Request::new(Body::empty())).await.1);
        // A body known to be longer is not waited for either.
        for (size, waits) in [(MAX_DRAIN_BYTES, true), (MAX_DRAIN_BYTES + 1, false)] {
            let (took, _) = drain_time(Request::new(Body::new(AnnouncedBody(size)))).await;
            assert_eq!(took >= DRAIN_TIMEOUT, waits, "{size}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn anonymous_body_is_limited_in_time_and_size() {
        let slow = request(1000, Duration::from_millis(900)).0;
        let (code, took) = first_error(slow, accounts().0).await;
        assert_eq!(
            (code, took.as_secs()),
            (Code::ResourceExhausted, 0),
            "one piece is too much already"
        );
        let (code, took) =
            first_error(Request::new(Body::new(AnnouncedBody(1))), accounts().0).await;
        assert_eq!((code, took.as_secs()), (Code::DeadlineExceeded, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn caller_body_may_be_slow_but_not_pause() {
        let mut slow = request(100, Duration::from_secs(9)).0;
        _ = Inbound::charge(&mut slow, accounts().1);
        let body = slow.into_body().collect().await.expect("each piece comes in time").to_bytes();
        assert_eq!(body.len(), 100 * PIECE);
        let (code, took) = first_error(request(100, Duration::from_secs(11)).0, accounts().1).await;
        assert_eq!((code, took.as_secs()), (Code::DeadlineExceeded, 10));
    }

    #[tokio::test(start_paused = true)]
    async fn organization_bodies_are_limited_to_its_share() {
        let capacity = Arc::new(Capacity::new(&Config::default()));
        let account = |organization| {
            let account =
                Account::new(Arc::clone(&capacity), Connection::uncounted(), Holder::Shared, false);
            account
                .identify(OrganizationId::from_uuid(Uuid::from_u128(organization)))
                .expect("it has nothing unread");
            account
        };
        let (first, second) = (account(1), account(1));
        first.receive(24 << 20).expect("there is room");
        let refused = second.receive(16 << 20).expect_err("the organization holds enough");
        assert!(
            refused.code() == Code::ResourceExhausted && refused.message().contains("organization"),
            "{refused}"
        );
        account(2).receive(16 << 20).expect("others have room");
        first.release();
        second.receive(16 << 20).expect("there is room again");
    }
}

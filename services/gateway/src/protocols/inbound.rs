//! The body of a request on its way in: charged to whoever sends it, and limited in time.
//!
//! A request may also be answered before its body is read. After such an answer a connection of
//! HTTP/1.1 is closed, since the next request begins where this one ends. A client that still sends
//! is told by its system that it is closed (`EPIPE`), which throws the answer away with it. So a
//! little of the body is read on, and dropped, before the answer: clients that send little read why
//! they are refused, and keep their connection. With HTTP/2 each request ends by itself.

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

/// Bytes that are read on at most, and those of a caller who is known. Of what is known to be
/// longer nothing is: it would be closed in the middle all the same.
const MOST: u64 = 64 * 1024;
const MOST_OF_KNOWN: u64 = 2 * MAX_REQUEST as u64;
/// How long whoever sends slowly, or nothing, is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// What becomes of a request's body.
pub(super) struct Inbound {
    account: Account,
    is_http1: bool,
    /// Whether the body was read to its end.
    is_read: Arc<AtomicBool>,
    /// The body, if whoever it was given to has dropped it without a look. None where there is
    /// nothing to read on: no body, HTTP/2, or a client that sends none before it is told to
    /// (`Expect`), which asking for it would do.
    unread: Option<oneshot::Receiver<Body>>,
}

impl Inbound {
    /// From now on the request's body is charged to `account`.
    pub(super) fn of(request: &mut Request<Body>, account: Account) -> Self {
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
        let (back, unread) = oneshot::channel();
        let can_read_on = is_http1 && !request.headers().contains_key(header::EXPECT);
        inbound.unread = can_read_on.then_some(unread);
        let body = std::mem::take(request.body_mut());
        let back = can_read_on.then_some(back);
        *request.body_mut() =
            Body::new(Charged { body, account, is_read, since: Instant::now(), timer: None, back });
        inbound
    }

    /// Completes the answer to the request. Reads on before that, if there is something.
    pub(super) async fn answer(self, mut answer: Response<Body>) -> Response<Body> {
        if let Some(unread) = self.unread {
            let is_known = matches!(self.account.holder(), Holder::Organization(_));
            read_on(unread, &self.is_read, if is_known { MOST_OF_KNOWN } else { MOST }).await;
        }
        if self.is_http1 && !self.is_read.load(Ordering::Relaxed) {
            answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        answer
    }
}

async fn read_on(mut unread: oneshot::Receiver<Body>, is_read: &AtomicBool, most: u64) {
    // One that was looked at, or still is somebody's, is theirs.
    let Ok(mut body) = unread.try_recv() else { return };
    let reading = async {
        let mut left = most;
        while left > 0 && body.size_hint().lower() <= left {
            match body.frame().await {
                Some(Ok(frame)) => {
                    left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64))
                }
                Some(Err(_)) => return,
                None => return is_read.store(true, Ordering::Relaxed),
            }
        }
    };
    // Who is too slow for it is answered now.
    _ = tokio::time::timeout(PATIENCE, reading).await;
}

/// A body that is charged as it is read. It goes back when it is dropped before anybody has looked
/// at it.
struct Charged {
    body: Body,
    account: Account,
    is_read: Arc<AtomicBool>,
    /// When the last part of it came, or its request.
    since: Instant,
    timer: Option<Pin<Box<Sleep>>>,
    back: Option<oneshot::Sender<Body>>,
}

impl Charged {
    /// Ready when the body comes too slowly.
    fn poll_timeout(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let until = match self.account.body_timeout() {
            BodyTimeout::None => return Poll::Pending,
            BodyTimeout::Total(timeout) | BodyTimeout::Pause(timeout) => self.since + timeout,
        };
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        if timer.deadline() != until {
            timer.as_mut().reset(until);
        }
        timer.as_mut().poll(context)
    }
}

impl http_body::Body for Charged {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.back = None;
        let Poll::Ready(next) = Pin::new(&mut self.body).poll_frame(context) else {
            ready!(self.poll_timeout(context));
            // Nothing more is read of it.
            self.body = Body::empty();
            return Poll::Ready(Some(Err(status::too_slow())));
        };
        if matches!(self.account.body_timeout(), BodyTimeout::Pause(_)) {
            self.since = Instant::now();
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

impl Drop for Charged {
    fn drop(&mut self) {
        if let Some(back) = self.back.take() {
            // Nobody takes it when the request was for no protocol.
            _ = back.send(std::mem::take(&mut self.body));
        }
    }
}

/// An error of the connection; of a body that breaks the rules of HTTP one of the client.
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

    /// The account of an anonymous request, and of one of an organization.
    fn accounts() -> (Account, Account) {
        let capacity = Arc::new(Capacity::new(&Config::default()));
        let [anonymous, known] = [(); 2].map(|()| {
            Account::new(Arc::clone(&capacity), Connection::uncounted(), Holder::Shared, false)
        });
        known
            .identify(OrganizationId::from_uuid(Uuid::from_u128(1)))
            .expect("it has nothing unread");
        (anonymous, known)
    }

    /// A request over HTTP/1.1 that sends so many pieces, one each time after so long; and how many
    /// were taken.
    fn request(pieces: usize, pause: Duration) -> (Request<Body>, Arc<AtomicUsize>) {
        let taken = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&taken);
        let pieces = stream::iter(0..pieces).then(move |_| {
            let counter = Arc::clone(&counter);
            async move {
                tokio::time::sleep(pause).await;
                counter.fetch_add(1, Ordering::Relaxed);
                Ok::<_, Status>(Frame::data(Bytes::from_static(&[0; PIECE])))
            }
        });
        (Request::new(Body::new(StreamBody::new(pieces))), taken)
    }

    /// A body of so many bytes, none of which comes.
    struct Announced(u64);

    impl http_body::Body for Announced {
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

    /// How long an answer takes that is ready when the request is dropped, and whether it closes
    /// the connection.
    async fn answered(mut request: Request<Body>) -> (Duration, bool) {
        let begun = Instant::now();
        let inbound = Inbound::of(&mut request, accounts().0);
        drop(request);
        let answer = inbound.answer(Response::new(Body::empty())).await;
        (begun.elapsed(), answer.headers().contains_key(header::CONNECTION))
    }

    /// The first error of a body, and how long it took.
    async fn fails(mut request: Request<Body>, account: Account) -> (Code, Duration) {
        let begun = Instant::now();
        _ = Inbound::of(&mut request, account);
        let failure = request.into_body().collect().await.expect_err("it is refused");
        (failure.code(), begun.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_little_is_read_on_for_a_moment() {
        let millis = Duration::from_millis;
        for (pieces, pause, expected, took, closes) in [
            (3, millis(100), 3, millis(300), false),
            // Beyond what is read at most.
            (100, millis(10), 4, millis(40), true),
            // Too slowly.
            (3, millis(400), 2, PATIENCE, true),
            (1, millis(60_000), 0, PATIENCE, true),
        ] {
            let (request, taken) = request(pieces, pause);
            let (elapsed, closed) = answered(request).await;
            assert!(
                elapsed >= took && elapsed < took + millis(9),
                "{pieces} {pause:?}: {elapsed:?}"
            );
            assert_eq!(
                (taken.load(Ordering::Relaxed), closed),
                (expected, closes),
                "{pieces} {pause:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_read_of_what_is_somebody_elses_or_is_not_sent() {
        let pause = Duration::from_millis(10);
        let (mut of_http2, taken) = request(3, pause);
        *of_http2.version_mut() = Version::HTTP_2;
        assert!(!answered(of_http2).await.1, "other streams go on");
        assert_eq!(taken.load(Ordering::Relaxed), 0);
        let (mut expecting, taken) = request(3, pause);
        expecting.headers_mut().insert(header::EXPECT, "100-continue".parse().expect("a value"));
        assert!(answered(expecting).await.1);
        assert_eq!(taken.load(Ordering::Relaxed), 0);
        // Whoever has looked at it has said how far they want it.
        let (mut looked_at, taken) = request(3, pause);
        let inbound = Inbound::of(&mut looked_at, accounts().1);
        looked_at.body_mut().frame().await.expect("there is one").expect("it is read");
        drop(looked_at);
        inbound.answer(Response::new(Body::empty())).await;
        assert_eq!(taken.load(Ordering::Relaxed), 1);
        let (mut kept, taken) = request(3, pause);
        let inbound = Inbound::of(&mut kept, accounts().0);
        inbound.answer(Response::new(Body::empty())).await;
        assert_eq!(taken.load(Ordering::Relaxed), 0);
        assert!(!answered(Request::new(Body::empty())).await.1);
        // What is known to be longer is not waited for either.
        for (size, waits) in [(MOST, true), (MOST + 1, false)] {
            let (took, _) = answered(Request::new(Body::new(Announced(size)))).await;
            assert_eq!(took >= PATIENCE, waits, "{size}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn anonymous_body_has_a_second_and_few_bytes() {
        let slow = request(1000, Duration::from_millis(900)).0;
        let (code, took) = fails(slow, accounts().0).await;
        assert_eq!(
            (code, took.as_secs()),
            (Code::ResourceExhausted, 0),
            "one piece is too much already"
        );
        let (code, took) = fails(Request::new(Body::new(Announced(1))), accounts().0).await;
        assert_eq!((code, took.as_secs()), (Code::DeadlineExceeded, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn known_callers_body_may_take_long_but_not_pause() {
        let mut slow = request(100, Duration::from_secs(9)).0;
        _ = Inbound::of(&mut slow, accounts().1);
        let body = slow.into_body().collect().await.expect("each piece comes in time").to_bytes();
        assert_eq!(body.len(), 100 * PIECE);
        let (code, took) = fails(request(100, Duration::from_secs(11)).0, accounts().1).await;
        assert_eq!((code, took.as_secs()), (Code::DeadlineExceeded, 10));
    }

    #[tokio::test(start_paused = true)]
    async fn organization_holds_no_more_bytes_of_bodies_than_its_share() {
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

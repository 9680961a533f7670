//! What somebody sends over HTTP/1.1 who is refused before it is read.
//!
//! After such an answer the connection is closed, since the next request begins where this one
//! ends. Whoever still sends is told by their system that it is closed (`EPIPE`), which throws the
//! answer away with it. So a little of it is read on, and dropped, before the answer: those who
//! send little read why they are refused, and keep their connection. With HTTP/2 each request ends
//! by itself.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use tokio::sync::oneshot;
use tonic::{
    Status,
    body::Body,
    codegen::http::{Request, Response, Version, header},
};

/// Bytes that are read on at most. Of what is known to be longer nothing is: it would be closed in
/// the middle all the same.
const MOST: u64 = 64 * 1024;
/// How long whoever sends slowly, or nothing, is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// A request's body, if whoever it was given to has dropped it without a look.
pub(super) struct Unread(oneshot::Receiver<Body>);

impl Unread {
    /// None where there is nothing to read on: no body, HTTP/2, or a client that sends none before
    /// it is told to (`Expect`), which asking for it would do.
    pub(super) fn of(request: &mut Request<Body>) -> Option<Self> {
        if request.version() > Version::HTTP_11
            || request.body().is_end_stream()
            || request.headers().contains_key(header::EXPECT)
        {
            return None;
        }
        let (back, unread) = oneshot::channel();
        let body = std::mem::take(request.body_mut());
        *request.body_mut() = Body::new(Lent { body, back: Some(back) });
        Some(Self(unread))
    }

    /// Reads on, if there is something, before an answer is given.
    pub(super) async fn read_before(
        unread: Option<Self>,
        answer: Response<Body>,
    ) -> Response<Body> {
        if let Some(unread) = unread {
            unread.read().await;
        }
        answer
    }

    async fn read(mut self) {
        // One that was looked at, or still is somebody's, is theirs.
        let Ok(mut body) = self.0.try_recv() else { return };
        let on = async move {
            let mut left = MOST;
            while left > 0
                && body.size_hint().lower() <= left
                && let Some(Ok(frame)) = body.frame().await
            {
                left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64));
            }
        };
        // Who is too slow for it is answered now.
        _ = tokio::time::timeout(PATIENCE, on).await;
    }
}

/// A body that goes back when it is dropped before anybody has looked at it.
struct Lent {
    body: Body,
    back: Option<oneshot::Sender<Body>>,
}

impl http_body::Body for Lent {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.back = None;
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(back) = self.back.take() {
            // Nobody takes it when the request was for no face.
            _ = back.send(std::mem::take(&mut self.body));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use futures::{StreamExt as _, stream};
    use http_body_util::StreamBody;
    use tokio::time::Instant;

    use super::*;

    /// A request over HTTP/1.1 that sends so many pieces of 16 KiB, one each time after so long;
    /// and how many were taken.
    fn request(pieces: usize, pause: Duration) -> (Request<Body>, Arc<AtomicUsize>) {
        let taken = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&taken);
        let pieces = stream::iter(0..pieces).then(move |_| {
            let counter = Arc::clone(&counter);
            async move {
                tokio::time::sleep(pause).await;
                counter.fetch_add(1, Ordering::Relaxed);
                Ok::<_, Status>(Frame::data(Bytes::from_static(&[0; 16 * 1024])))
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

    /// How long an answer takes that is ready when the request is dropped.
    async fn answered(mut request: Request<Body>) -> Duration {
        let begun = Instant::now();
        let unread = Unread::of(&mut request);
        drop(request);
        Unread::read_before(unread, Response::new(Body::empty())).await;
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_little_is_read_on_for_a_moment() {
        let millis = Duration::from_millis;
        for (pieces, pause, expected, took) in [
            (3, millis(100), 3, millis(300)),
            // Beyond what is read at most.
            (100, millis(10), 4, millis(40)),
            // Too slowly.
            (3, millis(400), 2, PATIENCE),
            (1, millis(60_000), 0, PATIENCE),
        ] {
            let (request, taken) = request(pieces, pause);
            let elapsed = answered(request).await;
            assert!(
                elapsed >= took && elapsed < took + millis(9),
                "{pieces} {pause:?}: {elapsed:?}"
            );
            assert_eq!(taken.load(Ordering::Relaxed), expected, "{pieces} {pause:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_read_of_what_is_somebody_elses_or_is_not_sent() {
        let pause = Duration::from_millis(10);
        let (mut of_http2, taken) = request(3, pause);
        *of_http2.version_mut() = Version::HTTP_2;
        answered(of_http2).await;
        assert_eq!(taken.load(Ordering::Relaxed), 0);
        let (mut expecting, taken) = request(3, pause);
        expecting.headers_mut().insert(header::EXPECT, "100-continue".parse().expect("a value"));
        answered(expecting).await;
        assert_eq!(taken.load(Ordering::Relaxed), 0);
        // Whoever has looked at it has said how far they want it.
        let (mut looked_at, taken) = request(3, pause);
        let unread = Unread::of(&mut looked_at);
        looked_at.body_mut().frame().await.expect("there is one").expect("it is read");
        drop(looked_at);
        Unread::read_before(unread, Response::new(Body::empty())).await;
        assert_eq!(taken.load(Ordering::Relaxed), 1);
        let (mut kept, taken) = request(3, pause);
        Unread::read_before(Unread::of(&mut kept), Response::new(Body::empty())).await;
        assert_eq!(taken.load(Ordering::Relaxed), 0);
        assert!(Unread::of(&mut Request::new(Body::empty())).is_none());
        // What is known to be longer is not waited for either.
        for (size, waits) in [(MOST, true), (MOST + 1, false)] {
            let took = answered(Request::new(Body::new(Announced(size)))).await;
            assert_eq!(took >= PATIENCE, waits, "{size}");
        }
    }
}

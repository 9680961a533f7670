//! Responses: charged to the caller until they are read.
//!
//! A response goes to the connection in small parts; each part is released when the client has read
//! it. So the memory held by all responses is known, and so are the clients that do not read
//! ([`crate::limit::connection`]).

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures::future::poll_fn;
use http_body::{Body as _, Frame, SizeHint};
use tonic::{Status, body::Body, codegen::http::Response};

use crate::limit::{Account, Permit, connection::Answer};

/// Size of a part, in bytes.
const PART_BYTES: usize = 16 * 1024;
/// Responses up to this size, in bytes, are sent even when the caller has no room left: the call
/// may have changed something.
pub(super) const ALWAYS_ALLOWED_BYTES: usize = 64 * 1024;

/// Charges for a response, and holds `share` until its end. `is_unary` tells for a body of unknown
/// size whether it has a single message.
///
/// # Errors
/// `RESOURCE_EXHAUSTED` when the response is large and the caller has too much unread data.
pub(super) async fn charge(
    account: &Account,
    share: Option<Permit>,
    response: Response<Body>,
    is_unary: impl FnOnce() -> bool,
) -> Result<Response<Body>, Status> {
    if response.body().is_end_stream() {
        return Ok(response);
    }
    let (head, mut body) = response.into_parts();
    let has_size = body.size_hint().exact().is_some();
    // A complete body is in memory, whether the client reads it or not.
    let first = poll_fn(|context| Poll::Ready(Pin::new(&mut body).poll_frame(context))).await;
    let mut charged = ChargedBody {
        remaining: Bytes::new(),
        next: None,
        body,
        answer: account.connection().answer(account),
        _share: share,
    };
    match first {
        Poll::Pending => charged.answer.wait(),
        Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
            Ok(data) => {
                if data.len() > ALWAYS_ALLOWED_BYTES && (has_size || is_unary()) {
                    account.check_answer(data.len())?;
                }
                charged.answer.add(data.len());
                charged.remaining = data;
            }
            Err(frame) => charged.next = Some(Some(Ok(frame))),
        },
        Poll::Ready(other) => charged.next = Some(other),
    }
    Ok(Response::from_parts(head, Body::new(charged)))
}

struct ChargedBody {
    /// What to yield before the next frame.
    remaining: Bytes,
    /// The frame that was already read from the body.
    next: Option<Option<Result<Frame<Bytes>, Status>>>,
    body: Body,
    answer: Arc<Answer>,
    _share: Option<Permit>,
}

impl http_body::Body for ChargedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        loop {
            if !this.remaining.is_empty() {
                let part = this.remaining.split_to(this.remaining.len().min(PART_BYTES));
                return Poll::Ready(Some(Ok(Frame::data(this.answer.part(part)))));
            }
            let next = match this.next.take() {
                Some(next) => next,
                None => match Pin::new(&mut this.body).poll_frame(context) {
                    Poll::Ready(next) => next,
                    Poll::Pending => {
                        this.answer.wait();
                        return Poll::Pending;
                    }
                },
            };
            match next {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        this.answer.add(data.len());
                        this.remaining = data;
                    }
                    Err(frame) => return Poll::Ready(Some(Ok(frame))),
                },
                end => return Poll::Ready(end),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.remaining.is_empty() && self.next.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (remaining, body) = (self.remaining.len() as u64, self.body.size_hint());
        let mut hint = SizeHint::new();
        hint.set_lower(remaining.saturating_add(body.lower()));
        if let Some(upper) = body.upper().and_then(|upper| upper.checked_add(remaining)) {
            hint.set_upper(upper);
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use construct_domain::OrganizationId;
    use futures::stream;
    use http_body_util::{BodyExt as _, Full, StreamBody};
    use tonic::Code;
    use uuid::Uuid;

    use super::*;
    use crate::{
        Config,
        limit::{Capacity, Holder, connection::Connection},
    };

    fn account(capacity: &Arc<Capacity>, organization: u128) -> Account {
        let account =
            Account::new(Arc::clone(capacity), Connection::uncounted(), Holder::Shared, false);
        account
            .identify(OrganizationId::from_uuid(Uuid::from_u128(organization)))
            .expect("it has nothing unread");
        account
    }

    fn full_response(bytes: usize) -> Response<Body> {
        Response::new(Body::new(Full::new(Bytes::from(vec![7; bytes]))))
    }

    #[tokio::test]
    async fn response_is_charged_until_its_parts_are_read() {
        let capacity = Arc::new(Capacity::new(&Config::default()));
        let account = account(&capacity, 1);
        let mut answer = charge(&account, None, full_response(3 * PART_BYTES + 1), || true)
            .await
            .expect("there is room")
            .into_body();
        assert_eq!(answer.size_hint().exact(), Some(3 * PART_BYTES as u64 + 1));
        let mut parts = Vec::new();
        while let Some(frame) = answer.frame().await {
            parts.push(frame.expect("it is data").into_data().expect("it is data"));
        }
        drop(answer);
        assert_eq!(
            parts.iter().map(Bytes::len).collect::<Vec<_>>(),
            [PART_BYTES, PART_BYTES, PART_BYTES, 1]
        );
        let others = account.answer((24 << 20) - 4 * PART_BYTES);
        assert!(account.check_answer(PART_BYTES).is_err());
        parts.pop();
        parts.pop();
        assert!(account.check_answer(PART_BYTES).is_ok());
        drop(others);
    }

    #[tokio::test]
    async fn large_response_is_refused_for_slow_reader() {
        let capacity = Arc::new(Capacity::new(&Config::default()));
        let (one, other) = (account(&capacity, 1), account(&capacity, 2));
        let unread = one.answer((24 << 20) - ALWAYS_ALLOWED_BYTES);
        let refused = charge(&one, None, full_response(ALWAYS_ALLOWED_BYTES + 1), || true)
            .await
            .expect_err("there is no room");
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert!(
            charge(&one, None, full_response(ALWAYS_ALLOWED_BYTES), || true).await.is_ok(),
            "a small one may tell what was done"
        );
        assert!(
            charge(&other, None, full_response(ALWAYS_ALLOWED_BYTES + 1), || true).await.is_ok(),
            "others read"
        );
        // A response that has begun continues.
        let pieces = stream::iter([Ok::<_, Status>(Frame::data(Bytes::from(vec![
            7;
            ALWAYS_ALLOWED_BYTES
                + 1
        ])))]);
        let response = Response::new(Body::new(StreamBody::new(pieces)));
        assert!(charge(&one, None, response, || false).await.is_ok());
        drop(unread);
    }
}

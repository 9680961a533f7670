//! An answer on its way out: charged to whoever asked for it until they have read it.
//!
//! It goes to the connection in small parts, each of which is free when the client has read it. So
//! it is known how much of all answers is in memory, and which clients do not read
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

use crate::limit::{Account, Share, connection::Answer};

/// Bytes of a part.
const PART: usize = 16 * 1024;
/// Bytes up to which an answer is given whether there is room for it or not: the call may have
/// changed something.
pub(super) const SMALL: usize = 64 * 1024;

/// Charges for an answer, and keeps `share` until its end. `is_whole` tells of a body of unknown
/// size whether it has one message only.
///
/// # Errors
/// `RESOURCE_EXHAUSTED` when the answer is large, and its caller leaves too much unread already.
pub(super) async fn charge(
    account: &Account,
    share: Option<Share>,
    response: Response<Body>,
    is_whole: impl FnOnce() -> bool,
) -> Result<Response<Body>, Status> {
    if response.body().is_end_stream() {
        return Ok(response);
    }
    let (head, mut body) = response.into_parts();
    let has_size = body.size_hint().exact().is_some();
    // What is there now is in memory, whether the client reads or not.
    let first = poll_fn(|context| Poll::Ready(Pin::new(&mut body).poll_frame(context))).await;
    let mut charged = Charged {
        rest: Bytes::new(),
        next: None,
        body,
        answer: account.connection().answer(account),
        _share: share,
    };
    match first {
        Poll::Pending => charged.answer.wait(),
        Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
            Ok(data) => {
                if data.len() > SMALL && (has_size || is_whole()) {
                    account.check_answer(data.len())?;
                }
                charged.answer.add(data.len());
                charged.rest = data;
            }
            Err(frame) => charged.next = Some(Some(Ok(frame))),
        },
        Poll::Ready(other) => charged.next = Some(other),
    }
    Ok(Response::from_parts(head, Body::new(charged)))
}

struct Charged {
    /// What has to be handed out before the next frame.
    rest: Bytes,
    /// What the body has said already.
    next: Option<Option<Result<Frame<Bytes>, Status>>>,
    body: Body,
    answer: Arc<Answer>,
    _share: Option<Share>,
}

impl http_body::Body for Charged {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        loop {
            if !this.rest.is_empty() {
                let part = this.rest.split_to(this.rest.len().min(PART));
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
                        this.rest = data;
                    }
                    Err(frame) => return Poll::Ready(Some(Ok(frame))),
                },
                end => return Poll::Ready(end),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.next.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, body) = (self.rest.len() as u64, self.body.size_hint());
        let mut hint = SizeHint::new();
        hint.set_lower(rest.saturating_add(body.lower()));
        if let Some(upper) = body.upper().and_then(|upper| upper.checked_add(rest)) {
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

    fn whole(bytes: usize) -> Response<Body> {
        Response::new(Body::new(Full::new(Bytes::from(vec![7; bytes]))))
    }

    #[tokio::test]
    async fn answer_is_handed_out_in_parts_and_charged_until_they_are_gone() {
        let capacity = Arc::new(Capacity::new(&Config::default()));
        let account = account(&capacity, 1);
        let mut answer = charge(&account, None, whole(3 * PART + 1), || true)
            .await
            .expect("there is room")
            .into_body();
        assert_eq!(answer.size_hint().exact(), Some(3 * PART as u64 + 1));
        let mut parts = Vec::new();
        while let Some(frame) = answer.frame().await {
            parts.push(frame.expect("it is data").into_data().expect("it is data"));
        }
        drop(answer);
        assert_eq!(parts.iter().map(Bytes::len).collect::<Vec<_>>(), [PART, PART, PART, 1]);
        let others = account.answer((24 << 20) - 4 * PART);
        assert!(account.check_answer(PART).is_err());
        parts.pop();
        parts.pop();
        assert!(account.check_answer(PART).is_ok());
        drop(others);
    }

    #[tokio::test]
    async fn large_answer_is_refused_to_who_leaves_too_much_unread() {
        let capacity = Arc::new(Capacity::new(&Config::default()));
        let (one, other) = (account(&capacity, 1), account(&capacity, 2));
        let unread = one.answer((24 << 20) - SMALL);
        let refused =
            charge(&one, None, whole(SMALL + 1), || true).await.expect_err("there is no room");
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert!(
            charge(&one, None, whole(SMALL), || true).await.is_ok(),
            "a small one may tell what was done"
        );
        assert!(charge(&other, None, whole(SMALL + 1), || true).await.is_ok(), "others read");
        // What has begun goes on.
        let pieces = stream::iter([Ok::<_, Status>(Frame::data(Bytes::from(vec![7; SMALL + 1])))]);
        let response = Response::new(Body::new(StreamBody::new(pieces)));
        assert!(charge(&one, None, response, || false).await.is_ok());
        drop(unread);
    }
}

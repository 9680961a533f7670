//! Calls the model, through the same router as every turn. The only place of the proxy that does.
//!
//! A failure before any part of the answer was sent is retried, also at other targets. After that
//! the client is told, because nothing can be withdrawn from it.

use std::sync::Arc;

use async_trait::async_trait;
use construct_proto::mesh::v1::FailureClass;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::{routes::Route, serve::RequestPermit, spending::CallReservation};
use crate::{
    cancels::{CancelSignal, StepGuard},
    failure::Failure,
    router::{CallEnd, Interrupts, RoutedCall, Router, Sink},
    vendor::{Chunk, Request},
};

/// Chunks buffered for a slow client; beyond that, the vendor waits too.
const CHANNEL_CAPACITY: usize = 64;

/// One model call. Dropping it closes the vendor's connection; the usage until then is settled.
pub(crate) struct Call {
    events: mpsc::Receiver<CallEvent>,
    cancel: CancelSignal,
}

enum CallEvent {
    Chunk(Chunk),
    Failed(Failure),
    End,
}

impl Call {
    /// Starts the call. `reservation` pays for it; `permit` is released at its end. `guard` ends it
    /// with its task.
    pub(crate) fn start(
        router: &Router,
        route: &Route,
        request: Arc<Request>,
        deadline: Instant,
        mut reservation: CallReservation,
        permit: RequestPermit,
        guard: Option<StepGuard>,
    ) -> Self {
        let (sender, events) = mpsc::channel(CHANNEL_CAPACITY);
        let cancel = guard.as_ref().map(|guard| guard.cancel.clone()).unwrap_or_default();
        let (router, targets, hedge_after, cancelled) = (
            router.clone(),
            route.ordered_targets(!request.tools.is_empty()),
            route.hedge_after,
            cancel.clone(),
        );
        let calling = async move {
            let provider_id = request.origin.provider_id.clone();
            let mut sink = ClientSink {
                sender,
                pending: Vec::new(),
                is_committed: false,
                provider_id,
                is_fallback: false,
                deadline,
            };
            let interrupts =
                Interrupts { cancel: &cancelled, deadline, hand_back: CancellationToken::new() };
            let call = RoutedCall {
                request,
                targets,
                hedge_after,
                attempts: 0,
                lost_calls: 0,
                interrupts,
            };
            let routed = router.call(call, &mut sink).await;
            // Before the client learns of the end, so that a following query of the spending
            // includes this call.
            reservation.settle(routed.usage);
            drop((reservation, permit, guard));
            sink.end(routed.end).await;
        };
        tokio::spawn(calling.in_current_span());
        Self { events, cancel }
    }

    /// The next chunk of the answer; none at its end.
    pub(crate) async fn next(&mut self) -> Option<Result<Chunk, Failure>> {
        match self.events.recv().await {
            Some(CallEvent::Chunk(chunk)) => Some(Ok(chunk)),
            Some(CallEvent::Failed(failure)) => Some(Err(failure)),
            Some(CallEvent::End) => None,
            None => Some(Err(Failure::internal("the call ended without a word"))),
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.cancel.cancel("the client is gone");
    }
}

/// Sends an answer to the client, from its first content.
struct ClientSink {
    sender: mpsc::Sender<CallEvent>,
    /// Chunks that can still be withdrawn: no content has arrived.
    pending: Vec<Chunk>,
    is_committed: bool,
    /// The provider whose thinking the client can send back.
    provider_id: String,
    /// Whether a fallback answers.
    is_fallback: bool,
    /// A client that does not read must not keep the call for longer.
    deadline: Instant,
}

impl ClientSink {
    async fn send_pending(&mut self) -> Result<(), Failure> {
        for chunk in self.pending.drain(..) {
            // The send fails when the client has disconnected, and then the call is canceled.
            let sent = timeout_at(self.deadline, self.sender.send(CallEvent::Chunk(chunk))).await;
            if !matches!(sent, Ok(Ok(()))) {
                return Err(Failure::new(
                    FailureClass::DeadlineExceeded,
                    "nobody takes the answer any more",
                ));
            }
        }
        Ok(())
    }

    async fn end(mut self, ended: CallEnd) {
        let last = match ended {
            // An answer may be empty.
            CallEnd::Completed => self.send_pending().await.map(|()| CallEvent::End),
            CallEnd::Failed(failure) => Ok(CallEvent::Failed(failure)),
            // A client that has disconnected receives nothing.
            CallEnd::Cancelled { reason } => Ok(CallEvent::Failed(canceled_with_task(&reason))),
            CallEnd::HandedBack => return,
        };
        if let Ok(last) = last {
            // As above.
            let _ = timeout_at(self.deadline, self.sender.send(last)).await;
        }
    }
}

/// The failure of a call whose task was canceled.
pub(crate) fn canceled_with_task(reason: &str) -> Failure {
    Failure::new(
        FailureClass::DeadlineExceeded,
        format!("the call was ended with its task: {reason}"),
    )
}

#[async_trait]
impl Sink for ClientSink {
    fn begin(&mut self, request: &Request) {
        self.pending.clear();
        self.is_fallback = request.origin.provider_id != self.provider_id;
    }

    async fn push(&mut self, chunk: Chunk) -> Result<(), Failure> {
        // Only the provider that the client named can open it later.
        if self.is_fallback && matches!(chunk, Chunk::ThinkingData(_)) {
            return Ok(());
        }
        self.is_committed |= chunk.is_answer_content();
        self.pending.push(chunk);
        if self.is_committed { self.send_pending().await } else { Ok(()) }
    }

    fn due(&self) -> Option<Instant> {
        None
    }

    async fn flush(&mut self) {}

    async fn discard(&mut self, _failure: &Failure) -> bool {
        self.pending.clear();
        !self.is_committed
    }
}

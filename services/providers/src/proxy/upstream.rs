//! Calls the model, through the same routing as every turn. The one place of the proxy that does.
//!
//! What fails before anything of the answer was passed on is tried again, elsewhere too; after that
//! the client is told, because nothing can be taken back from it.

use std::sync::Arc;

use async_trait::async_trait;
use construct_proto::mesh::v1::FailureClass;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::{models::Route, serve::RequestPermit, spending::CallReservation};
use crate::{
    cancels::{CancelSignal, StepGuard},
    failure::Failure,
    router::{CallEnd, Interrupts, RoutedCall, Router, Sink},
    vendor::{Chunk, Request},
};

/// Pieces that wait for a slow client; then the vendor waits, too.
const CHANNEL_CAPACITY: usize = 64;

/// One call of a model. Dropping it closes the vendor's connection; what was used until then is
/// settled.
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
    /// Begins to call. `reservation` pays for it; `permit` is given back at its end. `guard` ends it with
    /// its task.
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
            let call = RoutedCall { request, targets, hedge_after, tries: 0, lost_calls: 0, interrupts };
            let routed = router.call(call, &mut sink).await;
            // Before the client learns of the end: who asks then what was spent is told all of it.
            reservation.settle(routed.usage);
            drop((reservation, permit, guard));
            sink.end(routed.end).await;
        };
        tokio::spawn(calling.in_current_span());
        Self { events, cancel }
    }

    /// The next piece of the answer; none at its end.
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

/// Passes an answer on, from its first words.
struct ClientSink {
    sender: mpsc::Sender<CallEvent>,
    /// What may still be taken back: nothing of the answer has come.
    pending: Vec<Chunk>,
    is_committed: bool,
    /// Whose thoughts the client can give back.
    provider_id: String,
    /// Whether another one answers.
    is_fallback: bool,
    /// A client that takes nothing must not reservation the call for longer.
    deadline: Instant,
}

impl ClientSink {
    async fn send_pending(&mut self) -> Result<(), Failure> {
        for chunk in self.pending.drain(..) {
            // Nobody takes it when the client is gone, and then the call is cancelled.
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
            // An answer without a word is one, too.
            CallEnd::Completed => self.send_pending().await.map(|()| CallEvent::End),
            CallEnd::Failed(failure) => Ok(CallEvent::Failed(failure)),
            // Who has gone hears nothing.
            CallEnd::Cancelled { reason } => Ok(CallEvent::Failed(canceled_with_task(&reason))),
            CallEnd::HandedBack => return,
        };
        if let Ok(last) = last {
            // As above.
            let _ = timeout_at(self.deadline, self.sender.send(last)).await;
        }
    }
}

/// What the client of a call is told whose task was given up.
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
        // Only whom the client named can open it when it comes back.
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

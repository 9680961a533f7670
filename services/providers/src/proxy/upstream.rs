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

use super::{models::Route, serve::Permit, spending::Hold};
use crate::{
    cancels::{Cancel, Guard},
    failure::Failure,
    router::{Ended, Interrupts, RoutedCall, Router, Sink},
    vendor::{Chunk, Request},
};

/// Pieces that wait for a slow client; then the vendor waits, too.
const WAITING: usize = 64;

/// One call of a model. Dropping it closes the vendor's connection; what was used until then is
/// settled.
pub(crate) struct Call {
    said: mpsc::Receiver<Said>,
    cancel: Cancel,
}

enum Said {
    Chunk(Chunk),
    Failed(Failure),
    Over,
}

impl Call {
    /// Begins to call. `hold` pays for it; `permit` is given back at its end. `guard` ends it with
    /// its task.
    pub(crate) fn start(
        router: &Router,
        route: &Route,
        request: Arc<Request>,
        deadline: Instant,
        mut hold: Hold,
        permit: Permit,
        guard: Option<Guard>,
    ) -> Self {
        let (sender, said) = mpsc::channel(WAITING);
        let cancel = guard.as_ref().map(|guard| guard.cancel.clone()).unwrap_or_default();
        let (router, targets, hedge_after, cancelled) = (
            router.clone(),
            route.in_order(!request.tools.is_empty()),
            route.hedge_after,
            cancel.clone(),
        );
        let calling = async move {
            let provider_id = request.origin.provider_id.clone();
            let mut pieces = Pieces {
                sender,
                held: Vec::new(),
                shown: false,
                provider_id,
                foreign: false,
                deadline,
            };
            let interrupts =
                Interrupts { cancel: &cancelled, deadline, hand_back: CancellationToken::new() };
            let call = RoutedCall { request, targets, hedge_after, tries: 0, lost: 0, interrupts };
            let routed = router.call(call, &mut pieces).await;
            // Before the client learns of the end: who asks then what was spent is told all of it.
            hold.settle(routed.usage);
            drop((hold, permit, guard));
            pieces.end(routed.ended).await;
        };
        tokio::spawn(calling.in_current_span());
        Self { said, cancel }
    }

    /// The next piece of the answer; none at its end.
    pub(crate) async fn next(&mut self) -> Option<Result<Chunk, Failure>> {
        match self.said.recv().await {
            Some(Said::Chunk(chunk)) => Some(Ok(chunk)),
            Some(Said::Failed(failure)) => Some(Err(failure)),
            Some(Said::Over) => None,
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
struct Pieces {
    sender: mpsc::Sender<Said>,
    /// What may still be taken back: nothing of the answer has come.
    held: Vec<Chunk>,
    shown: bool,
    /// Whose thoughts the client can give back.
    provider_id: String,
    /// Whether another one answers.
    foreign: bool,
    /// A client that takes nothing must not hold the call for longer.
    deadline: Instant,
}

impl Pieces {
    async fn show(&mut self) -> Result<(), Failure> {
        for chunk in self.held.drain(..) {
            // Nobody takes it when the client is gone, and then the call is cancelled.
            let sent = timeout_at(self.deadline, self.sender.send(Said::Chunk(chunk))).await;
            if !matches!(sent, Ok(Ok(()))) {
                return Err(Failure::new(
                    FailureClass::DeadlineExceeded,
                    "nobody takes the answer any more",
                ));
            }
        }
        Ok(())
    }

    async fn end(mut self, ended: Ended) {
        let last = match ended {
            // An answer without a word is one, too.
            Ended::Completed => self.show().await.map(|()| Said::Over),
            Ended::Failed(failure) => Ok(Said::Failed(failure)),
            // Who has gone hears nothing.
            Ended::Cancelled { reason } => Ok(Said::Failed(given_up(&reason))),
            Ended::HandedBack => return,
        };
        if let Ok(last) = last {
            // As above.
            let _ = timeout_at(self.deadline, self.sender.send(last)).await;
        }
    }
}

/// What the client of a call is told whose task was given up.
pub(crate) fn given_up(reason: &str) -> Failure {
    Failure::new(
        FailureClass::DeadlineExceeded,
        format!("the call was ended with its task: {reason}"),
    )
}

#[async_trait]
impl Sink for Pieces {
    fn begin(&mut self, request: &Request) {
        self.held.clear();
        self.foreign = request.origin.provider_id != self.provider_id;
    }

    async fn push(&mut self, chunk: Chunk) -> Result<(), Failure> {
        // Only whom the client named can open it when it comes back.
        if self.foreign && matches!(chunk, Chunk::ThinkingData(_)) {
            return Ok(());
        }
        self.shown |= chunk.begins_an_answer();
        self.held.push(chunk);
        if self.shown { self.show().await } else { Ok(()) }
    }

    fn due(&self) -> Option<Instant> {
        None
    }

    async fn flush(&mut self) {}

    async fn void(&mut self, _failure: &Failure) -> bool {
        self.held.clear();
        !self.shown
    }
}

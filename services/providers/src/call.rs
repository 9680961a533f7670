//! Streams the answer of one model call as live text, and collects its blocks.

use async_trait::async_trait;
use construct_domain::money::Usage;
use construct_proto::v1;
use tokio::time::Instant;

use crate::{
    answer::{Answer, CompletedAnswer},
    delta::Deltas,
    failure::Failure,
    router::{CallEnd, RoutedCall, Router, Sink},
    vendor::{Chunk, Request},
};

/// How a call ended.
#[derive(Debug, PartialEq)]
pub(crate) enum Outcome {
    Completed(CompletedAnswer),
    Failed(Failure),
    Cancelled {
        reason: String,
        /// The text that had arrived.
        partial: Vec<v1::Block>,
    },
    HandedBack,
}

impl Outcome {
    /// The outcome of a call that ended before its answer began.
    pub(crate) fn from_call_end(ended: CallEnd) -> Self {
        match ended {
            CallEnd::Completed => {
                Self::Failed(Failure::internal("an answer ended that had not begun"))
            }
            CallEnd::Failed(failure) => Self::Failed(failure),
            CallEnd::Cancelled { reason } => Self::Cancelled { reason, partial: Vec::new() },
            CallEnd::HandedBack => Self::HandedBack,
        }
    }
}

/// Makes a call and streams its answer. Returns the outcome, the usage with its cost, and the id of
/// the model that answered or was called last.
pub(crate) async fn answer(
    router: &Router,
    call: RoutedCall<'_>,
    deltas: &mut Deltas<'_>,
) -> (Outcome, Usage, String) {
    let mut sink = AnswerSink { deltas, answer: None };
    let routed = router.call(call, &mut sink).await;
    let outcome = match (routed.end, sink.answer) {
        (CallEnd::Completed, Some(answer)) => Outcome::Completed(CompletedAnswer {
            input_tokens: routed.input_tokens,
            ..answer.complete()
        }),
        (CallEnd::Cancelled { reason }, Some(answer)) => {
            Outcome::Cancelled { reason, partial: answer.partial_blocks() }
        }
        (ended, _) => Outcome::from_call_end(ended),
    };
    (outcome, routed.usage, routed.model_id)
}

struct AnswerSink<'a, 'd> {
    deltas: &'a mut Deltas<'d>,
    answer: Option<Answer>,
}

#[async_trait]
impl Sink for AnswerSink<'_, '_> {
    fn begin(&mut self, request: &Request) {
        self.answer = Some(Answer::new(request));
    }

    async fn push(&mut self, chunk: Chunk) -> Result<(), Failure> {
        let Some(answer) = &mut self.answer else {
            return Err(Failure::internal("an answer goes on that had not begun"));
        };
        if let Some(visible) = answer.push(chunk)? {
            self.deltas.push(visible).await;
        }
        Ok(())
    }

    fn due(&self) -> Option<Instant> {
        self.deltas.due()
    }

    async fn flush(&mut self) {
        self.deltas.flush().await;
    }

    async fn discard(&mut self, failure: &Failure) -> bool {
        self.answer = None;
        self.deltas.restart(format!("the model call failed: {failure}")).await;
        true
    }
}

#[cfg(test)]
pub(crate) mod tests;

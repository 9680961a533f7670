//! One model call: tries, pauses and what interrupts them.

use std::{sync::Arc, time::Duration};

use construct_domain::money::Usage;
use construct_proto::mesh::v1::FailureClass;
use futures::StreamExt as _;
use jiff::Timestamp;
use secrecy::{ExposeSecret as _, SecretString};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::{
    answer::{Answer, Completed},
    cancels::Cancel,
    delta::Deltas,
    failure::Failure,
    retry::Policy,
    vendor::{Request, Vendor},
};

/// A call to make.
pub(crate) struct Call<'a> {
    pub(crate) vendor: &'a dyn Vendor,
    /// The vendor's key, which must not appear in what is said of a failure.
    pub(crate) key: Option<&'a SecretString>,
    pub(crate) request: Arc<Request>,
    pub(crate) policy: Policy,
    pub(crate) interrupts: Interrupts<'a>,
}

/// What ends a call before its answer does.
pub(crate) struct Interrupts<'a> {
    pub(crate) cancel: &'a Cancel,
    pub(crate) deadline: Instant,
    /// The process is about to stop: another one takes the command over.
    pub(crate) hand_back: CancellationToken,
}

/// How a call ended.
#[derive(Debug, PartialEq)]
pub(crate) enum Outcome {
    Completed(Completed),
    Failed(Failure),
    Cancelled { reason: String },
    HandedBack,
}

impl Call<'_> {
    /// Makes the call. The usage counts every try, each at the prices that hold for it.
    pub(crate) async fn run(&self, deltas: &mut Deltas<'_>) -> (Outcome, Usage) {
        let mut spent = Usage::default();
        let mut failed = 0;
        loop {
            let mut answer = Answer::new(&self.request);
            let tried = self.attempt(&mut answer, deltas).await;
            let failure = match tried {
                Ok(()) => {
                    deltas.flush().await;
                    spent += answer.usage(true);
                    return (Outcome::Completed(answer.complete()), spent);
                }
                Err(End::Failed(failure)) => failure,
                Err(End::Interrupted(mut outcome)) => {
                    spent += answer.usage(false);
                    deltas.flush().await;
                    if let Outcome::Failed(failure) = &mut outcome {
                        failure.tries = failed + 1;
                    }
                    return (outcome, spent);
                }
            };
            spent += answer.usage(false);
            failed += 1;
            let mut failure = failure.scrubbed(self.key.map(|key| key.expose_secret()));
            failure.tries = failed;
            // Also when nothing follows here: what was shown of this step never becomes a message.
            deltas.restart(format!("the model call failed: {failure}")).await;
            let left = self.interrupts.deadline.saturating_duration_since(Instant::now());
            let Some(pause) = self.policy.pause(failed, &failure, left, Timestamp::now(), fastrand::f64()) else {
                return (Outcome::Failed(failure), spent);
            };
            tracing::info!(
                class = failure.class.as_str_name(),
                http.status = failure.http_status,
                pause_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX),
                failed,
                "a model call failed and is tried again: {failure}"
            );
            if let Some(mut outcome) = self.rest(pause).await {
                if let Outcome::Failed(failure) = &mut outcome {
                    failure.tries = failed;
                }
                return (outcome, spent);
            }
        }
    }

    async fn attempt(&self, answer: &mut Answer, deltas: &mut Deltas<'_>) -> Result<(), End> {
        let mut chunks = self.vendor.invoke(Arc::clone(&self.request));
        loop {
            let due = deltas.due();
            tokio::select! {
                // In this order, so that a vendor that never pauses can neither outrun a cancel nor hold text back.
                biased;
                outcome = self.interrupts.next() => return Err(End::Interrupted(outcome)),
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => deltas.flush().await,
                chunk = chunks.next() => match chunk {
                    None => return Ok(()),
                    Some(Err(failure)) => return Err(End::Failed(failure)),
                    Some(Ok(chunk)) => {
                        if let Some(visible) = answer.push(chunk).map_err(End::Failed)? {
                            deltas.push(visible).await;
                        }
                    }
                },
            }
        }
    }

    /// Waits; gives how the call ended when it did meanwhile.
    async fn rest(&self, pause: Duration) -> Option<Outcome> {
        tokio::select! {
            biased;
            outcome = self.interrupts.next() => Some(outcome),
            () = sleep(pause) => None,
        }
    }
}

impl Interrupts<'_> {
    async fn next(&self) -> Outcome {
        tokio::select! {
            biased;
            reason = self.cancel.cancelled() => Outcome::Cancelled { reason },
            () = sleep_until(self.deadline) => Outcome::Failed(Failure::new(
                FailureClass::DeadlineExceeded,
                "the model did not finish its answer before the step's deadline",
            )),
            () = self.hand_back.cancelled() => Outcome::HandedBack,
        }
    }
}

enum End {
    Failed(Failure),
    Interrupted(Outcome),
}

#[cfg(test)]
pub(crate) mod tests;

//! A call on its way through its targets.

use std::{
    mem,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use construct_domain::money::Usage;
use construct_proto::mesh::v1::FailureClass;
use construct_runtime::clock;
use futures::{StreamExt as _, future::select_all};
use tokio::time::{Instant, sleep, sleep_until};

use super::{Begin, Ended, NotBegun, Routed, RoutedCall, Router, Sink, Trying};
use crate::{
    failure::{self, Failure},
    keys::{self, KeyId},
    metrics::{self, Labels},
    vendor::{Chunk, Request},
};

pub(super) struct Run<'a> {
    router: &'a Router,
    call: RoutedCall<'a>,
    sink: &'a mut dyn Sink,
    spent: Usage,
    /// Tokens of input of the try that answered.
    input_tokens: i64,
    /// The target that answers, or was called last.
    at: usize,
    /// Calls that may still be made, over all targets.
    left: u32,
    /// Calls that were made.
    made: u32,
}

/// How a try ended.
enum End {
    Completed,
    Interrupted(Ended),
    Failed {
        failure: Failure,
        /// The key it was made with.
        key: KeyId,
        /// Another key may fare better.
        blames_key: bool,
    },
}

/// How a target ended: for the whole call, or only for itself.
enum Left {
    For(Ended),
    Failed(Failure),
}

impl<'a> Run<'a> {
    pub(super) fn new(router: &'a Router, call: RoutedCall<'a>, sink: &'a mut dyn Sink) -> Self {
        let left = router.allowed(call.tries);
        Self { router, call, sink, spent: Usage::default(), input_tokens: 0, at: 0, left, made: 0 }
    }

    pub(super) async fn finish(mut self) -> Routed {
        let ended = self.through_targets().await;
        self.sink.flush().await;
        let model_id = self
            .call
            .targets
            .get(self.at)
            .map(|target| target.model.id.clone())
            .unwrap_or_default();
        Routed { ended, usage: self.spent, input_tokens: self.input_tokens, model_id }
    }

    async fn through_targets(&mut self) -> Ended {
        let mut failures = Vec::new();
        let mut at = 0;
        while at < self.call.targets.len() {
            self.at = at;
            let failure = match self.target(at).await {
                Left::For(ended) => return ended,
                Left::Failed(failure) => failure,
            };
            let next = self.next_after(at, &failure).filter(|_| self.left > 0);
            if let Some(next) = next {
                tracing::warn!(
                    class = failure.class.as_str_name(),
                    gen_ai.request.model = self.call.targets[at].model.vendor_model,
                    fallback = self.call.targets[next].model.vendor_model,
                    "a model cannot answer, and its fallback is asked: {failure}"
                );
                let labels = Labels::new(&self.call.targets[at], &self.call.request);
                self.router.metrics.fell_back(&labels, failure.class);
            }
            failures.push((at, failure));
            at = next.unwrap_or(usize::MAX);
        }
        Ended::Failed(self.verdict(failures))
    }

    /// Who is asked after a target that cannot answer.
    fn next_after(&self, at: usize, failure: &Failure) -> Option<usize> {
        let targets = &self.call.targets;
        let mut rest = at + 1..targets.len();
        match failure.class {
            FailureClass::ContextTooLong => rest.find(|next| {
                targets[*next].model.context_window > targets[at].model.context_window
            }),
            FailureClass::InvalidRequest if failure.is_model_missing() => rest.next(),
            FailureClass::Transient
            | FailureClass::RateLimited
            | FailureClass::Overloaded
            | FailureClass::Authentication
            | FailureClass::Configuration => rest.next(),
            // Another model would be asked for what this one refused, or cannot understand either.
            FailureClass::InvalidRequest
            | FailureClass::ContentRefused
            | FailureClass::DeadlineExceeded
            | FailureClass::Internal
            | FailureClass::Unspecified => None,
        }
    }

    /// What is said when nobody answered: what the first one failed with for which another try may
    /// help; otherwise what the first one failed with, because it is the one that was asked for. Of
    /// several, its words are why each of them did not answer.
    fn verdict(&self, mut failures: Vec<(usize, Failure)>) -> Failure {
        if failures.is_empty() {
            return Failure::internal("the call names no model");
        }
        let words = failure::joined(
            failures.iter().map(|(at, failure)| (self.call.targets[*at].name(), failure)),
        );
        let count = failures.len();
        let at = failures.iter().position(|(_, failure)| failure.is_retryable()).unwrap_or(0);
        let (_, mut failure) = failures.swap_remove(at);
        failure.tries = self.made;
        if count > 1 {
            failure.message = words;
        }
        failure
    }

    async fn target(&mut self, at: usize) -> Left {
        let target = Arc::clone(&self.call.targets[at]);
        let request = addressed(&self.call, at);
        // Whoever comes behind is to be asked once at least.
        let behind = u32::try_from(self.call.targets.len() - at - 1).unwrap_or(u32::MAX);
        let lost = if at == 0 { self.call.lost } else { 0 };
        let policy = self.router.policy.within((self.left + lost).saturating_sub(behind).max(1));
        let is_last = at + 1 >= self.call.targets.len();
        // Tries go on where the worker before this one was lost, with one at least.
        let mut failed = lost.min(policy.tries.saturating_sub(1));
        let mut tried: Vec<KeyId> = Vec::new();
        // What the vendor said to the last of them.
        let mut said = None;
        loop {
            let left = self.time_left();
            let patience = if is_last { left } else { left.min(policy.longest_pause()) };
            let router = self.router;
            let begin = Begin { at, target: &target, request: &request, without: &tried, patience };
            let begun = tokio::select! {
                biased;
                ended = self.call.interrupts.next() => return Left::For(counted(ended, self.made)),
                begun = router.begin(begin) => begun,
            };
            let asked = begun.is_ok();
            let (mut failure, key, blames_key) = match begun {
                Ok(trying) => {
                    self.count();
                    match self.attempt(trying).await {
                        End::Completed => return Left::For(Ended::Completed),
                        End::Interrupted(ended) => return Left::For(counted(ended, self.made)),
                        End::Failed { failure, key, blames_key } => (failure, key, blames_key),
                    }
                }
                Err(NotBegun { failure, unopenable: Some(key) }) => (failure, key, true),
                Err(NotBegun { mut failure, unopenable: None }) => {
                    failure.tries = self.made;
                    return Left::Failed(failure);
                }
            };
            // Also when nothing follows here: what was shown of this answer never becomes a
            // message.
            if asked && !self.sink.void(&failure).await {
                failure.tries = self.made;
                return Left::For(Ended::Failed(failure));
            }
            if blames_key {
                tried.push(key);
                if tried.len() < keys::count(&target.provider) {
                    tracing::info!(
                        class = failure.class.as_str_name(),
                        http.status = failure.http_status,
                        "an API key cannot be used now, and the call is made with the next one: {failure}"
                    );
                    if asked {
                        // It is the same call.
                        self.made = self.made.saturating_sub(1);
                        self.left += 1;
                        said = Some(failure);
                    }
                    continue;
                }
                // All of them; after a pause they are as good as each other again.
                tried.clear();
                // Of a key that cannot be opened the vendor knows nothing: what it said to another
                // one may pass.
                if let Some(earlier) = said.take().filter(|_| !asked) {
                    self.count();
                    failure = earlier;
                }
            }
            failed += 1;
            failure.tries = self.made;
            let pause =
                policy.pause(failed, &failure, self.time_left(), clock::now(), fastrand::f64());
            let Some(pause) = pause.filter(|_| self.left > 0) else { return Left::Failed(failure) };
            tracing::info!(
                class = failure.class.as_str_name(),
                http.status = failure.http_status,
                pause_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX),
                failed,
                "a model call failed and is tried again: {failure}"
            );
            self.router.metrics.retried(&Labels::new(&target, &request), failure.class);
            tokio::select! {
                biased;
                ended = self.call.interrupts.next() => return Left::For(counted(ended, self.made)),
                () = sleep(pause) => {}
            }
        }
    }

    /// One try, with a hedge beside it when nothing comes.
    async fn attempt(&mut self, trying: Trying) -> End {
        let mut tryings = vec![trying];
        let next = tryings[0].at + 1;
        let can_hedge = next < self.call.targets.len() && self.left > 0;
        let mut hedge_at =
            self.call.hedge_after.filter(|_| can_hedge).map(|after| Instant::now() + after);
        let asked_for = tryings[0].at;
        let mut failed = None;
        let at = loop {
            let chunks = select_all(tryings.iter_mut().map(|trying| trying.chunks.next()));
            let (chunk, at) = tokio::select! {
                // In this order, so that a vendor that never pauses cannot outrun a cancel.
                biased;
                ended = self.call.interrupts.next() => {
                    for trying in tryings {
                        self.leave(trying);
                    }
                    return End::Interrupted(ended);
                }
                (chunk, at, _) = chunks => (chunk, at),
                () = sleep_until(hedge_at.unwrap_or_else(Instant::now)), if hedge_at.is_some() => {
                    hedge_at = None;
                    if let Some(hedge) = hedge(self.router, &self.call, next).await {
                        self.count();
                        tryings.push(hedge);
                    }
                    continue;
                }
            };
            match chunk {
                Some(Ok(chunk)) => {
                    let trying = &mut tryings[at];
                    trying.see(&chunk);
                    let begins = chunk.begins_an_answer();
                    trying.early.push(chunk);
                    if begins {
                        break at;
                    }
                }
                None => break at,
                Some(Err(failure)) => {
                    let trying = tryings.swap_remove(at);
                    let is_hedge = trying.at != asked_for;
                    let end = self.fail(trying, failure);
                    // Pauses and tries are about the model that was asked for, so that its failure
                    // is the one to tell.
                    let end = if is_hedge { failed.take() } else { Some(end) };
                    match end {
                        Some(end) if tryings.is_empty() => return end,
                        end => failed = end,
                    }
                }
            }
        };
        let trying = tryings.swap_remove(at);
        for lost in tryings {
            self.leave(lost);
        }
        self.at = trying.at;
        self.stream(trying).await
    }

    /// Passes on an answer that has begun.
    async fn stream(&mut self, mut trying: Trying) -> End {
        trying.permit.begun();
        let after = trying.began.elapsed();
        self.router.metrics.begun(&trying.labels, after);
        trying.trace.answers(after);
        self.sink.begin(&trying.request);
        for chunk in mem::take(&mut trying.early) {
            if let Err(failure) = self.sink.push(chunk).await {
                return self.fail(trying, failure);
            }
        }
        loop {
            let due = self.sink.due();
            tokio::select! {
                // In this order, so that a vendor that never pauses can neither outrun a cancel nor
                // hold text back.
                biased;
                ended = self.call.interrupts.next() => {
                    self.leave(trying);
                    return End::Interrupted(ended);
                }
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.sink.flush().await,
                chunk = trying.chunks.next() => {
                    let failed = match chunk {
                        None => {
                            self.spend(&mut trying, metrics::End::Answered);
                            trying.permit.answered();
                            return End::Completed;
                        }
                        Some(Ok(chunk)) => {
                            trying.see(&chunk);
                            self.sink.push(chunk).await.err()
                        }
                        Some(Err(failure)) => Some(failure),
                    };
                    if let Some(failure) = failed {
                        return self.fail(trying, failure);
                    }
                }
            }
        }
    }

    fn fail(&mut self, mut trying: Trying, failure: Failure) -> End {
        if failure.taken {
            trying.meter.taken();
        }
        self.spend(&mut trying, metrics::End::Failed(failure.class));
        let failure = trying.scrubbed(failure);
        let has_others = keys::count(&self.call.targets[trying.at].provider) > 1;
        let blames_key = trying.lease.failed(&failure, has_others);
        let key = Arc::clone(trying.lease.key());
        trying.permit.failed(&failure);
        End::Failed { failure, key, blames_key }
    }

    /// Ends a try that nobody waits for any more. That it was slow says nothing about the vendor's
    /// health.
    fn leave(&mut self, mut trying: Trying) {
        if trying.taken.load(Relaxed) {
            // It has read the request, and many vendors say only at the end what that was.
            trying.meter.taken();
        }
        self.spend(&mut trying, metrics::End::GivenUp);
    }

    fn spend(&mut self, trying: &mut Trying, end: metrics::End) {
        let complete = end == metrics::End::Answered;
        let usage = trying.meter.cost(complete, &self.call.targets[trying.at].prices());
        let written = usage.output_tokens.saturating_add(usage.cache_write_tokens);
        // What is read from the vendor's cache does not count toward most vendors' limits.
        trying.lease.used(usage.input_tokens.saturating_add(written));
        self.router.metrics.ended(&trying.labels, end, trying.began.elapsed(), &usage);
        trying.trace.end(end, &usage);
        if complete {
            let cached = usage.cache_read_tokens.saturating_add(usage.cache_write_tokens);
            self.input_tokens = usage.input_tokens.saturating_add(cached);
        }
        self.spent += usage;
    }

    /// A call of a vendor is made.
    fn count(&mut self) {
        self.made += 1;
        self.left = self.left.saturating_sub(1);
    }

    fn time_left(&self) -> Duration {
        self.call.interrupts.deadline.saturating_duration_since(Instant::now())
    }
}

/// A try at the next target, if that can be made at once.
async fn hedge(router: &Router, call: &RoutedCall<'_>, at: usize) -> Option<Trying> {
    let target = &call.targets[at];
    let request = addressed(call, at);
    let begin = Begin { at, target, request: &request, without: &[], patience: Duration::ZERO };
    let begun = router.begin(begin).await;
    let hedge = begun
        .inspect_err(|refused| tracing::debug!("no hedge is made: {}", refused.failure))
        .ok()?;
    tracing::info!(
        gen_ai.request.model = target.model.vendor_model,
        "nothing of an answer has come yet, and the next model is asked as well"
    );
    Some(hedge)
}

/// The request as one of the targets is asked it.
fn addressed(call: &RoutedCall<'_>, at: usize) -> Arc<Request> {
    // A transcript is large, and most calls never leave their first target.
    if at == 0 {
        return Arc::clone(&call.request);
    }
    let target = &call.targets[at];
    Arc::new(Request::clone(&call.request).addressed(&target.provider, &target.model))
}

impl Chunk {
    /// Whether the model has begun to answer. What a vendor says about tokens and names comes
    /// before it has.
    pub(crate) fn begins_an_answer(&self) -> bool {
        !matches!(self, Self::Usage(_) | Self::Named { .. })
    }
}

/// A failure with the calls that were made.
fn counted(mut ended: Ended, tries: u32) -> Ended {
    if let Ended::Failed(failure) = &mut ended {
        failure.tries = tries;
    }
    ended
}

//! The run of one call over its targets.

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

use super::{Attempt, AttemptParams, CallEnd, RoutedCall, RoutedResult, Router, Sink, StartError};
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
    usage: Usage,
    /// Input tokens of the attempt that answered.
    input_tokens: i64,
    /// The index of the target that answers, or was called last.
    at: usize,
    /// Calls that may still be made, over all targets.
    calls_left: u32,
    /// Calls that were made.
    calls_made: u32,
}

/// How an attempt ended.
enum AttemptEnd {
    Completed,
    Interrupted(CallEnd),
    Failed {
        failure: Failure,
        /// The key of the attempt.
        key: KeyId,
        /// Another key may work.
        blames_key: bool,
    },
}

/// How a target ended: for the whole call, or for this target alone.
enum TargetEnd {
    Call(CallEnd),
    Failed(Failure),
}

impl<'a> Run<'a> {
    pub(super) fn new(router: &'a Router, call: RoutedCall<'a>, sink: &'a mut dyn Sink) -> Self {
        let calls_left = router.max_calls(call.attempts);
        Self {
            router,
            call,
            sink,
            usage: Usage::default(),
            input_tokens: 0,
            at: 0,
            calls_left,
            calls_made: 0,
        }
    }

    pub(super) async fn finish(mut self) -> RoutedResult {
        let end = self.try_targets().await;
        self.sink.flush().await;
        let model_id = self
            .call
            .targets
            .get(self.at)
            .map(|target| target.model.id.clone())
            .unwrap_or_default();
        RoutedResult { end, usage: self.usage, input_tokens: self.input_tokens, model_id }
    }

    async fn try_targets(&mut self) -> CallEnd {
        let mut failures = Vec::new();
        let mut at = 0;
        while at < self.call.targets.len() {
            self.at = at;
            let failure = match self.try_target(at).await {
                TargetEnd::Call(ended) => return ended,
                TargetEnd::Failed(failure) => failure,
            };
            let next = self.next_target(at, &failure).filter(|_| self.calls_left > 0);
            if let Some(next) = next {
                tracing::warn!(
                    class = failure.class.as_str_name(),
                    gen_ai.request.model = self.call.targets[at].model.vendor_model,
                    fallback = self.call.targets[next].model.vendor_model,
                    "a model cannot answer, and its fallback is asked: {failure}"
                );
                let labels = Labels::new(&self.call.targets[at], &self.call.request);
                self.router.metrics.record_fallback(&labels, failure.class);
            }
            failures.push((at, failure));
            at = next.unwrap_or(usize::MAX);
        }
        CallEnd::Failed(self.combined_failure(failures))
    }

    /// The index of the next target after a failed one.
    fn next_target(&self, at: usize, failure: &Failure) -> Option<usize> {
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
            // Another model would be asked for the same refused content, or would not understand
            // the request either.
            FailureClass::InvalidRequest
            | FailureClass::ContentRefused
            | FailureClass::DeadlineExceeded
            | FailureClass::Internal
            | FailureClass::Unspecified => None,
        }
    }

    /// The failure to report when no target answered: the first retryable one, otherwise that of
    /// the first target, which was the requested one. For several targets, its message names the
    /// failure of each.
    fn combined_failure(&self, mut failures: Vec<(usize, Failure)>) -> Failure {
        if failures.is_empty() {
            return Failure::internal("the call names no model");
        }
        let message = failure::join_failures(
            failures.iter().map(|(at, failure)| (self.call.targets[*at].name(), failure)),
        );
        let count = failures.len();
        let at = failures.iter().position(|(_, failure)| failure.is_retryable()).unwrap_or(0);
        let (_, mut failure) = failures.swap_remove(at);
        failure.attempts = self.calls_made;
        if count > 1 {
            failure.message = message;
        }
        failure
    }

    async fn try_target(&mut self, at: usize) -> TargetEnd {
        let target = Arc::clone(&self.call.targets[at]);
        let request = request_for_target(&self.call, at);
        // Each later target gets at least one call.
        let behind = u32::try_from(self.call.targets.len() - at - 1).unwrap_or(u32::MAX);
        let lost = if at == 0 { self.call.lost_calls } else { 0 };
        let policy =
            self.router.policy.limited_to((self.calls_left + lost).saturating_sub(behind).max(1));
        let is_last = at + 1 >= self.call.targets.len();
        // Attempts continue where the lost worker stopped, with at least one.
        let mut failed = lost.min(policy.attempts.saturating_sub(1));
        let mut tried: Vec<KeyId> = Vec::new();
        // The vendor's failure with the last of the tried keys.
        let mut vendor_failure = None;
        loop {
            let left = self.time_left();
            let max_wait = if is_last { left } else { left.min(policy.max_requested_delay()) };
            let router = self.router;
            let params = AttemptParams {
                at,
                target: &target,
                request: &request,
                excluded_keys: &tried,
                max_wait,
            };
            let begun = tokio::select! {
                biased;
                ended = self.call.interrupts.wait() => return TargetEnd::Call(with_tries(ended, self.calls_made)),
                begun = router.start_attempt(params) => begun,
            };
            let asked = begun.is_ok();
            let (mut failure, key, blames_key) = match begun {
                Ok(attempt) => {
                    self.count_call();
                    match self.run_attempt(attempt).await {
                        AttemptEnd::Completed => return TargetEnd::Call(CallEnd::Completed),
                        AttemptEnd::Interrupted(ended) => {
                            return TargetEnd::Call(with_tries(ended, self.calls_made));
                        }
                        AttemptEnd::Failed { failure, key, blames_key } => {
                            (failure, key, blames_key)
                        }
                    }
                }
                Err(StartError { failure, unopenable_key: Some(key) }) => (failure, key, true),
                Err(StartError { mut failure, unopenable_key: None }) => {
                    failure.attempts = self.calls_made;
                    return TargetEnd::Failed(failure);
                }
            };
            // Also when nothing follows here: the visible part of this answer never becomes a
            // message.
            if asked && !self.sink.discard(&failure).await {
                failure.attempts = self.calls_made;
                return TargetEnd::Call(CallEnd::Failed(failure));
            }
            if blames_key {
                tried.push(key);
                if tried.len() < keys::key_count(&target.provider) {
                    tracing::info!(
                        class = failure.class.as_str_name(),
                        http.status = failure.http_status,
                        "an API key cannot be used now, and the call is made with the next one: {failure}"
                    );
                    if asked {
                        // It counts as the same call.
                        self.calls_made = self.calls_made.saturating_sub(1);
                        self.calls_left += 1;
                        vendor_failure = Some(failure);
                    }
                    continue;
                }
                // All keys failed. After a delay each of them may be tried again.
                tried.clear();
                // The vendor never saw a key that cannot be opened. Its failure with another key
                // may be transient.
                if let Some(earlier) = vendor_failure.take().filter(|_| !asked) {
                    self.count_call();
                    failure = earlier;
                }
            }
            failed += 1;
            failure.attempts = self.calls_made;
            let pause =
                policy.delay(failed, &failure, self.time_left(), clock::now(), fastrand::f64());
            let Some(pause) = pause.filter(|_| self.calls_left > 0) else {
                return TargetEnd::Failed(failure);
            };
            tracing::info!(
                class = failure.class.as_str_name(),
                http.status = failure.http_status,
                pause_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX),
                failed,
                "a model call failed and is tried again: {failure}"
            );
            self.router.metrics.record_retry(&Labels::new(&target, &request), failure.class);
            tokio::select! {
                biased;
                ended = self.call.interrupts.wait() => return TargetEnd::Call(with_tries(ended, self.calls_made)),
                () = sleep(pause) => {}
            }
        }
    }

    /// Runs one attempt, and a hedge beside it when no answer begins.
    async fn run_attempt(&mut self, attempt: Attempt) -> AttemptEnd {
        let mut attempts = vec![attempt];
        let next = attempts[0].at + 1;
        let can_hedge = next < self.call.targets.len() && self.calls_left > 0;
        let mut hedge_at =
            self.call.hedge_after.filter(|_| can_hedge).map(|after| Instant::now() + after);
        let asked_for = attempts[0].at;
        let mut failed = None;
        let at = loop {
            let chunks = select_all(attempts.iter_mut().map(|attempt| attempt.chunks.next()));
            let (chunk, at) = tokio::select! {
                // In this order, so that a vendor that never pauses cannot outrun a cancel.
                biased;
                ended = self.call.interrupts.wait() => {
                    for attempt in attempts {
                        self.abandon_attempt(attempt);
                    }
                    return AttemptEnd::Interrupted(ended);
                }
                (chunk, at, _) = chunks => (chunk, at),
                () = sleep_until(hedge_at.unwrap_or_else(Instant::now)), if hedge_at.is_some() => {
                    hedge_at = None;
                    if let Some(hedge) = start_hedge(self.router, &self.call, next).await {
                        self.count_call();
                        attempts.push(hedge);
                    }
                    continue;
                }
            };
            match chunk {
                Some(Ok(chunk)) => {
                    let attempt = &mut attempts[at];
                    attempt.observe(&chunk);
                    let begins = chunk.is_answer_content();
                    attempt.preamble.push(chunk);
                    if begins {
                        break at;
                    }
                }
                None => break at,
                Some(Err(failure)) => {
                    let attempt = attempts.swap_remove(at);
                    let is_hedge = attempt.at != asked_for;
                    let end = self.fail_attempt(attempt, failure);
                    // Delays and attempts concern the requested model, so its failure is the one to
                    // report.
                    let end = if is_hedge { failed.take() } else { Some(end) };
                    match end {
                        Some(end) if attempts.is_empty() => return end,
                        end => failed = end,
                    }
                }
            }
        };
        let attempt = attempts.swap_remove(at);
        for lost in attempts {
            self.abandon_attempt(lost);
        }
        self.at = attempt.at;
        self.stream_answer(attempt).await
    }

    /// Streams an answer that has begun.
    async fn stream_answer(&mut self, mut attempt: Attempt) -> AttemptEnd {
        attempt.permit.on_start();
        let after = attempt.started_at.elapsed();
        self.router.metrics.record_first_chunk(&attempt.labels, after);
        attempt.trace.record_first_chunk(after);
        self.sink.begin(&attempt.request);
        for chunk in mem::take(&mut attempt.preamble) {
            if let Err(failure) = self.sink.push(chunk).await {
                return self.fail_attempt(attempt, failure);
            }
        }
        loop {
            let due = self.sink.due();
            tokio::select! {
                // In this order, so that a vendor that never pauses cannot outrun a cancel or delay
                // a flush.
                biased;
                ended = self.call.interrupts.wait() => {
                    self.abandon_attempt(attempt);
                    return AttemptEnd::Interrupted(ended);
                }
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.sink.flush().await,
                chunk = attempt.chunks.next() => {
                    let failed = match chunk {
                        None => {
                            self.record_usage(&mut attempt, metrics::VendorCallEnd::Answered);
                            attempt.permit.on_success();
                            return AttemptEnd::Completed;
                        }
                        Some(Ok(chunk)) => {
                            attempt.observe(&chunk);
                            self.sink.push(chunk).await.err()
                        }
                        Some(Err(failure)) => Some(failure),
                    };
                    if let Some(failure) = failed {
                        return self.fail_attempt(attempt, failure);
                    }
                }
            }
        }
    }

    fn fail_attempt(&mut self, mut attempt: Attempt, failure: Failure) -> AttemptEnd {
        if failure.accepted {
            attempt.meter.mark_accepted();
        }
        self.record_usage(&mut attempt, metrics::VendorCallEnd::Failed(failure.class));
        let failure = attempt.scrubbed(failure);
        let has_others = keys::key_count(&self.call.targets[attempt.at].provider) > 1;
        let blames_key = attempt.lease.on_failure(&failure, has_others);
        let key = Arc::clone(attempt.lease.key());
        attempt.permit.on_failure(&failure);
        AttemptEnd::Failed { failure, key, blames_key }
    }

    /// Ends an attempt whose answer is not needed any more. Its slowness says nothing about the
    /// vendor's health.
    fn abandon_attempt(&mut self, mut attempt: Attempt) {
        if attempt.accepted.load(Relaxed) {
            // It has read the request, and many vendors report the usage only at the end.
            attempt.meter.mark_accepted();
        }
        self.record_usage(&mut attempt, metrics::VendorCallEnd::Abandoned);
    }

    fn record_usage(&mut self, attempt: &mut Attempt, end: metrics::VendorCallEnd) {
        let complete = end == metrics::VendorCallEnd::Answered;
        let usage = attempt.meter.cost(complete, &self.call.targets[attempt.at].prices());
        let written = usage.output_tokens.saturating_add(usage.cache_write_tokens);
        // Most vendors don't count tokens read from their cache toward their limits.
        attempt.lease.settle_tokens(usage.input_tokens.saturating_add(written));
        self.router.metrics.record_call(&attempt.labels, end, attempt.started_at.elapsed(), &usage);
        attempt.trace.end(end, &usage);
        if complete {
            let cached = usage.cache_read_tokens.saturating_add(usage.cache_write_tokens);
            self.input_tokens = usage.input_tokens.saturating_add(cached);
        }
        self.usage += usage;
    }

    /// Counts a vendor call.
    fn count_call(&mut self) {
        self.calls_made += 1;
        self.calls_left = self.calls_left.saturating_sub(1);
    }

    fn time_left(&self) -> Duration {
        self.call.interrupts.deadline.saturating_duration_since(Instant::now())
    }
}

/// Starts an attempt at the next target, if that is possible without a wait.
async fn start_hedge(router: &Router, call: &RoutedCall<'_>, at: usize) -> Option<Attempt> {
    let target = &call.targets[at];
    let request = request_for_target(call, at);
    let params = AttemptParams {
        at,
        target,
        request: &request,
        excluded_keys: &[],
        max_wait: Duration::ZERO,
    };
    let begun = router.start_attempt(params).await;
    let hedge = begun
        .inspect_err(|refused| tracing::debug!("no hedge is made: {}", refused.failure))
        .ok()?;
    tracing::info!(
        gen_ai.request.model = target.model.vendor_model,
        "nothing of an answer has come yet, and the next model is asked as well"
    );
    Some(hedge)
}

/// The request, addressed to one of the targets.
fn request_for_target(call: &RoutedCall<'_>, at: usize) -> Arc<Request> {
    // A transcript is large, and most calls never leave their first target.
    if at == 0 {
        return Arc::clone(&call.request);
    }
    let target = &call.targets[at];
    Arc::new(Request::clone(&call.request).for_target(&target.provider, &target.model))
}

impl Chunk {
    /// Whether the chunk is content of the answer. Usage and names precede it.
    pub(crate) fn is_answer_content(&self) -> bool {
        !matches!(self, Self::Usage(_) | Self::Named { .. })
    }
}

/// Sets the number of calls made in a failure.
fn with_tries(mut ended: CallEnd, attempts: u32) -> CallEnd {
    if let CallEnd::Failed(failure) = &mut ended {
        failure.attempts = attempts;
    }
    ended
}

//! Makes one model call: over the targets in their order, each with its keys, limits, breaker,
//! attempts and delays. Every model call of this service goes through [`Router::call`].
//!
//! All calls share the breakers, the limits of the keys and the connections; these live as long as
//! the process.

mod run;

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use async_trait::async_trait;
use construct_domain::money::{Prices, Usage};
use construct_proto::mesh::v1::{FailureClass, ModelTarget, Provider, Route};
use construct_runtime::MasterKeys;
use futures::{
    FutureExt as _,
    stream::{BoxStream, StreamExt as _},
};
use opentelemetry::metrics::Meter;
use secrecy::{ExposeSecret as _, SecretString};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::{
    answer,
    breaker::{self, Breakers, Permit},
    cancels::CancelSignal,
    failure::Failure,
    fenced_blocks,
    http::{Headroom, HeadroomObserver},
    keys::{KeyId, KeyRequest, Keys, Lease},
    meter,
    metrics::{Labels, Metrics},
    retry::Policy,
    sealed_key,
    trace::Trace,
    vendor::{self, Chunk, Request, Vendor, VendorFactory},
};

/// Calls for one answer at most, over all targets, where the caller does not say how many are left.
const MAX_ANSWER_CALLS: u32 = 5;

/// Makes model calls. Clones share everything.
#[derive(Clone)]
pub(crate) struct Router {
    vendors: Arc<dyn VendorFactory>,
    master_keys: MasterKeys,
    policy: Policy,
    breakers: Breakers,
    keys: Keys,
    metrics: Metrics,
}

/// A call to make.
pub(crate) struct RoutedCall<'a> {
    /// The request, addressed to the first target.
    pub(crate) request: Arc<Request>,
    /// The targets in the order they are tried; see [`ordered_targets`].
    pub(crate) targets: Vec<Arc<Target>>,
    /// The silence after which the next target is called as well.
    pub(crate) hedge_after: Option<Duration>,
    /// Vendor calls at most, over all targets, hedges included; 0: as many as one answer may take.
    pub(crate) attempts: u32,
    /// Calls that lost workers are assumed to have made for the same answer, not counted in
    /// `attempts`. They count as calls of the first target.
    pub(crate) lost_calls: u32,
    pub(crate) interrupts: Interrupts<'a>,
}

/// A model at a provider.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Target {
    pub(crate) provider: Provider,
    pub(crate) model: ModelTarget,
}

/// What ends a call before its answer does.
pub(crate) struct Interrupts<'a> {
    pub(crate) cancel: &'a CancelSignal,
    pub(crate) deadline: Instant,
    /// The process is about to stop, and another one takes the command over.
    pub(crate) hand_back: CancellationToken,
}

/// How a call ended.
#[derive(Debug, PartialEq)]
pub(crate) enum CallEnd {
    /// The sink has the complete answer.
    Completed,
    Failed(Failure),
    Cancelled {
        reason: String,
    },
    HandedBack,
}

/// The result of a call.
#[derive(Debug, PartialEq)]
pub(crate) struct RoutedResult {
    pub(crate) end: CallEnd,
    /// Everything that was used, failed attempts and lost hedges included, each at the prices of
    /// its model.
    pub(crate) usage: Usage,
    /// Input tokens, cached ones included, of the attempt that answered.
    pub(crate) input_tokens: i64,
    /// The id of the model that answered, or that was called last.
    pub(crate) model_id: String,
}

/// Receives an answer as it streams.
#[async_trait]
pub(crate) trait Sink: Send {
    /// An answer to `request` begins. What was pushed before is void.
    fn begin(&mut self, request: &Request);
    /// Takes the next chunk. An error ends the attempt.
    async fn push(&mut self, chunk: Chunk) -> Result<(), Failure>;
    /// When [`Sink::flush`] is due; none while nothing is buffered.
    fn due(&self) -> Option<Instant>;
    /// Sends what is buffered.
    async fn flush(&mut self);
    /// The attempt failed, and its answer is void. Returns false when the answer cannot be
    /// withdrawn any more: the call then ends with this failure.
    async fn discard(&mut self, failure: &Failure) -> bool;
}

impl Router {
    pub(crate) fn new(
        vendors: Arc<dyn VendorFactory>,
        master_keys: MasterKeys,
        policy: Policy,
        breakers: Breakers,
    ) -> Self {
        let meter = opentelemetry::global::meter("construct-providers");
        Self::with_meter(vendors, master_keys, policy, breakers, &meter)
    }

    /// Records metrics with another meter than that of the process.
    pub(crate) fn with_meter(
        vendors: Arc<dyn VendorFactory>,
        master_keys: MasterKeys,
        policy: Policy,
        breakers: Breakers,
        meter: &Meter,
    ) -> Self {
        let metrics = Metrics::new(meter, &breakers);
        Self { vendors, master_keys, policy, breakers, keys: Keys::default(), metrics }
    }

    /// Vendor calls allowed for an answer of which `attempts` are left; 0: as many as one answer
    /// may take.
    pub(crate) fn max_calls(&self, attempts: u32) -> u32 {
        if attempts > 0 { attempts } else { MAX_ANSWER_CALLS.max(self.policy.attempts) }
    }

    /// Makes a call.
    pub(crate) async fn call(&self, call: RoutedCall<'_>, sink: &mut dyn Sink) -> RoutedResult {
        run::Run::new(self, call, sink).finish().await
    }

    /// Every key of a provider, opened, numbered from 1; 0 stands for none.
    pub(crate) fn open_keys(
        &self,
        provider: &Provider,
    ) -> Vec<(u32, Result<Option<SecretString>, Failure>)> {
        let opened = crate::keys::sealed_keys(provider)
            .map(|sealed| sealed_key::open(&self.master_keys, &provider.id, Some(sealed)));
        let numbered: Vec<_> = (1..).zip(opened).collect();
        if numbered.is_empty() { vec![(0, Ok(None))] } else { numbered }
    }

    /// Makes a vendor request other than a model call, with one of the provider's keys. No observer
    /// sees it: such requests have their own limits.
    pub(crate) async fn query<T, F>(
        &self,
        provider: &Provider,
        key: Option<SecretString>,
        time_limit: Duration,
        question: impl FnOnce(Box<dyn Vendor>) -> F + Send,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>> + Send,
    {
        let asked = question(self.vendors.open(provider, key.clone(), None)?);
        let answered = timeout(time_limit, asked).await;
        let silent = |_| {
            Failure::transient(format!(
                "the vendor did not answer within {} s",
                time_limit.as_secs()
            ))
        };
        answered
            .map_err(silent)?
            .map_err(|failure| failure.scrubbed(key.as_ref().map(|key| key.expose_secret())))
    }

    /// Why the breaker would reject a model call now.
    pub(crate) fn refusal(&self, target: &Target) -> Option<Failure> {
        self.breakers.refusal(&target.breaker())
    }

    /// Starts one attempt at a target.
    async fn start_attempt(&self, params: AttemptParams<'_>) -> Result<Attempt, StartError> {
        let AttemptParams { target, request, .. } = params;
        let breaker = target.breaker();
        // Don't wait for a key only to be rejected.
        if let Some(refusal) = self.breakers.refusal(&breaker) {
            return Err(refusal.into());
        }
        let limited = target.provider.tokens_per_minute > 0;
        let written = if request.embed.is_some() { 0 } else { request.max_tokens.into() };
        let tokens = if limited {
            answer::estimate_tokens(request.input_chars()).saturating_add(written)
        } else {
            0
        };
        let labels = Labels::new(target, request);
        let key_request = KeyRequest {
            provider: &target.provider,
            vendor_model: &target.model.vendor_model,
            tokens,
            excluded: params.excluded_keys,
            max_wait: params.max_wait,
            max_vendor_wait: params.max_wait.min(self.policy.max_requested_delay()),
        };
        let mut leasing = pin!(self.keys.lease(&key_request));
        let mut lease = match leasing.as_mut().now_or_never() {
            Some(lease) => lease?,
            None => {
                let (waiting, began) = (self.metrics.start_key_wait(&labels), Instant::now());
                let lease = leasing.await;
                waiting.finish(began.elapsed());
                lease?
            }
        };
        let opened =
            sealed_key::open(&self.master_keys, &target.provider.id, lease.sealed.as_ref());
        let key = opened.map_err(|failure| {
            lease.settle_tokens(0);
            lease.mark_refused();
            StartError { failure, unopenable_key: Some(Arc::clone(lease.key())) }
        })?;
        let accepted = Arc::new(AtomicBool::new(false));
        let observer = Arc::new(AcceptanceObserver {
            observer: lease.observer(),
            accepted: Arc::clone(&accepted),
        });
        let vendor = self.vendors.open(&target.provider, key.clone(), Some(observer))?;
        let vendor = fenced_blocks::wrap(vendor, request);
        let ask = |vendor: Box<dyn Vendor>| match request.embed {
            Some(_) => vendor.embed(Arc::clone(request)),
            None => vendor.invoke(Arc::clone(request)),
        };
        // A reservation for a call that is not made is released.
        let permit = self.breakers.admit(&breaker).inspect_err(|_| lease.settle_tokens(0))?;
        Ok(Attempt {
            at: params.at,
            // Fused: the stream is polled once more when it ends before an answer began.
            chunks: ask(vendor).fuse().boxed(),
            meter: meter::Meter::new(Arc::clone(request)),
            request: Arc::clone(request),
            preamble: Vec::new(),
            accepted,
            permit,
            lease,
            key,
            trace: Trace::start(target, request),
            labels,
            started_at: Instant::now(),
        })
    }
}

struct AttemptParams<'a> {
    at: usize,
    target: &'a Target,
    request: &'a Arc<Request>,
    excluded_keys: &'a [KeyId],
    max_wait: Duration,
}

/// Why an attempt was not started.
struct StartError {
    failure: Failure,
    /// The key that cannot be opened. Another one may work.
    unopenable_key: Option<KeyId>,
}

impl From<Failure> for StartError {
    fn from(failure: Failure) -> Self {
        Self { failure, unopenable_key: None }
    }
}

/// An attempt in flight. Dropping it closes the vendor's connection.
struct Attempt {
    /// The index of the target.
    at: usize,
    request: Arc<Request>,
    chunks: BoxStream<'static, Result<Chunk, Failure>>,
    meter: meter::Meter,
    /// Chunks before the first content of the answer.
    preamble: Vec<Chunk>,
    /// Whether the vendor has started to answer, at least with a status.
    accepted: Arc<AtomicBool>,
    permit: Permit,
    lease: Lease,
    key: Option<SecretString>,
    labels: Labels,
    started_at: Instant,
    trace: Trace,
}

/// Records that a vendor accepted a request, and passes its limits on.
#[derive(Debug)]
struct AcceptanceObserver {
    observer: Arc<dyn HeadroomObserver>,
    accepted: Arc<AtomicBool>,
}

impl HeadroomObserver for AcceptanceObserver {
    fn on_headroom(&self, headroom: Headroom) {
        self.accepted.store(true, Relaxed);
        self.observer.on_headroom(headroom);
    }
}

impl Attempt {
    /// A chunk of the answer has arrived.
    fn observe(&mut self, chunk: &Chunk) {
        self.meter.observe(chunk);
        self.trace.observe(chunk);
    }

    /// A failure without the key, fit to be shown.
    fn scrubbed(&self, failure: Failure) -> Failure {
        failure.scrubbed(self.key.as_ref().map(|key| key.expose_secret()))
    }
}

impl Target {
    /// The name of the target in messages about several targets.
    fn name(&self) -> String {
        format!(
            "{}/{}",
            vendor::Origin::from_provider(&self.provider).vendor,
            self.model.vendor_model
        )
    }

    fn breaker(&self) -> breaker::Key {
        breaker::Key {
            provider_id: self.provider.id.clone(),
            vendor_model: self.model.vendor_model.clone(),
        }
    }

    fn prices(&self) -> Prices {
        self.model.prices.map(vendor::prices_from_proto).unwrap_or_default()
    }
}

/// The order in which targets are tried: the first one, then its fallbacks by their order.
/// Fallbacks of the same order are drawn by their weights. `random` returns numbers from 0 to 1.
pub(crate) fn ordered_targets(
    first: Target,
    fallbacks: &[Route],
    mut random: impl FnMut() -> f64,
) -> Vec<Arc<Target>> {
    let mut routes: Vec<&Route> = fallbacks.iter().collect();
    routes.sort_by_key(|route| route.order);
    let mut targets = vec![Arc::new(first)];
    let mut rest = routes.as_slice();
    while let Some(head) = rest.first() {
        let (group, behind) =
            rest.split_at(rest.partition_point(|route| route.order == head.order));
        rest = behind;
        let mut group = group.to_vec();
        while !group.is_empty() {
            let total: f64 = group.iter().map(|route| f64::from(route.weight)).sum();
            let mut drawn = random().clamp(0.0, 1.0) * total;
            let at = group.iter().position(|route| {
                drawn -= f64::from(route.weight);
                drawn < 0.0
            });
            let route = group.remove(at.unwrap_or(0));
            if let (Some(provider), Some(model)) = (&route.provider, &route.model) {
                targets.push(Arc::new(Target { provider: provider.clone(), model: model.clone() }));
            }
        }
    }
    targets
}

impl Interrupts<'_> {
    /// Completes with the first interrupt.
    pub(crate) async fn wait(&self) -> CallEnd {
        tokio::select! {
            biased;
            reason = self.cancel.cancelled() => CallEnd::Cancelled { reason },
            () = sleep_until(self.deadline) => CallEnd::Failed(Failure::new(
                FailureClass::DeadlineExceeded,
                "the model did not finish its answer before the step's deadline",
            )),
            () = self.hand_back.cancelled() => CallEnd::HandedBack,
        }
    }
}

#[cfg(test)]
mod tests;

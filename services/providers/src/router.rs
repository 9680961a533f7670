//! One call of a model, wherever it ends up: over the targets in their order, each with its keys,
//! limits, breaker, tries and pauses. Whoever calls models in this service does it through
//! [`Router::call`].
//!
//! What is shared by all calls lives as long as the process: the breakers, the keys' limits, the
//! connections.

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
    cancels::Cancel,
    failure::Failure,
    fenced,
    http::{Headroom, HeadroomObserver},
    key,
    keys::{KeyId, Keys, Lease, KeyRequest},
    meter,
    metrics::{Labels, Metrics},
    retry::Policy,
    trace::Trace,
    vendor::{self, Chunk, VendorFactory, Request, Vendor},
};

/// Calls for one answer at most, over all targets, where the caller does not say how many are left.
const MAX_ANSWER_CALLS: u32 = 5;

/// Calls models. Clones share everything.
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
    /// What is asked, addressed to the first target.
    pub(crate) request: Arc<Request>,
    /// Who may answer, in the order they are tried; see [`in_order`].
    pub(crate) targets: Vec<Arc<Target>>,
    /// After which silence the next target is asked as well.
    pub(crate) hedge_after: Option<Duration>,
    /// Calls of vendors at most, over all targets, hedges included; 0: as many as one answer may
    /// take.
    pub(crate) tries: u32,
    /// Calls for the same answer, not counted in `tries`, that workers before this one are taken to
    /// have made: of the first target.
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
    /// The process is about to stop: another one takes the command over.
    pub(crate) hand_back: CancellationToken,
}

/// How a call ended.
#[derive(Debug, PartialEq)]
pub(crate) enum CallEnd {
    /// The sink has the whole answer.
    Completed,
    Failed(Failure),
    Cancelled {
        reason: String,
    },
    HandedBack,
}

/// What became of a call.
#[derive(Debug, PartialEq)]
pub(crate) struct RoutedResult {
    pub(crate) end: CallEnd,
    /// Everything that was used, failed tries and lost hedges included, each at its own model's
    /// prices.
    pub(crate) usage: Usage,
    /// Tokens of input, cached ones too, of the try that answered.
    pub(crate) input_tokens: i64,
    /// The id of the model that answered, or that was called last.
    pub(crate) model_id: String,
}

/// Where an answer goes as it comes.
#[async_trait]
pub(crate) trait Sink: Send {
    /// An answer to `request` begins. What came before is void.
    fn begin(&mut self, request: &Request);
    /// Takes the next piece. An error ends the try.
    async fn push(&mut self, chunk: Chunk) -> Result<(), Failure>;
    /// When [`Sink::flush`] is due; none while nothing is gathered.
    fn due(&self) -> Option<Instant>;
    /// Passes on what is gathered.
    async fn flush(&mut self);
    /// The try failed, and what came of its answer is void. False when that cannot be taken back
    /// any more: the call ends with this failure then.
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

    /// One that counts its calls elsewhere than in the metrics of the process.
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

    /// Calls of vendors that may be made for one answer of which so many are left; 0: as many as
    /// one answer may take.
    pub(crate) fn max_calls(&self, tries: u32) -> u32 {
        if tries > 0 { tries } else { MAX_ANSWER_CALLS.max(self.policy.tries) }
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
            .map(|sealed| key::open(&self.master_keys, &provider.id, Some(sealed)));
        let numbered: Vec<_> = (1..).zip(opened).collect();
        if numbered.is_empty() { vec![(0, Ok(None))] } else { numbered }
    }

    /// Asks a vendor something that is no call of a model, with one of the provider's keys. No
    /// observer hears of it: such questions have limits of their own, which are not those of calls.
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
            Failure::transient(format!("the vendor did not answer within {} s", time_limit.as_secs()))
        };
        answered
            .map_err(silent)?
            .map_err(|failure| failure.scrubbed(key.as_ref().map(|key| key.expose_secret())))
    }

    /// Why a call of a model would be refused at the moment, for its vendor's health.
    pub(crate) fn refusal(&self, target: &Target) -> Option<Failure> {
        self.breakers.refusal(&target.breaker())
    }

    /// Begins one try at a target.
    async fn start_attempt(&self, params: AttemptParams<'_>) -> Result<Attempt, StartError> {
        let AttemptParams { target, request, .. } = params;
        let breaker = target.breaker();
        // Nobody waits for a key only to be refused.
        if let Some(refusal) = self.breakers.refusal(&breaker) {
            return Err(refusal.into());
        }
        let limited = target.provider.tokens_per_minute > 0;
        let written = if request.embed.is_some() { 0 } else { request.max_tokens.into() };
        let tokens =
            if limited { answer::estimate_tokens(request.input_chars()).saturating_add(written) } else { 0 };
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
        let opened = key::open(&self.master_keys, &target.provider.id, lease.sealed.as_ref());
        let key = opened.map_err(|failure| {
            lease.settle_tokens(0);
            lease.mark_refused();
            StartError { failure, unopenable_key: Some(Arc::clone(lease.key())) }
        })?;
        let accepted = Arc::new(AtomicBool::new(false));
        let observer = Arc::new(AcceptanceObserver { observer: lease.observer(), accepted: Arc::clone(&accepted) });
        let vendor = self.vendors.open(&target.provider, key.clone(), Some(observer))?;
        let vendor = fenced::wrap(vendor, request);
        let ask = |vendor: Box<dyn Vendor>| match request.embed {
            Some(_) => vendor.embed(Arc::clone(request)),
            None => vendor.invoke(Arc::clone(request)),
        };
        // What was set aside for a call that is not made goes back.
        let permit = self.breakers.admit(&breaker).inspect_err(|_| lease.settle_tokens(0))?;
        Ok(Attempt {
            at: params.at,
            // Asked once more when it has ended, where it ends before it has begun.
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

/// Why a try is not begun.
struct StartError {
    failure: Failure,
    /// The key that cannot be opened. Another one may fare better.
    unopenable_key: Option<KeyId>,
}

impl From<Failure> for StartError {
    fn from(failure: Failure) -> Self {
        Self { failure, unopenable_key: None }
    }
}

/// A try under way. Dropping it closes the vendor's connection.
struct Attempt {
    /// Which target.
    at: usize,
    request: Arc<Request>,
    chunks: BoxStream<'static, Result<Chunk, Failure>>,
    meter: meter::Meter,
    /// What came before anything of the answer.
    preamble: Vec<Chunk>,
    /// Whether the vendor has begun to answer, if only by a status.
    accepted: Arc<AtomicBool>,
    permit: Permit,
    lease: Lease,
    key: Option<SecretString>,
    labels: Labels,
    started_at: Instant,
    trace: Trace,
}

/// Notes that a vendor has taken a request, on the way of what it says about its limits.
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
    /// A piece of its answer has come.
    fn observe(&mut self, chunk: &Chunk) {
        self.meter.observe(chunk);
        self.trace.observe(chunk);
    }

    /// A failure as it may be shown.
    fn scrubbed(&self, failure: Failure) -> Failure {
        failure.scrubbed(self.key.as_ref().map(|key| key.expose_secret()))
    }
}

impl Target {
    /// What it is called where it is told from others.
    fn name(&self) -> String {
        format!("{}/{}", vendor::Origin::from_provider(&self.provider).vendor, self.model.vendor_model)
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

/// The order in which targets are tried: the first one, then its fallbacks by their order. Of those
/// with the same order, which have weights, is drawn who comes first, second, and so on. `random`
/// gives numbers from 0 to 1.
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
    /// Completes when one of them does.
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

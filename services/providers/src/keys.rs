//! Selects the API key of a call, and enforces the limits of each key.
//!
//! A key has limits that apply before the vendor would reject a call, and cooldowns after the
//! vendor did. The state of a key lives as long as the process; each process counts for itself.
//! Calls of one model wait in arrival order. A key is identified by its sealed form, so that a
//! replaced key starts with fresh limits.

mod bucket;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use construct_proto::mesh::v1::{FailureClass, Provider, SealedSecret};
use construct_runtime::clock;
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until, timeout},
};

use self::bucket::Bucket;
use crate::{
    failure::Failure,
    http::{Headroom, HeadroomObserver},
};

/// How long a key that the vendor refuses, or that cannot be opened, is skipped while there are
/// others.
const REFUSED_KEY_COOLDOWN: Duration = Duration::from_secs(5 * 60);
/// How long a rate-limited key is skipped when the vendor does not say.
const RATE_LIMITED_KEY_COOLDOWN: Duration = Duration::from_secs(10);
/// Upper bound of the delay that a vendor may ask for.
const MAX_VENDOR_DELAY: Duration = Duration::from_secs(3_600);
/// Providers in memory before those without a call in flight are dropped.
const MAX_POOLS: usize = 1_024;

/// A key by its sealed form; empty for a provider without one.
pub(crate) type KeyId = Arc<[u8]>;

/// The keys of all providers. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Keys(Arc<Mutex<HashMap<String, Arc<Pool>>>>);

/// What a call needs.
#[derive(Debug)]
pub(crate) struct KeyRequest<'a> {
    pub(crate) provider: &'a Provider,
    pub(crate) vendor_model: &'a str,
    /// An upper estimate of the tokens it reads and writes.
    pub(crate) tokens: i64,
    /// Keys to skip.
    pub(crate) excluded: &'a [KeyId],
    /// How long the call may wait.
    pub(crate) max_wait: Duration,
    /// How long the call may wait for a time that the vendor named. For longer waits the reconciler
    /// is the better place.
    pub(crate) max_vendor_wait: Duration,
}

/// The right to use a key for one call, until it is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    pool: Arc<Pool>,
    key: KeyId,
    vendor_model: String,
    /// Tokens charged for the call: the estimate until [`Lease::settle_tokens`].
    tokens: i64,
    /// The sealed key of the provider; none when it has no key.
    pub(crate) sealed: Option<SealedSecret>,
}

#[derive(Debug, Default)]
struct Pool {
    /// The queue of waiting calls, for each model.
    queues: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    keys: Mutex<HashMap<KeyId, KeyState>>,
    /// Capacity was released.
    freed: Notify,
}

#[derive(Debug, Default)]
struct KeyState {
    under_way: i64,
    /// Increases with each call, over all keys: among equal keys the least recently used one is
    /// taken.
    last_use: u64,
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    refused_until: Option<Instant>,
    /// By model, because most vendors have limits per model.
    limited_until: HashMap<String, Instant>,
}

enum TakeResult {
    Lease(Box<Lease>),
    /// When to try again, unless capacity is released before; and whether the vendor named that
    /// time.
    RetryAt {
        at: Option<Instant>,
        by_vendor: bool,
    },
}

impl Keys {
    /// Returns a key for a call as soon as one is free.
    ///
    /// # Errors
    /// Rate limited, when that would take too long.
    pub(crate) async fn lease(&self, request: &KeyRequest<'_>) -> Result<Lease, Failure> {
        let pool = self.pool(&request.provider.id);
        let deadline = Instant::now() + request.max_wait;
        let queue = pool.queue(request.vendor_model);
        // Usually there is no queue.
        let _turn = match queue.try_lock() {
            Ok(turn) => turn,
            Err(_) => match timeout(request.max_wait, queue.lock()).await {
                Ok(turn) => turn,
                Err(_) => {
                    return Err(exhausted_failure(pool.earliest_free(request), Instant::now()));
                }
            },
        };
        loop {
            // Before the check, so that no release is missed in between.
            let mut freed = std::pin::pin!(pool.freed.notified());
            freed.as_mut().enable();
            let now = Instant::now();
            match pool.take(request, now) {
                TakeResult::Lease(lease) => return Ok(*lease),
                TakeResult::RetryAt { at, by_vendor } => {
                    let until = if by_vendor {
                        deadline.min(now + request.max_vendor_wait)
                    } else {
                        deadline
                    };
                    if now >= deadline || at.is_some_and(|at| at > until) {
                        return Err(exhausted_failure(at, now));
                    }
                    let wake = at.unwrap_or(deadline).min(deadline);
                    tokio::select! {
                        () = sleep_until(wake) => {}
                        () = freed => {}
                    }
                }
            }
        }
    }

    fn pool(&self, provider_id: &str) -> Arc<Pool> {
        // No code panics between two changes that belong together.
        let mut pools = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = pools.get(provider_id) {
            return Arc::clone(pool);
        }
        if pools.len() >= MAX_POOLS {
            // A lease or a waiting call also references the pool.
            pools.retain(|_, pool| Arc::strong_count(pool) > 1);
        }
        let pool = Arc::<Pool>::default();
        pools.insert(provider_id.to_owned(), Arc::clone(&pool));
        pool
    }
}

/// The number of keys of a provider; one without keys counts as one.
pub(crate) fn key_count(provider: &Provider) -> usize {
    sealed_keys(provider).count().max(1)
}

/// All keys of a provider in their order.
pub(crate) fn sealed_keys(provider: &Provider) -> impl Iterator<Item = &SealedSecret> {
    provider
        .api_key
        .iter()
        .chain(&provider.additional_api_keys)
        .filter(|key| !key.ciphertext.is_empty())
}

impl Pool {
    fn queue(&self, vendor_model: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        if queues.len() >= MAX_POOLS {
            queues.retain(|_, queue| Arc::strong_count(queue) > 1);
        }
        Arc::clone(queues.entry(vendor_model.to_owned()).or_default())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<KeyId, KeyState>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When a key may be free.
    fn earliest_free(&self, request: &KeyRequest<'_>) -> Option<Instant> {
        let (now, mut states) = (Instant::now(), self.lock());
        let waits = sealed_keys(request.provider).map(|key| {
            states
                .get_mut(key.ciphertext.as_slice())
                .map_or(Some(Duration::ZERO), |state| state.wait(request, now).0)
        });
        waits.flatten().min().map(|wait| now + wait)
    }

    fn take(self: &Arc<Self>, request: &KeyRequest<'_>, now: Instant) -> TakeResult {
        let mut states = self.lock();
        let keys: Vec<&SealedSecret> = sealed_keys(request.provider).collect();
        let ids: Vec<KeyId> = if keys.is_empty() {
            vec![KeyId::default()]
        } else {
            keys.iter().map(|key| KeyId::from(key.ciphertext.as_slice())).collect()
        };
        for id in &ids {
            states.entry(Arc::clone(id)).or_default().configure(request.provider, now);
        }
        // Drops removed keys of the provider that no call uses.
        states.retain(|id, state| state.under_way > 0 || ids.contains(id) || state.is_limited(now));

        let mut candidates: Vec<usize> =
            (0..ids.len()).filter(|at| !request.excluded.contains(&ids[*at])).collect();
        let refused = |at: &usize| states[&ids[*at]].refused_until.filter(|until| *until > now);
        if candidates.iter().all(|at| refused(at).is_some()) {
            // Some key has to be tried, and the one refused longest ago may work again.
            candidates.sort_by_key(|at| refused(at));
            candidates.truncate(1);
        } else {
            candidates.retain(|at| refused(at).is_none());
        }
        candidates.sort_by_key(|at| (states[&ids[*at]].under_way, states[&ids[*at]].last_use));

        let mut later: Option<(Duration, bool)> = None;
        for at in candidates {
            let last_used = states.values().map(|state| state.last_use).max().unwrap_or_default();
            let Some(state) = states.get_mut(&ids[at]) else { continue };
            match state.wait(request, now) {
                (Some(Duration::ZERO), _) => {
                    state.begin(request, now);
                    state.last_use = last_used + 1;
                    return TakeResult::Lease(Box::new(Lease {
                        pool: Arc::clone(self),
                        key: Arc::clone(&ids[at]),
                        vendor_model: request.vendor_model.to_owned(),
                        tokens: request.tokens,
                        sealed: keys.get(at).map(|key| SealedSecret::clone(key)),
                    }));
                }
                (Some(wait), by_vendor) => {
                    later = Some(
                        later.map_or((wait, by_vendor), |soonest| soonest.min((wait, by_vendor))),
                    );
                }
                (None, _) => {}
            }
        }
        TakeResult::RetryAt {
            at: later.map(|(wait, _)| now + wait),
            by_vendor: later.is_some_and(|(_, by_vendor)| by_vendor),
        }
    }

    fn update_key(&self, key: &KeyId, change: impl FnOnce(&mut KeyState)) {
        if let Some(state) = self.lock().get_mut(key) {
            change(state);
        }
        self.freed.notify_waiters();
    }
}

impl KeyState {
    /// Applies changed limits.
    fn configure(&mut self, provider: &Provider, now: Instant) {
        for (bucket, limit) in [
            (&mut self.requests, provider.requests_per_minute),
            (&mut self.tokens, provider.tokens_per_minute),
        ] {
            match bucket {
                Some(bucket) if limit > 0 => bucket.set_limit(limit, now),
                _ => *bucket = Bucket::new(limit, now),
            }
        }
    }

    /// How long until a call may begin, and whether the vendor named that time. None: until a call
    /// in flight ends.
    fn wait(&mut self, request: &KeyRequest<'_>, now: Instant) -> (Option<Duration>, bool) {
        let limit = request.provider.max_concurrency;
        if limit > 0 && self.under_way >= limit {
            return (None, false);
        }
        let vendor = self
            .limited_until
            .get(request.vendor_model)
            .map_or(Duration::ZERO, |until| until.duration_since(now));
        let requests = self.requests.as_mut().map_or(Duration::ZERO, |bucket| bucket.wait(1, now));
        let tokens =
            self.tokens.as_mut().map_or(Duration::ZERO, |bucket| bucket.wait(request.tokens, now));
        let own = requests.max(tokens);
        (Some(own.max(vendor)), vendor > own)
    }

    fn begin(&mut self, request: &KeyRequest<'_>, now: Instant) {
        self.under_way += 1;
        if let Some(requests) = &mut self.requests {
            requests.take(1, now);
        }
        if let Some(tokens) = &mut self.tokens {
            tokens.take(request.tokens, now);
        }
    }

    fn is_limited(&self, now: Instant) -> bool {
        self.refused_until.iter().chain(self.limited_until.values()).any(|until| *until > now)
    }

    fn mark_limited(&mut self, vendor_model: &str, until: Instant, now: Instant) {
        self.limited_until.retain(|_, until| *until > now);
        let known = self.limited_until.entry(vendor_model.to_owned()).or_insert(until);
        *known = (*known).max(until);
    }
}

impl Lease {
    /// The id of the key.
    pub(crate) fn key(&self) -> &KeyId {
        &self.key
    }

    /// Receives the limits in the vendor's response headers.
    pub(crate) fn observer(&self) -> Arc<dyn HeadroomObserver> {
        Arc::new(KeyObserver {
            pool: Arc::clone(&self.pool),
            key: Arc::clone(&self.key),
            vendor_model: self.vendor_model.clone(),
        })
    }

    /// Replaces the estimate by the tokens really used.
    pub(crate) fn settle_tokens(&mut self, tokens: i64) {
        let over = tokens - self.tokens;
        self.tokens = tokens;
        self.pool.update_key(&self.key, |state| {
            if let Some(bucket) = &mut state.tokens {
                bucket.take(over, Instant::now());
            }
        });
    }

    /// Skips the key for a while.
    pub(crate) fn mark_refused(&self) {
        self.pool.update_key(&self.key, |state| {
            state.refused_until = Some(Instant::now() + REFUSED_KEY_COOLDOWN)
        });
    }

    /// Reports a failed call. Returns true when the key is the reason, and another one may work.
    pub(crate) fn on_failure(&self, failure: &Failure, has_others: bool) -> bool {
        let now = Instant::now();
        match failure.class {
            FailureClass::Authentication => {
                self.mark_refused();
                true
            }
            FailureClass::RateLimited => {
                let asked =
                    failure.requested_delay(clock::now()).map(|wait| wait.min(MAX_VENDOR_DELAY));
                // A single key is skipped for as long as the vendor says; otherwise the retry
                // delays protect it.
                let pause = asked.or_else(|| has_others.then_some(RATE_LIMITED_KEY_COOLDOWN));
                if let Some(pause) = pause {
                    self.pool.update_key(&self.key, |state| {
                        state.mark_limited(&self.vendor_model, now + pause, now)
                    });
                }
                true
            }
            _ => false,
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.update_key(&self.key, |state| state.under_way -= 1);
    }
}

/// Applies the limits in response headers.
#[derive(Debug)]
struct KeyObserver {
    pool: Arc<Pool>,
    key: KeyId,
    vendor_model: String,
}

impl HeadroomObserver for KeyObserver {
    fn on_headroom(&self, headroom: Headroom) {
        if let Some(wait) = headroom.exhausted_for {
            let now = Instant::now();
            let until = now + wait.min(MAX_VENDOR_DELAY);
            self.pool
                .update_key(&self.key, |state| state.mark_limited(&self.vendor_model, until, now));
        }
    }
}

fn exhausted_failure(at: Option<Instant>, now: Instant) -> Failure {
    let retry_at =
        at.and_then(|at| clock::now().checked_add(at.saturating_duration_since(now)).ok());
    Failure::new(FailureClass::RateLimited, "every API key of the provider is at its limit")
        .with_retry_at(retry_at)
}

#[cfg(test)]
mod tests;

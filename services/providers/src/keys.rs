//! Which of a provider's keys a call is made with, and when: limits of each key that are kept
//! before the vendor would say no, and keys that are left out for a while because it did.
//!
//! What is counted stands per key and lives as long as the process; each process counts for itself.
//! Calls of one model wait in the order they came. A key is known by its sealed form, so that one
//! that is set anew begins anew.

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
    http::{Headroom, Observe},
};

/// How long a key that the vendor refuses, or that cannot be opened, is left out, as long as there
/// are others.
const REFUSED: Duration = Duration::from_secs(5 * 60);
/// How long a key is left out that reached a limit, when the vendor does not say.
const LIMITED: Duration = Duration::from_secs(10);
/// Vendors' pauses beyond this are not believed.
const LONGEST: Duration = Duration::from_secs(3_600);
/// Providers remembered at most before those without a call under way are forgotten.
const LIMIT: usize = 1_024;

/// A key by its sealed form; empty where there is none.
pub(crate) type KeyId = Arc<[u8]>;

/// The keys of all providers. Clones are the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Keys(Arc<Mutex<HashMap<String, Arc<Pool>>>>);

/// What a call needs.
#[derive(Debug)]
pub(crate) struct Want<'a> {
    pub(crate) provider: &'a Provider,
    pub(crate) vendor_model: &'a str,
    /// An upper estimate of what it reads and writes.
    pub(crate) tokens: i64,
    /// Keys not to take.
    pub(crate) without: &'a [KeyId],
    /// How long it may wait.
    pub(crate) patience: Duration,
    /// How long it may wait for a point in time that the vendor named: longer ones are better
    /// waited for elsewhere.
    pub(crate) vendor_patience: Duration,
}

/// A key that may be used for one call, until it is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    pool: Arc<Pool>,
    key: KeyId,
    vendor_model: String,
    /// What is set aside for it and not yet known.
    tokens: i64,
    /// As it stands in the provider; none when it has no key.
    pub(crate) sealed: Option<SealedSecret>,
}

#[derive(Debug, Default)]
struct Pool {
    /// Who comes next, for each model.
    turns: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    keys: Mutex<HashMap<KeyId, State>>,
    /// Something has been given back.
    freed: Notify,
}

#[derive(Debug, Default)]
struct State {
    under_way: i64,
    /// Rises with each call, over all keys: of equals the one that rested longest is taken.
    used: u64,
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    refused_until: Option<Instant>,
    /// By model, because most vendors' limits are.
    limited_until: HashMap<String, Instant>,
}

enum Taken {
    Lease(Box<Lease>),
    /// When it may be worth looking again, unless something is given back before; and whether the
    /// vendor named that time.
    Later {
        at: Option<Instant>,
        by_vendor: bool,
    },
}

impl Keys {
    /// A key for a call, as soon as there is one.
    ///
    /// # Errors
    /// Rate limited, when that would take too long.
    pub(crate) async fn lease(&self, want: &Want<'_>) -> Result<Lease, Failure> {
        let pool = self.pool(&want.provider.id);
        let deadline = Instant::now() + want.patience;
        let turn = pool.turn(want.vendor_model);
        // Nobody waits in the usual case.
        let _turn = match turn.try_lock() {
            Ok(turn) => turn,
            Err(_) => match timeout(want.patience, turn.lock()).await {
                Ok(turn) => turn,
                Err(_) => return Err(exhausted(pool.look(want), Instant::now())),
            },
        };
        loop {
            // Before looking, so that nothing given back meanwhile is missed.
            let mut freed = std::pin::pin!(pool.freed.notified());
            freed.as_mut().enable();
            let now = Instant::now();
            match pool.take(want, now) {
                Taken::Lease(lease) => return Ok(*lease),
                Taken::Later { at, by_vendor } => {
                    let until =
                        if by_vendor { deadline.min(now + want.vendor_patience) } else { deadline };
                    if now >= deadline || at.is_some_and(|at| at > until) {
                        return Err(exhausted(at, now));
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
        // Nothing panics between two changes that belong together.
        let mut pools = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = pools.get(provider_id) {
            return Arc::clone(pool);
        }
        if pools.len() >= LIMIT {
            // Whoever holds a lease or waits holds the pool as well.
            pools.retain(|_, pool| Arc::strong_count(pool) > 1);
        }
        let pool = Arc::<Pool>::default();
        pools.insert(provider_id.to_owned(), Arc::clone(&pool));
        pool
    }
}

/// How many keys a provider has; one that needs none counts as one.
pub(crate) fn count(provider: &Provider) -> usize {
    sealed(provider).count().max(1)
}

/// All keys of a provider, the first one first.
pub(crate) fn sealed(provider: &Provider) -> impl Iterator<Item = &SealedSecret> {
    provider
        .api_key
        .iter()
        .chain(&provider.additional_api_keys)
        .filter(|key| !key.ciphertext.is_empty())
}

impl Pool {
    fn turn(&self, vendor_model: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        if turns.len() >= LIMIT {
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        }
        Arc::clone(turns.entry(vendor_model.to_owned()).or_default())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<KeyId, State>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When a key may be free.
    fn look(&self, want: &Want<'_>) -> Option<Instant> {
        let (now, mut states) = (Instant::now(), self.lock());
        let waits = sealed(want.provider).map(|key| {
            states
                .get_mut(key.ciphertext.as_slice())
                .map_or(Some(Duration::ZERO), |state| state.wait(want, now).0)
        });
        waits.flatten().min().map(|wait| now + wait)
    }

    fn take(self: &Arc<Self>, want: &Want<'_>, now: Instant) -> Taken {
        let mut states = self.lock();
        let keys: Vec<&SealedSecret> = sealed(want.provider).collect();
        let ids: Vec<KeyId> = if keys.is_empty() {
            vec![KeyId::default()]
        } else {
            keys.iter().map(|key| KeyId::from(key.ciphertext.as_slice())).collect()
        };
        for id in &ids {
            states.entry(Arc::clone(id)).or_default().configure(want.provider, now);
        }
        // Keys that are gone from the provider, once nothing is under way with them any more.
        states.retain(|id, state| state.under_way > 0 || ids.contains(id) || state.is_limited(now));

        let mut candidates: Vec<usize> =
            (0..ids.len()).filter(|at| !want.without.contains(&ids[*at])).collect();
        let refused = |at: &usize| states[&ids[*at]].refused_until.filter(|until| *until > now);
        if candidates.iter().all(|at| refused(at).is_some()) {
            // Something has to be tried, and the one that was refused longest ago may have been put
            // in order.
            candidates.sort_by_key(|at| refused(at));
            candidates.truncate(1);
        } else {
            candidates.retain(|at| refused(at).is_none());
        }
        candidates.sort_by_key(|at| (states[&ids[*at]].under_way, states[&ids[*at]].used));

        let mut later: Option<(Duration, bool)> = None;
        for at in candidates {
            let last_used = states.values().map(|state| state.used).max().unwrap_or_default();
            let Some(state) = states.get_mut(&ids[at]) else { continue };
            match state.wait(want, now) {
                (Some(Duration::ZERO), _) => {
                    state.begin(want, now);
                    state.used = last_used + 1;
                    return Taken::Lease(Box::new(Lease {
                        pool: Arc::clone(self),
                        key: Arc::clone(&ids[at]),
                        vendor_model: want.vendor_model.to_owned(),
                        tokens: want.tokens,
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
        Taken::Later {
            at: later.map(|(wait, _)| now + wait),
            by_vendor: later.is_some_and(|(_, by_vendor)| by_vendor),
        }
    }

    fn with(&self, key: &KeyId, change: impl FnOnce(&mut State)) {
        if let Some(state) = self.lock().get_mut(key) {
            change(state);
        }
        self.freed.notify_waiters();
    }
}

impl State {
    /// Takes over limits that have changed.
    fn configure(&mut self, provider: &Provider, now: Instant) {
        for (bucket, limit) in [
            (&mut self.requests, provider.requests_per_minute),
            (&mut self.tokens, provider.tokens_per_minute),
        ] {
            match bucket {
                Some(bucket) if limit > 0 => bucket.limit(limit, now),
                _ => *bucket = Bucket::new(limit, now),
            }
        }
    }

    /// How long until a call may begin, and whether that is the vendor's word. None: until one
    /// under way ends.
    fn wait(&mut self, want: &Want<'_>, now: Instant) -> (Option<Duration>, bool) {
        let limit = want.provider.max_concurrency;
        if limit > 0 && self.under_way >= limit {
            return (None, false);
        }
        let vendor = self
            .limited_until
            .get(want.vendor_model)
            .map_or(Duration::ZERO, |until| until.duration_since(now));
        let requests = self.requests.as_mut().map_or(Duration::ZERO, |bucket| bucket.wait(1, now));
        let tokens =
            self.tokens.as_mut().map_or(Duration::ZERO, |bucket| bucket.wait(want.tokens, now));
        let own = requests.max(tokens);
        (Some(own.max(vendor)), vendor > own)
    }

    fn begin(&mut self, want: &Want<'_>, now: Instant) {
        self.under_way += 1;
        if let Some(requests) = &mut self.requests {
            requests.take(1, now);
        }
        if let Some(tokens) = &mut self.tokens {
            tokens.take(want.tokens, now);
        }
    }

    fn is_limited(&self, now: Instant) -> bool {
        self.refused_until.iter().chain(self.limited_until.values()).any(|until| *until > now)
    }

    fn limited(&mut self, vendor_model: &str, until: Instant, now: Instant) {
        self.limited_until.retain(|_, until| *until > now);
        let known = self.limited_until.entry(vendor_model.to_owned()).or_insert(until);
        *known = (*known).max(until);
    }
}

impl Lease {
    /// Which key it is.
    pub(crate) fn key(&self) -> &KeyId {
        &self.key
    }

    /// Hears what the vendor says in its headers.
    pub(crate) fn observer(&self) -> Arc<dyn Observe> {
        Arc::new(Observer {
            pool: Arc::clone(&self.pool),
            key: Arc::clone(&self.key),
            vendor_model: self.vendor_model.clone(),
        })
    }

    /// What the call really used.
    pub(crate) fn used(&mut self, tokens: i64) {
        let over = tokens - self.tokens;
        self.tokens = tokens;
        self.pool.with(&self.key, |state| {
            if let Some(bucket) = &mut state.tokens {
                bucket.take(over, Instant::now());
            }
        });
    }

    /// The key is of no use for the time being.
    pub(crate) fn refuse(&self) {
        self.pool.with(&self.key, |state| state.refused_until = Some(Instant::now() + REFUSED));
    }

    /// The call failed; true when that is about the key, and another one may fare better.
    pub(crate) fn failed(&self, failure: &Failure, has_others: bool) -> bool {
        let now = Instant::now();
        match failure.class {
            FailureClass::Authentication => {
                self.refuse();
                true
            }
            FailureClass::RateLimited => {
                let asked = failure.wait_asked(clock::now()).map(|wait| wait.min(LONGEST));
                // A single key is spared for as long as the vendor says; otherwise the pauses
                // between tries spare it.
                let pause = asked.or_else(|| has_others.then_some(LIMITED));
                if let Some(pause) = pause {
                    self.pool.with(&self.key, |state| {
                        state.limited(&self.vendor_model, now + pause, now)
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
        self.pool.with(&self.key, |state| state.under_way -= 1);
    }
}

/// Takes over what headers say.
#[derive(Debug)]
struct Observer {
    pool: Arc<Pool>,
    key: KeyId,
    vendor_model: String,
}

impl Observe for Observer {
    fn headroom(&self, headroom: Headroom) {
        if let Some(wait) = headroom.exhausted_for {
            let now = Instant::now();
            let until = now + wait.min(LONGEST);
            self.pool.with(&self.key, |state| state.limited(&self.vendor_model, until, now));
        }
    }
}

fn exhausted(at: Option<Instant>, now: Instant) -> Failure {
    let retry_at =
        at.and_then(|at| clock::now().checked_add(at.saturating_duration_since(now)).ok());
    Failure::new(FailureClass::RateLimited, "every API key of the provider is at its limit")
        .with_retry_at(retry_at)
}

#[cfg(test)]
mod tests;

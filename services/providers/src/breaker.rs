//! Circuit breakers, one per model of a provider.
//!
//! They keep calls away from a failing vendor, so that callers don't wait in vain and the vendor
//! can recover. They live as long as the process. Processes exchange their states.

pub(crate) mod peers;
pub(crate) mod state;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use construct_proto::{
    mesh::v1::FailureClass,
    v1::{self, breaker as wire},
};
use construct_runtime::clock;
use jiff::Timestamp;
use tokio::{sync::mpsc, time::Instant};

use self::state::{Admission, Breaker, PeerUpdate, State};
use crate::failure::Failure;

/// Breakers in memory before pristine ones are dropped.
const MAX_BREAKERS: usize = 4_096;

/// Identifies a breaker.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) provider_id: String,
    pub(crate) vendor_model: String,
}

/// A state change of a breaker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) key: Key,
    pub(crate) update: PeerUpdate,
}

/// All breakers of the process. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Breakers {
    breakers: Arc<Mutex<HashMap<Key, Breaker>>>,
    changes: mpsc::UnboundedSender<Change>,
}

/// The right to make one call. Report its end with `on_success` or `on_failure`; a drop without
/// either says nothing about the vendor.
#[derive(Debug)]
pub(crate) struct Permit {
    breakers: Breakers,
    key: Key,
    admission: Option<Admission>,
}

impl Breakers {
    /// Creates the breakers, and a receiver of their changes: a few per cooldown and model.
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<Change>) {
        let (changes, changed) = mpsc::unbounded_channel();
        (Self { breakers: Arc::default(), changes }, changed)
    }

    /// Why a call would be rejected now.
    pub(crate) fn refusal(&self, key: &Key) -> Option<Failure> {
        let now = Instant::now();
        self.lock().get(key)?.refusal(now).map(|again| rejection(key, again, now))
    }

    /// Admits a call.
    pub(crate) fn admit(&self, key: &Key) -> Result<Permit, Failure> {
        let now = Instant::now();
        let admitted = self.update(key, |breaker| breaker.admit(now));
        match admitted {
            Ok(admission) => {
                Ok(Permit { breakers: self.clone(), key: key.clone(), admission: Some(admission) })
            }
            Err(again) => Err(rejection(key, again, now)),
        }
    }

    /// The state of a breaker, for other services.
    pub(crate) fn status(&self, key: &Key) -> v1::Breaker {
        let (now, breakers) = (Instant::now(), self.lock());
        let Some(breaker) = breakers.get(key) else {
            return v1::Breaker { state: wire::State::Closed.into(), ..v1::Breaker::default() };
        };
        let retry_at =
            breaker.refusal(now).map(|again| timestamp_to_proto(to_timestamp(again, now)));
        let state = match breaker.state() {
            State::Closed => wire::State::Closed,
            State::Open { .. } => wire::State::Open,
            State::HalfOpen => wire::State::HalfOpen,
        };
        v1::Breaker { state: state.into(), failures: breaker.failures(), retry_at }
    }

    /// Applies the state that another process reports.
    pub(crate) fn apply_peer_update(&self, key: &Key, update: PeerUpdate) {
        let now = Instant::now();
        let mut breakers = self.lock();
        // For an unknown breaker only an open one matters.
        if breakers.contains_key(key) || matches!(update, PeerUpdate::Open(_)) {
            breakers.entry(key.clone()).or_default().apply_peer_update(update, now);
        }
    }

    /// The open breakers, for a process that starts.
    pub(crate) fn open_breakers(&self) -> Vec<Change> {
        let now = Instant::now();
        let open = |(key, breaker): (&Key, &Breaker)| match breaker.state() {
            State::Open { until } if until > now => Some(Change {
                key: key.clone(),
                update: PeerUpdate::Open(until.duration_since(now)),
            }),
            State::Open { .. } | State::Closed | State::HalfOpen => None,
        };
        self.lock().iter().filter_map(open).collect()
    }

    /// The states of all breakers.
    pub(crate) fn states(&self) -> Vec<(Key, State)> {
        self.lock().iter().map(|(key, breaker)| (key.clone(), breaker.state())).collect()
    }

    fn update<T>(&self, key: &Key, change: impl FnOnce(&mut Breaker) -> T) -> T {
        let now = Instant::now();
        let mut breakers = self.lock();
        if breakers.len() >= MAX_BREAKERS {
            breakers.retain(|_, breaker| !breaker.is_pristine());
        }
        let breaker = breakers.entry(key.clone()).or_default();
        let before = breaker.state();
        let result = change(breaker);
        let after = breaker.state();
        drop(breakers);
        if before != after {
            let update = match after {
                State::Closed => PeerUpdate::Closed,
                State::HalfOpen => PeerUpdate::HalfOpen,
                State::Open { until } => PeerUpdate::Open(until.saturating_duration_since(now)),
            };
            // Dashboards read these fields, people the message.
            tracing::warn!(
                construct.provider = key.provider_id,
                gen_ai.request.model = key.vendor_model,
                breaker.state = state_name(update),
                "the circuit breaker of a model is {}",
                state_name(update)
            );
            // Fails only where no task shares breakers, as in tests.
            let _ = self.changes.send(Change { key: key.clone(), update });
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Breaker>> {
        // No code panics between two changes that belong together.
        self.breakers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Permit {
    /// The vendor has started to answer.
    pub(crate) fn on_start(&self) {
        if let Some(admission) = self.admission {
            self.breakers.update(&self.key, |breaker| breaker.on_start(admission));
        }
    }

    /// The answer is complete.
    pub(crate) fn on_success(mut self) {
        if let Some(admission) = self.admission.take() {
            self.breakers.update(&self.key, |breaker| breaker.on_success(admission));
        }
    }

    /// The call failed. A vendor that rejects a request is healthy; failures on our side say
    /// nothing about it.
    pub(crate) fn on_failure(mut self, failure: &Failure) {
        let Some(admission) = self.admission else { return };
        match failure.class {
            FailureClass::Transient | FailureClass::Overloaded => {
                self.breakers
                    .update(&self.key, |breaker| breaker.on_failure(admission, Instant::now()));
            }
            FailureClass::RateLimited
            | FailureClass::Authentication
            | FailureClass::InvalidRequest
            | FailureClass::ContextTooLong
            | FailureClass::ContentRefused => {
                self.breakers.update(&self.key, |breaker| breaker.on_success(admission))
            }
            // The drop reports the cancel.
            FailureClass::DeadlineExceeded
            | FailureClass::Configuration
            | FailureClass::Internal
            | FailureClass::Unspecified => return,
        }
        self.admission = None;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(admission) = self.admission.take() {
            self.breakers.update(&self.key, |breaker| breaker.on_cancel(admission, Instant::now()));
        }
    }
}

fn rejection(key: &Key, again: Instant, now: Instant) -> Failure {
    // The message contains no time: repeated failures are counted by their message.
    let message = format!(
        "the vendor has failed {} times in a row with `{}` and is left alone for a while",
        state::FAILURE_THRESHOLD,
        key.vendor_model
    );
    Failure::new(FailureClass::Overloaded, message).with_retry_at(Some(to_timestamp(again, now)))
}

/// Converts a monotonic instant to wall-clock time.
fn to_timestamp(instant: Instant, now: Instant) -> Timestamp {
    let left = instant.saturating_duration_since(now);
    clock::now().checked_add(left).unwrap_or(Timestamp::MAX)
}

fn timestamp_to_proto(at: Timestamp) -> prost_types::Timestamp {
    prost_types::Timestamp { seconds: at.as_second(), nanos: at.subsec_nanosecond() }
}

const fn state_name(update: PeerUpdate) -> &'static str {
    match update {
        PeerUpdate::Closed => "closed",
        PeerUpdate::Open(_) => "open",
        PeerUpdate::HalfOpen => "half open",
    }
}

/// A duration on the wire.
pub(super) fn duration_to_proto(duration: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(duration.subsec_nanos()).unwrap_or(0),
    }
}

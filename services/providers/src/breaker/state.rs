//! One circuit breaker, without clock and I/O.
//!
//! # Trip condition
//!
//! A closed breaker counts consecutive failures and opens at the fifth.
//!
//! # Recovery
//!
//! An open breaker rejects calls for 10 s. Then it is half open and admits exactly one call, the
//! probe. The result of the probe closes or opens it.

use std::time::Duration;

use tokio::time::Instant;

/// Consecutive failures that open the breaker.
pub(crate) const FAILURE_THRESHOLD: u32 = 5;
/// How long the breaker stays open.
pub(crate) const COOLDOWN: Duration = Duration::from_secs(10);
/// The retry delay for calls that arrive while a probe is in flight: its duration is unknown.
const HALF_OPEN_RETRY_DELAY: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum State {
    #[default]
    Closed,
    Open {
        until: Instant,
    },
    /// A probe is in flight.
    HalfOpen,
}

/// Proof that a call was admitted. Reports of a call from an earlier generation are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Admission {
    generation: u64,
}

/// The state of the breaker for the same model in another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PeerUpdate {
    Closed,
    /// Open for this much longer.
    Open(Duration),
    HalfOpen,
}

#[derive(Debug, Default)]
pub(crate) struct Breaker {
    state: State,
    failures: u32,
    /// Increases with every state change.
    generation: u64,
}

impl Breaker {
    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// Consecutive failures.
    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    /// Whether the breaker can be dropped without loss.
    pub(crate) fn is_pristine(&self) -> bool {
        self.state == State::Closed && self.failures == 0
    }

    /// When a call that arrives now should retry; none when it would be admitted.
    pub(crate) fn refusal(&self, now: Instant) -> Option<Instant> {
        match self.state {
            State::Closed => None,
            State::Open { until } => (until > now).then_some(until),
            State::HalfOpen => Some(now + HALF_OPEN_RETRY_DELAY),
        }
    }

    /// Admits a call, or returns when to retry.
    pub(crate) fn admit(&mut self, now: Instant) -> Result<Admission, Instant> {
        if let Some(again) = self.refusal(now) {
            return Err(again);
        }
        if matches!(self.state, State::Open { .. }) {
            self.transition(State::HalfOpen);
        }
        Ok(Admission { generation: self.generation })
    }

    /// The vendor has started to answer, which is all that a probe tests.
    pub(crate) fn on_start(&mut self, admission: Admission) {
        if self.is_probe(admission) {
            self.close();
        }
    }

    /// The vendor has answered, possibly with a rejection.
    pub(crate) fn on_success(&mut self, admission: Admission) {
        if self.is_probe(admission) {
            self.close();
        } else if admission.generation == self.generation && self.state == State::Closed {
            self.failures = 0;
        }
    }

    /// The vendor failed.
    pub(crate) fn on_failure(&mut self, admission: Admission, now: Instant) {
        if admission.generation != self.generation {
            return;
        }
        self.failures = self.failures.saturating_add(1);
        if self.failures >= FAILURE_THRESHOLD || self.state == State::HalfOpen {
            self.transition(State::Open { until: now + COOLDOWN });
        }
    }

    /// The call was ended from our side and says nothing about the vendor. After a canceled probe,
    /// the next call is the probe.
    pub(crate) fn on_cancel(&mut self, admission: Admission, now: Instant) {
        if self.is_probe(admission) {
            self.transition(State::Open { until: now });
        }
    }

    /// Applies the state of another process. The own probe takes precedence over it.
    pub(crate) fn apply_peer_update(&mut self, update: PeerUpdate, now: Instant) {
        match (update, self.state) {
            (PeerUpdate::Open(left), State::Closed) => {
                self.failures = self.failures.max(FAILURE_THRESHOLD);
                self.transition(State::Open { until: now + left.min(COOLDOWN) });
            }
            (PeerUpdate::Open(left), State::Open { until }) => {
                self.state = State::Open { until: until.max(now + left.min(COOLDOWN)) };
            }
            // The other process probes for both. If it reports nothing more, the next probe is
            // ours.
            (PeerUpdate::HalfOpen, State::Open { until }) => {
                self.state = State::Open { until: until.max(now + COOLDOWN) }
            }
            (PeerUpdate::Closed, State::Open { .. }) => self.close(),
            (PeerUpdate::Closed | PeerUpdate::HalfOpen, State::Closed) | (_, State::HalfOpen) => {}
        }
    }

    fn is_probe(&self, admission: Admission) -> bool {
        admission.generation == self.generation && self.state == State::HalfOpen
    }

    fn close(&mut self) {
        self.failures = 0;
        self.transition(State::Closed);
    }

    fn transition(&mut self, state: State) {
        self.state = state;
        self.generation += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn breaker_after_failures(times: u32, now: Instant) -> Breaker {
        let mut breaker = Breaker::default();
        for _ in 0..times {
            let admission = breaker.admit(now).expect("closed");
            breaker.on_failure(admission, now);
        }
        breaker
    }

    #[test]
    fn fifth_consecutive_failure_opens_the_breaker() {
        let now = Instant::now();
        let mut breaker = breaker_after_failures(4, now);
        assert_eq!(breaker.state(), State::Closed);
        let admission = breaker.admit(now).expect("closed");
        breaker.on_success(admission);
        let mut breaker = breaker_after_failures(4, now);
        let admission = breaker.admit(now).expect("closed");
        breaker.on_failure(admission, now);
        assert_eq!(breaker.state(), State::Open { until: now + COOLDOWN });
        assert_eq!(breaker.admit(now + COOLDOWN - SECOND), Err(now + COOLDOWN));
    }

    #[test]
    fn half_open_breaker_admits_one_probe_that_decides() {
        let now = Instant::now();
        let later = now + COOLDOWN;
        let mut breaker = breaker_after_failures(5, now);
        let probe = breaker.admit(later).expect("the cooldown is over");
        assert_eq!(breaker.admit(later), Err(later + HALF_OPEN_RETRY_DELAY));
        breaker.on_failure(probe, later);
        assert_eq!(breaker.state(), State::Open { until: later + COOLDOWN });
        let probe = breaker.admit(later + COOLDOWN).expect("the cooldown is over");
        breaker.on_start(probe);
        assert!(breaker.is_pristine());
        breaker.on_failure(probe, later);
        assert!(
            breaker.is_pristine(),
            "what the probe says behind its beginning is of an earlier era"
        );
    }

    #[test]
    fn canceled_probe_allows_another_probe() {
        let now = Instant::now();
        let later = now + COOLDOWN;
        let mut breaker = breaker_after_failures(5, now);
        let probe = breaker.admit(later).expect("the cooldown is over");
        breaker.on_cancel(probe, later);
        breaker.admit(later).expect("the next probe");
    }

    #[test]
    fn calls_admitted_before_opening_are_ignored() {
        let now = Instant::now();
        let mut breaker = Breaker::default();
        let late = breaker.admit(now).expect("closed");
        for _ in 0..5 {
            let admission = breaker.admit(now).expect("closed");
            breaker.on_failure(admission, now);
        }
        breaker.on_success(late);
        assert_eq!(breaker.state(), State::Open { until: now + COOLDOWN });
        breaker.admit(now + COOLDOWN).expect("the probe");
        breaker.on_failure(late, now + COOLDOWN);
        breaker.on_success(late);
        assert_eq!(breaker.state(), State::HalfOpen);
    }

    #[test]
    fn peer_update_holds_for_the_rest_of_its_cooldown() {
        let now = Instant::now();
        let mut breaker = Breaker::default();
        breaker.apply_peer_update(PeerUpdate::Open(4 * SECOND), now);
        assert_eq!(breaker.admit(now), Err(now + 4 * SECOND));
        breaker.apply_peer_update(PeerUpdate::Open(999 * SECOND), now);
        assert_eq!(
            breaker.admit(now),
            Err(now + COOLDOWN),
            "no update may keep it open for longer"
        );
        breaker.apply_peer_update(PeerUpdate::HalfOpen, now + COOLDOWN);
        assert_eq!(breaker.admit(now + COOLDOWN), Err(now + 2 * COOLDOWN), "the other one probes");
        breaker.apply_peer_update(PeerUpdate::Closed, now + COOLDOWN + SECOND);
        assert!(breaker.is_pristine());
    }

    #[derive(Debug, Clone)]
    enum Step {
        Admit,
        Start(prop::sample::Index),
        Success(prop::sample::Index),
        Failure(prop::sample::Index),
        Cancel(prop::sample::Index),
        Wait(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let call = any::<prop::sample::Index>;
        prop_oneof![
            4 => Just(Step::Admit),
            1 => call().prop_map(Step::Start),
            1 => call().prop_map(Step::Success),
            6 => call().prop_map(Step::Failure),
            1 => call().prop_map(Step::Cancel),
            2 => (0_u64..12_000).prop_map(Step::Wait),
        ]
    }

    proptest! {
        /// Invariants under any order of calls: at most one probe, no admission while open, and a
        /// closed breaker opens exactly at the fifth consecutive failure.
        #[test]
        fn random_call_orders_keep_the_breaker_invariants(steps in prop::collection::vec(step(), 1..300)) {
            let mut now = Instant::now();
            let mut breaker = Breaker::default();
            let mut under_way: Vec<Admission> = Vec::new();
            let mut probe: Option<Admission> = None;
            for step in steps {
                let before = (breaker.state(), breaker.failures());
                let pick = |under_way: &mut Vec<Admission>, index: &prop::sample::Index| {
                    (!under_way.is_empty()).then(|| under_way.swap_remove(index.index(under_way.len())))
                };
                let ended = match &step {
                    Step::Admit => {
                        match breaker.admit(now) {
                            Ok(admission) => {
                                if before.0 != State::Closed {
                                    prop_assert!(probe.is_none(), "two probes at once");
                                    prop_assert_eq!(breaker.state(), State::HalfOpen);
                                    probe = Some(admission);
                                }
                                under_way.push(admission);
                            }
                            Err(again) => {
                                prop_assert_ne!(before.0, State::Closed);
                                prop_assert!(again > now);
                            }
                        }
                        None
                    }
                    Step::Start(index) => {
                        let admission = (!under_way.is_empty()).then(|| under_way[index.index(under_way.len())]);
                        if let Some(admission) = admission {
                            breaker.on_start(admission);
                        }
                        admission.filter(|admission| probe == Some(*admission))
                    }
                    Step::Success(index) => pick(&mut under_way, index).inspect(|admission| breaker.on_success(*admission)),
                    Step::Failure(index) => pick(&mut under_way, index).inspect(|admission| breaker.on_failure(*admission, now)),
                    Step::Cancel(index) => {
                        pick(&mut under_way, index).inspect(|admission| breaker.on_cancel(*admission, now))
                    }
                    Step::Wait(millis) => {
                        now += Duration::from_millis(*millis);
                        None
                    }
                };
                if ended.is_some() && ended == probe {
                    probe = None;
                    prop_assert_ne!(breaker.state(), State::HalfOpen, "the probe is over");
                }
                prop_assert_eq!(probe.is_some(), breaker.state() == State::HalfOpen);
                if let (State::Closed, State::Open { .. }) = (before.0, breaker.state()) {
                    prop_assert_eq!(before.1, FAILURE_THRESHOLD - 1);
                    prop_assert!(matches!(step, Step::Failure(_)));
                }
                if breaker.state() == State::Closed {
                    prop_assert!(breaker.failures() < FAILURE_THRESHOLD);
                }
            }
        }
    }
}

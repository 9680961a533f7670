//! What is done in a trial, all of it from one number.

use std::{fmt, time::Duration};

use construct_tests::mesh::Service;

/// Disturbances of a trial.
const DISTURBANCES: usize = 8;

/// SplitMix64: small, and the same on every machine.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to - from))
    }

    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// The two networks that services are started in, each with its own way to NATS and to PostgreSQL.
pub(crate) const ZONES: usize = 2;

/// What services talk to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Server {
    Nats,
    PostgreSql,
}

/// One thing that goes wrong, and for how long.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Disturbance {
    /// `kill -9`; another one after a while.
    Kill(Service, Duration),
    /// The same of the second process of a service.
    KillReplica(Service, Duration),
    /// As a deploy does.
    Restart(Service),
    /// NATS is killed, and started with what it had on disk.
    KillNats(Duration),
    /// NATS hangs.
    FreezeNats(Duration),
    /// All connections to PostgreSQL end, in the middle of whatever they did; where the server is the trial's own, it crashes.
    CrashPostgreSql,
    /// A network's connections end, and no new ones can be made.
    Cut(usize, Server, Duration),
    /// Nothing arrives any more, but connections stand.
    Hold(usize, Server, Duration),
    /// Everything takes longer.
    Slow(usize, Server, Duration, Duration),
    /// Reconcilers hear that all others leave, so that each takes everything for its own.
    Lie(Duration),
}

/// A trial.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    /// Each after a pause.
    pub(crate) disturbances: Vec<(Duration, Disturbance)>,
}

impl Plan {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let disturbances = (0..DISTURBANCES).map(|_| (random.millis(100, 2_000), disturbance(&mut random))).collect();
        Self { seed, disturbances }
    }
}

fn disturbance(random: &mut Random) -> Disturbance {
    let inner = [Service::Reconciler, Service::Interpreter, Service::Providers];
    let server = random.one(&[Server::Nats, Server::PostgreSql]);
    let zone = random.below(ZONES as u64) as usize;
    match random.below(14) {
        0..=2 => Disturbance::Kill(random.one(&Service::ALL), random.millis(0, 1_500)),
        3 | 4 => Disturbance::KillReplica(random.one(&inner), random.millis(0, 1_500)),
        5 | 6 => Disturbance::Restart(random.one(&Service::ALL)),
        7 => Disturbance::KillNats(random.millis(0, 1_500)),
        8 => Disturbance::FreezeNats(random.millis(300, 4_000)),
        9 => Disturbance::CrashPostgreSql,
        10 => Disturbance::Cut(zone, server, random.millis(100, 4_000)),
        11 => Disturbance::Hold(zone, server, random.millis(100, 4_000)),
        12 => Disturbance::Slow(zone, server, random.millis(5, 150), random.millis(500, 4_000)),
        _ => Disturbance::Lie(random.millis(500, 3_000)),
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (pause, disturbance)) in self.disturbances.iter().enumerate() {
            let comma = if n > 0 { ", " } else { "" };
            write!(f, "{comma}after {pause:?} {disturbance:?}")?;
        }
        Ok(())
    }
}

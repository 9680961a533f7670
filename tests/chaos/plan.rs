//! The faults of a trial, all derived from one seed.

use std::{fmt, time::Duration};

use construct_tests::{
    mesh::{Disk, Service},
    random::Random,
};

/// The number of disturbances in a trial.
const DISTURBANCES: usize = 8;

/// The number of disorder seeds.
const SEEDS: u64 = 1 << 16;

/// The two networks that services are started in, each with its own paths to NATS and PostgreSQL.
pub(crate) const ZONES: usize = 2;

/// A server that services talk to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Server {
    Nats,
    PostgreSql,
}

/// One fault and its duration.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Disturbance {
    /// `kill -9`, and a new process after a while.
    Kill(Service, Duration),
    /// The same for the second process of a service.
    KillReplica(Service, Duration),
    /// A graceful restart, as in a deployment.
    Restart(Service),
    /// NATS is killed, and restarted with its data.
    KillNats(Duration),
    /// NATS hangs.
    FreezeNats(Duration),
    /// All connections to PostgreSQL end in the middle of their work; a server of the trial itself
    /// crashes.
    CrashPostgreSql,
    /// PostgreSQL's first process is killed, which orphans the others, and the server is restarted
    /// after a while.
    KillPostgreSql(Duration),
    /// A network's connections end, and new ones fail.
    Cut(usize, Server, Duration),
    /// Nothing arrives any more, but connections stay open.
    Hold(usize, Server, Duration),
    /// Everything is delayed.
    Slow(usize, Server, Duration, Duration),
    /// Messages between a network and NATS are delayed, reordered, and some duplicated; the seed
    /// selects them.
    Disorder(usize, u64, Duration),
    /// Reconcilers are told that all others leave, so that each takes all partitions.
    Lie(Duration),
    /// The disk of NATS or of the services is full; then there is space again, and NATS is
    /// restarted.
    FullDisk(Disk, Duration),
    /// The same for PostgreSQL's disk.
    FullPostgreSql(Duration),
    /// The clock of the machine with a service's first process, or with its replica, is moved by so
    /// many seconds while the service runs.
    Jump(Service, bool, i64),
}

/// The kinds of faults in a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Everything,
    /// Full disks, and kills.
    Disks,
    /// Clock jumps, and kills.
    Clocks,
    /// Slack and the scanner are active, and are killed and cut off like everything else.
    Clients,
}

/// The plan of a trial.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) kind: Kind,
    pub(crate) seed: u64,
    /// The disturbances, each after a delay.
    pub(crate) disturbances: Vec<(Duration, Disturbance)>,
}

impl Plan {
    pub(crate) fn new(kind: Kind, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let disturbances = (0..DISTURBANCES)
            .map(|n| (random.millis(100, 2_000), disturbance(kind, n, &mut random)))
            .collect();
        Self { kind, seed, disturbances }
    }
}

/// The `n`th disturbance. Six disks are full, or six clocks jump; both kinds have two kills. With
/// clients, every second disturbance is one of a client.
fn disturbance(kind: Kind, n: usize, random: &mut Random) -> Disturbance {
    match kind {
        Kind::Everything => any(random),
        Kind::Disks if n % 4 == 3 => kill(random),
        Kind::Disks => full_disk(n % 3, random),
        Kind::Clocks if n % 4 == 3 => kill(random),
        Kind::Clocks => clock_jump(random),
        Kind::Clients if n.is_multiple_of(2) => client(random),
        Kind::Clients => client_environment(random),
    }
}

fn client(random: &mut Random) -> Disturbance {
    let service = random.choose(&Service::CLIENTS);
    match random.next_below(4) {
        0..=2 => Disturbance::Kill(service, random.millis(0, 1_500)),
        _ => Disturbance::Restart(service),
    }
}

/// A disturbance around clients. NATS' disk is never full: it may lose events that Slack was told
/// are accepted.
fn client_environment(random: &mut Random) -> Disturbance {
    loop {
        let disturbance = any(random);
        let elsewhere = matches!(
            disturbance,
            Disturbance::FullDisk(..)
                | Disturbance::FullPostgreSql(_)
                | Disturbance::Jump(..)
                | Disturbance::Lie(_)
        );
        if !elsewhere {
            return disturbance;
        }
    }
}

fn kill(random: &mut Random) -> Disturbance {
    Disturbance::Kill(random.choose(&Service::ALL), random.millis(0, 1_500))
}

fn full_disk(which: usize, random: &mut Random) -> Disturbance {
    let length = random.millis(500, 5_000);
    match which {
        0 => Disturbance::FullPostgreSql(length),
        1 => Disturbance::FullDisk(Disk::Services, length),
        _ => Disturbance::FullDisk(Disk::Nats, length),
    }
}

/// By a minute to two days, equally often forward and backward.
fn clock_jump(random: &mut Random) -> Disturbance {
    let service = random.choose(&Service::ALL);
    let (longest, sign) = (random.choose(&[600, 7_200, 172_800]), random.choose(&[1, -1]));
    let seconds = i64::try_from(60 + random.next_below(longest)).unwrap_or_default();
    Disturbance::Jump(
        service,
        service != Service::Gateway && random.next_below(2) == 0,
        sign * seconds,
    )
}

fn any(random: &mut Random) -> Disturbance {
    let inner = [Service::Reconciler, Service::Interpreter, Service::Providers];
    let server = random.choose(&[Server::Nats, Server::PostgreSql]);
    let zone = random.next_below(ZONES as u64) as usize;
    match random.next_below(23) {
        0..=2 => Disturbance::Kill(random.choose(&Service::ALL), random.millis(0, 1_500)),
        3 | 4 => Disturbance::KillReplica(random.choose(&inner), random.millis(0, 1_500)),
        5 | 6 => Disturbance::Restart(random.choose(&Service::ALL)),
        7 => Disturbance::KillNats(random.millis(0, 1_500)),
        8 => Disturbance::FreezeNats(random.millis(300, 4_000)),
        9 => Disturbance::CrashPostgreSql,
        10 => Disturbance::KillPostgreSql(random.millis(0, 1_500)),
        11 => Disturbance::Cut(zone, server, random.millis(100, 4_000)),
        12 => Disturbance::Hold(zone, server, random.millis(100, 4_000)),
        13 => Disturbance::Slow(zone, server, random.millis(5, 150), random.millis(500, 4_000)),
        14..=16 => {
            Disturbance::Disorder(zone, random.next_below(SEEDS), random.millis(1_000, 6_000))
        }
        17 => Disturbance::Lie(random.millis(500, 3_000)),
        18..=20 => {
            let which = random.next_below(3) as usize;
            full_disk(which, random)
        }
        _ => clock_jump(random),
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn seed_plans_the_same_trial_and_lists_its_needs() {
        let plan = |seed| Plan::new(Kind::Everything, seed).to_string();
        assert_eq!(plan(7), plan(7));
        assert_ne!(plan(7), plan(8));
        let disorder = Plan {
            kind: Kind::Everything,
            seed: 0,
            disturbances: vec![(
                Duration::ZERO,
                Disturbance::Disorder(1, 42, Duration::from_secs(2)),
            )],
        };
        assert_eq!(disorder.to_string(), "after 0ns Disorder(1, 42, 2s)");
    }

    #[test]
    fn plans_contain_every_fault() {
        let planned = |kind| {
            let plans = (0..100).flat_map(|seed| Plan::new(kind, seed).disturbances);
            plans
                .map(|(_, disturbance)| {
                    format!("{disturbance:?}").split('(').next().unwrap().to_owned()
                })
                .collect::<BTreeSet<_>>()
        };
        let all = [
            "CrashPostgreSql",
            "Cut",
            "Disorder",
            "FreezeNats",
            "FullDisk",
            "FullPostgreSql",
            "Hold",
            "Jump",
            "Kill",
            "KillNats",
            "KillPostgreSql",
            "KillReplica",
            "Lie",
            "Restart",
            "Slow",
        ];
        let names = |kind| planned(kind).into_iter().collect::<Vec<_>>();
        assert_eq!(names(Kind::Everything), all);
        assert_eq!(names(Kind::Disks), ["FullDisk", "FullPostgreSql", "Kill"]);
        assert_eq!(names(Kind::Clocks), ["Jump", "Kill"]);
        let around = ["FullDisk", "FullPostgreSql", "Jump", "Lie"];
        assert_eq!(
            names(Kind::Clients),
            all.into_iter().filter(|name| !around.contains(name)).collect::<Vec<_>>()
        );
    }
}

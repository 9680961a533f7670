//! The mesh under load while everything it consists of is killed, stopped, cut off, frozen and slowed down at random, while its messages
//! overtake each other, its disks are full and its clocks jump: two processes of each service, NATS and PostgreSQL. After each trial every
//! promise is checked. In trials of their own Slack and the scanner are at work as well.
//!
//! `./dev chaos mesh` runs many trials; the tests run a few. A trial is a seed: `CONSTRUCT_SEED=… ./dev chaos mesh` does the same
//! again, as far as the machine lets it.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails with what it met")]

mod check;
mod clients;
mod load;
mod people;
mod plan;
mod trial;
mod upgrade;

use std::time::Instant;

use construct_tests::{
    clocks,
    random::{self, Random},
};

use crate::plan::{Kind, Plan};

/// Trials when nobody says how many.
const TRIALS: u64 = 2;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_mesh_keeps_its_promises_in_chaos() {
    trials(Kind::Everything, TRIALS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_mesh_keeps_its_promises_on_full_disks() {
    trials(Kind::Disks, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_mesh_keeps_its_promises_when_clocks_jump() {
    if clocks::left_out() {
        eprintln!("LEFT OUT: no clock jumps, as CONSTRUCT_TEST_CLOCKS=off says");
        return;
    }
    trials(Kind::Clocks, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_mesh_and_its_clients_keep_their_promises_in_chaos() {
    trials(Kind::Clients, 1).await;
}

/// Trials of the seeds that the caller has named, or so many.
async fn trials(kind: Kind, some: u64) {
    let seeds: Vec<u64> = match random::named(random::SEED) {
        Some(seed) => vec![seed],
        None => {
            let mut random = Random::new(random::fresh());
            (0..random::named("CONSTRUCT_TRIALS").unwrap_or(some)).map(|_| random.draw()).collect()
        }
    };
    for (n, seed) in (1..).zip(&seeds) {
        let began = Instant::now();
        let plan = Plan::new(kind, *seed);
        eprintln!("trial {n} of {}: {}={seed:#018x} {kind:?}: {plan}", seeds.len(), random::SEED);
        let told = Box::pin(trial::run(&plan)).await;
        eprintln!("trial {n} passed in {:.1} s: {told}", began.elapsed().as_secs_f64());
    }
}

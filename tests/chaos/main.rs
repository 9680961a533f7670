//! The mesh under load while everything it consists of is killed, stopped, cut off, frozen and slowed down at random, while its disks are full
//! and its clocks jump: two processes of each service, NATS and PostgreSQL. After each trial every promise is checked.
//!
//! `./dev chaos mesh` runs many trials; the tests run a few. A trial is a seed: `CONSTRUCT_SEED=… ./dev chaos mesh` does the same
//! again, as far as the machine lets it.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails with what it met")]

mod check;
mod load;
mod plan;
mod trial;
mod upgrade;

use std::time::Instant;

use construct_tests::clocks;

use crate::plan::{Kind, Plan, Random};

/// Trials when nobody says how many.
const TRIALS: u64 = 2;

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    let number = text.strip_prefix("0x").map_or_else(|| text.parse(), |digits| u64::from_str_radix(digits, 16));
    Some(number.unwrap_or_else(|error| panic!("{variable} is not a number: {error}")))
}

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

/// Trials of the seeds that the caller has named, or so many.
async fn trials(kind: Kind, some: u64) {
    let seeds: Vec<u64> = match number("CONSTRUCT_SEED") {
        Some(seed) => vec![seed],
        None => {
            // The low bits of a version 7 UUID are random.
            let mut random = Random::new(uuid::Uuid::now_v7().as_u128() as u64);
            (0..number("CONSTRUCT_TRIALS").unwrap_or(some)).map(|_| random.next()).collect()
        }
    };
    for (n, seed) in (1..).zip(&seeds) {
        let began = Instant::now();
        let plan = Plan::new(kind, *seed);
        eprintln!("trial {n} of {}: CONSTRUCT_SEED={seed:#018x} {kind:?}: {plan}", seeds.len());
        let told = Box::pin(trial::run(&plan)).await;
        eprintln!("trial {n} passed in {:.1} s: {told}", began.elapsed().as_secs_f64());
    }
}

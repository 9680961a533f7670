//! The mesh under load while all its parts are killed, stopped, cut off, frozen and slowed down at
//! random, its messages are reordered, its disks are full and its clocks jump: two processes of
//! each service, NATS and PostgreSQL. After each trial every promise is checked. In some trials
//! Slack and the scanner are active as well.
//!
//! `./dev chaos mesh` runs many trials; the tests run a few. A trial is defined by a seed:
//! `CONSTRUCT_SEED=… ./dev chaos mesh` repeats it, as far as the machine allows.
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

/// Trials of one kind when `CONSTRUCT_TRIALS` is not set.
const TRIALS: u64 = 2;

/// One trial of a kind that the seed selects, so that every run of the tests covers another part.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mesh_under_random_faults_keeps_its_promises() {
    let seed = random::from_env(random::SEED).unwrap_or_else(random::random_seed);
    let kinds = [Kind::Everything, Kind::Disks, Kind::Clients, Kind::Clocks];
    let count = if clocks::are_disabled() { kinds.len() - 1 } else { kinds.len() };
    trial(kinds[usize::try_from(seed % 1024).unwrap() % count], seed).await;
}

/// One test for each kind: `./dev chaos KIND` and the nightly profile.
mod kinds {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn mesh_with_all_faults_keeps_its_promises() {
        trials(Kind::Everything, TRIALS).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn mesh_on_full_disks_keeps_its_promises() {
        trials(Kind::Disks, 1).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn mesh_with_jumping_clocks_keeps_its_promises() {
        if clocks::are_disabled() {
            eprintln!("SKIPPED: no clock jumps, as CONSTRUCT_TEST_CLOCKS=off says");
            return;
        }
        trials(Kind::Clocks, 1).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn mesh_with_slack_and_scanner_keeps_its_promises() {
        trials(Kind::Clients, 1).await;
    }
}

/// Runs the trial of `CONSTRUCT_SEED`, or `CONSTRUCT_TRIALS` trials of random seeds.
async fn trials(kind: Kind, default: u64) {
    let seeds: Vec<u64> = match random::from_env(random::SEED) {
        Some(seed) => vec![seed],
        None => {
            let mut random = Random::new(random::random_seed());
            (0..random::from_env("CONSTRUCT_TRIALS").unwrap_or(default))
                .map(|_| random.draw())
                .collect()
        }
    };
    for seed in seeds {
        trial(kind, seed).await;
    }
}

async fn trial(kind: Kind, seed: u64) {
    let began = Instant::now();
    let plan = Plan::new(kind, seed);
    eprintln!("trial {}={seed:#018x} {kind:?}: {plan}", random::SEED);
    let summary = Box::pin(trial::run(&plan)).await;
    eprintln!("the trial passed in {:.1} s: {summary}", began.elapsed().as_secs_f64());
}

//! Fuzz tests of untrusted input. Each runs for `CONSTRUCT_FUZZ_SECONDS` (default 2);
//! `./dev fuzz NAME --seconds N` runs one for longer. Each stands beside the code that it tests.
//! `proptest` shrinks a failing input. The failure names the seed of all inputs, which
//! `CONSTRUCT_FUZZ_SEED` repeats.

use std::{
    fmt::Debug,
    time::{Duration, Instant},
};

use proptest::{
    strategy::Strategy,
    test_runner::{Config, RngSeed, TestCaseResult, TestRunner},
};
use uuid::Uuid;

/// Cases between two reads of the clock.
const BATCH: u32 = 64;

/// Checks random inputs until the time is over or one fails.
pub(crate) fn fuzz<S: Strategy>(inputs: &S, check: impl Fn(S::Value) -> TestCaseResult)
where
    S::Value: Debug,
{
    let seconds = std::env::var("CONSTRUCT_FUZZ_SECONDS")
        .ok()
        .map_or(2, |text| text.parse().expect("seconds"));
    let seed = std::env::var("CONSTRUCT_FUZZ_SEED")
        .ok()
        .map(|seed| seed.parse::<u64>().expect("a seed is a number"));
    // The low bits of a version 7 UUID are random.
    let seed = seed.unwrap_or_else(|| Uuid::now_v7().as_u128() as u64);
    let config = Config {
        cases: BATCH,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(seed),
        ..Config::default()
    };
    let mut runner = TestRunner::new(config);
    let (began, mut tried) = (Instant::now(), 0);
    while tried == 0 || began.elapsed() < Duration::from_secs(seconds) {
        if let Err(failure) = runner.run(inputs, &check) {
            panic!("{failure}\nCONSTRUCT_FUZZ_SEED={seed} repeats this run");
        }
        tried += BATCH;
    }
    eprintln!("{tried} cases in {:?}", began.elapsed());
}

//! Random tests of what strangers send: they run for `CONSTRUCT_FUZZ_SECONDS` (2), and `./dev fuzz NAME --seconds N` runs one for longer. Each
//! stands beside what it tries; what fails is made smaller by `proptest`, and shown.

use std::{
    fmt::Debug,
    time::{Duration, Instant},
};

use proptest::{
    strategy::Strategy,
    test_runner::{Config, TestCaseResult, TestRunner},
};

/// Cases between two looks at the clock.
const BATCH: u32 = 64;

/// Tries inputs until the time is over or one fails.
pub(crate) fn fuzz<S: Strategy>(inputs: &S, check: impl Fn(S::Value) -> TestCaseResult)
where
    S::Value: Debug,
{
    let seconds = std::env::var("CONSTRUCT_FUZZ_SECONDS").ok().map_or(2, |text| text.parse().expect("seconds"));
    let mut runner = TestRunner::new(Config { cases: BATCH, failure_persistence: None, ..Config::default() });
    let (began, mut tried) = (Instant::now(), 0);
    while tried == 0 || began.elapsed() < Duration::from_secs(seconds) {
        if let Err(failure) = runner.run(inputs, &check) {
            panic!("{failure}");
        }
        tried += BATCH;
    }
    eprintln!("{tried} cases in {:?}", began.elapsed());
}

//! Random tests that look for what nobody thought of: the runner they share, and whole programs.
//! Calls of tools are fuzzed beside their other tests.
//!
//! A case is made from a seed and from nothing else. Each test runs for `CONSTRUCT_FUZZ_SECONDS`
//! (10) with seeds that differ from time to time; what fails is made smaller and shown with its
//! seed, which `CONSTRUCT_FUZZ_SEED` repeats. `./dev fuzz NAME --seconds N` runs one for longer.

mod grammar;
mod programs;

use std::future::Future;
use std::time::{Duration, Instant};

use fastrand::Rng;

/// How long a failing case may be made smaller.
const MINIMIZING: Duration = Duration::from_secs(60);

/// What is fuzzed.
pub(crate) trait Target {
    /// One input.
    type Case;

    /// The name under which `./dev fuzz` knows it.
    const NAME: &'static str;

    /// Makes an input.
    fn make(&self, random: &mut Rng) -> Self::Case;

    /// Tries an input; the error says what is wrong. It may also panic.
    fn check(&self, case: &Self::Case) -> impl Future<Output = Result<(), String>>;

    /// Inputs that are smaller in one thing, the much smaller ones first.
    fn smaller(&self, case: &Self::Case) -> Vec<Self::Case>;

    /// The input, to be read.
    fn show(&self, case: &Self::Case) -> String;
}

/// Tries inputs until the time is over or one fails.
pub(crate) async fn fuzz<T: Target>(target: T) {
    let seed = std::env::var("CONSTRUCT_FUZZ_SEED")
        .ok()
        .map(|seed| seed.parse::<u64>().expect("a seed is a number"));
    let seconds = std::env::var("CONSTRUCT_FUZZ_SECONDS")
        .ok()
        .map_or(10, |text| text.parse().expect("seconds"));
    let (began, mut tried) = (Instant::now(), 0_u64);
    let mut seeds = Rng::new();
    while tried == 0 || seed.is_none() && began.elapsed() < Duration::from_secs(seconds) {
        let seed = seed.unwrap_or_else(|| seeds.u64(..));
        let case = target.make(&mut Rng::with_seed(seed));
        if let Err(problem) = attempt(&target, &case).await {
            let (smallest, problem) = minimized(&target, case, problem).await;
            panic!(
                "{problem}\nCONSTRUCT_FUZZ_SEED={seed} ./dev fuzz {} tries it again; made smaller it is:\n{}",
                T::NAME,
                target.show(&smallest)
            );
        }
        tried += 1;
    }
    eprintln!("{}: {tried} cases in {:?}", T::NAME, began.elapsed());
}

/// Tries an input, with a panic as one more thing that can be wrong.
async fn attempt<T: Target>(target: &T, case: &T::Case) -> Result<(), String> {
    let tried = std::panic::AssertUnwindSafe(target.check(case));
    match futures::FutureExt::catch_unwind(tried).await {
        Ok(result) => result,
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            Err(format!("a panic: {}", text.unwrap_or_default()))
        }
    }
}

async fn minimized<T: Target>(
    target: &T,
    mut case: T::Case,
    mut problem: String,
) -> (T::Case, String) {
    let began = Instant::now();
    'smaller: loop {
        for candidate in target.smaller(&case) {
            if began.elapsed() > MINIMIZING {
                break 'smaller;
            }
            if let Err(found) = attempt(target, &candidate).await {
                (case, problem) = (candidate, found);
                continue 'smaller;
            }
        }
        break;
    }
    (case, problem)
}

/// A list with parts of it left out: halves first, then quarters, down to single items.
pub(crate) fn with_less<I: Clone>(items: &[I]) -> Vec<Vec<I>> {
    let mut less = Vec::new();
    let mut size = items.len().div_ceil(2);
    while size > 0 && less.len() < 400 {
        less.extend((0..items.len()).step_by(size).map(|from| {
            let to = (from + size).min(items.len());
            [&items[..from], &items[to..]].concat()
        }));
        size /= 2;
    }
    less
}

#[test]
fn a_failing_case_is_found_and_made_as_small_as_it_can_be() {
    struct Numbers;
    impl Target for Numbers {
        type Case = Vec<u8>;

        const NAME: &'static str = "numbers";

        fn make(&self, random: &mut Rng) -> Vec<u8> {
            let length = random.usize(..200);
            (0..length).map(|_| random.u8(..)).collect()
        }

        async fn check(&self, case: &Vec<u8>) -> Result<(), String> {
            assert!(!case.contains(&42), "42 is in it");
            Ok(())
        }

        fn smaller(&self, case: &Vec<u8>) -> Vec<Vec<u8>> {
            with_less(case)
        }

        fn show(&self, case: &Vec<u8>) -> String {
            format!("{case:?}")
        }
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let found =
        std::panic::catch_unwind(|| runtime.block_on(fuzz(Numbers))).expect_err("42 comes up");
    let text = found.downcast_ref::<String>().expect("text");
    assert!(text.contains("42 is in it") && text.ends_with("\n[42]"), "{text}");
}

//! Random tests: the shared runner, and whole programs. Tool calls are fuzzed beside their other
//! tests.
//!
//! A case depends on its seed only. Each test runs for `CONSTRUCT_FUZZ_SECONDS` (10) with new
//! seeds. A failing case is minimized and shown with its seed, which `CONSTRUCT_FUZZ_SEED` repeats.
//! `./dev fuzz NAME --seconds N` runs one test for longer.

mod grammar;
mod programs;

use std::future::Future;
use std::time::{Duration, Instant};

use fastrand::Rng;

/// Time limit for minimizing a failing case.
const MINIMIZE_TIMEOUT: Duration = Duration::from_secs(60);

/// The subject of a random test.
pub(crate) trait Target {
    /// One input.
    type Case;

    /// Its name for `./dev fuzz`.
    const NAME: &'static str;

    /// Generates an input.
    fn make(&self, random: &mut Rng) -> Self::Case;

    /// Checks an input; the error describes the problem. It may also panic.
    fn check(&self, case: &Self::Case) -> impl Future<Output = Result<(), String>>;

    /// Inputs that are smaller in one respect, the smallest first.
    fn smaller(&self, case: &Self::Case) -> Vec<Self::Case>;

    /// The input for a reader.
    fn show(&self, case: &Self::Case) -> String;
}

/// Checks inputs until the time is over or one fails.
pub(crate) async fn fuzz<T: Target>(target: T) {
    let seed = std::env::var("CONSTRUCT_FUZZ_SEED")
        .ok()
        .map(|seed| seed.parse::<u64>().expect("a seed is a number"));
    let seconds = std::env::var("CONSTRUCT_FUZZ_SECONDS")
        .ok()
        .map_or(10, |text| text.parse().expect("seconds"));
    let (began, mut checked) = (Instant::now(), 0_u64);
    let mut seeds = Rng::new();
    while checked == 0 || seed.is_none() && began.elapsed() < Duration::from_secs(seconds) {
        let seed = seed.unwrap_or_else(|| seeds.u64(..));
        let case = target.make(&mut Rng::with_seed(seed));
        if let Err(problem) = check_case(&target, &case).await {
            let (smallest, problem) = minimize(&target, case, problem).await;
            panic!(
                "{problem}\nCONSTRUCT_FUZZ_SEED={seed} ./dev fuzz {} repeats it; the minimized case is:\n{}",
                T::NAME,
                target.show(&smallest)
            );
        }
        checked += 1;
    }
    eprintln!("{}: {checked} cases in {:?}", T::NAME, began.elapsed());
}

/// Checks an input; a panic is a problem, too.
async fn check_case<T: Target>(target: &T, case: &T::Case) -> Result<(), String> {
    let checking = std::panic::AssertUnwindSafe(target.check(case));
    match futures::FutureExt::catch_unwind(checking).await {
        Ok(result) => result,
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            Err(format!("a panic: {}", text.unwrap_or_default()))
        }
    }
}

async fn minimize<T: Target>(
    target: &T,
    mut case: T::Case,
    mut problem: String,
) -> (T::Case, String) {
    let began = Instant::now();
    'smaller: loop {
        for candidate in target.smaller(&case) {
            if began.elapsed() > MINIMIZE_TIMEOUT {
                break 'smaller;
            }
            if let Err(new_problem) = check_case(target, &candidate).await {
                (case, problem) = (candidate, new_problem);
                continue 'smaller;
            }
        }
        break;
    }
    (case, problem)
}

/// All versions of a list with a part left out: halves first, then quarters, down to single items.
pub(crate) fn reductions<I: Clone>(items: &[I]) -> Vec<Vec<I>> {
    let mut lists = Vec::new();
    let mut size = items.len().div_ceil(2);
    while size > 0 && lists.len() < 400 {
        lists.extend((0..items.len()).step_by(size).map(|from| {
            let to = (from + size).min(items.len());
            [&items[..from], &items[to..]].concat()
        }));
        size /= 2;
    }
    lists
}

#[test]
fn failing_case_is_found_and_minimized() {
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
            reductions(case)
        }

        fn show(&self, case: &Vec<u8>) -> String {
            format!("{case:?}")
        }
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let panic =
        std::panic::catch_unwind(|| runtime.block_on(fuzz(Numbers))).expect_err("42 comes up");
    let text = panic.downcast_ref::<String>().expect("text");
    assert!(text.contains("42 is in it") && text.ends_with("\n[42]"), "{text}");
}

//! What tests need of the machine.

use std::fmt::Display;

/// Says why something is not tested here, for what can be installed or permitted: bubblewrap, user
/// namespaces, a shell, a program.
///
/// Where all has to be tested that is an error: with `CONSTRUCT_TEST_REQUIRE=1`, or `CI=true` and
/// not `CONSTRUCT_TEST_REQUIRE=0`. Nobody reads the output of tests that pass, and a sandbox that
/// is never tried is no sandbox.
#[track_caller]
pub(crate) fn not_tested(why: impl Display) {
    let is = |name: &str, value: &str| std::env::var(name).is_ok_and(|found| found == value);
    let required = is("CONSTRUCT_TEST_REQUIRE", "1")
        || (is("CI", "true") && !is("CONSTRUCT_TEST_REQUIRE", "0"));
    assert!(!required, "it has to be tested, and cannot be: {why}");
    eprintln!("not tested here: {why}");
}

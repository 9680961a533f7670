//! Requirements of tests on the machine.

use std::fmt::Display;

/// Skips a test that needs something that can be installed or permitted: bubblewrap, user
/// namespaces, a shell, a program. Prints the reason.
///
/// Panics where every test has to run: with `CONSTRUCT_TEST_REQUIRE=1`, or with `CI=true` and not
/// `CONSTRUCT_TEST_REQUIRE=0`. The output of passing tests is not read, so a skipped sandbox test
/// would go unnoticed.
#[track_caller]
pub(crate) fn skip_or_fail(reason: impl Display) {
    let is = |name: &str, value: &str| std::env::var(name).is_ok_and(|actual| actual == value);
    let required = is("CONSTRUCT_TEST_REQUIRE", "1")
        || (is("CI", "true") && !is("CONSTRUCT_TEST_REQUIRE", "0"));
    assert!(!required, "a required test cannot run: {reason}");
    eprintln!("skipped: {reason}");
}

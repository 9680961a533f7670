//! The failing tests of a sample of the suite are listed in `failures.txt`, so that new failures
//! are noticed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::Path,
    pin::pin,
};

use futures::StreamExt as _;

use super::suite::{Suite, Verdict};

/// The sample is every n-th test.
const EVERY: usize = 20;
/// The command that updates the list.
const UPDATE_COMMAND: &str = "UPDATE_DOCS=1 ./dev test -E 'test(conformance_suite_failures)'";

#[tokio::test(flavor = "multi_thread")]
async fn conformance_suite_failures_are_listed() {
    let Some(root) = std::env::var_os("CONSTRUCT_TEST_TEST262") else {
        eprintln!(
            "SKIPPED: CONSTRUCT_TEST_TEST262 is not set, so no test of the conformance suite runs; ./dev test fetches it"
        );
        return;
    };
    let suite = Suite::open(root.into()).expect("an engine");
    let tests = suite.tests("", EVERY).expect("the suite can be read");
    let mut failed = BTreeMap::new();
    let mut running = pin!(suite.run(tests));
    while let Some(ended) = running.next().await {
        if let (test, Verdict::Failed(why)) = ended.expect("no panic") {
            failed.insert(test, why);
        }
    }
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/test262/failures.txt");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&list, listing(failed.keys())).expect("the list can be written");
    }
    let listed = std::fs::read_to_string(&list).unwrap_or_default();
    let listed: BTreeSet<&str> = listed.lines().filter(|line| !line.starts_with('#')).collect();
    let mut differences = String::new();
    for (test, why) in failed.iter().filter(|(test, _)| !listed.contains(test.as_str())) {
        writeln!(differences, "fails and is not listed: {test}: {why}")
            .expect("writing to a string");
    }
    for test in listed.iter().filter(|test| !failed.contains_key(**test)) {
        writeln!(differences, "is listed and does not fail: {test}").expect("writing to a string");
    }
    assert!(
        differences.is_empty(),
        "{} does not match the failures. To update it: {UPDATE_COMMAND}\n{differences}",
        list.display()
    );
}

fn listing<'a>(failed: impl Iterator<Item = &'a String>) -> String {
    let mut text = format!(
        "# Failures of the ECMAScript conformance suite in the sandbox: every {EVERY}th test runs. docs/interpreter.md (The language) gives the reasons.\n\
         # A test compares the sandbox with this list. Made by {UPDATE_COMMAND}\n"
    );
    for test in failed {
        text.push_str(test);
        text.push('\n');
    }
    text
}

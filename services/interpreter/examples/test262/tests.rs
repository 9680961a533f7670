//! Which tests of a sample of the suite fail is committed in `failures.txt`, so that none can begin
//! to fail unseen.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::Path,
    pin::pin,
};

use futures::StreamExt as _;

use super::suite::{Suite, Verdict};

/// The sample is one in so many tests.
const EVERY: usize = 20;
/// How the list is made anew.
const UPDATE: &str = "UPDATE_DOCS=1 ./dev test -E 'test(what_fails_of_the_conformance_suite)'";

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_of_the_conformance_suite_is_listed() {
    let Some(root) = std::env::var_os("CONSTRUCT_TEST_TEST262") else {
        eprintln!(
            "LEFT OUT: CONSTRUCT_TEST_TEST262 is not set, so no test of the conformance suite runs; ./dev test fetches it"
        );
        return;
    };
    let suite = Suite::open(root.into()).expect("there is an engine");
    let tests = suite.tests("", EVERY).expect("the suite can be read");
    let mut failed = BTreeMap::new();
    let mut running = pin!(suite.run(tests));
    while let Some(ended) = running.next().await {
        if let (test, Verdict::Failed(why)) = ended.expect("nothing panics") {
            failed.insert(test, why);
        }
    }
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/test262/failures.txt");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&list, listing(failed.keys())).expect("the list can be written");
    }
    let listed = std::fs::read_to_string(&list).unwrap_or_default();
    let listed: BTreeSet<&str> = listed.lines().filter(|line| !line.starts_with('#')).collect();
    let mut wrong = String::new();
    for (test, why) in failed.iter().filter(|(test, _)| !listed.contains(test.as_str())) {
        writeln!(wrong, "fails and is not listed: {test}: {why}").expect("text takes more");
    }
    for test in listed.iter().filter(|test| !failed.contains_key(**test)) {
        writeln!(wrong, "is listed and does not fail: {test}").expect("text takes more");
    }
    assert!(
        wrong.is_empty(),
        "{} is not what fails. To write it anew: {UPDATE}\n{wrong}",
        list.display()
    );
}

fn listing<'a>(failed: impl Iterator<Item = &'a String>) -> String {
    let mut text = format!(
        "# Of the ECMAScript conformance suite, which of one in {EVERY} tests fail in the sandbox; docs/interpreter.md (The language) says why tests do.\n\
         # A test holds the sandbox to it. Made by {UPDATE}\n"
    );
    for test in failed {
        text.push_str(test);
        text.push('\n');
    }
    text
}

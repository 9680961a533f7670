//! Runs the ECMAScript conformance suite in the sandbox, in the way scripts run there, and prints
//! the results by area. `./dev test262` fetches the suite and starts this: `test262 SUITE [--every
//! N] [--failures] [PART-OF-A-PATH]`. It succeeds whatever fails: the expected failures are listed
//! for the tests that `./dev test` runs, see `tests.rs`.
//!
//! Each test runs the way the product reads scripts: `await` may stand anywhere, source that is not
//! JavaScript is tried as TypeScript, and modules are files. Skipped tests need features that the
//! sandbox omits on purpose (threads, several realms, Intl). Tests for no particular mode run in
//! strict and in sloppy mode, and pass if both pass.

mod suite;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, path::PathBuf, pin::pin};

use futures::StreamExt as _;

use crate::suite::{Suite, Verdict};

#[derive(Default)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (mut root, mut part, mut every, mut failures) = (None, String::new(), 1, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--every" => every = arguments.next().unwrap_or_default().parse()?,
            "--failures" => failures = true,
            _ if root.is_none() => root = Some(PathBuf::from(argument)),
            _ => part = argument,
        }
    }
    let root = root.ok_or_else(|| {
        anyhow::anyhow!("usage: test262 SUITE [--every N] [--failures] [PART-OF-A-PATH]")
    })?;
    let suite = Suite::open(root)?;
    let tests = suite.tests(&part, every)?;
    let (total, mut done) = (tests.len(), 0_usize);
    let mut areas: BTreeMap<String, Counts> = BTreeMap::new();
    let mut running = pin!(suite.run(tests));
    while let Some(ended) = running.next().await {
        let (test, verdict) = ended?;
        let counts = areas.entry(area(&test)).or_default();
        match verdict {
            Verdict::Passed => counts.passed += 1,
            Verdict::Skipped => counts.skipped += 1,
            Verdict::Failed(why) => {
                counts.failed += 1;
                if failures {
                    println!("{test}: {why}");
                }
            }
        }
        done += 1;
        if done.is_multiple_of(1000) {
            eprintln!("{done} of {total}");
        }
    }
    print_table(&areas);
    Ok(())
}

fn print_table(areas: &BTreeMap<String, Counts>) {
    println!("| area | passed | failed | skipped | of those run |\n|---|---:|---:|---:|---:|");
    let mut all = Counts::default();
    let row = |name: &str, counts: &Counts| {
        let run = counts.passed + counts.failed;
        let share = if run == 0 {
            "–".to_owned()
        } else {
            format!("{:.1} %", 100.0 * counts.passed as f64 / run as f64)
        };
        println!(
            "| {name} | {} | {} | {} | {share} |",
            counts.passed, counts.failed, counts.skipped
        );
    };
    for (name, counts) in areas {
        row(name, counts);
        all.passed += counts.passed;
        all.failed += counts.failed;
        all.skipped += counts.skipped;
    }
    row("**all**", &all);
}

/// The area of a test.
fn area(path: &str) -> String {
    let mut parts = path.split('/');
    let (first, second) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    match (first, second) {
        ("language", "expressions" | "statements" | "module-code" | "literals") => {
            format!("language: {second}")
        }
        ("language", _) => "language: the rest".to_owned(),
        (
            "built-ins",
            "Array" | "Object" | "RegExp" | "String" | "Date" | "Function" | "Promise" | "Proxy"
            | "DataView",
        ) => {
            format!("built-ins: {second}")
        }
        ("built-ins", second) if second.starts_with("TypedArray") => {
            "built-ins: typed arrays".to_owned()
        }
        ("built-ins", _) => "built-ins: the rest".to_owned(),
        ("annexB", _) => "annex B".to_owned(),
        (other, _) => other.to_owned(),
    }
}

//! Scripts that try to escape, to persist, to exceed limits, or to mislead. Each is a row of a
//! table with the error that must stop it. After every row the next script must work normally on
//! the same engine. Each table runs several times, and the process must not have grown afterwards.

mod builtins;
mod commands;
mod computation;
mod files;
mod floods;
mod network;
mod recursion;
mod searches;
mod surface;

use super::*;
use crate::sandbox::{Limit, Status};

/// The required end of a script.
#[derive(Debug, Clone, Copy)]
enum Expected {
    /// Completes with this value.
    Value(&'static str),
    /// Throws an uncaught error with this name, whose message contains this text.
    Throws(&'static str, &'static str),
    /// Ends at this limit.
    Exceeds(Limit),
}

use Expected::{Exceeds, Throws, Value as Is};

/// Number of runs of each table; the first one warms up.
const ROUNDS: usize = 2;
/// Maximum growth of the process after the first round, in bytes. A table has dozens of runs, each
/// of which may hold 64 MiB.
const MAX_GROWTH_BYTES: u64 = 16 << 20;
/// Maximum growth of the process at any moment: a run's memory, and what the host holds for it.
const MAX_PEAK_GROWTH_BYTES: u64 = 320 << 20;

impl Bench {
    /// Runs scripts that must end as their row says. After each, a normal script must work.
    async fn withstands(&self, attacks: &[(&str, Expected)]) {
        let before = Memory::now();
        let mut after_warm_up = before;
        for round in 0..ROUNDS {
            let mut failures = Vec::new();
            for (script, expected) in attacks {
                let outcome = self.run(script).await;
                if let Some(difference) = difference(&outcome, *expected) {
                    failures.push(format!("{}\n  {difference}", start(script, 300)));
                }
                self.assert_works_normally(script).await;
            }
            assert!(
                failures.is_empty(),
                "{} of {} failed:\n{}",
                failures.len(),
                attacks.len(),
                failures.join("\n")
            );
            if round == 0 {
                after_warm_up = Memory::now();
            }
        }
        // If tests share a process, its memory says nothing about one test.
        if std::env::var_os("NEXTEST").is_some() {
            after_warm_up.assert_not_grown().await;
            let peak = Memory::now().peak.saturating_sub(before.resident);
            assert!(
                peak < MAX_PEAK_GROWTH_BYTES,
                "the process had grown by {} MiB at its peak",
                peak >> 20
            );
        }
    }

    /// The same for calls that must throw an error with this name, which the script can catch.
    async fn refuses(&self, calls: &[(&str, &'static str)]) {
        let scripts: Vec<(String, Expected)> = calls
            .iter()
            .map(|(call, name)| {
                let script = format!(
                    "let name = 'nothing';
                     try {{ await (async () => {{ {call} }})() }} catch (error) {{ name = error.name }}
                     if (read_file('inside.txt') === 'inside') name"
                );
                (script, Is(name))
            })
            .collect();
        let attacks: Vec<(&str, Expected)> =
            scripts.iter().map(|(script, expected)| (script.as_str(), *expected)).collect();
        self.withstands(&attacks).await;
    }

    /// Asserts that the script after an attack works as if it were the first.
    async fn assert_works_normally(&self, after: &str) {
        let script = "const found = await Promise.all([tools.read_file('inside.txt'), tools.find_file('inside.*')]);
            print(read_file('inside.txt'));
            setTimeout(() => found.push([3, 1, 2].sort().map(String).join('')), 0);
            await new Promise(done => setTimeout(done, 1));
            JSON.stringify([...found, new Map([[1, {a: /b/.test('b')}]]).get(1), typeof leaked])";
        let outcome = self.run(script).await;
        let expected =
            r#"["inside",{"paths":["inside.txt"],"truncated":false},"123",{"a":true},"undefined"]"#;
        let is_same =
            matches!(&outcome.status, Status::Completed { value } if value.display() == expected);
        assert!(
            is_same && outcome.output == "inside\n",
            "after {}:\n{outcome:?}",
            start(after, 300)
        );
    }
}

/// The difference between the actual and the required end, if any.
fn difference(outcome: &Outcome, expected: Expected) -> Option<String> {
    let all = format!("{outcome:?}");
    for leaked in [CANARY, "root:x:0"] {
        if all.contains(leaked) {
            return Some(format!("{leaked} leaked: {}", start(&all, 2000)));
        }
    }
    let matches = match (&outcome.status, expected) {
        (Status::Completed { value }, Is(text)) => value.display() == text,
        (Status::Threw { name, message, .. }, Throws(expected, text)) => {
            name == expected && message.contains(text)
        }
        (Status::LimitExceeded { limit, message, .. }, Exceeds(expected)) => {
            *limit == expected && !message.is_empty()
        }
        _ => false,
    };
    (!matches).then(|| format!("must end with {expected:?}, but: {}", start(&all, 1000)))
}

fn start(text: &str, length: usize) -> &str {
    &text[..text.floor_char_boundary(length)]
}

/// The memory of the process in bytes.
#[derive(Debug, Clone, Copy)]
struct Memory {
    /// Private memory.
    resident: u64,
    /// The peak of all memory.
    peak: u64,
}

impl Memory {
    fn now() -> Self {
        #[cfg(target_env = "gnu")]
        // SAFETY: it takes no pointers, and may be called at any time.
        unsafe {
            libc::malloc_trim(0);
        }
        let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
        let field = |name: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
            line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
        };
        Self { resident: field("RssAnon:"), peak: field("VmHWM:") }
    }

    /// Waits until the process uses about as much as before: background work may not have ended.
    async fn assert_not_grown(&self) {
        let mut grown = 0;
        for _ in 0..200 {
            grown = Memory::now().resident.saturating_sub(self.resident);
            if grown < MAX_GROWTH_BYTES {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the process has grown by {} MiB", grown >> 20);
    }
}

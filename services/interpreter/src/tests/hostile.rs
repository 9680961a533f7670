//! Scripts that try to get out, to stay, to take more than they may, or to mislead. Each is a row
//! of a table, with the error that must stop it. After every row the next script must work as ever
//! on the same engine; each table is run several times over, and the process must not have grown
//! after that.

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

/// How a script must end.
#[derive(Debug, Clone, Copy)]
enum Expected {
    /// With this value.
    Value(&'static str),
    /// With an error of this name that nothing caught, whose message has these words.
    Throws(&'static str, &'static str),
    /// At this limit.
    Exceeds(Limit),
}

use Expected::{Exceeds, Throws, Value as Is};

/// How often each table is run: the first time is to warm up.
const ROUNDS: usize = 2;
/// What the process may have grown after the first round, in bytes. A table has dozens of runs,
/// each of which may hold 64 MiB.
const GROWTH: u64 = 16 << 20;
/// What the process may have grown at any moment: a run's memory, and what the host holds for it.
const PEAK: u64 = 320 << 20;

impl Bench {
    /// Runs scripts that must end as their row says, each followed by one that must work as if
    /// nothing had been.
    async fn withstands(&self, attacks: &[(&str, Expected)]) {
        let before = Memory::now();
        let mut settled = before;
        for round in 0..ROUNDS {
            let mut wrong = Vec::new();
            for (script, expected) in attacks {
                let outcome = self.run(script).await;
                if let Some(difference) = difference(&outcome, *expected) {
                    wrong.push(format!("{}\n  {difference}", start(script, 300)));
                }
                self.works_as_ever(script).await;
            }
            assert!(
                wrong.is_empty(),
                "{} of {} are wrong:\n{}",
                wrong.len(),
                attacks.len(),
                wrong.join("\n")
            );
            if round == 0 {
                settled = Memory::now();
            }
        }
        // Where tests share a process, its memory says nothing about one of them.
        if std::env::var_os("NEXTEST").is_some() {
            settled.has_not_grown().await;
            let peak = Memory::now().peak.saturating_sub(before.resident);
            assert!(peak < PEAK, "at some moment the process had grown by {} MiB", peak >> 20);
        }
    }

    /// The same for calls that must be refused, by an error of this name: the script can catch it
    /// and go on.
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

    /// The script after an attack finds everything as if it were the first.
    async fn works_as_ever(&self, after: &str) {
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

/// What is wrong with how a script ended, if something is.
fn difference(outcome: &Outcome, expected: Expected) -> Option<String> {
    let all = format!("{outcome:?}");
    for leaked in [CANARY, "root:x:0"] {
        if all.contains(leaked) {
            return Some(format!("{leaked} came out: {}", start(&all, 2000)));
        }
    }
    let fits = match (&outcome.status, expected) {
        (Status::Completed { value }, Is(text)) => value.display() == text,
        (Status::Threw { name, message, .. }, Throws(expected, words)) => {
            name == expected && message.contains(words)
        }
        (Status::LimitExceeded { limit, message, .. }, Exceeds(expected)) => {
            *limit == expected && !message.is_empty()
        }
        _ => false,
    };
    (!fits).then(|| format!("must end with {expected:?}, but: {}", start(&all, 1000)))
}

fn start(text: &str, length: usize) -> &str {
    &text[..text.floor_char_boundary(length)]
}

/// What the process takes, in bytes.
#[derive(Debug, Clone, Copy)]
struct Memory {
    /// Private memory.
    resident: u64,
    /// The most there ever was of all memory.
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

    /// Waits until the process takes about what it took: what runs in the background may not have
    /// ended yet.
    async fn has_not_grown(&self) {
        let mut grown = 0;
        for _ in 0..200 {
            grown = Memory::now().resident.saturating_sub(self.resident);
            if grown < GROWTH {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the process has grown by {} MiB", grown >> 20);
    }
}

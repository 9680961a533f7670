//! The limits as docs/interpreter.md lists them, each told to the model by a name or words of its
//! own.

use std::collections::{BTreeMap, HashSet};

use super::*;
use crate::command::{CommandLimits, Confinement};
use crate::report;

/// A way to exceed a limit.
struct Exceeding {
    /// How the limit's row begins.
    row: &'static str,
    /// Sets a limit that is reached quickly.
    set: fn(&mut Limits),
    script: &'static str,
    /// What the model is told, and the row says.
    told: &'static str,
}

const fn exceeding(
    row: &'static str,
    set: fn(&mut Limits),
    script: &'static str,
    told: &'static str,
) -> Exceeding {
    Exceeding { row, set, script, told }
}

/// Limits that are reached as they are.
const AS_IT_IS: fn(&mut Limits) = |_| {};

const EXCEEDING: &[Exceeding] = &[
    exceeding(
        "CPU time of the script",
        |l| l.cpu = Duration::from_millis(50),
        "for (;;);",
        "CpuLimitExceeded",
    ),
    exceeding(
        "time from start to end",
        |l| l.wall = Duration::from_millis(200),
        "await new Promise(done => setTimeout(done, 1e8))",
        "TimeLimitExceeded",
    ),
    exceeding(
        "memory",
        |l| l.memory_bytes = 8 << 20,
        "const all = []; for (;;) all.push(new Uint8Array(1 << 20))",
        "MemoryLimitExceeded",
    ),
    exceeding(
        "memory",
        |l| l.memory_bytes = 8 << 20,
        "try { const all = []; for (;;) all.push(new Uint8Array(1 << 20)) } catch (error) { error.name }",
        "InternalError",
    ),
    exceeding(
        "printed text",
        |l| l.output_bytes = 1000,
        "print('x'.repeat(2000))",
        "more bytes were printed",
    ),
    exceeding(
        "the script's value",
        |l| l.result_bytes = 1000,
        "'x'.repeat(2000)",
        "ResultLimitExceeded",
    ),
    exceeding(
        "host calls and timers",
        |l| l.host_calls = 10,
        "for (;;) pwd()",
        "CallLimitExceeded",
    ),
    exceeding(
        "arguments of a call, its result",
        |l| l.call_bytes = 1000,
        "create_file('made', 'x'.repeat(2000))",
        "CallArgumentsLimitExceeded",
    ),
    exceeding(
        "arguments of a call, its result",
        |l| l.call_bytes = 1000,
        "read_file('long')",
        "CallResultLimitExceeded",
    ),
    exceeding(
        "a command's CPU time",
        AS_IT_IS,
        "execute_command('while :; do :; done & while :; do :; done')",
        r#""limit_exceeded":"cpu""#,
    ),
    exceeding(
        "its memory",
        AS_IT_IS,
        // None of them has too much alone, and each lives on with what it has.
        "execute_command('for i in 1 2 3; do (head -c 60000000 /dev/zero; sleep 60) | tail -n 1 & done; wait')",
        r#""limit_exceeded":"memory""#,
    ),
    exceeding(
        "its processes",
        AS_IT_IS,
        "execute_command('for i in $(seq 60); do sleep 60 & done; wait')",
        r#""limit_exceeded":"processes""#,
    ),
    exceeding(
        "its largest file",
        AS_IT_IS,
        "execute_command('head -c 3000000 /dev/zero > big')",
        r#""signal":"SIGXFSZ""#,
    ),
    exceeding(
        CONFINED,
        AS_IT_IS,
        "execute_command('head -c 9000000 /dev/zero > /tmp/full')",
        "No space left on device",
    ),
    exceeding(
        "nesting of JavaScript",
        AS_IT_IS,
        "(function f() { return 1 + f() })()",
        "RangeError: Maximum call stack size exceeded",
    ),
    exceeding(
        "length of a text",
        AS_IT_IS,
        "'x'.repeat(2 ** 30)",
        "RangeError: invalid string length",
    ),
    exceeding(
        "values in the arguments",
        AS_IT_IS,
        "create_file('made', new Array(20001).fill(0))",
        "CallValuesLimitExceeded",
    ),
    exceeding(
        "timers at the same time",
        AS_IT_IS,
        "for (let i = 0; i < 1001; i++) setTimeout(() => {}, 1e8)",
        "TimerLimitExceeded",
    ),
    exceeding(
        "time of a command",
        AS_IT_IS,
        "execute_command('sleep 60', { timeout_seconds: 1 })",
        r#""timed_out":true"#,
    ),
    exceeding("output with the value", AS_IT_IS, "'x'.repeat(100000)", "bytes are left out here"),
    exceeding(
        "modules",
        AS_IT_IS,
        "for (let i = 0; i < 257; i++) await import(`./m${i}.js`)",
        "ModuleLimitExceeded",
    ),
    exceeding("a module", AS_IT_IS, "await import('./large.js')", "ModuleTooLarge"),
];

/// A limit that only holds where commands are confined.
const CONFINED: &str = "its `/tmp` and `/dev/shm`";

/// Where nothing is told: who is over it waits, or is only started so. How much is journaled, and
/// what is too large to be approved, is tried in `execution::tests`, which have a journal and
/// policies.
const UNTOLD: [&str; 6] = [
    "its processors",
    "calls at the same time",
    "scripts at the same time",
    "results that are journaled",
    "arguments of a call that needs",
    "all scripts of a message",
];

/// The first and the last cell of each row about a limit.
fn rows() -> BTreeMap<&'static str, &'static str> {
    let page = include_str!("../../../../docs/interpreter.md");
    let (_, after) = page.split_once("\n## Limits\n").expect("the section");
    let (section, _) = after.split_once("\n## ").expect("its end");
    let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    let cells = rows.filter_map(|row| Some((row.split_once(" | ")?.0, row.rsplit_once(" | ")?.1)));
    cells.filter(|(first, _)| *first != "what").collect()
}

/// With commands that reach their bounds quickly. None where they are to be confined and cannot be,
/// which is said.
async fn bench(confined: bool) -> Option<Bench> {
    let limits = CommandLimits {
        cpu: Duration::from_secs(1),
        processes: 40,
        memory_bytes: 100 << 20,
        file_bytes: 1 << 20,
        scratch_bytes: 4 << 20,
        ..CommandLimits::default()
    };
    let commands = CommandPolicy {
        confinement: Confinement::AllowUnconfined,
        limits,
        ..CommandPolicy::default()
    };
    if confined {
        let policy = CommandPolicy {
            limits: CommandLimits { file_bytes: 64 << 20, ..commands.limits },
            ..CommandPolicy::default()
        };
        return Bench::with_commands(policy).await;
    }
    let policy = Policy { commands, ..Policy::default() };
    Some(Bench::new(
        policy,
        Egress::new(&[]).expect("an HTTP client"),
        CommandSandbox::unavailable("a test"),
    ))
}

#[tokio::test]
async fn each_limit_is_told_as_the_documentation_says() {
    let rows = rows();
    let (mut tried, mut names) = (HashSet::new(), HashSet::new());
    for Exceeding { row, set, script, told } in EXCEEDING {
        let mut found = rows.iter().filter(|(first, _)| first.starts_with(row));
        let ((first, says), None) = (found.next().expect(row), found.next()) else {
            panic!("{row} is no single row")
        };
        assert!(says.contains(&format!("`{told}`")), "{first}: it says {says:?} and not {told:?}");
        assert!(names.insert(told), "{told} is told of two limits");
        tried.insert(*first);
        let Some(bench) = bench(*row == CONFINED).await else { continue };
        std::fs::write(bench.work("long"), "x".repeat(2000)).expect("written");
        std::fs::write(bench.work("large.js"), " ".repeat((1 << 20) + 1)).expect("written");
        for module in 0..257 {
            std::fs::write(bench.work(&format!("m{module}.js")), "").expect("written");
        }
        let mut limits = bench.limits.clone();
        set(&mut limits);
        let result = report::result("call", &bench.run_within(script, &limits).await, &[], "");
        let all = format!("{}\n{}", result.error, result.output);
        assert!(
            all.contains(told),
            "{script} must be told {told:?}: {}",
            &all[..all.floor_char_boundary(2000)]
        );
        assert!(!bench.work("made").exists(), "{script}: the call is not made");
    }
    let untold = |first: &str| UNTOLD.iter().any(|row| first.starts_with(row));
    let left: Vec<_> =
        rows.keys().filter(|first| !tried.contains(*first) && !untold(first)).collect();
    assert!(left.is_empty(), "no script exceeds {left:?}");
    assert_eq!(
        rows.keys().filter(|first| untold(first)).count(),
        UNTOLD.len(),
        "there are other rows now"
    );
}

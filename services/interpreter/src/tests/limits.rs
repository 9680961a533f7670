//! The limits listed in docs/interpreter.md. Each is reported to the model by its own name or text.

use std::collections::{BTreeMap, HashSet};

use super::*;
use crate::command::{CommandLimits, Confinement};
use crate::report;

/// A script that exceeds a limit.
struct ExceededLimit {
    /// The beginning of the limit's row.
    row: &'static str,
    /// Sets a limit that is reached quickly.
    set: fn(&mut Limits),
    script: &'static str,
    /// The text in the report and in the row.
    report: &'static str,
}

const fn exceeding(
    row: &'static str,
    set: fn(&mut Limits),
    script: &'static str,
    report: &'static str,
) -> ExceededLimit {
    ExceededLimit { row, set, script, report }
}

/// The default limits, which are reached as they are.
const DEFAULT_LIMITS: fn(&mut Limits) = |_| {};

const EXCEEDED_LIMITS: &[ExceededLimit] = &[
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
        DEFAULT_LIMITS,
        "execute_command('while :; do :; done & while :; do :; done')",
        r#""limit_exceeded":"cpu""#,
    ),
    exceeding(
        "its memory",
        DEFAULT_LIMITS,
        // No process exceeds the limit alone, and each keeps its memory.
        "execute_command('for i in 1 2 3; do (head -c 60000000 /dev/zero; sleep 60) | tail -n 1 & done; wait')",
        r#""limit_exceeded":"memory""#,
    ),
    exceeding(
        "its processes",
        DEFAULT_LIMITS,
        "execute_command('for i in $(seq 60); do sleep 60 & done; wait')",
        r#""limit_exceeded":"processes""#,
    ),
    exceeding(
        "its largest file",
        DEFAULT_LIMITS,
        "execute_command('head -c 3000000 /dev/zero > big')",
        r#""signal":"SIGXFSZ""#,
    ),
    exceeding(
        CONFINED,
        DEFAULT_LIMITS,
        "execute_command('head -c 9000000 /dev/zero > /tmp/full')",
        "No space left on device",
    ),
    exceeding(
        "nesting of JavaScript",
        DEFAULT_LIMITS,
        "(function f() { return 1 + f() })()",
        "RangeError: Maximum call stack size exceeded",
    ),
    exceeding(
        "length of a text",
        DEFAULT_LIMITS,
        "'x'.repeat(2 ** 30)",
        "RangeError: invalid string length",
    ),
    exceeding(
        "values in the arguments",
        DEFAULT_LIMITS,
        "create_file('made', new Array(20001).fill(0))",
        "CallValuesLimitExceeded",
    ),
    exceeding(
        "timers at the same time",
        DEFAULT_LIMITS,
        "for (let i = 0; i < 1001; i++) setTimeout(() => {}, 1e8)",
        "TimerLimitExceeded",
    ),
    exceeding(
        "time of a command",
        DEFAULT_LIMITS,
        "execute_command('sleep 60', { timeout_seconds: 1 })",
        r#""timed_out":true"#,
    ),
    exceeding(
        "output with the value",
        DEFAULT_LIMITS,
        "'x'.repeat(100000)",
        "bytes are left out here",
    ),
    exceeding(
        "modules",
        DEFAULT_LIMITS,
        "for (let i = 0; i < 257; i++) await import(`./m${i}.js`)",
        "ModuleLimitExceeded",
    ),
    exceeding("a module", DEFAULT_LIMITS, "await import('./large.js')", "ModuleTooLarge"),
];

/// A limit that applies only if commands are confined.
const CONFINED: &str = "its `/tmp` and `/dev/shm`";

/// Limits without a report: whatever exceeds them waits, or starts with less. `execution::tests`
/// covers the journal limit and the size limit of approvals, because it has a journal and policies.
const UNREPORTED: [&str; 6] = [
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

/// A bench whose commands reach their limits quickly. `None` if they must be confined and cannot
/// be, which is printed.
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
async fn each_limit_is_reported_as_documented() {
    let rows = rows();
    let (mut covered, mut names) = (HashSet::new(), HashSet::new());
    for ExceededLimit { row, set, script, report } in EXCEEDED_LIMITS {
        let mut found = rows.iter().filter(|(first, _)| first.starts_with(row));
        let ((first, says), None) = (found.next().expect(row), found.next()) else {
            panic!("{row} does not match one row")
        };
        assert!(
            says.contains(&format!("`{report}`")),
            "{first}: the row has {says:?} and not {report:?}"
        );
        assert!(names.insert(report), "{report} is the report of two limits");
        covered.insert(*first);
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
            all.contains(report),
            "{script} must report {report:?}: {}",
            &all[..all.floor_char_boundary(2000)]
        );
        assert!(!bench.work("made").exists(), "{script}: the call is not made");
    }
    let is_unreported = |first: &str| UNREPORTED.iter().any(|row| first.starts_with(row));
    let uncovered: Vec<_> =
        rows.keys().filter(|first| !covered.contains(*first) && !is_unreported(first)).collect();
    assert!(uncovered.is_empty(), "no script exceeds {uncovered:?}");
    assert_eq!(
        rows.keys().filter(|first| is_unreported(first)).count(),
        UNREPORTED.len(),
        "the rows have changed"
    );
}

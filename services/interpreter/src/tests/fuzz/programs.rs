//! Whole programs: however a program ends, the sandbox itself never fails, limits apply, and the
//! same program does the same again.

use std::cell::Cell;

use super::super::*;
use super::{Target, fuzz, grammar, reductions};
use crate::sandbox::{Limit, Status};

/// CPU_LIMIT time limit of a program.
const CPU_LIMIT: Duration = Duration::from_millis(150);
/// Wall time limit of a program.
const WALL_LIMIT: Duration = Duration::from_secs(2);
/// Maximum delay after the wall limit; the machine may be busy.
const MAX_DELAY: Duration = Duration::from_secs(20);
/// Number of programs between checks that the engine runs a normal one.
const CHECK_INTERVAL: u32 = 50;

struct Programs {
    count: Cell<u32>,
}

impl Target for Programs {
    type Case = String;

    const NAME: &'static str = "programs";

    fn make(&self, random: &mut fastrand::Rng) -> String {
        grammar::program(random)
    }

    async fn check(&self, program: &String) -> Result<(), String> {
        let first = run_program(program).await?;
        // Concurrent work ends in any order without a journal; time and memory vary a little.
        let nondeterministic = [
            "tools",
            "setTimeout",
            "setInterval",
            "setImmediate",
            "import",
            "execute_command",
            "WeakRef",
            "Finalization",
        ];
        let at_limit = matches!(
            first.status,
            Status::LimitExceeded { limit: Limit::Cpu | Limit::Wall | Limit::Memory, .. }
        );
        if !at_limit && !nondeterministic.iter().any(|word| program.contains(word)) {
            let second = run_program(program).await?;
            let summary = |outcome: &Outcome| {
                format!(
                    "{:?}",
                    (&outcome.status, &outcome.output, &outcome.notes, outcome.host_calls)
                )
            };
            let is_limit = matches!(second.status, Status::LimitExceeded { .. });
            if !is_limit && summary(&first) != summary(&second) {
                return Err(format!(
                    "the second run ends differently:\n{}\n{}",
                    summary(&first),
                    summary(&second)
                ));
            }
        }
        if let Ok(javascript) = engine().strip_types(program).await
            && javascript.lines().count() < program.lines().count()
        {
            return Err(format!("stripping the types removed lines:\n{javascript}"));
        }
        self.count.set(self.count.get() + 1);
        if self.count.get().is_multiple_of(CHECK_INTERVAL) {
            let outcome = Bench::with_files()
                .run("[1, 2].map(String).join() + read_file('inside.txt')")
                .await;
            if !matches!(&outcome.status, Status::Completed { value } if value.display() == "1,2inside")
            {
                return Err(format!("the engine no longer runs a normal program: {outcome:?}"));
            }
        }
        Ok(())
    }

    fn smaller(&self, program: &String) -> Vec<String> {
        let lines: Vec<&str> = program.split_inclusive('\n').collect();
        let characters: Vec<char> = program.chars().collect();
        let of_lines = reductions(&lines).into_iter().map(|lines| lines.concat());
        let of_characters = reductions(&characters).into_iter().map(String::from_iter);
        of_lines.chain(of_characters).filter(|smaller| smaller.len() < program.len()).collect()
    }

    fn show(&self, program: &String) -> String {
        format!("{program}\nas a text: {program:?}")
    }
}

/// Runs the program in its own workspace; the error is a violation.
async fn run_program(program: &str) -> Result<Outcome, String> {
    let mut bench = Bench::with_files();
    std::fs::write(
        bench.work("lib.ts"),
        "export const a: number = 1; export type T = string; export default {a}",
    )
    .expect("written");
    std::fs::write(bench.work("data.json"), "{\"a\": [1]}").expect("written");
    bench.limits = Limits {
        cpu: CPU_LIMIT,
        wall: WALL_LIMIT,
        memory_bytes: 16 << 20,
        output_bytes: 4096,
        result_bytes: 64 << 10,
        host_calls: 100,
        ..bench.limits.clone()
    };
    let began = std::time::Instant::now();
    let outcome = bench.run(program).await;
    if let Status::Internal(why) = &outcome.status {
        return Err(format!("the sandbox failed: {why}"));
    }
    if outcome.output.len() > 4096 || outcome.host_calls > 100 || outcome.notes.len() > 33 {
        return Err(format!("a limit is not enforced: {outcome:?}"));
    }
    if began.elapsed() > WALL_LIMIT + MAX_DELAY {
        return Err(format!("it took {:?}", began.elapsed()));
    }
    if format!("{outcome:?}").contains(CANARY)
        || std::fs::read_to_string(bench.outside("secret")).ok().as_deref() != Some(CANARY)
    {
        return Err(format!("it escaped: {outcome:?}"));
    }
    Ok(outcome)
}

#[tokio::test]
async fn random_programs_never_fail_the_sandbox() {
    fuzz(Programs { count: Cell::new(0) }).await;
}

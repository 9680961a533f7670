//! Whole programs: however a program ends, the sandbox itself never fails, limits hold, and the
//! same program does the same again.

use std::cell::Cell;

use super::super::*;
use super::{Target, fuzz, grammar, with_less};
use crate::sandbox::{Limit, Status};

/// CPU time of one program.
const CPU: Duration = Duration::from_millis(150);
/// From start to end.
const WALL: Duration = Duration::from_secs(2);
/// How long after the wall limit a program may still be there; this machine may be busy.
const LATE: Duration = Duration::from_secs(20);
/// After this many programs the engine must serve an ordinary one.
const LOOKED_AFTER: u32 = 50;

struct Programs {
    tried: Cell<u32>,
}

impl Target for Programs {
    type Case = String;

    const NAME: &'static str = "programs";

    fn make(&self, random: &mut fastrand::Rng) -> String {
        grammar::program(random)
    }

    async fn check(&self, program: &String) -> Result<(), String> {
        let first = ended(program).await?;
        // What runs concurrently ends in any order unless a journal says otherwise; time and memory
        // differ a little.
        let differs = [
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
        if !at_limit && !differs.iter().any(|word| program.contains(word)) {
            let second = ended(program).await?;
            let same = |outcome: &Outcome| {
                format!(
                    "{:?}",
                    (&outcome.status, &outcome.output, &outcome.notes, outcome.host_calls)
                )
            };
            let is_limit = matches!(second.status, Status::LimitExceeded { .. });
            if !is_limit && same(&first) != same(&second) {
                return Err(format!(
                    "run again it ends differently:\n{}\n{}",
                    same(&first),
                    same(&second)
                ));
            }
        }
        if let Ok(javascript) = engine().strip_types(program).await
            && javascript.lines().count() < program.lines().count()
        {
            return Err(format!("without types it has fewer lines:\n{javascript}"));
        }
        self.tried.set(self.tried.get() + 1);
        if self.tried.get().is_multiple_of(LOOKED_AFTER) {
            let outcome = Bench::with_files()
                .run("[1, 2].map(String).join() + read_file('inside.txt')")
                .await;
            if !matches!(&outcome.status, Status::Completed { value } if value.display() == "1,2inside")
            {
                return Err(format!(
                    "the engine does not serve an ordinary program any more: {outcome:?}"
                ));
            }
        }
        Ok(())
    }

    fn smaller(&self, program: &String) -> Vec<String> {
        let lines: Vec<&str> = program.split_inclusive('\n').collect();
        let characters: Vec<char> = program.chars().collect();
        let of_lines = with_less(&lines).into_iter().map(|lines| lines.concat());
        let of_characters = with_less(&characters).into_iter().map(String::from_iter);
        of_lines.chain(of_characters).filter(|smaller| smaller.len() < program.len()).collect()
    }

    fn show(&self, program: &String) -> String {
        format!("{program}\nas a text: {program:?}")
    }
}

/// Runs the program in a workspace of its own; an error is what must never be.
async fn ended(program: &str) -> Result<Outcome, String> {
    let mut bench = Bench::with_files();
    std::fs::write(
        bench.work("lib.ts"),
        "export const a: number = 1; export type T = string; export default {a}",
    )
    .expect("written");
    std::fs::write(bench.work("data.json"), "{\"a\": [1]}").expect("written");
    bench.limits = Limits {
        cpu: CPU,
        wall: WALL,
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
        return Err(format!("a limit does not hold: {outcome:?}"));
    }
    if began.elapsed() > WALL + LATE {
        return Err(format!("it took {:?}", began.elapsed()));
    }
    if format!("{outcome:?}").contains(CANARY)
        || std::fs::read_to_string(bench.outside("secret")).ok().as_deref() != Some(CANARY)
    {
        return Err(format!("it got out: {outcome:?}"));
    }
    Ok(outcome)
}

#[tokio::test]
async fn random_programs_never_make_the_sandbox_fail() {
    fuzz(Programs { tried: Cell::new(0) }).await;
}

//! The cost of confining a command: the shortest command, without confinement, under bubblewrap,
//! and under bubblewrap and Landlock.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use construct_interpreter::{
    command::{CommandPolicy, CommandSandbox, Confinement},
    tools::{CallContext, Egress, Policy, Toolbox},
    workspace::Workspace,
};
use serde_json::json;

use crate::figures::{Figures, Row, percentile};

/// Commands per variant and round.
const COMMANDS: usize = 100;

/// Measures in `rounds` alternating rounds, because the machine's speed drifts.
pub(crate) async fn measure(rounds: usize) -> anyhow::Result<Figures> {
    let folder = tempfile::tempdir()?;
    // Built in the same folder; it puts commands under Landlock.
    let interpreter = std::env::current_exe()?.with_file_name("construct-interpreter");
    let bubblewrap = CommandSandbox::detect(Path::new("/nonexistent")).await;
    let landlock = CommandSandbox::detect(&interpreter).await;
    ensure!(landlock.describe().contains("Landlock (ABI"), "{}", landlock.describe());
    let variants = [CommandSandbox::unavailable("a benchmark"), bubblewrap, landlock];
    let toolboxes = variants.map(|sandbox| toolbox(folder.path(), sandbox));
    let mut times: [Vec<Duration>; 3] = Default::default();
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        for (toolbox, times) in toolboxes.iter().zip(&mut times) {
            let toolbox = toolbox.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))?;
            for _ in 0..COMMANDS {
                let started = Instant::now();
                let result =
                    toolbox.call("execute_command", json!(["true"]), &CallContext::default()).await;
                times.push(started.elapsed());
                let result = result.context("the command did not run")?;
                ensure!(result["exit_code"] == 0, "the command failed: {result}");
            }
        }
    }
    let [mut unconfined, mut bubblewrap, mut landlock] = times;
    let mut rows = Vec::new();
    for (name, share) in [("p50", 0.5), ("p99", 0.99)] {
        let floor = percentile(&mut unconfined, share);
        let without = percentile(&mut bubblewrap, share);
        rows.push(
            Row::millis(
                format!("`true` under bubblewrap and Landlock, {name}"),
                percentile(&mut landlock, share),
            )
            .floor(floor),
        );
        rows.push(
            Row::millis(format!("`true` under bubblewrap alone, {name}"), without).floor(floor),
        );
    }
    let what = format!(
        "{} commands per variant, one after the other; the floor is the same command without confinement",
        rounds * COMMANDS
    );
    Ok(Figures { bench: "commands", what, rows })
}

fn toolbox(folder: &Path, sandbox: CommandSandbox) -> anyhow::Result<Toolbox> {
    let commands =
        CommandPolicy { confinement: Confinement::AllowUnconfined, ..CommandPolicy::default() };
    let policy = Policy { commands, ..Policy::default() };
    Ok(Toolbox::new(Workspace::open(folder)?, policy, Egress::new(&[])?, sandbox))
}

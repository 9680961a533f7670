//! The reconciler: one actor per active task. Only it changes a task's state.

use std::process::ExitCode;

fn main() -> ExitCode {
    construct_runtime::main("reconciler", construct_reconciler::run)
}

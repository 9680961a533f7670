//! The gateway's process.

use std::process::ExitCode;

fn main() -> ExitCode {
    construct_runtime::main("gateway", construct_gateway::run)
}

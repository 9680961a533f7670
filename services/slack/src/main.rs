//! The Slack service's process.

use std::process::ExitCode;

fn main() -> ExitCode {
    construct_runtime::main("slack", construct_slack::run)
}

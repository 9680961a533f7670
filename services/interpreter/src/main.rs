//! The interpreter: runs JavaScript in Wasm, hosts the tools, confines files and commands.

use std::process::ExitCode;

fn main() -> ExitCode {
    construct_runtime::main("interpreter", construct_interpreter::run)
}

//! The interpreter: runs JavaScript in Wasm, hosts the tools, confines files and commands.

use std::process::ExitCode;

use construct_interpreter::confine;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|mode| mode == confine::MODE) {
        return confine::main(arguments);
    }
    construct_runtime::main("interpreter", construct_interpreter::run)
}

//! The gateway's process; `construct-gateway migrate` only brings the database's schema up to date, and `first-key` makes the
//! operator's first key.

use std::process::ExitCode;

use construct_gateway::{first_key, migrate};

fn main() -> ExitCode {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    if arguments.get(1).is_some_and(|mode| mode == migrate::MODE) {
        arguments.remove(1);
        return construct_runtime::main_of("gateway", arguments, migrate::run);
    }
    if arguments.get(1).is_some_and(|mode| mode == first_key::MODE) {
        arguments.remove(1);
        return construct_runtime::main_of("gateway", arguments, first_key::run);
    }
    construct_runtime::main("gateway", construct_gateway::run)
}
